"""Control of a training run: its limits, stop requests and signals, rollbacks, and the schedule of validations."""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from functools import cache
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from drivetrain.callbacks.base import Callback
from drivetrain.callbacks.model_summary import count_parameters
from drivetrain.callbacks.report.record import PAGE
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


# Signals


GRACE_SECONDS = 2.0
"""Seconds that the main thread has to raise `KeyboardInterrupt` after a second Ctrl-C, before the process ends."""

EXCHANGE_SECONDS = 1.0
"""Seconds between two exchanges of signals or stop requests between ranks."""

_END = b"\0"
_PREEMPTING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))


@dataclass(eq=False)
class Interruption:
    """Handler of Ctrl-C, SIGTERM and SIGUSR1 during training.

    Ctrl-C ends the run after the current step, and a second Ctrl-C ends it at once. SIGTERM and SIGUSR1 preempt the
    run. It saves a checkpoint after the current step and exits with a code that requests a restart. Schedulers send
    SIGTERM before they kill a job, SLURM sends SIGUSR1 with `--signal`.

    Attributes:
        on_request: Function that is called at each signal, except at a second Ctrl-C.
        requested: True once Ctrl-C was pressed.
        preempted: True once SIGTERM or SIGUSR1 has arrived.
    """

    on_request: Callable[[], None]
    requested: bool = False
    preempted: bool = False
    _raised: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def watched(self) -> Iterator[None]:
        # Does nothing outside the main thread. Signals for which the user installed a handler keep it.
        # `signal.signal` raises ValueError outside the main thread.
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
            self._raised.set()  # the thread of `_read_signals` would otherwise end the process
            raise KeyboardInterrupt
        self.requested = True
        self.on_request()

    def _preempt(self, number: int, frame: FrameType | None) -> None:
        self.preempted = True
        self.on_request()

    @contextmanager
    def _native_code_watched(self) -> Iterator[None]:
        # A second Ctrl-C must end the process even if the main thread is stuck in native code. Python runs a signal
        # handler only between two bytecodes, and may merge several signals into one call. The C-level handler writes
        # each signal's number to a pipe at once, and a thread reads the pipe.
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        previous = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        if previous != -1:  # an event loop, such as asyncio's, already uses it
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
            os.write(writer, _END)  # closing would not end the thread: a forked child may hold the pipe
            thread.join()
            os.close(writer)
            os.close(reader)

    def _read_signals(self, reader: int) -> None:
        interrupts = 0
        while _END not in (numbers := os.read(reader, 64)):
            interrupts += numbers.count(signal.SIGINT)
            if interrupts > 1 and not self._raised.wait(GRACE_SECONDS):
                print_text("Interrupted twice: the run ended within a step. Nothing was saved.", file=sys.stderr)
                os._exit(128 + signal.SIGINT)


class EvaluationEnded(Exception):
    """Exception that ends a validation within `fit` early, because a signal arrived."""


class EvaluationWatch:
    """Shares signals, such as Ctrl-C, between all ranks during a validation, so that the ranks stop together.

    Ranks exchange their signals about once per second. A rank that has finished its batches takes part until all ranks
    have finished.
    """

    def __init__(self, signals: Interruption, world_size: int, on_signals: Callable[[bool, bool], None]) -> None:
        self._signals, self._world_size, self._on_signals = signals, world_size, on_signals
        self._began = time.monotonic()
        self._batches, self._next = 0, 1

    def count_batch(self) -> None:
        self._batches += 1
        if self._world_size == 1 or self._batches >= self._next:
            self._exchange(ended=False)

    def finish(self) -> None:
        # The other ranks may still evaluate, and their exchanges of signals need this rank.
        while not self._exchange(ended=True):
            pass

    def _exchange(self, ended: bool) -> bool:
        # `ended` is True if this rank has no batches left. The result is True if no rank has any.
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
        # All ranks follow the first running rank's estimate. Different ones would exchange at different batches.
        running = [ahead for has_ended, ahead, *_ in everyone if not has_ended]
        self._next += running[0] if running else 0
        return not running


_pipes: set[int] = set()  # write ends of the signal pipes of this process's runs


@cache
def _watch_forks() -> None:
    # Cached, so it is registered once per process: Python cannot unregister it.
    os.register_at_fork(after_in_child=_leave_pipes)


def _leave_pipes() -> None:
    # A forked data loader worker receives Ctrl-C too, and would write it to its parent's pipe.
    if _pipes:
        signal.set_wakeup_fd(-1)
        _pipes.clear()


logger = get_logger(__name__)

CLOCK_SECONDS = 0.05
"""Seconds between two reads of the clock in a single-process run."""

_RESUMED = "the run that it resumes had been stopped by a callback"


class StopReason(str, Enum):
    """Reason why a training run ended, such as `StopReason.MAX_EPOCHS`.

    Attributes:
        MAX_EPOCHS: The run trained for `max_epochs`.
        MAX_STEPS: The run took `max_steps` optimizer steps.
        MAX_TIME: `max_time` has passed.
        MAX_DURATION: The run trained on the samples or tokens of `max_duration`.
        REQUESTED: A callback, such as `EarlyStopping`, or the task requested a stop.
        INTERRUPTED: Ctrl-C was pressed.
        PREEMPTED: SIGTERM or SIGUSR1 announced that the scheduler ends the job.
        FAILED: An exception was raised.
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
    reason: StopReason | None
    details: str
    forced: frozenset[StopReason]  # reasons that ended the run even before `min_epochs` or `min_steps`
    identity: str = ""  # identifier of the Trainer that drove the run


class RunControl:
    """Controller of a training run, which decides when it stops or rolls back.

    Attributes:
        options: Options of the Trainer, with the limits of the run.
        stop_requested: True if this rank requests a stop. Read after each step.
        stop_agreed: True if all ranks have agreed to stop.
        rollback_path: Checkpoint that the run returns to after the current step, or None.
        batches_to_skip: Pairs of epoch and batch index that this rank skips.
        reason: Reason why the last run ended, or None while a run is active.
        details: The reason in words.
        identity: Identifier of this Trainer's runs, for callbacks that are shared between Trainers.
    """

    def __init__(self, progress: Progress, options: TrainerOptions, world_size: int) -> None:
        self._progress, self._world_size = progress, world_size
        self._stops = StopExchange(world_size)
        self.options = options
        self.identity = uuid.uuid4().hex
        self._started = 0.0
        self._clear()

    def begin(self) -> None:
        self._clear()
        self.start_clock()

    def _clear(self) -> None:
        self.stop_requested = self.stop_agreed = False
        self.rollback_path: str | None = None
        self.batches_to_skip: set[tuple[int, int]] = set()
        self.reason: StopReason | None = None
        self.details = ""
        self._forced: set[StopReason] = set()  # these end a run regardless of `min_epochs` and `min_steps`
        self._requested_by = ""
        self._requests: dict[str, str] = {}  # asker to reason
        self._stops_for_good = self._has_declined = False
        self._signals = Interruption(self._on_signal)

    def signals_watched(self) -> AbstractContextManager[None]:
        return self._signals.watched()

    @contextmanager
    def kept(self) -> Iterator[None]:
        # Trial steps of a search must not stop at earlier requests. A signal during the block still ends the run.
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
        self._started = time.monotonic()

    # Reasons

    @property
    def interrupted(self) -> bool:
        return StopReason.INTERRUPTED in self._forced

    @property
    def preempted(self) -> bool:
        return StopReason.PREEMPTED in self._forced

    @property
    def out_of_time(self) -> bool:
        return StopReason.MAX_TIME in self._forced

    @property
    def ends_to_be_resumed(self) -> bool:
        # The run then saves a checkpoint to resume from.
        return self.interrupted or self.preempted

    @property
    def signal(self) -> StopReason:
        return StopReason.PREEMPTED if self.preempted else StopReason.INTERRUPTED

    @property
    def stops_for_good(self) -> bool:
        # True if a callback such as `EarlyStopping` stopped the run, which then stays stopped if it is resumed.
        return self.stop_requested and self._stops_for_good and not self.ends_to_be_resumed

    @property
    def stops_by_request(self) -> bool:
        return (bool(self._requested_by) or self.out_of_time) and not self.ends_to_be_resumed

    def request_stop(self, by: str, asker: str = "", for_good: bool = True) -> None:
        """Request that training stops after the current step, for the reason `by`.

        The request of one rank stops all ranks, but not before `min_epochs` and `min_steps`.

        Args:
            by: Reason for the stop in words.
            asker: Key with which `withdraw_request` can withdraw the request.
            for_good: True if a run that is resumed later stays stopped.
        """
        self.stop_requested = True
        self._requested_by = self._requests[asker] = by
        self._stops_for_good = self._stops_for_good or for_good

    def withdraw_request(self, asker: str) -> None:
        """Withdraw the stop request of one caller, such as a callback.

        Other requests and limits still apply. All ranks must call this at one point of the run.

        Args:
            asker: Key that was given to `request_stop`.
        """
        if self._requests.pop(asker, None) is None:
            return
        holds = bool(self._forced) or self._has_max_steps or self._has_max_duration
        self._requested_by = next(iter(self._requests.values()), "")
        self.stop_requested = holds or bool(self._requests)
        self.stop_agreed = holds  # requests of other ranks are agreed on at the next exchange
        self._has_declined = False
        self._stops_for_good = self._stops_for_good and bool(self._requests)

    def withdraw_stop(self) -> None:
        self.stop_requested = self.stop_agreed = self._stops_for_good = False
        self._requested_by = ""
        self._requests.clear()

    def state_dict(self) -> dict[str, Any]:
        # Runs a collective. A run that ended by a signal or a limit may continue after a resume, so only requests of
        # callbacks are stored.
        is_over = [self.stops_for_good]
        if self._world_size > 1:
            is_over = gather_object(is_over)
        return {"should_stop": any(is_over), "stop_askers": list(self._requests)}

    def resume_stop(self, stopped: bool, askers: Collection[str]) -> None:
        # If `stopped`, the run stays stopped until all `askers` withdraw their requests.
        self.withdraw_stop()
        if stopped:
            for asker in askers or [""]:
                self.request_stop(_RESUMED, asker)
            self.stop_agreed = True

    def record_exception(self, error: BaseException) -> None:
        if isinstance(error, KeyboardInterrupt):
            self._forced.add(StopReason.INTERRUPTED)
            self._conclude(StopReason.INTERRUPTED, "Ctrl-C, within a step, so nothing was saved")
        else:
            self._forced.clear()
            self._conclude(StopReason.FAILED, f"{type(error).__name__} was raised")

    def ending(self) -> Ending:
        return Ending(self.reason, self.details, frozenset(self._forced), self.identity)

    def adopt(self, ending: Ending) -> None:
        self.reason, self.details = ending.reason, ending.details
        self._forced = set(ending.forced)
        self.identity = ending.identity

    def take_over(self, callback: Callback) -> None:
        if type(callback).forget_run is Callback.forget_run or self.options.fast_dev_run:
            return
        # If another Trainer has used the callback before.
        if callback.run_identity not in (None, self.identity):
            callback.forget_run()
        callback.run_identity = self.identity

    def _conclude(self, reason: StopReason, details: str) -> None:
        self.reason, self.details = reason, details

    # Rollback

    def request_rollback(self, path: str, skip_batches: Collection[tuple[int, int]]) -> None:
        self.rollback_path = path
        self.skip_batches(skip_batches)

    def skip_batches(self, batches: Collection[tuple[int, int]]) -> None:
        self.batches_to_skip.update(batches)

    def record_rollback(self) -> None:
        # Training has returned to the earlier checkpoint, so no request holds any longer.
        self.rollback_path = None
        self.withdraw_stop()

    # Time of the stop

    @property
    def needs_polling(self) -> bool:
        # `max_time` and the stop requests of other ranks must be checked regularly.
        return self._world_size > 1 or self.options.max_time is not None

    @property
    def next_exchange(self) -> float:
        return self._stops.next_batch

    def start_epoch(self) -> None:
        self._stops.start(self._progress.total_batches)

    def agree(self, saves: SaveQueue | None, *wishes: bool) -> tuple[bool, ...]:
        # All ranks must call this after an equal number of batches. Flags in `wishes` are combined over ranks by "or"
        # and returned. If a background save of `saves` has failed anywhere, all raise.
        # A failed save is exchanged too: if one rank raised alone, the others would hang in their next collective.
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
            if saves is not None:
                saves.finish()  # raises the error if this rank has it
            raise CheckpointError(
                "A checkpoint could not be written in the background. See the error of another process, or an earlier "
                "one of this process, for the cause."
            )
        return tuple(others)

    def watch_evaluation(self) -> EvaluationWatch:
        return EvaluationWatch(self._signals, self._world_size, self._end_by_signal)

    def _end_by_signal(self, interrupted: bool, preempted: bool) -> None:
        self._forced |= {StopReason.INTERRUPTED} if interrupted else set()
        self._forced |= {StopReason.PREEMPTED} if preempted else set()
        self.stop_requested = self.stop_agreed = True

    def check_counts(self) -> None:
        # No exchange is needed here, since all ranks count alike.
        if self._has_max_steps or self._has_max_duration:
            self.stop_requested = self.stop_agreed = True

    def may_stop(self, epoch_length: float) -> bool:
        # All ranks must know of the request, and `min_epochs` and `min_steps` must be reached.
        if self._world_size > 1 and not self.stop_agreed:
            return False
        # The maximum wins over `min_epochs` and `min_steps`, as a signal does.
        limited = self._has_max_steps or self._has_max_duration
        return bool(self._forced) or limited or self._minimum_reached(epoch_length)

    @property
    def share_of_duration(self) -> float:
        options = self.options
        shares = [0.0]
        if options.max_time is not None and options.max_time:
            shares.append((time.monotonic() - self._started) / options.max_time.total_seconds())
        if options.max_duration is not None:
            shares.append(self._progress.count(options.max_duration.unit) / options.max_duration.amount)
        return min(1.0, max(shares))

    def is_done(self, epoch_length: float, is_resuming: bool) -> bool:
        options, progress = self.options, self._progress
        if self._forced:
            return True  # `finish` records the reason, once all signals are known
        if is_resuming and progress.phase is Phase.CLOSING:
            return False  # saved by the epoch's last hooks, so the epoch must still be closed
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
        if self._world_size == 1:
            # Several ranks must stop after the same step, so they wait for their next exchange.
            self._end_by_signal(self._signals.requested, self._signals.preempted)


def calling_function() -> str:
    # Frame 1 is the setter that calls this function, frame 2 the code that assigns the attribute.
    code = sys._getframe(2).f_code
    return str(getattr(code, "co_qualname", code.co_name)).rsplit("<locals>.", 1)[-1]


@dataclass(eq=False)
class StopExchange:
    """Exchange of stop requests between ranks about once per second, so that all ranks stop together.

    With one rank, a request holds at once and only the clock is read from time to time. Rank 0 computes after how many
    batches the next exchange follows, so a step itself needs no collective.

    Attributes:
        world_size: Number of ranks.
        next_batch: Number of batches after which the next exchange takes place.
    """

    world_size: int
    next_batch: int = 0
    _last: float = field(default_factory=time.monotonic)
    _last_batch: int = 0

    def start(self, batches: int) -> None:
        self._last, self._last_batch = time.monotonic(), batches
        self.next_batch = batches + 1

    def exchange(self, batches: int, wishes: tuple[bool, ...], by: str) -> tuple[tuple[bool, ...], str]:
        # All ranks must call this at an equal number of batches. With several ranks, it runs a collective. `by` is the
        # reason of this rank for a stop, or "". Also returns the first reason of any rank.
        now = time.monotonic()
        per_batch = max((now - self._last) / max(1, batches - self._last_batch), 1e-6)
        pause = CLOCK_SECONDS if self.world_size == 1 else EXCHANGE_SECONDS
        # At most 1000 batches ahead, in case the first ones were unusually fast.
        ahead = max(1, min(1000, int(pause / per_batch)))
        self._last, self._last_batch = now, batches
        if self.world_size == 1:
            self.next_batch = batches + ahead
            return wishes, by
        everyone: list[Any] = gather_object([(ahead, wishes, by)])
        self.next_batch = batches + everyone[0][0]
        agreed = tuple(any(flags) for flags in zip(*(each[1] for each in everyone), strict=True))
        return agreed, next((each[2] for each in everyone if each[2]), "")


# First and last lines of a run's output


_DONE = "Done: the run ended after {taken}"
_FIRST_WORDS = {
    StopReason.PREEMPTED: "Preempted: the run can be resumed after {taken}",
    StopReason.INTERRUPTED: "Interrupted: the run ended after {taken}",
    StopReason.FAILED: "Failed: the run ended after {taken}",
    StopReason.NOTHING_TO_DO: "Nothing to do: the run has taken {taken} already",
    StopReason.NO_BATCHES: "Nothing to do: the run has taken {taken}",
}
_RESUMABLE = (StopReason.PREEMPTED, StopReason.INTERRUPTED, StopReason.FAILED)


def announce_start(trainer: Trainer, task: Task) -> None:
    """Log the first line of `fit`: task, processes, strategy, precision and number of parameters."""
    if not trainer.is_global_zero or trainer.barebones:
        return
    count = trainer.world_size
    device = trainer.strategy.topology.device.type
    processes = f"{count} process{'es' * (count != 1)} on {device}"
    total = count_parameters(task, trainer.strategy.state).elements
    parameters = f"{total:,} parameter{'s' * (total != 1)}"
    formats = f"({trainer.strategy.name}), precision {trainer.precision}"
    line = f"Training {type(task).__name__}: {processes} {formats}, {parameters}."
    if trainer.loggers and trainer.log_dir is not None:
        line += f" Folder: {trainer.log_dir}."
    trainer.announce(shown(line))


def announce_end(trainer: Trainer) -> None:
    if not trainer.is_global_zero:
        return
    level = logging.ERROR if trainer.control.reason is StopReason.FAILED else logging.INFO
    for line in last_lines(trainer):
        trainer.announce(shown(line), level)


def last_lines(trainer: Trainer) -> list[str]:
    """Return the closing messages of `fit`: why training ended, and which checkpoint to use."""
    control = trainer.control
    steps, epochs = trainer.global_step, trainer.current_epoch
    taken = f"{steps} step{'s' * (steps != 1)} ({epochs} epoch{'s' * (epochs != 1)})"
    first = _DONE if control.reason is None else _FIRST_WORDS.get(control.reason, _DONE)
    lines = [f"{first.format(taken=taken)}: {control.details}."]
    if control.reason is StopReason.NOTHING_TO_DO:
        advice = "Start a new run from its weights" if control.stops_for_good else "Raise that limit"
        return [f"{lines[0]} {advice} to train more."]
    newest = newest_checkpoint(trainer)
    best = next((each for each in trainer.checkpoint_callbacks if each.best_model_score is not None), None)
    if newest and control.reason in _RESUMABLE:
        lines.append(f"Checkpoint: {newest}. To resume: fit(..., resume={newest!r}), or resume='auto'.")
    elif best is not None and best.best_model_score is not None:
        lines.append(f"Best checkpoint: {best.best_model_path} ({best.monitor} {best.best_model_score.item():.4g})")
    elif newest:
        lines.append(f"Last checkpoint: {newest}")
    elif not trainer.options.is_quiet:
        lines.append("No checkpoint was written.")
    if trainer.loggers and trainer.log_dir is not None:
        page = os.path.join(trainer.log_dir, PAGE)
        lines.append(f"Report: {page}" if os.path.isfile(page) else f"Logs: {trainer.log_dir}")
    return lines


def newest_checkpoint(trainer: Trainer) -> str:
    """Return the path of the run's newest checkpoint, or "" if none was saved."""
    return next((each.newest_model_path for each in trainer.checkpoint_callbacks if each.newest_model_path), "")


# Schedule of validations


FOREVER = float("inf")


class ValidationSchedule:
    """Schedule that decides after which batches or epochs `fit` validates.

    Args:
        progress: Counters of the run.
        interval: Value of `val_check_interval`. A number of batches, a fraction of an epoch, a time, a `Duration`, or
            None for the end of an epoch.
        epochs: Value of `check_val_every_n_epoch`. None counts `interval` across epochs.
        exists: True if there is anything to validate.
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
        return self._after is not None

    def set_epoch_length(self, batches: float) -> None:
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
                    "Use a whole number of batches.",
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
        self._validated_at = time.monotonic()

    def record_due(self) -> None:
        """Record that a validation is due because the time between validations has passed.

        A run that is resumed from a checkpoint within the validation then repeats it.
        """
        self._progress.due_at = self._progress.total_batches

    def record_validation(self) -> None:
        """Record that a validation has run after the current batch, so that it does not run twice.

        Called before the validation's last hooks, so that the checkpoints that they save include it.
        """
        self._progress.validations += 1
        self._progress.validated_at = self._progress.total_batches
        if self._counted is not None:
            self._progress.validated_count = self._progress.count(self._counted.unit)

    # Due times

    @property
    def is_this_epoch(self) -> bool:
        return self._exists and (self._epochs is None or (self._progress.epoch + 1) % self._epochs == 0)

    @property
    def is_overdue(self) -> bool:
        # By this rank's clock. Other ranks may differ.
        return self._after is not None and time.monotonic() - self._validated_at >= self._after.total_seconds()

    @property
    def is_due(self) -> bool:
        """True if a validation must run now.

        Valid only at the batch count that `next_batch` returned.
        """
        return self._counted is None or self.is_pending

    @property
    def is_at_epoch_end(self) -> bool:
        if not self.is_this_epoch or self._progress.validated_at == self._progress.total_batches:
            return False
        return self._after is None and self._every == FOREVER and self._epochs is not None

    @property
    def is_pending(self) -> bool:
        """True if `val_check_interval` requires a validation before the next training batch.

        After a resume that means that the checkpoint was saved between a batch and its validation.
        """
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
            # Without `check_val_every_n_epoch`, batches are counted across epochs. With it, from the epoch's start.
            before = done - progress.batches_in_epoch
            done, last = done - before, max(last - before, 0)
        return done >= (last // every + 1) * every

    @property
    def follows_this_step(self) -> bool:
        if self.is_at_epoch_end and self._progress.batches_in_epoch >= self._limit:
            return True
        return self.is_pending

    def next_batch(self) -> float:
        every, done = self._every, self._progress.batches_in_epoch
        if self._counted is not None and self._exists:
            return done + 1
        if every == FOREVER or not self.is_this_epoch:
            return FOREVER
        if self._epochs is None:
            return done + (every - self._progress.total_batches % every)
        return (done // every + 1) * every


# Warnings about runs without steps or with NaN


@dataclass(eq=False)
class Finiteness:
    """Check that warns about logged values or weights that are NaN or infinite.

    Reads only values that are transferred to the CPU anyway, and the weights at the end of an epoch.
    """

    is_watched: bool
    is_finite: bool = True
    _weights_are_finite: bool = True  # equal on all ranks, since it decides who calls the collective

    def check_values(self, values: Iterable[tuple[str, float]], when: str) -> None:
        if self.is_watched and self.is_finite:
            found = next(((name, value) for name, value in values if not math.isfinite(value)), None)
            if found is not None:
                self._record(f"The logged value {found[0]!r} is {found[1]} {when}.")

    def check_weights(self, task: Task, when: str) -> None:
        # Runs a collective.
        if not (self.is_watched and self._weights_are_finite):
            return
        found = next((name for name in gather_object([_first_not_finite(task)]) if name is not None), None)
        if found is not None:
            self._weights_are_finite = False
            self._record(f"The weight {found!r} is not finite {when}: it contains NaN or infinity.")

    def _record(self, what: str) -> None:
        if self.is_finite:
            logger.warning(
                f"{what} Training continues, and its checkpoints may contain such weights. To stop such a run, skip "
                "such steps or return to a checkpoint, add the callback NaNGuard. To find the operation that causes "
                "it, use Trainer(detect_anomaly=True)."
            )
        self.is_finite = False


class EpochHealth:
    """Checks at the end of each training epoch whether weights are finite and optimizer steps were taken."""

    def __init__(self, trainer: Trainer, task: Task) -> None:
        self._trainer, self._task = trainer, task
        self._steps = self._batches = 0
        self._has_warned = False

    def begin_epoch(self) -> None:
        self._steps, self._batches = self._trainer.global_step, self._trainer.progress.total_batches

    def end_epoch(self) -> None:
        # Runs a collective.
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
            return f"automatic_optimization is False, but {step} called no optimizer's step()."
        explained = f"{step} returned None for every batch"
        if overrides(self._trainer.accelerator.precision, "scale") or self._trainer.hooks.find("on_gradients_ready"):
            explained += ", or every step was skipped because gradients overflowed or a callback vetoed the step"
        return f"{explained}."


def _first_not_finite(task: Task) -> str | None:
    names: list[str] = []
    found: list[torch.Tensor] = []
    for name, parameter in task.named_parameters():
        local = parameter.detach()
        local = local.to_local() if hasattr(local, "to_local") else local
        # `isfinite` is not implemented for float8, and meta tensors have no values.
        if local.is_floating_point() and local.element_size() > 1 and local.device.type != "meta":
            names.append(name)
            found.append(torch.isfinite(local).all())
    if not found:
        return None
    finite = torch.stack([each.to(found[0].device) for each in found]).tolist()
    return next((name for name, is_finite in zip(names, finite, strict=True) if not is_finite), None)
