"""`FSDP`: parameters, gradients and optimizer state are sharded among the processes."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.optim import Optimizer

from drivetrain.runtime.collectives import broadcast, reduce
from drivetrain.runtime.state import PartialState
from drivetrain.strategies.base import (
    Gradients,
    MicroBatch,
    Output,
    Strategy,
    Topology,
    View,
    average_gradients,
    local_part,
    scale_tensors,
)
from drivetrain.strategies.fsdp import sharding
from drivetrain.strategies.fsdp.model_sharding import FSDPOptions, GradientAveraging, ModelSharder, ShardMesh
from drivetrain.strategies.fsdp.sharded_state import ShardedState
from drivetrain.strategies.fsdp.sharding import ReplacedParameters, refuse_for_shards, slots_of
from drivetrain.strategies.precision import Precision

# Clipping gradients that may be plain tensors and shards over several meshes at once


@torch.no_grad()
def clip_grad_norm_over_meshes_(parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale gradients down to a total norm of at most `max_norm`; call it on all processes.

    Torch's own function refuses gradients on two meshes, and lists that mix plain tensors with sharded ones (torch
    2.13). Here the gradients are grouped by mesh and placements; each group's norm is combined over the dimensions
    that it is sharded in, and then those of the groups.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    total = total_norm_over_meshes(gradients, norm_type)
    scale_by_norm_(gradients, total, max_norm)
    return total


@torch.no_grad()
def total_norm_over_meshes(gradients: Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
    """The norm of all gradients together, as if they were one vector; call it on all processes."""
    norm_type = float(norm_type)
    groups: dict[tuple[DeviceMesh, tuple[int, ...]] | None, list[Tensor]] = {}
    for gradient in gradients:
        group, local = _locally(gradient)
        groups.setdefault(group, []).append(local)
    powers = [_power_of_group(group, locals_, norm_type) for group, locals_ in groups.items()]
    if not powers:
        return torch.zeros(())
    widest = torch.float64 if any(power.dtype == torch.float64 for power in powers) else torch.float32
    combined = torch.stack([power.to(powers[0].device, widest) for power in powers])
    return combined.max() if math.isinf(norm_type) else combined.sum() ** (1.0 / norm_type)


@torch.no_grad()
def scale_by_norm_(gradients: list[Tensor], total: Tensor, max_norm: float) -> None:
    """Multiply gradients by what brings their norm, `total`, down to `max_norm`; by one where it is below."""
    if not gradients or math.isinf(max_norm):
        return
    scale_tensors([local_part(each) for each in gradients], (max_norm / (total + 1e-6)).clamp(max=1.0))


def _locally(gradient: Tensor) -> tuple[tuple[DeviceMesh, tuple[int, ...]] | None, Tensor]:
    """A gradient's local part, and its mesh with the dimensions over which parts differ; None where it is whole."""
    if not isinstance(gradient, DTensor):
        return None, gradient
    if any(isinstance(placement, Partial) for placement in gradient.placements):
        whole = [Replicate() if isinstance(p, Partial) else p for p in gradient.placements]
        gradient = gradient.redistribute(placements=whole)
    split = tuple(i for i, p in enumerate(gradient.placements) if not isinstance(p, Replicate))
    return ((gradient.device_mesh, split) if split else None), gradient.to_local()


def _power_of_group(group: tuple[DeviceMesh, tuple[int, ...]] | None, locals_: list[Tensor], p: float) -> Tensor:
    """The sum of |g|^p over a group, or the largest |g| for p = infinity, combined over its shards."""
    held = [each for each in locals_ if each.numel()]
    device = locals_[0].device
    # The same on all processes, also where one holds nothing of any.
    dtype = torch.float64 if any(each.dtype == torch.float64 for each in locals_) else torch.float32
    if held:
        norms = torch.stack([norm.to(device, dtype) for norm in torch._foreach_norm(held, p)])
        power = norms.max() if math.isinf(p) else (norms**p).sum()
    else:
        power = torch.zeros((), device=device, dtype=dtype)
    if group is None:
        return power
    mesh, split = group
    if power.device.type != mesh.device_type:  # offloaded shards: the mesh talks on its own device
        power = power.to(mesh.device_type)
    for dimension in split:
        if mesh.size(dimension) > 1:
            operation = dist.ReduceOp.MAX if math.isinf(p) else dist.ReduceOp.SUM
            dist.all_reduce(power, op=operation, group=mesh.get_group(dimension))
    return power


# The gradients of sharded models


class ShardedGradients(Gradients):
    """Gradients that backward reduces to the shards of each process."""

    def __init__(
        self, averaging: Mapping[nn.Module, GradientAveraging] | None = None, sync_each_batch: bool = False
    ) -> None:
        self._sync_each_batch = sync_each_batch
        self._averaging: Mapping[nn.Module, GradientAveraging] = {} if averaging is None else averaging
        self._beside: WeakKeyDictionary[Optimizer, tuple[int, list[nn.Parameter]]] = WeakKeyDictionary()

    def finish(self, optimizers: Sequence[Optimizer]) -> None:
        """Average the gradients of whole parameters that are trained or were added since the model was sharded."""
        for optimizer in optimizers:
            count = sum(len(group["params"]) for group in optimizer.param_groups)
            known = self._beside.get(optimizer)
            if known is None or known[0] != count:
                watched = self._watched()
                held = [each for group in optimizer.param_groups for each in group["params"]]
                beside = [each for each in held if not isinstance(each, DTensor) and id(each) not in watched]
                known = self._beside[optimizer] = (count, beside if any(map(_is_shard, held)) else [])
            average_gradients([parameter for parameter in known[1] if parameter.requires_grad])

    def _watched(self) -> set[int]:
        return {each for averaging in self._averaging.values() for each in averaging.watched}

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Keep gradients whole and unreduced in a context."""
        if self._sync_each_batch:
            return nullcontext()
        return _without_sync(sharding.sharded_units(model), self._averaging.get(model))

    def are_held(self, model: nn.Module) -> bool:
        """Return whether an open window has gradients that are not in `.grad` yet."""
        return any(True for _ in sharding.held_gradients(model))

    def scale(
        self,
        parameters: Sequence[torch.Tensor],
        factor: torch.Tensor | float = 1.0,
        bound: float | None = None,
        model: nn.Module | None = None,
    ) -> None:
        """Change gradients, and with a model those that are not in `.grad` yet."""
        super().scale(parameters, factor, bound)
        if model is not None:
            scale_tensors(list(sharding.held_gradients(model)), factor, bound)

    def discard(self, model: nn.Module) -> None:
        """Forget the gradients of an open window."""
        sharding.discard_held_gradients(model)

    def clip_norm(self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale gradients down to a total norm of at most `max_norm`, over all shards."""
        return clip_grad_norm_over_meshes_(parameters, max_norm, norm_type)


def _is_shard(parameter: torch.Tensor) -> bool:
    """Whether a parameter is spread over processes with other data, not just over those of a layer."""
    return isinstance(parameter, DTensor) and parameter.device_mesh.mesh_dim_names != ("tp",)


@contextmanager
def _without_sync(units: Sequence[FSDPModule], averaging: GradientAveraging | None) -> Iterator[None]:
    for unit in units:
        unit.set_requires_gradient_sync(False, recurse=False)
    if averaging is not None:
        averaging.enabled = False
    try:
        yield
    finally:
        for unit in units:
            unit.set_requires_gradient_sync(True, recurse=False)
        if averaging is not None:
            averaging.enabled = True


class Placer(Protocol):
    """What brings models onto the processes."""

    @property
    def averaging(self) -> Mapping[nn.Module, GradientAveraging]:
        """Of each placed model, what averages the gradients of the parameters that stay whole."""

    def init_context(self) -> AbstractContextManager[Any]:
        """Context in which a model is best built."""

    def place(self, model: nn.Module, precision: Precision, move: bool = True) -> nn.Module:
        """Bring a model's parameters onto the device, or parts of them."""


class FSDP(Strategy):
    """Parameters, gradients and optimizer state are sharded among the processes, by torch's `fully_shard`.

    Args:
        wrap: Which modules are gathered and freed as one: `"auto"` (what the model names in `_no_split_modules`, else
            the blocks that repeat in a `ModuleList`), classes or their names, a number of parameters from which on a
            module is one, a function of a module, or None for the whole model at once.
        reshard_after_forward: Whether a unit is freed between forward and backward, which costs a gather more; or the
            number of processes among which it stays sharded meanwhile. None frees all but the outermost.
        replicate_size: Copies of the sharded model: each is sharded among world size / `replicate_size` processes,
            and gradients are averaged over the copies (HYBRID_SHARD).
        cpu_offload: Keep parameters, gradients and optimizer state on the CPU, and step there.
        activation_checkpointing: Recompute activations in backward: True for the blocks of the model, or which modules
            in the words of `wrap`.
        activation_offload: Keep on the CPU what goes into those blocks.
        ignored_modules: Modules, or names of them in the model, that every process holds whole; their gradients are
            averaged.
        gather_dtype: Dtype in which parameters are gathered; the precision's if None.
        reduce_dtype: Dtype in which gradients are reduced; the precision's if None.
        init: What `init_context()` builds: `"rank0"` the real model on rank 0 and none of its values elsewhere,
            `"meta"` no values anywhere, which the modules' `reset_parameters` then make one by one.
        weights: Safetensors or a checkpoint that the model's values are read from, each process its shards.
        sync_module_states: Give all processes rank 0's values where each has built the model.
        compile: Compile each block; a dict holds options of `torch.compile`.
        sync_each_batch: Reduce gradients in every micro-batch of an accumulation window, which keeps no whole
            gradients in memory meanwhile.
        reduce_unused: Reduce parameters that a backward does not reach as zeros: needed where they are others on
            other processes.
        forward_prefetch: How many units ahead are gathered in forward.
        backward_prefetch: How many units ahead are gathered in backward; 0 leaves it to torch, which gathers one.
        forward_methods: Methods besides `forward` that the model is called by, such as `"generate"`.

    Raises:
        ConfigurationError: An option cannot be.

    Example:
        ```python
        from drivetrain import FSDP, Trainer

        trainer = Trainer(accelerator="cpu", strategy=FSDP(activation_checkpointing=True), precision="bf16")
        ```
    """

    name = "fsdp"
    needs_even_batches = True
    state: ShardedState

    def __init__(
        self,
        *,
        wrap: Any = "auto",
        reshard_after_forward: bool | int | None = None,
        replicate_size: int = 1,
        cpu_offload: bool = False,
        activation_checkpointing: Any = False,
        activation_offload: bool = False,
        ignored_modules: Iterable[nn.Module | str] = (),
        gather_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        init: str = "rank0",
        weights: str | os.PathLike[str] | None = None,
        sync_module_states: bool = True,
        compile: bool | dict[str, Any] = False,
        sync_each_batch: bool = False,
        reduce_unused: bool = False,
        forward_prefetch: int = 0,
        backward_prefetch: int = 0,
        forward_methods: Iterable[str] = (),
    ) -> None:
        self.options = FSDPOptions(
            wrap=wrap,
            reshard_after_forward=reshard_after_forward,
            replicate_size=replicate_size,
            cpu_offload=cpu_offload,
            activation_checkpointing=activation_checkpointing,
            activation_offload=activation_offload,
            ignored_modules=tuple(ignored_modules),
            gather_dtype=gather_dtype,
            reduce_dtype=reduce_dtype,
            init=init,
            weights=weights,
            sync_module_states=sync_module_states,
            compile=compile,
            sync_each_batch=sync_each_batch,
            reduce_unused=reduce_unused,
            forward_prefetch=forward_prefetch,
            backward_prefetch=backward_prefetch,
            forward_methods=tuple(forward_methods),
        )
        self._placer: Placer
        self._replaced = ReplacedParameters()
        self._window_is_open = False
        self._prepared: WeakSet[nn.Module] = WeakSet()

    @classmethod
    def from_config(cls, config: Mapping[str, Any], **options: Any) -> FSDP:
        """Make one from an `fsdp_config`, of either version.

        Args:
            config: Its keys, with or without their `fsdp_`, as in a launcher's YAML.
            **options: Arguments of `FSDP` that win over those that the keys mean.

        Raises:
            ConfigurationError: A key is unknown, or its value cannot be.
        """
        from drivetrain.strategies.fsdp.config_keys import options_from

        return cls(**{**options_from(config), **options})

    # processes

    def setup(self, state: PartialState) -> None:
        """Take this process's place among its peers."""
        topology = Topology.data_parallel(state)
        mesh = ShardMesh(topology, self.options.replicate_size)
        self.assemble(topology, ModelSharder(self.options, topology, self.unwrap, mesh))
        state.before_leaving(mesh.leave)  # the group that a world of one made for it

    def assemble(self, topology: Topology, placer: Placer) -> None:
        """Make the parts, from a topology and a way of placing models that may be others than this strategy's own.

        Args:
            topology: This process's place.
            placer: Shards models, or places them in another way.
        """
        self.topology, self._placer = topology, placer
        self.gradients = ShardedGradients(placer.averaging, self.options.sync_each_batch)
        self.state = ShardedState(self)

    # model

    def init_context(self) -> AbstractContextManager[Any]:
        """Build a model without values, but for rank 0 with `init="rank0"`; `prepare` fills them in."""
        return self._placer.init_context()

    def prepare(
        self, model: nn.Module, optimizers: Sequence[Optimizer] | None, precision: Precision, move: bool = True
    ) -> tuple[nn.Module, list[Optimizer]]:
        """Shard a model, for evaluation too, and let its optimizers hold the shards."""
        slots = slots_of(model)
        placed = self._placer.place(model, precision, move)
        if optimizers is None:
            return placed, []
        self._prepared.add(placed)
        self._replaced.follow(slots, optimizers)
        for optimizer in optimizers:
            refuse_for_shards(optimizer)
        if self.topology.environment.is_distributed:
            precision.agree_on_overflow(largest_anywhere)
        return placed, list(optimizers)

    def view(self, model: nn.Module, stage: View) -> nn.Module:
        """The model itself; for evaluation all processes get rank 0's buffers, which the next checkpoint takes."""
        if stage == "evaluate" and self.topology.environment.is_distributed:
            broadcast(list(self.unwrap(model).buffers()))
        return model

    # one optimizer step

    def forward_backward(
        self, model: nn.Module, step_fn: Callable[[MicroBatch], Output], microbatches: Sequence[MicroBatch]
    ) -> list[Output]:
        """Run forward and backward over a window; what an earlier one left unfinished is forgotten."""
        if self._window_is_open:
            self.gradients.discard(model)
        self._window_is_open = len(microbatches) > 1
        outputs = super().forward_backward(model, step_fn, microbatches)
        self._window_is_open = False
        return outputs

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Compute the gradients of a loss; `inputs` may be shards, for which a forward has gathered the whole.

        Raises:
            ConfigurationError: A unit trains parameters of two dtypes, since some were unfrozen after `prepare`.
        """
        if kwargs.get("inputs") is not None:
            kwargs["inputs"] = sharding.gathered_parameters(self._prepared, kwargs["inputs"])
        try:
            super().backward(loss, **kwargs)
        except (RuntimeError, AssertionError):
            for model in self._prepared:
                sharding.refuse_mixed_units(model, self.unwrap)
            raise

    def optimizer_step(
        self, optimizer: Optimizer, precision: Precision, closure: Callable[[], Any] | None = None
    ) -> bool:
        """Step an optimizer, once it is known to hold the shards."""
        self._replaced.check(optimizer)
        return super().optimizer_step(optimizer, precision, closure)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.options.changed()})"


def largest_anywhere(flag: torch.Tensor) -> torch.Tensor:
    """The largest value of a scalar over all processes; call it on all."""
    largest: torch.Tensor = reduce(flag, "max")
    return largest
