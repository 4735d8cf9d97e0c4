"""The options of `Megatron`, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from drivetrain.runtime.errors import ConfigurationError, nearest
from drivetrain.strategies.parallel.mesh import MeshPlace, MeshSizes

RECOMPUTE = ("selective", "full")


@dataclass(frozen=True)
class MegatronOptions:
    """What was asked for; see `Megatron`.

    Raises:
        ConfigurationError: An option cannot be.
    """

    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    virtual_pipeline: int | None = None
    context_parallel: int = 1
    expert_parallel: int = 1
    expert_tensor_parallel: int | None = None
    sequence_parallel: bool = False
    distributed_optimizer: bool = True
    recompute: str | None = None
    gradient_clipping: float | None = None
    gradient_accumulation_steps: int | None = None
    transformer: Mapping[str, Any] = field(default_factory=dict)
    ddp: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel"):
            _check_size(name, getattr(self, name))
        for name in ("virtual_pipeline", "expert_tensor_parallel"):
            if getattr(self, name) is not None:
                _check_size(name, getattr(self, name))
        if (self.virtual_pipeline or 1) > 1 and self.pipeline_parallel == 1:
            raise ConfigurationError(
                f"virtual_pipeline={self.virtual_pipeline} interleaves the stages of a pipeline, but "
                "pipeline_parallel=1. Set pipeline_parallel to 2 or more, or leave virtual_pipeline out.",
                code="DT-005",
            )
        if self.sequence_parallel and self.tensor_parallel == 1:
            raise ConfigurationError(
                "sequence_parallel=True shards activations over tensor-parallel processes, but tensor_parallel=1. "
                "Set tensor_parallel to 2 or more, or leave sequence_parallel out.",
                code="DT-005",
            )
        if self.recompute is not None and self.recompute not in RECOMPUTE:
            raise ConfigurationError(
                f"recompute={self.recompute!r}: allowed are None, 'selective' (attention only) and 'full' (whole "
                f"layers).{nearest(str(self.recompute), RECOMPUTE)}",
                code="DT-001",
            )

    @property
    def chunks(self) -> int:
        """Parts of the model that each process holds: more than one where stages are interleaved."""
        return self.virtual_pipeline or 1

    def place(self, rank: int, world_size: int) -> MeshPlace:
        """A process's place in the grid, whose order is megatron-core's: tensor parallel ranks are neighbours.

        Args:
            rank: Its global rank.
            world_size: Number of processes of the run.

        Raises:
            ConfigurationError: The sizes do not fit the number of processes.
        """
        needed = self.tensor_parallel * self.pipeline_parallel * self.context_parallel
        if world_size % needed:
            raise ConfigurationError(
                f"{self.asked} needs a multiple of {needed} processes, but there are {world_size}. Start "
                f"{_near_multiples(world_size, needed)}, or choose sizes whose product is one of "
                f"{_listed(factors(world_size))}.",
                code="DT-041",
            )
        data = world_size // needed
        expert_tensor = self.expert_tensor_parallel or self.tensor_parallel
        per_stage = world_size // self.pipeline_parallel
        if per_stage % (self.expert_parallel * expert_tensor):
            raise ConfigurationError(
                f"expert_parallel={self.expert_parallel} with {expert_tensor} tensor-parallel processes for each "
                f"expert does not fit the {per_stage} processes of a pipeline stage. expert_parallel can be "
                f"{_listed(factors(per_stage // expert_tensor))}.",
                code="DT-041",
            )
        sizes = MeshSizes(dp_shard=data, tp=self.tensor_parallel, cp=self.context_parallel, pp=self.pipeline_parallel)
        return MeshPlace(sizes, rank)

    @property
    def asked(self) -> str:
        """The sizes above 1, as they were given."""
        names = ("tensor_parallel", "pipeline_parallel", "context_parallel")
        return " x ".join(f"{name}={getattr(self, name)}" for name in names if getattr(self, name) > 1) or "Megatron()"


def factors(number: int) -> list[int]:
    """The numbers that a number is a multiple of, smallest first."""
    return [each for each in range(1, number + 1) if number % each == 0]


def check_fits(what: str, size: int, argument: str, parts: int) -> None:
    """Raise where a size of the model is no multiple of the processes that share it.

    Args:
        what: The size, such as `"num_attention_heads"`.
        size: Its value.
        argument: What it is shared by, as it was given, such as `"tensor_parallel"`.
        parts: How many parts that makes.

    Raises:
        ConfigurationError: Names what would fit.
    """
    if size % parts:
        fits = [each for each in factors(size) if each <= max(2 * parts, 16)]
        raise ConfigurationError(
            f"{what}={size} is no multiple of {argument}, {parts}. {argument} can be {_listed(fits)}; or set {what} to "
            f"{_near_multiples(size, parts)}.",
            code="DT-042",
        )


def _near_multiples(number: int, of: int) -> str:
    below = number // of * of
    return f"{below} or {below + of}" if below else str(of)


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:-1])) + f" or {numbers[-1]}" if len(numbers) > 1 else str(numbers[0])


def _check_size(name: str, size: Any) -> None:
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ConfigurationError(f"{name} must be a whole number of at least 1, got {size!r}.", code="DT-002")
