"""Callback that finds processes which slow down the others."""

from __future__ import annotations

import socket
import sys
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from drivetrain.callbacks.base import Callback
from drivetrain.callbacks.step_schedule import StepInterval
from drivetrain.runtime.collectives import gather_object
from drivetrain.runtime.durations import Duration, interval_of
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.logging import get_logger

if TYPE_CHECKING:
    from torch import Tensor

    from drivetrain.trainer.task import Task
    from drivetrain.trainer.trainer import Trainer

logger = get_logger(__name__)


class OwnTime(NamedTuple):
    # without the backward pass, in which a process waits for the others
    rank: int
    host: str
    waiting: float  # seconds spent waiting for the loader
    forward: float  # seconds from the batch to the start of the backward pass

    @property
    def total(self) -> float:
        return self.waiting + self.forward


class StragglerMonitor(Callback):
    """Callback that compares the step times of all processes and warns about a slow process and its machine.

    Processes synchronize in the backward pass, so whole steps take equally long on all of them. The callback compares
    the time before that: waiting for the loader, and the forward pass. At each interval the processes exchange their
    averages over gloo. If the Trainer has a logger, they log `straggler/slowest` (seconds), `straggler/ratio` (to the
    median of the others) and `straggler/rank`. The main process warns if a process is slow, and again only when
    another one is.

    Strategies that shard the model also communicate in the forward pass, so only the time waiting for the loader is
    compared. On a GPU, each measured step synchronizes the device before the backward pass. A larger `every_n_steps`
    makes that rare.

    Cost on a device: no kernel, and one wait of the host per measured step.

    Args:
        every_n_steps: The number of optimizer steps between comparisons, or a duration such as `"1M samples"`, `"10
            min"` or `"10%"`.
        threshold: The ratio to the median of the other processes above which a process is slow.
        measured_steps: The number of measured steps before each comparison. If the interval is not in steps, its end
            cannot be foreseen: the steps after it are measured instead, and then compared.

    Raises:
        ConfigurationError: If an argument is out of range.

    Example:
        ```python
        from drivetrain import StragglerMonitor, Trainer

        trainer = Trainer(callbacks=[StragglerMonitor(every_n_steps=200)], logger="csv")
        ```
    """

    saves_within_steps = False

    def __init__(
        self, every_n_steps: int | str | Duration = 100, threshold: float = 1.5, measured_steps: int = 10
    ) -> None:
        interval = interval_of(every_n_steps, "StragglerMonitor.every_n_steps")
        self.schedule = interval if isinstance(interval, Duration) else None
        if (isinstance(interval, int) and interval < 1) or measured_steps < 1 or threshold <= 1:
            raise ConfigurationError(
                f"StragglerMonitor(every_n_steps={every_n_steps}, threshold={threshold}, "
                f"measured_steps={measured_steps}): use at least one step, and a threshold above 1.",
            )
        self.every_n_steps, self.threshold = interval, threshold
        self.measured_steps = measured_steps if isinstance(interval, Duration) else min(measured_steps, interval)
        self._steps = 0  # steps between two comparisons
        self._interval: StepInterval | None = None  # the interval if it is not in steps
        self.latest: list[OwnTime] = []
        self._named: int | None = None
        self._measures_forward = True
        self._next = 0
        self._reset()

    def _reset(self) -> None:
        self._waiting = self._forward = 0.0
        self._began = self._ended = 0.0  # 0: not measured
        self._measured_from = -1

    def on_train_start(self, trainer: Trainer, task: Task) -> None:
        self._measures_forward = trainer.strategy.state.held_as == "whole"
        self.latest, self._named = [], None
        self._reset()
        interval = StepInterval(trainer, self.every_n_steps, "StragglerMonitor.every_n_steps")
        self._steps, self._interval = interval.steps, None if interval.steps else interval
        self._plan(trainer)

    def on_train_epoch_start(self, trainer: Trainer, task: Task) -> None:
        self._ended = perf_counter() if self._measured_from >= 0 else 0.0

    def on_validation_end(self, trainer: Trainer, task: Task) -> None:
        self.on_train_epoch_start(trainer, task)

    def on_train_batch_start(self, trainer: Trainer, task: Task, batch: Any, batch_idx: int) -> None:
        if self._ended:
            self._began = perf_counter()
            self._waiting += self._began - self._ended

    def on_before_backward(self, trainer: Trainer, task: Task, loss: Tensor) -> None:
        if self._began and self._measures_forward:
            # Kernels run asynchronously. Without this, only the time to launch them would be measured.
            trainer.strategy.topology.kind.synchronize()
            self._forward += perf_counter() - self._began
        self._began = 0.0

    def on_train_batch_end(self, trainer: Trainer, task: Task, outputs: Any, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step
        if self._interval is not None and self._interval.is_due(step) and self._measured_from < 0:
            self._measured_from, self._next, self._ended = step, step + self.measured_steps, perf_counter()
        elif step >= self._next and self._measured_from >= 0:
            self._compare(trainer, step)
            self._reset()
            self._plan(trainer)
        elif step >= self._next - self.measured_steps:
            if self._measured_from < 0:
                self._measured_from = step
            self._ended = perf_counter()

    def _plan(self, trainer: Trainer) -> None:
        if self._interval is not None:
            self._next = sys.maxsize  # until an interval is over
            return
        self._next = (trainer.global_step // self._steps + 1) * self._steps
        if self._next - trainer.global_step <= self.measured_steps:
            self._measured_from, self._ended = trainer.global_step, perf_counter()

    def _compare(self, trainer: Trainer, step: int) -> None:
        steps = max(step - self._measured_from, 1)
        own = OwnTime(trainer.global_rank, socket.gethostname(), self._waiting / steps, self._forward / steps)
        self.latest = [OwnTime(*values) for values in gather_object([tuple(own)])]
        if len(self.latest) < 2:
            return
        slowest = max(self.latest, key=lambda each: each.total)
        # The slowest is left out, since with few processes it would raise the median.
        usual = median(each.total for each in self.latest if each.rank != slowest.rank)
        ratio = slowest.total / usual if usual > 0 else 1.0
        if trainer.loggers:
            values = {"slowest": slowest.total, "ratio": ratio, "rank": float(slowest.rank)}
            trainer.log_metrics({f"straggler/{name}": value for name, value in values.items()}, step)
        if ratio < self.threshold:
            self._named = None
        elif slowest.rank != self._named:
            self._named = slowest.rank
            if trainer.is_global_zero:
                logger.warning(self._describe(slowest, usual, ratio, step))

    def _describe(self, slowest: OwnTime, usual: float, ratio: float, step: int) -> str:
        parts = f"{slowest.waiting * 1e3:.3g} ms waiting for its loader"
        if self._measures_forward:
            parts += f", {slowest.forward * 1e3:.3g} ms in the forward"
        return (
            f"At step {step} rank {slowest.rank} on {slowest.host} takes {ratio:.1f} times as long as the other "
            f"{len(self.latest) - 1} for its own part of a step: {slowest.total * 1e3:.3g} ms ({parts}). The median of "
            f"the others is {usual * 1e3:.3g} ms. All processes wait for this one."
        )
