"""`ModelSharder`: which modules of a model are units, and where their values come from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy

from drivetrain.runtime.collectives import broadcast, reduce
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.strategies.fsdp import sharding
from drivetrain.strategies.fsdp.blocks import normalise_in_full, rewrite_blocks
from drivetrain.strategies.fsdp.materialise import Materialiser, parameters_on_meta, take_values
from drivetrain.strategies.fsdp.options import FSDPOptions
from drivetrain.strategies.fsdp.replicated import GradientAveraging, parameters_to_replicate
from drivetrain.strategies.fsdp.weights import load_weights
from drivetrain.strategies.precision import Precision, overrides
from drivetrain.strategies.step_module import StepModule
from drivetrain.strategies.topology import Topology
from drivetrain.strategies.wrapping import has_forward, repeated_blocks, units_of, without_tied_across

_HALVES = (torch.bfloat16, torch.float16)


class ModelSharder:
    """Builds models without values and shards them.

    Args:
        options: What was asked for.
        topology: This process's place.
        unwrap: Returns the user's own module inside a wrapped one.
        mesh: Makes the mesh that parameters are sharded over: (shard,) or (replicate, shard).
        split_layers: Changes a model before it is sharded, as tensor parallelism does; its parameters may be on meta.

    Attributes:
        options: What was asked for.
        averaging: Of each prepared model, what averages the gradients of the parameters that stay whole.
    """

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
        """Build a model without values, but for rank 0 with `init="rank0"`; `prepare` fills them in."""
        if self.options.init == "meta" or self.options.weights is not None:
            return self._without_values()
        return nullcontext() if self._topology.environment.rank == 0 else parameters_on_meta()

    @contextmanager
    def _without_values(self) -> Iterator[None]:
        with parameters_on_meta():
            yield
        self._random_state = torch.get_rng_state()
        torch.randint(2, ())  # so that a second model does not get the values of the first

    def place(self, model: nn.Module, precision: Precision, move: bool = True) -> nn.Module:
        """Shard a model, for evaluation too: it may not fit otherwise. `move` has no meaning: shards are placed."""
        known = self._placed_before(model, precision)
        if known is not None:
            return known
        model = precision.convert(model)
        replicated = self._replicated(model)
        values = self._take_values(model, replicated)
        replicated = self._replicated(model)  # those whose values are still to come have been replaced
        if self._split_layers is not None:
            make_contiguous(model)
            self._split_layers(model)
        self.shard(model, precision, replicated)
        self._give_values(model, values, replicated)
        sharding.take_shards_on_load(model)
        sharding.remember_units(model)
        bare = self._unwrap(model)
        if bare is not model:
            bare.__dict__["__deepcopy__"] = sharding.ShardedInside(bare, model)
        return model

    def _placed_before(self, model: nn.Module, precision: Precision) -> nn.Module | None:
        """What an earlier `prepare` made of the same model."""
        bare = self._unwrap(model)
        inside = bare.__dict__.get("__deepcopy__")
        known = inside.outer if isinstance(inside, sharding.ShardedInside) else None
        if isinstance(bare, FSDPModule):
            known = bare
        if known is None:
            if sharding.is_sharded(model):
                raise ConfigurationError(
                    "A part of this model is sharded already, by itself or within another model. Shard the whole "
                    "model at once, or make a new one.",
                    code="DT-045",
                )
            return None
        unit_sharding: sharding.UnitSharding = next(
            module.__dict__[sharding.UNIT_SHARDING]
            for module in known.modules()
            if sharding.UNIT_SHARDING in module.__dict__
        )
        if unit_sharding.mesh != self._mesh() or unit_sharding.mixed_precision != self._mixed_precision(precision):
            raise ConfigurationError(
                "This model was sharded before, over other processes or in another precision. Make a new one, and load "
                "the state of this one into it.",
                code="DT-045",
            )
        return known

    def shard(
        self,
        model: nn.Module,
        precision: Precision,
        replicated: frozenset[nn.Parameter],
        units: Sequence[nn.Module] | None = None,
    ) -> None:
        """Shard a model, unit by unit from the inside, and what is left over as the outermost one.

        Args:
            model: The model.
            precision: The number formats.
            replicated: The parameters that every process holds whole.
            units: The modules that become units, and that are recomputed as one; found by the options if None.
        """
        options = self.options
        make_contiguous(model)
        roots = self._roots(model)
        unit_sharding = sharding.UnitSharding(
            mesh=self._mesh(),
            mixed_precision=self._mixed_precision(precision),
            offload=self._offload_policy(),
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
        in_order = [module for module in sharding.sharded_units(model) if id(module) not in outermost]
        sharding.prefetch(in_order, options.forward_prefetch, options.backward_prefetch)
        self._register_methods(roots)

    def _refuse_mixed_units(
        self, model: nn.Module, units: Sequence[nn.Module], replicated: frozenset[nn.Parameter]
    ) -> None:
        """Refuse a unit that trains parameters of two dtypes: torch 2.13 reduces their gradients as one."""
        names = {id(parameter): name for name, parameter in self._unwrap(model).named_parameters()}
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
        """The modules inside a model that are gathered and freed as one."""
        return units_of(model, self.options.wrap)

    def _blocks(self, model: nn.Module) -> list[nn.Module]:
        """The modules inside a model that are recomputed or compiled as one."""
        by_class = self.options.wrap is not None and not isinstance(self.options.wrap, int)
        return self.units(model) if by_class else repeated_blocks(model)

    def _roots(self, model: nn.Module) -> list[nn.Module]:
        """The modules that are called from outside: the model, or its parts where the task runs its own backwards."""
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
                        f"forward_methods names {name!r}, which {type(bare).__name__} has not.", code="DT-043"
                    )
                if isinstance(bare, FSDPModule):
                    register_fsdp_forward_method(bare, name)

    def rewrite_blocks(self, model: nn.Module, blocks: Sequence[nn.Module] | None = None) -> None:
        """Let blocks recompute their activations and be compiled, as the options ask for.

        Args:
            model: The model.
            blocks: The modules that are recomputed or compiled as one; found by the options if None.
        """
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
                "activation_checkpointing and compile work block by block, but the model has no repeated blocks. Name "
                "them with wrap= or activation_checkpointing=.",
                code="DT-044",
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
                    f"ignored_modules names {one!r}, which the model does not have. It has: "
                    f"{', '.join(name for name in by_name if name)}.",
                    code="DT-043",
                )
            found.append(module)
        return found

    def _replicated(self, model: nn.Module) -> frozenset[nn.Parameter]:
        """The parameters that every process holds whole."""
        chosen = parameters_to_replicate(model, self._ignored_modules(model))
        roots = self._roots(model)
        if model not in roots:  # what no root has cannot be gathered with any
            inside = {parameter for root in roots for parameter in root.parameters()}
            chosen |= {parameter for parameter in model.parameters() if parameter not in inside}
        return frozenset(chosen)

    def _mixed_precision(self, precision: Precision) -> MixedPrecisionPolicy:
        """The dtypes that parameters are gathered and gradients are reduced in.

        Inputs are left as they are where the precision's own context casts what an operation wants, so that labels
        keep their precision.
        """
        return MixedPrecisionPolicy(
            param_dtype=self.options.gather_dtype or precision.param_dtype,
            reduce_dtype=self.options.reduce_dtype or precision.reduce_dtype,
            cast_forward_inputs=not overrides(precision, "forward_context"),
        )

    def _offload_policy(self) -> OffloadPolicy:
        """Where shards live between uses."""
        return (
            CPUOffloadPolicy(pin_memory=self._topology.kind.name != "cpu")
            if self.options.cpu_offload
            else OffloadPolicy()
        )

    # values

    def _materialiser(self) -> Materialiser:
        return Materialiser(
            self._topology.device, self._topology.environment.rank, self._topology.environment.is_distributed
        )

    def _take_values(self, model: nn.Module, replicated: frozenset[nn.Parameter]) -> dict[tuple[int, str], Any] | None:
        """Take the values out of a model that not all processes have them of; None where all have.

        Where each process has built the whole model they are made rank 0's, as DDP does.
        """
        here = any(parameter.is_meta for parameter in model.parameters())
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
        materialiser = self._materialiser()
        for parameter in replicated:
            parameter.data = parameter.data.to(self._topology.device)
        if values is not None:
            sharding.allocate(model)
        if self.options.weights is not None:
            load_weights(self._unwrap(model), self.options.weights)
        elif values is not None:
            flag = torch.tensor(int(bool(values)), device=self._topology.device)
            if broadcast(flag).item():
                materialiser.fill_all(model, values)
            else:
                materialiser.initialise(model, self._random_state)
        if self.options.sync_module_states or values is not None:
            materialiser.fill_buffers(model)
        self.average(model, replicated)

    def average(self, model: nn.Module, replicated: frozenset[nn.Parameter]) -> None:
        """Average the gradients of parameters that every process holds whole.

        Args:
            model: What is called, or the stage of a pipeline.
            replicated: The parameters.
        """
        if replicated and self._topology.environment.is_distributed:
            self.averaging[model] = GradientAveraging(self._mesh())
            self.averaging[model].watch(replicated)


def make_contiguous(model: nn.Module) -> None:
    """Lay parameters out row by row, as those in channels_last are not: torch shards no others (torch 2.13).

    Args:
        model: The model, whose parameters stay the same objects.
    """
    for parameter in model.parameters():
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()
