"""Callback that stops training after a time, counted over resumed runs."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from drivetrain.callbacks.base import Callback
from drivetrain.runtime.durations import clock_time
from drivetrain.runtime.errors import ConfigurationError, nearest
from drivetrain.runtime.logging import get_logger

if TYPE_CHECKING:
    from drivetrain.trainer.task import Task
    from drivetrain.trainer.trainer import Trainer

logger = get_logger(__name__)

INTERVALS = ("step", "epoch")
STAGES = ("train", "validate", "test")


class Timer(Callback):
    """Callback that measures the time of training, validation and test, and stops training after a duration.

    The time of earlier runs counts after a resume. With several processes, all stop at the same step, on which they
    agree about once a second.

    Cost on a device: no kernel, and no wait of the host.

    Args:
        duration: The time to train: `"10 min"`, a timedelta, a dict of its arguments or `"DD:HH:MM:SS"`. If None, only
            measure.
        interval: Stop after a `"step"`, or only at the end of an `"epoch"`.
        verbose: Log a message when the time is over.

    Raises:
        ConfigurationError: If `duration` is not a duration, or `interval` is unknown.

    Example:
        ```python
        from drivetrain import Timer, Trainer

        timer = Timer(duration="00:12:00:00")
        trainer = Trainer(max_epochs=-1, callbacks=[timer])
        # after fit: timer.time_elapsed("train"), timer.time_elapsed("validate")
        ```
    """

    def __init__(
        self,
        duration: str | timedelta | dict[str, int] | None = None,
        interval: str = "step",
        verbose: bool = True,
    ) -> None:
        if interval not in INTERVALS:
            raise ConfigurationError(
                f"Timer(interval={interval!r}): Unsupported parameter value. Use 'step' or 'epoch'."
                f"{nearest(str(interval), INTERVALS)}",
            )
        parsed = clock_time(duration, "duration", " Trainer(max_duration=) takes the other units.")
        self.duration = parsed.total_seconds() if parsed is not None else None
        self.interval = interval
        self.verbose = verbose
        self.forget_run()

    def forget_run(self) -> None:
        self._started: dict[str, float] = {}  # start times of running stages, by the monotonic clock
        self._last: dict[str, tuple[float, float | None]] = {}  # last start and end of each stage
        self._elapsed = dict.fromkeys(STAGES, 0.0)  # seconds, without running stages
        self._end: float | None = None  # time to stop, by the monotonic clock

    def start_time(self, stage: str = "train") -> float | None:
        """Return when a stage last began, in seconds of `time.monotonic`, or None if it has not run yet.

        Args:
            stage: `"train"`, `"validate"` or `"test"`.
        """
        return self._last.get(stage, (None, None))[0]

    def end_time(self, stage: str = "train") -> float | None:
        """Return when training, validation or testing last ended, in seconds of `time.monotonic`.

        None while the stage runs or if it never ran.

        Args:
            stage: `"train"`, `"validate"` or `"test"`.
        """
        return self._last.get(stage, (None, None))[1]

    def time_elapsed(self, stage: str = "train") -> float:
        """Return the seconds spent in a stage so far, including the time before a run was resumed.

        Args:
            stage: `"train"` (which includes validations during training), `"validate"` or `"test"`.

        Raises:
            ConfigurationError: If the stage is unknown.
        """
        if stage not in STAGES:
            raise ConfigurationError(
                f"Timer: there is no stage {stage!r}. Use one of {', '.join(map(repr, STAGES))}."
                f"{nearest(stage, STAGES)}",
            )
        started = self._started.get(stage)
        return self._elapsed[stage] + (time.monotonic() - started if started is not None else 0.0)

    def time_remaining(self, stage: str = "train") -> float | None:
        """Return the seconds that are left of the Timer's `duration`, at least 0, or None without a `duration`.

        Args:
            stage: The stage whose time counts.
        """
        if self.duration is None:
            return None
        return max(0.0, self.duration - self.time_elapsed(stage))

    def state_dict(self) -> dict[str, Any]:
        return {"time_elapsed": {stage: self.time_elapsed(stage) for stage in STAGES}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if "train" not in self._started:  # a rollback must not reset the elapsed time
            self._elapsed.update(state_dict["time_elapsed"])

    def on_train_start(self, trainer: Trainer, task: Task) -> None:
        self._begin("train")
        left = self.time_remaining()
        self._end = None if left is None else time.monotonic() + left
        if left == 0:  # a resumed run whose time is over takes no further step
            self._stop(trainer)

    def on_train_batch_end(self, trainer: Trainer, task: Task, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._end is not None and self.interval == "step" and time.monotonic() >= self._end:
            self._stop(trainer)

    def on_train_epoch_end(self, trainer: Trainer, task: Task) -> None:
        if self._end is not None and time.monotonic() >= self._end:
            self._stop(trainer)

    def on_train_end(self, trainer: Trainer, task: Task) -> None:
        self._finish("train")

    def on_validation_start(self, trainer: Trainer, task: Task) -> None:
        self._begin("validate")

    def on_validation_end(self, trainer: Trainer, task: Task) -> None:
        self._finish("validate")

    def on_test_start(self, trainer: Trainer, task: Task) -> None:
        self._begin("test")

    def on_test_end(self, trainer: Trainer, task: Task) -> None:
        self._finish("test")

    def teardown(self, trainer: Trainer, task: Task, stage: str) -> None:
        for running in list(self._started):
            self._finish(running)

    def _begin(self, stage: str) -> None:
        self._started[stage] = time.monotonic()
        self._last[stage] = (self._started[stage], None)

    def _finish(self, stage: str) -> None:
        started = self._started.pop(stage, None)
        if started is not None:
            ended = time.monotonic()
            self._elapsed[stage] += ended - started
            self._last[stage] = (started, ended)

    def _stop(self, trainer: Trainer) -> None:
        self._end = None
        # The processes agree on the step at which to stop.
        reason = f"Timer: the time is over after {self.time_elapsed():.0f} s of training"
        trainer.control.request_stop(reason, for_good=False)
        if self.verbose:
            elapsed = timedelta(seconds=int(self.time_elapsed()))
            logger.info(f"Time limit reached. Elapsed time is {elapsed}. Signaling Trainer to stop.")
