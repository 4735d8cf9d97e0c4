"""What of a training run goes into a checkpoint, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from torch import nn

from drivetrain.callbacks import Callback
from drivetrain.data import PreparedLoader
from drivetrain.runtime.errors import CheckpointError
from drivetrain.trackers.base import plain
from drivetrain.trainer.hooks import is_overridden
from drivetrain.trainer.metrics.metric_states import metric_states, restore_metric_states
from drivetrain.trainer.state.process_entry import layout_of, taken_over
from drivetrain.trainer.task import Task

if TYPE_CHECKING:
    from drivetrain.trainer.trainer import Trainer

# entries that strategies may read straight into this process's shards
_IN_SHARDS = ("state_dict", "optimizer_states")


def run_state(trainer: Trainer, weights_only: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """Collect the state that all processes share, and what is this process's own.

    Args:
        trainer: The trainer.
        weights_only: Leave out everything but weights and hyper-parameters.
    """
    task, strategy = trainer.task, trainer.strategy
    if task is None or trainer.model is None:
        raise CheckpointError(
            "There is nothing to save yet: a checkpoint can be written once fit() has placed the task."
        )
    state: dict[str, Any] = {
        "epoch": trainer.current_epoch,
        "global_step": trainer.global_step,
        "state_dict": strategy.state.model(trainer.model),
        "hyper_parameters": plain(dict(task.hparams)),
    }
    if not weights_only:
        model = trainer.model
        state |= {
            "optimizer_states": [strategy.state.optimizer(model, optimizer) for optimizer in trainer.optimizers],
            "lr_schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
            "precision": trainer.accelerator.precision.state_dict(),
            "progress": trainer.progress.state_dict(),
            "loader": None if trainer.fit_loop is None else trainer.fit_loop.position(),
            "callbacks": {c.state_key: found for c in trainer.callbacks if (found := c.state_dict())},
            "trackers": [tracker.state_dict() for tracker in trainer.loggers] if trainer.is_global_zero else [],
            "registered": trainer.accelerator.registered_state(),
            # A run that a signal or a limit has ended continues where it is resumed, perhaps with another limit.
            "should_stop": trainer.control.stops_for_good,
            "datamodule": trainer.datamodule.state_dict() if trainer.datamodule is not None else {},
        }
    for callback in trainer.callbacks:
        callback.on_save_checkpoint(trainer, task, state)
    task.on_save_checkpoint(state)
    own: dict[str, Any] = {"layout": layout_of(strategy)}
    if not weights_only:
        own |= {"logged": trainer.logged.state_dict(), "metrics": metric_states(task)}
    return state, own


class SavedRun:
    """A checkpoint on its way back into a run, part by part as the run is built.

    Args:
        trainer: The trainer, with its task.
        directory: The checkpoint.

    Raises:
        CheckpointError: It cannot be read, or is none of a Trainer.
    """

    def __init__(self, trainer: Trainer, directory: str) -> None:
        self._trainer, self._directory = trainer, directory
        self._in_shards = self._reads_in_shards()
        later = _IN_SHARDS if self._in_shards else ()
        self._state, self._own = trainer.accelerator.read_checkpoint_around(directory, later)
        layout = layout_of(trainer.strategy)
        if self._own is not None and self._own.get("layout", layout) != layout:
            self._own = None  # as many processes, which share the data in another way
        if "state_dict" not in self._state:
            raise CheckpointError(
                f"{directory} was written by Accelerator.save_state; load it with Accelerator.load_state."
            )

    def _reads_in_shards(self) -> bool:
        """Whether each process can read its shards alone: no hook wants to see the whole weights before."""
        trainer = self._trainer
        return (
            trainer.strategy.state.reads_shards
            and not trainer.strategy.schedules_microbatches
            and not is_overridden(trainer.task, Task, "on_load_checkpoint")
            and not any(is_overridden(each, Callback, "on_load_checkpoint") for each in trainer.callbacks)
        )

    def _weights(self) -> dict[str, Any]:
        """The model's state, read into the model itself where each process reads its shards."""
        trainer = self._trainer
        if self._in_shards:
            into = {"state_dict": trainer.strategy.state.model(cast("nn.Module", trainer.model))}
            self._state |= trainer.accelerator.read_checkpoint(self._directory, into, only=list(into))[0]
        weights: dict[str, Any] = self._state["state_dict"]
        return weights

    def _optimizer_states(self) -> list[dict[str, Any]]:
        trainer, states = self._trainer, self._state["optimizer_states"]
        if self._in_shards:
            assert trainer.model is not None
            targets = [trainer.strategy.state.optimizer_targets(trainer.model, saved) for saved in states]
            read = trainer.accelerator.read_checkpoint(
                self._directory, {"optimizer_states": targets}, only=["optimizer_states"]
            )
            states = read[0]["optimizer_states"]
        return list(states)

    def restore_for_evaluation(self) -> None:
        """Take only the weights."""
        assert self._trainer.task is not None
        self._trainer.task.on_load_checkpoint(self._state)
        self.restore_weights()

    def restore_early(self) -> None:
        """Let the task and the callbacks see the checkpoint, before the optimizers are built."""
        trainer, state = self._trainer, self._state
        assert trainer.task is not None
        if "optimizer_states" not in state:
            raise CheckpointError(
                f"{self._directory} holds weights only, so training cannot go on from it. Load them with "
                "Task.load_from_checkpoint and start anew."
            )
        if trainer.datamodule is not None and state["datamodule"]:
            trainer.datamodule.load_state_dict(state["datamodule"])
        trainer.task.on_load_checkpoint(state)
        for callback in trainer.callbacks:
            callback.on_load_checkpoint(trainer, trainer.task, state)
        for callback in trainer.callbacks:
            if callback.state_key in state["callbacks"]:
                callback.load_state_dict(state["callbacks"][callback.state_key])

    def restore_weights(self) -> None:
        """Give the placed model its weights."""
        assert self._trainer.model is not None
        self._trainer.strategy.state.load_model(self._trainer.model, self._weights())
        self._state.pop("state_dict")

    def restore_training(self) -> None:
        """Give optimizers, schedulers, the precision and the counters their state."""
        trainer, state = self._trainer, self._state
        assert trainer.model is not None
        for key, kind, here in (
            ("optimizer_states", "optimizer", trainer.optimizers),
            ("lr_schedulers", "scheduler", trainer.lr_scheduler_configs),
        ):
            if len(state[key]) != len(here):
                raise CheckpointError(
                    f"{self._directory} holds {len(state[key])} {kind}(s), but configure_optimizers made {len(here)}."
                )
        for optimizer, saved in zip(trainer.optimizers, self._optimizer_states(), strict=True):
            trainer.strategy.state.load_optimizer(trainer.model, optimizer, saved)
            optimizer._opt_called = True  # it has stepped before the break; schedulers warn otherwise
        for config, saved in zip(trainer.lr_scheduler_configs, state["lr_schedulers"], strict=True):
            config.scheduler.load_state_dict(saved)
        trainer.accelerator.precision.load_state_dict(state["precision"])
        trainer.accelerator.load_registered_state(state["registered"])
        trainer.progress.load_state_dict(state["progress"])
        trainer.control.resume_stop(bool(state["should_stop"]))
        if trainer.is_global_zero:
            for tracker, saved in zip(trainer.loggers, state["trackers"], strict=False):
                tracker.load_state_dict(saved)

    def restore_loader(self, loader: Any) -> None:
        """Go to the batch that comes next.

        Args:
            loader: The prepared training loader.
        """
        progress, state = self._trainer.progress, self._state["loader"]
        if progress.batches_are_done:
            # Only what the next epoch's order is drawn from still counts.
            state = _at_start_of(state, progress.epoch + 1)
        elif progress.batches_in_epoch == 0:
            # Such as one saved after fit: the loader still stands at the end of the epoch before.
            state = _at_start_of(state, progress.epoch)
        loader.load_state_dict(state)
        if self._own is None and not progress.batches_are_done and isinstance(loader, PreparedLoader):
            # Another number of processes, each with its own number of batches.
            progress.batches_in_epoch = loader.consumed_batches

    def restore_process(self) -> None:
        """Give this process what it had logged and its random state; nothing may come between this and training."""
        trainer, own = self._trainer, self._own
        assert trainer.task is not None
        if own is None:
            own = taken_over(self._directory, trainer.strategy, trainer.task)
        trainer.logged.load_state_dict(own["logged"], trainer.strategy.topology.device)
        restore_metric_states(trainer.task, own["metrics"])
        trainer.accelerator.restore_random_state(own)


def _at_start_of(state: dict[str, Any], epoch: int) -> dict[str, Any]:
    """A loader's position at the start of an epoch, with the generators that its order is drawn from."""
    if "loaders" in state:
        return {
            **state,
            "index": 0,
            "ended": [False] * len(state["loaders"]),
            "loaders": [_at_start_of(each, epoch) for each in state["loaders"]],
        }
    return {**state, "epoch": epoch, "consumed": 0, "batches": 0, "start": None}
