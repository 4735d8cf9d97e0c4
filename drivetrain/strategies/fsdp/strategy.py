"""`FSDP`: parameters, gradients and optimizer state are sharded among the processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import nn
from torch.optim import Optimizer

from drivetrain.runtime.collectives import broadcast, reduce
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.state import PartialState
from drivetrain.strategies.base import Capability, MicroBatch, Output, Strategy, View
from drivetrain.strategies.capabilities import Join, StepInBackward
from drivetrain.strategies.fsdp import sharding
from drivetrain.strategies.fsdp.gradients import ShardedGradients
from drivetrain.strategies.fsdp.model_sharding import ModelSharder
from drivetrain.strategies.fsdp.options import FSDPOptions
from drivetrain.strategies.fsdp.parameters import ReplacedParameters, refuse_for_shards, slots_of
from drivetrain.strategies.fsdp.replicated import GradientAveraging
from drivetrain.strategies.fsdp.shard_mesh import ShardMesh
from drivetrain.strategies.fsdp.sharded_state import ShardedState
from drivetrain.strategies.precision import Precision
from drivetrain.strategies.topology import Topology


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
        self._mesh: ShardMesh | None = None
        self._placer: Placer
        self._replaced = ReplacedParameters()
        self._window_is_open = False
        self._prepared: WeakSet[nn.Module] = WeakSet()

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> FSDP:
        """Make one from Accelerate's `fsdp_config`, of either version.

        Args:
            config: Its keys, with or without their `fsdp_`, as in the YAML that `accelerate config` writes.

        Raises:
            ConfigurationError: A key is unknown, or its value cannot be.
        """
        from drivetrain.strategies.fsdp.accelerate_config import options_from

        return cls(**options_from(config))

    # processes

    def setup(self, state: PartialState) -> None:
        """Take this process's place among its peers."""
        topology = Topology.data_parallel(state)
        self._mesh = ShardMesh(topology, self.options.replicate_size)
        self.assemble(topology, ModelSharder(self.options, topology, self.unwrap, self._mesh))

    def assemble(self, topology: Topology, placer: Placer) -> None:
        """Make the parts, from a topology and a way of placing models that may be others than this strategy's own.

        Args:
            topology: This process's place.
            placer: Shards models, or places them in another way.
        """
        self.topology, self._placer = topology, placer
        self.gradients = ShardedGradients(topology.rank, placer.averaging, self.options.sync_each_batch)
        self.state = ShardedState(topology, self.unwrap)

    def capability(self, kind: type[Capability]) -> Capability | None:
        """Refuse `Join` by name, since every forward gathers over all processes; a backward can step."""
        if kind is StepInBackward:
            return StepInBackward()  # type: ignore[return-value]
        return _NoJoin(self.topology) if kind is Join else None  # type: ignore[return-value]

    # model

    def init_context(self) -> AbstractContextManager[Any]:
        """Build a model without values, but for rank 0 with `init="rank0"`; `prepare` fills them in."""
        return self._placer.init_context()

    def place(self, model: nn.Module, precision: Precision, move: bool = True) -> nn.Module:
        """Shard a model, for evaluation too: it may not fit otherwise."""
        return self._placer.place(model, precision, move)

    def prepare(
        self, model: nn.Module, optimizers: Sequence[Optimizer], precision: Precision, move: bool = True
    ) -> tuple[nn.Module, list[Optimizer]]:
        """Shard a model, and let its optimizers hold the shards."""
        slots = slots_of(model)
        placed = self.place(model, precision, move)
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
        """Compute the gradients of a loss, scaled already.

        Raises:
            ConfigurationError: A unit trains parameters of two dtypes, since some were unfrozen after `prepare`.
        """
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

    def teardown(self) -> None:
        """Leave the group that a world of one made for its mesh."""
        if self._mesh is not None:
            self._mesh.leave()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.options.changed()})"


class _NoJoin(Join):
    """Refuses: a process without a batch cannot leave out a forward in which all gather."""

    def __init__(self, topology: Topology) -> None:
        self._distributed = topology.environment.is_distributed

    def joined(self, models: Sequence[nn.Module]) -> AbstractContextManager[Any]:
        if self._distributed:
            raise ConfigurationError(
                "join_uneven_inputs does not work with strategy='fsdp': every forward gathers over all processes, so "
                "all need as many batches. Keep even_batches=True, the default, and drop this context.",
                code="DT-068",
            )
        return nullcontext()


def largest_anywhere(flag: torch.Tensor) -> torch.Tensor:
    """The largest value of a scalar over all processes; call it on all."""
    largest: torch.Tensor = reduce(flag, "max")
    return largest
