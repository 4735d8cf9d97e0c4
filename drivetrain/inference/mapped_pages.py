"""Weights that a model on the CPU uses straight from their files."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from drivetrain.checkpoint.mapped_file import MappedFile, MappedRange, mapped_range, merged, times_changed
from drivetrain.checkpoint.read_ahead import ReadAhead
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
        self._ahead = ReadAhead()
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

    def enter(self, number: int, ahead: Sequence[int]) -> None:
        """Check that a group's files are as they were, and wait until it is read, and have others read meanwhile."""
        for file in self._files[number]:
            file.check_unchanged()
        for each in (number, *ahead):
            if each not in self._fetched:
                self._ahead.ask(each, self._ranges[each])
        self._ahead.wait(number)
        if self._stays[number]:
            self._fetched.add(number)

    def leave(self, number: int) -> None:
        """Take a group out of memory, unless it stays, or was changed in place and is in no file."""
        self._ahead.forget(number)
        if self._stays[number] or [*map(times_changed, self._rest[number])] != self._changes[number]:
            return
        for each in self._ranges[number]:
            each.file.drop(each.start, each.end, cache=not self._cache)

    def remove(self) -> None:
        """Nothing: weights are where they always are."""
