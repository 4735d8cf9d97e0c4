"""Log how fast training is, and how much of the time it waits for data."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Any

from drivetrain.callbacks.base import Callback
from drivetrain.callbacks.support.step_log import StepLog, checked_every
from drivetrain.callbacks.support.verdict import TimeSpent
from drivetrain.runtime.cores import cores_of_process
from drivetrain.runtime.durations import Duration

if TYPE_CHECKING:
    from drivetrain.trainer.task import Task
    from drivetrain.trainer.trainer import Trainer


class SpeedMonitor(Callback):
    """Logs steps and samples per second, and the share of the time in which training waits for its loader.

    Every `log_every_n_steps` it logs `speed/steps_per_sec`, `speed/samples_per_sec` of this process where the loader
    counts them, and `speed/data_wait`, from 0 to 1: what passes between the end of one batch and the start of the next.
    Nothing waits for the device, so a loader that keeps up with it counts as no wait. Validations, saves and the ends
    of epochs do not count. At the end of `fit` it prints in a sentence what took the time, unless a profiler does.

    Args:
        every: How often, in place of `log_every_n_steps`: a number of steps, or a duration such as `"500 steps"`,
            `"1M samples"`, `"10 min"` or `"10%"`.

    Raises:
        ConfigurationError: If `every` is no number or duration, or the Trainer has no logger.

    Example:
        ```python
        from drivetrain import SpeedMonitor, Trainer

        trainer = Trainer(callbacks=[SpeedMonitor()], logger="csv")
        ```
    """

    saves_within_steps = False

    def __init__(self, every: int | str | Duration | None = None) -> None:
        self.every = checked_every(every, "SpeedMonitor")
        self.rhythm = self.every if isinstance(self.every, Duration) else None
        self._log: StepLog | None = None
        self._begun = self._ended = self._paused_at = 0.0
        self._waited = self._paused = self._paused_in_all = 0.0
        self._samples: int | None = 0
        self._step = 0
        self._saving_since: float | None = None
        self._samples_in_all: int | None = 0

    def on_train_start(self, trainer: Trainer, task: Task) -> None:
        self._log = StepLog("SpeedMonitor", trainer, self.every).begin()
        self._ended, self._saving_since = 0.0, None
        self._samples_in_all = 0

    def on_train_epoch_start(self, trainer: Trainer, task: Task) -> None:
        if not self._ended:
            self._begin(trainer, perf_counter())
        else:
            self._resume(perf_counter())

    def on_train_batch_start(self, trainer: Trainer, task: Task, batch: Any, batch_idx: int) -> None:
        now = perf_counter()
        if self._saving_since is not None:
            self._paused_at = self._saving_since
            self._resume(now)
        self._waited += now - self._ended - self._paused
        self._paused_in_all += self._paused
        self._paused = 0.0

    def on_train_batch_end(self, trainer: Trainer, task: Task, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._ended = now = perf_counter()
        info = trainer.batch_info
        rows = None if info is None else info.real_rows
        self._samples = None if rows is None or self._samples is None else self._samples + rows
        in_all = self._samples_in_all
        self._samples_in_all = None if rows is None or in_all is None else in_all + rows
        step = trainer.global_step
        if self._log is not None and self._log.is_due(step):
            self._log.write(self._values(step, now), step)
            self._begin(trainer, now)

    def on_validation_start(self, trainer: Trainer, task: Task) -> None:
        self._paused_at = perf_counter()

    def on_validation_end(self, trainer: Trainer, task: Task) -> None:
        self._resume(perf_counter())

    def on_train_epoch_end(self, trainer: Trainer, task: Task) -> None:
        self._paused_at = perf_counter()

    def on_save_checkpoint(self, trainer: Trainer, task: Task, checkpoint: dict[str, Any]) -> None:
        if self._saving_since is None:
            self._saving_since = perf_counter()

    def on_train_end(self, trainer: Trainer, task: Task) -> None:
        self._resume(perf_counter())

    def on_fit_end(self, trainer: Trainer, task: Task) -> None:
        if trainer.is_global_zero and not trainer.profiler.gives_verdict:
            workers = getattr(trainer.train_dataloader, "num_workers", None)
            cores = cores_of_process(trainer.num_devices)
            verdict = TimeSpent.of(trainer.timing, self._samples_in_all, workers, cores).verdict()
            if verdict:
                trainer.print(verdict)

    def _resume(self, now: float) -> None:
        """End a pause, in which a checkpoint may have been saved."""
        self._paused += now - self._paused_at
        if self._saving_since is not None:
            self._saving_since = None

    def _begin(self, trainer: Trainer, now: float) -> None:
        """Begin the row that is logged next."""
        self._begun = self._ended = now
        self._waited = self._paused = self._paused_in_all = 0.0
        self._samples, self._step = 0, trainer.global_step

    def _values(self, step: int, now: float) -> dict[str, float]:
        seconds = now - self._begun - self._paused_in_all
        if seconds <= 0:
            return {}
        values = {
            "speed/steps_per_sec": (step - self._step) / seconds,
            "speed/data_wait": min(1.0, max(0.0, self._waited / seconds)),
        }
        if self._samples is not None:
            values["speed/samples_per_sec"] = self._samples / seconds
        return values
