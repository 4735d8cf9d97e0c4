"""`FSDP`: parameters, gradients and optimizer state are divided among the processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from drivetrain.runtime.collectives import broadcast, reduce
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.state import PartialState
from drivetrain.strategies.base import MicroBatch, Output, StateDict, StepModule, Strategy, move_optimizer_state
from drivetrain.strategies.fsdp import dividing
from drivetrain.strategies.fsdp.blocks import normalise_in_full, rewrite_blocks
from drivetrain.strategies.fsdp.clipping import clip_grad_norm_over_meshes_, clip_grad_value_locally_
from drivetrain.strategies.fsdp.materialise import Materialiser, parameters_on_meta, take_values
from drivetrain.strategies.fsdp.options import FSDPOptions
from drivetrain.strategies.fsdp.parameters import point_optimizer, replaced, shard_like, slots_of
from drivetrain.strategies.fsdp.replicated import GradientAveraging, parameters_to_replicate
from drivetrain.strategies.fsdp.summoning import whole_parameters
from drivetrain.strategies.fsdp.weights import load_weights
from drivetrain.strategies.fsdp.wrapping import has_forward, repeated_blocks, units_of, without_tied_across
from drivetrain.strategies.precision import Precision

_HALVES = (torch.bfloat16, torch.float16)


class FSDP(Strategy):
    """Parameters, gradients and optimizer state are divided among the processes, by torch's `fully_shard`.

    Args:
        wrap: which modules are gathered and freed as one: `"auto"` (what the model names in `_no_split_modules`, else
            the blocks that repeat in a `ModuleList`), classes or their names, a number of parameters from which on a
            module is one, a function of a module, or None for the whole model at once.
        reshard_after_forward: whether a unit is freed between forward and backward, which costs a gather more; or the
            number of processes among which it stays divided meanwhile. None frees all but the outermost.
        replicate_size: copies of the divided model: each is divided among world size / `replicate_size` processes,
            and gradients are averaged over the copies (HYBRID_SHARD).
        cpu_offload: keep parameters, gradients and optimizer state on the CPU, and step there.
        activation_checkpointing: recompute activations in backward: True for the blocks of the model, or which modules
            in the words of `wrap`.
        activation_offload: keep on the CPU what goes into those blocks.
        ignored_modules: modules, or names of them in the model, that every process holds whole; their gradients are
            averaged.
        gather_dtype: dtype in which parameters are gathered; the precision's if None.
        reduce_dtype: dtype in which gradients are reduced; the precision's if None.
        init: what `init_context()` builds: `"rank0"` the real model on rank 0 and none of its values elsewhere,
            `"meta"` no values anywhere, which the modules' `reset_parameters` then make one by one.
        weights: safetensors or a checkpoint that the model's values are read from, each process its shards.
        sync_module_states: give all processes rank 0's values where each has built the model.
        compile: compile each block; a dict holds options of `torch.compile`.
        sync_each_batch: reduce gradients in every micro-batch of an accumulation window, which keeps no whole
            gradients in memory meanwhile.
        reduce_unused: reduce parameters that a backward does not reach as zeros: needed where they are others on
            other processes.
        forward_prefetch: how many units ahead are gathered in forward.
        backward_prefetch: how many units ahead are gathered in backward; 0 leaves it to torch, which gathers one.
        forward_methods: methods besides `forward` that the model is called by, such as `"generate"`.

    Raises:
        ConfigurationError: an option cannot be.

    Example:
        ```python
        from drivetrain import FSDP, Trainer

        trainer = Trainer(accelerator="cpu", strategy=FSDP(activation_checkpointing=True), precision="bf16")
        ```
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
        self._mesh: DeviceMesh | None = None
        self._own_group = False
        self._averaging: GradientAveraging | None = None
        self._random_state: torch.Tensor | None = None
        self._window_is_open = False

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> FSDP:
        """Make one from Accelerate's `fsdp_config`, of either version.

        Args:
            config: its keys, with or without their `fsdp_`, as in the YAML that `accelerate config` writes.

        Raises:
            ConfigurationError: a key is unknown, or its value cannot be.
        """
        from drivetrain.strategies.fsdp.accelerate_config import options_from

        return cls(**options_from(config))

    # processes

    def setup(self, state: PartialState) -> None:
        """Take this process's place among its peers."""
        super().setup(state)
        self.check_sizes()

    def check_sizes(self) -> None:
        """Refuse sizes that do not divide the processes."""
        world, copies = self.environment.world_size, self.options.replicate_size
        if world % copies:
            raise ConfigurationError(
                f"replicate_size={copies} does not divide the {world} processes of this run. "
                f"Allowed: {', '.join(str(n) for n in range(1, world + 1) if world % n == 0)}."
            )

    def shard_mesh(self) -> DeviceMesh:
        """The mesh that `fully_shard` divides parameters over: (shard,) or (replicate, shard)."""
        if self._mesh is None:
            self.ensure_group()
            self._mesh = self.make_shard_mesh()
        return self._mesh

    def ensure_group(self) -> None:
        """Make a group of this process alone where there is none: a mesh wants one all the same."""
        if not dist.is_initialized():
            kind = self.kind
            backend = "gloo" if kind.name == "cpu" else f"cpu:gloo,{kind.name}:{kind.backend}"
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group(backend, store=store, rank=0, world_size=1)
            self._own_group = True

    def make_shard_mesh(self) -> DeviceMesh:
        """Make the mesh of `shard_mesh`."""
        copies = self.options.replicate_size
        shards = self.environment.world_size // copies
        if copies == 1:
            return init_device_mesh(self.device.type, (shards,), mesh_dim_names=("dp_shard",))
        return init_device_mesh(self.device.type, (copies, shards), mesh_dim_names=("dp_replicate", "dp_shard"))

    # model

    def init_context(self) -> AbstractContextManager[Any]:
        """Build a model without values, but for rank 0 with `init="rank0"`; `prepare` fills them in."""
        if self.options.init == "meta" or self.options.weights is not None:
            return self._without_values()
        return nullcontext() if self.environment.rank == 0 else parameters_on_meta()

    @contextmanager
    def _without_values(self) -> Iterator[None]:
        with parameters_on_meta():
            yield
        self._random_state = torch.get_rng_state()
        torch.randint(2, ())  # so that a second model does not get the values of the first

    def place(self, model: nn.Module, precision: Precision, move: bool = True) -> nn.Module:
        """Divide a model, for evaluation too: it may not fit otherwise. `move` says nothing here: shards are placed."""
        known = self._divided_before(model, precision)
        if known is not None:
            return known
        model = precision.convert(model)
        replicated = self._replicated(model)
        values = self._take_values(model, replicated)
        replicated = self._replicated(model)  # those whose values are still to come have been replaced
        self.before_sharding(model)
        self.shard(model, precision, replicated)
        self._give_values(model, values, replicated)
        dividing.take_shards_on_load(model)
        bare = self.unwrap(model)
        if bare is not model:
            bare.__dict__["_divided_as"] = model
            bare.__dict__["__deepcopy__"] = lambda memo: dividing.copy_divided(bare, model, type(bare), memo)
        return model

    def _divided_before(self, model: nn.Module, precision: Precision) -> nn.Module | None:
        """What an earlier `prepare` made of the same model."""
        bare = self.unwrap(model)
        known = bare.__dict__.get("_divided_as", bare if isinstance(bare, FSDPModule) else None)
        if known is None:
            if dividing.is_divided(model):
                raise ConfigurationError(
                    "A part of this model is divided already, by itself or within another model. Divide the whole "
                    "model at once, or make a new one."
                )
            return None
        division: dividing.Division = next(
            module.__dict__[dividing.DIVISION] for module in known.modules() if dividing.DIVISION in module.__dict__
        )
        if division.mesh != self.shard_mesh() or division.mixed_precision != self.mixed_precision_policy(precision):
            raise ConfigurationError(
                "This model was divided before, over other processes or in another precision. Make a new one, and load "
                "the state of this one into it."
            )
        return known  # type: ignore[no-any-return]

    def before_sharding(self, model: nn.Module) -> None:
        """Change a model before it is divided: where tensor parallelism comes in. Its parameters may be on meta."""

    def shard(self, model: nn.Module, precision: Precision, replicated: frozenset[nn.Parameter]) -> None:
        """Divide a model, unit by unit from the inside, and what is left over as the outermost one."""
        options = self.options
        roots = self._roots(model)
        division = dividing.Division(
            mesh=self.shard_mesh(),
            mixed_precision=self.mixed_precision_policy(precision),
            offload=self.offload_policy(),
            reshard_after_forward=options.reshard_after_forward,
            whole=replicated,
            reduce_unused=options.reduce_unused,
        )
        chosen = self.units(model)
        ignored = {id(module) for module in self._ignored_modules(model)}
        units = [
            unit
            for unit in without_tied_across(model, [*chosen, *(root for root in roots if root is not model)])
            if id(unit) not in ignored and any(p not in replicated for p in unit.parameters())
        ]
        gathered_in = division.mixed_precision.param_dtype
        if gathered_in in _HALVES and any(p.dtype not in _HALVES for p in model.parameters()):
            normalise_in_full(model, everywhere=self.kind.name == "cpu")
        self._rewrite_blocks(model)
        outermost = {id(root) for root in roots}
        for unit in [unit for unit in units if id(unit) not in outermost]:
            dividing.divide(unit, division)
        for root in roots:
            dividing.divide(root, division.for_outermost(frees=root is not model))
        in_order = [module for module in dividing.divided_modules(model) if id(module) not in outermost]
        dividing.prefetch(in_order, options.forward_prefetch, options.backward_prefetch)
        self._register_methods(roots)

    def units(self, model: nn.Module) -> list[nn.Module]:
        """The modules inside a model that are gathered and freed as one."""
        return units_of(model, self.options.wrap)

    def blocks(self, model: nn.Module) -> list[nn.Module]:
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
            bare = self.unwrap(root)
            for name in self.options.forward_methods:
                if not hasattr(bare, name):
                    raise ConfigurationError(f"forward_methods names {name!r}, which {type(bare).__name__} has not.")
                if isinstance(bare, FSDPModule):
                    register_fsdp_forward_method(bare, name)

    def _rewrite_blocks(self, model: nn.Module) -> None:
        options = self.options
        if not (options.activation_checkpointing or options.compile):
            return
        blocks = self.blocks(model)
        again = options.activation_checkpointing
        recomputed = (
            [] if again is False else blocks if again is True else units_of(model, again, "activation_checkpointing")
        )
        if not (blocks or recomputed):
            raise ConfigurationError(
                "activation_checkpointing and compile work block by block, but the model has no repeated blocks. Name "
                "them with wrap= or activation_checkpointing=."
            )
        compiled = blocks if options.compile else []
        rewrite_blocks(recomputed, options.activation_offload, compiled, options.compile_options())

    def _ignored_modules(self, model: nn.Module) -> list[nn.Module]:
        bare = self.unwrap(model)
        by_name = dict(bare.named_modules())
        found: list[nn.Module] = []
        for one in self.options.ignored_modules:
            module = by_name.get(one) if isinstance(one, str) else one
            if module is None or (isinstance(one, str) and not one):
                raise ConfigurationError(
                    f"ignored_modules names {one!r}, which the model does not have. It has: "
                    f"{', '.join(name for name in by_name if name)}."
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

    def mixed_precision_policy(self, precision: Precision) -> MixedPrecisionPolicy:
        """The dtypes that parameters are gathered and gradients are reduced in.

        Inputs are left as they are: the precision's own context casts where an operation wants it, and labels keep
        their precision.
        """
        return MixedPrecisionPolicy(
            param_dtype=self.options.gather_dtype or precision.param_dtype,
            reduce_dtype=self.options.reduce_dtype or precision.reduce_dtype,
            cast_forward_inputs=False,
        )

    def offload_policy(self) -> OffloadPolicy:
        """Where shards live between uses."""
        return CPUOffloadPolicy(pin_memory=self.kind.name != "cpu") if self.options.cpu_offload else OffloadPolicy()

    # values

    def _materialiser(self) -> Materialiser:
        return Materialiser(self.device, self.environment.rank, self.environment.is_distributed)

    def _take_values(self, model: nn.Module, replicated: frozenset[nn.Parameter]) -> dict[tuple[int, str], Any] | None:
        """Take the values out of a model that not all processes have them of; None where all have.

        Where each process has built the whole model they are made rank 0's, as DDP does.
        """
        here = any(parameter.is_meta for parameter in model.parameters())
        anywhere = here
        if self.environment.is_distributed:
            anywhere = bool(reduce(torch.tensor(int(here), device=self.device), "max").item())
        if anywhere:
            return take_values(model, replicated)
        if self.options.sync_module_states and self.environment.is_distributed:
            for parameter in model.parameters():
                parameter.data = broadcast(parameter.data)
        return None

    def _give_values(
        self, model: nn.Module, values: dict[tuple[int, str], Any] | None, replicated: frozenset[nn.Parameter]
    ) -> None:
        materialiser = self._materialiser()
        for parameter in replicated:
            parameter.data = parameter.data.to(self.device)
        if values is not None:
            dividing.allocate(model)
        if self.options.weights is not None:
            load_weights(self.unwrap(model), self.options.weights)
        elif values is not None:
            flag = torch.tensor(int(bool(values)), device=self.device)
            if broadcast(flag).item():
                materialiser.fill_all(model, values)
            else:
                materialiser.initialise(model, self._random_state)
        if self.options.sync_module_states or values is not None:
            materialiser.fill_buffers(model)
        if replicated and self.environment.is_distributed:
            self._averaging = self._averaging or GradientAveraging(self.shard_mesh())
            self._averaging.watch(replicated)

    def load_weights(self, model: nn.Module, path: str | os.PathLike[str], strict: bool = True) -> None:
        """Fill a prepared model from safetensors or a checkpoint; each process reads its shards only.

        Args:
            model: what `prepare` returned.
            path: a safetensors file, a directory with an index of several, or a checkpoint.
            strict: whether names that are missing or left over are an error.
        """
        self.reshard(model)
        load_weights(self.unwrap(model), path, strict)

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
        if self.environment.is_distributed:
            precision.agree_on_overflow(_largest_anywhere)
        return placed, list(optimizers)

    def before_evaluation(self, model: nn.Module) -> None:
        """Give all processes rank 0's buffers, which the next checkpoint takes."""
        if self.environment.is_distributed:
            broadcast(list(self.unwrap(model).buffers()))

    # one optimizer step

    def forward_backward(
        self, model: nn.Module, step_fn: Callable[[MicroBatch], Output], microbatches: Sequence[MicroBatch]
    ) -> list[Output]:
        """Run forward and backward over a window; what an earlier one left unfinished is forgotten."""
        if self._window_is_open:
            dividing.drop_held_gradients(model)
        self._window_is_open = len(microbatches) > 1
        outputs = super().forward_backward(model, step_fn, microbatches)
        self._window_is_open = False
        return outputs

    def gradient_sync(self, model: nn.Module, enabled: bool) -> AbstractContextManager[Any]:
        """Keep gradients whole and unreduced in a context."""
        if enabled or self.options.sync_each_batch:
            return nullcontext()
        return self._without_gradient_sync(dividing.divided_modules(model))

    @contextmanager
    def _without_gradient_sync(self, units: list[FSDPModule]) -> Iterator[None]:
        for unit in units:
            unit.set_requires_gradient_sync(False, recurse=False)
        if self._averaging is not None:
            self._averaging.enabled = False
        try:
            yield
        finally:
            for unit in units:
                unit.set_requires_gradient_sync(True, recurse=False)
            if self._averaging is not None:
                self._averaging.enabled = True

    def held_gradients(self, model: nn.Module) -> Iterator[torch.Tensor]:
        """Gradients of an open window that are not in `.grad` yet."""
        return dividing.held_gradients(model)

    def drop_held_gradients(self, model: nn.Module) -> None:
        """Forget the gradients of an open window."""
        dividing.drop_held_gradients(model)

    def loss_of_nothing(self, task: nn.Module) -> torch.Tensor:
        """Refuse: the peers' backward gathers over all processes, which only a backward can answer."""
        raise ConfigurationError(
            f"{type(task).__name__}.training_step returned None on rank {self.environment.rank}. With a sharded model "
            "every process must run as many forwards and backwards. Return a loss that counts for nothing instead, "
            "such as loss * 0, or leave the sample out of the dataset."
        )

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Scale gradients down to a total norm of at most `max_norm`, over all shards."""
        return clip_grad_norm_over_meshes_(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        """Clamp every gradient to [-clip_value, clip_value]."""
        clip_grad_value_locally_(parameters, clip_value)

    def join(self, models: Sequence[nn.Module]) -> AbstractContextManager[Any]:
        """Refuse: a process without a batch cannot leave out a forward in which all gather."""
        if self.environment.is_distributed:
            raise ConfigurationError(
                "join_uneven_inputs does not work with strategy='fsdp': every forward gathers over all processes, so "
                "all need as many batches. Keep even_batches=True, the default, and drop this context."
            )
        return nullcontext()

    # state

    def model_state(self, model: nn.Module) -> StateDict:
        """Shards of the parameters, and rank 0's buffers, under canonical names."""
        self.reshard(model)
        bare = self.unwrap(model)
        state = bare.state_dict()
        if self.environment.is_distributed:
            for name, _ in bare.named_buffers():
                if name in state:
                    state[name] = broadcast(state[name].detach().clone())
        return state

    def load_model_state(self, model: nn.Module, state: StateDict, strict: bool = True) -> Any:
        """Take this process's shards of what `model_state` returned under any strategy."""
        self.reshard(model)
        return super().load_model_state(model, state, strict)

    def optimizer_state(self, model: nn.Module, optimizer: Optimizer) -> StateDict:
        """An optimizer's state by canonical parameter name, its tensors divided as the parameters are."""
        self.reshard(model)
        return super().optimizer_state(model, optimizer)

    def load_optimizer_state(self, model: nn.Module, optimizer: Optimizer, state: StateDict) -> None:
        """Take this process's shards of what `optimizer_state` returned under any strategy."""
        self.reshard(model)
        parameters = dict(self.unwrap(model).named_parameters())
        shards = {
            name: {key: _like(value, parameters.get(name)) for key, value in saved.items()}
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

    @contextmanager
    def summoned(self, model: nn.Module, writeback: bool = False) -> Iterator[nn.Module]:
        """Let a model's parameters be whole tensors in the body, in full precision; call it on all processes.

        The model cannot be called meanwhile.

        Args:
            model: what `prepare` returned.
            writeback: whether what the body does to the parameters is kept.

        Yields:
            The user's own module.
        """
        self.reshard(model)
        bare = self.unwrap(model)
        with whole_parameters(bare, writeback):
            yield bare

    def reshard(self, model: nn.Module) -> None:
        """Free whatever is gathered at the moment, so that the model's parameters are its shards."""
        dividing.free_gathered(model)

    def teardown(self) -> None:
        """Leave the group that a world of one made for its mesh."""
        self._mesh = None
        if self._own_group and dist.is_initialized():
            dist.destroy_process_group()
            self._own_group = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.options.changed()})"


def _like(value: Any, parameter: torch.Tensor | None) -> Any:
    """An optimizer's saved value as it belongs to a parameter: divided alike where it is of its shape."""
    if isinstance(value, torch.Tensor) and isinstance(parameter, DTensor) and value.shape == parameter.shape:
        return shard_like(value, parameter)
    return value


def _largest_anywhere(flag: torch.Tensor) -> torch.Tensor:
    largest: torch.Tensor = reduce(flag, "max")
    return largest
