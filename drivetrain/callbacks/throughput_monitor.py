"""Log how much is computed in a second."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode

from drivetrain.callbacks.base import Callback
from drivetrain.callbacks.support.flops import peak_flops
from drivetrain.callbacks.support.step_log import StepLog, checked_every
from drivetrain.runtime.durations import Duration
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.nested import find_batch_size

if TYPE_CHECKING:
    from drivetrain.trainer.task import Task
    from drivetrain.trainer.trainer import Trainer


class Reading(NamedTuple):
    """What this process has done up to a moment.

    Attributes:
        time: Seconds, without validations.
        batches: Batches.
        samples: Samples.
        lengths: Items of samples, such as tokens.
        flops: Floating-point operations.
    """

    time: float = 0.0
    batches: int = 0
    samples: int = 0
    lengths: int = 0
    flops: float = 0.0


class ThroughputMonitor(Callback):
    """Logs batches, samples, items such as tokens, and floating-point operations per second of training.

    Every `log_every_n_steps` it logs `train/device/batches_per_sec`, `.../samples_per_sec`, with `length_fn`
    `.../items_per_sec`, and `.../flops_per_sec`; the same without `device/` over all processes where there are several,
    a batch that several of them share once; and the totals `train/time`, `train/batches`, `train/samples`,
    `train/lengths`. `train/device/mfu` is the share of what the chip could do at most. The device is waited for only
    then, and validations do not count.

    The operations of a batch are the task's `flops_per_batch` (a number, or a method without arguments), else those of
    its second batch, forward and backward, as `torch.utils.flop_counter` counts them. A compiled model is not counted.

    Args:
        batch_size_fn: The samples of a batch; what the loader counted, or the first dimension of its first tensor, if
            None.
        length_fn: The items of a batch, such as tokens.
        available_flops: What a device could do at most in a second; from a table of known GPUs if None.
        window_size: Rates are those over the last so many batches, and at least since the row before.
        separator: What stands between the parts of a name.
        every: How often, in place of `log_every_n_steps`: a number of steps, or a duration such as `"500 steps"`,
            `"1M samples"`, `"10 min"` or `"10%"`.

    Raises:
        ConfigurationError: If the window is too short, or the Trainer has no logger.

    Example:
        ```python
        from drivetrain import ThroughputMonitor, Trainer

        throughput = ThroughputMonitor(lambda batch: len(batch[0]), length_fn=lambda batch: batch[0].numel())
        trainer = Trainer(callbacks=[throughput], logger="csv")
        ```
    """

    saves_within_steps = False

    def __init__(
        self,
        batch_size_fn: Callable[[Any], int] | None = None,
        length_fn: Callable[[Any], int] | None = None,
        available_flops: float | None = None,
        window_size: int = 100,
        separator: str = "/",
        every: int | str | Duration | None = None,
    ) -> None:
        if window_size < 2:
            raise ConfigurationError(
                f"ThroughputMonitor(window_size={window_size}): give at least 2 batches.", code="DT-002"
            )
        self.batch_size_fn, self.length_fn = batch_size_fn, length_fn
        self.available_flops = available_flops
        self.window_size, self.separator = window_size, separator
        self.every = checked_every(every, "ThroughputMonitor")
        self.rhythm = self.every if isinstance(self.every, Duration) else None
        self._log: StepLog | None = None
        self._readings: deque[Reading] = deque()
        self._now = Reading()
        self._started = self._paused_at = 0.0
        self._counter: FlopCounterMode | None = None
        self._flops_per_batch: float | None = None

    def on_train_start(self, trainer: Trainer, task: Task) -> None:
        self._log = StepLog("ThroughputMonitor", trainer, self.every).begin()
        self._readings.clear()
        self._now = Reading()
        self._flops_per_batch = self._counter = None
        if self.available_flops is None:
            self.available_flops = peak_flops(trainer.strategy.topology.device, trainer.precision)

    def on_train_batch_start(self, trainer: Trainer, task: Task, batch: Any, batch_idx: int) -> None:
        if self._now.batches == 1 and not hasattr(task, "flops_per_batch") and not _is_compiled(task):
            self._counter = FlopCounterMode(display=False)
            self._counter.__enter__()  # type: ignore[no-untyped-call]

    def on_train_batch_end(self, trainer: Trainer, task: Task, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._counter is not None:
            self._stop_counting()
        samples, lengths = self._samples(trainer, batch), 0 if self.length_fn is None else self.length_fn(batch)
        flops = self._flops(task)
        now = self._now
        self._now = Reading(0.0, now.batches + 1, now.samples + samples, now.lengths + lengths, now.flops + flops)
        if self._now.batches == 2:  # the first ones warm up
            _synchronize(trainer)
            self._started = perf_counter()
            self._readings.append(self._now)
        elif self._readings and self._log is not None and self._log.is_due(trainer.global_step):
            _synchronize(trainer)
            self._readings.append(self._now._replace(time=perf_counter() - self._started))
            while len(self._readings) > 2 and self._now.batches - self._readings[0].batches > self.window_size:
                self._readings.popleft()
            shards = trainer.strategy.topology.data_shard.count
            self._log.write(self.compute(trainer.world_size, shards), trainer.global_step)

    def on_validation_start(self, trainer: Trainer, task: Task) -> None:
        self._paused_at = perf_counter()

    def on_validation_end(self, trainer: Trainer, task: Task) -> None:
        self._started += perf_counter() - self._paused_at

    def on_exception(self, trainer: Trainer, task: Task, exception: BaseException) -> None:
        self._stop_counting()

    def compute(self, world_size: int = 1, data_shards: int | None = None) -> dict[str, float]:
        """Return what is logged, by name.

        Args:
            world_size: How many processes compute as much as this one.
            data_shards: How many of them have samples of their own: fewer where several share a batch, as under tensor
                parallelism. All if None.
        """
        first, last = self._readings[0], self._readings[-1]
        seconds, join = last.time - first.time, self.separator.join
        if seconds <= 0:
            return {}
        rates = {
            "batches_per_sec": (last.batches - first.batches) / seconds,
            "samples_per_sec": (last.samples - first.samples) / seconds,
        }
        if self.length_fn is not None:
            rates["items_per_sec"] = (last.lengths - first.lengths) / seconds
        if last.flops:
            rates["flops_per_sec"] = (last.flops - first.flops) / seconds
        values: dict[str, float] = {join(("train", "device", name)): rate for name, rate in rates.items()}
        if world_size > 1:
            shards = world_size if data_shards is None else data_shards
            for name, rate in rates.items():
                values[join(("train", name))] = rate * (world_size if name == "flops_per_sec" else shards)
        if last.flops and self.available_flops:
            values[join(("train", "device", "mfu"))] = rates["flops_per_sec"] / self.available_flops
        totals = {"time": last.time, "batches": last.batches, "samples": last.samples}
        if self.length_fn is not None:
            totals["lengths"] = last.lengths
        return values | {join(("train", name)): total for name, total in totals.items()}

    def _samples(self, trainer: Trainer, batch: Any) -> int:
        if self.batch_size_fn is not None:
            return self.batch_size_fn(batch)
        info = trainer.batch_info
        known = None if info is None else info.real_rows
        return (find_batch_size(batch) or 0) if known is None else known

    def _flops(self, task: Task) -> float:
        given = getattr(task, "flops_per_batch", None)
        if given is not None:
            return float(given() if callable(given) else given)
        return self._flops_per_batch or 0.0

    def _stop_counting(self) -> None:
        counter, self._counter = self._counter, None
        if counter is not None:
            counter.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._flops_per_batch = float(counter.get_total_flops())


def _is_compiled(task: Task) -> bool:
    return any(hasattr(module, "_orig_mod") or module._compiled_call_impl is not None for module in task.modules())


def _synchronize(trainer: Trainer) -> None:
    """Wait until the device has done what it was given."""
    device = trainer.strategy.topology.device
    functions: Any = getattr(torch, device.type, None)
    if device.type != "cpu" and hasattr(functions, "synchronize"):
        functions.synchronize()
