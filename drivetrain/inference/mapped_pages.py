"""Weights that a model on the CPU uses straight from their files."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from torch import nn

from drivetrain.checkpoint.mapped_file import MappedFile, MappedRange, mapped_range, merged, times_changed
from drivetrain.inference.groups import Group


class MappedPages:
    """Reads files ahead of a model's forward, and takes out of memory what it has used.

    Args:
        groups: The groups of weights, all of which are parts of files.
        budget: Bytes of the first groups that stay in memory once they are there.
        cache: Whether the system's cache of files may keep what is beyond them.
    """

    def __init__(self, groups: Sequence[Group], budget: int, cache: bool) -> None:
        self._cache = cache
        self._ranges: list[list[MappedRange]] = []
        self._files: list[list[MappedFile]] = []
        self._stays: list[bool] = []
        self._fetched: set[int] = set()
        self._readers: dict[int, threading.Thread] = {}
        self._rest = [group.rest for group in groups]
        self._changes = [[*map(times_changed, rest)] for rest in self._rest]
        for group in groups:
            # Not buffers: batch norms change theirs without torch counting it, and what was changed is in no file.
            weights = [tensor for tensor in group.rest if isinstance(tensor, nn.Parameter)]
            self._ranges.append(merged(found for found in map(mapped_range, weights) if found is not None))
            held = (found.file for found in map(mapped_range, group.rest) if found is not None)
            self._files.append(list(dict.fromkeys(held)))
            budget -= group.nbytes
            self._stays.append(budget >= 0)

    def prefetch(self, numbers: Sequence[int]) -> None:
        """Have groups read meanwhile, unless they are here to stay."""
        for number in numbers:
            if number not in self._fetched and number not in self._readers:
                # One for each time: threads that are kept would be missing after a fork.
                self._readers[number] = threading.Thread(target=self._read, args=(number,), daemon=True)
                self._readers[number].start()

    def _read(self, number: int) -> None:
        for each in self._ranges[number]:
            each.file.bring_in(each.start, each.end)

    def enter(self, number: int) -> None:
        """Check that a group's files are as they were, and wait until it is here, or read it."""
        for file in self._files[number]:
            file.check_unchanged()
        self.prefetch([number])
        if reader := self._readers.get(number):
            reader.join()
        if self._stays[number]:
            self._fetched.add(number)

    def leave(self, number: int) -> None:
        """Take a group out of memory, unless it stays, or was changed in place and is in no file."""
        self._readers.pop(number, None)
        if self._stays[number] or [*map(times_changed, self._rest[number])] != self._changes[number]:
            return
        for each in self._ranges[number]:
            each.file.drop(each.start, each.end, cache=not self._cache)

    def remove(self) -> None:
        """Nothing: weights are where they always are."""
