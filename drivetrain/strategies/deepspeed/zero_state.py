"""State dicts and checkpoints of models that have a DeepSpeed engine."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.checkpoint.export import parse_dtype, save_safetensors, weights_below
from drivetrain.checkpoint.formats import CheckpointFormat
from drivetrain.runtime.collectives import broadcast
from drivetrain.runtime.errors import CheckpointError, ConfigurationError
from drivetrain.strategies.base import ModelState, StateDict, Strategy, check_groups
from drivetrain.strategies.deepspeed.engine import Engines, TrainedModel
from drivetrain.strategies.deepspeed.shards import DeepSpeedShards, deepspeed_folder, read_deepspeed

# A model's weights and an optimizer's state under the names of the bare model, whole, in and out of an engine


State = dict[str, Any]
Holder = Callable[[int], bool]


def read_model(trained: TrainedModel, masters: bool, holder: Holder, whole: bool = False) -> State:
    # A collective call. `holder` returns True for the position of a tensor that this process keeps. The others become
    # meta tensors. `masters` returns float32 master weights in place of low-precision weights. `whole` moves tensors to
    # the CPU and leaves out those that this process does not keep.
    state: State = {}
    seen: dict[int, Tensor | None] = {}
    for number, (name, value) in enumerate(trained.bare.state_dict(keep_vars=True).items()):
        if not isinstance(value, Tensor):
            found: Any = value
        elif not isinstance(value, nn.Parameter):
            # Buffers may differ between processes, and the state has those of rank 0.
            found = broadcast(value.detach().clone())
        else:
            # Tied parameters have several names, but are gathered only once.
            if id(value) not in seen:
                seen[id(value)] = _read_parameter(trained, value, masters, holder(number))
            found = seen[id(value)]
        if whole and isinstance(found, Tensor):
            found = None if found.is_meta or not holder(number) else found.detach().cpu()
        if found is not None:
            state[name] = found
    return state


def _read_parameter(trained: TrainedModel, parameter: nn.Parameter, masters: bool, held: bool) -> Tensor:
    low = trained.is_low_precision
    if (is_partitioned(parameter) or low) and (masters or not low) and trained.layout.is_trained(parameter):
        value = trained.layout.read(parameter)
        return _kept(value if masters else value.to(parameter.dtype), held)
    if is_partitioned(parameter):
        return _kept(gathered(parameter), held)
    return parameter.detach()


def _kept(value: Tensor, held: bool) -> Tensor:
    return value.cpu() if held else torch.empty_like(value, device="meta")


def write_model(trained: TrainedModel, state: State, strict: bool = True) -> Any:
    """Load a full state dict into a DeepSpeed model and into the master weights in the model's engine.

    A collective call. Returns the missing and unexpected names. Raises `CheckpointError` if there are any and `strict`
    is True, or if a shape is wrong.
    """
    own = trained.bare.state_dict(keep_vars=True)
    partitioned = {name for name, value in own.items() if is_partitioned(value)}
    _check_shapes({name: own[name] for name in partitioned}, state)
    # A partitioned parameter is an empty tensor, into which `load_state_dict` cannot load.
    missing, unexpected = trained.bare.load_state_dict(
        {name: value for name, value in state.items() if name not in partitioned}, strict=False
    )
    missing = [name for name in missing if name not in state or name not in partitioned]
    if strict and (missing or unexpected):
        raise CheckpointError(
            f"The weights do not match {type(trained.bare).__name__}. Missing: {sorted(missing)[:8]}. Unexpected: "
            f"{sorted(unexpected)[:8]}. To load the others, use strict=False."
        )
    done: set[int] = set()
    for name, value in own.items():
        if not isinstance(value, nn.Parameter) or name not in state or id(value) in done:
            continue
        done.add(id(value))
        if name in partitioned:
            _scatter(value, state[name])
        if trained.layout.is_trained(value):
            trained.layout.write(value, state[name])
    return type(trained.bare.load_state_dict({}, strict=False))(missing, unexpected)


def _check_shapes(parameters: dict[str, Any], state: State) -> None:
    for name, parameter in parameters.items():
        if name in state and tuple(state[name].shape) != tuple(parameter.ds_shape):
            raise CheckpointError(
                f"Shape mismatch for {name!r}: {tuple(state[name].shape)} in the checkpoint, but "
                f"{tuple(parameter.ds_shape)} in the model. Build the model with the sizes of the saved one."
            )


def read_optimizer(trained: TrainedModel, holder: Holder) -> State:
    # A collective call. `holder` is that of `read_model`.
    known = trained.layout.shared_state()
    untouched = trained.participation.never_stepped
    state: State = {}
    for number, (name, parameter) in enumerate(trained.parameters.items()):
        if name in untouched:
            continue  # its part of the flat tensor's state has no meaning yet
        tensors, rest = known.get(id(parameter), ([], {}))
        if tensors or rest:
            whole = {key: _kept(trained.layout.read(parameter, key), holder(number)) for key in tensors}
            state[name] = whole | rest
    inner = trained.layout.inner.param_groups
    groups = [{**group, "params": list(names)} for group, names in zip(inner, trained.groups, strict=True)]
    return {"state": state, "param_groups": groups}


def write_optimizer(trained: TrainedModel, saved: State) -> None:
    # Any strategy may have saved the state.
    check_groups(trained.groups, saved)
    layout = trained.layout
    for group, options in zip(layout.inner.param_groups, saved["param_groups"], strict=True):
        group.update({key: value for key, value in options.items() if key != "params"})
    by_name = {name: saved["state"][name] for name in trained.parameters if name in saved["state"]}
    layout.make_state({id(trained.parameters[name]): state for name, state in by_name.items()})
    trained.participation.resume(set(trained.parameters) - set(by_name))
    for name, state in by_name.items():
        parameter = trained.parameters[name]
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dim() > 0 and layout.is_trained(parameter):
                layout.write(parameter, value, key)


def is_partitioned(value: Any) -> bool:
    """Return True if a value is a parameter that ZeRO-3 has partitioned over processes."""
    return hasattr(value, "ds_id")


def gathered(parameter: nn.Parameter) -> Tensor:
    """Return a full copy of a parameter that ZeRO-3 has partitioned.

    A collective call.
    """
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter]), torch.no_grad():
        return parameter.detach().clone()


def _scatter(parameter: nn.Parameter, value: Tensor) -> None:
    import deepspeed

    # At the end of the context, rank 0's value is sent to all processes, and each stores its part.
    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
        parameter.copy_(value)


class ZeroState(ModelState):
    """State dicts of models and optimizers that DeepSpeed's ZeRO shards, gathered from all processes."""

    held_as = "parts"

    def __init__(self, strategy: Strategy, engines: Engines) -> None:
        super().__init__(strategy)
        self._engines = engines

    def describe(self, parameter: nn.Parameter) -> tuple[int, bool]:
        elements, trained = super().describe(parameter)
        return getattr(parameter, "ds_numel", elements), trained

    def model(self, model: nn.Module, full: bool = False, everywhere: bool = False) -> StateDict:
        # Unless `full` is set, float32 master weights replace low-precision weights, and each tensor gathered from all
        # processes is a meta tensor on all processes but one. No process then holds the whole state.
        trained = self._engines.find(model)
        if trained is None:
            return super().model(model, full, everywhere)
        if full:
            first = self.strategy.topology.rank == 0
            return read_model(trained, masters=False, holder=lambda _: first, whole=True)
        return read_model(trained, masters=True, holder=self._holds)

    def parameters_in_place(self, model: nn.Module) -> dict[str, nn.Parameter]:
        if self._engines.find(model) is None:
            return super().parameters_in_place(model)
        raise ConfigurationError(
            "DeepSpeed keeps the trained weights in its engine, so they cannot be changed in place during a run. Use "
            'strategy="fsdp" to shard the model, or "ddp".',
        )

    def load_model(self, model: nn.Module, state: StateDict, strict: bool = True) -> Any:
        trained = self._engines.find(model)
        if trained is None:
            return super().load_model(model, state, strict)
        return write_model(trained, state, strict)

    def optimizer(self, model: nn.Module, optimizer: Optimizer) -> StateDict:
        return read_optimizer(self._engines.stepped_by(optimizer), self._holds)

    def load_optimizer(self, model: nn.Module, optimizer: Optimizer, state: StateDict) -> None:
        write_optimizer(self._engines.stepped_by(optimizer), state)

    def _holds(self, number: int) -> bool:
        # Round robin, so that no process has to store the whole state.
        return number % self.strategy.topology.environment.world_size == self.strategy.topology.rank


# DeepSpeed's own checkpoints: written and read by the engine, and turned into plain weights


_STATES = "*_model_states.pt"
_OPTIMIZER = "*_optim_states.pt"


def save(trained: TrainedModel, directory: str | os.PathLike[str], tag: str) -> None:
    # A collective call.
    trained.engine.save_checkpoint(os.fspath(directory), tag=tag)


def load(trained: TrainedModel, directory: str | os.PathLike[str], tag: str | None, world_size: int) -> None:
    # A collective call.
    folder = folder_of(directory, tag)
    written = len(list(folder.glob(_OPTIMIZER)))
    if written not in (0, 1, world_size) or (written == 1 and world_size > 1 and trained.engine.zero_optimization()):
        raise CheckpointError(
            f"{folder} was written by {written} processes, but this run has {world_size}. DeepSpeed loads its own "
            "checkpoints only with the same number. Use Accelerator.save_state or a Trainer's checkpoints, which "
            "load with any number, or export the weights: drivetrain merge-weights."
        )
    path, _ = trained.engine.load_checkpoint(os.fspath(directory), tag=folder.name)
    if path is None:
        raise CheckpointError(f"DeepSpeed could not read the checkpoint {folder}.")


def folder_of(directory: str | os.PathLike[str], tag: str | None = None) -> Path:
    # Without a tag, it is the latest checkpoint in the directory, or the directory itself.
    found = deepspeed_folder(directory, tag)
    if found is None:
        raise CheckpointError(
            f"{os.fspath(directory)} holds no DeepSpeed checkpoint{f' {tag!r}' if tag else ''}: no {_STATES} files."
        )
    return found


def whole_weights(directory: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Read a DeepSpeed checkpoint, and return its full float32 weights as a dict from name to tensor.

    No code in its files is executed.
    """
    weights: dict[str, Tensor] = read_deepspeed(folder_of(directory), DeepSpeedShards.weights)
    if weights and all(name.startswith("task.") for name in weights):
        # A Trainer's engine holds the task in a module of its own.
        weights = {name.removeprefix("task."): value for name, value in weights.items()}
    return weights


def merge_native(
    directory: str | os.PathLike[str],
    output: str | os.PathLike[str],
    max_shard_size: int | str = "5GB",
    dtype: str | None = None,
    *,
    module: str | None = None,
    overwrite: bool = False,
    progress: bool = False,
) -> list[str]:
    """Merge a checkpoint that DeepSpeed saved, and write the full weights to safetensors files.

    Returns the paths of the files.

    Args:
        directory: The directory of the checkpoint.
        output: The directory to write to.
        max_shard_size: The maximum size of a file, in bytes or as text such as `"5GB"`.
        dtype: The dtype of floating-point weights. None writes them in float32.
        module: The submodule whose weights are written. None writes those of the whole model.
        overwrite: True to write into a directory that is not empty.
        progress: True to show a progress bar.

    Raises:
        CheckpointError: There is no valid checkpoint in the directory.
    """
    target = parse_dtype(dtype)
    weights = weights_below(whole_weights(directory), module, os.fspath(directory))
    if target is not None:
        weights = {name: value.to(target) if value.is_floating_point() else value for name, value in weights.items()}
    return save_safetensors(weights, output, max_shard_size, overwrite=overwrite, progress=progress)


class DeepSpeedFormat(CheckpointFormat):
    """Reader of the checkpoints that a DeepSpeed engine writes, which joins their shards to full tensors."""

    name = "deepspeed"

    def merge(self, source: str | os.PathLike[str], *arguments: Any, model: int | None, **options: Any) -> Any:
        return None if deepspeed_folder(source) is None else merge_native(source, *arguments, **options)

    def holds_engine(self, folder: str | os.PathLike[str]) -> bool:
        """Return True if a local folder contains a checkpoint that a DeepSpeed engine wrote."""
        return deepspeed_folder(folder) is not None

    def weights(self, folder: Path) -> dict[str, Tensor]:
        # Floating-point tensors are float32.
        return read_deepspeed(folder, DeepSpeedShards.weights)  # type: ignore[no-any-return]

    def optimizer(self, folder: Path) -> Any:
        # Keyed by parameter name, or else by index.
        return read_deepspeed(folder, DeepSpeedShards.optimizer)
