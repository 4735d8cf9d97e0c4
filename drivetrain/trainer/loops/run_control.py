"""Why and when a run ends, pauses or goes back: decided in one place, at the same step on every process."""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from drivetrain.callbacks import Callback
from drivetrain.runtime.collectives import gather_object
from drivetrain.runtime.errors import CheckpointError
from drivetrain.runtime.logging import get_logger
from drivetrain.trainer.loops.interruption import EvaluationWatch, Interruption
from drivetrain.trainer.state.progress import Phase, Progress

if TYPE_CHECKING:
    from drivetrain.checkpoint import SaveQueue
    from drivetrain.trainer.options import TrainerOptions

logger = get_logger(__name__)

AGREEMENT_SECONDS = 1.0
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

    Args:
        progress: The counters of the run.
        options: The limits of the run.
        world_size: Number of processes.

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
        self._agreement = StopAgreement(world_size)
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
        """Ask for the end of the run after this step, for all processes; the least that was asked for comes first.

        Args:
            by: Who asks, and why.
            asker: The key under which `withdraw_request` can take it back.
            for_good: Whether a run that resumes this one is to be over too; not where a limit is reached.
        """
        self.stop_requested = True
        self._requested_by = self._requests[asker] = by
        self._stops_for_good = self._stops_for_good or for_good

    def withdraw_request(self, asker: str) -> None:
        """Take back what one asker has requested, on all processes at the same moment; other requests hold.

        Args:
            asker: The key that `request_stop` was given.
        """
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

    @property
    def stop_askers(self) -> list[str]:
        """Who asks this process for a stop, for a run that resumes this one."""
        return list(self._requests)

    def resume_stop(self, stopped: bool, askers: Collection[str]) -> None:
        """Take over whether the run that is resumed was stopped by a callback.

        Args:
            stopped: Whether it was.
            askers: What `stop_askers` was; none in checkpoints of earlier versions.
        """
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
        """Take over why a run has ended that was driven by a Trainer in another process.

        Args:
            ending: What `ending` returned there.
        """
        self.reason, self.details = ending.reason, ending.details
        self._forced = set(ending.forced)
        self.identity = ending.identity

    def take_over(self, callback: Callback) -> None:
        """Let a callback forget the runs of other Trainers, before a `fit` of this one.

        Args:
            callback: The callback; one without `forget_run` of its own is left alone.
        """
        if type(callback).forget_run is Callback.forget_run or self.options.fast_dev_run:
            return
        if callback.run_identity not in (None, self.identity):
            callback.forget_run()
        callback.run_identity = self.identity

    def _conclude(self, reason: StopReason, details: str) -> None:
        self.reason, self.details = reason, details

    # going back

    def request_rollback(self, path: str, skip_batches: Collection[tuple[int, int]]) -> None:
        """Go back to a checkpoint after this step.

        Args:
            path: The checkpoint.
            skip_batches: (epoch, batch index) of this process's batches to leave out from then on.
        """
        self.rollback_path = path
        self.skip_batches(skip_batches)

    def skip_batches(self, batches: Collection[tuple[int, int]]) -> None:
        """Leave some of this process's batches out.

        Args:
            batches: (epoch, batch index) of each.
        """
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
    def next_agreement(self) -> float:
        """The number of batches after which processes agree next."""
        return self._agreement.next_batch

    def start_epoch(self) -> None:
        """Begin to count the batches between two agreements."""
        self._agreement.start(self._progress.total_batches)

    def agree(self, saves: SaveQueue | None, *wishes: bool) -> tuple[bool, ...]:
        """Exchange with all processes who wants to stop; call it on all of them after the same batch.

        Args:
            saves: This process's saves in the background.
            wishes: What this process wants besides.

        Returns:
            For each of `wishes`, whether any process has it.

        Raises:
            CheckpointError: A process could not write a checkpoint.
        """
        lost = saves is not None and saves.has_lost
        signals = self._signals
        flags = (self.stop_requested, signals.requested, signals.preempted, lost, self._is_late(), *wishes)
        (stop, interrupted, preempted, lost, late, *others), by = self._agreement.agree(
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
        """Whether a request to stop holds now: all processes agree, and the least asked for is done.

        Args:
            epoch_length: Batches of an epoch.
        """
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
        """Whether no epoch is left to run; records why.

        Args:
            epoch_length: Batches of an epoch.
            is_resuming: Whether the epoch is one that a checkpoint was written in.
        """
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
        """Record why the run ended, where the loop is over.

        Args:
            trained: Whether there was anything to do at all.
        """
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


class StopAgreement:
    """Lets every process stop at the same step.

    In a world of one a request to stop holds at once, and only the clock is read now and then. Among several
    processes a request of any of them holds for all, but they exchange it only about once a second: each time, they
    also agree after which batch to do it next, from the main process's speed, so that a step itself exchanges nothing
    and no clock decides on one process alone.

    Args:
        world_size: Number of processes.
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

    def agree(self, batches: int, wishes: tuple[bool, ...], by: str) -> tuple[tuple[bool, ...], str]:
        """Exchange wishes; call it on all processes after the same batch.

        Args:
            batches: How many there were so far.
            wishes: What this process wants, such as (stop, interrupted, validate).
            by: Who asks it to stop.

        Returns:
            For each wish, whether any process has it; and who asks for a stop, from the first process that has one.
        """
        now = time.monotonic()
        per_batch = max((now - self._last) / max(1, batches - self._last_batch), 1e-6)
        pause = CLOCK_SECONDS if self._world_size == 1 else AGREEMENT_SECONDS
        ahead = max(1, min(1000, int(pause / per_batch)))
        self._last, self._last_batch = now, batches
        if self._world_size == 1:
            self.next_batch = batches + ahead
            return wishes, by
        everyone: list[Any] = gather_object([(ahead, wishes, by)])
        self.next_batch = batches + everyone[0][0]
        agreed = tuple(any(flags) for flags in zip(*(each[1] for each in everyone), strict=True))
        return agreed, next((each[2] for each in everyone if each[2]), "")


def raise_lost_save(saves: SaveQueue | None) -> NoReturn:
    """Raise the error of a save in the background on all processes, once they have agreed that one of them has it.

    Args:
        saves: This process's saves.

    Raises:
        CheckpointError: Always.
    """
    if saves is not None:
        saves.finish()  # a save that fails on one process fails on all: this raises its error
    raise CheckpointError(
        "A checkpoint could not be written in the background. Another process has raised why; this one has raised it "
        "before, or did not take part."
    )
