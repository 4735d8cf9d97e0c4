"""Which of a process's tensors lie in which file, and in what order."""

from __future__ import annotations

import os
from collections.abc import Sequence

from torch.distributed.checkpoint.planner import WriteItem

from drivetrain.checkpoint.index import entry_of
from drivetrain.checkpoint.tensor_file import aligned

LARGEST_FILE = 2 << 30
"""Bytes that a file has about at most."""

LARGEST_LINKED = 256 << 20
"""The same of files that may be linked, since one tensor that does change has all of its file written."""

# Several files on one process let it hash on several cores; small ones only cost.
_SMALLEST_SPLIT = 64 << 20
_FILES_AT_ONCE = 4


def files_of(items: Sequence[WriteItem], largest: int = LARGEST_FILE) -> list[list[WriteItem]]:
    """Spread a process's items over files of about the same size, each in the order that the file has them in.

    Args:
        items: What the process writes.
        largest: Bytes that a file has about at most.
    """
    sizes = [entry_of(item).nbytes for item in items]
    limit = min(largest, max(_SMALLEST_SPLIT, -(-sum(sizes) // _FILES_AT_ONCE)))
    files: list[list[WriteItem]] = []
    room = 0
    for item, size in zip(items, sizes, strict=True):
        if not files or (size > room and room < limit):
            files.append([])
            room = limit
        files[-1].append(item)
        room -= size
    return [[file[position] for position in aligned(map(entry_of, file))] for file in files]


def workers() -> int:
    """How many files are written or read at once."""
    return min(_FILES_AT_ONCE, os.cpu_count() or 1)
