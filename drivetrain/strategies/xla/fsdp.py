"""Parameters, gradients and optimizer state sharded over the XLA devices of a process."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

from drivetrain.runtime.nested import recursively_apply
from drivetrain.strategies.precision import Precision
from drivetrain.strategies.wrapping import units_of
from drivetrain.strategies.xla.mesh import REST, MeshShape, Spec, shard_spec
from drivetrain.strategies.xla.strategy import XLA
from drivetrain.strategies.xla.tensor_plan import Plan


class XLAFSDP(XLA):
    """`XLA` with parameters sharded over the devices (Xu et al., 2021, https://arxiv.org/abs/2105.04663).

    Each parameter is sharded along one dimension; XLA gathers it where it is used, and gradients and the optimizer's
    state are sharded like it.

    Args:
        replicate_size: Copies of the sharded model, each on a part of the devices.
        wrap: The blocks whose outputs are kept spread by rows, and between which gradients are not fused; as `FSDP`
            takes it.
        tp: Devices that share the computation of each layer.
        tp_plan: Which layers are split how, as `Parallel` takes it.
        **options: The other ones of `XLA`.
    """

    name = "xla_fsdp"

    def __init__(
        self,
        *,
        replicate_size: int = 1,
        wrap: Any = "auto",
        tp: int = 1,
        tp_plan: Plan | str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(tp=tp, tp_plan=tp_plan, **options)
        self._shape = MeshShape(data=replicate_size, shard=REST, tensor=tp)
        self._wrap = wrap

    def place(self, model: nn.Module, precision: Precision, move: bool = True) -> nn.Module:
        """Spread a model over the devices, and keep what its blocks return spread by rows."""
        placed = super().place(model, precision, move)
        mesh = self._mesh
        if mesh is None or not move:
            return placed

        def spread_output(module: nn.Module, inputs: Any, output: Any) -> Any:
            return recursively_apply(spread, output)

        def spread(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.device.type == "xla" and tensor.dim():
                mesh.shard_rows(tensor)
            return tensor

        barrier = importlib.import_module("torch_xla.distributed.spmd.xla_sharding").apply_backward_optimization_barrier
        for block in units_of(placed, self._wrap):
            if not hasattr(block, _MARKED):
                object.__setattr__(block, _MARKED, True)
                block.register_forward_hook(spread_output)
                barrier(block)
        return placed

    def _spec(self, parameter: nn.Parameter, split: Spec | None) -> Spec:
        assert self._mesh is not None
        return shard_spec(parameter.shape, self._mesh.shape.shard, split)


_MARKED = "_drivetrain_spread"
