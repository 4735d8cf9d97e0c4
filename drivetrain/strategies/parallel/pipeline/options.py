"""The options of a pipeline, checked, and the places of its processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch.distributed as dist

from drivetrain.runtime.errors import ConfigurationError, nearest
from drivetrain.strategies.parallel.pipeline.schedule import ScheduleKind, rank_of_stage, schedule_kind


@dataclass(frozen=True)
class PipelineOptions:
    """What a pipeline was asked for.

    Args:
        module: Name of the module that is spread over stages, "" for the task itself; None for the child that holds
            most parameters.
        split: Names of the modules that stages begin with, relative to that module; `"auto"` spreads the blocks of
            its largest `ModuleList` or `Sequential` evenly by number of parameters.
        place: Stages of modules or parameters that are registered elsewhere than where the forward uses them.
        schedule: `"gpipe"`, `"1f1b"`, `"looped_bfs"`, `"interleaved_1f1b"`, `"interleaved_zero_bubble"` or
            `"zbv_zero_bubble"`.
        stages_per_rank: Stages of each process; by default 1, and 2 for the schedules after `"1f1b"`.

    Raises:
        ConfigurationError: An option cannot be.
    """

    module: str | None = None
    split: str | Sequence[str] = "auto"
    place: Mapping[str, int] | None = None
    schedule: str = "1f1b"
    stages_per_rank: int | None = None

    @classmethod
    def from_arguments(cls, given: Mapping[str, Any]) -> PipelineOptions:
        """Make them from arguments of `Parallel`, without their `pp_`."""
        allowed = [f"pp_{field.name}" for field in fields(cls)]
        for name in given:
            if f"pp_{name}" not in allowed:
                raise ConfigurationError(
                    f"A pipeline has no option pp_{name}. Allowed: {', '.join(allowed)}."
                    f"{nearest(f'pp_{name}', allowed)}",
                    code="DT-006",
                )
        return cls(**given)

    def __post_init__(self) -> None:
        if isinstance(self.split, str) and self.split != "auto":
            raise ConfigurationError(
                f"pp_split must be 'auto' or a list of module names, got {self.split!r}.", code="DT-003"
            )

    def stages_among(self, ranks: int) -> StageRanks:
        """How stages are spread over processes.

        Args:
            ranks: Processes of the pipeline.

        Raises:
            ConfigurationError: The schedule cannot run so many stages, or `split` names another number of them.
        """
        kind, per_rank = schedule_kind(self.schedule, self.stages_per_rank)
        stages = StageRanks(kind, per_rank, ranks)
        if self.split != "auto" and len(self.split) + 1 != stages.count:
            raise ConfigurationError(
                f"pp_split names {len(self.split)} modules, which makes {len(self.split) + 1} stages, but pp={ranks} x "
                f"{per_rank} stages on each process are {stages.count}.",
                code="DT-059",
            )
        return stages


@dataclass(frozen=True)
class StageRanks:
    """Which process of a pipeline holds which stages.

    Args:
        kind: The schedule.
        per_rank: Stages of each process.
        ranks: How many processes there are.
    """

    kind: ScheduleKind
    per_rank: int
    ranks: int

    @property
    def count(self) -> int:
        """How many stages there are."""
        return self.ranks * self.per_rank

    @property
    def all(self) -> list[int]:
        """For each stage, the process that holds it."""
        return [self.rank_of(stage) for stage in range(self.count)]

    @property
    def last(self) -> int:
        """The process with the last stage, which computes losses."""
        return self.rank_of(self.count - 1)

    def rank_of(self, stage: int) -> int:
        """The process that holds a stage."""
        return rank_of_stage(self.kind, stage, self.ranks)

    def held_by(self, rank: int) -> list[int]:
        """The stages that a process holds."""
        return [stage for stage in range(self.count) if self.rank_of(stage) == rank]


@dataclass(frozen=True)
class PipelineGroup:
    """This process among those of its pipeline.

    Args:
        group: The processes.
        rank: This one's number among them.
        stages: Which stages each of them holds.
    """

    group: dist.ProcessGroup
    rank: int
    stages: StageRanks

    @property
    def own(self) -> list[int]:
        """The stages that this process holds."""
        return self.stages.held_by(self.rank)

    def holds(self, stage: int) -> bool:
        """Whether this process holds a stage."""
        return self.stages.rank_of(stage) == self.rank
