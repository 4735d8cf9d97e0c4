"""Megatron-core's own checkpoints, through its `dist_checkpointing`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from drivetrain.runtime.errors import CheckpointError
from drivetrain.strategies.megatron.membership import Membership
from drivetrain.strategies.megatron.model import PlacedModel

# The optimizer's state in the space of the model, so that another number of data shards can read it.
_METADATA = {
    "non_homogeneous_layers": True,
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
}
_GENERATOR = "generator"


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
            f"{os.fspath(directory)} holds no checkpoint of megatron-core's dist_checkpointing. Give the directory that "
            "save_native wrote; for checkpoints of a Trainer, use Trainer.fit(resume=...)."
        )
    state: dict[str, Any] = dist_checkpointing.load(_sharded(placed, is_loading=True), os.fspath(directory))
    for number, chunk in enumerate(placed.bare):
        chunk.load_state_dict(state[_name(number, placed)], strict=False)
    front = placed.optimizer
    if front is not None:
        front.inner.load_state_dict(state["optimizer"])
        for group in front.inner.param_groups:
            front.param_groups[group["group_index"]].update(
                {name: group[name] for name in front.param_groups[group["group_index"]] if name in group and name != "params"}
            )
    if membership.generator is not None and _GENERATOR in state:
        membership.generator.set_state(state[_GENERATOR])


def _name(number: int, placed: PlacedModel) -> str:
    return "model" if len(placed.bare) == 1 else f"model{number}"


def _sharded(placed: PlacedModel, is_loading: bool) -> dict[str, Any]:
    state: dict[str, Any] = {
        _name(number, placed): chunk.sharded_state_dict(metadata=dict(_METADATA))  # type: ignore[operator]
        for number, chunk in enumerate(placed.bare)
    }
    if placed.optimizer is not None:
        model = state if len(placed.bare) > 1 else state["model"]
        state["optimizer"] = placed.optimizer.inner.sharded_state_dict(
            dict(model), is_loading=is_loading, metadata=dict(_METADATA)
        )
    return state
