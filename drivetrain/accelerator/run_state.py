"""The state of a run: what the engine saves and restores, beside what the driver of the engine adds."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain import checkpoint
from drivetrain.accelerator.checkpoints import NumberedCheckpoints
from drivetrain.accelerator.optimizer import PreparedOptimizer
from drivetrain.accelerator.prepared import Prepared, parameters_of
from drivetrain.accelerator.saved_engine import SavedEngine
from drivetrain.accelerator.state_hooks import StateHooks
from drivetrain.accelerator.step import OptimizerStep
from drivetrain.accelerator.tracking import RunTracking
from drivetrain.runtime.errors import CheckpointError, ConfigurationError
from drivetrain.runtime.logging import get_logger
from drivetrain.runtime.seeds import RandomState
from drivetrain.runtime.state import PartialState
from drivetrain.strategies import Strategy
from drivetrain.strategies.optimizer_names import class_chosen
from drivetrain.strategies.precision import Precision

logger = get_logger(__name__)


@dataclass(frozen=True)
class Moment:
    """The moment that a save describes, where that is not the present one but the last finished step.

    Attributes:
        random: The random state at that moment; the present one if None.
        loaders: The loaders' positions; the present ones if None.
    """

    random: RandomState | None = None
    loaders: Sequence[Mapping[str, Any]] | None = None


class RunState:
    """Collects, writes, reads and restores the state of a run under the schema of `drivetrain.checkpoint.schema`.

    The engine's part is the same for every driver. A driver adds named entries, shared and of each process; those
    that the next driver does not take are kept, and written again.

    Args:
        state: This process among its peers.
        strategy: Gives and takes the state of models and optimizers.
        precision: Its scaler is part of the state.
        numbered: The checkpoints that have a number instead of a name.
        prepared: What the engine has prepared, and what was registered.
        tracking: Its trackers continue the runs that they wrote.
        step: The step that raw loops take, which is over when they save.

    Attributes:
        prepared: What the engine has prepared, and what was registered.
        hooks: Functions of the user's that run before `save_state` and `load_state`.
        moment: Gives the moment that a save describes; set by a driver that may save within a step.
    """

    def __init__(
        self,
        state: PartialState,
        strategy: Strategy,
        precision: Precision,
        numbered: NumberedCheckpoints,
        prepared: Prepared,
        tracking: RunTracking,
        step: OptimizerStep,
    ) -> None:
        self.strategy, self.precision, self.prepared = strategy, precision, prepared
        self.hooks = StateHooks()
        self.moment: Callable[[], Moment] = Moment
        self._state, self._numbered, self._tracking = state, numbered, tracking
        self._step = step
        self._kept: dict[str, Any] = {}

    def register(self, objects: Sequence[Any]) -> None:
        """Save and load further objects with the run.

        Raises:
            ConfigurationError: One has no `state_dict` and `load_state_dict`.
            CheckpointError: The state of one holds what no checkpoint can.
        """
        states: list[tuple[str, Any]] = []
        for item in objects:
            if not (hasattr(item, "state_dict") and hasattr(item, "load_state_dict")):
                raise ConfigurationError(
                    f"{type(item).__name__} cannot be registered for checkpointing: it needs state_dict() and "
                    "load_state_dict(state).",
                    code="DT-003",
                )
            with suppress(Exception):  # one may have no state yet
                states.append((f"{type(item).__name__}.state_dict()", item.state_dict()))
        for name, state in states:
            check_storable(state, name)
        self.prepared.registered.extend(objects)

    @property
    def saves(self) -> checkpoint.SaveQueue:
        """What writes checkpoints."""
        return checkpoint.save_queue(self._state)

    # saving

    def engine(self, weights_only: bool = False, moment: Moment | None = None) -> dict[str, Any]:
        """Collect the engine's part of the shared state; call it on all processes.

        Args:
            weights_only: Leave out everything but the models.
            moment: The moment that the save describes; from `self.moment` if None.
        """
        strategy, classes = self.strategy, self.classes()
        states = [strategy.state.model(model) for model in self.prepared.models]
        if weights_only:
            return {"models": states, "classes": {"models": classes["models"]}}
        positions = (moment or self.moment()).loaders
        here = self.prepared
        return {
            "models": states,
            "optimizers": [strategy.state.optimizer(self.owner(one), one.optimizer) for one in here.optimizers],
            "schedulers": [scheduler.state_dict() for scheduler in here.schedulers],
            "loaders": [one.state_dict() for one in here.loaders] if positions is None else list(positions),
            "registered": [item.state_dict() for item in here.registered],
            "precision": self.precision.state_dict(),
            "classes": classes,
        }

    def engine_of(self, model: nn.Module) -> dict[str, Any]:
        """Collect the state of one placed model that was not prepared for training, as `engine` lays it out."""
        name = self.strategy.state.original_type(self.strategy.unwrap(model)).__name__
        return {"models": [self.strategy.state.model(model)], "classes": {"models": [name]}}

    def classes(self) -> dict[str, list[str | None]]:
        """The names of the classes of what is prepared and registered, as the user chose them; None if unknown."""
        bare = [self.strategy.unwrap(model) for model in self.prepared.models]
        return {
            "models": [self.strategy.state.original_type(model).__name__ for model in bare],
            "optimizers": [class_chosen(one.optimizer) for one in self.prepared.optimizers],
            "schedulers": [class_chosen(one.scheduler) for one in self.prepared.schedulers],
            "registered": [type(item).__name__ for item in self.prepared.registered],
        }

    def write(
        self,
        directory: str | os.PathLike[str],
        engine: dict[str, Any],
        driver: Mapping[str, Any] | None = None,
        own: Mapping[str, Any] | None = None,
        *,
        step: int | None = None,
        block: bool = True,
        extra: str | None = None,
        moment: Moment | None = None,
    ) -> checkpoint.PendingSave:
        """Write a checkpoint; call it on all processes.

        Args:
            directory: The checkpoint's directory, or a URL.
            engine: The engine's part, from `engine()`.
            driver: The driver's entries that are the same on all processes.
            own: The driver's entries of this process.
            step: The optimizer step, by which the newest checkpoint is found.
            block: Whether to return only when it is durable; else it is written while training continues.
            extra: A directory whose files become part of the checkpoint.
            moment: The moment that the save describes; from `self.moment` if None.

        Returns:
            The save; done already where `block` is set.
        """
        shared, process = self.compose(engine, driver, own, moment)
        optimizers = [one.optimizer for one in self.prepared.optimizers]
        return checkpoint.save_run_state(
            directory, shared, process, self._state, step=step, block=block, extra=extra, optimizers=optimizers
        )

    def compose(
        self,
        engine: dict[str, Any],
        driver: Mapping[str, Any] | None = None,
        own: Mapping[str, Any] | None = None,
        moment: Moment | None = None,
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The state of the run as a checkpoint lays it out: what all processes share, and this process's own.

        Args:
            engine: The engine's part, from `engine()`.
            driver: The driver's entries that are the same on all processes.
            own: The driver's entries of this process.
            moment: The moment that a save describes; from `self.moment` if None.
        """
        driver = dict(driver or {})
        kept = sorted(self._kept.keys() - driver)
        shared = {"engine": engine, "driver": {**{name: self._kept[name] for name in kept}, **driver}, "kept": kept}
        random = (moment or self.moment()).random or RandomState.capture()
        return shared, {"engine": {"random": random.state_dict()}, "driver": dict(own or {})}

    def save(self, output_dir: str | os.PathLike[str] | None, block: bool) -> str:
        """Write the engine's part, with the user's hooks; see `Accelerator.save_state`."""
        self._check_step()
        directory = os.fspath(self._numbered.next() if output_dir is None else output_dir)
        engine, extra = self.engine(), None
        if self.hooks.on_save:
            extra = checkpoint.extra_place(directory, self._state)
            for hook in self.hooks.on_save:
                hook(list(self.prepared.models), engine["models"], extra)
            self._state.wait_for_everyone()
        pending = self.write(directory, engine, self._tracking.entries(), block=block, extra=extra)
        if output_dir is None:
            self._numbered.record_written(Path(directory), pending)
        return directory

    def _check_step(self) -> None:
        """Refuse weights between two steps, and warn of gradients that no checkpoint holds."""
        if self._step.is_torn:
            raise CheckpointError(
                "No checkpoint is written while an optimizer is within its step, as L-BFGS is in its closure: the "
                "weights are neither those before the step nor those after it. Save after optimizer.step()."
            )
        keeps_moment = self.moment is not Moment  # a driver, that of its last finished step
        if not keeps_moment and self._step.holds_gradients:
            logger.warning_once(
                "save_state was called within a step: gradients are held that no optimizer has stepped with, and no "
                "checkpoint holds them. A resumed run begins with the next batch, without them. Save after the step of "
                "the last optimizer, where accelerator.sync_gradients is True."
            )

    def export(
        self,
        model: nn.Module,
        directory: str | os.PathLike[str],
        max_shard_size: int | str,
        safe: bool = True,
        on_each_node: bool = False,
    ) -> None:
        """Write a model's weights; see `Accelerator.save_model`."""
        state = self.strategy.state
        weights = state.whole(model) if on_each_node else state.full(model)
        if self._state.is_local_main_process if on_each_node else self._state.is_main_process:
            write = checkpoint.save_safetensors if safe else checkpoint.save_pickled_weights
            write(weights, directory, max_shard_size)
        self._state.wait_for_everyone()

    # loading

    def open(
        self,
        directory: str | os.PathLike[str],
        whole: bool = False,
        objects: bool = False,
        content: Mapping[str, Any] | None = None,
    ) -> SavedEngine:
        """Open a checkpoint; call it on all processes.

        Args:
            directory: The checkpoint's directory, or a URL.
            whole: Read all tensors at once, rather than each process its shards where the strategy can.
            objects: Whether objects in a file of Lightning's are unpickled, which runs whatever code it holds.
            content: What a file of Lightning's holds, where it has been read already.
        """
        return SavedEngine(self, self._state, directory, whole, objects, content)

    def keep(self, entries: Mapping[str, Any]) -> None:
        """Write a checkpoint's driver entries again with each save, unless the driver writes them itself."""
        self._kept = dict(entries)

    def load(self, input_dir: str | os.PathLike[str] | None) -> None:
        """Restore the engine's part, with the user's hooks; see `Accelerator.load_state`."""
        directory = os.fspath(self._numbered.latest() if input_dir is None else input_dir)
        self.saves.finish()
        models = list(self.prepared.models)
        for hook in self.hooks.on_load:
            hook(models, directory)
        saved = self.open(directory)
        saved.check(models, leaves_rest=True)
        saved.restore_models(models)
        saved.restore_optimizers()
        saved.restore_schedulers()
        saved.restore_loaders()
        saved.restore_registered()
        saved.restore_precision()
        saved.restore_random()
        self.keep(saved.driver)
        self._tracking.load(saved.driver)
        self._numbered.record_loaded(Path(directory))

    def owner(self, optimizer: PreparedOptimizer) -> nn.Module:
        """The prepared model whose parameters an optimizer holds; all of them, where it holds several models'."""
        held = {id(parameter) for parameter in parameters_of(optimizer)}
        owners = [model for model in self.prepared.models if any(id(p) in held for p in model.parameters())]
        if len(owners) == 1:
            return owners[0]
        return nn.ModuleList(self.strategy.unwrap(model) for model in owners)


def check_storable(state: Any, name: str) -> None:
    """Raise if a checkpoint cannot hold a state.

    Args:
        state: What is to be saved.
        name: What it is, for the error.

    Raises:
        CheckpointError: Something in it is neither plain values nor tensors; its place and type are named.
    """
    if not _is_plain(state):  # what decides about the rest imports DTensor, which takes a second
        checkpoint.packed({name: state})


def _is_plain(state: Any) -> bool:
    kind = type(state)
    if kind is dict:
        return all(type(key) is str and _is_plain(value) for key, value in state.items())
    if kind in (list, tuple):
        return all(map(_is_plain, state))
    return state is None or kind in (bool, int, float, str) or (kind is Tensor and state.layout is torch.strided)
