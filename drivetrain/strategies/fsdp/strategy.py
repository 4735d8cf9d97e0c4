"""`FSDP`: parameters, gradients and optimizer state are divided among the processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, WeakSet, ref

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from drivetrain.runtime.collectives import broadcast, reduce
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.state import PartialState
from drivetrain.strategies.base import MicroBatch, Output, move_optimizer_state, refuse_left_out_batch
from drivetrain.strategies.fsdp import dividing
from drivetrain.strategies.fsdp.clipping import clip_grad_norm_over_meshes_, clip_grad_value_locally_
from drivetrain.strategies.fsdp.model_division import ModelDivision
from drivetrain.strategies.fsdp.options import FSDPOptions
from drivetrain.strategies.fsdp.parameters import point_optimizer, replaced, slots_of
from drivetrain.strategies.fsdp.replicated import GradientAveraging
from drivetrain.strategies.fsdp.sharded_state import ShardedState
from drivetrain.strategies.precision import Precision


class FSDP(ModelDivision, ShardedState):
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
    needs_even_batches = True
    reads_shards = True

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
        self.averaging: WeakKeyDictionary[nn.Module, GradientAveraging] = WeakKeyDictionary()
        self._gone: dict[int, ReferenceType[nn.Parameter]] = {}  # parameters that shards stand in place of
        self._checked: WeakSet[Optimizer] = WeakSet()
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

    def prepare(
        self, model: nn.Module, optimizers: Sequence[Optimizer], precision: Precision, move: bool = True
    ) -> tuple[nn.Module, list[Optimizer]]:
        """Divide a model, and let its optimizers hold the shards."""
        slots = slots_of(model)
        placed = self.place(model, precision, move)
        now = replaced(slots)
        self._gone |= {id(slot.parameter): ref(slot.parameter) for slot in slots if id(slot.parameter) in now}
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
        return self._without_gradient_sync(dividing.divided_modules(model), self.averaging.get(model))

    @contextmanager
    def _without_gradient_sync(
        self, units: Sequence[FSDPModule], averaging: GradientAveraging | None
    ) -> Iterator[None]:
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

    def optimizer_step(
        self, optimizer: Optimizer, precision: Precision, closure: Callable[[], Any] | None = None
    ) -> bool:
        """Step an optimizer, once it is known to hold the shards."""
        if optimizer not in self._checked:
            self._check_holds_shards(optimizer)
            self._checked.add(optimizer)
        return super().optimizer_step(optimizer, precision, closure)

    def _check_holds_shards(self, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                known = self._gone.get(id(parameter))
                if known is not None and known() is parameter:
                    raise ConfigurationError(
                        f"{type(optimizer).__name__} holds parameters as they were before the model was divided, so "
                        "its steps would change nothing. Prepare both together, prepare(model, optimizer), or make "
                        "the optimizer after prepare(model)."
                    )

    def held_gradients(self, model: nn.Module) -> Iterator[torch.Tensor]:
        """Gradients of an open window that are not in `.grad` yet."""
        return dividing.held_gradients(model)

    def drop_held_gradients(self, model: nn.Module) -> None:
        """Forget the gradients of an open window."""
        dividing.drop_held_gradients(model)

    def zero_loss(self, task: nn.Module) -> torch.Tensor:
        """Refuse: the peers' backward gathers over all processes, which only a backward can answer."""
        refuse_left_out_batch(task, self.environment.rank)

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

    def teardown(self) -> None:
        """Leave the group that a world of one made for its mesh."""
        self._mesh = None
        if self._own_group and dist.is_initialized():
            dist.destroy_process_group()
            self._own_group = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.options.changed()})"


def _largest_anywhere(flag: torch.Tensor) -> torch.Tensor:
    largest: torch.Tensor = reduce(flag, "max")
    return largest
