"""`ModelCheckpoint` with annotations as types rather than strings, which command lines need."""

import math
import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from drivetrain.callbacks import ModelCheckpoint as CoreModelCheckpoint
from drivetrain.callbacks.checkpoint_files import CheckpointName
from drivetrain.callbacks.step_schedule import decide_on_main_process, monitored_value
from drivetrain.compat.formats.lightning import completed, key_there
from drivetrain.compat.formats.lightning_file import model_checkpoint_state
from drivetrain.compat.lightning.fabric.utilities.rank_zero import rank_zero_warn
from drivetrain.compat.lightning.pytorch.callbacks.checkpoint import Checkpoint
from drivetrain.compat.lightning.pytorch.loggers.logger import Logger
from drivetrain.trackers.directory import DirectoryTracker

__all__ = ["ModelCheckpoint"]

_OURS = "drivetrain"
_SAVED = (
    "best_model_score",
    "best_model_path",
    "best_k_models",
    "kth_best_model_path",
    "kth_value",
    "last_model_path",
)


class Settable:
    """Property that can be assigned. The assigned value holds until the next save."""

    def __init__(self, read: Any) -> None:
        self._read = read
        self.__doc__ = read.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, callback: Any, owner: type) -> Any:
        if callback is None:
            return self
        if callback.set_by_hand and callback.set_after != callback.newest_model_path:
            callback.set_by_hand.clear()
        return callback.set_by_hand.get(self._name, self._read(callback))

    def __set__(self, callback: Any, value: Any) -> None:
        callback.set_by_hand[self._name] = value
        callback.set_after = callback.newest_model_path


class Alias:
    """Attribute that reads and writes another attribute of the callback, under Lightning's name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, callback: Any, owner: type) -> Any:
        return self if callback is None else getattr(callback, self._name)

    def __set__(self, callback: Any, value: Any) -> None:
        setattr(callback, self._name, value)


class SavesThrough:
    """Trainer proxy whose `save_checkpoint` calls the callback's own `_save_checkpoint`."""

    def __init__(self, trainer: Any, callback: Any, candidates: Mapping[str, Any]) -> None:
        self._trainer, self._callback = trainer, callback
        own = trainer.callback_metrics
        self.callback_metrics = {
            name: value for name, value in candidates.items() if name in own or name not in ("epoch", "step")
        }

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)

    def save_checkpoint(self, filepath: str, weights_only: bool = False, **options: Any) -> Any:
        """Save a checkpoint through the callback, or through the Trainer if options are given."""
        if options:
            return self._trainer.save_checkpoint(filepath, weights_only, **options)
        return self._callback._save_checkpoint(self._trainer, filepath)


class ModelCheckpoint(CoreModelCheckpoint, Checkpoint):
    """`drivetrain.ModelCheckpoint` with the members and the state format of Lightning's."""

    CHECKPOINT_JOIN_CHAR: ClassVar[str] = "-"

    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        filename: str | None = None,
        monitor: str | None = None,
        verbose: bool = False,
        save_last: bool | Literal["link"] | None = None,
        save_top_k: int = 1,
        save_on_exception: bool = False,
        save_weights_only: bool = False,
        mode: str = "min",
        auto_insert_metric_name: bool = True,
        every_n_train_steps: int | None = None,
        train_time_interval: timedelta | None = None,
        every_n_epochs: int | None = None,
        save_on_train_epoch_end: bool | None = None,
        enable_version_counter: bool = True,
        **options: Any,
    ) -> None:
        self.set_by_hand: dict[str, Any] = {}
        self.set_after = ""
        if dirpath is not None:
            dirpath = os.fspath(dirpath)
            dirpath = dirpath if "://" in dirpath or not dirpath else os.path.realpath(os.path.expanduser(dirpath))
        super().__init__(
            dirpath or None,
            filename,
            monitor,
            verbose,
            save_last,
            save_top_k,
            save_on_exception,
            save_weights_only,
            mode,
            auto_insert_metric_name,
            every_n_train_steps,
            train_time_interval,
            every_n_epochs,
            save_on_train_epoch_end,
            enable_version_counter,
            **options,
        )

    def name_of(self, template: str | None = None) -> CheckpointName:
        """Return the checkpoint name template, in which metrics that were not logged become 0."""
        name = super().name_of(template)
        name.missing = 0
        return name

    def score_of(self, trainer: Any, was_validated: bool) -> float | None:
        """Return the monitored score. NaN counts as the worst score."""
        value = None if self.monitor is None else monitored_value(trainer.callback_metrics, self.monitor)
        if value is not None and value != value:
            return math.inf if self.mode == "min" else -math.inf
        return super().score_of(trainer, was_validated)

    @property
    def state_key(self) -> str:
        return key_there(super().state_key)

    # what there is

    @property
    def current_score(self) -> Tensor | None:  # type: ignore[override]
        """Score of the last saved checkpoint, or None."""
        score = super().current_score
        return None if score is None else torch.tensor(score)

    @Settable
    def best_model_path(self) -> str:
        """Path of the best checkpoint, or of the newest if `monitor` is None."""
        return super().best_model_path

    @Settable
    def best_model_score(self) -> Tensor | None:
        """Score of the best checkpoint, or None."""
        return super().best_model_score

    @Settable
    def best_k_models(self) -> dict[str, Tensor]:
        """Scores of the kept checkpoints by path. Empty if `monitor` is None."""
        if self.monitor is None:
            return {}
        return {path: torch.tensor(float(score)) for path, score in self.kept_scores.items()}

    @Settable
    def kth_best_model_path(self) -> str:
        """Path of the worst kept checkpoint, which the next better one replaces."""
        return "" if self.monitor is None else super().kth_best_model_path

    @Settable
    def kth_value(self) -> Tensor:
        """Score of the worst kept checkpoint."""
        worst = math.inf if self.mode == "min" else -math.inf
        scores: dict[str, Tensor] = self.best_k_models
        return scores.get(self.kth_best_model_path, torch.tensor(worst))

    @Settable
    def last_model_path(self) -> str:
        """Path of the checkpoint `last`, or an empty string."""
        return super().last_model_path

    def file_exists(self, filepath: str | os.PathLike[str], trainer: Any) -> bool:
        """Return True if the path exists on the main process. Call it on all processes."""
        return decide_on_main_process(lambda: os.path.exists(filepath))

    def format_checkpoint_name(
        self,
        metrics: Mapping[str, Any],
        filename: str | None = None,
        ver: int | None = None,
        prefix: str | None = None,
    ) -> str:
        """Return the checkpoint path for the given metrics."""
        folder, name = os.path.split(super().format_checkpoint_name(metrics, filename, ver))
        return os.path.join(folder, name if not prefix else f"{prefix}{self.CHECKPOINT_JOIN_CHAR}{name}")

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if self.dirpath is None and stage == "fit" and not trainer.fast_dev_run:
            self.dirpath = decide_on_main_process(lambda: _place_by(trainer))
        super().setup(trainer, pl_module, stage)
        folder = self.dirpath or ""
        if (
            self.save_top_k
            and stage == "fit"
            and trainer.is_global_zero
            and os.path.isdir(folder)
            and os.listdir(folder)
        ):
            rank_zero_warn(f"Checkpoint directory {folder} exists and is not empty.")

    # methods that subclasses call and override

    _every_n_epochs, _every_n_train_steps = Alias("every_n_epochs"), Alias("every_n_train_steps")
    _train_time_interval = Alias("train_time_interval")
    _save_on_train_epoch_end = Alias("save_on_train_epoch_end")
    _enable_version_counter = Alias("enable_version_counter")
    _last_global_step_saved, _last_checkpoint_saved = Alias("_last_step"), Alias("newest_model_path")

    def _monitor_candidates(self, trainer: Any) -> dict[str, Any]:
        counted = {"epoch": torch.tensor(trainer.current_epoch), "step": torch.tensor(trainer.global_step)}
        return {**counted, **trainer.callback_metrics}

    def _should_skip_saving_checkpoint(self, trainer: Any) -> bool:
        is_fitting = trainer.state.fn == "fit" and not trainer.sanity_checking and not trainer.fast_dev_run
        return not is_fitting or self._last_global_step_saved == trainer.global_step

    def _should_save_on_train_epoch_end(self, trainer: Any) -> bool:
        return self.saves_at_epoch_end(trainer)

    def _save(self, trainer: Any, task: Any, only_last: bool = False) -> None:
        candidates = self._monitor_candidates(trainer)
        if only_last:
            self._save_by(trainer, candidates, only_last)
        else:
            self._save_topk_checkpoint(trainer, candidates)
            self._save_last_checkpoint(trainer, candidates)

    def _save_by(self, trainer: Any, candidates: Mapping[str, Any], only_last: bool = False) -> None:
        through: Any = SavesThrough(trainer, self, candidates)
        super()._save(through, trainer.lightning_module, only_last)

    def _save_topk_checkpoint(self, trainer: Any, monitor_candidates: Mapping[str, Any]) -> None:
        self._save_by(trainer, monitor_candidates)

    def _save_last_checkpoint(self, trainer: Any, monitor_candidates: Mapping[str, Any]) -> None:
        if self.save_last and self._last_global_step_saved != trainer.global_step:
            self._save_by(trainer, monitor_candidates, only_last=True)

    def _save_checkpoint(self, trainer: Any, filepath: str) -> Any:
        return trainer.save_checkpoint(filepath, self.save_weights_only)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.ckpt_path is not None:
            self.protect(os.path.abspath(trainer.ckpt_path))  # the run may be resumed from there again
        super().on_train_start(trainer, pl_module)

    # the state of this callback

    def state_dict(self) -> dict[str, Any]:
        """Return Lightning's entries, and an entry that drivetrain needs for an exact resume."""
        return {**self.lightning_state(), _OURS: super().state_dict()}

    def lightning_state(self) -> dict[str, Any]:
        """Return the state in the format of Lightning's `ModelCheckpoint`."""
        return {
            **model_checkpoint_state(self),
            **{name: self.set_by_hand[name] for name in _SAVED if name in self.set_by_hand},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        saved_in = state_dict.get("dirpath")
        if not saved_in:
            return  # the callback has not been used in a run yet
        before, self.set_by_hand = self.dirpath, {}
        super().load_state_dict(completed(state_dict.get(_OURS, state_dict)))
        if saved_in != self.dirpath:
            rank_zero_warn(
                f"The dirpath has changed from {saved_in!r} to {before!r}, therefore `best_model_score`, "
                "`kth_best_model_path`, `kth_value`, `last_model_path` and `best_k_models` won't be reloaded. Only "
                "`best_model_path` will be reloaded."
            )
            self.best_model_path = state_dict.get("best_model_path", "")


def _place_by(trainer: Any) -> str | None:
    """Return the checkpoint directory derived from the first logger, or None for the default."""
    logger = next(iter(trainer.tracker_group.trackers), None)
    inner = getattr(logger, "sub_dir", None)
    if inner:  # beside the directory of the event files
        return os.path.join(trainer.log_dir.removesuffix(inner), "checkpoints")
    if not isinstance(logger, Logger) or isinstance(logger, DirectoryTracker):
        return None
    version = logger.version
    run = f"version_{version}" if isinstance(version, int) else version
    names = [str(name) for name in (logger.name, run) if name]
    return os.path.join(logger.save_dir or trainer.default_root_dir, *names, "checkpoints")
