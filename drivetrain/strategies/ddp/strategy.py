"""A copy of the model on every process, gradients averaged (Li et al., 2020, https://arxiv.org/abs/2006.15704)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.optim import Optimizer

from drivetrain.runtime.collectives import broadcast, reduce
from drivetrain.runtime.errors import ConfigurationError, nearest
from drivetrain.runtime.state import PartialState
from drivetrain.strategies.base import Capability, MicroBatch, Output, Strategy, View
from drivetrain.strategies.capabilities import Join, RepeatableStep
from drivetrain.strategies.ddp.communication_hooks import (
    COMMUNICATION_HOOKS,
    COMMUNICATION_WRAPPERS,
    register_communication_hook,
    register_function_hook,
)
from drivetrain.strategies.ddp.wrapper import BROADCAST_BUFFERS, DistributedDataParallel
from drivetrain.strategies.gradients import Gradients, zero_loss_of
from drivetrain.strategies.model_state import ModelState, StateDict, with_buffers_of_rank_0
from drivetrain.strategies.precision import Precision
from drivetrain.strategies.step_module import StepModule


class DDP(Strategy):
    """A copy of the model on every process; gradients are averaged during backward.

    Args:
        find_unused_parameters: Look in each forward for parameters that take no part in it. After ten steps in which
            there was none on any process, or always the same, a warning names what the search costs; with `"auto"` the
            search ends there, and a parameter that takes part for the first time later is an error.
        static_graph: The same parameters are used in every step, which lets some take no part without a search, and
            allows reentrant activation checkpointing.
        bucket_cap_mb: Size of the gradient buckets, in MiB.
        gradient_as_bucket_view: Let gradients be views of the buckets, which saves a copy and its memory.
        broadcast_buffers: Send rank 0's buffers to all before each training forward.
        comm_hook: `"fp16"`, `"bf16"`, `"powersgd"`, `"batched_powersgd"`, or a function `(state, bucket) -> Future`,
            to send less.
        comm_hook_options: Arguments of the PowerSGD state, or under `"state"` the state of a function.
        comm_wrapper: `"fp16"` or `"bf16"`: the format that a `comm_hook` by name is given gradients in.
        sync_batchnorm: Compute batch statistics over all processes (GPU only, as torch's is).

    Raises:
        ConfigurationError: An option cannot be.
    """

    name = "ddp"

    def __init__(
        self,
        *,
        find_unused_parameters: bool | Literal["auto"] = False,
        static_graph: bool = False,
        bucket_cap_mb: float = 25,
        gradient_as_bucket_view: bool = True,
        broadcast_buffers: bool = True,
        comm_hook: str | Callable[..., Any] | None = None,
        comm_hook_options: dict[str, Any] | None = None,
        comm_wrapper: str | None = None,
        sync_batchnorm: bool = False,
    ) -> None:
        if bucket_cap_mb <= 0:
            raise ConfigurationError(f"bucket_cap_mb must be positive, got {bucket_cap_mb}.", code="DT-002")
        if isinstance(comm_hook, str) and comm_hook not in COMMUNICATION_HOOKS:
            raise ConfigurationError(
                f"Unknown comm_hook {comm_hook!r}. Allowed: {', '.join(COMMUNICATION_HOOKS)}, or a function "
                f"(state, bucket) -> Future.{nearest(comm_hook, COMMUNICATION_HOOKS)}",
                code="DT-001",
            )
        if comm_wrapper is not None and (
            comm_wrapper not in COMMUNICATION_WRAPPERS or comm_hook not in COMMUNICATION_HOOKS
        ):
            raise ConfigurationError(
                f"comm_wrapper={comm_wrapper!r} beside comm_hook={comm_hook!r}: it is one of "
                f"{', '.join(COMMUNICATION_WRAPPERS)}, around a comm_hook by name.",
                code="DT-001",
            )
        if comm_hook in (None, "fp16", "bf16") and comm_hook_options:
            raise ConfigurationError(
                f"comm_hook={comm_hook!r} takes no options, got {sorted(comm_hook_options)}.", code="DT-006"
            )
        if find_unused_parameters not in (True, False, "auto"):
            raise ConfigurationError(
                f'find_unused_parameters={find_unused_parameters!r}: it is True, False or "auto".', code="DT-001"
            )
        self._ends_search = find_unused_parameters == "auto"
        if self._ends_search and (static_graph or comm_hook not in (None, "fp16", "bf16")):
            beside = "static_graph=True" if static_graph else f"comm_hook={comm_hook!r}"
            raise ConfigurationError(
                f'find_unused_parameters="auto" beside {beside}, which buckets that change later do not suit: give '
                "True or False.",
                code="DT-004",
            )
        self.wrapper_options: dict[str, Any] = {
            "find_unused_parameters": bool(find_unused_parameters),
            "static_graph": static_graph,
            "bucket_cap_mb": bucket_cap_mb,
            "gradient_as_bucket_view": gradient_as_bucket_view,
        }
        if not broadcast_buffers:
            self.wrapper_options[BROADCAST_BUFFERS] = False
        self.comm_hook = comm_hook
        self.comm_hook_options = dict(comm_hook_options or {})
        self.comm_wrapper = comm_wrapper
        self.sync_batchnorm = sync_batchnorm
        self._wrapped: WeakSet[DistributedDataParallel] = WeakSet()
        self._stepped: WeakKeyDictionary[Optimizer, tuple[DistributedDataParallel, ...]] = WeakKeyDictionary()

    def setup(self, state: PartialState) -> None:
        """Take this process's place among its peers."""
        super().setup(state)
        self.gradients: ReducedGradients = ReducedGradients(
            self.topology.device, self.wrapper_options["find_unused_parameters"]
        )
        self.state = CopiedState(self.topology, self.unwrap)
        if self.sync_batchnorm and self.topology.kind.name == "cpu":
            raise ConfigurationError(
                "sync_batchnorm=True needs GPUs: torch's SyncBatchNorm has no CPU kernel.", code="DT-024"
            )

    def prepare(
        self, model: nn.Module, optimizers: Sequence[Optimizer], precision: Precision, move: bool = True
    ) -> tuple[nn.Module, list[Optimizer]]:
        """Place a model and wrap it; one without trainable parameters, or without peers, stays bare."""
        model, prepared = super().prepare(model, optimizers, precision, move)
        trainable = any(parameter.requires_grad for parameter in model.parameters())
        if not (self.topology.environment.is_distributed and trainable):
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
        if self.wrapper_options["find_unused_parameters"] and not options["static_graph"]:
            wrapped.watch_search(self.gradients.end_search if self._ends_search else None)
        if isinstance(self.comm_hook, str):
            register_communication_hook(wrapped, self.comm_hook, self.comm_hook_options, self.comm_wrapper)
        elif self.comm_hook is not None:
            register_function_hook(wrapped, self.comm_hook, self.comm_hook_options.get("state"))
        self._wrapped.add(wrapped)
        self._stepped.clear()
        return wrapped, prepared

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The user's own module."""
        bare = super().unwrap(model)
        while isinstance(bare, DistributedDataParallel):
            bare = super().unwrap(bare.module)
        return bare

    def view(self, model: nn.Module, stage: View) -> nn.Module:
        """The DDP module; the one inside where nothing is reduced by its forward.

        In evaluation processes may have different numbers of batches, so nothing is exchanged. Where the task runs
        backward within its step, DDP's forward would prepare for it too early.
        """
        if not isinstance(model, DistributedDataParallel):
            return model
        if stage == "evaluate" and self.wrapper_options.get(BROADCAST_BUFFERS, True):
            # Each process's batch statistics are those of its own last batch; rank 0's are what the next training
            # step and a checkpoint take.
            broadcast(list(self.unwrap(model).buffers()))
        inner: nn.Module = model.module
        return model if stage == "train" else inner

    # one optimizer step

    def forward_backward(
        self, model: nn.Module, step_fn: Callable[[MicroBatch], Output], microbatches: Sequence[MicroBatch]
    ) -> list[Output]:
        """Run forward and backward over a window; raise before peers wait for gradients that are not computed."""
        outputs = super().forward_backward(model, step_fn, microbatches)
        self.gradients.require_reduced(model)
        self.gradients.average_adopted()
        return outputs

    def optimizer_step(
        self, optimizer: Optimizer, precision: Precision, closure: Callable[[], Any] | None = None
    ) -> bool:
        """Step an optimizer, once all of its gradients are known to be reduced."""
        for wrapped in self._stepped_by(optimizer):
            wrapped.require_reduced()
        return super().optimizer_step(optimizer, precision, closure)

    def _stepped_by(self, optimizer: Optimizer) -> tuple[DistributedDataParallel, ...]:
        """The wrapped modules whose parameters an optimizer holds."""
        known = self._stepped.get(optimizer)
        if known is None:
            held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            known = tuple(one for one in self._wrapped if any(id(p) in held for p in one.parameters()))
            self._stepped[optimizer] = known
        return known

    def capability(self, kind: type[Capability]) -> Capability | None:
        """Processes may have different numbers of batches, and compute a step again that lacked memory on one."""
        if kind is RepeatableStep and self.comm_hook is None and not self.sync_batchnorm:
            return _Repeatable()  # type: ignore[return-value]
        return _Join() if kind is Join else None  # type: ignore[return-value]

    def teardown(self) -> None:
        """Free the reducers, also of modules that the user still holds.

        A reducer that is destroyed after its process group waits for gloo's thread while holding the GIL,
        which that thread needs: about one two-process run in 40 hung at exit so (torch 2.13).
        """
        for wrapped in self._wrapped:
            for name in ("reducer", "logger", "_search"):
                wrapped.__dict__.pop(name, None)
        self._wrapped.clear()
        self._stepped.clear()


class ReducedGradients(Gradients):
    """Gradients that backward averages over processes, bucket by bucket.

    Args:
        device: Where this process's tensors live.
        finds_unused: Whether DDP looks for parameters that take no part in a loss.
    """

    def __init__(self, device: torch.device, finds_unused: bool) -> None:
        self._device, self._finds_unused = device, finds_unused
        self._adopted: list[nn.Parameter] = []
        self._left_out: set[int] = set()

    def end_search(self, never_used: Sequence[nn.Parameter]) -> None:
        """Take note that DDP does not look for unused parameters any more.

        Args:
            never_used: Those that it leaves out.
        """
        self._finds_unused = False
        self._left_out.update(map(id, never_used))

    def adopt(self, model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        """Take parameters that DDP's buckets do not hold: they are averaged by themselves once a window ends."""
        if isinstance(model, DistributedDataParallel):
            if isinstance(model.module, StepModule) and model.module.partial_backwards:
                raise ConfigurationError(
                    "Under DDP a task that optimizes by hand cannot train parameters that were frozen when the run "
                    'began. Let automatic_optimization be True, or use strategy="fsdp".',
                    code="DT-049",
                )
            known = {id(each) for each in self._adopted}
            self._adopted += [each for each in parameters if id(each) not in known]

    def average_adopted(self) -> None:
        """Average the gradients of those parameters; one that this process's loss does not depend on counts as zero."""
        if not self._adopted:
            return
        for parameter in self._adopted:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        averaged = reduce([parameter.grad for parameter in self._adopted])
        for parameter, gradient in zip(self._adopted, averaged, strict=True):
            parameter.grad = gradient

    def sync(self, model: nn.Module, enabled: bool) -> AbstractContextManager[Any]:
        """Skip the averaging of gradients in a context."""
        if enabled or not isinstance(model, DistributedDataParallel):
            return nullcontext()
        if model.static_graph and not model._static_graph_delay_allreduce_enqueued:
            # A static graph is recorded in the first backward, which must reduce (torch 2.13 asserts it);
            # reducing in every micro-batch of that one window gives the same gradients.
            return nullcontext()
        return model.no_sync()

    def require_reduced(self, model: nn.Module) -> None:
        """Raise where the last backward has left out parameters, whose gradients the peers wait for."""
        if isinstance(model, DistributedDataParallel):
            model.require_reduced()

    def zero_loss(self, task: nn.Module) -> torch.Tensor:
        """A loss with gradients of zero; of no parameter at all where DDP looks for those that take no part.

        A parameter that no process used has no gradient then, as in one process, rather than one of zero to decay by.
        """
        if self._finds_unused:
            return torch.zeros((), device=self._device)
        return zero_loss_of(each for each in task.parameters() if id(each) not in self._left_out)

    def prepare_backward(self, model: nn.Module, loss: torch.Tensor) -> None:
        """Let the reducer find the parameters that the coming backward uses, as DDP's own forward would."""
        if isinstance(model, DistributedDataParallel) and model.require_backward_grad_sync:
            model.reducer.prepare_for_forward()
            model.reducer._rebuild_buckets()
            model.reducer.prepare_for_backward([loss])


class CopiedState(ModelState):
    """The state of a model that every process has a copy of."""

    def model(self, model: nn.Module) -> StateDict:
        """Parameters, and rank 0's buffers."""
        state = super().model(model)
        return with_buffers_of_rank_0(self.unwrap(model), state) if self.topology.environment.is_distributed else state


class _Repeatable(RepeatableStep):
    """Gradients that each process computes for itself, and that are averaged afterwards."""

    def reduce(self, model: nn.Module) -> None:
        """Average the gradients of all parameters that any process has one of."""
        if not isinstance(model, DistributedDataParallel):
            return
        parameters = [parameter for parameter in model.module.parameters() if parameter.requires_grad]
        device = parameters[0].device
        held = reduce(torch.tensor([float(each.grad is not None) for each in parameters], device=device), "sum")
        for parameter, holders in zip(parameters, held.tolist(), strict=True):
            if holders:
                own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parameter.grad = reduce(own, "mean")


class _Join(Join):
    """Torch's `Join` over the DDP modules: processes that ran out shadow the collectives of the others."""

    def joined(self, models: Sequence[nn.Module]) -> AbstractContextManager[Any]:
        joinables = [model for model in models if isinstance(model, DistributedDataParallel)]
        return TorchJoin(joinables) if joinables else nullcontext()  # type: ignore[arg-type]
