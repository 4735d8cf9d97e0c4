"""Ending a run before its last step: by time, by a callback, by Ctrl-C, at the same step on every process."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from drivetrain.runtime.collectives import gather_object
from drivetrain.runtime.errors import CheckpointError

if TYPE_CHECKING:
    from drivetrain.checkpoint import SaveQueue

AGREEMENT_SECONDS = 1.0
"""How often processes tell each other that they want to stop."""

CLOCK_SECONDS = 0.05
"""How often a process alone looks at its clock."""


class StopAgreement:
    """Lets every process stop at the same step.

    In a world of one a wish to stop holds at once, and only the clock is looked at now and then. Among several
    processes a wish of any of them holds for all, but they talk about it only about once a second: each time, they
    also agree after which batch to talk next, from the main process's speed, so that a step itself exchanges nothing
    and no clock decides on one process alone.

    Args:
        world_size: number of processes.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._last = time.monotonic()
        self._last_batch = 0
        self.next_batch = 0

    def start(self, batches: int) -> None:
        """Begin after so many batches."""
        self._last, self._last_batch = time.monotonic(), batches
        self.next_batch = batches + 1

    def agree(self, batches: int, wishes: tuple[bool, ...]) -> tuple[bool, ...]:
        """Exchange wishes; call it on all processes after the same batch.

        Args:
            batches: how many there were so far.
            wishes: what this process wants, such as (stop, interrupted, validate).

        Returns:
            For each, whether any process wants it.
        """
        now = time.monotonic()
        per_batch = max((now - self._last) / max(1, batches - self._last_batch), 1e-6)
        pause = CLOCK_SECONDS if self._world_size == 1 else AGREEMENT_SECONDS
        ahead = max(1, min(1000, int(pause / per_batch)))
        self._last, self._last_batch = now, batches
        if self._world_size == 1:
            self.next_batch = batches + ahead
            return wishes
        everyone: list[Any] = gather_object([(ahead, wishes)])
        self.next_batch = batches + everyone[0][0]
        return tuple(any(flags) for flags in zip(*(each[1] for each in everyone), strict=True))


def raise_lost_save(saves: SaveQueue | None) -> NoReturn:
    """Raise the error of a save in the background on all processes, once they have agreed that one of them has it.

    Args:
        saves: this process's saves.

    Raises:
        CheckpointError: always.
    """
    if saves is not None:
        saves.finish()  # a save that fails on one process fails on all: this raises its error
    raise CheckpointError(
        "A checkpoint could not be written in the background. Another process was told why; this one was before, or "
        "did not take part."
    )


class Interruption:
    """Signals during a run: Ctrl-C once ends it after a step, twice at once; SIGTERM and SIGUSR1 preempt it.

    A preempted run saves a checkpoint after the step under way and exits with a code that asks to be started again:
    SIGTERM is what a scheduler sends before it kills, SIGUSR1 what SLURM's `--signal` sends on request.

    Args:
        on_request: called at the first signal.
    """

    def __init__(self, on_request: Callable[[], None] | None = None) -> None:
        self.requested = False
        self.preempted = False
        self._on_request = on_request

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Take the signals over in the body; only in the main thread, where Python lets one, and from nobody else."""
        before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number, handler in ((signal.SIGINT, self._interrupt), *((n, self._preempt) for n in _PREEMPTING)):
                if signal.getsignal(number) in (signal.default_int_handler, signal.SIG_DFL):
                    before[number] = signal.signal(number, handler)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        self._record_signal()

    def _preempt(self, number: int, frame: FrameType | None) -> None:
        self.preempted = True
        self._record_signal()

    def _record_signal(self) -> None:
        if self._on_request is not None:
            self._on_request()


_PREEMPTING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))
