"""Log how much is computed in a second."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from drivetrain.callbacks.base import Callback
from drivetrain.callbacks.step_schedule import StepLog, checked_every
from drivetrain.runtime.durations import Duration
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.host import cores_of_process
from drivetrain.runtime.nested import find_batch_size
from drivetrain.runtime.timing import TimeSpent

if TYPE_CHECKING:
    from drivetrain.trainer.task import Task
    from drivetrain.trainer.trainer import Trainer


# Floating-point operations: of a model, and of the chips that run it


CHIPS: tuple[tuple[str, float, float], ...] = (
    ("GB200", 2500e12, 80e12),
    ("B200", 2250e12, 75e12),
    ("H200 NVL", 835e12, 60e12),
    ("H200", 989e12, 67e12),
    ("H100 NVL", 835e12, 60e12),
    ("H100 PCIe", 756e12, 51e12),
    ("H100", 989e12, 67e12),
    ("A100", 312e12, 19.5e12),
    ("A10G", 70e12, 35e12),
    ("A10", 125e12, 31.2e12),
    ("L40S", 362e12, 91.6e12),
    ("L40", 181e12, 90.5e12),
    ("L4", 121e12, 30.3e12),
    ("V100", 125e12, 15.7e12),
    ("T4", 65e12, 8.1e12),
    ("RTX 4090", 165e12, 82.6e12),
    ("RTX 3090", 71e12, 35.6e12),
    ("MI355X", 2516e12, 157.3e12),
    ("MI300X", 1307e12, 163.4e12),
    ("MI250X", 191.5e12, 47.9e12),
)
"""Dense peak operations per second of known chips, in 16-bit matrix units with sums in 32 bits, and in 32 bits.

The first name that is a part of the device's counts. Sources, whose tables often give the 16-bit figure with 2:4
sparsity, twice that without:

- GB200, B200: NVIDIA Blackwell data sheet, "Individual Blackwell GPU Specifications" (5 and 4.5 PFLOPS with sparsity;
  80 and 75 TFLOPS FP32).
- H200, H200 NVL, H100, H100 NVL, H100 PCIe: NVIDIA H200 and H100 data sheets (1,979, 1,671 and 1,513 TFLOPS with
  sparsity).
- A100, A10, L40S, L40, L4: NVIDIA's data sheet of each. A10G, made for AWS, has about half of the matrix rate of an A10
  (70 TFLOPS): NVIDIA A10G data sheet.
- V100 (SXM2), T4: NVIDIA's data sheet of each, FP16, since they have no BF16.
- RTX 4090, RTX 3090: NVIDIA Ada and Ampere GA102 white papers, "Peak BF16 Tensor TFLOPS with FP32 Accumulate".
- MI355X, MI300X: AMD's data sheet of each. MI250X: AMD's data sheet (383 and 95.7 TFLOPS), halved, since each of its
  two dies is a device.
"""


def measure_flops(
    model: nn.Module, forward_fn: Callable[[], Any], loss_fn: Callable[[Any], Tensor] | None = None
) -> int:
    """Return the floating-point operations of a forward, and of the backward with it where there is a loss.

    Args:
        model: The model; on the meta device nothing is computed.
        forward_fn: Runs its forward, and returns the output.
        loss_fn: The loss of an output, to count the backward as well.

    Example:
        ```python
        import torch

        from drivetrain import measure_flops

        with torch.device("meta"):
            model, batch = torch.nn.Linear(32, 2), torch.randn(8, 32)
        assert measure_flops(model, lambda: model(batch)) == 2 * 8 * 32 * 2
        ```
    """
    counter = FlopCounterMode(display=False)
    with counter:
        output = forward_fn()
        if loss_fn is not None:
            loss_fn(output).backward()  # type: ignore[no-untyped-call]
    return int(counter.get_total_flops())


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Return the operations per second that a device could do at most; None where the chip is not known."""
    functions: Any = getattr(torch, device.type, None)
    if not hasattr(functions, "get_device_name"):
        return None
    name = functions.get_device_name(device)
    half = "16" in precision or "8" in precision
    return next((fast if half else single for chip, fast, single in CHIPS if chip in name), None)


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
            raise ConfigurationError(f"ThroughputMonitor(window_size={window_size}): give at least 2 batches.")
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


# Log how fast training is, and how much of the time it waits for data


class SpeedMonitor(Callback):
    """Logs steps and samples per second, and the share of the time in which training waits for its loader.

    Every `log_every_n_steps` it logs `speed/steps_per_sec`, `speed/samples_per_sec` of this process where the loader
    counts them, and `speed/data_wait`, the share of the time that waits for batches, from 0 to 1. The shares are those
    of `trainer.timing`. Nothing waits for the device, so a loader that keeps up with it counts as no wait. Validations
    and saves do not count. At the end of `fit` it prints in a sentence what took the time, unless a profiler does.

    Args:
        every: How often, in place of `log_every_n_steps`: a number of steps, or a duration such as `"500 steps"`,
            `"1M samples"`, `"10 min"` or `"10%"`.

    Raises:
        ConfigurationError: If `every` is no number or duration, or the Trainer has no logger.

    Example:
        ```python
        from drivetrain import SpeedMonitor, Trainer

        trainer = Trainer(callbacks=[SpeedMonitor()], logger="csv")
        ```
    """

    saves_within_steps = False

    def __init__(self, every: int | str | Duration | None = None) -> None:
        self.every = checked_every(every, "SpeedMonitor")
        self.rhythm = self.every if isinstance(self.every, Duration) else None
        self._log: StepLog | None = None
        self._spent: dict[str, float] | None = None  # seconds of each part before the row that is logged next
        self._samples: int | None = 0
        self._step = 0
        self._samples_in_all: int | None = 0

    def on_train_start(self, trainer: Trainer, task: Task) -> None:
        self._log = StepLog("SpeedMonitor", trainer, self.every).begin()
        self._spent, self._samples_in_all = None, 0

    def on_train_epoch_start(self, trainer: Trainer, task: Task) -> None:
        if self._spent is None:
            self._begin(trainer)

    def on_train_batch_end(self, trainer: Trainer, task: Task, outputs: Any, batch: Any, batch_idx: int) -> None:
        info = trainer.batch_info
        rows = None if info is None else info.real_rows
        self._samples = None if rows is None or self._samples is None else self._samples + rows
        in_all = self._samples_in_all
        self._samples_in_all = None if rows is None or in_all is None else in_all + rows
        step = trainer.global_step
        if self._log is not None and self._log.is_due(step):
            self._log.write(self._values(trainer, step), step)
            self._begin(trainer)

    def on_fit_end(self, trainer: Trainer, task: Task) -> None:
        if trainer.is_global_zero and not trainer.profiler.gives_verdict:
            workers = getattr(trainer.train_dataloader, "num_workers", None)
            cores = cores_of_process(trainer.num_devices)
            sentence = TimeSpent.of(trainer.timing, self._samples_in_all, workers, cores).sentence()
            if sentence:
                trainer.print(sentence)

    def _begin(self, trainer: Trainer) -> None:
        """Begin the row that is logged next."""
        self._spent = trainer.timing.seconds
        self._samples, self._step = 0, trainer.global_step

    def _values(self, trainer: Trainer, step: int) -> dict[str, float]:
        before = self._spent or {}
        spent = {name: max(0.0, now - before.get(name, 0.0)) for name, now in trainer.timing.seconds.items()}
        seconds = sum(spent.values()) - spent["evaluation"] - spent["checkpoint"]
        if seconds <= 0:
            return {}
        values = {"speed/steps_per_sec": (step - self._step) / seconds, "speed/data_wait": spent["data"] / seconds}
        if self._samples is not None:
            values["speed/samples_per_sec"] = self._samples / seconds
        return values
