"""State of a model prepared for megatron-core under the names of the full model, assembled from all processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.runtime.collectives import gather_object
from drivetrain.runtime.errors import CheckpointError, ConfigurationError
from drivetrain.strategies.base import ModelState, StateDict, Strategy, check_groups, named_optimizer_state
from drivetrain.strategies.megatron.configuration import MegatronGroups
from drivetrain.strategies.megatron.layout import Entry
from drivetrain.strategies.megatron.model import PlacedModel, PlacedModels
from drivetrain.strategies.megatron.optimizer import GROUP, MegatronOptimizerFront, ParameterState


class MergedState(ModelState):
    """Full state of models and optimizers that are split over processes."""

    held_as = "parts"

    def __init__(self, strategy: Strategy, models: PlacedModels) -> None:
        super().__init__(strategy)
        self._models = models

    def describe(self, parameter: nn.Parameter) -> tuple[int, bool]:
        for placed in self._models:
            if placed.layout.find(parameter) is not None:
                return placed.layout.elements(parameter), parameter.requires_grad
        return super().describe(parameter)

    # models

    def parameters_in_place(self, model: nn.Module) -> dict[str, nn.Parameter]:
        # Megatron-core's optimizer writes its master weights to the parameters.
        raise ConfigurationError(
            "Megatron-core keeps the trained weights in its optimizer, so they cannot be changed in place during a "
            'run. Use strategy="fsdp" or Parallel to shard the model.',
        )

    def model(self, model: nn.Module, full: bool = False, everywhere: bool = False) -> StateDict:
        # Unless `full` is set, float32 master weights replace low-precision weights, and tensors that another process
        # stores are on the meta device. No process then holds the full model.
        placed = self._models.require(model)
        if full:
            return self._full(placed)
        kept = None if placed.optimizer is None else ParameterState(placed.optimizer)

        def value(entry: Entry) -> Tensor:
            if kept is None or not entry.tensor.requires_grad or not kept.is_stepped(entry.tensor):
                return entry.tensor
            return entry.tensor if entry.tensor.dtype is torch.float32 else kept.read(entry.tensor, None)

        def dtype(name: str) -> torch.dtype:
            own = placed.layout.dtype(name)
            low = own in (torch.bfloat16, torch.float16)
            return torch.float32 if kept is not None and low else own

        state: StateDict = placed.layout.read(value, dtype)
        return state | self._around(placed)

    def _full(self, placed: PlacedModel) -> StateDict:
        layout = placed.layout
        whole = layout.read(lambda entry: entry.tensor, layout.dtype, lambda name, ranks: 0)
        if self.strategy.topology.rank != 0:
            return {}
        around = {name: value.detach().cpu() for name, value in self._around(placed).items()}
        return {name: value.detach() for name, value in whole.items()} | around

    def load_model(self, model: nn.Module, state: StateDict, strict: bool = True) -> Any:
        placed = self._models.require(model)
        around = self._around(placed)
        missing = [name for name in (*placed.layout.names, *around) if name not in state]
        # Checkpoints of other strategies have extra state of the layers, which is not needed.
        given = [name for name in state if not name.endswith("_extra_state")]
        unexpected = [name for name in given if name not in placed.layout.names and name not in around]
        if strict and (missing or unexpected):
            raise CheckpointError(
                f"The weights do not match {type(placed.owner).__name__}. Missing: {missing[:8]}. Unexpected: "
                f"{unexpected[:8]}. To load the others, use strict=False."
            )
        kept = None if placed.optimizer is None else ParameterState(placed.optimizer)
        for entry in placed.layout.entries:
            if entry.name not in state:
                continue
            entry.fill(entry.tensor.detach(), state[entry.name])
            if kept is not None and entry.tensor.dtype is not torch.float32 and kept.is_stepped(entry.tensor):
                # The float32 master weight is a tensor of its own.
                kept.write(entry.tensor, None, _local(entry, state[entry.name]))
        placed.owner.load_state_dict({name: state[name] for name in around if name in state}, strict=False)
        return type(placed.owner.load_state_dict({}, strict=False))(missing, unexpected)

    def _around(self, placed: PlacedModel) -> StateDict:
        own = {id(value) for chunk in placed.bare for value in chunk.state_dict(keep_vars=True).values()}
        state = placed.owner.state_dict(keep_vars=True)
        return {
            name: value.detach() for name, value in state.items() if isinstance(value, Tensor) and id(value) not in own
        }

    # optimizers

    def optimizer(self, model: nn.Module, optimizer: Optimizer) -> StateDict:
        front = self._front(optimizer)
        if front is None:
            return named_optimizer_state(self.strategy.unwrap(model), optimizer)
        placed, kept = front.placed, ParameterState(front)
        known: dict[str, bool] = {}
        # A process without any state takes part in the collective calls below, and so must know all keys.
        for each in gather_object([kept.keys()]):
            known |= each
        state: StateDict = {}
        for key in sorted(key for key, sized in known.items() if sized):
            for name, value in self._read_state(placed, kept, key).items():
                state.setdefault(name, {})[key] = value
        steps = max((count for count in gather_object([kept.steps()]) if count is not None), default=None)
        if steps is not None:
            for values in state.values():
                values["step"] = torch.tensor(steps)
        names = _names_of_groups(front)
        groups = [
            {**{key: value for key, value in group.items() if key != "params"}, "params": names[number]}
            for number, group in enumerate(front.param_groups)
        ]
        scalers = [part.grad_scaler.state_dict() for part in front.parts if getattr(part, "grad_scaler", None)]
        return {"state": state, "param_groups": groups, **({"grad_scaler": scalers[0]} if scalers else {})}

    def _read_state(self, placed: PlacedModel, kept: ParameterState, key: str) -> dict[str, Tensor]:
        def value(entry: Entry) -> Tensor:
            if not kept.is_stepped(entry.tensor):
                # Frozen tensors have no state. Their zeros are left out of the result.
                return torch.zeros_like(entry.tensor, dtype=torch.float32)
            return kept.read(entry.tensor, key)

        found = placed.layout.read(value, lambda name: torch.float32)
        stepped = {
            name
            for names in gather_object([[e.name for e in placed.layout.entries if kept.is_stepped(e.tensor)]])
            for name in names
        }
        return {name: tensor for name, tensor in found.items() if name in stepped}

    def load_optimizer(self, model: nn.Module, optimizer: Optimizer, state: StateDict) -> None:
        front = self._front(optimizer)
        if front is None:
            super().load_optimizer(model, optimizer, state)
            return
        check_groups(_names_of_groups(front), state)
        for group, saved in zip(front.param_groups, state["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        kept = ParameterState(front)
        steps = 0.0
        for entry in front.placed.layout.entries:
            if entry.name not in state["state"] or not kept.is_stepped(entry.tensor):
                continue
            for key, value in state["state"][entry.name].items():
                if key == "step":
                    steps = max(steps, float(value))
                elif isinstance(value, Tensor) and value.dim() > 0:
                    kept.write(entry.tensor, key, _local(entry, value))
        kept.write_steps(steps)
        for part in front.parts:
            if getattr(part, "grad_scaler", None) and "grad_scaler" in state:
                part.grad_scaler.load_state_dict(state["grad_scaler"])

    def _front(self, optimizer: Optimizer) -> MegatronOptimizerFront | None:
        return next((placed.optimizer for placed in self._models if placed.optimizer is optimizer), None)


def _local(entry: Entry, whole: Tensor) -> Tensor:
    part = torch.empty(entry.tensor.shape, dtype=torch.float32, device=entry.tensor.device)
    entry.fill(part, whole)
    return part


def _names_of_groups(front: MegatronOptimizerFront) -> list[list[str]]:
    # A collective call.
    layout = front.placed.layout
    own = [
        [entry.name for p in group["params"] if (entry := layout.find(p)) is not None] for group in front.param_groups
    ]
    found: list[set[str]] = [set() for _ in own]
    for everyone in gather_object([own]):
        for number, names in enumerate(everyone):
            found[number].update(names)
    return [[name for name in layout.names if name in names] for names in found]


# Megatron-core's own checkpoints, through its `dist_checkpointing`


# Store the optimizer state in the layout of the model, so that other numbers of data shards can load it.
_NATIVE_METADATA = {
    "non_homogeneous_layers": True,
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
}
_GENERATOR = "generator"
# Names of a parameter's stepped value in megatron-core's checkpoints.
_STEPPED = ("param", "fp32_param")


def save(placed: PlacedModel, groups: MegatronGroups, directory: str | os.PathLike[str]) -> None:
    # A collective call.
    from megatron.core import dist_checkpointing

    if torch.distributed.get_rank() == 0:
        Path(directory).mkdir(parents=True, exist_ok=True)
    # No rank may write before the directory exists.
    torch.distributed.barrier()
    state = _sharded(placed, is_loading=False)
    if groups.generator is not None:
        state[_GENERATOR] = groups.generator.get_state()
    dist_checkpointing.save(state, os.fspath(directory), content_metadata=dict(_NATIVE_METADATA))


def load(placed: PlacedModel, groups: MegatronGroups, directory: str | os.PathLike[str]) -> None:
    # A collective call. The checkpoint may be written with other parallel sizes.
    from megatron.core import dist_checkpointing

    if not dist_checkpointing.check_is_distributed_checkpoint(os.fspath(directory)):
        raise CheckpointError(
            f"{os.fspath(directory)} holds no checkpoint in megatron-core's own format. Pass the directory that "
            "save_native wrote. For checkpoints of a Trainer, use Trainer.fit(resume=...)."
        )
    state: dict[str, Any] = dist_checkpointing.load(_sharded(placed, is_loading=True), os.fspath(directory))
    for number, chunk in enumerate(placed.bare):
        chunk.load_state_dict(state[_name(number, placed)], strict=False)
    front = placed.optimizer
    if front is not None:
        _load_optimizer(front, state["optimizer"])
        for group in front.inner.param_groups:
            own = front.param_groups[group[GROUP]]
            own.update({name: group[name] for name in own if name in group and name != "params"})
    if groups.generator is not None and _GENERATOR in state:
        groups.generator.set_state(state[_GENERATOR])


def _load_optimizer(front: MegatronOptimizerFront, state: dict[Any, Any]) -> None:
    kept = ParameterState(front)
    parts = front.inner.chained_optimizers
    held = [(part, state if len(parts) == 1 else state[number]) for number, part in enumerate(parts)]
    later = []
    for part, own in held:
        # Megatron-core's loader (0.16.1) cannot handle the step counts in the state of torch's optimizers.
        if "param_state" in own and any("step" in values for values in part.optimizer.state.values()):
            parameters = [parameter for buffer in part.buffers for parameter in buffer.param_index_map]
            later.append((parameters, own.pop("param_state")))
            del own["param_state_sharding_type"]
    front.inner.load_state_dict(state)
    for parameters, values in later:
        for number, parameter in enumerate(parameters):
            for key, value in values[number].items():
                kept.write(parameter, None if key in _STEPPED else key, value)
    steps = kept.steps()
    if steps is not None:
        # Loading has given all parameters the same step tensor (0.16.1), which each of them would increment.
        kept.write_steps(steps)


def _name(number: int, placed: PlacedModel) -> str:
    return "model" if len(placed.bare) == 1 else f"model{number}"


def _sharded(placed: PlacedModel, is_loading: bool) -> dict[str, Any]:
    state: dict[str, Any] = {
        _name(number, placed): chunk.sharded_state_dict(metadata=dict(_NATIVE_METADATA))  # type: ignore[operator]
        for number, chunk in enumerate(placed.bare)
    }
    if placed.optimizer is not None:
        ParameterState(placed.optimizer).make()
        model = state if len(placed.bare) > 1 else state["model"]
        state["optimizer"] = placed.optimizer.inner.sharded_state_dict(
            dict(model), is_loading=is_loading, metadata=dict(_NATIVE_METADATA)
        )
    return state
