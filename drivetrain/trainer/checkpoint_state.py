"""What of a training run goes into a checkpoint, and back."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain.runtime.errors import CheckpointError
from drivetrain.trackers.base import plain

if TYPE_CHECKING:
    from drivetrain.trainer.trainer import Trainer


def run_state(trainer: Trainer, weights_only: bool = False) -> dict[str, Any]:
    """Collect the state that all processes share.

    Args:
        trainer: the trainer.
        weights_only: leave out everything but weights and hyper-parameters.
    """
    task, strategy = trainer.task, trainer.strategy
    if task is None or trainer.model is None:
        raise CheckpointError(
            "There is nothing to save yet: a checkpoint can be written once fit() has placed the task."
        )
    state: dict[str, Any] = {
        "epoch": trainer.current_epoch,
        "global_step": trainer.global_step,
        "state_dict": strategy.model_state(trainer.model),
        "hyper_parameters": plain(dict(task.hparams)),
    }
    if not weights_only:
        model = trainer.model
        state |= {
            "optimizer_states": [strategy.optimizer_state(model, optimizer) for optimizer in trainer.optimizers],
            "lr_schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
            "precision": trainer.accelerator.precision.state_dict(),
            "progress": trainer.progress.state_dict(),
            "loaders": _loader_states(trainer),
            "callbacks": {c.state_key: found for c in trainer.callbacks if (found := c.state_dict())},
            "datamodule": trainer.datamodule.state_dict() if trainer.datamodule is not None else {},
        }
    for callback in trainer.callbacks:
        callback.on_save_checkpoint(trainer, task, state)
    task.on_save_checkpoint(state)
    return state


def restore_run(trainer: Trainer, directory: Path, weights_only: bool = False) -> None:
    """Load a checkpoint into a trainer whose task is placed.

    Args:
        trainer: the trainer.
        directory: the checkpoint.
        weights_only: take only the weights.
    """
    task, strategy, model = trainer.task, trainer.strategy, trainer.model
    assert task is not None
    assert model is not None
    state = trainer.accelerator.read_checkpoint(directory, restore_random=not weights_only)
    if "state_dict" not in state:
        raise CheckpointError(
            f"{directory} was written by Accelerator.save_state; load it with Accelerator.load_state."
        )
    task.on_load_checkpoint(state)
    strategy.load_model_state(model, state["state_dict"])
    if weights_only:
        return
    if "optimizer_states" not in state:
        raise CheckpointError(
            f"{directory} holds weights only, so training cannot go on from it. Load them with "
            "Task.load_from_checkpoint and start anew."
        )
    for callback in trainer.callbacks:
        callback.on_load_checkpoint(trainer, task, state)
        if callback.state_key in state["callbacks"]:
            callback.load_state_dict(state["callbacks"][callback.state_key])
    if len(state["optimizer_states"]) != len(trainer.optimizers):
        raise CheckpointError(
            f"{directory} holds {len(state['optimizer_states'])} optimizer(s), but configure_optimizers made "
            f"{len(trainer.optimizers)}."
        )
    for optimizer, saved in zip(trainer.optimizers, state["optimizer_states"], strict=True):
        strategy.load_optimizer_state(model, optimizer, saved)
    for config, saved in zip(trainer.lr_scheduler_configs, state["lr_schedulers"], strict=True):
        config.scheduler.load_state_dict(saved)
    trainer.accelerator.precision.load_state_dict(state["precision"])
    trainer.progress.load_state_dict(state["progress"])
    if trainer.datamodule is not None:
        trainer.datamodule.load_state_dict(state["datamodule"])
    _restore_loaders(trainer, state["loaders"])


def _loader_states(trainer: Trainer) -> list[dict[str, Any]]:
    loop = trainer.fit_loop
    return [] if loop is None else [loader.state_dict() for loader in _single_loaders(loop.loader)]


def _restore_loaders(trainer: Trainer, states: list[dict[str, Any]]) -> None:
    progress, loop = trainer.progress, trainer.fit_loop
    assert loop is not None
    if progress.batches_in_epoch >= trainer.num_training_batches:
        # The checkpoint was written after an epoch's last batch: the next epoch begins.
        progress.epoch += 1
        progress.batches_in_epoch = 0
        return
    for loader, state in zip(_single_loaders(loop.loader), states, strict=False):
        loader.load_state_dict(state)


def _single_loaders(loader: Any) -> list[Any]:
    return list(getattr(loader, "loaders", [loader]))
