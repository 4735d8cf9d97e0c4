"""A copy of the model on every process, gradients averaged (Li et al., 2020, https://arxiv.org/abs/2006.15704)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from drivetrain.runtime.collectives import broadcast
from drivetrain.runtime.errors import ConfigurationError, nearest
from drivetrain.runtime.state import PartialState
from drivetrain.strategies.base import StateDict, StepModule, Strategy
from drivetrain.strategies.communication_hooks import (
    COMMUNICATION_HOOKS,
    register_communication_hook,
    register_function_hook,
)
from drivetrain.strategies.precision import Precision

# Torch 2.13 warns at the old name.
_BROADCAST_BUFFERS = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)


class DDP(Strategy):
    """A copy of the model on every process; gradients are averaged during backward.

    Args:
        find_unused_parameters: look in each forward for parameters that take no part in it.
        static_graph: the same parameters are used in every step, which lets more overlap and checkpointing.
        bucket_cap_mb: size of the gradient buckets, in MiB.
        gradient_as_bucket_view: let gradients be views of the buckets, which saves a copy and its memory.
        broadcast_buffers: send rank 0's buffers to all before each training forward.
        comm_hook: `"fp16"`, `"bf16"`, `"powersgd"`, or a function `(state, bucket) -> Future`, to send less.
        comm_hook_options: arguments of the PowerSGD state, or under `"state"` the state of a function.
        sync_batchnorm: compute batch statistics over all processes (GPU only, as torch's is).

    Raises:
        ConfigurationError: an option cannot be.
    """

    name = "ddp"

    def __init__(
        self,
        *,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        bucket_cap_mb: float = 25,
        gradient_as_bucket_view: bool = True,
        broadcast_buffers: bool = True,
        comm_hook: str | Callable[..., Any] | None = None,
        comm_hook_options: dict[str, Any] | None = None,
        sync_batchnorm: bool = False,
    ) -> None:
        if bucket_cap_mb <= 0:
            raise ConfigurationError(f"bucket_cap_mb must be positive, got {bucket_cap_mb}.")
        if isinstance(comm_hook, str) and comm_hook not in COMMUNICATION_HOOKS:
            raise ConfigurationError(
                f"Unknown comm_hook {comm_hook!r}. Allowed: {', '.join(COMMUNICATION_HOOKS)}, or a function "
                f"(state, bucket) -> Future.{nearest(comm_hook, COMMUNICATION_HOOKS)}"
            )
        if comm_hook in (None, "fp16", "bf16") and comm_hook_options:
            raise ConfigurationError(f"comm_hook={comm_hook!r} takes no options, got {sorted(comm_hook_options)}.")
        self.wrapper_options: dict[str, Any] = {
            "find_unused_parameters": find_unused_parameters,
            "static_graph": static_graph,
            "bucket_cap_mb": bucket_cap_mb,
            "gradient_as_bucket_view": gradient_as_bucket_view,
        }
        if not broadcast_buffers:
            self.wrapper_options[_BROADCAST_BUFFERS] = False
        self.comm_hook = comm_hook
        self.comm_hook_options = dict(comm_hook_options or {})
        self.sync_batchnorm = sync_batchnorm
        self._wrapped: WeakSet[DistributedDataParallel] = WeakSet()

    def setup(self, state: PartialState) -> None:
        """Take this process's place among its peers."""
        super().setup(state)
        if self.sync_batchnorm and self.kind.name == "cpu":
            raise ConfigurationError("sync_batchnorm=True needs GPUs: torch's SyncBatchNorm has no CPU kernel.")

    def prepare(
        self, model: nn.Module, optimizers: Sequence[Optimizer], precision: Precision, move: bool = True
    ) -> tuple[nn.Module, list[Optimizer]]:
        """Place a model and wrap it; one without trainable parameters, or without peers, stays bare."""
        model, prepared = super().prepare(model, optimizers, precision, move)
        trainable = any(parameter.requires_grad for parameter in model.parameters())
        if not (self.environment.is_distributed and trainable):
            return model, prepared
        if self.sync_batchnorm:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
        options = dict(self.wrapper_options)
        if isinstance(model, StepModule) and model.partial_backwards:
            options["find_unused_parameters"] = True
        elif isinstance(model, StepModule):
            first = next(parameter for parameter in model.parameters() if parameter.requires_grad)
            model.presence = nn.Parameter(torch.zeros((), dtype=first.dtype, device=first.device))
        wrapped = DistributedDataParallel(model, **options)
        if isinstance(self.comm_hook, str):
            register_communication_hook(wrapped, self.comm_hook, self.comm_hook_options)
        elif self.comm_hook is not None:
            register_function_hook(wrapped, self.comm_hook, self.comm_hook_options.get("state"))
        self._wrapped.add(wrapped)
        return wrapped, prepared

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The user's own module."""
        bare = super().unwrap(model)
        while isinstance(bare, DistributedDataParallel):
            bare = super().unwrap(bare.module)
        return bare

    def before_evaluation(self, model: nn.Module) -> None:
        """Give all processes rank 0's buffers.

        Each process's batch statistics have moved on by its own last batch; those of rank 0 are the ones that
        the next training step and a checkpoint take.
        """
        if isinstance(model, DistributedDataParallel) and self.wrapper_options.get(_BROADCAST_BUFFERS, True):
            broadcast(list(self.unwrap(model).buffers()))

    def evaluation_model(self, model: nn.Module) -> nn.Module:
        """The module inside: processes may have different numbers of evaluation batches, so nothing is exchanged."""
        return model.module if isinstance(model, DistributedDataParallel) else model

    def training_model(self, model: nn.Module, automatic: bool) -> nn.Module:
        """The DDP module; the one inside where the task runs backward within its step, before DDP could prepare."""
        return model if automatic else self.evaluation_model(model)

    def before_manual_backward(self, model: nn.Module, loss: torch.Tensor) -> None:
        """Tell the reducer which parameters the coming backward uses, as DDP's own forward would."""
        if isinstance(model, DistributedDataParallel) and model.require_backward_grad_sync:
            model.reducer.prepare_for_forward()
            model.reducer._rebuild_buckets()
            model.reducer.prepare_for_backward([loss])

    def gradient_sync(self, model: nn.Module, enabled: bool) -> AbstractContextManager[Any]:
        """Skip the averaging of gradients in a context."""
        if enabled or not isinstance(model, DistributedDataParallel):
            return nullcontext()
        if model.static_graph and not model._static_graph_delay_allreduce_enqueued:
            # A static graph is recorded in the first backward, which must reduce (torch 2.13 asserts it);
            # reducing in every micro-batch of that one window gives the same gradients.
            return nullcontext()
        return model.no_sync()

    def zero_loss(self, task: nn.Module) -> torch.Tensor:
        """A loss with gradients of zero; of no parameter at all where DDP looks for those that take no part.

        A parameter that no process used has no gradient then, as in one process, rather than one of zero to decay by.
        """
        if self.wrapper_options["find_unused_parameters"]:
            return torch.zeros((), device=self.device)
        return super().zero_loss(task)

    def join(self, models: Sequence[nn.Module]) -> AbstractContextManager[Any]:
        """Torch's `Join` over the DDP modules: those that ran out shadow the others' collectives."""
        joinables = [model for model in models if isinstance(model, DistributedDataParallel)]
        return Join(joinables) if joinables else nullcontext()  # type: ignore[arg-type]

    def model_state(self, model: nn.Module) -> StateDict:
        """Parameters, and rank 0's buffers: a checkpoint may take each tensor from another process.

        Buffers such as running means differ between processes until the next forward sends rank 0's to all.
        """
        state = super().model_state(model)
        if self.environment.is_distributed:
            for name, _ in self.unwrap(model).named_buffers():
                if name in state:
                    state[name] = broadcast(state[name].detach().clone())
        return state

    def teardown(self) -> None:
        """Free the reducers, also of modules that the user still holds.

        A reducer that is destroyed after its process group waits for gloo's thread while holding the GIL,
        which that thread needs: about one two-process run in 40 hung at exit so (torch 2.13).
        """
        for wrapped in self._wrapped:
            wrapped.__dict__.pop("reducer", None)
            wrapped.__dict__.pop("logger", None)
        self._wrapped.clear()
