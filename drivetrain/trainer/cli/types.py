"""Types for the arguments of tasks that a command line makes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Optional, Union

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

if TYPE_CHECKING:
    from jsonargparse import Namespace
else:
    Namespace = Any


class ReduceLROnPlateau(torch.optim.lr_scheduler.ReduceLROnPlateau):
    """The schedule of that name in torch, with the metric that it watches.

    Args:
        optimizer: The optimizer.
        monitor: Name of the logged metric.
        *args: As for torch's.
        **kwargs: The same.
    """

    def __init__(self, optimizer: Optimizer, monitor: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(optimizer, *args, **kwargs)
        self.monitor = monitor


# jsonargparse reads these where a task names them in annotations.
LRSchedulerTypeTuple = (LRScheduler, ReduceLROnPlateau)
LRSchedulerTypeUnion = Union[LRScheduler, ReduceLROnPlateau]  # noqa: UP007
LRSchedulerType = Union[type[LRScheduler], type[ReduceLROnPlateau]]  # noqa: UP007

ArgsType = Optional[Union[list[str], dict[str, Any], Namespace]]  # noqa: UP007, UP045
"""What the `args` of a `TrainerCLI` may be."""

OptimizerCallable = Callable[[Iterable], Optimizer]  # type: ignore[type-arg]
"""What makes an optimizer of parameters: the type of a task's argument that a command line fills."""

LRSchedulerCallable = Callable[[Optimizer], Union[LRScheduler, ReduceLROnPlateau]]  # noqa: UP007
"""What makes a schedule of an optimizer."""
