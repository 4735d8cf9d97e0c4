"""Small option holders under Accelerate's names, for scripts that move over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from datetime import timedelta
from enum import Enum
from typing import Any, TypeVar

import torch

from drivetrain.accelerator.fp8_handlers import (
    AORecipeKwargs,
    FP8Handler,
    FP8RecipeKwargs,
    MSAMPRecipeKwargs,
    TERecipeKwargs,
)
from drivetrain.runtime.errors import ConfigurationError

Handler = TypeVar("Handler")


class DDPCommunicationHookType(str, Enum):
    """What DDP sends in place of the gradients, in Accelerate's words."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


@dataclass
class DistributedDataParallelKwargs:
    """Options of the DDP strategy; see `drivetrain.DDP`, which `Accelerator(strategy=DDP(...))` takes directly.

    Attributes:
        dim: Accepted; batches are never scattered here.
        check_reduction: Accepted; reductions are always checked.
        comm_hook: A member of `DDPCommunicationHookType`, or its value.
        comm_wrapper: `"fp16"` or `"bf16"`: what `comm_hook` sends is compressed further.
        comm_state_option: Arguments of the PowerSGD state.
    """

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: float = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: DDPCommunicationHookType | str | None = DDPCommunicationHookType.NO
    comm_wrapper: DDPCommunicationHookType | str | None = DDPCommunicationHookType.NO
    comm_state_option: dict[str, Any] = field(default_factory=dict)

    def strategy_options(self) -> dict[str, Any]:
        """The same as arguments of `drivetrain.DDP`."""
        return {
            "broadcast_buffers": self.broadcast_buffers,
            "bucket_cap_mb": self.bucket_cap_mb,
            "find_unused_parameters": self.find_unused_parameters,
            "gradient_as_bucket_view": self.gradient_as_bucket_view,
            "static_graph": self.static_graph,
            "comm_hook": _hook_named(self.comm_hook),
            "comm_wrapper": _hook_named(self.comm_wrapper),
            "comm_hook_options": self.comm_state_option,
        }


def _hook_named(given: DDPCommunicationHookType | str | None) -> str | None:
    """Accelerate's word for a hook in ours."""
    name = given.value if isinstance(given, Enum) else given
    return {None: None, "no": None, "power_sgd": "powersgd", "batched_power_sgd": "batched_powersgd"}.get(name, name)


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
        init_method: Accepted as None or `"env://"`: the processes meet where the launcher makes them meet.
        timeout: How long a collective may wait for a peer.

    Raises:
        ConfigurationError: Another `init_method` is given.
    """

    backend: str | None = None
    init_method: str | None = None
    timeout: timedelta | None = None

    def __post_init__(self) -> None:
        if self.init_method not in (None, "env://"):
            raise ConfigurationError(
                f"init_method={self.init_method!r}: the processes meet where the launcher says (MASTER_ADDR and "
                "MASTER_PORT). Leave it out, or call torch.distributed.init_process_group before anything of this.",
                code="DT-008",
            )


@dataclass
class AutocastKwargs:
    """Options of autocast under the mixed precisions."""

    enabled: bool = True
    cache_enabled: bool = True


@dataclass
class ProfileKwargs:
    """Options of `Accelerator.profile`, those of `torch.profiler.profile`.

    Attributes:
        activities: Names of what is recorded, such as `["cpu", "cuda"]`; what the machine has if None.
        schedule_option: Arguments of `torch.profiler.schedule`; the loop then calls the profiler's `step`.
        on_trace_ready: Called with the profiler whenever a cycle of the schedule has ended.
        record_shapes: Record the shapes of inputs.
        profile_memory: Record what is allocated.
        with_stack: Record source lines.
        with_flops: Estimate floating-point operations.
        with_modules: Record the modules that operators are called in.
        output_trace_dir: Where each process writes its trace for Chrome.
    """

    activities: list[str] | None = None
    schedule_option: dict[str, int] | None = None
    on_trace_ready: Callable[..., Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | None = None

    def build(self) -> torch.profiler.profile:
        """The profiler.

        Raises:
            ConfigurationError: An activity is not known.
        """
        known = {name.lower(): member for name, member in torch.profiler.ProfilerActivity.__members__.items()}
        unknown = [name for name in self.activities or [] if name not in known]
        if unknown:
            raise ConfigurationError(f"Unknown activities {unknown}. Allowed: {', '.join(known)}.", code="DT-001")
        return torch.profiler.profile(
            activities=None if self.activities is None else [known[name] for name in self.activities],
            schedule=None if self.schedule_option is None else torch.profiler.schedule(**self.schedule_option),
            on_trace_ready=self.on_trace_ready,
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
            with_flops=self.with_flops,
            with_modules=self.with_modules,
        )


@dataclass
class GradientAccumulationPlugin:
    """How gradients are accumulated.

    Attributes:
        num_steps: Micro-batches per optimizer step.
        adjust_scheduler: Accepted for scripts that move over; a prepared scheduler steps where its optimizer does.
        sync_with_dataloader: Whether the last batch of a loader always ends a window.
        sync_each_batch: Reduce gradients over processes in each micro-batch, which saves memory under sharding.
        average_short_window: Whether a last window with fewer micro-batches than `num_steps` is normalised by what it
            holds; False normalises by `num_steps` also there, as Accelerate does.
    """

    num_steps: int = 1
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False
    average_short_window: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.num_steps, int) or self.num_steps < 1:
            raise ConfigurationError(
                f"gradient accumulation needs a whole number of micro-batches of at least 1, got {self.num_steps!r}.",
                code="DT-002",
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
        save_on_each_node: Write `Accelerator.save` and `save_model` on each machine, where machines share no disk.
    """

    project_dir: str | None = None
    logging_dir: str | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False

    def __post_init__(self) -> None:
        if self.total_limit is not None and self.total_limit < 1:
            raise ConfigurationError(
                f"total_limit={self.total_limit!r}: keep at least 1 checkpoint, or None for all.", code="DT-002"
            )
        self.set_directories()

    def set_directories(self, project_dir: str | None = None) -> None:
        """Set `project_dir`, and `logging_dir` where it was left open."""
        self.project_dir = project_dir or self.project_dir
        self.logging_dir = self.logging_dir or self.project_dir


HANDLER_TYPES = (
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    AutocastKwargs,
    ProfileKwargs,
    AORecipeKwargs,
    TERecipeKwargs,
    MSAMPRecipeKwargs,
    FP8RecipeKwargs,
)


def checked_handlers(given: Sequence[Any] | None) -> list[Any]:
    """The handlers given; raises on an unknown one, or on two of one kind."""
    handlers = list(given or [])
    for index, handler in enumerate(handlers):
        if not isinstance(handler, HANDLER_TYPES):
            raise ConfigurationError(
                f"kwargs_handlers holds a {type(handler).__name__}; "
                f"allowed: {', '.join(kind.__name__ for kind in HANDLER_TYPES)}.",
                code="DT-003",
            )
        if any(type(handler) is type(other) for other in handlers[:index]):
            raise ConfigurationError(f"kwargs_handlers holds two {type(handler).__name__}; give one.", code="DT-004")
    recipes = [type(handler).__name__ for handler in handlers if isinstance(handler, FP8Handler)]
    if len(recipes) > 1:
        raise ConfigurationError(
            f"kwargs_handlers holds {' and '.join(recipes)}, recipes for 'fp8' both; give one.", code="DT-004"
        )
    return handlers


def find_handler(handlers: Sequence[Any], kind: type[Handler]) -> Handler | None:
    """The handler of one kind, if it was given."""
    return next((handler for handler in handlers if isinstance(handler, kind)), None)


def process_options(handler: InitProcessGroupKwargs | None) -> dict[str, Any]:
    """What `PartialState` takes of the options of the process group."""
    return {} if handler is None else {"backend": handler.backend, "timeout": handler.timeout}


def handler_options(handler: Any) -> dict[str, Any]:
    """A handler's fields as keyword arguments; nothing for None."""
    return {} if handler is None else {field.name: getattr(handler, field.name) for field in fields(handler)}
