"""`ModelSharder`: selection of the units of a model, and their sharding."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
)
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from drivetrain.runtime.collectives import broadcast, reduce
from drivetrain.runtime.errors import ConfigurationError, nearest
from drivetrain.runtime.observer import leaves_empty
from drivetrain.strategies.base import Topology
from drivetrain.strategies.fsdp import sharding
from drivetrain.strategies.fsdp.materialise import Materialiser, load_weights, parameters_on_meta, take_values
from drivetrain.strategies.fsdp.sharding import normalise_in_full, rewrite_blocks
from drivetrain.strategies.precision import Precision, overrides
from drivetrain.strategies.step_module import StepModule
from drivetrain.strategies.wrapping import has_forward, repeated_blocks, units_of, without_tied_across

# Validated options of `FSDP`


_INITS = ("rank0", "meta")


@dataclass(frozen=True)
class FSDPOptions:
    """Checked arguments of the `FSDP` strategy. See `FSDP` for their meaning."""

    wrap: Any = "auto"
    reshard_after_forward: bool | int | None = None
    replicate_size: int = 1
    cpu_offload: bool = False
    activation_checkpointing: Any = False
    activation_offload: bool = False
    ignored_modules: tuple[nn.Module | str, ...] = ()
    gather_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    init: str = "rank0"
    weights: str | os.PathLike[str] | None = None
    sync_module_states: bool = True
    compile: bool | dict[str, Any] = False
    sync_each_batch: bool = False
    reduce_unused: bool = False
    forward_prefetch: int = 0
    backward_prefetch: int = 0
    forward_methods: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, least in (("replicate_size", 1), ("forward_prefetch", 0), ("backward_prefetch", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigurationError(f"{name} must be a whole number of at least {least}, got {value!r}.")
        if self.init not in _INITS:
            raise ConfigurationError(
                f"init must be one of {', '.join(map(repr, _INITS))}, got {self.init!r}.{nearest(self.init, _INITS)}",
            )
        resharding = self.reshard_after_forward
        if resharding is not None and not isinstance(resharding, int):
            raise ConfigurationError(
                f"reshard_after_forward must be True, False, None or a number of processes, got {resharding!r}.",
            )
        if self.activation_offload and self.activation_checkpointing is False:
            raise ConfigurationError(
                "activation_offload=True keeps the inputs of recomputed blocks on the CPU, so it requires "
                "activation_checkpointing.",
            )
        if not isinstance(self.compile, bool | dict):
            raise ConfigurationError(f"compile must be True, False or a dict of options, got {self.compile!r}.")

    def compile_options(self) -> dict[str, Any]:
        return dict(self.compile) if isinstance(self.compile, dict) else {}

    def changed(self) -> str:
        return ", ".join(
            f"{field.name}={getattr(self, field.name)!r}"
            for field in fields(self)
            if getattr(self, field.name) != field.default
        )


# Parameters that are not sharded


class GradientAveraging:
    """Hooks that average the gradients of parameters that FSDP does not shard.

    Attributes:
        enabled: True if backward averages gradients, False within an accumulation window.
        watched: The `id` of each parameter whose gradients are averaged.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._groups = [mesh.get_group(dim) for dim in range(mesh.ndim) if mesh.size(dim) > 1]
        self._count = mesh.size()
        self.enabled = True
        self.watched: set[int] = set()

    def watch(self, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            if not (parameter.is_floating_point() or parameter.is_complex()):
                continue  # torch computes no gradients for integers
            is_trained = parameter.requires_grad
            self.watched.add(id(parameter))
            # Torch accepts the hook only on a parameter that requires gradients, but keeps it afterwards.
            parameter.requires_grad_(True)
            parameter.register_post_accumulate_grad_hook(self._average)  # type: ignore[no-untyped-call]
            parameter.requires_grad_(is_trained)

    def _average(self, parameter: Tensor) -> None:
        if not self.enabled or parameter.grad is None:
            return
        # Earlier micro-batches may have left a local gradient or an average. Averaging an average again does not change
        # it.
        with torch.no_grad():
            for group in self._groups:
                dist.all_reduce(parameter.grad, group=group)
            parameter.grad /= self._count


def parameters_to_replicate(model: nn.Module, ignored: Iterable[nn.Module]) -> set[nn.Parameter]:
    chosen = {parameter for module in ignored for parameter in module.parameters()}
    # A scalar has no dimension to shard.
    return chosen | {parameter for parameter in model.parameters() if parameter.dim() == 0}


_HALVES = (torch.bfloat16, torch.float16)


class ModelSharder:
    def __init__(
        self,
        options: FSDPOptions,
        topology: Topology,
        unwrap: Callable[[nn.Module], nn.Module],
        mesh: Callable[[], DeviceMesh],
        split_layers: Callable[[nn.Module], None] | None = None,
    ) -> None:
        self.options = options
        self.averaging: MutableMapping[nn.Module, GradientAveraging] = WeakKeyDictionary()
        self._topology, self._unwrap, self._mesh, self._split_layers = topology, unwrap, mesh, split_layers
        self._random_state: torch.Tensor | None = None

    def init_context(self) -> AbstractContextManager[Any]:
        if self.options.init == "meta" or self.options.weights is not None:
            return self._without_values()
        return nullcontext() if self._topology.environment.rank == 0 else parameters_on_meta()

    @contextmanager
    def _without_values(self) -> Iterator[None]:
        with parameters_on_meta():
            yield
        self._random_state = torch.get_rng_state()
        torch.randint(2, ())  # so that a second model gets other values

    def place(self, model: nn.Module, precision: Precision, move: bool = True) -> nn.Module:
        # A model that is sharded already is returned unchanged. Models for evaluation are sharded too, since they may
        # not fit otherwise.
        known = self._placed_before(model, precision)
        if known is not None:
            return known
        model = precision.convert(model)
        replicated = self._replicated(model)
        values = self._take_values(model, replicated)
        replicated = self._replicated(model)  # taking the values has replaced some parameters
        if self._split_layers is not None:
            make_contiguous(model)
            self._split_layers(model)
        self.shard(model, precision, replicated)
        self._give_values(model, values, replicated)
        sharding.take_shards_on_load(model)
        sharding.remember_units(model)
        bare = self._unwrap(model)
        if bare is not model:
            # A deep copy of the user's module alone must shard the parameters again.
            bare.__dict__["__deepcopy__"] = sharding.ShardedInside(bare, model)
        return model

    def _placed_before(self, model: nn.Module, precision: Precision) -> nn.Module | None:
        bare = self._unwrap(model)
        inside = bare.__dict__.get("__deepcopy__")
        known = inside.outer if isinstance(inside, sharding.ShardedInside) else None
        if isinstance(bare, FSDPModule):
            known = bare
        if known is None:
            if sharding.is_sharded(model):
                raise ConfigurationError(
                    "A part of this model is already sharded, on its own or within another model. Shard the whole "
                    "model at once, or create a new model.",
                )
            return None
        unit_sharding: sharding.UnitSharding = next(
            module.__dict__[sharding.UNIT_SHARDING]
            for module in known.modules()
            if sharding.UNIT_SHARDING in module.__dict__
        )
        if unit_sharding.mesh != self._mesh() or unit_sharding.mixed_precision != self._mixed_precision(precision):
            raise ConfigurationError(
                "This model is already sharded, over other processes or in another precision. Create a new model, and "
                "load the state of this one into it.",
            )
        return known

    def shard(
        self,
        model: nn.Module,
        precision: Precision,
        replicated: frozenset[nn.Parameter],
        units: Sequence[nn.Module] | None = None,
    ) -> None:
        options = self.options
        make_contiguous(model)
        roots = self._roots(model)
        unit_sharding = sharding.UnitSharding(
            mesh=self._mesh(),
            mixed_precision=self._mixed_precision(precision),
            offload=(
                CPUOffloadPolicy(pin_memory=self._topology.kind.name != "cpu")
                if self.options.cpu_offload
                else OffloadPolicy()
            ),
            reshard_after_forward=options.reshard_after_forward,
            whole=replicated,
            reduce_unused=options.reduce_unused,
        )
        chosen = self.units(model) if units is None else units
        ignored = {id(module) for module in self._ignored_modules(model)}
        inner = [
            unit
            for unit in without_tied_across(model, [*chosen, *(root for root in roots if root is not model)])
            if id(unit) not in ignored and any(p not in replicated for p in unit.parameters())
        ]
        gathered_in = unit_sharding.mixed_precision.param_dtype
        if gathered_in in _HALVES and any(p.dtype not in _HALVES for p in model.parameters()):
            normalise_in_full(model, everywhere=self._topology.kind.name == "cpu")
        self.rewrite_blocks(model, units)
        outermost = {id(root) for root in roots}
        self._refuse_mixed_units(model, [*(unit for unit in inner if id(unit) not in outermost), *roots], replicated)
        for unit in [unit for unit in inner if id(unit) not in outermost]:
            sharding.shard_unit(unit, unit_sharding)
        for root in roots:
            sharding.shard_unit(root, unit_sharding.for_outermost(frees=root is not model))
        # In the order of registration, which is assumed to be the order of execution.
        in_order = [module for module in sharding.sharded_units(model) if id(module) not in outermost]
        sharding.prefetch(in_order, options.forward_prefetch, options.backward_prefetch)
        self._register_methods(roots)

    def _refuse_mixed_units(
        self, model: nn.Module, units: Sequence[nn.Module], replicated: frozenset[nn.Parameter]
    ) -> None:
        names = {id(parameter): name for name, parameter in self._unwrap(model).named_parameters()}
        # A parameter belongs to the innermost unit, and units come innermost first.
        taken: set[int] = {id(parameter) for parameter in replicated}
        for unit in units:
            own = [each for each in unit.parameters() if id(each) not in taken]
            taken.update(map(id, own))
            by_dtype: dict[torch.dtype, list[str]] = {}
            for parameter in own:
                if parameter.requires_grad:
                    by_dtype.setdefault(parameter.dtype, []).append(names.get(id(parameter), "?"))
            sharding.refuse_several_dtypes(type(self._unwrap(unit)).__name__, by_dtype)

    def units(self, model: nn.Module) -> list[nn.Module]:
        return units_of(model, self.options.wrap)

    def _blocks(self, model: nn.Module) -> list[nn.Module]:
        # Units chosen by size follow no structure that would make sense to recompute or compile.
        by_class = self.options.wrap is not None and not isinstance(self.options.wrap, int)
        return self.units(model) if by_class else repeated_blocks(model)

    def _roots(self, model: nn.Module) -> list[nn.Module]:
        # A task that runs backward itself calls its children directly, without the model's forward.
        if not (isinstance(model, StepModule) and model.partial_backwards):
            return [model]
        roots: list[nn.Module] = []
        waiting = list(model.task.children())
        while waiting:
            module = waiting.pop(0)
            if not any(True for _ in module.parameters()):
                continue
            if has_forward(module):
                roots.append(module)
            else:
                waiting.extend(module.children())
        return roots

    def _register_methods(self, roots: Sequence[nn.Module]) -> None:
        from torch.distributed.fsdp import register_fsdp_forward_method

        for root in roots:
            bare = self._unwrap(root)
            for name in self.options.forward_methods:
                if not hasattr(bare, name):
                    raise ConfigurationError(
                        f"forward_methods contains {name!r}, but {type(bare).__name__} has no such method. Remove it."
                    )
                if isinstance(bare, FSDPModule):
                    register_fsdp_forward_method(bare, name)

    def rewrite_blocks(self, model: nn.Module, blocks: Sequence[nn.Module] | None = None) -> None:
        options = self.options
        if not (options.activation_checkpointing or options.compile):
            return
        blocks = self._blocks(model) if blocks is None else blocks
        again = options.activation_checkpointing
        recomputed = (
            []
            if again is False
            else list(blocks)
            if again is True
            else units_of(model, again, "activation_checkpointing")
        )
        if not (blocks or recomputed):
            raise ConfigurationError(
                "activation_checkpointing and compile apply to each block of a model, but this model has no repeated "
                "blocks. Select the blocks with wrap= or activation_checkpointing=.",
            )
        compiled = blocks if options.compile else []
        rewrite_blocks(recomputed, options.activation_offload, compiled, options.compile_options())

    def _ignored_modules(self, model: nn.Module) -> list[nn.Module]:
        bare = self._unwrap(model)
        by_name = dict(bare.named_modules())
        found: list[nn.Module] = []
        for one in self.options.ignored_modules:
            module = by_name.get(one) if isinstance(one, str) else one
            if module is None or (isinstance(one, str) and not one):
                raise ConfigurationError(
                    f"ignored_modules names {one!r}, which is not a module of the model. Its modules are: "
                    f"{', '.join(name for name in by_name if name)}.",
                )
            found.append(module)
        return found

    def _replicated(self, model: nn.Module) -> frozenset[nn.Parameter]:
        chosen = parameters_to_replicate(model, self._ignored_modules(model))
        roots = self._roots(model)
        if model not in roots:  # a parameter outside of all roots cannot be gathered with any of them
            inside = {parameter for root in roots for parameter in root.parameters()}
            chosen |= {parameter for parameter in model.parameters() if parameter not in inside}
        return frozenset(chosen)

    def _mixed_precision(self, precision: Precision) -> MixedPrecisionPolicy:
        """Return FSDP's policy for the dtypes of parameters and gradients.

        Under autocast inputs are not cast, so that labels keep their precision.
        """
        return MixedPrecisionPolicy(
            param_dtype=self.options.gather_dtype or precision.param_dtype,
            reduce_dtype=self.options.reduce_dtype or precision.reduce_dtype,
            cast_forward_inputs=not overrides(precision, "forward_context"),
        )

    # Parameter values

    def _take_values(self, model: nn.Module, replicated: frozenset[nn.Parameter]) -> dict[tuple[int, str], Any] | None:
        # None if the values stay in the model. If every process has built the model, rank 0's values are used, as in
        # DDP.
        if leaves_empty():
            return None
        here = any(parameter.is_meta for parameter in model.parameters())
        # All processes must take the same branch, even if only some of them have built the model.
        anywhere = here
        if self._topology.environment.is_distributed:
            anywhere = bool(reduce(torch.tensor(int(here), device=self._topology.device), "max").item())
        if anywhere:
            return take_values(model, replicated)
        if self.options.sync_module_states and self._topology.environment.is_distributed:
            for parameter in model.parameters():
                parameter.data = broadcast(parameter.data)
        return None

    def _give_values(
        self, model: nn.Module, values: dict[tuple[int, str], Any] | None, replicated: frozenset[nn.Parameter]
    ) -> None:
        if leaves_empty():
            self.average(model, replicated)
            return
        materialiser = Materialiser(
            self._topology.device, self._topology.environment.rank, self._topology.environment.is_distributed
        )
        for parameter in replicated:
            parameter.data = parameter.data.to(self._topology.device)
        if values is not None:
            sharding.allocate(model)
        if self.options.weights is not None:
            load_weights(self._unwrap(model), self.options.weights)
        elif values is not None:
            # Only rank 0 knows whether there are values to send.
            flag = torch.tensor(int(bool(values)), device=self._topology.device)
            if broadcast(flag).item():
                materialiser.fill_all(model, values)
            else:
                materialiser.initialise(model, self._random_state)
        if self.options.sync_module_states or values is not None:
            materialiser.fill_buffers(model)
        self.average(model, replicated)

    def average(self, model: nn.Module, replicated: frozenset[nn.Parameter]) -> None:
        if replicated and self._topology.environment.is_distributed:
            self.averaging[model] = GradientAveraging(self._mesh())
            self.averaging[model].watch(replicated)


def make_contiguous(model: nn.Module) -> None:
    # Torch's `fully_shard` shards contiguous parameters only.
    for parameter in model.parameters():
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()


# Device mesh, created on first use


class ShardMesh:
    # Created on first use. Its dimensions are (shard,) or (replicate, shard).

    def __init__(self, topology: Topology, copies: int) -> None:
        world = topology.environment.world_size
        if world % copies:
            raise ConfigurationError(
                f"replicate_size={copies} does not divide the {world} processes of this run. "
                f"Allowed: {', '.join(str(n) for n in range(1, world + 1) if world % n == 0)}.",
            )
        self._topology, self._copies = topology, copies
        self._mesh: DeviceMesh | None = None
        self._own_group = False

    def __call__(self) -> DeviceMesh:
        if self._mesh is None:
            # A device mesh needs a process group, even in a run with one process.
            if not dist.is_initialized():
                kind = self._topology.kind
                backend = "gloo" if kind.name == "cpu" else f"cpu:gloo,{kind.name}:{kind.backend}"
                store = dist.HashStore()  # type: ignore[attr-defined]
                dist.init_process_group(backend, store=store, rank=0, world_size=1)
                self._own_group = True
            self._mesh = self._make()
        return self._mesh

    def _make(self) -> DeviceMesh:
        shards = self._topology.environment.world_size // self._copies
        device = self._topology.device.type
        if self._copies == 1:
            return init_device_mesh(device, (shards,), mesh_dim_names=("dp_shard",))
        return init_device_mesh(device, (self._copies, shards), mesh_dim_names=("dp_replicate", "dp_shard"))

    def leave(self) -> None:
        # In a run of one process, the mesh has created the process group.
        self._mesh = None
        if self._own_group and dist.is_initialized():
            dist.destroy_process_group()
            self._own_group = False


# Torch's names for FSDP options, for code that takes or shows options in them


__all__ = ["CPUOffload", "MixedPrecision", "ShardedGradScaler", "ShardingStrategy"]
