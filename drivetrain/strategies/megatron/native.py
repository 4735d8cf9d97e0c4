"""Megatron-core's own checkpoints, through its `dist_checkpointing`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from drivetrain.runtime.errors import CheckpointError
from drivetrain.strategies.megatron.membership import Membership
from drivetrain.strategies.megatron.model import PlacedModel
from drivetrain.strategies.megatron.optimizer import GROUP, MegatronOptimizerFront
from drivetrain.strategies.megatron.parameter_state import ParameterState

# The optimizer's state in the space of the model, so that another number of data shards can read it.
_METADATA = {
    "non_homogeneous_layers": True,
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
}
_GENERATOR = "generator"
# What the value that is stepped is called there.
_STEPPED = ("param", "fp32_param")


def save(placed: PlacedModel, membership: Membership, directory: str | os.PathLike[str]) -> None:
    """Write model, optimizer and random state, each process its part; a collective.

    Args:
        placed: The model.
        membership: Has the random state.
        directory: Where to; it is made, and must be empty.
    """
    from megatron.core import dist_checkpointing

    if torch.distributed.get_rank() == 0:
        Path(directory).mkdir(parents=True, exist_ok=True)
    torch.distributed.barrier()
    state = _sharded(placed, is_loading=False)
    if membership.generator is not None:
        state[_GENERATOR] = membership.generator.get_state()
    dist_checkpointing.save(state, os.fspath(directory), content_metadata=dict(_METADATA))


def load(placed: PlacedModel, membership: Membership, directory: str | os.PathLike[str]) -> None:
    """Read what `save` wrote, on any grid of processes; a collective.

    Args:
        placed: The model.
        membership: Takes the random state.
        directory: Where from.

    Raises:
        CheckpointError: There is none.
    """
    from megatron.core import dist_checkpointing

    if not dist_checkpointing.check_is_distributed_checkpoint(os.fspath(directory)):
        raise CheckpointError(
            f"{os.fspath(directory)} holds no checkpoint of megatron-core's dist_checkpointing. Give the directory "
            "that save_native wrote; for checkpoints of a Trainer, use Trainer.fit(resume=...)."
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
    if membership.generator is not None and _GENERATOR in state:
        membership.generator.set_state(state[_GENERATOR])


def _load_optimizer(front: MegatronOptimizerFront, state: dict[Any, Any]) -> None:
    kept = ParameterState(front)
    parts = front.inner.chained_optimizers
    held = [(part, state if len(parts) == 1 else state[number]) for number, part in enumerate(parts)]
    later = []
    for part, own in held:
        # What torch's optimizers count steps in stands in the way of megatron-core's own loader (0.16.1).
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
        # Loading has given all parameters one tensor of steps, which each of them would count up (0.16.1).
        kept.write_steps(steps)


def _name(number: int, placed: PlacedModel) -> str:
    return "model" if len(placed.bare) == 1 else f"model{number}"


def _sharded(placed: PlacedModel, is_loading: bool) -> dict[str, Any]:
    state: dict[str, Any] = {
        _name(number, placed): chunk.sharded_state_dict(metadata=dict(_METADATA))  # type: ignore[operator]
        for number, chunk in enumerate(placed.bare)
    }
    if placed.optimizer is not None:
        ParameterState(placed.optimizer).make()
        model = state if len(placed.bare) > 1 else state["model"]
        state["optimizer"] = placed.optimizer.inner.sharded_state_dict(
            dict(model), is_loading=is_loading, metadata=dict(_METADATA)
        )
    return state
