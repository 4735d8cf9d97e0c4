"""Placement of a model that is replicated on every rank, except for its tensor-parallel layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from drivetrain.runtime.collectives import broadcast
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.observer import leaves_empty
from drivetrain.strategies.base import Topology
from drivetrain.strategies.fsdp import sharding
from drivetrain.strategies.fsdp.model_sharding import GradientAveraging
from drivetrain.strategies.parallel.mesh import MeshSizes
from drivetrain.strategies.precision import Precision

# Attribute of the bare model: the placed model and the mesh sizes of an earlier `prepare`.
_MEMORY = "_placed_as"


class WholeModelPlacer:
    # All processes start with equal weights.

    def __init__(
        self,
        sizes: MeshSizes,
        topology: Topology,
        unwrap: Callable[[nn.Module], nn.Module],
        split_layers: Callable[[nn.Module], None],
        rewrite_blocks: Callable[[nn.Module], None],
    ) -> None:
        self.averaging: Mapping[nn.Module, GradientAveraging] = {}
        self._sizes, self._topology, self._unwrap = sizes, topology, unwrap
        self._split_layers, self._rewrite_blocks = split_layers, rewrite_blocks

    def init_context(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def place(self, model: nn.Module, precision: Precision, move: bool = True) -> nn.Module:
        # A model that was placed before with the same mesh sizes is returned as it was placed then.
        bare = self._unwrap(model)
        known = placed_before(bare, self._sizes)
        if known is not None:
            return known
        model = precision.convert(model)
        # Broadcast before the split: afterwards the ranks hold different shards, and rank 0's would overwrite them.
        if self._topology.environment.is_distributed and not leaves_empty():
            with torch.no_grad():
                broadcast([tensor.detach() for tensor in (*model.parameters(), *model.buffers())])
        if move:
            move_real_tensors(model, self._topology.device)
        self._split_layers(model)
        self._rewrite_blocks(model)
        sharding.take_shards_on_load(model)
        remember_placed(bare, model, self._sizes)
        return model


def placed_before(bare: nn.Module, sizes: MeshSizes) -> nn.Module | None:
    # What an earlier `prepare` of this model returned, for processes of the same sizes.
    known, before = bare.__dict__.get(_MEMORY, (None, None))
    if known is None or before == sizes:
        return known  # type: ignore[no-any-return]
    raise ConfigurationError(
        f"This model was split before, over other processes ({before}). Create a new model, and load the state of "
        "this one into it.",
    )


def remember_placed(bare: nn.Module, model: nn.Module, sizes: MeshSizes) -> None:
    bare.__dict__[_MEMORY] = (model, sizes)


def move_real_tensors(model: nn.Module, device: torch.device) -> None:
    model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))  # type: ignore[no-untyped-call]
