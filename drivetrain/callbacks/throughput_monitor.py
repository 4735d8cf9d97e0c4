"""Callbacks that log the speed of training: samples, tokens and FLOPs per second."""

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
from drivetrain.runtime.pytrees import find_batch_size
from drivetrain.runtime.timing import TimeSpent

if TYPE_CHECKING:
    from drivetrain.trainer.task import Task
    from drivetrain.trainer.trainer import Trainer


# FLOPs of models and chips


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
"""Dense peak FLOPS of known chips: with 16-bit matrix units that accumulate in 32 bits, and in 32 bits.

The first entry whose name is contained in the device's name applies. Many of the sources give the 16-bit figure with
2:4 sparsity, which is twice the dense one:

- GB200, B200: NVIDIA Blackwell data sheet, "Individual Blackwell GPU Specifications" (5 and 4.5 PFLOPS with sparsity;
  80 and 75 TFLOPS FP32).
- H200, H200 NVL, H100, H100 NVL, H100 PCIe: NVIDIA H200 and H100 data sheets (1,979, 1,671 and 1,513 TFLOPS with
  sparsity).
- A100, A10, L40S, L40, L4: NVIDIA's data sheet of each. A10G, made for AWS, has about half of the matrix rate of an
  A10 (70 TFLOPS): NVIDIA A10G data sheet.
- V100 (SXM2), T4: NVIDIA's data sheet of each, FP16, since they have no BF16.
- RTX 4090, RTX 3090: NVIDIA Ada and Ampere GA102 white papers, "Peak BF16 Tensor TFLOPS with FP32 Accumulate".
- MI355X, MI300X: AMD's data sheet of each. MI250X: AMD's data sheet (383 and 95.7 TFLOPS), halved, since each of its
  two dies is a device.
"""


def measure_flops(
    model: nn.Module, forward_fn: Callable[[], Any], loss_fn: Callable[[Any], Tensor] | None = None
) -> int:
    """Return the number of floating-point operations in a forward pass, and in its backward pass if a loss is given.

    Args:
        model: The model. On the meta device nothing is computed.
        forward_fn: A function that runs the forward pass and returns the output.
        loss_fn: A function from the output to the loss, to count the backward pass too.

    Returns:
        The number of floating-point operations.

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
    """Return the peak speed of a device in FLOP/s, or None if its chip is unknown."""
    functions: Any = getattr(torch, device.type, None)
    if not hasattr(functions, "get_device_name"):
        return None
    name = functions.get_device_name(device)
    half = "16" in precision or "8" in precision
    return next((fast if half else single for chip, fast, single in CHIPS if chip in name), None)


class Counters(NamedTuple):
    """Snapshot of a process's training counters, such as the number of batches, samples and FLOPs.

    Two of them give the rates in between.

    Attributes:
        time: The seconds of training, without validations.
        batches: The number of batches.
        samples: The number of samples.
        lengths: The number of items of samples, such as tokens.
        flops: The number of floating-point operations.
    """

    time: float = 0.0
    batches: int = 0
    samples: int = 0
    lengths: int = 0
    flops: float = 0.0


class ThroughputMonitor(Callback):
    """Callback that logs the batches, samples, FLOPs and optionally tokens processed per second of training.

    Every `log_every_n_steps` steps it logs these values:

    - `train/device/batches_per_sec`, `train/device/samples_per_sec`, `train/device/flops_per_sec`, and
      `train/device/items_per_sec` if `length_fn` is given.
    - The same names without `device/`: the rate of all processes, if there are several. A batch that several processes
      share counts once.
    - `train/device/mfu`: the fraction of the device's peak FLOPS that is used.
    - The totals `train/time`, `train/batches`, `train/samples` and `train/lengths`.

    The device is synchronized only when values are logged. Validations do not count.

    The FLOPs of a batch are the task's `flops_per_batch` (a number, or a method without arguments). Without it,
    `torch.utils.flop_counter` measures forward and backward of the second batch. Compiled models are not measured.

    Cost on a device: no kernel, and one wait of the host per log.

    Args:
        batch_size_fn: A function from a batch to its number of samples. If None, the count of the loader, or the first
            dimension of the batch's first tensor.
        length_fn: A function from a batch to its number of items, such as tokens.
        available_flops: The peak FLOPS of a device. If None, a table of known GPUs is used.
        window_size: The number of recent batches over which rates are averaged, and at least those since the last log.
        separator: The text between the parts of a name.
        every: The interval, in place of `log_every_n_steps`: a number of steps, or a duration such as `"500 steps"`,
            `"1M samples"`, `"10 min"` or `"10%"`.

    Raises:
        ConfigurationError: If `window_size` is below 2, or the Trainer has no logger.

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
            raise ConfigurationError(f"ThroughputMonitor(window_size={window_size}): use at least 2 batches.")
        self.batch_size_fn, self.length_fn = batch_size_fn, length_fn
        self.available_flops = available_flops
        self.window_size, self.separator = window_size, separator
        self.every = checked_every(every, "ThroughputMonitor")
        self.schedule = self.every if isinstance(self.every, Duration) else None
        self._log: StepLog | None = None
        self._readings: deque[Counters] = deque()
        self._now = Counters()
        self._started = self._paused_at = 0.0
        self._counter: FlopCounterMode | None = None
        self._flops_per_batch: float | None = None

    def on_train_start(self, trainer: Trainer, task: Task) -> None:
        self._log = StepLog("ThroughputMonitor", trainer, self.every).begin()
        self._readings.clear()
        self._now = Counters()
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
        self._now = Counters(0.0, now.batches + 1, now.samples + samples, now.lengths + lengths, now.flops + flops)
        if self._now.batches == 2:  # the first two batches are warm-up
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
        # Move the start forward, so that the validation does not count as training time.
        self._started += perf_counter() - self._paused_at

    def on_exception(self, trainer: Trainer, task: Task, exception: BaseException) -> None:
        self._stop_counting()

    def compute(self, world_size: int = 1, data_shards: int | None = None) -> dict[str, float]:
        """Return metrics of the training speed, such as samples per second, as a dict that is ready to be logged.

        Args:
            world_size: The number of processes, which are assumed to be as fast as this one.
            data_shards: The number of processes with different samples. It is smaller than `world_size` if several
                processes share a batch, as in tensor parallelism. If None, `world_size`.
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
                # Every process computes, but a batch that several processes share counts once.
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
    # Inside a compiled graph, the counter would not see the operations.
    return any(hasattr(module, "_orig_mod") or module._compiled_call_impl is not None for module in task.modules())


def _synchronize(trainer: Trainer) -> None:
    device = trainer.strategy.topology.device
    functions: Any = getattr(torch, device.type, None)
    if device.type != "cpu" and hasattr(functions, "synchronize"):
        functions.synchronize()


# Speed and waiting time


class SpeedMonitor(Callback):
    """Callback that logs steps and samples per second, and the fraction of time spent waiting for data.

    Every `log_every_n_steps` steps it logs `speed/steps_per_sec`, `speed/samples_per_sec` of this process if the
    loader counts samples, and `speed/data_wait`, the fraction of time spent waiting for batches, from 0 to 1. The
    times come from `trainer.timing`. The device is never synchronized, so a loader that is as fast as the device
    causes no wait. Validations and saves do not count. At the end of `fit`, it prints one sentence about where the
    time went, unless a profiler does.

    Cost on a device: no kernel, and no wait of the host.

    Args:
        every: The interval, in place of `log_every_n_steps`: a number of steps, or a duration such as `"500 steps"`,
            `"1M samples"`, `"10 min"` or `"10%"`.

    Raises:
        ConfigurationError: If `every` is neither a number nor a duration, or the Trainer has no logger.

    Example:
        ```python
        from drivetrain import SpeedMonitor, Trainer

        trainer = Trainer(callbacks=[SpeedMonitor()], logger="csv")
        ```
    """

    saves_within_steps = False

    def __init__(self, every: int | str | Duration | None = None) -> None:
        self.every = checked_every(every, "SpeedMonitor")
        self.schedule = self.every if isinstance(self.every, Duration) else None
        self._log: StepLog | None = None
        self._spent: dict[str, float] | None = None  # `trainer.timing.seconds` at the last log
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
                trainer.announce(sentence)

    def _begin(self, trainer: Trainer) -> None:
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
