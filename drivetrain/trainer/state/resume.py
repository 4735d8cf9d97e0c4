"""Which checkpoint a run resumes, and the one that a run leaves that a signal ends."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from drivetrain import checkpoint
from drivetrain.runtime.collectives import broadcast_object_list
from drivetrain.runtime.environment import RESUME_VARIABLE
from drivetrain.runtime.errors import CheckpointError, ConfigurationError, DrivetrainError
from drivetrain.runtime.logging import get_logger
from drivetrain.runtime.terminal import shown

if TYPE_CHECKING:
    from drivetrain.trainer.trainer import Trainer

logger = get_logger(__name__)


def asked_to_resume(given: str | os.PathLike[str] | None) -> str | os.PathLike[str] | None:
    """What a `fit` resumes: what it was given, or what `DRIVETRAIN_RESUME` names, which counts for a process's first.

    Args:
        given: The argument of `fit`.
    """
    asked = os.environ.pop(RESUME_VARIABLE, None)
    return asked if given is None else given


def find_checkpoint(trainer: Trainer, given: str | os.PathLike[str] | None) -> str | None:
    """What `resume` and `ckpt_path` mean; call it on all processes.

    Args:
        trainer: The trainer.
        given: A path or URL; `"auto"` for the newest complete checkpoint of this script, if there is one; `"best"` or
            `"last"` for the checkpoint callback's; or None.

    Returns:
        The checkpoint, or None to start from the beginning.

    Raises:
        ConfigurationError: `"best"` or `"last"` was asked for, and there is none.
        CheckpointError: The main process could not look for checkpoints.
    """
    if given is None:
        return None
    if given in ("best", "last"):
        callback = trainer.checkpoint_callback
        if callback is None:
            raise ConfigurationError(
                f"{given!r} was given, but `ModelCheckpoint` is not configured. Put one among the callbacks.",
                code="DT-098",
            )
        if trainer.control.reason is not None and callback.run_identity not in (None, trainer.control.identity):
            raise ConfigurationError(
                f"{given!r}: the ModelCheckpoint has the checkpoints of another Trainer, which was given it after this "
                "one had trained. Give each Trainer its own, or name the checkpoint's path.",
                code="DT-098",
            )
        found = getattr(callback, f"{given}_model_path")
        if not found:
            if given == "best" and not callback.save_top_k:
                raise ConfigurationError(
                    "'best': the ModelCheckpoint is not configured to save the best (save_top_k=0).", code="DT-098"
                )
            raise ConfigurationError(f"{given!r}: the ModelCheckpoint has not saved one yet.", code="DT-098")
        return str(found)
    if given != "auto":
        return os.fspath(given)
    answer: list[Any] = [None, None]
    if trainer.is_global_zero:
        try:
            answer[0] = _newest(_directories(trainer))
        except (DrivetrainError, OSError) as error:
            answer[1] = error.message if isinstance(error, DrivetrainError) else str(error)
    path, problem = broadcast_object_list(answer)
    if problem is not None:
        raise CheckpointError(f"resume='auto' could not look for checkpoints: {problem}")
    if path is not None:
        trainer.print(shown(f"Resuming from {path}"))
    return str(path) if path is not None else None


def save_for_resume(trainer: Trainer) -> None:
    """Write the checkpoint from which a run that a signal ends is resumed.

    A preempted run without a checkpoint callback writes to the default directory; one that Ctrl-C ended writes nothing
    then, as was asked for.
    """
    if trainer.saves is not None:
        try:
            trainer.saves.finish()
        except CheckpointError as error:
            logger.error(f"{error} The run now saves another checkpoint to resume from.")
    callback = trainer.checkpoint_callback
    if callback is not None:
        callback.save_now(trainer, reason=str(trainer.control.signal))
    elif trainer.preempted:
        trainer.save_checkpoint(f"{_default_directory(trainer)}/preempted-step={trainer.global_step}.ckpt")


def _directories(trainer: Trainer) -> list[str]:
    """Where an earlier run of this script may have saved."""
    found = [_default_directory(trainer)]
    for callback in trainer.checkpoint_callbacks:
        found += callback.directories(trainer)
    return list(dict.fromkeys(found))


def _default_directory(trainer: Trainer) -> str:
    return os.path.join(trainer.default_root_dir, "checkpoints")


def _newest(directories: list[str]) -> str | None:
    """The newest good checkpoint of several directories: the one of the most steps, of those after finite losses."""
    found = [path for path in map(checkpoint.newest_checkpoint, directories) if path is not None]

    def rank(path: str) -> tuple[bool, int]:
        one = checkpoint.checkpoint_at(path)
        return one.finite_loss, one.step or 0

    return max(found, key=rank, default=None)
