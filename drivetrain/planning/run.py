"""Runs one optimizer step of a candidate on fake tensors, as one rank of a fake process group."""

from __future__ import annotations

import copy
import gc
import importlib
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from drivetrain.planning.candidates import Candidate, Facts
from drivetrain.planning.hardware import Cluster
from drivetrain.planning.loading import load, place_of
from drivetrain.planning.simulate import HOST, OFFLOADED, Recorder, Step, is_backward
from drivetrain.planning.timing import crosses_machines, time_of
from drivetrain.planning.workload import Loaded, Workload
from drivetrain.runtime import observer
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.state import PartialState, forget_process
from drivetrain.strategies import Strategy
from drivetrain.strategies.base import Given, RunOptions
from drivetrain.strategies.fsdp import sharding
from drivetrain.strategies.precision import Precision
from drivetrain.strategies.precision.registry import resolve_precision
from drivetrain.strategies.step_module import StepModule

_LOADED: dict[str, Loaded] = {}


class _WithoutValues(observer.Observer):
    leaves_empty = True


_FEW, _MORE = 3, 5
"""Numbers of blocks from which a model with more blocks is extrapolated."""
_SHOWN = 240
"""Points of a timeline."""


@dataclass(frozen=True)
class Peak:
    bytes: float
    kinds: dict[str, float]


@dataclass(frozen=True)
class Estimate:
    """Predicted memory, communication and duration of one training step, for each process.

    Attributes:
        peaks: The maximum of each phase and module, without most modules between the first and the last blocks.
        seconds: Seconds of a step.
        computing: Seconds in which a device computes.
        waiting: Seconds in which it waits for others.
        traffic: Collectives by operation, each with their number and the bytes that a process gives. Those between
            machines are listed by themselves.
        flops: Floating-point operations of a process.
        parameters: Parameters of the whole model.
        checkpoint_bytes: Bytes of a checkpoint that a process writes.
        tokens: Tokens of a row, or 1 if rows are no sequences.
        timeline: Bytes by kind over the step, with the phase and the module. Of a model that was extrapolated, it is
            that of fewer blocks.
    """

    peaks: dict[tuple[str, str], Peak]
    seconds: float
    computing: float
    waiting: float
    traffic: dict[str, tuple[float, float]]
    flops: float
    parameters: float
    checkpoint_bytes: float
    tokens: int = 1
    timeline: tuple[tuple[str, str, dict[str, int]], ...] = ()

    @property
    def place(self) -> tuple[str, str]:
        return max(self.peaks, key=lambda place: self.peaks[place].bytes)

    @property
    def peak(self) -> float:
        return self.peaks[self.place].bytes

    @property
    def host(self) -> float:
        return max(peak.kinds.get(HOST, 0.0) for peak in self.peaks.values())

    @property
    def kinds(self) -> dict[str, float]:
        """Peak memory by kind, such as parameters or activations, in bytes."""
        return self.peaks[self.place].kinds


def estimate(
    workload: Workload, candidate: Candidate, cluster: Cluster, seq: int | None = None, full: bool = False
) -> Estimate:
    """Predict the memory and duration of one training step with the settings of `candidate` on `cluster`.

    Call it in a process of its own: it starts and ends fake process groups. Of a model with many equal blocks, two
    smaller ones run, and the result is extrapolated.

    Args:
        workload: What is trained.
        candidate: How it is trained.
        cluster: The devices.
        seq: Tokens of a sequence, in place of those of the workload.
        full: True to run all blocks.

    Raises:
        ConfigurationError: The model or the strategy cannot run on fake tensors. The message tells why.
    """
    loaded = loaded_of(workload)
    whole = loaded.blocks()
    if full or candidate.pp > 1 or candidate.kind.has_engine or whole < 2 * _MORE:
        return _estimate(workload, loaded, candidate, cluster, seq)
    few, more = (_estimate(workload, loaded.with_blocks(count), candidate, cluster, seq) for count in (_FEW, _MORE))
    return _extrapolated(few, more, (whole - _FEW) / (_MORE - _FEW))


def _estimate(workload: Workload, loaded: Loaded, candidate: Candidate, cluster: Cluster, seq: int | None) -> Estimate:
    steps = simulate(workload, candidate, seq, loaded)
    largest = max(steps, key=lambda step: step.peak)
    time = time_of(steps, cluster, candidate.pp, candidate.accumulation, candidate.offload)
    traffic: dict[str, tuple[float, float]] = {}
    for each in largest.collectives:
        where = " between machines" if crosses_machines(each, cluster) else ""
        count, size = traffic.get(each.operation + where, (0, 0))
        traffic[each.operation + where] = (count + 1, size + each.bytes)
    return Estimate(
        _peaks(largest, loaded),
        time.seconds,
        time.computing,
        time.waiting,
        traffic,
        largest.flops,
        largest.parameters,
        largest.checkpoint_bytes,
        seq or loaded.tokens(),
        _thinned(largest.timeline),
    )


def _thinned(timeline: list[tuple[str, str, dict[str, int]]]) -> tuple[tuple[str, str, dict[str, int]], ...]:
    # The largest of each few points stays, so that the peak does.
    few = max(1, math.ceil(len(timeline) / _SHOWN))
    parts = (timeline[at : at + few] for at in range(0, len(timeline), few))
    return tuple(max(part, key=lambda point: sum(point[2].values())) for part in parts)


def _peaks(step: Step, loaded: Loaded) -> dict[tuple[str, str], Peak]:
    names = loaded.names_of_blocks()  # that also exist in a model with more blocks, for `_extrapolated`
    found: dict[tuple[str, str], Peak] = {}
    for (phase, module), (size, kinds) in step.peaks.items():
        place = (phase, names.get(module, module))
        if place not in found or size > found[place].bytes:
            found[place] = Peak(size, dict(kinds))
    return found


def _extrapolated(few: Estimate, more: Estimate, factor: float) -> Estimate:
    # `few` and `more` are estimates of the model with fewer blocks, and `factor` leads to all its blocks.
    def line(first: float, second: float) -> float:
        return first + factor * (second - first)

    # The largest of several peaks is not linear in the number of blocks, but each peak is.
    peaks = {
        place: Peak(
            line(few.peaks[place].bytes, peak.bytes),
            {kind: max(0.0, line(few.peaks[place].kinds.get(kind, 0), size)) for kind, size in peak.kinds.items()},
        )
        for place, peak in more.peaks.items()
        if place in few.peaks
    }
    numbers = ("seconds", "computing", "waiting", "flops", "parameters", "checkpoint_bytes")
    traffic = {
        name: (line(few.traffic[name][0], count), line(few.traffic[name][1], size))
        for name, (count, size) in more.traffic.items()
    }
    values: dict[str, Any] = {name: max(0.0, line(getattr(few, name), getattr(more, name))) for name in numbers}
    return replace(more, peaks=peaks, traffic=traffic, **values)


def loaded_of(workload: Workload) -> Loaded:
    # A process builds each workload only once, since this takes long.
    key = repr(workload)
    if key not in _LOADED:
        _LOADED[key] = load(workload)
    return _LOADED[key]


def facts_of(workload: Workload) -> Facts:
    return loaded_of(workload).facts(workload.tp_plan)


def simulate(
    workload: Workload,
    candidate: Candidate,
    seq: int | None = None,
    loaded: Loaded | None = None,
    kernels: str = "cuda",
) -> list[Step]:
    # Returns the record of rank 0 and, with pipeline stages, that of the last rank.
    built = loaded or loaded_of(workload)
    ranks = [0] if candidate.pp == 1 else [0, candidate.world_size - 1]
    return [_on_rank(rank, workload, built, candidate, seq, kernels) for rank in ranks]


def _on_rank(
    rank: int, workload: Workload, loaded: Loaded, candidate: Candidate, seq: int | None, kernels: str
) -> Step:
    with fake_world(rank, candidate.world_size) as state:
        precision = resolve_precision(candidate.precision)
        precision.setup(state.kind)
        strategy = candidate.make(workload.tp_plan or "auto")
        strategy.setup(state)
        fake = None if workload.sample_inputs else FakeTensorMode(allow_non_fake_inputs=True)
        mode = nullcontext() if fake is None else fake
        recorder = Recorder(fake, OFFLOADED if candidate.offload else ())
        module = StepModule(copy.deepcopy(loaded.task))
        if candidate.kind.has_buckets:
            module.presence = nn.Parameter(torch.zeros((), device="meta"))  # as in `DDP.prepare`
        total = sum(each.numel() for each in module.parameters())
        casts: AbstractContextManager[Any] = nullcontext() if kernels == "cpu" else accelerator_casts()
        make = partial(_optimizer, loaded, candidate, kernels)
        batch = loaded.batch_of(candidate.batch, seq)
        buckets = None
        with _told(), alone() if candidate.kind.has_engine else nullcontext():
            if candidate.kind.has_engine:
                strategy.check(RunOptions(precision, Given("gradient_accumulation_steps", candidate.accumulation)))
                module = Placed(precision.convert(module.task))
                done = copy.copy(precision)
                done.convert = lambda model: model  # type: ignore[method-assign]  # see `Placed`
                with mode, recorder:
                    fill(module)
                    give_values(module, fake)
                    recorder.add([*module.parameters(), *module.buffers()], "parameters")
                    recorder.prepares = True
                    prepared, (optimizer,) = strategy.prepare(module, [make(module)], done, move=False)
                    recorder.prepares = False
                    recorder.add([getattr(each, "ds_tensor", None) for each in prepared.parameters()], "parameters")
            elif candidate.pp > 1:
                with mode:  # what is on the meta device belongs to other stages
                    fill(module)
                    give_values(module, fake)
                    prepared, _ = strategy.prepare(module, [], precision, move=False)
            else:
                prepared, _ = strategy.prepare(module, [], precision, move=False)
            with mode, recorder, casts:
                if candidate.pp == 1 and not candidate.kind.has_engine:
                    fill(prepared)
                    give_values(prepared, fake)
                recorder.add([*prepared.parameters(), *prepared.buffers()], "parameters")
                if not candidate.kind.has_engine:
                    optimizer = make(prepared)
                if candidate.kind.has_buckets and candidate.world_size > 1:
                    buckets = Buckets(prepared, recorder)
                run = _Steps(strategy, precision, prepared, recorder, optimizer, buckets)
                if candidate.pp > 1 or candidate.tp > 1 or candidate.kind.has_engine:
                    run.step([batch] * candidate.accumulation)  # it also allocates what is kept for the next ones
                else:
                    run.make_state()
                gc.collect()
                recorder.reset()
                run.step([batch] * candidate.accumulation)
        found = recorder.step
        found.parameters = total
        found.checkpoint_bytes = sum(recorder.by_kind[kind] for kind in ("parameters", "optimizer", HOST))
        return found


class Placed(StepModule):
    # Torch cannot convert modules of fake tensors (their mode holds weak references), and engines ask for it.
    def to(self, *_: Any, **__: Any) -> Placed:
        return self

    def bfloat16(self) -> Placed:
        return self

    def half(self) -> Placed:
        return self


@contextmanager
def alone() -> Iterator[None]:
    # DeepSpeed's ZeRO-3 receives a list from rank 0, but a fake process group sends nothing.
    utils: Any = importlib.import_module("deepspeed.runtime.zero.utils")
    from_first, utils.get_lst_from_rank0 = utils.get_lst_from_rank0, list
    try:
        yield
    finally:
        utils.get_lst_from_rank0 = from_first


def _optimizer(loaded: Loaded, candidate: Candidate, kernels: str, model: nn.Module) -> torch.optim.Optimizer:
    # Torch uses the `foreach` implementation on accelerators, so the estimate must, too.
    optimizer = loaded.make_optimizer([each for each in model.parameters() if each.requires_grad])
    for group in optimizer.param_groups:
        if kernels != "cpu" and candidate.tp == 1 and group.get("foreach", True) is None and not group.get("fused"):
            group["foreach"] = True
    return optimizer


@contextmanager
def fake_world(rank: int, size: int) -> Iterator[PartialState]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    before, observer.current = observer.current, _WithoutValues()
    if size > 1:
        # Collectives of this backend do nothing, so one process can act as any rank.
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    state = PartialState(cpu=True)
    try:
        yield state
    finally:
        observer.current = before
        if dist.is_initialized():
            state.destroy_process_group()
        forget_process()


@contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ConfigurationError(
            f"The model's forward depends on values, through {error.func}, which a plan does not have. Give a "
            "batch with values by --sample-inputs, or replace the operation, such as .item() or a mask of varying size."
        ) from error
    except UnsupportedOperatorException as error:
        raise ConfigurationError(
            f"The operator {error.func} has no fake kernel, so its result cannot be planned. Register one with "
            "torch.library.register_fake."
        ) from error
    except ConfigurationError:
        raise
    except Exception as error:
        text = str(error).strip().partition("\n")[0]
        raise ConfigurationError(
            f"A step on tensors without values failed in {place_of(error)}: {type(error).__name__}: {text}"
        ) from error


def fill(model: nn.Module) -> None:
    sharding.allocate(model)
    made: dict[int, Any] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:
                    made[id(parameter)] = _fake_parameter(parameter)
                module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                made.setdefault(id(buffer), torch.empty(buffer.shape, dtype=buffer.dtype))
                module._buffers[name] = made[id(buffer)]


def _fake_parameter(parameter: nn.Parameter) -> nn.Parameter:
    if isinstance(parameter, DTensor):
        if not parameter._local_tensor.is_meta:
            return parameter  # a shard of FSDP, which `allocate` has filled
        local = torch.empty(parameter._local_tensor.shape, dtype=parameter.dtype)
        whole: Tensor = DTensor.from_local(
            local,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
        return nn.Parameter(whole, requires_grad=parameter.requires_grad)
    return nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype), requires_grad=parameter.requires_grad)


def give_values(model: nn.Module, fake: FakeTensorMode | None = None) -> None:
    # Fake tensors have no memory for values.
    if fake is not None:
        return
    with torch.no_grad():
        for parameter in model.parameters():
            local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
            local.normal_(std=0.02)
        for buffer in model.buffers():
            buffer.zero_()


class _Steps:
    def __init__(
        self,
        strategy: Strategy,
        precision: Precision,
        model: nn.Module,
        recorder: Recorder,
        optimizer: torch.optim.Optimizer,
        buckets: Buckets | None,
    ) -> None:
        self._strategy, self._precision, self._model = strategy, precision, model
        self._recorder, self._optimizer, self._buckets = recorder, optimizer, buckets
        self._task = strategy.unwrap(model)
        recorder.parameters = [each for each in model.parameters() if each.requires_grad]

    def make_state(self) -> None:
        # Optimizers create their state in their first step.
        self._recorder.steps = True
        for parameter in self._recorder.parameters:
            parameter.grad = torch.zeros_like(parameter)
        self._end_of_step()

    def _end_of_step(self) -> None:
        self._recorder.steps = True
        self._strategy.optimizer_step(self._optimizer, self._precision)
        self._optimizer.zero_grad()
        self._recorder.add([list(state.values()) for state in self._optimizer.state.values()], "optimizer")

    def step(self, microbatches: list[Any]) -> None:
        view = self._strategy.view(self._model, "train")

        def run(batch: Any, probe: bool = False) -> Tensor:
            real = tree_map(_allocated, self._precision.convert_batch(batch))
            self._recorder.add(real, "inputs")
            with self._precision.forward_context():
                loss: Tensor = view(self._task.training_step, real)
            self._strategy.backward(self._precision.scale(loss))
            return loss.detach()

        if self._buckets is not None:
            self._buckets.begin(len(microbatches))
        self._recorder.steps = False
        with self._recorder.modules.of(self._task):
            outputs = self._strategy.forward_backward(self._model, run, microbatches)
        self._recorder.find_gradients()
        self._end_of_step()
        del outputs


_IN_FULL = {
    # https://docs.pytorch.org/docs/stable/amp.html#cuda-ops-that-can-autocast-to-float32
    *("acos", "asin", "cosh", "cdist", "cosine_similarity", "dist", "erfinv", "exp", "expm1"),
    *("__pow__", "__rdiv__", "__rpow__", "__rtruediv__", "group_norm", "kl_div", "l1_loss", "layer_norm", "log"),
    *("binary_cross_entropy_with_logits", "cosine_embedding_loss", "hinge_embedding_loss", "log10", "log1p", "log2"),
    *("margin_ranking_loss", "mse_loss", "multi_margin_loss", "multilabel_margin_loss", "nll_loss", "norm", "pdist"),
    *("poisson_nll_loss", "pow", "reciprocal", "renorm", "rsqrt", "sinh", "smooth_l1_loss", "soft_margin_loss"),
    *("softplus", "tan", "triplet_margin_loss"),
}
_RETURNS_FULL = {"cumprod", "cumsum", "log_softmax", "prod", "softmax", "softmin", "sum"}


class AcceleratorCasts(TorchFunctionMode):
    """Mode that lets CPU autocast compute in float32 where CUDA autocast would, to predict the memory of a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if func is functional.cross_entropy and torch.is_autocast_enabled("cpu"):
            return _cross_entropy(*args, **kwargs)
        if (name not in _IN_FULL and name not in _RETURNS_FULL) or not torch.is_autocast_enabled("cpu"):
            return func(*args, **kwargs)
        with torch.autocast("cpu", enabled=False):
            return func(*tree_map(_in_full, args), **tree_map(_in_full, kwargs))


@contextmanager
def accelerator_casts() -> Iterator[None]:
    # Torch's function modes do not reach into backward passes, which may recompute forward passes.
    entered: list[AcceleratorCasts] = []

    def enter(*_: Any) -> None:
        if is_backward():
            entered.append(AcceleratorCasts())
            entered[-1].__enter__()  # type: ignore[no-untyped-call]

    def leave(*_: Any) -> None:
        if entered and is_backward():
            entered.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    before = register_module_forward_pre_hook(enter)
    after = register_module_forward_hook(leave, always_call=True)
    try:
        with AcceleratorCasts():
            yield
    finally:
        before.remove()
        after.remove()


def _cross_entropy(input: Tensor, target: Tensor, weight: Tensor | None = None, *args: Any, **kwargs: Any) -> Tensor:
    if target.is_floating_point() or args or kwargs.get("label_smoothing"):
        return functional.cross_entropy(input, target, weight, *args, **kwargs)
    # As autocast on accelerators does: only the sum over classes is in float32.
    logs = functional.log_softmax(input, 1 if input.dim() > 1 else 0, dtype=input.dtype).float()
    return functional.nll_loss(logs, target, weight, **{k: v for k, v in kwargs.items() if k != "label_smoothing"})


def _in_full(value: Any) -> Any:
    halves = (torch.bfloat16, torch.float16)
    return value.float() if isinstance(value, Tensor) and value.dtype in halves else value


def _allocated(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.zeros(value.shape, dtype=value.dtype) if value.is_meta else value.clone()


class Buckets:
    """Simulated gradient buckets of DDP, which run one all-reduce whenever all gradients of a bucket are ready.

    Args:
        model: The prepared model.
        recorder: The recorder of the step.
    """

    def __init__(self, model: nn.Module, recorder: Recorder) -> None:
        self._recorder = recorder
        parameters = [each for each in model.parameters() if each.requires_grad]
        self._left: list[int] = []
        self._last = True
        self._buckets: list[Tensor] = []
        self._count: list[int] = []
        in_order: list[Tensor] = [*parameters[::-1]]
        groups, _ = dist._compute_bucket_assignment_by_size(in_order, [25 * 2**20])  # type: ignore[attr-defined]
        for number, group in enumerate(groups):
            chosen = [in_order[index] for index in group]
            bucket = torch.empty(sum(each.numel() for each in chosen), dtype=chosen[0].dtype)
            recorder.add(bucket, "gradients")
            self._buckets.append(bucket)
            self._count.append(len(chosen))
            start = 0
            for parameter in chosen:
                view = bucket[start : start + parameter.numel()].view(parameter.shape)
                start += parameter.numel()
                parameter.register_post_accumulate_grad_hook(self._hook(number, view))  # type: ignore[no-untyped-call]

    def begin(self, microbatches: int) -> None:
        self._left = [count * microbatches for count in self._count]

    def _hook(self, number: int, view: Tensor) -> Any:
        def ready(parameter: Tensor) -> None:
            if parameter.grad is not None and parameter.grad.untyped_storage()._cdata != view.untyped_storage()._cdata:
                parameter.grad = view.copy_(parameter.grad)
            self._left[number] -= 1
            if not self._left[number]:
                dist.all_reduce(self._buckets[number])

        return ready
