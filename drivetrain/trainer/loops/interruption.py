"""Signals during a run: Ctrl-C, and those by which a scheduler preempts a job."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import FrameType
from typing import Any

from drivetrain.runtime.collectives import gather_object
from drivetrain.runtime.terminal import print_text

GRACE_SECONDS = 2.0
"""How long a second Ctrl-C leaves the main thread to raise `KeyboardInterrupt`, before the process ends as it is."""

EXCHANGE_SECONDS = 1.0
"""How often processes exchange whether a signal ends the evaluation under way."""

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


class EvaluationEnded(Exception):
    """A signal has ended an evaluation within `fit` before its last batch."""


class EvaluationWatch:
    """Ends a pass over an evaluation loader once a signal has come, after the same batch on all processes.

    Processes exchange about once a second. One that has fewer batches than others takes part until all are done.

    Args:
        signals: The signals of this process.
        world_size: Number of processes.
        on_signals: Called on every process before `EvaluationEnded` is raised, with whether Ctrl-C and whether a
            preemption has come to any of them.
    """

    def __init__(self, signals: Interruption, world_size: int, on_signals: Callable[[bool, bool], None]) -> None:
        self._signals, self._world_size, self._on_signals = signals, world_size, on_signals
        self._began = time.monotonic()
        self._batches, self._next = 0, 1

    def count_batch(self) -> None:
        """Count a batch, and raise `EvaluationEnded` if it is the last one."""
        self._batches += 1
        if self._world_size == 1 or self._batches >= self._next:
            self._exchange(ended=False)

    def finish(self) -> None:
        """Take part in what other processes exchange until all have run their last batch."""
        while not self._exchange(ended=True):
            pass

    def _exchange(self, ended: bool) -> bool:
        """Exchange signals. Returns whether all processes have run their last batch."""
        signals = self._signals
        everyone: list[tuple[bool, int, bool, bool]]
        per_batch = (time.monotonic() - self._began) / max(1, self._batches)
        ahead = max(1, min(1000, int(EXCHANGE_SECONDS / max(per_batch, 1e-6))))
        everyone = [(ended, ahead, signals.requested, signals.preempted)]
        if self._world_size > 1:
            everyone = gather_object(everyone)
        _, _, requested, preempted = (any(flags) for flags in zip(*everyone, strict=True))
        if requested or preempted:
            self._on_signals(requested, preempted)
            raise EvaluationEnded
        running = [ahead for has_ended, ahead, *_ in everyone if not has_ended]
        self._next += running[0] if running else 0
        return not running


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
