"""`FSDP` strategy: shards parameters, gradients and optimizer state over the processes."""

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
from drivetrain.runtime.environment import ProcessEnvironment
from drivetrain.runtime.errors import ConfigurationError, nearest
from drivetrain.runtime.logging import get_logger
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

logger = get_logger(__name__)

# Clipping of gradients that are plain tensors, or shards over several meshes


@torch.no_grad()
def clip_grad_norm_over_meshes_(parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Clip gradients, sharded or not, to a total norm.

    Returns the norm before clipping. Torch's own function rejects gradients on two meshes, and lists that mix plain
    tensors with DTensors (torch 2.13). This function groups gradients by mesh and placements, and combines the norms of
    all groups.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    total = total_norm_over_meshes(gradients, norm_type)
    scale_by_norm_(gradients, total, max_norm)
    return total


@torch.no_grad()
def total_norm_over_meshes(gradients: Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
    """Return the total norm of gradients that may be sharded over different device meshes.

    All processes must call this.
    """
    norm_type = float(norm_type)
    groups: dict[tuple[DeviceMesh, tuple[int, ...]] | None, list[Tensor]] = {}
    for gradient in gradients:
        group, local = _sharding_and_local_part(gradient)
        groups.setdefault(group, []).append(local)
    powers = [_power_of_group(group, locals_, norm_type) for group, locals_ in groups.items()]
    if not powers:
        return torch.zeros(())
    widest = torch.float64 if any(power.dtype == torch.float64 for power in powers) else torch.float32
    combined = torch.stack([power.to(powers[0].device, widest) for power in powers])
    return combined.max() if math.isinf(norm_type) else combined.sum() ** (1.0 / norm_type)


@torch.no_grad()
def scale_by_norm_(gradients: list[Tensor], total: Tensor, max_norm: float) -> None:
    if not gradients or math.isinf(max_norm):
        return
    scale_tensors([local_part(each) for each in gradients], (max_norm / (total + 1e-6)).clamp(max=1.0))


def _sharding_and_local_part(gradient: Tensor) -> tuple[tuple[DeviceMesh, tuple[int, ...]] | None, Tensor]:
    # The first value is a pair of the mesh and its sharded dimensions, or None for an unsharded gradient.
    if not isinstance(gradient, DTensor):
        return None, gradient
    if any(isinstance(placement, Partial) for placement in gradient.placements):
        # A partial gradient must be summed over processes before its norm is computed.
        whole = [Replicate() if isinstance(p, Partial) else p for p in gradient.placements]
        gradient = gradient.redistribute(placements=whole)
    split = tuple(i for i, p in enumerate(gradient.placements) if not isinstance(p, Replicate))
    return ((gradient.device_mesh, split) if split else None), gradient.to_local()


def _power_of_group(group: tuple[DeviceMesh, tuple[int, ...]] | None, locals_: list[Tensor], p: float) -> Tensor:
    # For infinite `p`, the largest absolute value in place of the sum of powers.
    held = [each for each in locals_ if each.numel()]
    device = locals_[0].device
    # Every process must choose the same dtype for the all-reduce, even without elements of its own.
    dtype = torch.float64 if any(each.dtype == torch.float64 for each in locals_) else torch.float32
    if held:
        norms = torch.stack([norm.to(device, dtype) for norm in torch._foreach_norm(held, p)])
        power = norms.max() if math.isinf(p) else (norms**p).sum()
    else:
        power = torch.zeros((), device=device, dtype=dtype)
    if group is None:
        return power
    mesh, split = group
    if power.device.type != mesh.device_type:  # shards are offloaded, but the mesh communicates on its own device
        power = power.to(mesh.device_type)
    for dimension in split:
        if mesh.size(dimension) > 1:
            operation = dist.ReduceOp.MAX if math.isinf(p) else dist.ReduceOp.SUM
            dist.all_reduce(power, op=operation, group=mesh.get_group(dimension))
    return power


# Gradients of sharded models


class ShardedGradients(Gradients):
    """Implementation of `Gradients` for `FSDP`, which accumulates, scales and clips sharded gradients."""

    def __init__(
        self, averaging: Mapping[nn.Module, GradientAveraging] | None = None, sync_each_batch: bool = False
    ) -> None:
        self._sync_each_batch = sync_each_batch
        self._averaging: Mapping[nn.Module, GradientAveraging] = {} if averaging is None else averaging
        self._beside: WeakKeyDictionary[Optimizer, tuple[int, list[nn.Parameter]]] = WeakKeyDictionary()

    def finish(self, optimizers: Sequence[Optimizer]) -> None:
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
        if self._sync_each_batch:
            return nullcontext()
        return _without_sync(sharding.sharded_units(model), self._averaging.get(model))

    def are_held(self, model: nn.Module) -> bool:
        return any(True for _ in sharding.held_gradients(model))

    def scale(
        self,
        parameters: Sequence[torch.Tensor],
        factor: torch.Tensor | float = 1.0,
        bound: float | None = None,
        model: nn.Module | None = None,
    ) -> None:
        super().scale(parameters, factor, bound)
        if model is not None:
            scale_tensors(list(sharding.held_gradients(model)), factor, bound)

    def discard(self, model: nn.Module) -> None:
        sharding.discard_held_gradients(model)

    def clip_norm(self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        return clip_grad_norm_over_meshes_(parameters, max_norm, norm_type)


def _is_shard(parameter: torch.Tensor) -> bool:
    # Tensor parallelism alone gives DTensors, too, but does not shard over the data-parallel processes.
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
    @property
    def averaging(self) -> Mapping[nn.Module, GradientAveraging]:
        # By model, for the parameters that FSDP does not shard.
        ...

    def init_context(self) -> AbstractContextManager[Any]:
        # The context to construct a model in.
        ...

    def place(self, model: nn.Module, precision: Precision, move: bool = True) -> nn.Module:
        # Shards the model, or only moves it, and returns the module to call.
        ...


class FSDP(Strategy):
    """Fully sharded data parallelism, by torch's `fully_shard`.

    Parameters and optimizer state are divided over processes.

    Args:
        wrap: Modules that are gathered and freed as one unit. `"auto"` selects the classes in `_no_split_modules`, or
            else the repeated blocks of a `ModuleList`. Also classes or their names, the smallest number of parameters
            of a unit, a function of a module, or None for the whole model.
        reshard_after_forward: Free a unit's parameters after forward and gather them again in backward. A number keeps
            them sharded over that many processes instead. None frees all units except the outermost.
        replicate_size: Number of copies of the sharded model (HYBRID_SHARD). Each copy is sharded over world size /
            `replicate_size` processes, and gradients are averaged over the copies.
        cpu_offload: Keep parameters, gradients and optimizer state on the CPU, and run optimizer steps there.
        activation_checkpointing: Recompute activations in backward. True selects the model's blocks. Other values
            select modules as in `wrap`.
        activation_offload: Keep the inputs of these blocks on the CPU until backward.
        ignored_modules: Modules or their names that every process holds whole. Their gradients are averaged.
        gather_dtype: Dtype in which parameters are gathered. None uses the precision's dtype.
        reduce_dtype: Dtype in which gradients are reduced. None uses the precision's dtype.
        init: Construction in `init_context()`. `"rank0"` builds the real model on rank 0 and a model without values on
            other ranks. `"meta"` builds no values, and then calls `reset_parameters` of each module.
        weights: Safetensors file or checkpoint from which each process reads its shards of the model.
        sync_module_states: Broadcast rank 0's values if each process has built the model.
        compile: Compile each block. A dict contains options of `torch.compile`.
        sync_each_batch: Reduce gradients in every micro-batch of an accumulation window. Saves the memory of unsharded
            gradients.
        reduce_unused: Reduce zeros for parameters that backward does not reach. Needed if these parameters differ
            between processes.
        forward_prefetch: Number of units gathered ahead in forward.
        backward_prefetch: Number of units gathered ahead in backward. With 0, torch gathers one.
        forward_methods: Methods other than `forward` by which the model is called, such as `"generate"`.

    Raises:
        ConfigurationError: An option is invalid, or two options conflict.

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
        """Create an FSDP strategy from the section `fsdp_config` of a launcher's YAML file.

        Files of version 1 and of version 2 are supported.

        Args:
            config: The options by key, with or without the prefix `fsdp_`, as in a launcher's YAML file.
            **options: Arguments of `FSDP`, which override the options in `config`.

        Returns:
            The strategy.

        Raises:
            ConfigurationError: A key is unknown, or its value is invalid.
        """
        return cls(**{**options_from(config), **options})

    # Setup

    def setup(self, state: PartialState) -> None:
        topology = Topology.data_parallel(state)
        mesh = ShardMesh(topology, self.options.replicate_size)
        self.assemble(topology, ModelSharder(self.options, topology, self.unwrap, mesh))
        state.before_leaving(mesh.leave)  # destroys the group that the mesh created in a run with one process

    def assemble(self, topology: Topology, placer: Placer) -> None:
        # Called when a run begins: by `setup`, or by `Parallel` with its own `Placer`.
        self.topology, self._placer = topology, placer
        self.gradients = ShardedGradients(placer.averaging, self.options.sync_each_batch)
        self.state = ShardedState(self)

    # model

    def init_context(self) -> AbstractContextManager[Any]:
        return self._placer.init_context()

    def prepare(
        self, model: nn.Module, optimizers: Sequence[Optimizer] | None, precision: Precision, move: bool = True
    ) -> tuple[nn.Module, list[Optimizer]]:
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
        # Buffers such as running means differ between processes, and all evaluate with those of rank 0.
        if stage == "evaluate" and self.topology.environment.is_distributed:
            broadcast(list(self.unwrap(model).buffers()))
        return model

    # one optimizer step

    def forward_backward(
        self, model: nn.Module, step_fn: Callable[[MicroBatch], Output], microbatches: Sequence[MicroBatch]
    ) -> list[Output]:
        # An earlier window that ended with an exception leaves unreduced gradients, which would be added to this
        # step's.
        if self._window_is_open:
            self.gradients.discard(model)
        self._window_is_open = len(microbatches) > 1
        outputs = super().forward_backward(model, step_fn, microbatches)
        self._window_is_open = False
        return outputs

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        # Autograd sees the gathered parameters, not the shards that the optimizers and the user hold.
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
        self._replaced.check(optimizer)
        return super().optimizer_step(optimizer, precision, closure)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.options.changed()})"


def largest_anywhere(flag: torch.Tensor) -> torch.Tensor:
    # All processes must call this.
    largest: torch.Tensor = reduce(flag, "max")
    return largest


# Conversion of an `fsdp_config` of version 1 or 2 into arguments of `FSDP`


_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
_POLICIES = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")

# key -> why it has no effect
_WITHOUT_MEANING = {
    "use_orig_params": "parameters are always the model's own",
    "state_dict_type": "checkpoints are always sharded and can be loaded under any layout, and exports are complete",
    "backward_prefetch": "the next unit is always gathered while one computes its backward (BACKWARD_PRE); "
    "FSDP(backward_prefetch=...) gathers further ahead",
    "version": "there is only one implementation, based on fully_shard",
    "limit_all_gathers": "the number of concurrent all-gathers is always limited",
}


def options_from(config: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a launcher's `fsdp_config` section to arguments of `FSDP`."""
    given: dict[str, Any] = {}
    for key, value in config.items():
        short = str(key).removeprefix("fsdp_")
        if short not in _KNOWN:
            allowed = [f"fsdp_{name}" for name in _KNOWN]
            raise ConfigurationError(
                f"Unknown key {key!r} in fsdp_config. Allowed: {', '.join(sorted(allowed))}."
                f"{nearest(f'fsdp_{short}', allowed)}",
            )
        if value is not None:
            given[short] = value
    for key in sorted(set(given) & set(_WITHOUT_MEANING)):
        logger.warning_once(f"fsdp_{key}={given[key]!r} has no effect: {_WITHOUT_MEANING[key]}.")
    options: dict[str, Any] = {}
    for read in (_sharding, _wrapping, _the_rest):
        options |= read(given)
    return options


def _sharding(given: Mapping[str, Any]) -> dict[str, Any]:
    strategy = given.get("sharding_strategy")
    resharding = given.get("reshard_after_forward")
    # Version 2 files may hold the name of a version 1 strategy under `reshard_after_forward`.
    if isinstance(resharding, str) and resharding.upper() in _STRATEGIES:
        strategy, resharding = strategy or resharding, None
    options: dict[str, Any] = {}
    if strategy is not None:
        name = _choice("fsdp_sharding_strategy", strategy, _STRATEGIES)
        if name == "NO_SHARD":
            raise ConfigurationError(
                "fsdp_sharding_strategy=NO_SHARD shards nothing. Use strategy='ddp', which is equivalent and faster.",
            )
        options["reshard_after_forward"] = name in ("FULL_SHARD", "HYBRID_SHARD")
        if name.startswith("HYBRID"):
            environment = ProcessEnvironment.detect()
            # HYBRID shards within a machine, and keeps one copy of the model on each machine.
            options["replicate_size"] = max(1, environment.world_size // environment.local_world_size)
    if resharding is not None:
        options["reshard_after_forward"] = (
            resharding
            if isinstance(resharding, int) and not isinstance(resharding, bool)
            else _boolean("fsdp_reshard_after_forward", resharding)
        )
    return options


def _wrapping(given: Mapping[str, Any]) -> dict[str, Any]:
    classes = given.get("transformer_layer_cls_to_wrap")
    if isinstance(classes, str):
        classes = [name.strip() for name in classes.split(",") if name.strip()]
    least = given.get("min_num_params")
    policy = given.get("auto_wrap_policy")
    if policy is None:
        return {"wrap": classes} if classes else {}
    name = _choice("fsdp_auto_wrap_policy", policy, _POLICIES)
    if name == "NO_WRAP":
        return {"wrap": None}
    if name == "TRANSFORMER_BASED_WRAP":
        return {"wrap": classes or "auto"}
    if not least:
        raise ConfigurationError("fsdp_auto_wrap_policy=SIZE_BASED_WRAP requires fsdp_min_num_params.")
    return {"wrap": int(float(least))}


def _the_rest(given: Mapping[str, Any]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for key, name in (
        ("offload_params", "cpu_offload"),
        ("cpu_offload", "cpu_offload"),
        ("activation_checkpointing", "activation_checkpointing"),
        ("sync_module_states", "sync_module_states"),
    ):
        if key in given:
            options[name] = _boolean(f"fsdp_{key}", given[key])
    if "forward_prefetch" in given:
        # True stands for one unit in advance.
        options["forward_prefetch"] = int(_boolean("fsdp_forward_prefetch", given["forward_prefetch"]))
    if "cpu_ram_efficient_loading" in given:
        # The value is only validated: `init="rank0"`, the default, suits both values.
        _boolean("fsdp_cpu_ram_efficient_loading", given["cpu_ram_efficient_loading"])
        options["init"] = "rank0"
    if given.get("ignored_modules"):
        ignored = given["ignored_modules"]
        options["ignored_modules"] = [ignored] if isinstance(ignored, str) else ignored
    return options


def _choice(key: str, value: Any, allowed: tuple[str, ...]) -> str:
    # Older files give the choice as a number, counted from 1.
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= len(allowed):
        return allowed[value - 1]
    name = str(value).upper()
    if name.isdigit() and 1 <= int(name) <= len(allowed):
        return allowed[int(name) - 1]
    if name not in allowed:
        raise ConfigurationError(f"Invalid {key}={value!r}. Allowed: {', '.join(allowed)}.{nearest(name, allowed)}")
    return name


def _boolean(key: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    known = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if str(value).lower() not in known:
        raise ConfigurationError(f"{key}={value!r} is not supported. Use true or false.")
    return known[str(value).lower()]


_KNOWN = (
    "sharding_strategy",
    "reshard_after_forward",
    "auto_wrap_policy",
    "transformer_layer_cls_to_wrap",
    "min_num_params",
    "offload_params",
    "cpu_offload",
    "activation_checkpointing",
    "sync_module_states",
    "forward_prefetch",
    "cpu_ram_efficient_loading",
    "ignored_modules",
    *_WITHOUT_MEANING,
)
