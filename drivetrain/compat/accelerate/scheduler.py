"""The prepared scheduler under Accelerate's name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from drivetrain.accelerator import PreparedScheduler
from drivetrain.compat.accelerate.state import GradientState, latest_or_refused

if TYPE_CHECKING:
    from drivetrain.compat.accelerate.accelerator import Accelerator

__all__ = ["AcceleratedScheduler"]


class AcceleratedScheduler(PreparedScheduler):
    """Prepared scheduler with the attributes that only Accelerate's scripts use.

    Attributes:
        accelerator: The Accelerator that prepared it.
    """

    _is_accelerate_prepared = True
    _split_batches = False
    accelerator: Accelerator

    def __init__(
        self, scheduler: Any, optimizers: Any, step_with_optimizer: bool = True, split_batches: bool = False
    ) -> None:
        engine = latest_or_refused(type(self).__name__)
        followed = list(optimizers) if isinstance(optimizers, list | tuple) else [optimizers]
        super().__init__(scheduler, followed, engine.accumulation, with_optimizer=step_with_optimizer)
        self.accelerator, self.split_batches = engine, split_batches

    @property
    def split_batches(self) -> bool:
        """True if the scheduler steps once per optimizer step, False if once per process. Assignable."""
        return self._split_batches

    @split_batches.setter
    def split_batches(self, value: bool) -> None:
        self._split_batches = value
        once = value or isinstance(self.scheduler, ReduceLROnPlateau)
        self._steps_per_call = 1 if once else self.accelerator.num_processes

    @property
    def step_with_optimizer(self) -> bool:
        """True if the scheduler steps only when the optimizer does. Assignable."""
        return self._with_optimizer

    @step_with_optimizer.setter
    def step_with_optimizer(self, value: bool) -> None:
        self._with_optimizer = value

    @property
    def gradient_state(self) -> GradientState:
        """State of the gradient accumulation window."""
        return self.accelerator.gradient_state

    def get_lr(self) -> Any:
        """Return the learning rates from the scheduler's own `get_lr`."""
        return self.scheduler.get_lr()

    def print_lr(self, *args: Any, **kwargs: Any) -> Any:
        """Call the scheduler's own `print_lr`, which current torch schedulers no longer have."""
        return self.scheduler.print_lr(*args, **kwargs)
