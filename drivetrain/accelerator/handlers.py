"""Small option holders under Accelerate's names, for scripts that move over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any, TypeVar

from drivetrain.accelerator.fp8_handlers import (
    AORecipeKwargs,
    FP8Handler,
    FP8RecipeKwargs,
    MSAMPRecipeKwargs,
    TERecipeKwargs,
)
from drivetrain.runtime.errors import ConfigurationError

Handler = TypeVar("Handler")


@dataclass
class DistributedDataParallelKwargs:
    """Options of the DDP strategy; see `drivetrain.DDP`, which `Accelerator(strategy=DDP(...))` takes directly.

    `comm_hook` is `"no"`, `"fp16"`, `"bf16"` or `"power_sgd"`.
    """

    broadcast_buffers: bool = True
    bucket_cap_mb: float = 25
    find_unused_parameters: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: str | None = None
    comm_state_option: dict[str, Any] | None = None

    def strategy_options(self) -> dict[str, Any]:
        """The same as arguments of `drivetrain.DDP`."""
        hooks = {"no": None, "power_sgd": "powersgd"}
        return {
            "broadcast_buffers": self.broadcast_buffers,
            "bucket_cap_mb": self.bucket_cap_mb,
            "find_unused_parameters": self.find_unused_parameters,
            "gradient_as_bucket_view": self.gradient_as_bucket_view,
            "static_graph": self.static_graph,
            "comm_hook": hooks.get(self.comm_hook or "no", self.comm_hook),
            "comm_hook_options": self.comm_state_option,
        }


@dataclass
class GradScalerKwargs:
    """Options of the loss scale under `"fp16"`."""

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True


@dataclass
class InitProcessGroupKwargs:
    """Options of the process group.

    Attributes:
        backend: Overrides the device's own backend.
        timeout: How long a collective may wait for a peer.
    """

    backend: str | None = None
    timeout: timedelta | None = None


@dataclass
class AutocastKwargs:
    """Options of autocast under the mixed precisions."""

    enabled: bool = True
    cache_enabled: bool = True


@dataclass
class GradientAccumulationPlugin:
    """How gradients are accumulated.

    Attributes:
        num_steps: Micro-batches per optimizer step.
        adjust_scheduler: Accepted for scripts that move over; a prepared scheduler steps where its optimizer does.
        sync_with_dataloader: Whether the last batch of a loader always ends a window.
        sync_each_batch: Reduce gradients over processes in each micro-batch, which saves memory under sharding.
    """

    num_steps: int = 1
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.num_steps, int) or self.num_steps < 1:
            raise ConfigurationError(
                f"gradient accumulation needs a whole number of micro-batches of at least 1, got {self.num_steps!r}."
            )


@dataclass
class ProjectConfiguration:
    """Where a run writes.

    Attributes:
        project_dir: The run's directory.
        logging_dir: Where trackers write; `project_dir` if None.
        automatic_checkpoint_naming: Let `save_state()` number its checkpoints under `project_dir/checkpoints`.
        total_limit: How many of those to keep, the latest ones.
        iteration: The number of the next one.
    """

    project_dir: str | None = None
    logging_dir: str | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0

    def __post_init__(self) -> None:
        if self.total_limit is not None and self.total_limit < 1:
            raise ConfigurationError(f"total_limit={self.total_limit!r}: keep at least 1 checkpoint, or None for all.")
        self.logging_dir = self.logging_dir or self.project_dir


HANDLER_TYPES = (
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    AutocastKwargs,
    AORecipeKwargs,
    TERecipeKwargs,
    MSAMPRecipeKwargs,
    FP8RecipeKwargs,
)


def check_handlers(handlers: Sequence[Any]) -> None:
    """Raise on an unknown handler, or on two of one kind."""
    for index, handler in enumerate(handlers):
        if not isinstance(handler, HANDLER_TYPES):
            raise ConfigurationError(
                f"kwargs_handlers holds a {type(handler).__name__}; "
                f"allowed: {', '.join(kind.__name__ for kind in HANDLER_TYPES)}."
            )
        if any(type(handler) is type(other) for other in handlers[:index]):
            raise ConfigurationError(f"kwargs_handlers holds two {type(handler).__name__}; give one.")
    recipes = [type(handler).__name__ for handler in handlers if isinstance(handler, FP8Handler)]
    if len(recipes) > 1:
        raise ConfigurationError(f"kwargs_handlers holds {' and '.join(recipes)}, recipes for 'fp8' both; give one.")


def find_handler(handlers: Sequence[Any], kind: type[Handler]) -> Handler | None:
    """The handler of one kind, if it was given."""
    return next((handler for handler in handlers if isinstance(handler, kind)), None)


def handler_options(handler: Any) -> dict[str, Any]:
    """A handler's fields as keyword arguments; nothing for None."""
    return {} if handler is None else {field.name: getattr(handler, field.name) for field in fields(handler)}
