"""Save checkpoints while training: the best, the last, or every so often."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from drivetrain.callbacks.agreement import decide_on_main_process
from drivetrain.callbacks.base import Callback
from drivetrain.callbacks.checkpoint_policy import BestK, CheckpointName
from drivetrain.callbacks.monitor import check_mode, missing_metric_message, monitored_value
from drivetrain.callbacks.step_timer import StepTimer
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.logging import get_logger

if TYPE_CHECKING:
    from torch import Tensor

    from drivetrain.trainer.task import Task
    from drivetrain.trainer.trainer import Trainer

logger = get_logger(__name__)


@dataclass
class _Decision:
    """What is to be done now, the same on all processes."""

    score: float | None = None
    path: str | None = None  # save here
    last: str | None = None  # and here


class ModelCheckpoint(Callback):
    """Saves checkpoints while training and keeps the best of them.

    A checkpoint is a directory, complete or not there at all. It is saved after the validation of the same
    epoch, so a monitored value is never the one of an earlier model, and the checkpoints that it replaces are
    removed only once it is complete.

    Args:
        dirpath: Where to save; ``<log_dir>/checkpoints`` by default, or, without a logger that has a
            directory, ``<default_root_dir>/checkpoints``.
        filename: The name, such as ``"{epoch}-{val_loss:.3f}"`` with names of logged metrics, ``epoch`` and
            ``step``. ``"{epoch}-{step}"`` by default.
        monitor: The metric that says which checkpoints are best. Without it the newest are kept.
        verbose: Log each save.
        save_last: Save ``last`` as well, each time.
        save_top_k: How many checkpoints to keep; -1 for all, 0 for none.
        save_weights_only: Save the model without optimizers and the state of the run.
        mode: ``"min"`` where a lower value of `monitor` is better, ``"max"`` where a higher one is.
        auto_insert_metric_name: Write ``epoch=3`` into the name rather than ``3``.
        every_n_train_steps: Save every so many optimizer steps.
        train_time_interval: Save each time so much time has gone by.
        every_n_epochs: Save every so many epochs; 1 by default if no other interval is given.
        save_on_train_epoch_end: Save at the end of the training epoch (True) or after each validation
            (False). By default after each validation where there are several in an epoch, and otherwise at
            the end of the training epoch, after its validation. With `monitor`, an epoch without the
            validation that others have is left out: its value would be that of an earlier model.
        enable_version_counter: Add ``-v1``, ``-v2``, ... to a name that is taken, instead of replacing that
            checkpoint.

    Attributes:
        best_model_path: The path of the best checkpoint, or an empty text.
        best_model_score: Its score, a tensor without dimensions, or None.
        last_model_path: The path of ``last``, or an empty text.
        best_k_models: Paths and scores of the checkpoints kept.

    Raises:
        ConfigurationError: If arguments exclude each other, and during the run if the metric was not logged.

    Example:
        ```python
        from drivetrain import ModelCheckpoint, Trainer

        best = ModelCheckpoint(monitor="val_acc", mode="max", filename="{epoch}-{val_acc:.3f}")
        trainer = Trainer(callbacks=[best])
        ```
    """

    CHECKPOINT_NAME_LAST: ClassVar[str] = "last"
    FILE_EXTENSION: ClassVar[str] = ".ckpt"

    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        filename: str | None = None,
        monitor: str | None = None,
        verbose: bool = False,
        save_last: bool | None = None,
        save_top_k: int = 1,
        save_weights_only: bool = False,
        mode: str = "min",
        auto_insert_metric_name: bool = True,
        every_n_train_steps: int | None = None,
        train_time_interval: timedelta | None = None,
        every_n_epochs: int | None = None,
        save_on_train_epoch_end: bool | None = None,
        enable_version_counter: bool = True,
    ) -> None:
        check_mode(mode, "ModelCheckpoint")
        _check_intervals(every_n_train_steps, train_time_interval, every_n_epochs)
        if not isinstance(save_top_k, int) or save_top_k < -1:
            raise ConfigurationError(
                f"ModelCheckpoint(save_top_k={save_top_k!r}): give how many checkpoints to keep, "
                "-1 for all or 0 for none."
            )
        if monitor is None and save_top_k > 1:
            raise ConfigurationError(
                f"ModelCheckpoint(save_top_k={save_top_k}): which ones are the best cannot be said without "
                "monitor=. Name a metric, or keep 1 (the newest), -1 (all) or 0 (none)."
            )
        if save_last not in (None, True, False):
            raise ConfigurationError(f"ModelCheckpoint(save_last={save_last!r}): give True or False.")
        self.dirpath = os.fspath(dirpath) if dirpath is not None else None
        self.filename = filename
        self.monitor = monitor
        self.verbose = verbose
        self.save_last = bool(save_last)
        self.save_top_k = save_top_k
        self.save_weights_only = save_weights_only
        self.mode = mode
        self.auto_insert_metric_name = auto_insert_metric_name
        self.every_n_train_steps = every_n_train_steps or 0
        self.train_time_interval = train_time_interval
        if every_n_epochs is None:
            every_n_epochs = 0 if every_n_train_steps or train_time_interval else 1
        self.every_n_epochs = every_n_epochs
        self.save_on_train_epoch_end = save_on_train_epoch_end
        self.enable_version_counter = enable_version_counter

        self.current_score: float | None = None
        self.last_model_path = ""
        self._keep = BestK(save_top_k, mode, by_score=monitor is not None)
        self._carried_best = ("", float("nan"))  # the best of an earlier run that saved elsewhere
        self._name = CheckpointName(filename or "{epoch}-{step}", auto_insert_metric_name)
        self._fitting = False
        self._validations = 0
        self._judged = 0  # how many of these came before the last epoch's end
        self._last_step = 0
        self._timer: StepTimer | None = None

    # what there is

    @property
    def best_model_path(self) -> str:
        """The path of the best checkpoint; without `monitor` of the newest."""
        return self._keep.best or self._carried_best[0]

    @property
    def best_model_score(self) -> Tensor | None:
        """The score of the best checkpoint."""
        if self.monitor is None or not self.best_model_path:
            return None
        best = self._keep.best
        return torch.tensor(self._keep.scores[best] if best else self._carried_best[1])

    @property
    def best_k_models(self) -> dict[str, float]:
        """Paths and scores of the checkpoints kept."""
        return dict(self._keep.scores)

    @property
    def kth_best_model_path(self) -> str:
        """The path of the checkpoint that a better one would replace."""
        return self._keep.worst

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
            "dirpath": self.dirpath,
            "best_model_path": self.best_model_path,
            "best_model_score": None if score is None else float(score),
            "best_k_models": self.best_k_models,
            "newest_model_path": self._keep.newest,
            "last_model_path": self.last_model_path,
            "current_score": self.current_score,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        score = state_dict["best_model_score"]
        self._carried_best = (state_dict["best_model_path"], float("nan") if score is None else score)
        self.current_score = state_dict["current_score"]
        if state_dict["dirpath"] != self.dirpath:
            logger.warning(
                f"The run to resume saved in {state_dict['dirpath']}, this one saves in {self.dirpath}: the "
                "checkpoints there stay as they are and do not count among the best ones of this run."
            )
            return
        self._keep.scores = dict(state_dict["best_k_models"])
        self._keep.newest = state_dict["newest_model_path"]
        self.last_model_path = state_dict["last_model_path"]

    # when

    def setup(self, trainer: Trainer, task: Task, stage: str) -> None:
        self._fitting = stage == "fit" and not trainer.fast_dev_run
        if not self._fitting:
            return
        if self.dirpath is None:
            root = decide_on_main_process(lambda: trainer.log_dir or trainer.default_root_dir)
            self.dirpath = os.path.join(root, "checkpoints")
        self.dirpath = os.path.abspath(self.dirpath)

    def teardown(self, trainer: Trainer, task: Task, stage: str) -> None:
        self._fitting = False

    def on_train_start(self, trainer: Trainer, task: Task) -> None:
        self._last_step = trainer.global_step
        self._validations = self._judged = 0
        self._timer = None
        if self.train_time_interval is not None and self._fitting:
            self._timer = StepTimer(self.train_time_interval.total_seconds(), trainer.global_step)

    def on_train_batch_end(self, trainer: Trainer, task: Task, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not self.every_n_train_steps and self._timer is None:
            return
        step = trainer.global_step
        if step == self._last_step or not self._fitting:
            return  # the optimizer did not step
        if self._timer is not None:
            due = self._timer.is_due(step)
        else:
            due = step % self.every_n_train_steps == 0
        if due:
            self._save(trainer)

    def on_validation_end(self, trainer: Trainer, task: Task) -> None:
        if not self._fitting or trainer.sanity_checking:
            return
        self._validations += 1
        if not self._saves_at_epoch_end(trainer) and self._epoch_is_due(trainer):
            self._save(trainer)

    def on_train_epoch_end(self, trainer: Trainer, task: Task) -> None:
        if not self._fitting:
            return
        was_validated, self._judged = self._validations > self._judged, self._validations
        is_stale = self.monitor is not None and self._validations > 0 and not was_validated
        if is_stale and self.save_on_train_epoch_end is None:
            return
        if self._saves_at_epoch_end(trainer) and self._epoch_is_due(trainer):
            self._save(trainer)

    def _epoch_is_due(self, trainer: Trainer) -> bool:
        every = self.every_n_epochs
        return every > 0 and (trainer.current_epoch + 1) % every == 0 and trainer.global_step != self._last_step

    def _saves_at_epoch_end(self, trainer: Trainer) -> bool:
        if self.save_on_train_epoch_end is not None:
            return self.save_on_train_epoch_end
        return trainer.val_check_interval in (None, 1.0)

    # what

    def _save(self, trainer: Trainer) -> None:
        """Save what is to be saved now; called by all processes."""
        decision = decide_on_main_process(lambda: self._decide(trainer))
        self._last_step = trainer.global_step
        self.current_score = decision.score
        # The state is brought up to date first: it is part of the checkpoint.
        gone = [] if decision.path is None else self._keep.add(decision.path, decision.score)
        if decision.last is not None:
            self.last_model_path = decision.last
        for path in (decision.path, decision.last):
            if path is not None:
                trainer.save_checkpoint(path, weights_only=self.save_weights_only)
        if trainer.is_global_zero:
            for path in gone:
                shutil.rmtree(path, ignore_errors=True)
            self._tell(trainer, decision)

    def _decide(self, trainer: Trainer) -> _Decision:
        """Say what is to be done now; called by the main process alone, changes nothing."""
        assert self.dirpath is not None
        metrics = trainer.callback_metrics
        decision = _Decision(score=self._score(trainer, metrics))
        if self._keep.wants(decision.score):
            name = self._name.format(trainer.current_epoch, trainer.global_step, metrics)
            self._warn_of_unknown_fields(metrics)
            # A name is used again only for the checkpoint that goes anyway.
            decision.path = self._free_path(name, own=self._keep.displaced())
        if self.save_last:
            decision.last = self._free_path(self.CHECKPOINT_NAME_LAST, own=(self.last_model_path,))
        return decision

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

    def _free_path(self, name: str, own: Any) -> str:
        """Return the path for a name: a free one, or one of this run's own, to be replaced."""
        assert self.dirpath is not None
        base = path = os.path.join(self.dirpath, name)
        version = 0
        while self.enable_version_counter and path + self.FILE_EXTENSION not in own:
            if not os.path.lexists(path + self.FILE_EXTENSION):
                break
            version += 1
            path = f"{base}-v{version}"
        return path + self.FILE_EXTENSION

    def _warn_of_unknown_fields(self, metrics: Any) -> None:
        for name in self._name.fields:
            if name not in metrics and name not in ("epoch", "step"):
                logger.warning_once(
                    f"ModelCheckpoint(filename={self.filename!r}): there is no metric {name!r}, so the name "
                    f"says nan. Logged so far: {', '.join(map(repr, sorted(metrics))) or 'nothing'}."
                )

    def _tell(self, trainer: Trainer, decision: _Decision) -> None:
        if not self.verbose:
            return
        where = f"Epoch {trainer.current_epoch}, step {trainer.global_step}"
        score = "" if decision.score is None else f" with {self.monitor} = {decision.score:.6g}"
        if decision.path is not None:
            logger.info(f"{where}: saved {decision.path}{score}.")
        else:
            logger.info(f"{where}: not among the best {self.save_top_k}{score}.")


def _check_intervals(steps: int | None, interval: timedelta | None, epochs: int | None) -> None:
    given = {"every_n_train_steps": steps, "train_time_interval": interval, "every_n_epochs": epochs}
    given = {name: value for name, value in given.items() if value}
    if len(given) > 1:
        raise ConfigurationError(
            "ModelCheckpoint takes one of every_n_train_steps, train_time_interval and every_n_epochs, but "
            f"got {', '.join(f'{name}={value!r}' for name, value in given.items())}. For several rhythms, "
            "use several ModelCheckpoints."
        )
    for name, number in (("every_n_train_steps", steps), ("every_n_epochs", epochs)):
        if number is not None and number < 0:
            raise ConfigurationError(f"ModelCheckpoint({name}={number}): give 1 or more, or 0 for never.")
