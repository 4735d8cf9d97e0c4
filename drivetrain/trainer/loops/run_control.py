"""Why and when a run ends, pauses or goes back: decided in one place, at the same step on every process."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from functools import cache
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch

from drivetrain.callbacks.base import Callback
from drivetrain.callbacks.model_summary import count_parameters
from drivetrain.runtime.collectives import gather_object
from drivetrain.runtime.durations import Duration
from drivetrain.runtime.errors import CheckpointError, ConfigurationError
from drivetrain.runtime.logging import get_logger
from drivetrain.runtime.terminal import print_text, shown
from drivetrain.strategies.precision import overrides
from drivetrain.trainer.loops.progress import Phase, Progress
from drivetrain.trainer.task import Task

if TYPE_CHECKING:
    from drivetrain.checkpoint import SaveQueue
    from drivetrain.trainer.options import TrainerOptions
    from drivetrain.trainer.trainer import Trainer


# Signals during a run: Ctrl-C, and those by which a scheduler preempts a job


GRACE_SECONDS = 2.0
"""How long a second Ctrl-C leaves the main thread to raise `KeyboardInterrupt`, before the process ends as it is."""

EXCHANGE_SECONDS = 1.0
"""How often processes exchange whether a signal ends the evaluation under way."""

_END = b"\0"
_PREEMPTING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))


@dataclass(eq=False)
class Interruption:
    """Signals during a run: Ctrl-C once ends it after a step, twice at once; SIGTERM and SIGUSR1 preempt it.

    A preempted run saves a checkpoint after the step under way and exits with a code that asks to be started again:
    SIGTERM is what a scheduler sends before it kills, SIGUSR1 what SLURM's `--signal` sends on request.

    Attributes:
        on_request: Called at the first signal.
        requested: Whether Ctrl-C was pressed.
        preempted: Whether a scheduler ends the run.
    """

    on_request: Callable[[], None]
    requested: bool = False
    preempted: bool = False
    _raised: threading.Event = field(default_factory=threading.Event)

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
        self.on_request()

    def _preempt(self, number: int, frame: FrameType | None) -> None:
        self.preempted = True
        self.on_request()

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


logger = get_logger(__name__)

EXCHANGE_SECONDS = 1.0
"""How often processes exchange whether they want to stop."""

CLOCK_SECONDS = 0.05
"""How often a process alone reads its clock."""

_RESUMED = "the run that it resumes had been stopped by a callback"


class StopReason(str, Enum):
    """Why a run ended.

    Attributes:
        MAX_EPOCHS: It trained `max_epochs`.
        MAX_STEPS: It took `max_steps` optimizer steps.
        MAX_TIME: `max_time` is over.
        MAX_DURATION: It trained on as many samples or tokens as `max_duration` asks for.
        REQUESTED: A callback or the task asked for it, as `EarlyStopping` does.
        INTERRUPTED: Ctrl-C.
        PREEMPTED: SIGTERM or SIGUSR1, by which a scheduler announces that it takes the machine away.
        FAILED: An exception.
        NO_BATCHES: An epoch has no batches, as with `limit_train_batches=0`.
        NOTHING_TO_DO: A limit was reached before the first step.
    """

    MAX_EPOCHS = "max_epochs"
    MAX_STEPS = "max_steps"
    MAX_TIME = "max_time"
    MAX_DURATION = "max_duration"
    REQUESTED = "requested"
    INTERRUPTED = "interrupted"
    PREEMPTED = "preempted"
    FAILED = "failed"
    NO_BATCHES = "no_batches"
    NOTHING_TO_DO = "nothing_to_do"

    def __str__(self) -> str:
        return str(self.value)


class Ending(NamedTuple):
    """Why a run ended.

    Attributes:
        reason: Why; None where none has ended.
        details: The same in words.
        forced: What ended it whatever the least is that was asked for.
        identity: Which Trainer's run it is.
    """

    reason: StopReason | None
    details: str
    forced: frozenset[StopReason]
    identity: str = ""


class RunControl:
    """Decides why and when a run ends, and which checkpoint it goes back to; nothing else writes any of this.

    Attributes:
        options: The limits of the run.
        stop_requested: Whether this process wants the run to stop; read in each step.
        stop_agreed: Whether all processes have agreed to stop.
        rollback_path: The checkpoint that the run goes back to after this step.
        batches_to_skip: (epoch, batch index) of this process's batches that are left out.
        reason: Why the last run ended; None while it runs.
        details: The same in words.
        identity: Distinguishes the runs of this Trainer from those of others, for callbacks that several share.
    """

    def __init__(self, progress: Progress, options: TrainerOptions, world_size: int) -> None:
        self._progress, self._world_size = progress, world_size
        self._stops = StopExchange(world_size)
        self.options = options
        self.identity = uuid.uuid4().hex
        self.stop_requested = self.stop_agreed = False
        self.rollback_path: str | None = None
        self.batches_to_skip: set[tuple[int, int]] = set()
        self.reason: StopReason | None = None
        self.details = ""
        self._forced: set[StopReason] = set()  # what ends a run whatever the least is that was asked for
        self._requested_by = ""
        self._requests: dict[str, str] = {}  # who asks this process for a stop, and why
        self._stops_for_good = False
        self._signals = Interruption(self._on_signal)
        self._started = 0.0
        self._has_declined = False

    def begin(self) -> None:
        """Forget the run before."""
        self.stop_requested = self.stop_agreed = False
        self.rollback_path = None
        self.batches_to_skip.clear()
        self.reason, self.details = None, ""
        self._forced.clear()
        self._requested_by, self._stops_for_good = "", False
        self._requests.clear()
        self._has_declined = False
        self._signals = Interruption(self._on_signal)
        self.start_clock()

    @contextmanager
    def signals_watched(self) -> Iterator[None]:
        """Let signals end the run in the body."""
        with self._signals.watched():
            yield

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Forget in the end who has asked for what in the body; signals still end the run."""
        before = self.stop_requested, self.stop_agreed, self.rollback_path, set(self.batches_to_skip)
        by, requests, for_good = self._requested_by, dict(self._requests), self._stops_for_good
        self.withdraw_stop()
        try:
            yield
        finally:
            self.stop_requested, self.stop_agreed, self.rollback_path, self.batches_to_skip = before
            self._requested_by, self._requests, self._stops_for_good = by, requests, for_good
            self.stop_requested = self.stop_requested or bool(self._forced)

    def start_clock(self) -> None:
        """Measure `max_time` from now on."""
        self._started = time.monotonic()

    # why

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C ends the run, or has ended it."""
        return StopReason.INTERRUPTED in self._forced

    @property
    def preempted(self) -> bool:
        """Whether a scheduler ends the run, or has ended it."""
        return StopReason.PREEMPTED in self._forced

    @property
    def out_of_time(self) -> bool:
        """Whether `max_time` is over."""
        return StopReason.MAX_TIME in self._forced

    @property
    def ends_to_be_resumed(self) -> bool:
        """Whether a signal ends the run, which is saved at once for another one to resume it."""
        return self.interrupted or self.preempted

    @property
    def signal(self) -> StopReason:
        """Which of the two; a preemption counts for more."""
        return StopReason.PREEMPTED if self.preempted else StopReason.INTERRUPTED

    @property
    def stops_for_good(self) -> bool:
        """Whether a run that resumes this one is over too: a callback ended it, not a limit or a signal."""
        return self.stop_requested and self._stops_for_good and not self.ends_to_be_resumed

    @property
    def stops_by_request(self) -> bool:
        """Whether a callback or `max_time` ends the run, rather than a count or a signal."""
        return (bool(self._requested_by) or self.out_of_time) and not self.ends_to_be_resumed

    def request_stop(self, by: str, asker: str = "", for_good: bool = True) -> None:
        """Ask for the end of the run after this step, for all processes; the least that was asked for comes first."""
        self.stop_requested = True
        self._requested_by = self._requests[asker] = by
        self._stops_for_good = self._stops_for_good or for_good

    def withdraw_request(self, asker: str) -> None:
        """Take back what one asker has requested, on all processes at the same moment; other requests hold."""
        if self._requests.pop(asker, None) is None:
            return
        holds = bool(self._forced) or self._has_max_steps or self._has_max_duration
        self._requested_by = next(iter(self._requests.values()), "")
        self.stop_requested = holds or bool(self._requests)
        self.stop_agreed = holds  # a request of another process is agreed on again
        self._has_declined = False
        self._stops_for_good = self._stops_for_good and bool(self._requests)

    def withdraw_stop(self) -> None:
        """Take the request back."""
        self.stop_requested = self.stop_agreed = self._stops_for_good = False
        self._requested_by = ""
        self._requests.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return what a run that resumes this one takes over; call it on all processes.

        A run that a signal or a limit has ended continues where it is resumed, perhaps with another limit.
        """
        is_over = [self.stops_for_good]
        if self._world_size > 1:
            is_over = gather_object(is_over)
        return {"should_stop": any(is_over), "stop_askers": list(self._requests)}

    def resume_stop(self, stopped: bool, askers: Collection[str]) -> None:
        """Take over whether the run that is resumed was stopped by a callback."""
        self.withdraw_stop()
        if stopped:
            for asker in askers or [""]:
                self.request_stop(_RESUMED, asker)
            self.stop_agreed = True

    def record_exception(self, error: BaseException) -> None:
        """Record what ended the run: `KeyboardInterrupt`, or a failure."""
        if isinstance(error, KeyboardInterrupt):
            self._forced.add(StopReason.INTERRUPTED)
            self._conclude(StopReason.INTERRUPTED, "Ctrl-C, within a step, so nothing was saved")
        else:
            self._forced.clear()
            self._conclude(StopReason.FAILED, f"{type(error).__name__} was raised")

    def ending(self) -> Ending:
        """Why the last run ended, for a Trainer in another process to adopt."""
        return Ending(self.reason, self.details, frozenset(self._forced), self.identity)

    def adopt(self, ending: Ending) -> None:
        """Take over why a run has ended that was driven by a Trainer in another process."""
        self.reason, self.details = ending.reason, ending.details
        self._forced = set(ending.forced)
        self.identity = ending.identity

    def take_over(self, callback: Callback) -> None:
        """Let a callback forget the runs of other Trainers, before a `fit` of this one."""
        if type(callback).forget_run is Callback.forget_run or self.options.fast_dev_run:
            return
        if callback.run_identity not in (None, self.identity):
            callback.forget_run()
        callback.run_identity = self.identity

    def _conclude(self, reason: StopReason, details: str) -> None:
        self.reason, self.details = reason, details

    # going back

    def request_rollback(self, path: str, skip_batches: Collection[tuple[int, int]]) -> None:
        """Go back to a checkpoint after this step."""
        self.rollback_path = path
        self.skip_batches(skip_batches)

    def skip_batches(self, batches: Collection[tuple[int, int]]) -> None:
        """Leave some of this process's batches out."""
        self.batches_to_skip.update(batches)

    def record_rollback(self) -> None:
        """Record that the run is back at the checkpoint."""
        self.rollback_path = None
        self.withdraw_stop()

    # when

    @property
    def watches_peers_or_clock(self) -> bool:
        """Whether processes or the clock may end the run between two validations."""
        return self._world_size > 1 or self.options.max_time is not None

    @property
    def next_exchange(self) -> float:
        """The number of batches after which processes agree next."""
        return self._stops.next_batch

    def start_epoch(self) -> None:
        """Begin to count the batches between two exchanges."""
        self._stops.start(self._progress.total_batches)

    def agree(self, saves: SaveQueue | None, *wishes: bool) -> tuple[bool, ...]:
        """Exchange with all processes who wants to stop; call it on all of them after the same batch."""
        lost = saves is not None and saves.has_lost
        signals = self._signals
        flags = (self.stop_requested, signals.requested, signals.preempted, lost, self._is_late(), *wishes)
        (stop, interrupted, preempted, lost, late, *others), by = self._stops.exchange(
            self._progress.total_batches, flags, self._requested_by
        )
        for happened, reason in (
            (interrupted, StopReason.INTERRUPTED),
            (preempted, StopReason.PREEMPTED),
            (late, StopReason.MAX_TIME),
        ):
            if happened:
                self._forced.add(reason)
        if stop or interrupted or preempted or late:
            self.stop_requested = self.stop_agreed = True
            self._requested_by = by
        if lost and not self.preempted:
            raise_lost_save(saves)
        return tuple(others)

    def watch_evaluation(self) -> EvaluationWatch:
        """Return what ends a pass over an evaluation loader within `fit` when a signal has come."""
        return EvaluationWatch(self._signals, self._world_size, self._end_by_signal)

    def _end_by_signal(self, interrupted: bool, preempted: bool) -> None:
        self._forced |= {StopReason.INTERRUPTED} if interrupted else set()
        self._forced |= {StopReason.PREEMPTED} if preempted else set()
        self.stop_requested = self.stop_agreed = True

    def check_counts(self) -> None:
        """Stop where `max_steps` or `max_duration` is reached; all processes count the same."""
        if self._has_max_steps or self._has_max_duration:
            self.stop_requested = self.stop_agreed = True

    def may_stop(self, epoch_length: float) -> bool:
        """Whether a request to stop holds now: all processes agree, and the least asked for is done."""
        if self._world_size > 1 and not self.stop_agreed:
            return False
        limited = self._has_max_steps or self._has_max_duration
        return bool(self._forced) or limited or self._minimum_reached(epoch_length)

    @property
    def share_of_duration(self) -> float:
        """The share that is over of `max_time`, or of a `max_duration` in samples or tokens; 0 where there is none."""
        options = self.options
        shares = [0.0]
        if options.max_time is not None and options.max_time:
            shares.append((time.monotonic() - self._started) / options.max_time.total_seconds())
        if options.max_duration is not None:
            shares.append(self._progress.count(options.max_duration.unit) / options.max_duration.amount)
        return min(1.0, max(shares))

    def is_done(self, epoch_length: float, is_resuming: bool) -> bool:
        """Whether no epoch is left to run; records why."""
        options, progress = self.options, self._progress
        if self._forced:
            return True  # why is recorded at the end, when all of it is known
        if is_resuming and progress.phase is Phase.CLOSING:
            return False  # a checkpoint from an epoch's last hook: the epoch is still to be closed
        if 0 <= options.max_epochs <= progress.epoch:
            self._conclude(StopReason.MAX_EPOCHS, f"max_epochs={options.max_epochs} is reached")
        elif self._has_max_steps:
            self._conclude(StopReason.MAX_STEPS, f"max_steps={options.max_steps} is reached")
        elif self._has_max_duration:
            self._conclude(StopReason.MAX_DURATION, f"max_duration={options.max_duration} is reached")
        elif epoch_length == 0:
            self._conclude(StopReason.NO_BATCHES, "there are no batches to train on (limit_train_batches=0)")
        elif self.stop_requested and self._minimum_reached(epoch_length):
            self._conclude(StopReason.REQUESTED, self._requested_by or "a callback asked for it")
        elif self.stop_requested and not self._has_declined:
            self._has_declined = True
            logger.info(
                f"A stop was requested ({self._requested_by or 'by a callback'}), but the required `min_epochs="
                f"{options.min_epochs}` or `min_steps={options.min_steps}` has not been met. Training will continue."
            )
        return self.reason is not None

    def finish(self, trained: bool) -> None:
        """Record why the run ended, where the loop is over."""
        if self.preempted:
            self._conclude(StopReason.PREEMPTED, "SIGTERM or SIGUSR1")
        elif self.interrupted:
            self._conclude(StopReason.INTERRUPTED, "Ctrl-C")
        elif self.out_of_time:
            self._conclude(StopReason.MAX_TIME, f"max_time={self.options.max_time} is over")
        elif not trained and self.reason is not StopReason.NO_BATCHES:
            self._conclude(StopReason.NOTHING_TO_DO, self.details)

    @property
    def _has_max_steps(self) -> bool:
        return 0 <= self.options.max_steps <= self._progress.global_step

    @property
    def _has_max_duration(self) -> bool:
        limit = self.options.max_duration
        return limit is not None and self._progress.count(limit.unit) >= limit.amount

    def _minimum_reached(self, epoch_length: float) -> bool:
        options, progress = self.options, self._progress
        epochs = progress.epoch + (progress.batches_in_epoch >= epoch_length)
        return epochs >= (options.min_epochs or 0) and progress.global_step >= (options.min_steps or 0)

    def _is_late(self) -> bool:
        limit = self.options.max_time
        return limit is not None and time.monotonic() - self._started >= limit.total_seconds()

    def _on_signal(self) -> None:
        """Stop after this step; several processes first agree on which."""
        if self._world_size == 1:
            self._end_by_signal(self._signals.requested, self._signals.preempted)


def calling_function() -> str:
    """The name of the function that wrote the attribute whose setter calls this."""
    code = sys._getframe(2).f_code
    return str(getattr(code, "co_qualname", code.co_name)).rsplit("<locals>.", 1)[-1]


@dataclass(eq=False)
class StopExchange:
    """Lets every process stop at the same step.

    In a world of one a request to stop holds at once, and only the clock is read now and then. Among several
    processes a request of any of them holds for all, but they exchange it only about once a second: each time, they
    also agree after which batch to do it next, from the main process's speed, so that a step itself exchanges nothing
    and no clock decides on one process alone.

    Attributes:
        world_size: Number of processes.
    """

    world_size: int
    next_batch: int = 0
    _last: float = field(default_factory=time.monotonic)
    _last_batch: int = 0

    def start(self, batches: int) -> None:
        """Begin after so many batches."""
        self._last, self._last_batch = time.monotonic(), batches
        self.next_batch = batches + 1

    def exchange(self, batches: int, wishes: tuple[bool, ...], by: str) -> tuple[tuple[bool, ...], str]:
        """Exchange wishes; call it on all processes after the same batch."""
        now = time.monotonic()
        per_batch = max((now - self._last) / max(1, batches - self._last_batch), 1e-6)
        pause = CLOCK_SECONDS if self.world_size == 1 else EXCHANGE_SECONDS
        ahead = max(1, min(1000, int(pause / per_batch)))
        self._last, self._last_batch = now, batches
        if self.world_size == 1:
            self.next_batch = batches + ahead
            return wishes, by
        everyone: list[Any] = gather_object([(ahead, wishes, by)])
        self.next_batch = batches + everyone[0][0]
        agreed = tuple(any(flags) for flags in zip(*(each[1] for each in everyone), strict=True))
        return agreed, next((each[2] for each in everyone if each[2]), "")


def raise_lost_save(saves: SaveQueue | None) -> NoReturn:
    """Raise the error of a save in the background on all processes, once they have agreed that one of them has it."""
    if saves is not None:
        saves.finish()  # a save that fails on one process fails on all: this raises its error
    raise CheckpointError(
        "A checkpoint could not be written in the background. Another process has raised why; this one has raised it "
        "before, or did not take part."
    )


# The line with which a run begins, what it runs on; and that with which it ends: why, where, and how to resume it


_DONE = "Done: the run ended after {taken}"
_FIRST_WORDS = {
    StopReason.PREEMPTED: "Preempted: the run can be resumed after {taken}",
    StopReason.INTERRUPTED: "Interrupted: the run ended after {taken}",
    StopReason.FAILED: "Failed: the run ended after {taken}",
    StopReason.NOTHING_TO_DO: "Nothing to do: the run has taken {taken} already",
    StopReason.NO_BATCHES: "Nothing to do: the run has taken {taken}",
}


def print_first_line(trainer: Trainer, task: Task) -> None:
    """Print what a `fit` trains and on what, on the main process, unless the run is to be bare."""
    if trainer.is_global_zero and not trainer.barebones:
        trainer.print(first_line(trainer, task))


def first_line(trainer: Trainer, task: Task) -> str:
    """Describe in one line what a `fit` trains and on what."""
    count = trainer.world_size
    device = trainer.strategy.topology.device.type
    processes = f"{count} process{'es' * (count != 1)} on {device}"
    total = count_parameters(task, trainer.strategy.state).elements
    parameters = f"{total:,} parameter{'s' * (total != 1)}"
    formats = f"({trainer.strategy.name}), precision {trainer.precision}"
    line = f"Training {type(task).__name__}: {processes} {formats}, {parameters}."
    if trainer.loggers and trainer.log_dir is not None:
        line += f" Folder: {trainer.log_dir}."
    return shown(line)


def last_line(trainer: Trainer) -> str:
    """Describe in one line how a `fit` ended; on the main process."""
    control = trainer.control
    steps, epochs = trainer.global_step, trainer.current_epoch
    taken = f"{steps} step{'s' * (steps != 1)} ({epochs} epoch{'s' * (epochs != 1)})"
    first = _DONE if control.reason is None else _FIRST_WORDS.get(control.reason, _DONE)
    parts = [f"{first.format(taken=taken)}: {control.details}."]
    if control.reason is StopReason.NOTHING_TO_DO:
        if control.stops_for_good:
            return f"{parts[0]} Start a new run from its weights to train more."
        return f"{parts[0]} Raise that limit to train more."
    saved = newest_checkpoint(trainer)
    if trainer.loggers and trainer.log_dir is not None:
        parts.append(f"Logs: {trainer.log_dir}.")
    if saved:
        parts.append(f"Checkpoint: {saved}. To resume: fit(..., resume={saved!r}), or resume='auto'.")
    elif not trainer.options.is_quiet:
        parts.append("No checkpoint was written.")
    return shown(" ".join(parts))


def newest_checkpoint(trainer: Trainer) -> str:
    """The path of the newest checkpoint that the run has written through its callbacks, or an empty text."""
    return next((each.newest_model_path for each in trainer.checkpoint_callbacks if each.newest_model_path), "")


# When validation is due, also after a resume


FOREVER = float("inf")


class ValidationSchedule:
    """When validation is due: after so many batches, steps, samples or tokens, after a time, or at the end of an epoch.

    Args:
        progress: The counters of the run.
        interval: `val_check_interval`: a number of batches, a fraction of an epoch, a time, a number of steps, samples
            or tokens, or None for the end of an epoch.
        epochs: `check_val_every_n_epoch`: every how many epochs; None counts `interval` across epochs.
        exists: Whether there is anything to validate on.
    """

    def __init__(
        self,
        progress: Progress,
        interval: int | float | timedelta | Duration | None,
        epochs: int | None,
        exists: bool,
    ) -> None:
        self._progress = progress
        self._interval, self._epochs, self._exists = interval, epochs, exists
        self._every: float = FOREVER  # batches
        self._after: timedelta | None = None
        self._counted = interval if isinstance(interval, Duration) else None
        self._limit: float = FOREVER
        self._validated_at = time.monotonic()

    @property
    def follows_a_clock(self) -> bool:
        """Whether validation is due after a time."""
        return self._after is not None

    def set_epoch_length(self, batches: float) -> None:
        """Work out the interval in batches."""
        self._limit = batches
        self._every, self._after = FOREVER, None
        if not self._exists:
            return
        interval = self._interval
        if isinstance(interval, timedelta):
            self._after = interval
        elif isinstance(interval, float) and interval < 1.0:
            if math.isinf(batches):
                raise ConfigurationError(
                    f"val_check_interval={interval} is a fraction, but the training loader's length is not known. "
                    "Give a whole number of batches.",
                )
            self._every = max(1, int(batches * interval))
        elif isinstance(interval, int):
            if interval > batches and self._epochs is not None:
                raise ConfigurationError(
                    f"val_check_interval={interval} must be less than or equal to the number of the training batches: "
                    f"an epoch has {batches:.0f} batches. Set check_val_every_n_epoch=None to count across epochs.",
                )
            self._every = interval

    def restart_clock(self) -> None:
        """Measure the time to the next validation from now on."""
        self._validated_at = time.monotonic()

    def record_due(self) -> None:
        """Remember that a validation by the clock begins, for a run that resumes from a save within it."""
        self._progress.due_at = self._progress.total_batches

    def record_validation(self) -> None:
        """Count a validation once its results are there: a checkpoint that its last hooks write includes it."""
        self._progress.validations += 1
        self._progress.validated_at = self._progress.total_batches
        if self._counted is not None:
            self._progress.validated_count = self._progress.count(self._counted.unit)

    # when it is due

    @property
    def is_this_epoch(self) -> bool:
        """Whether the epoch under way is one of those with a validation."""
        return self._exists and (self._epochs is None or (self._progress.epoch + 1) % self._epochs == 0)

    @property
    def is_overdue(self) -> bool:
        """Whether the time since the last validation is over, by this process's clock."""
        return self._after is not None and time.monotonic() - self._validated_at >= self._after.total_seconds()

    @property
    def is_due(self) -> bool:
        """Whether it is due now, after the batch that `next_batch` has named."""
        return self._counted is None or self.is_pending

    @property
    def is_at_epoch_end(self) -> bool:
        """Whether it comes at the end of the epoch under way, where no interval was asked for."""
        if not self.is_this_epoch or self._progress.validated_at == self._progress.total_batches:
            return False
        return self._after is None and self._every == FOREVER and self._epochs is not None

    @property
    def is_pending(self) -> bool:
        """Whether it comes before the next batch; after a resume, the checkpoint was written between the two."""
        progress, every = self._progress, self._every
        if not self.is_this_epoch:
            return False
        if self.follows_a_clock:
            return progress.due_at == progress.total_batches != progress.validated_at
        if self._counted is not None:
            count = progress.count(self._counted.unit)
            return count // self._counted.amount > min(progress.validated_count, count) // self._counted.amount
        if every == FOREVER:
            return False
        done, last = progress.total_batches, max(progress.validated_at, 0)
        if self._epochs is not None:
            before = done - progress.batches_in_epoch
            done, last = done - before, max(last - before, 0)
        return done >= (last // every + 1) * every

    @property
    def follows_this_step(self) -> bool:
        """Whether it follows the step that is being ended."""
        if self.is_at_epoch_end and self._progress.batches_in_epoch >= self._limit:
            return True
        return self.is_pending

    def next_batch(self) -> float:
        """The number of batches in this epoch after which to validate next; infinite where it is not its turn."""
        every, done = self._every, self._progress.batches_in_epoch
        if self._counted is not None and self._exists:
            return done + 1
        if every == FOREVER or not self.is_this_epoch:
            return FOREVER
        if self._epochs is None:
            return done + (every - self._progress.total_batches % every)
        return (done // every + 1) * every


# What warns of a run that trains nothing, or trains towards nothing; none of it costs a step anything


@dataclass(eq=False)
class Finiteness:
    """Whether a run's logged values and weights are finite, as far as they were read anyway or at the end of epochs.

    Attributes:
        is_watched: Whether to warn; not where a callback guards the values.
        is_finite: Whether all that was read so far is.
    """

    is_watched: bool
    is_finite: bool = True
    _weights_are_finite: bool = True  # the same on all processes

    def check_values(self, values: Iterable[tuple[str, float]], when: str) -> None:
        """Take numbers into account that are being written."""
        if self.is_watched and self.is_finite:
            found = next(((name, value) for name, value in values if not math.isfinite(value)), None)
            if found is not None:
                self._record(f"The logged value {found[0]!r} is {found[1]} {when}.")

    def check_weights(self, task: Task, when: str) -> None:
        """Take the weights into account; call it on all processes, at the end of an epoch."""
        if not (self.is_watched and self._weights_are_finite):
            return
        found = next((name for name in gather_object([_first_not_finite(task)]) if name is not None), None)
        if found is not None:
            self._weights_are_finite = False
            self._record(f"The weight {found!r} is not finite {when}, so a loss was not either.")

    def _record(self, what: str) -> None:
        if self.is_finite:
            logger.warning(
                f"{what} Training continues, and its checkpoints hold such weights. NaNGuard among the callbacks stops "
                "such a run, leaves such steps out, or returns to a checkpoint; Trainer(detect_anomaly=True) names the "
                "operation."
            )
        self.is_finite = False


class EpochHealth:
    """Looks after each epoch whether it has trained anything."""

    def __init__(self, trainer: Trainer, task: Task) -> None:
        self._trainer, self._task = trainer, task
        self._steps = self._batches = 0
        self._has_warned = False

    def begin_epoch(self) -> None:
        """Record where an epoch begins."""
        self._steps, self._batches = self._trainer.global_step, self._trainer.progress.total_batches

    def end_epoch(self) -> None:
        """Warn of an epoch without an optimizer step, and of weights that are not finite; call it on all processes."""
        trainer = self._trainer
        if trainer.barebones:
            return
        ran = trainer.progress.total_batches > self._batches
        if ran and trainer.global_step == self._steps and not self._has_warned:
            self._has_warned = True
            logger.warning(f"Epoch {trainer.current_epoch} took no optimizer step: {self._explain()}")
        trainer.finiteness.check_weights(self._task, f"after epoch {trainer.current_epoch}")

    def _explain(self) -> str:
        step = f"{type(self._task).__name__}.training_step"
        if not self._task.automatic_optimization:
            return f"automatic_optimization is False, and {step} stepped no optimizer."
        explained = f"{step} returned None for every batch"
        if overrides(self._trainer.accelerator.precision, "scale") or self._trainer.hooks.find("on_gradients_ready"):
            explained += ", or every step was left out: gradients overflowed, or a callback asked for it"
        return f"{explained}."


def _first_not_finite(task: Task) -> str | None:
    """The name of a parameter that is not finite in what this process holds of it, if there is one."""
    names: list[str] = []
    found: list[torch.Tensor] = []
    for name, parameter in task.named_parameters():
        local = parameter.detach()
        local = local.to_local() if hasattr(local, "to_local") else local
        if local.is_floating_point() and local.element_size() > 1 and local.device.type != "meta":
            names.append(name)
            found.append(torch.isfinite(local).all())
    if not found:
        return None
    finite = torch.stack([each.to(found[0].device) for each in found]).tolist()
    return next((name for name, is_finite in zip(names, finite, strict=True) if not is_finite), None)
