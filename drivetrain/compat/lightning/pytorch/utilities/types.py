"""Types for annotations of hooks and steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Optional, TypeAlias, TypedDict, Union

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from drivetrain.trainer.optimizers import SchedulerConfig

LRSchedulerConfig = SchedulerConfig
STEP_OUTPUT: TypeAlias = Optional[Union[Tensor, Mapping[str, Any]]]  # noqa: UP007, UP045 - read at run time
_EVALUATE_OUTPUT: TypeAlias = list[Mapping[str, float]]
_PREDICT_OUTPUT: TypeAlias = list[Any]
_METRIC: TypeAlias = Any
_NUMBER: TypeAlias = float | int
TRAIN_DATALOADERS: TypeAlias = Any
EVAL_DATALOADERS: TypeAlias = Any
LRSchedulerTypeTuple = (LRScheduler, ReduceLROnPlateau)
LRSchedulerTypeUnion: TypeAlias = LRScheduler | ReduceLROnPlateau
LRSchedulerType: TypeAlias = type[LRScheduler] | type[ReduceLROnPlateau]
LRSchedulerPLType: TypeAlias = LRScheduler | ReduceLROnPlateau


class LRSchedulerConfigType(TypedDict, total=False):
    """Dict with a scheduler and the interval of its steps."""

    scheduler: LRSchedulerTypeUnion
    name: str | None
    interval: str
    frequency: int
    reduce_on_plateau: bool
    monitor: str | None
    strict: bool


class OptimizerConfig(TypedDict):
    """Dict with an optimizer."""

    optimizer: Optimizer


class OptimizerLRSchedulerConfig(TypedDict, total=False):
    """Dict with an optimizer and its scheduler."""

    optimizer: Optimizer
    lr_scheduler: LRSchedulerTypeUnion | LRSchedulerConfigType
    monitor: str


OptimizerLRScheduler: TypeAlias = (
    Optimizer
    | Sequence[Any]
    | OptimizerConfig
    | OptimizerLRSchedulerConfig
    | tuple[Sequence[Any], Sequence[Any]]
    | None
)
