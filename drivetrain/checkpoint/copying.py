"""Memory copied to memory in several threads, at once or beside something else."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence

from torch import Tensor

from drivetrain.checkpoint.tensor_file import run_parallel

Pair = tuple[str, Tensor, Tensor]
"""A name, where to, and what is copied, each in one piece of memory on the CPU."""


class Copying:
    """Copies that are made by whichever threads come to `finish`, each taking the next piece.

    The C library goes past the caches, which the copy would only evict, and releases the GIL; a `copy_` for each
    tensor took three times as long (torch 2.13), since its threads also wait for each other after every tensor.

    Args:
        pairs: What to copy.
        piece: Bytes that a thread takes at a time.
    """

    def __init__(self, pairs: Sequence[Pair], piece: int) -> None:
        self._sources = [(name, source, _version(source)) for name, _, source in pairs]
        self._pieces: list[tuple[int, int, int]] = []
        for _, target, source in reversed(pairs):
            size, to, at = source.numel() * source.itemsize, target.data_ptr(), source.data_ptr()
            for start in range(0, size, piece):
                self._pieces.append((to + start, at + start, min(piece, size - start)))
        self._left = len(self._pieces)
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._changed: list[str] = []
        if not self._pieces:
            self._end()

    def finish(self, threads: int = 0) -> list[str]:
        """Copy what is left, and return when all is copied. Several threads may call it.

        Args:
            threads: How many to start for it. Without, the calling one copies, which must not be the main one where
                others wait too: it could be interrupted with a piece in hand.

        Returns:
            Names of what was changed in place meanwhile, so that its copy is of no use.
        """
        if not self._done.is_set():
            if threads:
                run_parallel([self._work] * max(2, threads), max(2, threads))
            else:
                self._work()
            self._done.wait()
        return self._changed

    def _work(self) -> None:
        while True:
            try:
                piece = self._pieces.pop()
            except IndexError:
                return
            ctypes.memmove(*piece)
            with self._lock:
                self._left -= 1
                is_last = self._left == 0
            if is_last:
                self._end()

    def _end(self) -> None:
        try:  # before those that wait continue, and may change them
            self._changed = [name for name, source, version in self._sources if _version(source) != version]
        finally:
            self._sources.clear()
            self._done.set()


def _version(tensor: Tensor) -> int:
    """How often a tensor was changed in place; always 0 where torch does not count."""
    return 0 if tensor.is_inference() else tensor._version
