"""How an Accelerator saves the state of a run and takes it up again."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from drivetrain import checkpoint
from drivetrain.accelerator.checkpoints import NumberedCheckpoints
from drivetrain.accelerator.control import ProcessControl
from drivetrain.accelerator.optimizer import PreparedOptimizer
from drivetrain.accelerator.prepared import Prepared, parameters_of
from drivetrain.accelerator.state_hooks import HookHandle, LoadHook, SaveHook, StateHooks
from drivetrain.data import (
    PreparedLoader,
)
from drivetrain.runtime.errors import CheckpointError, ConfigurationError
from drivetrain.runtime.seeds import RandomState
from drivetrain.strategies import Strategy
from drivetrain.strategies.precision import Precision


class StateSaving(ProcessControl):
    """Accelerate's `save_state` and what belongs to it, and the checkpoints of the Trainer."""

    strategy: Strategy
    precision: Precision
    prepared: Prepared
    _numbered: NumberedCheckpoints
    _state_hooks: StateHooks

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save and load further objects with the run.

        Raises:
            ConfigurationError: one has no `state_dict` and `load_state_dict`.
        """
        for item in objects:
            if not (hasattr(item, "state_dict") and hasattr(item, "load_state_dict")):
                raise ConfigurationError(
                    f"{type(item).__name__} cannot be registered for checkpointing: it needs state_dict() and "
                    "load_state_dict(state)."
                )
        self.prepared.registered.extend(objects)

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write a prepared model's weights as safetensors, as `safetensors` and `transformers` open them.

        Call it on all processes.

        Args:
            model: a prepared model.
            save_directory: the directory, which gets `model.safetensors`, or several files and an index.
            max_shard_size: bytes in a file at most, such as `"5GB"`.
            safe_serialization: accepted; weights are never pickled.
        """
        weights = self.strategy.state.full(model)
        if self.is_main_process:
            checkpoint.save_safetensors(weights, save_directory, max_shard_size)
        self.wait_for_everyone()

    def register_save_state_pre_hook(self, hook: SaveHook) -> HookHandle:
        """Call a function before `save_state` writes.

        Args:
            hook: called on every process as `hook(models, weights, output_dir)` with the prepared models and their
                state dicts, and a directory that becomes the checkpoint: what it writes there is part of it. What it
                takes out of `weights` is not saved again.

        Returns:
            A handle whose `remove()` takes it back.
        """
        return self._state_hooks.add_save(hook)

    def register_load_state_pre_hook(self, hook: LoadHook) -> HookHandle:
        """Call a function before `load_state` loads.

        Args:
            hook: called on every process as `hook(models, input_dir)`. What it takes out of `models` is not loaded.

        Returns:
            A handle whose `remove()` takes it back.
        """
        return self._state_hooks.add_load(hook)

    @property
    def save_queue(self) -> checkpoint.SaveQueue:
        """What writes checkpoints; `check()` raises what has failed in the background, `finish()` waits."""
        return checkpoint.save_queue(self.state)

    def save_state(self, output_dir: str | os.PathLike[str] | None = None, *, block: bool = True) -> str:
        """Write models, optimizers, schedulers, loss scale, loader positions and random states.

        Call it on all processes. The directory appears complete or not at all.

        Args:
            output_dir: the checkpoint's directory or URL; numbered under `project_dir/checkpoints` with automatic
                naming.
            block: whether to return only when it is there. Else the state is copied and written while training goes
                on, optimizers' states copied until their next step; what fails then is raised by the next `save_state`,
                by `save_queue.check()` or `.finish()`.

        Returns:
            The directory.

        Raises:
            CheckpointError: it could not be written; raised on all processes.
        """
        directory = os.fspath(self._numbered.next() if output_dir is None else output_dir)
        shared, extra = self._shared_state(), None
        if self._state_hooks.on_save:
            extra = checkpoint.extra_place(directory, self.state)
            for hook in self._state_hooks.on_save:
                hook(list(self.prepared.models), shared["models"], extra)
            self.wait_for_everyone()
        own = self._process_state()
        optimizers = [optimizer.optimizer for optimizer in self.prepared.optimizers]
        pending = checkpoint.save_run_state(
            directory, shared, own, self.state, block=block, extra=extra, optimizers=optimizers
        )
        if output_dir is None:
            self._numbered.record_written(Path(directory), pending)
        return directory

    def load_state(self, input_dir: str | os.PathLike[str] | None = None) -> None:
        """Load what `save_state` wrote into what is prepared now, in the same order of preparation.

        Loaders take up their positions: the next iteration goes on with the next sample.

        Args:
            input_dir: the checkpoint's directory; with automatic naming the latest one if None.

        Raises:
            CheckpointError: there is none, or it is of other objects than those that are prepared.
        """
        directory = os.fspath(self._numbered.latest() if input_dir is None else input_dir)
        self.save_queue.finish()
        models = list(self.prepared.models)
        for hook in self._state_hooks.on_load:
            hook(models, directory)
        in_shards = self.strategy.state.reads_shards and not self.strategy.schedules_microbatches
        later = ("models", "optimizers") if in_shards else ()
        shared, own = self.read_checkpoint_around(directory, later)
        here: dict[str, Sequence[Any]] = {
            "models": models,
            "optimizers": self.prepared.optimizers,
            "schedulers": self.prepared.schedulers,
            "registered": self.prepared.registered,
        }
        for kind, objects in here.items():
            if kind not in shared:
                raise CheckpointError(
                    f"The checkpoint at {directory} has no {kind}: it was not written by Accelerator.save_state. A "
                    "Trainer's is loaded with Trainer.fit(ckpt_path=...)."
                )
            if len(shared[kind]) != len(objects):
                what = "objects registered for checkpointing" if kind == "registered" else kind
                raise CheckpointError(
                    f"The checkpoint at {directory} holds {len(shared[kind])} {what}, but here are {len(objects)}. "
                    "Prepare and register the same objects, in the same order, before load_state."
                )
        owners = [self._owner(optimizer) for optimizer in self.prepared.optimizers]
        if in_shards:
            into = [self.strategy.state.model(model) for model in models]
            shared |= self.read_checkpoint(directory, {"models": into}, only=["models"])[0]
        for model, state in zip(models, shared["models"], strict=True):
            self.strategy.state.load_model(model, state)
        if in_shards:
            into = [
                self.strategy.state.optimizer_targets(owner, saved)
                for owner, saved in zip(owners, shared["optimizers"], strict=True)
            ]
            shared |= self.read_checkpoint(directory, {"optimizers": into}, only=["optimizers"])[0]
        for owner, optimizer, state in zip(owners, self.prepared.optimizers, shared["optimizers"], strict=True):
            self.strategy.state.load_optimizer(owner, optimizer.optimizer, state)
        for scheduler, state in zip(self.prepared.schedulers, shared["schedulers"], strict=True):
            scheduler.load_state_dict(state)
        for loader, state in zip(self.prepared.loaders, shared["loaders"], strict=False):
            loader.load_state_dict(state)
        for item, state in zip(self.prepared.registered, shared["registered"], strict=True):
            item.load_state_dict(state)
        self.precision.load_state_dict(shared["precision"])
        self.restore_random_state(own)
        self._numbered.record_loaded(Path(directory))

    def registered_state(self) -> list[dict[str, Any]]:
        """The state of what `register_for_checkpointing` was given."""
        return [item.state_dict() for item in self.prepared.registered]

    def load_registered_state(self, states: Sequence[dict[str, Any]]) -> None:
        """Give what was registered its state back.

        Raises:
            CheckpointError: another number of objects was registered when it was saved.
        """
        if len(states) != len(self.prepared.registered):
            raise CheckpointError(
                f"The checkpoint holds {len(states)} registered objects, but here are {len(self.prepared.registered)}. "
                "Call register_for_checkpointing with the same ones, in the same order."
            )
        for item, state in zip(self.prepared.registered, states, strict=True):
            item.load_state_dict(state)

    def write_checkpoint(
        self,
        directory: str | os.PathLike[str],
        shared: dict[str, Any],
        own: dict[str, Any] | None = None,
        *,
        step: int | None = None,
        block: bool = True,
        optimizers: Iterable[Optimizer] = (),
    ) -> checkpoint.PendingSave:
        """Write a checkpoint; call it on all processes.

        Args:
            directory: the checkpoint's directory, or a URL.
            shared: what is the same on all processes.
            own: what is this process's own, beside its random state.
            step: the optimizer step, by which the newest checkpoint is found.
            block: whether to return only when it is durable; else it is written while training goes on.
            optimizers: those whose state may be copied until the next step of any of them.

        Returns:
            The save; done already where `block` is set.
        """
        state = {**self._process_state(), **(own or {})}
        return checkpoint.save_run_state(
            directory, shared, state, self.state, step=step, block=block, optimizers=optimizers
        )

    def read_checkpoint(
        self,
        directory: str | os.PathLike[str],
        into: dict[str, Any] | None = None,
        only: Collection[str] | None = None,
    ) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """Read what `write_checkpoint` wrote.

        Args:
            directory: the checkpoint's directory, or a URL.
            into: a part of the shared state whose tensors are filled in place.
            only: the top-level entries to read; all if None.

        Returns:
            The shared state, and this process's own; None where another number of processes wrote it.
        """
        self.save_queue.settle()  # what is read here goes where a save may still be copying from
        return checkpoint.load_run_state(directory, self.state, into=into, only=only)

    def read_checkpoint_around(
        self, directory: str | os.PathLike[str], later: Collection[str]
    ) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """Read a checkpoint but for the tensors of some entries, which come without values.

        Args:
            directory: the checkpoint's directory, or a URL.
            later: the top-level entries of the shared state to be read later; with none, all is read.

        Returns:
            The shared state, and this process's own; None where another number of processes wrote it.
        """
        if not later:
            return self.read_checkpoint(directory)
        described = checkpoint.describe_run_state(directory)
        found, own = self.read_checkpoint(directory, only=[key for key in described if key not in later])
        return {**described, **found}, own

    def restore_random_state(self, own: dict[str, Any] | None) -> None:
        """Give this process the random state that `write_checkpoint` kept, if there is one."""
        if own is not None and own["random"] is not None:
            RandomState.from_state_dict(own["random"]).restore()

    def _shared_state(self) -> dict[str, Any]:
        return {
            "models": [self.strategy.state.model(model) for model in self.prepared.models],
            "optimizers": [
                self.strategy.state.optimizer(self._owner(optimizer), optimizer.optimizer)
                for optimizer in self.prepared.optimizers
            ],
            "schedulers": [scheduler.state_dict() for scheduler in self.prepared.schedulers],
            "loaders": [_position_of(loader) for loader in self.prepared.loaders],
            "registered": [item.state_dict() for item in self.prepared.registered],
            "precision": self.precision.state_dict(),
        }

    def _process_state(self) -> dict[str, Any]:
        return {"random": RandomState.capture().state_dict()}

    def _owner(self, optimizer: PreparedOptimizer) -> nn.Module:
        """The prepared model whose parameters an optimizer holds; all of them, where it holds several models'."""
        held = {id(parameter) for parameter in parameters_of(optimizer)}
        owners = [model for model in self.prepared.models if any(id(p) in held for p in model.parameters())]
        if len(owners) == 1:
            return owners[0]
        return nn.ModuleList(self.strategy.unwrap(model) for model in owners)


def _position_of(loader: PreparedLoader) -> dict[str, Any]:
    """A loader's position; after the last batch of an epoch that is the start of the next one.

    Scripts that count their batches go on with the next epoch there, and must not find it used up.
    """
    position = loader.state_dict()
    if loader.reached_end and not loader.resumes and position["batches"]:
        position.update(epoch=position["epoch"] + 1, consumed=0, batches=0, start=None)
    return position
