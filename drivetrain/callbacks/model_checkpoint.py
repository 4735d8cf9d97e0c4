"""Save checkpoints while training: the best, the last, or every so often."""

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
    decide,
    number,
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
from drivetrain.runtime.store_agreement import all_arrive
from drivetrain.runtime.terminal import without_credentials

if TYPE_CHECKING:
    from torch import Tensor

    from drivetrain.trainer.task import Task
    from drivetrain.trainer.trainer import Trainer


# What the arguments of `ModelCheckpoint` may be


ON_SAVE_ERROR = ("raise", "warn")


def check_options(
    mode: str, save_last: Any, save_top_k: Any, monitor: str | None, total_limit: Any, on_save_error: str
) -> None:
    """Refuse arguments that are out of range or exclude each other."""
    check_mode(mode, "ModelCheckpoint")
    if not isinstance(save_top_k, int) or save_top_k < -1:
        raise ConfigurationError(
            f"ModelCheckpoint(save_top_k={save_top_k!r}): give how many checkpoints to keep, -1 for all or 0 for none. "
            "Must be >= -1.",
        )
    if monitor is None and save_top_k > 1:
        raise ConfigurationError(
            f"ModelCheckpoint(save_top_k={save_top_k}, monitor=None) is not a valid configuration: without monitor= no "
            "checkpoint is better than another. Name a metric, or keep 1 (the newest), -1 (all) or 0 (none). For "
            "the newest few, keep all and give total_limit.",
        )
    if save_last not in (None, True, False, "link", "copy"):
        raise ConfigurationError(f"ModelCheckpoint(save_last={save_last!r}): give True, False, 'link' or 'copy'.")
    if total_limit is not None and (not isinstance(total_limit, int) or total_limit < 1):
        raise ConfigurationError(
            f"ModelCheckpoint(total_limit={total_limit!r}): give how many checkpoints the directory may hold, 1 or "
            "more, or None for any number.",
        )
    if on_save_error not in ON_SAVE_ERROR:
        raise ConfigurationError(
            f"ModelCheckpoint(on_save_error={on_save_error!r}): give 'raise' to end the run where a checkpoint cannot "
            f"be written, or 'warn' to go on.{nearest(str(on_save_error), ON_SAVE_ERROR)}",
        )


class SaveInterval(NamedTuple):
    """How often checkpoints are saved: one of these is given.

    Attributes:
        steps: Every so many optimizer steps; 0 for never.
        time: Each time so much time has gone by.
        epochs: Every so many epochs; 0 for never.
        rest: Every so many samples or tokens, or every such part of the run.
    """

    steps: int
    time: timedelta | None
    epochs: int
    rest: Duration | None

    @classmethod
    def of(cls, steps: Any, interval: Any, epochs: Any, every: Any) -> SaveInterval:
        """The rhythm that the arguments ask for; an epoch where they ask for none."""
        other = " every= takes the other units."
        steps = count_of(steps, "every_n_train_steps", Unit.STEPS, other)
        epochs = count_of(epochs, "every_n_epochs", Unit.EPOCHS, other)
        time = clock_time(interval, "train_time_interval", other)
        duration = Duration.of(every, "every")
        _check_intervals(steps, time, epochs, duration)
        if duration is None:
            return cls(steps or 0, time, (0 if steps or time else 1) if epochs is None else epochs, None)
        if not duration.amount:
            raise ConfigurationError(f"ModelCheckpoint(every={every!r}): give more than nothing.")
        return cls(
            int(duration.amount) if duration.unit is Unit.STEPS else 0,
            duration.timedelta if duration.unit is Unit.SECONDS else None,
            int(duration.amount) if duration.unit is Unit.EPOCHS else 0,
            duration if duration.unit in (Unit.SAMPLES, Unit.TOKENS, Unit.RUN) else None,
        )


def _check_intervals(steps: int | None, interval: timedelta | None, epochs: int | None, every: Duration | None) -> None:
    """Refuse more than one rhythm, and numbers below zero."""
    given: dict[str, Any] = {"every_n_train_steps": steps, "train_time_interval": interval, "every_n_epochs": epochs}
    given = {name: value for name, value in given.items() if value}
    if every is not None:
        given["every"] = str(every)
    if len(given) > 1:
        raise ConfigurationError(
            "ModelCheckpoint: Combination of parameters every_n_train_steps, every_n_epochs and train_time_interval, "
            f"and every: give one of them, not {', '.join(f'{name}={value!r}' for name, value in given.items())}. For "
            "several rhythms, use several ModelCheckpoints.",
        )
    for name, value in (("every_n_train_steps", steps), ("every_n_epochs", epochs)):
        if value is not None and value < 0:
            raise ConfigurationError(f"ModelCheckpoint({name}={value}): Must be >= 0, where 0 is never.")


logger = get_logger(__name__)

EXCEPTION_PATIENCE = timedelta(seconds=3)
"""How long a process that raised waits for all others to have raised too, before it goes without a checkpoint."""


class ModelCheckpoint(Callback):
    """Saves checkpoints while training and keeps the best of them.

    A checkpoint is a directory, complete or not there at all. It is saved after the validation of the same step or
    epoch, so a monitored value is never the one of an earlier model, and the checkpoints that it replaces are removed
    only once it is durable.

    Args:
        dirpath: Where to save, also a URL of a file system of fsspec; `<log_dir>/checkpoints` by default, or, without a
            logger that has a directory, `<default_root_dir>/checkpoints`.
        filename: The name, such as `"{epoch}-{val_loss:.3f}"` with names of logged metrics, `epoch` and
            `step`. `"{epoch}-{step}"` by default.
        monitor: The metric by which checkpoints are best. Without it the newest are kept. Of equal ones the
            older counts as better; NaN is never among the best.
        verbose: Log each save.
        save_last: Keep a checkpoint called `last` as well: True or `"copy"` for a checkpoint of its own, whose
            files are hard links where it has the same content as another one; `"link"` for a relative symbolic
            link to the newest, which is then kept under its own name, too. A run that ends before its first interval
            leaves it as well.
        save_top_k: How many checkpoints to keep; -1 for all, 0 for none.
        save_weights_only: Save the model without optimizers and the state of the run.
        mode: `"min"` where a lower value of `monitor` is better, `"max"` where a higher one is.
        auto_insert_metric_name: Write `epoch=3` into the name rather than `3`.
        every_n_train_steps: Save every so many optimizer steps.
        train_time_interval: Save each time so much time has gone by, on the main process's clock: a timedelta, a dict
            of its arguments, `"DD:HH:MM:SS"` or `"10 min"`. A resumed run continues the interval under way when its
            checkpoint was written; the time that nothing ran does not count.
        every_n_epochs: Save every so many epochs; 1 by default if no other interval is given.
        save_on_train_epoch_end: Save at the end of the training epoch (True) or after each validation
            (False). By default after each validation where there are several in an epoch, and otherwise at
            the end of the training epoch, after its validation. With `monitor`, an epoch without the
            validation that others have is left out: its value would be that of an earlier model.
        enable_version_counter: Add `-v1`, `-v2`, ... to a name that is taken, instead of replacing that
            checkpoint.
        save_on_exception: Save `filename`, or `exception-step=<n>` if none is given, when an exception ends the run,
            unless that step is saved already: in a world of one, and among several processes where all of them raise
            within a few seconds.
        total_limit: Keep at most so many checkpoints in the directory, also of earlier runs: the oldest go. The best
            ones by `monitor`, `last` and the newest count, but always stay.
        async_save: Write in the background while training continues; one save at a time.
        every: How often to save, in any unit: `"1000 steps"`, `"2 epochs"`, `"10 min"`, `"1M samples"`,
            `"50M tokens"`, `"10%"` of the run. It takes the place of the three intervals above.
        on_save_error: `"raise"`, or `"warn"` to log the error, such as a full disk, and continue the run.
            Either way the checkpoints before stay as they are.

    Attributes:
        best_model_path: The path of the best checkpoint, or an empty text.
        best_model_score: Its score, a tensor without dimensions, or None.
        last_model_path: The path of `last`, or an empty text.
        best_k_models: Paths and scores of the checkpoints kept.

    Raises:
        ConfigurationError: If arguments exclude each other, and during the run if the metric was not logged.
        CheckpointError: During the run, if a checkpoint cannot be written. One written in the background raises at
            the next step, or, on several processes, as soon as they have agreed to stop.

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
    ) -> None:
        check_options(mode, save_last, save_top_k, monitor, total_limit, on_save_error)
        self.dirpath = os.path.expanduser(os.fspath(dirpath)) if dirpath is not None else None
        self.filename = filename
        self.monitor = monitor
        self.verbose = verbose
        self.save_last = save_last or False
        self.save_top_k = save_top_k
        self.save_weights_only = save_weights_only
        self.mode = mode
        self.auto_insert_metric_name = auto_insert_metric_name
        self.every_n_train_steps, self.train_time_interval, self.every_n_epochs, self.rhythm = SaveInterval.of(
            every_n_train_steps, train_time_interval, every_n_epochs, every
        )
        self.save_on_train_epoch_end = save_on_train_epoch_end
        self.enable_version_counter = enable_version_counter
        self.save_on_exception = self.saves_within_steps = save_on_exception
        self.total_limit = total_limit
        self.async_save = async_save
        self.on_save_error = on_save_error

        self._dirpath_is_given = dirpath is not None
        self.forget_run()
        self._root = ""  # the run's default directory
        self._own_places: list[str] = []  # where runs of this script save by default
        self._fitting = self._training = self._is_resumed = False
        self._fits = self._last_step = self._validations = 0
        self._last_saved = -1  # the step of the last save of this run
        self._judged = 0  # how many validations came before the last epoch's end
        self._waits_for_validation = False
        self._timer: StepInterval | None = None
        self._elapsed = 0.0  # seconds of the interval under way, in the run before

    def forget_run(self) -> None:
        self._current_score: float | None = None
        kept = CheckpointAccount(BestK(self.save_top_k, self.mode, by_score=self.monitor is not None))
        links, forgives = self.save_last == "link", self.on_save_error == "warn"
        self._writer = CheckpointWriter(kept, links, self.total_limit, self.async_save, forgives)
        if not self._dirpath_is_given:
            self.dirpath = None

    # what there is

    @property
    def current_score(self) -> float | None:
        """The score of the last save."""
        return self._current_score

    @property
    def best_model_path(self) -> str:
        """The path of the best checkpoint; without `monitor` of the newest."""
        return self._writer.kept.best.best

    @property
    def best_model_score(self) -> Tensor | None:
        """The score of the best checkpoint."""
        best = self._writer.kept.best
        if self.monitor is None or not best.best:
            return None
        return torch.tensor(best.scores[best.best])

    @property
    def best_k_models(self) -> dict[str, float]:
        """Paths and scores of the checkpoints kept."""
        return dict(self._writer.kept.best.scores)

    @property
    def kept_scores(self) -> Mapping[str, float]:
        """Paths of the checkpoints kept, and their scores; 0 where scores do not count."""
        return self._writer.kept.best.scores

    @property
    def kth_best_model_path(self) -> str:
        """The path of the checkpoint that a better one would replace."""
        return self._writer.kept.best.worst

    @property
    def last_model_path(self) -> str:
        """The path of `last`, or an empty text."""
        return self._writer.kept.last

    @property
    def newest_model_path(self) -> str:
        """The path of the checkpoint that was written last, whatever its score, or an empty text."""
        return self._writer.kept.newest

    def name_of(self, template: str | None = None) -> CheckpointName:
        """The name of a checkpoint from a template.

        Args:
            template: The template; `filename` if None.
        """
        template = template or self.filename or "{epoch}-{step}"
        return CheckpointName(template, self.auto_insert_metric_name, self.CHECKPOINT_EQUALS_CHAR)

    def score_of(self, trainer: Trainer, was_validated: bool) -> float | None:
        """Return the score of the model as it is, or None if there is none yet.

        Args:
            trainer: The Trainer.
            was_validated: Whether there was a validation in this run.

        Raises:
            ConfigurationError: The metric was not logged.
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
            logger.warning_once(f"{message} There was no validation yet, so nothing is kept for now.")
        elif score != score:
            logger.warning(
                f"ModelCheckpoint: {self.monitor} is NaN at step {trainer.global_step}. Such a model is not kept among "
                "the best."
            )
        return score

    def format_checkpoint_name(
        self, metrics: Mapping[str, Any], filename: str | None = None, ver: int | None = None
    ) -> str:
        """Return the path of a checkpoint with these metrics.

        Args:
            metrics: Names and values, `epoch` and `step` among them.
            filename: A template in place of this callback's.
            ver: The number that distinguishes it from others of the same name.
        """
        text = self.name_of(filename).format(int(metrics.get("epoch", 0)), int(metrics.get("step", 0)), metrics)
        text += "" if ver is None else f"-v{ver}"
        return os.path.join(self.dirpath or "", text + self.FILE_EXTENSION)

    def to_yaml(self, filepath: str | os.PathLike[str] | None = None) -> None:
        """Write `best_k_models`, paths and scores.

        Args:
            filepath: Where; `best_k_models.yaml` beside the checkpoints if None.
        """
        import yaml

        path = os.path.join(self.dirpath or "", "best_k_models.yaml") if filepath is None else filepath
        with open(path, "w") as file:
            yaml.safe_dump({path: float(score) for path, score in self.best_k_models.items()}, file)

    def directories(self, trainer: Trainer) -> list[str]:
        """Return where an earlier run of this script may have saved, the likeliest place first.

        May be called by one process alone, and before `setup`.

        Args:
            trainer: The Trainer that runs.
        """
        if self.dirpath is not None and self._dirpath_is_given:
            return [checkpoint_files.resolved(self.dirpath)]
        return checkpoint_files.default_places(trainer.loggers, trainer.default_root_dir)

    # the state of this callback

    @property
    def state_key(self) -> str:
        return self.build_state_key(
            monitor=self.monitor,
            mode=self.mode,
            every_n_train_steps=self.every_n_train_steps,
            every_n_epochs=self.every_n_epochs,
            train_time_interval=self.train_time_interval and self.train_time_interval.total_seconds(),
            **({} if self.rhythm is None else {"every": str(self.rhythm)}),
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
        state_dict = _completed(state_dict)
        state = SavedAccount.of(state_dict)
        self._current_score = number(state_dict, "current_score", float, optional=True)
        self._validations, self._judged = number(state_dict, "validations", int), number(state_dict, "judged", int)
        self._last_step = number(state_dict, "last_step", int)
        self._waits_for_validation = number(state_dict, "waits_for_validation", bool)
        self._elapsed = number(state_dict, "elapsed", float, optional=True) or 0.0
        self._is_resumed = True
        if not self._dirpath_is_given and self._root:
            self.dirpath = decide_on_main_process(
                lambda: checkpoint_files.continued(self.dirpath, state, self._root, self._own_places)
            )
        directory = self.dirpath
        if directory is None or not decide_on_main_process(lambda: checkpoint_files.is_same(directory, state)):
            logger.warning(
                f"The run to resume saved in {state.saved_in}, this one saves in {directory}: the checkpoints there "
                "stay as they are and do not count among the best ones of this run."
            )
            return
        is_local = checkpoint_files.is_local(directory)
        outside = decide_on_main_process(lambda: state.leading_outside(directory) if is_local else set())
        if outside:
            logger.warning(
                f"{', '.join(sorted(outside))} in {directory} lead outside of it, so they do not count among the "
                "checkpoints of this run and stay as they are."
            )
        self._writer.kept.restore(state.without(outside), directory)

    # when

    def setup(self, trainer: Trainer, task: Task, stage: str) -> None:
        self._fitting = stage == "fit" and not trainer.fast_dev_run
        if not self._fitting:
            return
        self._root = checkpoint_files.resolved(trainer.default_root_dir)
        self._own_places = checkpoint_files.default_places(trainer.loggers, self._root)
        if self.dirpath is None:  # trackers write locally, also where checkpoints go to a URL
            root = decide_on_main_process(
                lambda: (checkpoint_files.is_local(self._root) and trainer.log_dir) or self._root
            )
            self.dirpath = os.path.join(root, "checkpoints")
        self.dirpath = checkpoint_files.resolved(self.dirpath)
        if self.save_last == "link" and not checkpoint_files.is_local(self.dirpath):
            raise ConfigurationError(
                f"ModelCheckpoint(save_last='link') is only supported for local file paths, not for {self.dirpath}. "
                "Give save_last=True.",
            )
        self._fits += 1
        self._validations = self._judged = 0
        self._last_saved = -1
        self._waits_for_validation = self._is_resumed = False
        self._timer, self._elapsed = None, 0.0

    def teardown(self, trainer: Trainer, task: Task, stage: str) -> None:
        # After an exception peers may be gone, and a save that waits for them would never end.
        self._writer.abandon(wait=trainer.world_size == 1)
        self._fitting = self._training = False

    def on_sanity_check_end(self, trainer: Trainer, task: Task) -> None:
        if self.monitor is not None and self._fitting:
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
        if due and (self.monitor or self.name_of().fields) and getattr(trainer, "validation_follows", False):
            self._waits_for_validation = True
        elif due:
            self._save(trainer, task)

    def on_validation_end(self, trainer: Trainer, task: Task) -> None:
        if not self._fitting or trainer.sanity_checking:
            return
        self._validations += 1
        epoch_is_due = not self.saves_at_epoch_end(trainer) and self._epoch_is_due(trainer)
        if self._waits_for_validation or epoch_is_due:
            self._waits_for_validation = False
            self._save(trainer, task)

    def on_train_epoch_end(self, trainer: Trainer, task: Task) -> None:
        if not self._fitting:
            return
        was_validated, self._judged = self._validations > self._judged, self._validations
        is_validated = self._validations > 0 or ((trainer.check_val_every_n_epoch or 1) > 1 and trainer.validates)
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
        if not wanted or isinstance(exception, CheckpointError):
            return
        if self._is_saved(trainer.global_step):
            return  # the last step is there already
        moment = f"exception-step={trainer.global_step}"
        if all_arrive(f"{self.state_key}/{self._fits}/{moment}", EXCEPTION_PATIENCE):
            try:
                name = decide_on_main_process(lambda: self._name_given(trainer) or moment)
                self._save_now(trainer, task, name, is_passing=False)
            except DrivetrainError as error:
                logger.error(f"ModelCheckpoint(save_on_exception=True): {error}")  # the run ends with its own
        else:
            logger.warning("ModelCheckpoint: not all processes raised, so no checkpoint of this moment can be saved.")

    def _is_saved(self, step: int) -> bool:
        """Whether this run has saved a checkpoint of a step that can be resumed."""
        return bool(self.newest_model_path) and self._last_saved == step and not self.save_weights_only

    def _name_given(self, trainer: Trainer) -> str | None:
        """The name that `filename` stands for now, which no checkpoint has; None where none was given."""
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
        """Whether it saves at the end of an epoch, rather than after a validation."""
        if self.save_on_train_epoch_end is not None:
            return self.save_on_train_epoch_end
        return trainer.validates_whole_epochs or not trainer.validates

    # what

    def settle(self) -> None:
        """Wait until a checkpoint that is being written in the background is durable; called by all processes.

        Raises:
            CheckpointError: It could not be written, and errors are to be raised.
        """
        self._writer.settle()

    def protect(self, path: str) -> None:
        """Never remove a checkpoint, whatever becomes superfluous.

        Args:
            path: The checkpoint.
        """
        self._writer.protect(path)

    def save_now(self, trainer: Trainer, reason: str = "preempted") -> str:
        """Save a run that is about to be ended, at once and with all that a resume needs; called by all processes.

        The checkpoint is removed when a newer one of this run is durable.

        Args:
            trainer: The Trainer that runs.
            reason: What the name begins with: `preempted-step=<n>`.

        Returns:
            The path of the checkpoint to resume from: this one or, where it could not be saved and errors only warn,
            the newest before it; an empty text where there is none.

        Raises:
            CheckpointError: It could not be written, and errors are to be raised.
        """
        if self._fitting and trainer.task is not None:
            self._save_now(trainer, trainer.task, f"{reason}-step={trainer.global_step}", is_passing=True)
            self._last_step = trainer.global_step  # nothing of an epoch that is not over is saved once more
        return self.newest_model_path

    def _save_now(self, trainer: Trainer, task: Task, name: str, is_passing: bool) -> None:
        assert self.dirpath is not None
        if _is_sound(trainer, task):
            path = os.path.join(self.dirpath, name + self.FILE_EXTENSION)
            if self._writer.save_now(trainer, path, is_passing):
                logger.info(f"Saved {path}.")

    def _save(self, trainer: Trainer, task: Task, only_last: bool = False) -> None:
        """Save what is to be saved now; called by all processes."""
        assert self.dirpath is not None
        for callback in trainer.checkpoint_callbacks:
            callback.settle()  # one save at a time, and each error where it belongs
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
    """What decides when the next checkpoint is due, where neither steps nor epochs are counted for that."""
    every = Duration.of(options.rhythm or options.train_time_interval)
    return None if every is None else StepInterval(trainer, every, "ModelCheckpoint(every)", elapsed)


def _is_sound(trainer: Trainer, task: Task) -> bool:
    """Ask the callbacks whether this state is worth saving; all, since they may exchange values with their peers."""
    answers = [callback.is_state_sound(trainer, task) for callback in trainer.callbacks]
    return all(answers)


# Save a checkpoint when an exception ends the run


PATIENCE = timedelta(seconds=3)
"""How long a process that raised waits for all others to have raised too."""


class OnExceptionCheckpoint(Callback):
    """Saves a checkpoint when an exception ends `fit`, from which the run can be resumed.

    What is saved is the last finished step, so that the step which raised is done again. Of several processes all have
    to raise within three seconds: where one fails alone, the others are busy elsewhere and nothing can be saved.

    Args:
        dirpath: The directory that the checkpoint is saved in.
        filename: Its name there, without the extension `.ckpt`. An older checkpoint of this name is replaced.

    Raises:
        ConfigurationError: If the name is empty.

    Example:
        ```python
        from drivetrain import OnExceptionCheckpoint, Trainer

        trainer = Trainer(callbacks=[OnExceptionCheckpoint("checkpoints")], logger=False)
        ```
    """

    saves_checkpoints: ClassVar[bool] = True

    def __init__(self, dirpath: str | os.PathLike[str], filename: str = "on_exception") -> None:
        if not filename:
            raise ConfigurationError("OnExceptionCheckpoint(filename=''): give the checkpoint a name.")
        self.dirpath = os.fspath(dirpath)
        self.filename = filename
        self._fits = 0
        self._training = False

    @property
    def ckpt_path(self) -> str:
        """The checkpoint's path."""
        return os.path.join(self.dirpath, f"{self.filename}.ckpt")

    def on_train_start(self, trainer: Trainer, task: Task) -> None:
        self._fits += 1
        self._training = True

    def on_exception(self, trainer: Trainer, task: Task, exception: BaseException) -> None:
        # A checkpoint that could not be written, or one for a resume that is there already, needs no second.
        if not self._training or isinstance(exception, CheckpointError) or not isinstance(exception, Exception):
            return
        if not all_arrive(f"OnExceptionCheckpoint/{self.ckpt_path}/{self._fits}/{trainer.global_step}", PATIENCE):
            logger.warning("OnExceptionCheckpoint: not all processes raised, so no checkpoint can be saved.")
            return
        try:
            trainer.save_checkpoint(self.ckpt_path)
        except DrivetrainError as error:
            logger.error(f"OnExceptionCheckpoint: {error}")  # the run ends with its own

    def teardown(self, trainer: Trainer, task: Task, stage: str) -> None:
        self._training = False


def _completed(state: Mapping[str, Any]) -> dict[str, Any]:
    """Complete a state that has the best checkpoints as a mapping from path to score, and no more than that.

    Nothing in it is trusted yet: what becomes of it is checked as any other.
    """
    best = state.get("best_k_models")
    if not isinstance(best, Mapping):
        return dict(state)
    newest = state.get("best_model_path") or ""
    last = state.get("last_model_path") or ""
    score = state.get("current_score")
    # Without a metric such a state has its only checkpoint as a path alone.
    scores = [[path, _number(value)] for path, value in best.items()] or ([[newest, 0.0]] if newest else [])
    return {
        "best_k_models": scores,
        "newest_of_best": newest,
        "last_model_path": last,
        "newest_model_path": next(reversed(best), newest),
        "beside": "",
        "passing": [],
        "doomed": [],
        "dirpath": state.get("dirpath"),
        "below_root": None,
        "current_score": None if score is None else _number(score),
        "validations": 0,
        "judged": 0,
        "last_step": 0,
        "waits_for_validation": False,
        "elapsed": 0.0,
    }


def _number(value: Any) -> Any:
    """Return a number that was saved as a tensor, and anything else as it is."""
    return float(value) if isinstance(value, torch.Tensor) and value.numel() == 1 else value
