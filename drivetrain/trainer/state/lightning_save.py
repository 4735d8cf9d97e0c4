"""A Trainer's run as a `.ckpt` file in Lightning's format."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from drivetrain import checkpoint
from drivetrain.callbacks.step_schedule import decide_on_main_process
from drivetrain.runtime.collectives import gather_object
from drivetrain.runtime.errors import CheckpointError, ConfigurationError
from drivetrain.trainer.state.saved_run import save_run

if TYPE_CHECKING:
    from drivetrain.trainer.trainer import Trainer


def save_lightning(
    trainer: Trainer, path: str | os.PathLike[str], weights_only: bool, block: bool
) -> checkpoint.PendingSave:
    """Write a checkpoint as a file in Lightning's format; call it on all processes.

    The file is written by the main process. Where none holds the whole state, it is made of a checkpoint
    of this package, which all have written beside it and which is then removed.

    Args:
        trainer: The trainer.
        path: The file.
        weights_only: Leave out everything but weights and hyper-parameters.
        block: Whether to return only when it is durable.

    Raises:
        ConfigurationError: It is to be written in the background.
    """
    if not block:
        raise ConfigurationError(
            "save_checkpoint(format='lightning', block=False): it is written at once. Leave block out.", code="DT-004"
        )
    files = trainer.checkpoint_files
    target = decide_on_main_process(lambda: files.place_of(path))
    if trainer.strategy.state.holds_whole:
        return save_run(trainer, target, weights_only, write=partial(_write_whole, trainer))
    beside = files.place_beside(target, trainer.default_root_dir)
    save_run(trainer, beside, weights_only)

    def write() -> None:
        try:
            shared, _ = checkpoint.load_run_state(beside, verify="size")
            count, own = checkpoint.read_processes(beside)
            _write(trainer, target, shared, [checkpoint.packed(own(rank)) for rank in range(count)])
        finally:
            checkpoint.remove_checkpoint(beside)

    decide_on_main_process(write)
    return checkpoint.PendingSave(os.fspath(target), finished=True)


def _write_whole(
    trainer: Trainer,
    target: str | os.PathLike[str],
    engine: dict[str, Any],
    driver: Mapping[str, Any],
    own: Mapping[str, Any],
    *,
    moment: Any,
    **others: Any,
) -> checkpoint.PendingSave:
    """Write the state that the main process holds whole, with what each process keeps of its own."""
    run = trainer.accelerator.run_state
    run.saves.finish()
    shared, process = run.compose(engine, driver, own, moment)
    try:
        mine: dict[str, Any] | str = checkpoint.packed(process, f"process/{trainer.global_rank}")
    except CheckpointError as error:
        mine = str(error)
    processes = gather_object([mine])

    def write() -> None:
        for each in processes:
            if isinstance(each, str):
                raise CheckpointError(f"The checkpoint {target} was not written: {each}")
        _write(trainer, target, shared, processes)

    decide_on_main_process(write)
    return checkpoint.PendingSave(os.fspath(target), finished=True)


def _write(
    trainer: Trainer,
    target: str | os.PathLike[str],
    shared: Mapping[str, Any],
    processes: list[dict[str, Any]],
) -> None:
    data = trainer.datamodule
    is_whole = "optimizers" in shared["engine"]
    content = checkpoint.lightning_content(
        target,
        shared,
        processes,
        datamodule=None if data is None else type(data).__qualname__,
        callbacks={each.state_key: each.lightning_state() for each in trainer.checkpoint_callbacks} if is_whole else {},
        epoch_length=trainer.num_training_batches,
        objects=trainer.pickles,
    )
    trainer.checkpoint_files.write(target, content, trainer.pickles)
