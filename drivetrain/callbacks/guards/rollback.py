"""The checkpoint that a run goes back to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain import checkpoint
from drivetrain.callbacks.model_checkpoint import ModelCheckpoint
from drivetrain.callbacks.support.agreement import decide_on_main_process
from drivetrain.runtime.errors import CheckpointError, ConfigurationError

if TYPE_CHECKING:
    from drivetrain.trainer.trainer import Trainer


def check_can_roll_back(trainer: Trainer, owner: str) -> None:
    """Refuse a run that saves nothing it could go back to."""
    if not _savers(trainer):
        raise ConfigurationError(
            f"{owner}(action='rollback') needs a ModelCheckpoint that saves more than weights, to go back to. Add one, "
            "such as ModelCheckpoint(every_n_train_steps=1000), or choose 'stop' or 'skip'.",
            code="DT-098",
        )


def newest_good_checkpoint(trainer: Trainer) -> str | None:
    """The newest checkpoint of this run that a run can resume from, or None; called by all processes.

    All that the run has saved are good: nothing is saved while a callback finds the state unsound.
    """
    savers = _savers(trainer)
    for saver in savers:
        saver.settle()
    return decide_on_main_process(lambda: _newest(savers))


def _savers(trainer: Trainer) -> list[ModelCheckpoint]:
    return [callback for callback in trainer.checkpoint_callbacks if not callback.save_weights_only]


def _newest(savers: list[ModelCheckpoint]) -> str | None:
    known = {saver.newest_model_path for saver in savers} | {saver.last_model_path for saver in savers}
    known.update(path for saver in savers for path in saver.kept_scores)
    found = []
    for path in known - {""}:
        try:
            one = checkpoint.checkpoint_at(path)
            found.append((one.finite_loss, one.step or 0, path))
        except CheckpointError:
            continue  # removed by hand, or damaged: another one will do
    return max(found)[2] if found else None
