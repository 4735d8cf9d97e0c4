"""Data parallelism with averaged gradients (Li et al., 2020, https://arxiv.org/abs/2006.15704)."""

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

# Gradient compression


COMMUNICATION_HOOKS = ("fp16", "bf16", "powersgd", "batched_powersgd")
COMMUNICATION_WRAPPERS = {"fp16": torch.float16, "bf16": torch.bfloat16}


def bf16_hook(group: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """DDP communication hook that averages a bucket of gradients in bfloat16.

    It returns a future of the result. Torch's `bf16_compress_hook` requires NCCL and raises on gloo, although gloo can
    reduce bfloat16 (torch 2.13).
    """
    group = group or dist.group.WORLD
    # Divided before the reduction, like in torch's own compression hooks.
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
    """Make a DDP module compress gradients by a hook such as `"fp16"` or `"powersgd"`."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    state: Any = None
    hook: Callable[..., Any] = bf16_hook if name == "bf16" else default_hooks.fp16_compress_hook
    if name in ("powersgd", "batched_powersgd"):
        # Without an epsilon, a gradient of zeros, such as of an unused parameter, becomes NaN.
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
                f"Invalid comm_hook_options={options!r} for PowerSGD ({error}). Allowed: {', '.join(allowed[1:])}.",
            ) from error
        hook = _power_sgd if name == "powersgd" else _batched_power_sgd
    if wrapper is not None:
        hook = _compressed(hook, COMMUNICATION_WRAPPERS[wrapper])
    register_function_hook(model, hook, state)


class _Bucket:
    # Gives torch's PowerSGD hook reshaped tensors in place of the bucket's own.

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

    # PowerSGD cannot handle 0-dimensional gradients.
    gradients = [each if each.dim() else each.view(1) for each in bucket.gradients()]
    seen: Any = _Bucket(bucket, bucket.buffer(), gradients)
    return powerSGD_hook.powerSGD_hook(state, seen)


def _batched_power_sgd(state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    # PowerSGD of a bucket's gradients as one matrix. Torch's `batched_powerSGD_hook` fails at its first compression: it
    # passes one matrix to a function that orthogonalizes a batch of matrices (torch 2.13).
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
    """Register a user's function as the communication hook of a DDP module.

    The lambda hides the function's annotations. Torch compares them with its classes, and under `from __future__ import
    annotations` they are strings, which never match.
    """
    model.register_comm_hook(state, lambda state, bucket: hook(state, bucket))


class DDP(Strategy, JoinsUnevenInputs):
    """Data parallelism, with the whole model on each process and averaged gradients.

    Args:
        find_unused_parameters: Search each forward pass for parameters that do not contribute to the loss. After ten
            steps without a change, a warning reports the cost of the search. With `"auto"` the search ends then, and a
            parameter that is first used later raises an error.
        static_graph: Declare that every step uses the same parameters. Allows unused parameters without a search, and
            reentrant activation checkpointing.
        bucket_cap_mb: Size of the gradient buckets, in MiB.
        gradient_as_bucket_view: Make gradients views of the buckets, which saves memory and a copy.
        broadcast_buffers: Broadcast rank 0's buffers before each training forward pass.
        comm_hook: Gradient compression: `"fp16"`, `"bf16"`, `"powersgd"`, `"batched_powersgd"`, or a function
            `(state, bucket) -> Future`.
        comm_hook_options: Arguments of `PowerSGDState`, or the state of a function as `{"state": state}`.
        comm_wrapper: `"fp16"` or `"bf16"`, the dtype in which a named `comm_hook` receives gradients.
        sync_batchnorm: Compute batch normalization statistics over all processes. Needs GPUs.
        check_copies_every: Number of optimizer steps between comparisons of gradients and parameters across processes.
            They are also compared before the first step and when a checkpoint is saved. 0 disables the comparison, and
            so does a `comm_hook` that is a function.

    Raises:
        ConfigurationError: An option is invalid, or two options conflict.
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
                f"check_copies_every={check_copies_every} must be a number of steps, or 0 to disable the check."
            )
        _refuse_hooks(comm_hook, comm_hook_options, comm_wrapper)
        if find_unused_parameters not in (True, False, "auto"):
            raise ConfigurationError(
                f'find_unused_parameters must be True, False or "auto", got {find_unused_parameters!r}.'
            )
        self._ends_search = find_unused_parameters == "auto"
        if self._ends_search and (static_graph or comm_hook not in (None, "fp16", "bf16")):
            beside = "static_graph=True" if static_graph else f"comm_hook={comm_hook!r}"
            raise ConfigurationError(
                f'find_unused_parameters="auto" cannot be combined with {beside}, because it changes the gradient '
                "buckets when the search ends. Use True or False.",
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
        super().setup(state)
        self.gradients = ReducedGradients(self._copies)
        self.state = CopiedState(self, self._copies)
        self._copies.are_several = state.use_distributed
        self._agree = _agreement(state) if state.use_distributed else None
        if self.sync_batchnorm and self.topology.kind.name == "cpu":
            raise ConfigurationError("sync_batchnorm=True needs GPUs. Torch's SyncBatchNorm does not support the CPU.")
        state.before_leaving(self._release)

    def prepare(
        self, model: nn.Module, optimizers: Sequence[Optimizer] | None, precision: Precision, move: bool = True
    ) -> tuple[nn.Module, list[Optimizer]]:
        model, prepared = super().prepare(model, optimizers, precision, move)
        # Torch's DDP refuses a module without parameters that require gradients.
        trainable = optimizers is not None and any(parameter.requires_grad for parameter in model.parameters())
        if not (self.topology.environment.is_distributed and trainable):
            return model, prepared
        if self.sync_batchnorm:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
        options = dict(self.wrapper_options)
        if isinstance(model, StepModule) and (model.partial_backwards or model.several_losses):
            # Torch reduces a static graph at the end of its first backward pass, but here a step has several. A
            # backward pass over some of the parameters leaves the others without a gradient.
            options["find_unused_parameters"] |= model.partial_backwards or options["static_graph"]
            options["static_graph"] = False
        if isinstance(model, StepModule) and not model.partial_backwards:
            first = next(parameter for parameter in model.parameters() if parameter.requires_grad)
            model.presence = nn.Parameter(torch.zeros((), dtype=first.dtype, device=first.device).real)
        device, devices = self.topology.device, {parameter.device for parameter in model.parameters()}
        if not isinstance(model, StepModule) and device.type != "cpu" and devices == {device}:
            options["device_ids"] = [device]  # so that torch's DDP moves what a script's own loop gives the model
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
        bare = super().unwrap(model)
        while isinstance(bare, DistributedDataParallel):
            bare = super().unwrap(bare.module)
        return bare

    def view(self, model: nn.Module, stage: View) -> nn.Module:
        if not isinstance(model, DistributedDataParallel):
            return model
        if stage == "evaluate" and self.wrapper_options.get(BROADCAST_BUFFERS, True):
            # The next training step and a checkpoint use the buffers of rank 0, so evaluation uses them, too.
            broadcast(list(self.unwrap(model).buffers()))
        # A task that runs backward itself must bypass DDP's forward, which would prepare the reduction too early.
        inner: nn.Module = model.module
        return model if stage == "train" else inner

    # one optimizer step

    def forward_backward(
        self, model: nn.Module, step_fn: Callable[[MicroBatch], Output], microbatches: Sequence[MicroBatch]
    ) -> list[Output]:
        outputs = super().forward_backward(model, step_fn, microbatches)
        if isinstance(model, DistributedDataParallel):
            model.require_reduced()
        return outputs

    def optimizer_step(
        self, optimizer: Optimizer, precision: Precision, closure: Callable[[], Any] | None = None
    ) -> bool:
        # Torch would report missing gradients only in the next forward pass, after a step without a reduction.
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
        """True if steps that run out of memory can be repeated, which `comm_hook` and `sync_batchnorm` prevent."""
        return self.comm_hook is None and not self.sync_batchnorm

    @contextmanager
    def _shadowing(self, models: Sequence[nn.Module]) -> Iterator[None]:
        joinables = [model for model in models if isinstance(model, DistributedDataParallel)]
        with self._copies.pause(), Join(joinables) if joinables else nullcontext():  # type: ignore[arg-type]
            yield

    def join(self, models: Sequence[nn.Module]) -> AbstractContextManager[None]:
        return self._shadowing(models)

    def _release(self) -> None:
        # A reducer destroyed after its process group waits for gloo's thread while holding the GIL, which that thread
        # needs. About one two-process run in 40 hung at exit because of this (torch 2.13).
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
            f"comm_wrapper={wrapper!r} is not supported with comm_hook={hook!r}. Use one of "
            f"{', '.join(COMMUNICATION_WRAPPERS)}, together with the name of a comm_hook.",
        )
    if hook in (None, "fp16", "bf16") and options:
        raise ConfigurationError(f"comm_hook={hook!r} takes no options, got {sorted(options)}.")


def _agreement(state: PartialState) -> Callable[[str], None]:
    # The returned function raises an error if processes pass different texts.
    registry = state.registry()
    registry["trained_by"] = number = registry.get("trained_by", 0) + 1
    store = PrefixStore(f"trained/{number}", state.store or group_store())
    limit = group_timeout() or DEFAULT_TIMEOUT
    comparison = CallComparison(store, state.process_index, state.num_processes, limit)
    return lambda call: comparison.compare(call, user_line())


class ReducedGradients(Gradients):
    def __init__(self, copies: Copies) -> None:
        self._copies = copies

    def finish(self, optimizers: Sequence[Optimizer]) -> None:
        self._copies.average_beside(optimizers)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        if not isinstance(model, DistributedDataParallel):
            return nullcontext()
        if model.static_graph and not model._static_graph_delay_allreduce_enqueued:
            # A static graph is recorded in the first backward pass, which must reduce gradients (torch 2.13 asserts
            # it). Reducing in every micro-batch of that step gives the same result.
            return nullcontext()
        return model.no_sync()


class CopiedState(ModelState):
    def __init__(self, strategy: Strategy, copies: Copies) -> None:
        super().__init__(strategy)
        self._copies = copies

    def model(self, model: nn.Module, full: bool = False, everywhere: bool = False) -> StateDict:
        if full or not self.strategy.topology.environment.is_distributed:
            return super().model(model, full, everywhere)
        self._copies.compare_weights(model)
        return with_buffers_of_rank_0(self.strategy.unwrap(model), super().model(model))
