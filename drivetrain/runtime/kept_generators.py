"""Putting the global generators back once for each batch that is read, which must not take as long as reading it."""

from __future__ import annotations

import ctypes
import random
from typing import Any

import numpy as np
import torch

_MERSENNE_TWISTER = 625 * 4  # bytes of NumPy's: 624 words and a position


class KeptGenerators:
    """A context that puts Python's, NumPy's and torch's CPU generator back to where they were; it can be entered again.

    NumPy takes longest: it copies its state word by word. Where nothing was drawn from it since the context was left,
    the copy taken before is good, which its memory shows (`BitGenerator.ctypes.state_address`).
    """

    def __init__(self) -> None:
        self._numpy = _KeptNumpy()

    def __enter__(self) -> None:
        self._python, self._torch = random.getstate(), torch.default_generator.get_state()
        self._numpy.take()

    def __exit__(self, *_: object) -> None:
        random.setstate(self._python)
        torch.default_generator.set_state(self._torch)
        self._numpy.put_back()

    def __reduce__(self) -> tuple[Any, ...]:
        return KeptGenerators, ()


class _KeptNumpy:
    """The state of `numpy.random`: whole, and as the bytes of its generator where these are all there is to it."""

    def __init__(self) -> None:
        self._generator: Any = None
        self._address = 0
        self._whole: Any = None
        self._bytes = b""

    def take(self) -> None:
        """Note the state."""
        generator = _bit_generator()
        if generator is self._generator and self._bytes and self._memory() == self._bytes:
            return
        self._generator, self._whole, self._bytes = generator, np.random.get_state(legacy=False), b""
        if self._whole["bit_generator"] == "MT19937" and not self._whole["has_gauss"]:  # else a number waits elsewhere
            words, position = self._whole["state"]["key"], self._whole["state"]["pos"]
            self._address = generator.ctypes.state_address
            read = self._memory()
            if read == words.astype(np.uint32).tobytes() + int(position).to_bytes(4, "little"):
                self._bytes = read

    def put_back(self) -> None:
        """Restore it."""
        if self._bytes and _bit_generator() is self._generator:
            np.random.seed(0)  # so that no normal number waits
            ctypes.memmove(self._address, self._bytes, _MERSENNE_TWISTER)
        else:
            np.random.set_state(self._whole)

    def _memory(self) -> bytes:
        return ctypes.string_at(self._address, _MERSENNE_TWISTER)


def _bit_generator() -> Any:
    module: Any = np.random  # whose types leave the function out
    return module.get_bit_generator()
