"""Signals during a run: Ctrl-C, and those by which a scheduler preempts a job."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import FrameType
from typing import Any

from drivetrain.runtime.terminal import print_text

GRACE_SECONDS = 2.0
"""How long a second Ctrl-C leaves the main thread to raise `KeyboardInterrupt`, before the process ends as it is."""

_END = b"\0"
_PREEMPTING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))


class Interruption:
    """Signals during a run: Ctrl-C once ends it after a step, twice at once; SIGTERM and SIGUSR1 preempt it.

    A preempted run saves a checkpoint after the step under way and exits with a code that asks to be started again:
    SIGTERM is what a scheduler sends before it kills, SIGUSR1 what SLURM's `--signal` sends on request.

    Args:
        on_request: Called at the first signal.
    """

    def __init__(self, on_request: Callable[[], None]) -> None:
        self.requested = False
        self.preempted = False
        self._on_request = on_request
        self._raised = threading.Event()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Take the signals over in the body; only in the main thread, and only those without a handler."""
        before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number, handler in ((signal.SIGINT, self._interrupt), *((n, self._preempt) for n in _PREEMPTING)):
                if signal.getsignal(number) in (signal.default_int_handler, signal.SIG_DFL):
                    before[number] = signal.signal(number, handler)
        try:
            if signal.SIGINT in before and hasattr(os, "register_at_fork"):  # not on Windows
                with self._native_code_watched():
                    yield
            else:
                yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            self._raised.set()
            raise KeyboardInterrupt
        self.requested = True
        self._on_request()

    def _preempt(self, number: int, frame: FrameType | None) -> None:
        self.preempted = True
        self._on_request()

    @contextmanager
    def _native_code_watched(self) -> Iterator[None]:
        """End the process at a second Ctrl-C although its main thread is in native code, where no handler runs.

        Python runs a handler only between two bytecodes, and once for several signals. The operating system's handler
        writes each signal's number to a pipe at once; a thread reads it there.
        """
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        previous = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        if previous != -1:  # an event loop reads there
            signal.set_wakeup_fd(previous)
            os.close(reader)
            os.close(writer)
            yield
            return
        _watch_forks()
        _pipes.add(writer)
        thread = threading.Thread(target=self._read_signals, args=(reader,), name="drivetrain-interrupt", daemon=True)
        thread.start()
        try:
            yield
        finally:
            _pipes.discard(writer)
            signal.set_wakeup_fd(-1)
            os.write(writer, _END)  # a process that was forked may still have the pipe open, so closing it ends nothing
            thread.join()
            os.close(writer)
            os.close(reader)

    def _read_signals(self, reader: int) -> None:
        interrupts = 0
        while _END not in (numbers := os.read(reader, 64)):
            interrupts += numbers.count(signal.SIGINT)
            if interrupts > 1 and not self._raised.wait(GRACE_SECONDS):
                print_text("Interrupted twice: ended at once, within a step; nothing was saved.", file=sys.stderr)
                os._exit(128 + signal.SIGINT)


_pipes: set[int] = set()  # those that the signals of this process's runs are written to


@cache
def _watch_forks() -> None:
    """Let forks leave the pipes of their parent. It is done once, in the first run: Python has no way to end it."""
    os.register_at_fork(after_in_child=_leave_pipes)


def _leave_pipes() -> None:
    """Let a worker of a loader, which gets the terminal's signals too, not write them to its parent's pipe."""
    if _pipes:
        signal.set_wakeup_fd(-1)
        _pipes.clear()
