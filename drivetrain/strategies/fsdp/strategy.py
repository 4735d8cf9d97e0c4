"""`FSDP`: parameters, gradients and optimizer state are divided among the processes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from drivetrain.runtime.collectives import broadcast
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.state import PartialState
from drivetrain.strategies.base import StateDict, Strategy, move_optimizer_state
from drivetrain.strategies.fsdp.clipping import clip_grad_norm_over_meshes_, clip_grad_value_locally_
from drivetrain.strategies.fsdp.parameters import point_optimizer, replaced, shard_like, slots_of
from drivetrain.strategies.fsdp.wrapping import units_of
from drivetrain.strategies.precision import Precision


class FSDP(Strategy):
    """Parameters, gradients and optimizer state are divided among the processes, by torch's `fully_shard`.

    Args:
        wrap: which modules are gathered and freed as one: `"auto"` (what the model names in `_no_split_modules`, else
            the blocks that repeat in a `ModuleList`), classes or their names, a number of parameters, a function, or
            None for the whole model at once.
        reshard_after_forward: whether a unit is freed between forward and backward, which costs a gather more; or the
            number of processes among which it stays divided meanwhile. None frees all but the outermost.
        replicate_size: copies of the divided model: each is divided among world size / `replicate_size` processes,
            and gradients are averaged over the copies (HYBRID_SHARD).
        cpu_offload: keep parameters, gradients and optimizer state on the CPU, and step there.
        sync_each_batch: reduce gradients in every micro-batch of an accumulation window, which keeps no whole
            gradients in memory meanwhile.

    Raises:
        ConfigurationError: an option cannot be.
    """

    name = "fsdp"
    pads_evaluation = True

    def __init__(
        self,
        *,
        wrap: Any = "auto",
        reshard_after_forward: bool | int | None = None,
        replicate_size: int = 1,
        cpu_offload: bool = False,
        sync_each_batch: bool = False,
    ) -> None:
        if replicate_size < 1:
            raise ConfigurationError(f"replicate_size must be at least 1, got {replicate_size}.")
        self.wrap = wrap
        self.reshard_after_forward = reshard_after_forward
        self.replicate_size = replicate_size
        self.cpu_offload = cpu_offload
        self.sync_each_batch = sync_each_batch
        self._mesh: DeviceMesh | None = None
        self._own_group = False

    # processes

    def setup(self, state: PartialState) -> None:
        """Take this process's place among its peers."""
        super().setup(state)
        world = self.environment.world_size
        if world % self.replicate_size:
            raise ConfigurationError(
                f"replicate_size={self.replicate_size} does not divide the {world} processes of this run. "
                f"Allowed: {', '.join(str(n) for n in range(1, world + 1) if world % n == 0)}."
            )

    def shard_mesh(self) -> DeviceMesh:
        """The mesh that `fully_shard` divides parameters over: (shard,) or (replicate, shard)."""
        if self._mesh is None:
            if not dist.is_initialized():
                # A world of one: the mesh wants a group all the same.
                cpu = self.kind.name == "cpu"
                backend = "gloo" if cpu else f"cpu:gloo,{self.kind.name}:{self.kind.backend}"
                dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
                self._own_group = True
            self._mesh = self._make_mesh()
        return self._mesh

    def _make_mesh(self) -> DeviceMesh:
        shards = self.environment.world_size // self.replicate_size
        if self.replicate_size == 1:
            return init_device_mesh(self.device.type, (shards,), mesh_dim_names=("dp_shard",))
        return init_device_mesh(
            self.device.type, (self.replicate_size, shards), mesh_dim_names=("dp_replicate", "dp_shard")
        )

    # model

    def place(self, model: nn.Module, precision: Precision, move: bool = True) -> nn.Module:
        """Divide a model; in evaluation too, since it may not fit otherwise."""
        model = precision.convert(model)
        self.before_sharding(model)
        self.shard(model, precision)
        return model

    def before_sharding(self, model: nn.Module) -> None:
        """Change a model before it is divided: where tensor parallelism comes in."""

    def shard(self, model: nn.Module, precision: Precision) -> None:
        """Divide a model, unit by unit from the inside, and what is left over as the outermost one."""
        options: dict[str, Any] = {
            "mesh": self.shard_mesh(),
            "mp_policy": self.mixed_precision_policy(precision),
            "offload_policy": self.offload_policy(),
        }
        for unit in units_of(model, self.wrap):
            fully_shard(unit, reshard_after_forward=self.reshard_after_forward, **options)
        fully_shard(model, reshard_after_forward=self.reshard_after_forward, **options)

    def mixed_precision_policy(self, precision: Precision) -> MixedPrecisionPolicy:
        """The dtypes that parameters are gathered and gradients are reduced in."""
        return MixedPrecisionPolicy(
            param_dtype=precision.param_dtype, reduce_dtype=precision.reduce_dtype, cast_forward_inputs=False
        )

    def offload_policy(self) -> OffloadPolicy:
        """Where shards live between uses."""
        return CPUOffloadPolicy(pin_memory=self.kind.name != "cpu") if self.cpu_offload else OffloadPolicy()

    def prepare(
        self, model: nn.Module, optimizers: Sequence[Optimizer], precision: Precision, move: bool = True
    ) -> tuple[nn.Module, list[Optimizer]]:
        """Divide a model, and let its optimizers hold the shards."""
        slots = slots_of(model)
        placed = self.place(model, precision, move)
        now = replaced(slots)
        for optimizer in optimizers:
            point_optimizer(optimizer, now)
            move_optimizer_state(optimizer)
        return placed, list(optimizers)

    # one optimizer step

    def gradient_sync(self, model: nn.Module, enabled: bool) -> AbstractContextManager[Any]:
        """Keep gradients whole and unreduced in a context."""
        if enabled or self.sync_each_batch:
            return nullcontext()
        return _without_gradient_sync([module for module in model.modules() if isinstance(module, FSDPModule)])

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Scale gradients down to a total norm of at most `max_norm`, over all shards."""
        return clip_grad_norm_over_meshes_(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        """Clamp every gradient to [-clip_value, clip_value]."""
        clip_grad_value_locally_(parameters, clip_value)

    # state

    def model_state(self, model: nn.Module) -> StateDict:
        """Shards of the parameters, and rank 0's buffers, under canonical names."""
        self.reshard(model)
        bare = self.unwrap(model)
        state = bare.state_dict()
        for name, _ in bare.named_buffers():
            if name in state:
                state[name] = broadcast(state[name].detach().clone())
        return state

    def load_model_state(self, model: nn.Module, state: StateDict, strict: bool = True) -> Any:
        """Take this process's shards of what `model_state` returned under any strategy."""
        self.reshard(model)
        bare = self.unwrap(model)
        here = bare.state_dict()
        shards = {
            name: shard_like(value, here[name], copy=False)
            if isinstance(here.get(name), DTensor)
            and isinstance(value, torch.Tensor)
            and value.shape == here[name].shape
            else value
            for name, value in state.items()
        }
        return bare.load_state_dict(shards, strict=strict)

    def optimizer_state(self, model: nn.Module, optimizer: Optimizer) -> StateDict:
        """An optimizer's state by canonical parameter name, its tensors divided as the parameters are."""
        self.reshard(model)
        return super().optimizer_state(model, optimizer)

    def load_optimizer_state(self, model: nn.Module, optimizer: Optimizer, state: StateDict) -> None:
        """Take this process's shards of what `optimizer_state` returned under any strategy."""
        self.reshard(model)
        parameters = dict(self.unwrap(model).named_parameters())
        shards = {
            name: {
                key: shard_like(value, parameters[name])
                if isinstance(value, torch.Tensor)
                and isinstance(parameters.get(name), DTensor)
                and value.shape == parameters[name].shape
                else value
                for key, value in saved.items()
            }
            for name, saved in state["state"].items()
        }
        super().load_optimizer_state(model, optimizer, {**state, "state": shards})

    def full_state_dict(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """All parameters and buffers, whole and on the CPU, on rank 0, gathered one by one; an empty dict elsewhere."""
        whole: dict[str, torch.Tensor] = {}
        for name, value in self.model_state(model).items():
            gathered = value.full_tensor() if isinstance(value, DTensor) else value
            if self.environment.rank == 0:
                whole[name] = gathered.detach().cpu() if isinstance(gathered, torch.Tensor) else gathered
        return whole

    def reshard(self, model: nn.Module) -> None:
        """Free whatever is gathered at the moment, so that the model's parameters are its shards."""
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def teardown(self) -> None:
        """Leave the group that a world of one made for its mesh."""
        self._mesh = None
        if self._own_group and dist.is_initialized():
            dist.destroy_process_group()
            self._own_group = False


@contextmanager
def _without_gradient_sync(modules: list[FSDPModule]) -> Iterator[None]:
    for module in modules:
        module.set_requires_gradient_sync(False, recurse=False)
    try:
        yield
    finally:
        for module in modules:
            module.set_requires_gradient_sync(True, recurse=False)
