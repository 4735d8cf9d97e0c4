"""Seeing which global generators were drawn from, and putting them back, in less time than a batch takes to be read."""

from __future__ import annotations

import ctypes
import pickle
import random
from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np
import torch

_WORDS = 624  # of a Mersenne Twister, beside its position


class KeptGenerators:
    """Python's, NumPy's and torch's CPU generator: which of them have changed since a moment, and the way back to it.

    The state of Python's and NumPy's is copied word by word where it is asked for. Their memory, where it is as
    expected, is compared and copied in a hundredth of the time.

    As a context, it puts back in the end what the body has changed; it can be entered again.
    """

    def __init__(self) -> None:
        self._kept: dict[str, _Kept] = {"python": _KeptPython(), "numpy": _KeptNumpy(), "torch": _KeptTorch()}

    def take(self) -> None:
        """Note the states."""
        for each in self._kept.values():
            each.take()

    def changed(self, names: Iterable[str] | None = None) -> list[str]:
        """Those that are not as they were when they were noted: which have drawn, or were seeded.

        Args:
            names: Which of `GENERATORS` to compare; all of them if None.
        """
        return [name for name in (self._kept if names is None else names) if self._kept[name].is_changed()]

    def put_back(self) -> None:
        """Restore the states that were noted."""
        for each in self._kept.values():
            each.put_back()

    def __enter__(self) -> None:
        self.take()

    def __exit__(self, *_: object) -> None:
        self.put_back()

    def __reduce__(self) -> tuple[Any, ...]:
        return KeptGenerators, ()


class _Kept(Protocol):
    """The state of one generator."""

    def take(self) -> None:
        """Note the state."""

    def is_changed(self) -> bool:
        """Whether it is another one now."""

    def put_back(self) -> None:
        """Restore it."""


class _KeptTorch:
    """The state of torch's CPU generator."""

    def take(self) -> None:
        self._state = torch.default_generator.get_state()

    def is_changed(self) -> bool:
        now = torch.default_generator.get_state()
        return _bytes_of(now) != _bytes_of(self._state)  # torch.equal takes several times as long

    def put_back(self) -> None:
        torch.default_generator.set_state(self._state)


class _KeptPython:
    """The state of `random`: whole, or as the memory of its generator in CPython: a position and the words."""

    _SIZE = 4 * (_WORDS + 1)

    def __init__(self) -> None:
        self._generator: Any = random.seed.__self__  # type: ignore[attr-defined]
        self._address = id(self._generator) + object.__basicsize__
        version, (*words, position), _ = self._generator.getstate()
        expected = np.array([position, *words], dtype=np.uint32).tobytes()
        self._is_plain = version == 3 and ctypes.string_at(self._address, self._SIZE) == expected
        self._state: Any = None

    def _now(self) -> Any:
        if self._is_plain:
            # A normal number that waits is no part of the memory.
            return ctypes.string_at(self._address, self._SIZE), self._generator.gauss_next
        return self._generator.getstate()

    def take(self) -> None:
        self._state = self._now()

    def is_changed(self) -> bool:
        return bool(self._now() != self._state)

    def put_back(self) -> None:
        if self._is_plain:
            memory, self._generator.gauss_next = self._state
            ctypes.memmove(self._address, memory, self._SIZE)
        else:
            self._generator.setstate(self._state)


class _KeptNumpy:
    """The state of `numpy.random`: whole, and as the memory of its generator where this is all there is to it."""

    _SIZE = 4 * (_WORDS + 1)

    def __init__(self) -> None:
        self._generator: Any = None
        self._address = 0
        self._whole: Any = None
        self._bytes = b""

    def take(self) -> None:
        generator = _bit_generator()
        if generator is self._generator and self._bytes and self._memory() == self._bytes:
            return  # what was taken before is good
        self._generator, self._whole, self._bytes = generator, np.random.get_state(legacy=False), b""
        if self._whole["bit_generator"] == "MT19937" and not self._whole["has_gauss"]:  # else a number waits elsewhere
            words, position = self._whole["state"]["key"], self._whole["state"]["pos"]
            self._address = generator.ctypes.state_address
            read = self._memory()
            if read == words.astype(np.uint32).tobytes() + int(position).to_bytes(4, "little"):
                self._bytes = read

    def is_changed(self) -> bool:
        if self._bytes and _bit_generator() is self._generator:
            return self._memory() != self._bytes
        return pickle.dumps(np.random.get_state(legacy=False)) != pickle.dumps(self._whole)

    def put_back(self) -> None:
        if self._bytes and _bit_generator() is self._generator:
            if self._memory() == self._bytes:
                return
            np.random.seed(0)  # so that no normal number waits
            ctypes.memmove(self._address, self._bytes, self._SIZE)
        else:
            np.random.set_state(self._whole)

    def _memory(self) -> bytes:
        return ctypes.string_at(self._address, self._SIZE)


def _bytes_of(state: torch.Tensor) -> bytes:
    return ctypes.string_at(state.data_ptr(), state.numel())


def _bit_generator() -> Any:
    module: Any = np.random  # whose types leave the function out
    return module.get_bit_generator()
