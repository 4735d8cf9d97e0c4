"""`fit`, `validate`, `test` and `predict` as Lightning's scripts call them."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch.multiprocessing.spawn import ProcessRaisedException

from drivetrain.callbacks.base import Stage
from drivetrain.compat.lightning.fabric.utilities.rank_zero import rank_zero_warn
from drivetrain.compat.lightning.fabric.utilities.seed import reset_seed
from drivetrain.compat.lightning.pytorch.loggers.logger import Logger
from drivetrain.compat.lightning.pytorch.trainer.saving import PluginFiles
from drivetrain.compat.lightning.signals import SIGTERMException
from drivetrain.compat.lightning.spawning import installed_packages
from drivetrain.runtime.errors import ArgumentTypeError, LaunchError
from drivetrain.trackers.directory import DirectoryTracker
from drivetrain.trainer import Task
from drivetrain.trainer.compiling import uncompiled

if TYPE_CHECKING:
    from drivetrain.compat.lightning.pytorch.trainer.trainer import Trainer

F = TypeVar("F", bound=Callable[..., Any])


def lightning_verb(verb: F) -> F:
    """Decorate a Trainer method to raise `TypeError` for arguments that are no modules, like Lightning.

    After Ctrl-C the method raises `SystemExit(1)`. After a scheduler's signal it raises `SIGTERMException`.
    """
    name = verb.__name__
    stage = next(each for each in Stage if each.verb == name)
    names = list(inspect.signature(verb).parameters)[2:]

    @wraps(verb)
    def run(self: Trainer, model: Any = None, *args: Any, **given: Any) -> Any:
        _check_module(self, name, model)
        placed = dict(zip(names, args, strict=False))
        if len(placed) < len(args) or placed.keys() & given.keys():
            return verb(self, model, *args, **given)  # raises the usual TypeError
        given |= placed
        if given.get("return_predictions", True) is None:
            del given["return_predictions"]
        keeps = given.get("return_predictions", True)
        if stage is Stage.PREDICT:
            given["gather"] = False  # each process returns its own predictions, of any type
        chosen = self.choose_checkpoint(given.get("ckpt_path"))
        if chosen is not None:
            given["ckpt_path"] = chosen
        if chosen == "last":
            given["ckpt_path"] = _last_checkpoint(self)
            model = self.task if model is None and given["ckpt_path"] is None else model
        if not isinstance(self.checkpoint_format, PluginFiles):
            _check_path(given.get("ckpt_path"))
        if name == "fit":
            self.settle_epochs()
        try:
            with self.running(stage, given.get("weights_only")):
                if self.spawning is not None:
                    self.spawning.first_call = installed_packages()
                    if stage is Stage.PREDICT:
                        _leave_predictions(given)
                    return verb(self, model, **given)
                _open_experiments(self)
                if self.world_size > 1:
                    reset_seed()  # several processes apply the seed again, regardless of numbers drawn before
                result = verb(self, model, **given)
                return self.keep_predictions(result, keeps) if stage is Stage.PREDICT else result
        except LaunchError as error:
            if self.spawning is None:
                raise
            raise ProcessRaisedException(str(error), 0, 0) from error
        except KeyboardInterrupt:
            sys.exit(1)
        except SystemExit as left:
            if stage is Stage.TRAIN and self.received_sigterm and not isinstance(left, SIGTERMException):
                raise SIGTERMException(left.code) from None
            raise

    return run  # type: ignore[return-value]


def _check_module(trainer: Trainer, name: str, model: Any) -> None:
    if model is None:
        if name == "fit" or trainer.task is None:
            raise ArgumentTypeError(f"`Trainer.{name}()` requires a `LightningModule`, and none was given.")
    elif not isinstance(uncompiled(model), Task):
        raise ArgumentTypeError(
            f"`model` must be a `LightningModule`, or a compiled one, got `{type(model).__qualname__}`."
        )


def _leave_predictions(given: dict[str, Any]) -> None:
    """Raise if predictions are requested from processes that the strategy spawns."""
    if given.get("return_predictions"):
        raise ProcessRaisedException(
            "`return_predictions` should be set to `False` where the strategy starts processes: write the "
            "predictions in on_predict_batch_end, or launch the script.",
            0,
            0,
        )
    given["return_predictions"] = False


def _open_experiments(trainer: Trainer) -> None:
    """Open the runs of external loggers early, since `setup` hooks may read them."""
    if trainer.is_global_zero:
        for logger in trainer.tracker_group.trackers:
            if isinstance(logger, Logger) and not isinstance(logger, DirectoryTracker):
                _ = getattr(logger, "experiment", None)


def _check_path(path: Any) -> None:
    """Raise `FileNotFoundError` for a local path that does not exist."""
    if path is None or path in ("auto", "best") or "://" in os.fspath(path):
        return
    if not os.path.exists(path):
        raise FileNotFoundError(f"Checkpoint file not found: {os.fspath(path)}")


def _last_checkpoint(trainer: Trainer) -> str | None:
    """Return the checkpoint that this Trainer, or an earlier one in the same directories, saved last."""
    callback = trainer.checkpoint_callback
    found = callback.last_model_path if callback is not None and callback.save_last else ""
    if not found:
        folders = [folder for each in trainer.checkpoint_callbacks for folder in each.directories(trainer)]
        paths = [path for folder in folders for path in Path(folder).glob("last*.ckpt")]
        found = str(max(paths, key=os.path.getmtime)) if paths else ""
    if not found:
        rank_zero_warn("ckpt_path='last' was given, but there is none. No checkpoint will be loaded.")
    return found or None
