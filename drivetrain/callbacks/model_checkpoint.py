"""Save checkpoints while training: the best, the last, or every so often."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from drivetrain.callbacks.checkpoint import folder
from drivetrain.callbacks.monitoring.agreement import decide_on_main_process
from drivetrain.callbacks.base import Callback
from drivetrain.callbacks.checkpoint.options import check_intervals, check_options
from drivetrain.callbacks.checkpoint.policy import BestK, CheckpointName
from drivetrain.callbacks.checkpoint.writer import CheckpointWriter, Decision
from drivetrain.callbacks.checkpoint.kept import KeptCheckpoints
from drivetrain.callbacks.monitoring.monitor import missing_metric_message, monitored_value
from drivetrain.callbacks.display.step_timer import StepTimer
from drivetrain.runtime.assembly import all_arrive
from drivetrain.runtime.durations import parse_duration
from drivetrain.runtime.errors import CheckpointError, ConfigurationError, DrivetrainError
from drivetrain.runtime.logging import get_logger

if TYPE_CHECKING:
    from torch import Tensor

    from drivetrain.trainer.task import Task
    from drivetrain.trainer.trainer import Trainer

logger = get_logger(__name__)

EXCEPTION_PATIENCE = timedelta(seconds=3)
"""How long a process that raised waits for all others to have raised too, before it goes without a checkpoint."""


class ModelCheckpoint(Callback):
    """Saves checkpoints while training and keeps the best of them.

    A checkpoint is a directory, complete or not there at all. It is saved after the validation of the same step or
    epoch, so a monitored value is never the one of an earlier model, and the checkpoints that it replaces are removed
    only once it is durable.

    Args:
        dirpath: Where to save, also a URL that fsspec knows; ``<log_dir>/checkpoints`` by default, or, without a
            logger that has a directory, ``<default_root_dir>/checkpoints``.
        filename: The name, such as ``"{epoch}-{val_loss:.3f}"`` with names of logged metrics, ``epoch`` and
            ``step``. ``"{epoch}-{step}"`` by default.
        monitor: The metric that says which checkpoints are best. Without it the newest are kept. Of equal ones the
            older counts as better; NaN is never among the best.
        verbose: Log each save.
        save_last: Keep a checkpoint called ``last`` as well: True or ``"copy"`` for a checkpoint of its own, whose
            files are hard links where it has the same content as another one; ``"link"`` for a relative symbolic
            link to the newest, which is then kept under its own name, too.
        save_top_k: How many checkpoints to keep; -1 for all, 0 for none.
        save_weights_only: Save the model without optimizers and the state of the run.
        mode: ``"min"`` where a lower value of `monitor` is better, ``"max"`` where a higher one is.
        auto_insert_metric_name: Write ``epoch=3`` into the name rather than ``3``.
        every_n_train_steps: Save every so many optimizer steps.
        train_time_interval: Save each time so much time has gone by, on the main process's clock: a timedelta, a dict
            of its arguments or ``"DD:HH:MM:SS"``. A resumed run goes on with the interval that was under way when its
            checkpoint was written; the time that nothing ran does not count.
        every_n_epochs: Save every so many epochs; 1 by default if no other interval is given.
        save_on_train_epoch_end: Save at the end of the training epoch (True) or after each validation
            (False). By default after each validation where there are several in an epoch, and otherwise at
            the end of the training epoch, after its validation. With `monitor`, an epoch without the
            validation that others have is left out: its value would be that of an earlier model.
        enable_version_counter: Add ``-v1``, ``-v2``, ... to a name that is taken, instead of replacing that
            checkpoint.
        save_on_exception: Save ``exception-step=<n>`` when an exception ends the run: in a world of one, and among
            several processes where all of them raise within a few seconds.
        total_limit: Keep at most so many checkpoints in the directory, also of earlier runs: the oldest go. The best
            ones by `monitor`, ``last`` and the newest count, but always stay.
        async_save: Write in the background while training goes on; one save at a time.
        on_save_error: ``"raise"``, or ``"warn"`` to log the error, such as a full disk, and go on with the run.
            Either way the checkpoints before stay as they are.

    Attributes:
        best_model_path: The path of the best checkpoint, or an empty text.
        best_model_score: Its score, a tensor without dimensions, or None.
        last_model_path: The path of ``last``, or an empty text.
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
        save_weights_only: bool = False,
        mode: str = "min",
        auto_insert_metric_name: bool = True,
        every_n_train_steps: int | None = None,
        train_time_interval: timedelta | dict[str, int] | str | None = None,
        every_n_epochs: int | None = None,
        save_on_train_epoch_end: bool | None = None,
        enable_version_counter: bool = True,
        save_on_exception: bool = False,
        total_limit: int | None = None,
        async_save: bool = False,
        on_save_error: str = "raise",
    ) -> None:
        interval = parse_duration(train_time_interval, "train_time_interval")
        check_options(mode, save_last, save_top_k, monitor, total_limit, on_save_error)
        check_intervals(every_n_train_steps, interval, every_n_epochs)
        self.dirpath = os.fspath(dirpath) if dirpath is not None else None
        self.filename = filename
        self.monitor = monitor
        self.verbose = verbose
        self.save_last = save_last or False
        self.save_top_k = save_top_k
        self.save_weights_only = save_weights_only
        self.mode = mode
        self.auto_insert_metric_name = auto_insert_metric_name
        self.every_n_train_steps = every_n_train_steps or 0
        self.train_time_interval = interval
        if every_n_epochs is None:
            every_n_epochs = 0 if every_n_train_steps or interval else 1
        self.every_n_epochs = every_n_epochs
        self.save_on_train_epoch_end = save_on_train_epoch_end
        self.enable_version_counter = enable_version_counter
        self.save_on_exception = self.saves_within_steps = save_on_exception
        self.total_limit = total_limit
        self.async_save = async_save
        self.on_save_error = on_save_error

        self.current_score: float | None = None
        kept = KeptCheckpoints(BestK(save_top_k, mode, by_score=monitor is not None))
        self._writer = CheckpointWriter(kept, save_last == "link", total_limit, async_save, on_save_error == "warn")
        self._elsewhere = ("", float("nan"))  # the best of an earlier run that saved in another directory
        self._name = CheckpointName(filename or "{epoch}-{step}", auto_insert_metric_name)
        self._dirpath_is_given = dirpath is not None
        self._root = ""  # the run's default directory
        self._fitting = self._training = False
        self._is_resumed = False
        self._fits = 0
        self._validations = 0
        self._judged = 0  # how many of these came before the last epoch's end
        self._last_step = 0
        self._waits_for_validation = False
        self._gets_ready = False
        self._timer: StepTimer | None = None
        self._elapsed = 0.0  # seconds of the interval under way, in the run before

    # what there is

    @property
    def best_model_path(self) -> str:
        """The path of the best checkpoint; without `monitor` of the newest."""
        return self._writer.kept.best.best or self._elsewhere[0]

    @property
    def best_model_score(self) -> Tensor | None:
        """The score of the best checkpoint."""
        if self.monitor is None or not self.best_model_path:
            return None
        best = self._writer.kept.best
        return torch.tensor(best.scores[best.best] if best.best else self._elsewhere[1])

    @property
    def best_k_models(self) -> dict[str, float]:
        """Paths and scores of the checkpoints kept."""
        return dict(self._writer.kept.best.scores)

    @property
    def kth_best_model_path(self) -> str:
        """The path of the checkpoint that a better one would replace."""
        return self._writer.kept.best.worst

    @property
    def last_model_path(self) -> str:
        """The path of ``last``, or an empty text."""
        return self._writer.kept.last

    @property
    def newest_model_path(self) -> str:
        """The path of the checkpoint that was written last, whatever its score, or an empty text."""
        return self._writer.kept.newest

    def directories(self, trainer: Trainer) -> list[str]:
        """Return where an earlier run of this script may have saved, the likeliest place first.

        May be called by one process alone, and before `setup`.

        Args:
            trainer: The Trainer that runs.
        """
        if self.dirpath is not None and self._dirpath_is_given:
            return [folder.resolved(self.dirpath)]
        return folder.default_places(trainer.loggers, trainer.default_root_dir)

    # the state of this callback

    @property
    def state_key(self) -> str:
        return self.build_state_key(
            monitor=self.monitor,
            mode=self.mode,
            every_n_train_steps=self.every_n_train_steps,
            every_n_epochs=self.every_n_epochs,
            train_time_interval=self.train_time_interval and self.train_time_interval.total_seconds(),
        )

    def state_dict(self) -> dict[str, Any]:
        score = self.best_model_score
        return {
            **self._writer.kept.state_dict(),
            "dirpath": self.dirpath,
            "below_root": folder.relative(self.dirpath, self._root),
            "best_model_path": self.best_model_path,
            "best_model_score": None if score is None else float(score),
            "current_score": self.current_score,
            "validations": self._validations,
            "judged": self._judged,
            "last_step": self._last_step,
            "waits_for_validation": self._waits_for_validation,
            "elapsed": self._elapsed if self._timer is None else self._timer.elapsed,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        score = state_dict["best_model_score"]
        self._elsewhere = (state_dict["best_model_path"], float("nan") if score is None else score)
        self.current_score = state_dict["current_score"]
        self._validations, self._judged = state_dict["validations"], state_dict["judged"]
        self._last_step = state_dict["last_step"]
        self._waits_for_validation = state_dict["waits_for_validation"]
        self._elapsed = state_dict.get("elapsed", 0.0)
        self._is_resumed = True
        old = state_dict["dirpath"]
        if not self._dirpath_is_given and self._root:
            below = state_dict["below_root"]
            self.dirpath = decide_on_main_process(lambda: folder.continued(self.dirpath, old, self._root, below))
        if decide_on_main_process(lambda: folder.is_same(self.dirpath, old, state_dict["newest_model_path"])):
            self._writer.kept.load_state_dict(state_dict, old, self.dirpath or old)
        else:
            logger.warning(
                f"The run to resume saved in {old}, this one saves in {self.dirpath}: the checkpoints there stay as "
                "they are and do not count among the best ones of this run."
            )

    # when

    def setup(self, trainer: Trainer, task: Task, stage: str) -> None:
        self._fitting = stage == "fit" and not trainer.fast_dev_run
        if not self._fitting:
            return
        self._root = os.path.abspath(trainer.default_root_dir)
        if self.dirpath is None:
            root = decide_on_main_process(lambda: trainer.log_dir or trainer.default_root_dir)
            self.dirpath = os.path.join(root, "checkpoints")
        self.dirpath = folder.resolved(self.dirpath)
        if self.save_last == "link" and not folder.is_local(self.dirpath):
            raise ConfigurationError(
                f"ModelCheckpoint(save_last='link'): there are no links at {self.dirpath}. Give save_last=True."
            )
        self._fits += 1
        self._validations = self._judged = 0
        self._waits_for_validation = self._is_resumed = False
        self._timer, self._elapsed = None, 0.0

    def teardown(self, trainer: Trainer, task: Task, stage: str) -> None:
        # After an exception peers may be gone, and a save that waits for them would never end.
        self._writer.abandon(wait=trainer.world_size == 1)
        self._fitting = self._training = False

    def on_train_start(self, trainer: Trainer, task: Task) -> None:
        if not self._is_resumed:
            self._last_step = trainer.global_step
        self._training = self._gets_ready = self._fitting
        self._timer = None
        if self.train_time_interval is not None and self._fitting:
            self._timer = StepTimer(self.train_time_interval.total_seconds(), trainer.global_step, self._elapsed)

    def on_train_batch_end(self, trainer: Trainer, task: Task, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not self._writer.is_idle:
            self._writer.poll(trainer)
        if self._gets_ready and trainer.global_step > self._last_step:
            self._gets_ready = False
            self._writer.get_ready(trainer, self.save_weights_only)
        if not self.every_n_train_steps and self._timer is None:
            return
        step = trainer.global_step
        if step == self._last_step or not self._fitting:
            return  # the optimizer did not step
        if self._timer is not None:
            due = self._timer.is_due(step)
        else:
            due = step % self.every_n_train_steps == 0
        if due and (self.monitor or self._name.fields) and getattr(trainer, "validation_follows", False):
            self._waits_for_validation = True
        elif due:
            self._save(trainer, task)

    def on_validation_end(self, trainer: Trainer, task: Task) -> None:
        if not self._fitting or trainer.sanity_checking:
            return
        self._validations += 1
        epoch_is_due = not self._saves_at_epoch_end(trainer) and self._epoch_is_due(trainer)
        if self._waits_for_validation or epoch_is_due:
            self._waits_for_validation = False
            self._save(trainer, task)

    def on_train_epoch_end(self, trainer: Trainer, task: Task) -> None:
        if not self._fitting:
            return
        was_validated, self._judged = self._validations > self._judged, self._validations
        is_stale = self.monitor is not None and self._validations > 0 and not was_validated
        if is_stale and self.save_on_train_epoch_end is None:
            return
        if self._saves_at_epoch_end(trainer) and self._epoch_is_due(trainer):
            self._save(trainer, task)

    def on_train_end(self, trainer: Trainer, task: Task) -> None:
        self._training = False
        self.settle()

    def on_exception(self, trainer: Trainer, task: Task, exception: BaseException) -> None:
        wanted = self.save_on_exception and self._training and isinstance(exception, Exception)
        if not wanted or isinstance(exception, CheckpointError):
            return
        name = f"exception-step={trainer.global_step}"
        if all_arrive(f"{self.state_key}/{self._fits}/{name}", EXCEPTION_PATIENCE):
            try:
                self._save_now(trainer, task, name, is_passing=False)
            except DrivetrainError as error:
                logger.error(f"ModelCheckpoint(save_on_exception=True): {error}")  # the run ends with its own
        else:
            logger.warning("ModelCheckpoint: not all processes raised, so no checkpoint of this moment can be saved.")

    def _epoch_is_due(self, trainer: Trainer) -> bool:
        every = self.every_n_epochs
        return every > 0 and (trainer.current_epoch + 1) % every == 0 and trainer.global_step != self._last_step

    def _saves_at_epoch_end(self, trainer: Trainer) -> bool:
        if self.save_on_train_epoch_end is not None:
            return self.save_on_train_epoch_end
        return trainer.val_check_interval in (None, 1.0)

    # what

    def settle(self) -> None:
        """Wait until a checkpoint that is being written in the background is durable; called by all processes.

        Raises:
            CheckpointError: It could not be written, and errors are to be raised.
        """
        self._writer.settle()

    def save_now(self, trainer: Trainer, reason: str = "preempted") -> str:
        """Save a run that is about to be ended, at once and with all that a resume needs; called by all processes.

        The checkpoint is removed when a newer one of this run is durable.

        Args:
            trainer: The Trainer that runs.
            reason: What the name begins with: ``preempted-step=<n>``.

        Returns:
            The path of the checkpoint to go on from: this one or, where it could not be saved and errors only warn,
            the newest before it; an empty text where there is none.

        Raises:
            CheckpointError: It could not be written, and errors are to be raised.
        """
        if self._fitting and trainer.task is not None:
            self._save_now(trainer, trainer.task, f"{reason}-step={trainer.global_step}", is_passing=True)
        return self.newest_model_path

    def _save_now(self, trainer: Trainer, task: Task, name: str, is_passing: bool) -> None:
        assert self.dirpath is not None
        if _is_sound(trainer, task):
            path = os.path.join(self.dirpath, name + self.FILE_EXTENSION)
            if self._writer.save_now(trainer, path, is_passing):
                logger.info(f"Saved {path}.")

    def _save(self, trainer: Trainer, task: Task) -> None:
        """Save what is to be saved now; called by all processes."""
        assert self.dirpath is not None
        for callback in trainer.checkpoint_callbacks:
            callback.settle()  # one save at a time, and each error where it belongs
        if not _is_sound(trainer, task):
            return
        decision = decide_on_main_process(lambda: self._decide(trainer))
        self._last_step = trainer.global_step
        self.current_score = decision.score
        self._writer.save(trainer, self.dirpath, decision, self.save_weights_only)
        if self.verbose:
            self._report_decision(trainer, decision)

    def _decide(self, trainer: Trainer) -> Decision:
        """Say what is to be done now; called by the main process alone, changes nothing."""
        kept, metrics = self._writer.kept, trainer.callback_metrics
        decision = Decision(score=self._score(trainer, metrics))
        decision.among_best = kept.best.wants(decision.score)
        if decision.among_best or self.save_last == "link":
            name = self._name.format(trainer.current_epoch, trainer.global_step, metrics)
            self._warn_of_unknown_fields(metrics)
            # A name is used again only for a checkpoint that goes anyway.
            going = [kept.beside, *kept.passing, *kept.doomed, *(kept.best.displaced() if decision.among_best else ())]
            decision.path = self._path(name, own=going)
        if self.save_last:
            decision.last = self._path(self.CHECKPOINT_NAME_LAST, own=(kept.last,))
        return decision

    def _path(self, name: str, own: Sequence[str]) -> str:
        """Return the path for a name: a free one, or one of this run's own, to be replaced."""
        path = os.path.join(self.dirpath or "", name)
        if not self.enable_version_counter:
            return path + self.FILE_EXTENSION
        return folder.free_path(path, self.FILE_EXTENSION, own)

    def _score(self, trainer: Trainer, metrics: Any) -> float | None:
        if self.monitor is None:
            return None
        score = monitored_value(metrics, self.monitor)
        if score is None:
            message = missing_metric_message(metrics, self.monitor, "ModelCheckpoint")
            is_early = self.every_n_epochs == 0 or trainer.check_val_every_n_epoch != 1
            if self._validations or not is_early:
                raise ConfigurationError(message)
            logger.warning_once(f"{message} There was no validation yet, so nothing is kept for now.")
        elif score != score:
            logger.warning(
                f"ModelCheckpoint: {self.monitor} is NaN at step {trainer.global_step}. Such a model is not "
                "kept among the best."
            )
        return score

    def _warn_of_unknown_fields(self, metrics: Any) -> None:
        for name in self._name.fields:
            if name not in metrics and name not in ("epoch", "step"):
                logger.warning_once(
                    f"ModelCheckpoint(filename={self.filename!r}): there is no metric {name!r}, so the name "
                    f"says nan. Logged so far: {', '.join(map(repr, sorted(metrics))) or 'nothing'}."
                )

    def _report_decision(self, trainer: Trainer, decision: Decision) -> None:
        where = f"Epoch {trainer.current_epoch}, step {trainer.global_step}"
        score = "" if decision.score is None else f" with {self.monitor} = {decision.score:.6g}"
        if decision.path is not None:
            logger.info(f"{where}: saved {decision.path}{score}.")
        else:
            logger.info(f"{where}: not among the best {self.save_top_k}{score}.")


def _is_sound(trainer: Trainer, task: Task) -> bool:
    """Ask all callbacks whether what is there now is worth saving; all, since they may talk to their peers."""
    answers = [callback.is_state_sound(trainer, task) for callback in trainer.callbacks]
    return all(answers)
