"""Weights that a model on the CPU uses straight from their files."""

from __future__ import annotations

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
        self._asked_for: set[int] = set()
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
            if number not in self._fetched and number not in self._asked_for:
                self._asked_for.add(number)
                for each in self._ranges[number]:
                    each.file.will_need(each.start, each.end)

    def enter(self, number: int) -> None:
        """Check that a group's files are as they were, and read it unless it is on its way."""
        for file in self._files[number]:
            file.check_unchanged()
        self.prefetch([number])
        if self._stays[number]:
            self._fetched.add(number)

    def leave(self, number: int) -> None:
        """Take a group out of memory, unless it stays, or was changed in place and is in no file."""
        self._asked_for.discard(number)
        if self._stays[number] or [*map(times_changed, self._rest[number])] != self._changes[number]:
            return
        for each in self._ranges[number]:
            each.file.drop(each.start, each.end, cache=not self._cache)

    def remove(self) -> None:
        """Nothing: weights are where they always are."""
