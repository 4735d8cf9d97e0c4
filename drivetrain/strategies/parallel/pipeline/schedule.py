"""Pipeline schedules of `torch.distributed.pipelining`: the order in which stages run micro-batches."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining.stage import _PipelineStageBase, _RecvInfo

from drivetrain.runtime.errors import ConfigurationError, nearest
from drivetrain.runtime.logging import get_logger
from drivetrain.strategies.parallel.pipeline.split import Route, TensorShape

try:
    from torch.distributed.pipelining._utils import _TensorMeta
except ImportError as error:  # the interface of stages has changed between releases
    raise ConfigurationError(f"Pipeline parallelism needs torch 2.13 or newer; this is {torch.__version__}.") from error

logger = get_logger(__name__)


@dataclass(frozen=True)
class ScheduleKind:
    """Pipeline schedule of torch, with the number of stages per process that it supports.

    Attributes:
        name: Value of the option `pp_schedule`.
        torch_name: Name of the class in `torch.distributed.pipelining.schedules`.
        stages: Default number of stages on each process.
        allowed: Supported numbers of stages on each process. None allows any.
        folded: True if stages are placed in a V, so that the first process holds the first and the last stage.
    """

    name: str
    torch_name: str
    stages: int = 1
    allowed: tuple[int, ...] | None = (1,)
    folded: bool = False


SCHEDULES = {
    kind.name: kind
    for kind in (
        ScheduleKind("gpipe", "ScheduleGPipe"),
        ScheduleKind("1f1b", "Schedule1F1B"),
        ScheduleKind("looped_bfs", "ScheduleLoopedBFS", 2, None),
        ScheduleKind("interleaved_1f1b", "ScheduleInterleaved1F1B", 2, None),
        ScheduleKind("interleaved_zero_bubble", "ScheduleInterleavedZeroBubble", 2, None),
        ScheduleKind("zbv_zero_bubble", "ScheduleZBVZeroBubble", 2, (2,), folded=True),
    )
}


def schedule_kind(name: str, stages: int | None) -> tuple[ScheduleKind, int]:
    # The schedule, and its number of stages on each process.
    plain = {key.replace("_", ""): kind for key, kind in SCHEDULES.items()}
    kind = plain.get(name.lower().replace("_", "").replace("-", ""))
    if kind is None:
        raise ConfigurationError(
            f"Unknown pp_schedule {name!r}. Allowed: {', '.join(SCHEDULES)}.{nearest(name, SCHEDULES)}"
        )
    count = kind.stages if stages is None else stages
    if count < 1 or (kind.allowed is not None and count not in kind.allowed):
        allowed = "at least 1" if kind.allowed is None else " or ".join(map(str, kind.allowed))
        raise ConfigurationError(
            f"pp_schedule={kind.name!r} supports {allowed} stage(s) on each process, got pp_stages_per_rank={stages}.",
        )
    return kind, count


def rank_of_stage(kind: ScheduleKind, stage: int, ranks: int) -> int:
    # In a V, every second round passes through the processes in reverse.
    turn, place = divmod(stage, ranks)
    return ranks - 1 - place if kind.folded and turn % 2 else place


class ScheduledStage(_PipelineStageBase):
    """Pipeline stage for torch's schedules that supports micro-batches of different shapes."""

    def __init__(
        self, module: nn.Module, stage: int, count: int, device: torch.device, group: dist.ProcessGroup | None
    ) -> None:
        super().__init__(module, stage, count, device, group)
        self._inputs: list[tuple[Any, ...]] = []
        self._outputs: list[tuple[Any, ...]] = []

    def expect(self, routes: Sequence[Route]) -> None:
        self._inputs = [_metas(route, self.stage_index) for route in routes]
        # The last stage hands a loss to its schedule; its shape does not matter.
        last = (_meta(TensorShape((), torch.float32)),)
        self._outputs = [last if self.is_last else _metas(route, self.stage_index + 1) for route in routes]
        self.chunks = len(routes)
        self.grad_send_info = None
        self.act_send_info = {
            index: [] if self.is_last else [self.stage_index + 1] for index in range(len(self._outputs[0]))
        }
        self.args_recv_info = {
            chunk: tuple(self._receives(meta, self.stage_index - 1) for meta in metas)
            for chunk, metas in enumerate(self._inputs)
        }
        self.grad_recv_info = {
            chunk: () if self.is_last else tuple(self._receives(_gradient(m), self.stage_index + 1) for m in metas)
            for chunk, metas in enumerate(self._outputs)
        }
        self._stage_meta.inputs = self._inputs[0]
        self._stage_meta.outputs = self._outputs[0]

    def _receives(self, meta: Any, source: int) -> Any:
        if meta is None:
            return _RecvInfo(f"none_from_{source}", source, None, None)
        held = self._is_local(source)
        buffer = None if held else torch.empty(meta.shape, dtype=meta.dtype, device=self.device)
        return _RecvInfo(f"from_{source}", source, buffer, meta)

    def _is_local(self, stage: int) -> bool:
        return self.stage_index_to_group_rank[stage] == self.group_rank

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        # Torch would use the shapes of the first micro-batch for all.
        if self._inputs:
            self._stage_meta.input_grads = tuple(_gradient(meta) for meta in self._inputs[bwd_chunk_id])
        return super().get_bwd_send_ops(bwd_chunk_id)

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int) -> None:
        # The next stage is on this process, and has no gradient for an input that it does not use.
        shapes = self._outputs[mb_index]
        filled = tuple(
            torch.zeros(meta.shape, dtype=meta.dtype, device=self.device)
            if gradient is None and meta.requires_grad
            else gradient
            for gradient, meta in zip(next_stage_bwd_outputs, shapes, strict=True)
        )
        super().set_local_bwd_input(filled, mb_index)

    def _prepare_forward_infra(
        self, *args: Any, **kwargs: Any
    ) -> None: ...  # torch would exchange tensor shapes here, but `expect` has already set them

    def _prepare_backward_infra(
        self, *args: Any, **kwargs: Any
    ) -> None: ...  # torch would exchange tensor shapes here, but `expect` has already set them

    def _create_grad_recv_info(self, act_send_info: Any) -> Any:
        return ()

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        # Neighbouring stages on one process need no connection.
        operations = super()._get_init_p2p_neighbors_ops()
        return [operation for operation in operations if operation.group_peer != self.group_rank]


def _metas(route: Route, stage: int) -> tuple[Any, ...]:
    return tuple(_meta(tensor) for tensor in route.cuts[stage].tensors) if stage else ()


def _meta(tensor: TensorShape) -> Any:
    # Every floating-point tensor gets a gradient, because other processes' frozen parameters are not known.
    stride = torch.empty(tensor.shape, device="meta").stride()
    return _TensorMeta(torch.Size(tensor.shape), stride, tensor.dtype, tensor.dtype.is_floating_point)


def _gradient(meta: Any) -> Any:
    return _TensorMeta(meta.shape, meta.stride, meta.dtype, False) if meta.requires_grad else None


class Scheduler:
    """Executor of one of torch's pipeline schedules, which runs the micro-batches of a training step."""

    def __init__(self, kind: ScheduleKind, stages: Sequence[ScheduledStage]) -> None:
        self._kind = kind
        self._stages = list(stages)
        self._schedules: dict[int, Any] = {}
        self._expected: list[Route] = []
        self._has_warned = False

    def run(self, routes: Sequence[Route], arguments: Sequence[dict[str, Any]]) -> None:
        schedule = self._schedule(len(routes))
        # Buffers are reused as long as the shapes stay the same.
        if [id(route) for route in self._expected] != [id(route) for route in routes]:
            for stage in self._stages:
                stage.expect(routes)
            self._expected = list(routes)
        for stage in self._stages:
            stage.has_backward = True
            stage.clear_runtime_states()
        try:
            with _quiet():
                schedule._step_microbatches(
                    [()] * len(routes), list(arguments), [None] * len(routes), return_outputs=False
                )
        except RuntimeError as error:
            self._schedules.clear()
            self._expected = []
            raise _first_cause(error) from None
        except BaseException:
            self._schedules.clear()
            self._expected = []
            raise

    def _schedule(self, count: int) -> Any:
        if count not in self._schedules:
            self._schedules[count] = self._make(count)
        return self._schedules[count]

    def _make(self, count: int) -> Any:
        options: dict[str, Any] = {"loss_fn": _loss, "scale_grads": False}
        single = self._kind.allowed == (1,)
        if single:
            # With fewer micro-batches than stages, 1F1B has no steady state, and its order is that of GPipe.
            few = self._kind.name == "1f1b" and count < self._stages[0].num_stages
            name = "ScheduleGPipe" if few else self._kind.torch_name
            return getattr(torch_schedules, name)(self._stages[0], count, **options)
        name = self._kind.torch_name
        ranks = self._stages[0].group_size
        rounds = max(1, count // ranks)
        if "Interleaved" in name and count % rounds:
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    f"pp_schedule={self._kind.name!r} cannot run {count} micro-batches over {ranks} processes, "
                    f"because it needs a multiple of {rounds}. These steps run as 'looped_bfs'. Make "
                    "accumulate_grad_batches a multiple of pp."
                )
            name = "ScheduleLoopedBFS"
        return getattr(torch_schedules, name)(self._stages, count, **options)


def _loss(output: Tensor, target: Any) -> Tensor:
    # Torch's schedules need a loss function, but the last stage already returns the loss.
    return output


@contextmanager
def _quiet() -> Iterator[None]:
    # It prints the full schedule at every failure.
    noisy = logging.getLogger(torch_schedules.__name__)
    before = noisy.disabled
    noisy.disabled = True
    try:
        yield
    finally:
        noisy.disabled = before


def _first_cause(error: BaseException) -> BaseException:
    # Torch's pipeline wraps an error of the model in errors of its own.
    wrapped = ("failed to run forward", "Failed to run stage backward")
    while isinstance(error, RuntimeError) and error.__cause__ is not None and any(w in str(error) for w in wrapped):
        error = error.__cause__
    return error


# The options of a pipeline, checked, and the places of its processes


@dataclass(frozen=True)
class PipelineOptions:
    """Options of pipeline parallelism, which `Parallel` accepts with the prefix `pp_`.

    Attributes:
        module: Name of the submodule that is split. None selects the one with most parameters.
        split: Names of the modules at which stages 1, 2, ... begin. `"auto"` chooses them by size.
        place: Stages of modules or parameters, by name, that differ from the order of registration.
        schedule: Name of the schedule.
        stages_per_rank: Number of stages on each process. None uses the schedule's default.
    """

    module: str | None = None
    split: str | Sequence[str] = "auto"
    place: Mapping[str, int] | None = None
    schedule: str = "1f1b"
    stages_per_rank: int | None = None

    @classmethod
    def from_arguments(cls, given: Mapping[str, Any]) -> PipelineOptions:
        # `given` has the arguments of `Parallel` without their prefix `pp_`.
        allowed = [f"pp_{field.name}" for field in fields(cls)]
        for name in given:
            if f"pp_{name}" not in allowed:
                raise ConfigurationError(
                    f"A pipeline has no option pp_{name}. Allowed: {', '.join(allowed)}."
                    f"{nearest(f'pp_{name}', allowed)}",
                )
        return cls(**given)

    def __post_init__(self) -> None:
        if isinstance(self.split, str) and self.split != "auto":
            raise ConfigurationError(f"pp_split must be 'auto' or a list of module names, got {self.split!r}.")

    def stages_among(self, ranks: int) -> StageRanks:
        kind, per_rank = schedule_kind(self.schedule, self.stages_per_rank)
        stages = StageRanks(kind, per_rank, ranks)
        if self.split != "auto" and len(self.split) + 1 != stages.count:
            raise ConfigurationError(
                f"pp_split names {len(self.split)} modules, which makes {len(self.split) + 1} stages, but pp={ranks} "
                f"x {per_rank} stages on each process is {stages.count}.",
            )
        return stages


@dataclass(frozen=True)
class StageRanks:
    # Which of the `ranks` processes holds which stage, of which each holds `per_rank`.

    kind: ScheduleKind
    per_rank: int
    ranks: int

    @property
    def count(self) -> int:
        return self.ranks * self.per_rank

    @property
    def all(self) -> list[int]:
        return [self.rank_of(stage) for stage in range(self.count)]

    @property
    def last(self) -> int:
        return self.rank_of(self.count - 1)

    def rank_of(self, stage: int) -> int:
        """Return the rank within the pipeline of the process that holds a stage."""
        return rank_of_stage(self.kind, stage, self.ranks)

    def held_by(self, rank: int) -> list[int]:
        return [stage for stage in range(self.count) if self.rank_of(stage) == rank]


@dataclass(frozen=True)
class PipelineGroup:
    """Process group of a pipeline, with this process's rank and the assignment of stages to ranks."""

    group: dist.ProcessGroup
    rank: int
    stages: StageRanks

    @property
    def own(self) -> list[int]:
        return self.stages.held_by(self.rank)

    def holds(self, stage: int) -> bool:
        return self.stages.rank_of(stage) == self.rank
