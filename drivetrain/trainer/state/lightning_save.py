"""A Trainer's run as a file that Lightning opens."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from drivetrain import checkpoint
from drivetrain.callbacks.support.agreement import decide_on_main_process
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.trainer.state.saved_run import save_run

if TYPE_CHECKING:
    from drivetrain.checkpoint import PendingSave
    from drivetrain.trainer.trainer import Trainer

FORMATS = (None, "lightning")


def save_in_format(
    trainer: Trainer, path: str | os.PathLike[str], weights_only: bool, block: bool, format: str | None
) -> PendingSave:
    """Write a checkpoint in a format; call it on all processes.

    A file of Lightning's is made by the main process of a checkpoint of this package, which all have written beside it
    and which is then removed: so it is whole under any strategy.

    Args:
        trainer: The trainer.
        path: The directory, or the file.
        weights_only: Leave out everything but weights and hyper-parameters.
        block: Whether to return only when it is durable.
        format: None for this package's own, or `"lightning"`.

    Raises:
        ConfigurationError: There is no such format, or it cannot be written so.
    """
    if format not in FORMATS:
        raise ConfigurationError(f"save_checkpoint(format={format!r}): give 'lightning', or leave it out.")
    if format is None:
        return save_run(trainer, path, weights_only, block)
    if not block:
        raise ConfigurationError(
            "save_checkpoint(format='lightning', block=False): it is written at once. Leave block out."
        )
    decide_on_main_process(lambda: checkpoint.check_lightning_file(path))
    target = os.path.abspath(path)
    beside = os.path.join(os.path.dirname(target), f".{os.path.basename(target)}.whole")
    pending = save_run(trainer, beside, weights_only)
    data = trainer.datamodule
    callbacks = (
        {} if weights_only else {each.state_key: each.lightning_state() for each in trainer.checkpoint_callbacks}
    )

    def write() -> None:
        try:
            name = None if data is None else type(data).__qualname__
            checkpoint.write_lightning_file(
                beside, target, datamodule=name, callbacks=callbacks, epoch_length=trainer.num_training_batches
            )
        finally:
            checkpoint.remove_checkpoint(beside)

    decide_on_main_process(write)
    pending.directory = target
    return pending
