"""Parts of files that a thread reads into the system's cache, ahead of what uses them through a mapping."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from drivetrain.checkpoint.mapped_file import MappedRange

_AT_ONCE = 1 << 20  # as much as a pipe holds at most for users without further rights


class ReadAhead:
    """Reads parts of files into the system's cache, one after the other in the order in which they are asked for.

    On Linux nothing is copied: a file's pages go through a pipe to nowhere, and the system reads as far ahead as for
    any file that is read from its beginning on. `madvise` takes ten times as much of a processor's time, and fills the
    cache with small pages, which cost the reader twenty times as many page faults (Linux 6.18). Elsewhere the system is
    asked for the pages, and may read them meanwhile.
    """

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._threads: ThreadPoolExecutor | None = None
        self._process = os.getpid()
        self._parts: dict[int, futures.Future[None] | None] = {}

    def ask(self, number: int, ranges: Sequence[MappedRange]) -> None:
        """Have parts of files read, unless they are on their way.

        Args:
            number: What stands for them.
            ranges: The parts.
        """
        if self._process != os.getpid():  # a fork has none of the threads
            self._begin()
        if number in self._parts:
            return
        if not hasattr(os, "splice"):
            _advise(ranges)
            self._parts[number] = None
            return
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, "drivetrain-read-ahead")
        self._parts[number] = self._threads.submit(_read, ranges)

    def wait(self, number: int) -> None:
        """Wait until what was asked for is in memory.

        Args:
            number: What stands for it.
        """
        found = self._parts.get(number)
        if found is not None and self._process == os.getpid():
            found.result()

    def forget(self, number: int) -> None:
        """Let parts be read again when they are asked for again.

        Args:
            number: What stands for them.
        """
        self._parts.pop(number, None)

    def __reduce__(self) -> tuple[Any, ...]:
        return ReadAhead, ()


def _advise(ranges: Sequence[MappedRange]) -> None:
    for each in ranges:
        each.file.will_need(each.start, each.end)


def _read(ranges: Sequence[MappedRange]) -> None:
    try:
        with _pipe_to_nowhere() as (source, sink, nowhere):
            for each in ranges:
                with open(each.file.path, "rb", buffering=0) as file:
                    position = each.start
                    while position < each.end:
                        count = os.splice(file.fileno(), sink, min(_AT_ONCE, each.end - position), offset_src=position)
                        if not count:
                            break  # it was truncated, which is found where it is used
                        position += count
                        while count:
                            count -= os.splice(source, nowhere, count)
    except OSError:  # a file system without it, or a file that is gone, which is found where it is used
        _advise(ranges)


@contextlib.contextmanager
def _pipe_to_nowhere() -> Iterator[tuple[int, int, int]]:
    import fcntl  # not on every system

    source, sink = os.pipe()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        with contextlib.suppress(OSError):  # a user has so many pages of pipes and no more
            fcntl.fcntl(sink, fcntl.F_SETPIPE_SZ, _AT_ONCE)
        yield source, sink, nowhere
    finally:
        for each in (source, sink, nowhere):
            os.close(each)
