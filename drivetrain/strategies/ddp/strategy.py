"""A copy of the model on every process, gradients averaged (Li et al., 2020, https://arxiv.org/abs/2006.15704)."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.algorithms.join import Join
from torch.nn import parallel
from torch.optim import Optimizer

from drivetrain.runtime.collective_checks import CallComparison
from drivetrain.runtime.collectives import broadcast
from drivetrain.runtime.errors import ConfigurationError, nearest, user_line
from drivetrain.runtime.process_group import DEFAULT_TIMEOUT, group_store, group_timeout
from drivetrain.runtime.state import PartialState
from drivetrain.strategies.base import (
    Gradients,
    JoinsUnevenInputs,
    MicroBatch,
    ModelState,
    Output,
    StateDict,
    Strategy,
    View,
    with_buffers_of_rank_0,
)
from drivetrain.strategies.ddp.wrapper import BROADCAST_BUFFERS, Copies, DistributedDataParallel
from drivetrain.strategies.precision import Precision
from drivetrain.strategies.step_module import StepModule

# Gradient compression for DDP: what is sent instead of the 32-bit gradients


COMMUNICATION_HOOKS = ("fp16", "bf16", "powersgd", "batched_powersgd")
COMMUNICATION_WRAPPERS = {"fp16": torch.float16, "bf16": torch.bfloat16}


def bf16_hook(group: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """Reduce a bucket in bfloat16.

    Torch's own `bf16_compress_hook` asks for NCCL and so raises on gloo, which reduces bfloat16 well (torch 2.13).
    """
    group = group or dist.group.WORLD
    compressed = bucket.buffer().to(torch.bfloat16).div_(group.size())
    future = dist.all_reduce(compressed, group=group, async_op=True).get_future()

    def decompress(done: torch.futures.Future[Any]) -> torch.Tensor:
        buffer: torch.Tensor = bucket.buffer()
        buffer.copy_(done.value()[0])
        return buffer

    result: torch.futures.Future[torch.Tensor] = future.then(decompress)
    return result


def register_communication_hook(
    model: parallel.DistributedDataParallel, name: str, options: dict[str, Any], wrapper: str | None = None
) -> None:
    """Register one of the hooks by name."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    state: Any = None
    hook: Callable[..., Any] = bf16_hook if name == "bf16" else default_hooks.fp16_compress_hook
    if name in ("powersgd", "batched_powersgd"):
        # Without an epsilon a gradient of zeros, as of a parameter that took no part, becomes NaN.
        settings = {
            "matrix_approximation_rank": 1,
            "start_powerSGD_iter": 2,
            "orthogonalization_epsilon": 1e-8,
            **options,
        }
        try:
            state = powerSGD_hook.PowerSGDState(process_group=None, **settings)
        except TypeError as error:
            allowed = [each for each in inspect.signature(powerSGD_hook.PowerSGDState).parameters if each[0] != "_"]
            raise ConfigurationError(
                f"comm_hook_options={options!r} do not suit PowerSGD ({error}). Allowed: {', '.join(allowed[1:])}.",
            ) from error
        hook = _power_sgd if name == "powersgd" else _batched_power_sgd
    if wrapper is not None:
        hook = _compressed(hook, COMMUNICATION_WRAPPERS[wrapper])
    register_function_hook(model, hook, state)


class _Bucket:
    """A bucket as torch's PowerSGD is to see it."""

    def __init__(self, bucket: Any, buffer: torch.Tensor, gradients: list[torch.Tensor]) -> None:
        self._bucket, self._buffer, self._gradients = bucket, buffer, gradients

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bucket, name)

    def buffer(self) -> torch.Tensor:
        return self._buffer

    def gradients(self) -> list[torch.Tensor]:
        return self._gradients


def _power_sgd(state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook  # slow to import

    gradients = [each if each.dim() else each.view(1) for each in bucket.gradients()]
    seen: Any = _Bucket(bucket, bucket.buffer(), gradients)
    return powerSGD_hook.powerSGD_hook(state, seen)


def _batched_power_sgd(state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """Compress a bucket as one square matrix.

    Torch's own `batched_powerSGD_hook` fails at its first compression, since it orthogonalizes a batch of matrices and
    gives it one (torch 2.13).
    """
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    own: torch.Tensor = bucket.buffer()
    side = math.ceil(own.numel() ** 0.5)
    padded = own.new_zeros(side * side)
    padded[: own.numel()] = own
    seen: Any = _Bucket(bucket, padded, [padded.view(side, side)])

    def cut(done: torch.futures.Future[Any]) -> torch.Tensor:
        return own.copy_(done.value()[: own.numel()])

    result: torch.futures.Future[torch.Tensor] = powerSGD_hook.powerSGD_hook(state, seen).then(cut)
    return result


def _compressed(hook: Callable[..., Any], dtype: torch.dtype) -> Callable[..., Any]:
    """A hook that is given its bucket in another format, and whose result is in the bucket's own."""

    def compressed(state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        own: torch.Tensor = bucket.buffer()
        bucket.set_buffer(own.to(dtype))

        def decompress(done: torch.futures.Future[Any]) -> torch.Tensor:
            value = done.value()
            own.copy_(value[0] if isinstance(value, list) else value)
            return own

        result: torch.futures.Future[torch.Tensor] = hook(state, bucket).then(decompress)
        return result

    return compressed


def register_function_hook(model: parallel.DistributedDataParallel, hook: Callable[..., Any], state: Any) -> None:
    """Register a function `(state, bucket) -> Future` with its state.

    Torch compares a hook's annotations with its own classes, which those of a module with postponed annotations,
    being strings, never equal; a lambda has none.
    """
    model.register_comm_hook(state, lambda state, bucket: hook(state, bucket))


class DDP(Strategy, JoinsUnevenInputs):
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
        check_copies_every: Steps of an optimizer after which gradients and parameters are compared between processes;
            also done before its first step and at each save. 0 leaves it out, as does a `comm_hook` that is a function.

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
        check_copies_every: int = 2000,
    ) -> None:
        if bucket_cap_mb <= 0:
            raise ConfigurationError(f"bucket_cap_mb must be positive, got {bucket_cap_mb}.")
        if check_copies_every < 0:
            raise ConfigurationError(
                f"check_copies_every={check_copies_every}: give a number of steps, or 0 for no check."
            )
        _refuse_hooks(comm_hook, comm_hook_options, comm_wrapper)
        if find_unused_parameters not in (True, False, "auto"):
            raise ConfigurationError(f'find_unused_parameters={find_unused_parameters!r}: it is True, False or "auto".')
        self._ends_search = find_unused_parameters == "auto"
        if self._ends_search and (static_graph or comm_hook not in (None, "fp16", "bf16")):
            beside = "static_graph=True" if static_graph else f"comm_hook={comm_hook!r}"
            raise ConfigurationError(
                f'find_unused_parameters="auto" beside {beside}, which buckets that change later do not suit: give '
                "True or False.",
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
        self._copies = Copies(check_copies_every if comm_hook is None or isinstance(comm_hook, str) else 0)

    def setup(self, state: PartialState) -> None:
        """Take this process's place among its peers."""
        super().setup(state)
        self.gradients = ReducedGradients(self._copies)
        self.state = CopiedState(self, self._copies)
        self._copies.are_several = state.use_distributed
        self._agree = _agreement(state) if state.use_distributed else None
        if self.sync_batchnorm and self.topology.kind.name == "cpu":
            raise ConfigurationError("sync_batchnorm=True needs GPUs: torch's SyncBatchNorm has no CPU kernel.")
        state.before_leaving(self._release)

    def prepare(
        self, model: nn.Module, optimizers: Sequence[Optimizer] | None, precision: Precision, move: bool = True
    ) -> tuple[nn.Module, list[Optimizer]]:
        """Place a model and wrap it; one that is not trained, or has no peers, stays bare."""
        model, prepared = super().prepare(model, optimizers, precision, move)
        trainable = optimizers is not None and any(parameter.requires_grad for parameter in model.parameters())
        if not (self.topology.environment.is_distributed and trainable):
            return model, prepared
        if self.sync_batchnorm:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
        options = dict(self.wrapper_options)
        if isinstance(model, StepModule) and (model.partial_backwards or model.several_losses):
            # Torch reduces a static graph where its first backward ends, which here is one of several.
            options["find_unused_parameters"] |= model.partial_backwards or options["static_graph"]
            options["static_graph"] = False
        if isinstance(model, StepModule) and not model.partial_backwards:
            first = next(parameter for parameter in model.parameters() if parameter.requires_grad)
            model.presence = nn.Parameter(torch.zeros((), dtype=first.dtype, device=first.device).real)
        wrapped = DistributedDataParallel(model, **options)
        wrapped.agree = self._agree
        if self.wrapper_options["find_unused_parameters"] and not options["static_graph"]:
            wrapped.watch_search(self._ends_search)
        if isinstance(self.comm_hook, str):
            wrapped.register_with(
                partial(
                    register_communication_hook,
                    name=self.comm_hook,
                    options=self.comm_hook_options,
                    wrapper=self.comm_wrapper,
                )
            )
        elif self.comm_hook is not None:
            register_function_hook(wrapped, self.comm_hook, self.comm_hook_options.get("state"))
        self._copies.add(wrapped)
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
        if isinstance(model, DistributedDataParallel):
            model.require_reduced()
        return outputs

    def optimizer_step(
        self, optimizer: Optimizer, precision: Precision, closure: Callable[[], Any] | None = None
    ) -> bool:
        """Step an optimizer, once all of its gradients are known to be reduced."""
        for wrapped in self._copies.held_by(optimizer).wrapped:
            wrapped.require_reduced()
        if not self._copies.must_compare(optimizer):
            return super().optimizer_step(optimizer, precision, closure)
        if closure is None:
            self._copies.compare(optimizer)
            return super().optimizer_step(optimizer, precision)
        return super().optimizer_step(optimizer, precision, self._copies.comparing_once(optimizer, closure))

    @property
    def repeats_steps(self) -> bool:  # type: ignore[override]
        """Whether nothing is exchanged before the gradients are averaged."""
        return self.comm_hook is None and not self.sync_batchnorm

    @contextmanager
    def _shadowing(self, models: Sequence[nn.Module]) -> Iterator[None]:
        joinables = [model for model in models if isinstance(model, DistributedDataParallel)]
        with self._copies.pause(), Join(joinables) if joinables else nullcontext():  # type: ignore[arg-type]
            yield

    def join(self, models: Sequence[nn.Module]) -> AbstractContextManager[None]:
        """Let processes that ran out of batches shadow the collectives of the others, by torch's `Join`."""
        return self._shadowing(models)

    def _release(self) -> None:
        """Free the reducers, also of modules that the user still holds.

        A reducer that is destroyed after its process group waits for gloo's thread while holding the GIL,
        which that thread needs: about one two-process run in 40 hung at exit so (torch 2.13).
        """
        for wrapped in self._copies.wrapped:
            for name in ("reducer", "logger", "_search", "agree"):
                wrapped.__dict__.pop(name, None)
        self._copies.clear()


def _refuse_hooks(hook: Any, options: dict[str, Any] | None, wrapper: str | None) -> None:
    if isinstance(hook, str) and hook not in COMMUNICATION_HOOKS:
        raise ConfigurationError(
            f"Unknown comm_hook {hook!r}. Allowed: {', '.join(COMMUNICATION_HOOKS)}, or a function "
            f"(state, bucket) -> Future.{nearest(hook, COMMUNICATION_HOOKS)}",
        )
    if wrapper is not None and (wrapper not in COMMUNICATION_WRAPPERS or hook not in COMMUNICATION_HOOKS):
        raise ConfigurationError(
            f"comm_wrapper={wrapper!r} beside comm_hook={hook!r}: it is one of "
            f"{', '.join(COMMUNICATION_WRAPPERS)}, around a comm_hook by name.",
        )
    if hook in (None, "fp16", "bf16") and options:
        raise ConfigurationError(f"comm_hook={hook!r} takes no options, got {sorted(options)}.")


def _agreement(state: PartialState) -> Callable[[str], None]:
    """A function that raises on all processes if it is not called with the same text on each."""
    registry = state.registry()
    registry["trained_by"] = number = registry.get("trained_by", 0) + 1
    store = PrefixStore(f"trained/{number}", state.store or group_store())
    limit = group_timeout() or DEFAULT_TIMEOUT
    comparison = CallComparison(store, state.process_index, state.num_processes, limit)
    return lambda call: comparison.compare(call, user_line())


class ReducedGradients(Gradients):
    """Gradients that backward averages over processes, bucket by bucket."""

    def __init__(self, copies: Copies) -> None:
        self._copies = copies

    def finish(self, optimizers: Sequence[Optimizer]) -> None:
        """Average what an optimizer has beside the wrapped modules."""
        self._copies.average_beside(optimizers)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Skip the averaging of gradients in a context."""
        if not isinstance(model, DistributedDataParallel):
            return nullcontext()
        if model.static_graph and not model._static_graph_delay_allreduce_enqueued:
            # A static graph is recorded in the first backward, which must reduce (torch 2.13 asserts it);
            # reducing in every micro-batch of that one window gives the same gradients.
            return nullcontext()
        return model.no_sync()


class CopiedState(ModelState):
    """The state of a model that every process has a copy of."""

    def __init__(self, strategy: Strategy, copies: Copies) -> None:
        super().__init__(strategy)
        self._copies = copies

    def model(self, model: nn.Module, full: bool = False, everywhere: bool = False) -> StateDict:
        """Parameters, which are compared between processes, and rank 0's buffers."""
        if full or not self.strategy.topology.environment.is_distributed:
            return super().model(model, full, everywhere)
        self._copies.compare_weights(model)
        return with_buffers_of_rank_0(self.strategy.unwrap(model), super().model(model))
