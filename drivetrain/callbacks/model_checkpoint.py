"""Callbacks that save checkpoints during training and after an exception."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from drivetrain.callbacks import checkpoint_files
from drivetrain.callbacks.base import Callback
from drivetrain.callbacks.checkpoint_files import (
    BestK,
    CheckpointAccount,
    CheckpointName,
    CheckpointWriter,
    SavedAccount,
    checked_number,
    decide,
)
from drivetrain.callbacks.step_schedule import (
    StepInterval,
    check_mode,
    decide_on_main_process,
    find_typo,
    missing_metric_message,
    monitored_value,
)
from drivetrain.runtime.durations import Duration, Unit, clock_time, count_of
from drivetrain.runtime.errors import CheckpointError, ConfigurationError, DrivetrainError, nearest
from drivetrain.runtime.logging import get_logger
from drivetrain.runtime.store_barrier import all_arrive
from drivetrain.runtime.terminal import without_credentials

if TYPE_CHECKING:
    from torch import Tensor

    from drivetrain.trainer.task import Task
    from drivetrain.trainer.trainer import Trainer


# Arguments of `ModelCheckpoint`


ON_SAVE_ERROR = ("raise", "warn")


def check_options(
    mode: str, save_last: Any, save_top_k: Any, monitor: str | None, total_limit: Any, on_save_error: str
) -> None:
    check_mode(mode, "ModelCheckpoint")
    if not isinstance(save_top_k, int) or save_top_k < -1:
        raise ConfigurationError(
            f"ModelCheckpoint(save_top_k={save_top_k!r}): Must be >= -1. Use -1 to keep all checkpoints, or 0 to keep "
            "none.",
        )
    if monitor is None and save_top_k > 1:
        raise ConfigurationError(
            f"ModelCheckpoint(save_top_k={save_top_k}, monitor=None) is not a valid configuration: without monitor= "
            "checkpoints cannot be ranked. Set monitor, or set save_top_k to 1 (the newest), -1 (all) or 0 (none). To "
            "keep the newest few, set save_top_k=-1 and total_limit.",
        )
    if save_last not in (None, True, False, "link", "copy"):
        raise ConfigurationError(f"ModelCheckpoint(save_last={save_last!r}): use True, False, 'link' or 'copy'.")
    if total_limit is not None and (not isinstance(total_limit, int) or total_limit < 1):
        raise ConfigurationError(
            f"ModelCheckpoint(total_limit={total_limit!r}): total_limit, the number of checkpoints in the directory, "
            "must be at least 1, or None for no limit.",
        )
    if on_save_error not in ON_SAVE_ERROR:
        raise ConfigurationError(
            f"ModelCheckpoint(on_save_error={on_save_error!r}): use 'raise' to end the run if a checkpoint cannot "
            f"be written, or 'warn' to continue.{nearest(str(on_save_error), ON_SAVE_ERROR)}",
        )


class SaveInterval(NamedTuple):
    """Interval between two saves of a `ModelCheckpoint`, such as 100 steps.

    Attributes:
        steps: The number of optimizer steps between saves, or 0.
        time: The time between saves, or None.
        epochs: The number of epochs between saves, or 0.
        rest: The number of samples or tokens, or the fraction of the run, between saves, or None.
    """

    steps: int
    time: timedelta | None
    epochs: int
    rest: Duration | None

    @classmethod
    def of(cls, steps: Any, interval: Any, epochs: Any, every: Any) -> SaveInterval:
        other = " every= takes the other units."
        steps = count_of(steps, "every_n_train_steps", Unit.STEPS, other)
        epochs = count_of(epochs, "every_n_epochs", Unit.EPOCHS, other)
        time = clock_time(interval, "train_time_interval", other)
        duration = Duration.of(every, "every")
        _check_intervals(steps, time, epochs, duration)
        if duration is None:
            return cls(steps or 0, time, (0 if steps or time else 1) if epochs is None else epochs, None)
        if not duration.amount:
            raise ConfigurationError(f"ModelCheckpoint(every={every!r}): every must be a positive interval.")
        return cls(
            int(duration.amount) if duration.unit is Unit.STEPS else 0,
            duration.timedelta if duration.unit is Unit.SECONDS else None,
            int(duration.amount) if duration.unit is Unit.EPOCHS else 0,
            duration if duration.unit in (Unit.SAMPLES, Unit.TOKENS, Unit.RUN) else None,
        )


def _check_intervals(steps: int | None, interval: timedelta | None, epochs: int | None, every: Duration | None) -> None:
    given: dict[str, Any] = {"every_n_train_steps": steps, "train_time_interval": interval, "every_n_epochs": epochs}
    given = {name: value for name, value in given.items() if value}
    if every is not None:
        given["every"] = str(every)
    if len(given) > 1:
        raise ConfigurationError(
            "ModelCheckpoint: Combination of parameters every_n_train_steps, every_n_epochs, train_time_interval and "
            f"every is not allowed: {', '.join(f'{name}={value!r}' for name, value in given.items())}. Set only one "
            "of these. For several intervals, use several ModelCheckpoints.",
        )
    for name, value in (("every_n_train_steps", steps), ("every_n_epochs", epochs)):
        if value is not None and value < 0:
            raise ConfigurationError(f"ModelCheckpoint({name}={value}): Must be >= 0. Use 0 to disable it.")


logger = get_logger(__name__)

EXCEPTION_PATIENCE = timedelta(seconds=3)
"""Time that a process that raised an exception waits for all others to raise one, before it ends without a save."""


class ModelCheckpoint(Callback):
    """Callback that saves checkpoints during training and keeps the best of them.

    A checkpoint is a directory that is written atomically: it exists completely or not at all. It is saved after the
    validation of the current step or epoch, so the monitored value always belongs to the saved weights. Replaced
    checkpoints are removed only after the new one is durable on disk.

    Cost on a device: no kernel, and no wait of the host between two saves. A save copies each byte to the host once.

    Args:
        dirpath: The directory to save in, or a URL that fsspec supports. The default is `<log_dir>/checkpoints`.
            Without a logger that has a directory, it is `<default_root_dir>/checkpoints`.
        filename: The name template, such as `"{epoch}-{val_loss:.3f}"`. It may contain `epoch`, `step` and names of
            logged metrics. The default is `"{epoch}-{step}"`.
        monitor: The metric that ranks checkpoints. If None, the newest are kept. Of equal values, the older checkpoint
            ranks higher, unless `tie_monitor` decides. A checkpoint with NaN is never among the best.
        verbose: Log each save.
        save_last: Also keep a checkpoint named `last`. True or `"copy"` writes a separate checkpoint, with hard links
            to files that another one also has. `"link"` creates a relative symbolic link to the newest checkpoint,
            which is then also kept under its own name. A run that ends before its first interval saves `last` too.
        save_top_k: The number of checkpoints to keep, -1 for all, or 0 for none.
        save_weights_only: Save the model without the optimizers and the state of the run.
        mode: `"min"` if lower values of `monitor` are better, `"max"` if higher values are better.
        auto_insert_metric_name: Write `epoch=3` into names rather than `3`.
        every_n_train_steps: The number of optimizer steps between saves.
        train_time_interval: The time between saves by the main process's clock: a timedelta, a dict of its arguments,
            `"DD:HH:MM:SS"` or `"10 min"`. A resumed run continues the interval that was in progress, without the time
            between the runs.
        every_n_epochs: The number of epochs between saves. The default is 1 if no other interval is given.
        save_on_train_epoch_end: Save at the end of the training epoch (True) or after each validation (False). If
            None, save after each validation if an epoch has several, else at the end of the training epoch, after its
            validation. With `monitor`, an epoch without a validation is then skipped, since the metric would be
            outdated.
        enable_version_counter: Append `-v1`, `-v2`, ... to a name that already exists, instead of replacing that
            checkpoint.
        save_on_exception: Save a checkpoint when an exception ends the run, unless the step is already saved. It is
            named `filename`, or `exception-step=<n>` by default. With several processes, all must raise within a few
            seconds.
        total_limit: The maximum number of checkpoints in the directory, including those of earlier runs. The oldest
            are removed first. The best by `monitor`, `last` and the newest count, but are never removed.
        async_save: Write in the background while training continues. Only one save runs at a time.
        every: The interval between saves in any unit: `"1000 steps"`, `"2 epochs"`, `"10 min"`, `"1M samples"`, `"50M
            tokens"` or `"10%"` of the run. It replaces the three interval arguments above.
        tie_monitor: A second metric, which ranks checkpoints with equal values of `monitor`. With `"step"` and
            `tie_mode="max"`, the newer one ranks higher.
        tie_mode: The `mode` of `tie_monitor`.
        on_save_error: `"raise"` to raise if a checkpoint cannot be written, for example on a full disk, or `"warn"` to
            log the error and continue. Earlier checkpoints stay intact in both cases.

    Attributes:
        best_model_path: The path of the best checkpoint, or an empty string.
        best_model_score: The score of the best checkpoint, a scalar tensor, or None.
        last_model_path: The path of `last`, or an empty string.
        best_k_models: A dict from the paths of the kept checkpoints to their scores.

    Raises:
        ConfigurationError: If arguments exclude each other. During the run, if the metric was not logged.
        CheckpointError: During the run, if a checkpoint cannot be written. An error of a background save is raised at
            the next step, or with several processes once all have agreed to stop.

    Example:
        ```python
        from drivetrain import ModelCheckpoint, Trainer

        best = ModelCheckpoint(monitor="val_acc", mode="max", filename="{epoch}-{val_acc:.3f}")
        trainer = Trainer(callbacks=[best])
        ```
    """

    CHECKPOINT_NAME_LAST: ClassVar[str] = "last"
    CHECKPOINT_EQUALS_CHAR: ClassVar[str] = "="
    STARTING_VERSION: ClassVar[int] = 1
    FILE_EXTENSION: ClassVar[str] = ".ckpt"
    saves_checkpoints: ClassVar[bool] = True
    runs_last_at_epoch_end: ClassVar[bool] = True

    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        filename: str | None = None,
        monitor: str | None = None,
        verbose: bool = False,
        save_last: bool | str | None = None,
        save_top_k: int = 1,
        save_on_exception: bool = False,
        save_weights_only: bool = False,
        mode: str = "min",
        auto_insert_metric_name: bool = True,
        every_n_train_steps: int | str | Duration | None = None,
        train_time_interval: timedelta | dict[str, int] | str | None = None,
        every_n_epochs: int | str | Duration | None = None,
        save_on_train_epoch_end: bool | None = None,
        enable_version_counter: bool = True,
        total_limit: int | None = None,
        async_save: bool = False,
        on_save_error: str = "raise",
        every: str | Duration | None = None,
        tie_monitor: str | None = None,
        tie_mode: str = "min",
    ) -> None:
        check_options(mode, save_last, save_top_k, monitor, total_limit, on_save_error)
        check_mode(tie_mode, "ModelCheckpoint")
        if tie_monitor is not None and monitor is None:
            raise ConfigurationError(
                f"ModelCheckpoint(tie_monitor={tie_monitor!r}) decides between equal values of monitor. Set monitor."
            )
        self.dirpath = os.path.expanduser(os.fspath(dirpath)) if dirpath is not None else None
        self.filename = filename
        self.monitor = monitor
        self.verbose = verbose
        self.save_last = save_last or False
        self.save_top_k = save_top_k
        self.save_weights_only = save_weights_only
        self.mode = mode
        self.auto_insert_metric_name = auto_insert_metric_name
        self.every_n_train_steps, self.train_time_interval, self.every_n_epochs, self.schedule = SaveInterval.of(
            every_n_train_steps, train_time_interval, every_n_epochs, every
        )
        self.save_on_train_epoch_end = save_on_train_epoch_end
        self.enable_version_counter = enable_version_counter
        self.save_on_exception = self.saves_within_steps = save_on_exception
        self.total_limit = total_limit
        self.async_save = async_save
        self.on_save_error = on_save_error
        self.tie_monitor, self.tie_mode = tie_monitor, tie_mode

        self._dirpath_is_given = dirpath is not None
        self.forget_run()
        self._root = ""  # default root directory of the run
        self._default_directories: list[str] = []  # default checkpoint directories of this script's runs
        self._fitting = self._training = self._is_resumed = False
        self._fits = self._last_step = self._validations = 0
        self._last_saved = -1  # global step of this run's last save
        self._judged = 0  # number of validations before the end of the last epoch
        self._waits_for_validation = False
        self._timer: StepInterval | None = None
        self._elapsed = 0.0  # seconds of the current interval that passed in the resumed run

    def forget_run(self) -> None:
        self._current_score: float | None = None
        best = BestK(self.save_top_k, self.mode, by_score=self.monitor is not None, tie_mode=self.tie_mode)
        kept = CheckpointAccount(best)
        links, forgives = self.save_last == "link", self.on_save_error == "warn"
        self._writer = CheckpointWriter(kept, links, self.total_limit, self.async_save, forgives)
        if not self._dirpath_is_given:
            self.dirpath = None

    # results

    @property
    def current_score(self) -> float | None:
        """The value of `monitor` at the last save, or None if nothing was saved or there is no `monitor`."""
        return self._current_score

    @property
    def best_model_path(self) -> str:
        """The path of the best checkpoint, or of the newest if `monitor` is None.

        Empty if nothing was saved yet.
        """
        return self._writer.kept.best.best

    @property
    def best_model_score(self) -> Tensor | None:
        """The value of `monitor` for the best checkpoint as a scalar tensor, or None if there is no such checkpoint."""
        best = self._writer.kept.best
        if self.monitor is None or not best.best:
            return None
        return torch.tensor(best.scores[best.best])

    @property
    def best_k_models(self) -> dict[str, float]:
        """A dict from the paths of the `save_top_k` checkpoints to their scores.

        Scores are 0 without `monitor`.
        """
        return dict(self._writer.kept.best.scores)

    @property
    def kept_scores(self) -> Mapping[str, float]:
        """A read-only view that maps the paths of the `save_top_k` checkpoints to their scores.

        Scores are 0 without `monitor`.
        """
        return self._writer.kept.best.scores

    @property
    def kth_best_model_path(self) -> str:
        """The path of the lowest-ranked checkpoint in the top k, which a better one replaces, or an empty string."""
        return self._writer.kept.best.worst

    @property
    def last_model_path(self) -> str:
        """The path of the checkpoint that `save_last` writes, or an empty string if there is none."""
        return self._writer.kept.last

    @property
    def newest_model_path(self) -> str:
        """The path of the most recently written checkpoint, regardless of its score, or an empty string."""
        return self._writer.kept.newest

    def name_of(self, template: str | None = None) -> CheckpointName:
        """Return a `CheckpointName`, which formats checkpoint names from a template such as `"{epoch}-{step}"`.

        Args:
            template: The template. If None, `filename`.
        """
        template = template or self.filename or "{epoch}-{step}"
        return CheckpointName(template, self.auto_insert_metric_name, self.CHECKPOINT_EQUALS_CHAR)

    def score_of(self, trainer: Trainer, was_validated: bool) -> float | None:
        """Return the metric by which checkpoints are compared. Raise if a validation has run without logging it.

        None if it has not been logged yet, or if no metric is monitored.

        Args:
            trainer: The running Trainer.
            was_validated: True if this run has had a validation.

        Raises:
            ConfigurationError: If the metric was not logged although a validation has run.
        """
        if self.monitor is None:
            return None
        metrics = {"epoch": trainer.current_epoch, "step": trainer.global_step, **trainer.callback_metrics}
        score = monitored_value(metrics, self.monitor)
        if score is None:
            message = missing_metric_message(metrics, self.monitor, "ModelCheckpoint")
            is_early = trainer.validates or self.every_n_epochs == 0 or trainer.check_val_every_n_epoch != 1
            if was_validated or not is_early:
                raise ConfigurationError(message)
            logger.warning_once(f"{message} No validation has run yet, so no checkpoint is kept for now.")
        elif score != score:
            logger.warning(
                f"ModelCheckpoint: {self.monitor} is NaN at step {trainer.global_step}. This checkpoint is not among "
                "the best."
            )
        return score

    def tie_of(self, trainer: Trainer) -> float | None:
        """Return the latest value of the metric `tie_monitor`, which decides between checkpoints of equal score.

        Returns None without a `tie_monitor`.

        Args:
            trainer: The running Trainer.

        Raises:
            ConfigurationError: If the metric was not logged.
        """
        if self.tie_monitor is None:
            return None
        metrics = {"epoch": trainer.current_epoch, "step": trainer.global_step, **trainer.callback_metrics}
        value = monitored_value(metrics, self.tie_monitor)
        if value is None:
            raise ConfigurationError(missing_metric_message(metrics, self.tie_monitor, "ModelCheckpoint"))
        return value

    def format_checkpoint_name(
        self, metrics: Mapping[str, Any], filename: str | None = None, ver: int | None = None
    ) -> str:
        """Return the path that a checkpoint with the given epoch, step and metric values would have.

        Args:
            metrics: A dict from names to values, including `epoch` and `step`.
            filename: A name template. If None, that of the callback.
            ver: A version number to append as `-v<ver>`, or None.
        """
        text = self.name_of(filename).format(int(metrics.get("epoch", 0)), int(metrics.get("step", 0)), metrics)
        text += "" if ver is None else f"-v{ver}"
        return os.path.join(self.dirpath or "", text + self.FILE_EXTENSION)

    def to_yaml(self, filepath: str | os.PathLike[str] | None = None) -> None:
        """Write the paths and scores in `best_k_models` to a YAML file.

        Args:
            filepath: The file to write. If None, `best_k_models.yaml` in the checkpoint directory.
        """
        import yaml

        path = os.path.join(self.dirpath or "", "best_k_models.yaml") if filepath is None else filepath
        with open(path, "w") as file:
            yaml.safe_dump({path: float(score) for path, score in self.best_k_models.items()}, file)

    def directories(self, trainer: Trainer) -> list[str]:
        """Return the directories in which an earlier run of this script may have saved checkpoints, likely ones first.

        A single process may call it, and it may be called before `setup`.

        Args:
            trainer: The running Trainer.
        """
        if self.dirpath is not None and self._dirpath_is_given:
            return [checkpoint_files.absolute_directory(self.dirpath)]
        return checkpoint_files.default_directories(trainer.loggers, trainer.default_root_dir)

    # state

    @property
    def state_key(self) -> str:
        return self.build_state_key(
            monitor=self.monitor,
            mode=self.mode,
            every_n_train_steps=self.every_n_train_steps,
            every_n_epochs=self.every_n_epochs,
            train_time_interval=self.train_time_interval and self.train_time_interval.total_seconds(),
            **({} if self.schedule is None else {"every": str(self.schedule)}),
        )

    def state_dict(self) -> dict[str, Any]:
        score = self.best_model_score
        return {
            **self._writer.kept.state_dict(self.dirpath or ""),
            "dirpath": without_credentials(self.dirpath or "") or None,
            "below_root": checkpoint_files.relative(self.dirpath, self._root),
            "best_model_score": None if score is None else float(score),
            "current_score": self._current_score,
            "validations": self._validations,
            "judged": self._judged,
            "last_step": self._last_step,
            "waits_for_validation": self._waits_for_validation,
            "elapsed": self._elapsed if self._timer is None else self._timer.elapsed,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state = SavedAccount.of(state_dict)
        self._current_score = checked_number(state_dict, "current_score", float, optional=True)
        self._validations = checked_number(state_dict, "validations", int)
        self._judged = checked_number(state_dict, "judged", int)
        self._last_step = checked_number(state_dict, "last_step", int)
        self._waits_for_validation = checked_number(state_dict, "waits_for_validation", bool)
        self._elapsed = checked_number(state_dict, "elapsed", float, optional=True) or 0.0
        self._is_resumed = True
        # Continue in the directory of the earlier run, which may have moved with its root.
        if not self._dirpath_is_given and self._root:
            self.dirpath = decide_on_main_process(
                lambda: checkpoint_files.directory_to_resume(self.dirpath, state, self._root, self._default_directories)
            )
        directory = self.dirpath
        if directory is None or not decide_on_main_process(lambda: checkpoint_files.is_directory_of(directory, state)):
            logger.warning(
                f"The resumed run saved in {state.saved_in}, but this run saves in {directory}. The earlier "
                "checkpoints are left unchanged and are not ranked with those of this run."
            )
            return
        is_local = checkpoint_files.is_local(directory)
        outside = decide_on_main_process(lambda: state.names_leading_outside(directory) if is_local else set())
        if outside:
            logger.warning(
                f"{', '.join(sorted(outside))} in {directory} are links to places outside of this directory. They "
                "are left unchanged and are not ranked with the checkpoints of this run."
            )
        self._writer.kept.restore(state.without(outside), directory)

    # hooks

    def setup(self, trainer: Trainer, task: Task, stage: str) -> None:
        self._fitting = stage == "fit" and not trainer.fast_dev_run
        if not self._fitting:
            return
        self._root = checkpoint_files.absolute_directory(trainer.default_root_dir)
        self._default_directories = checkpoint_files.default_directories(trainer.loggers, self._root)
        if self.dirpath is None:  # `log_dir` is local even if checkpoints go to a URL
            root = decide_on_main_process(
                lambda: (checkpoint_files.is_local(self._root) and trainer.log_dir) or self._root
            )
            self.dirpath = os.path.join(root, "checkpoints")
        self.dirpath = checkpoint_files.absolute_directory(self.dirpath)
        if self.save_last == "link" and not checkpoint_files.is_local(self.dirpath):
            raise ConfigurationError(
                f"ModelCheckpoint(save_last='link') is only supported for local file paths, not for {self.dirpath}. "
                "Use save_last=True.",
            )
        self._fits += 1
        self._validations = self._judged = 0
        self._last_saved = -1
        self._waits_for_validation = self._is_resumed = False
        self._timer, self._elapsed = None, 0.0

    def teardown(self, trainer: Trainer, task: Task, stage: str) -> None:
        # After an exception other processes may have exited. A save that waits for them would hang.
        self._writer.abandon(wait=trainer.world_size == 1)
        self._fitting = self._training = False

    def on_sanity_check_end(self, trainer: Trainer, task: Task) -> None:
        if self.monitor is not None and self._fitting:
            # The sanity check has logged validation metrics, so a typo in `monitor` shows before the first epoch.
            typo = decide_on_main_process(
                lambda: find_typo(trainer.logged.names("validate"), str(self.monitor), "ModelCheckpoint")
            )
            if typo is not None:
                raise ConfigurationError(typo)

    def on_train_start(self, trainer: Trainer, task: Task) -> None:
        if not self._is_resumed:
            self._last_step = trainer.global_step
        self._training = self._fitting
        self._timer = _interval_timer(self, trainer, self._elapsed) if self._fitting else None

    def on_train_batch_end(self, trainer: Trainer, task: Task, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not self._writer.is_idle:
            self._writer.poll(trainer)
        if not self.every_n_train_steps and self._timer is None:
            return
        step = trainer.global_step
        if step == self._last_step or not self._fitting:
            return  # the optimizer did not step
        if self._timer is not None:
            due = self._timer.is_due(step)
        else:
            due = step % self.every_n_train_steps == 0
        # A validation follows this step and changes the metrics, so the save waits for it.
        if due and (self.monitor or self.name_of().fields) and getattr(trainer, "validation_follows", False):
            self._waits_for_validation = True
        elif due:
            self._save(trainer, task)

    def on_validation_end(self, trainer: Trainer, task: Task) -> None:
        if not self._fitting or trainer.sanity_checking:
            return
        self._validations += 1
        # The sanity check is no validation of this run, so it must not trigger a save.
        epoch_is_due = not self.saves_at_epoch_end(trainer) and self._epoch_is_due(trainer)
        if self._waits_for_validation or epoch_is_due:
            self._waits_for_validation = False
            self._save(trainer, task)

    def on_train_epoch_end(self, trainer: Trainer, task: Task) -> None:
        if not self._fitting:
            return
        was_validated, self._judged = self._validations > self._judged, self._validations
        is_validated = self._validations > 0 or ((trainer.check_val_every_n_epoch or 1) > 1 and trainer.validates)
        # Without a validation in this epoch, the metric would be that of older weights.
        is_stale = self.monitor is not None and is_validated and not was_validated
        if is_stale and self.save_on_train_epoch_end is None:
            return
        if self.saves_at_epoch_end(trainer) and self._epoch_is_due(trainer):
            self._save(trainer, task)

    def on_train_end(self, trainer: Trainer, task: Task) -> None:
        self.settle()
        if self.save_last and self._fitting and not self.newest_model_path and trainer.global_step:
            self._save(trainer, task, only_last=True)  # the run was shorter than the interval
            self.settle()

    def on_exception(self, trainer: Trainer, task: Task, exception: BaseException) -> None:
        wanted = self.save_on_exception and self._training and isinstance(exception, Exception)
        # After a failed save, another one would probably fail too.
        if not wanted or isinstance(exception, CheckpointError):
            return
        if self._is_saved(trainer.global_step):
            return
        moment = f"exception-step={trainer.global_step}"
        # A save needs all processes, and would hang if some of them did not raise.
        if all_arrive(f"{self.state_key}/{self._fits}/{moment}", EXCEPTION_PATIENCE):
            try:
                name = decide_on_main_process(lambda: self._formatted_filename(trainer) or moment)
                self._save_now(trainer, task, name, is_passing=False)
            except DrivetrainError as error:
                logger.error(f"ModelCheckpoint(save_on_exception=True): {error}")  # the original exception is raised
        else:
            logger.warning("ModelCheckpoint: not all processes raised an exception, so no checkpoint is saved.")

    def _is_saved(self, step: int) -> bool:
        return bool(self.newest_model_path) and self._last_saved == step and not self.save_weights_only

    def _formatted_filename(self, trainer: Trainer) -> str | None:
        """Return the name of a new checkpoint, or None if no `filename` was given."""
        if self.filename is None or self.dirpath is None:
            return None
        text = self.name_of().format(trainer.current_epoch, trainer.global_step, trainer.callback_metrics)
        if not self.enable_version_counter:
            return text
        path = checkpoint_files.free_path(
            os.path.join(self.dirpath, text), self.FILE_EXTENSION, first=self.STARTING_VERSION
        )
        return os.path.relpath(path, self.dirpath).removesuffix(self.FILE_EXTENSION)

    def _epoch_is_due(self, trainer: Trainer) -> bool:
        every = self.every_n_epochs
        return every > 0 and (trainer.current_epoch + 1) % every == 0 and trainer.global_step != self._last_step

    def saves_at_epoch_end(self, trainer: Trainer) -> bool:
        """Return whether this callback saves at the end of training epochs instead of after validations.

        Args:
            trainer: The running Trainer.
        """
        if self.save_on_train_epoch_end is not None:
            return self.save_on_train_epoch_end
        return trainer.validates_whole_epochs or not trainer.validates

    # saving

    def settle(self) -> None:
        """Wait until the checkpoint that is being written in the background is complete.

        Every process must call this method.

        Raises:
            CheckpointError: If the checkpoint could not be written and `on_save_error` is `"raise"`.
        """
        self._writer.settle()

    def protect(self, path: str) -> None:
        """Exclude a checkpoint from automatic removal, so that it outlives better and newer checkpoints.

        Args:
            path: The path of the checkpoint.
        """
        self._writer.protect(path)

    def save_now(self, trainer: Trainer, reason: str = "preempted") -> str:
        """Save a resumable checkpoint at once, before a preemption ends the run.

        Every process must call this method. The checkpoint is removed once a newer checkpoint of this run is durable.

        Args:
            trainer: The running Trainer.
            reason: The first part of the name, as in `preempted-step=<n>`.

        Returns:
            The path of the checkpoint to resume from. If saving fails and `on_save_error` is `"warn"`, this is the
            newest earlier checkpoint, or an empty string.

        Raises:
            CheckpointError: If the checkpoint could not be written and `on_save_error` is `"raise"`.
        """
        if self._fitting and trainer.task is not None:
            self._save_now(trainer, trainer.task, f"{reason}-step={trainer.global_step}", is_passing=True)
            self._last_step = trainer.global_step  # the unfinished epoch must not be saved again
        return self.newest_model_path

    def _save_now(self, trainer: Trainer, task: Task, name: str, is_passing: bool) -> None:
        assert self.dirpath is not None
        if _is_sound(trainer, task):
            path = os.path.join(self.dirpath, name + self.FILE_EXTENSION)
            if self._writer.save_now(trainer, path, is_passing):
                logger.info(f"Saved {path}.")

    def _save(self, trainer: Trainer, task: Task, only_last: bool = False) -> None:
        assert self.dirpath is not None
        for callback in trainer.checkpoint_callbacks:
            callback.settle()  # one save at a time, and each callback raises its own errors
        if not _is_sound(trainer, task):
            return
        kept = self._writer.kept
        decision = decide_on_main_process(
            lambda: decide(self, kept, self.name_of(), trainer, self._validations > 0, only_last)
        )
        self._last_step = self._last_saved = trainer.global_step
        self._current_score = decision.score
        self._writer.save(trainer, self.dirpath, decision, self.save_weights_only)
        if decision.target is not None:
            trainer.tracker_group.checkpoint_saved(self)
        if self.verbose:
            decision.report(self, trainer)


def _interval_timer(options: ModelCheckpoint, trainer: Trainer, elapsed: float) -> StepInterval | None:
    # Steps and epochs are simply counted and need no timer.
    every = Duration.of(options.schedule or options.train_time_interval)
    return None if every is None else StepInterval(trainer, every, "ModelCheckpoint(every)", elapsed)


def _is_sound(trainer: Trainer, task: Task) -> bool:
    # No short circuit: `is_state_sound` may use collectives, so every callback must be called.
    answers = [callback.is_state_sound(trainer, task) for callback in trainer.callbacks]
    return all(answers)


# Checkpoints after an exception


PATIENCE = timedelta(seconds=3)
"""Time for which a process that raised an exception waits for all others to raise one too."""


class OnExceptionCheckpoint(Callback):
    """Callback that saves a checkpoint when an exception ends `fit`, so that the run can be resumed.

    The checkpoint holds the last finished step, so a resumed run repeats the step that raised. With several processes,
    all must raise within three seconds. If only some of them fail, nothing can be saved.

    Args:
        dirpath: The directory to save in.
        filename: The name of the checkpoint, without the extension `.ckpt`. An older checkpoint of this name is
            replaced.

    Raises:
        ConfigurationError: If `filename` is empty.

    Example:
        ```python
        from drivetrain import OnExceptionCheckpoint, Trainer

        trainer = Trainer(callbacks=[OnExceptionCheckpoint("checkpoints")], logger=False)
        ```
    """

    saves_checkpoints: ClassVar[bool] = True

    def __init__(self, dirpath: str | os.PathLike[str], filename: str = "on_exception") -> None:
        if not filename:
            raise ConfigurationError("OnExceptionCheckpoint(filename=''): filename must not be empty.")
        self.dirpath = os.fspath(dirpath)
        self.filename = filename
        self._fits = 0
        self._training = False

    @property
    def ckpt_path(self) -> str:
        """The path of the checkpoint that is saved after an exception, `<dirpath>/<filename>.ckpt`."""
        return os.path.join(self.dirpath, f"{self.filename}.ckpt")

    def on_train_start(self, trainer: Trainer, task: Task) -> None:
        self._fits += 1
        self._training = True

    def on_exception(self, trainer: Trainer, task: Task, exception: BaseException) -> None:
        if not self._training or isinstance(exception, CheckpointError) or not isinstance(exception, Exception):
            return
        if not all_arrive(f"OnExceptionCheckpoint/{self.ckpt_path}/{self._fits}/{trainer.global_step}", PATIENCE):
            logger.warning("OnExceptionCheckpoint: not all processes raised an exception, so no checkpoint is saved.")
            return
        try:
            trainer.save_checkpoint(self.ckpt_path)
        except DrivetrainError as error:
            logger.error(f"OnExceptionCheckpoint: {error}")  # the original exception is raised

    def teardown(self, trainer: Trainer, task: Task, stage: str) -> None:
        self._training = False
