"""Callback that logs the device's memory statistics and the machine's CPU load."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import psutil
import torch

from drivetrain.callbacks.base import Callback
from drivetrain.callbacks.step_schedule import StepLog, checked_every
from drivetrain.runtime.durations import Duration
from drivetrain.runtime.logging import get_logger

if TYPE_CHECKING:
    from drivetrain.trainer.task import Task
    from drivetrain.trainer.trainer import Trainer

logger = get_logger(__name__)


class DeviceStatsMonitor(Callback):
    """Callback that logs memory statistics of the main process's device and the CPU load of the machine.

    The values are named `DeviceStatsMonitor.<hook>/<value>`. They are logged at the start and at the end of a batch,
    every `log_every_n_steps` steps in training, and every `log_every_n_steps` batches in validation and testing.
    Device values come from `torch.<device>.memory_stats`, in bytes. Machine values are `cpu_percent`, `cpu_vm_percent`
    and `cpu_swap_percent`. A device without memory statistics logs none.

    Cost on a device: no kernel, and no wait of the host.

    Args:
        cpu_stats: Log the load of the machine. If None, it is logged if the device is the CPU.
        filter_keys: The values to log, by their names without the hook, such as `{"cpu_percent"}`. If None, log all.
        every: The interval, in place of `log_every_n_steps`: a number of steps, or a duration such as `"500 steps"`,
            `"1M samples"`, `"10 min"` or `"10%"`. Validation and testing follow only a number of steps.

    Raises:
        ConfigurationError: If the Trainer has no logger.

    Example:
        ```python
        from drivetrain import DeviceStatsMonitor, Trainer

        trainer = Trainer(callbacks=[DeviceStatsMonitor(cpu_stats=True)], logger="csv")
        ```
    """

    saves_within_steps = False

    def __init__(
        self,
        cpu_stats: bool | None = None,
        filter_keys: Collection[str] | None = None,
        every: int | str | Duration | None = None,
    ) -> None:
        self.cpu_stats = cpu_stats
        self.filter_keys = None if filter_keys is None else set(filter_keys)
        self.every = checked_every(every, "DeviceStatsMonitor")
        self.schedule = self.every if isinstance(self.every, Duration) else None
        self._starts: StepLog | None = None
        self._ends: StepLog | None = None

    def setup(self, trainer: Trainer, task: Task, stage: str) -> None:
        if stage == "predict":
            return
        self._starts, self._ends = (StepLog("DeviceStatsMonitor", trainer, self.every) for _ in range(2))
        psutil.cpu_percent()  # psutil measures the load since the previous call

    def on_train_start(self, trainer: Trainer, task: Task) -> None:
        for log in (self._starts, self._ends):
            if log is not None:
                log.begin()

    def on_train_batch_start(self, trainer: Trainer, task: Task, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step + 1
        if self._starts is not None and self._starts.is_due(step):
            self._starts.write(self._values(trainer, "on_train_batch_start"), step)

    def on_train_batch_end(self, trainer: Trainer, task: Task, outputs: Any, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step
        if self._ends is not None and self._ends.is_due(step):
            self._ends.write(self._values(trainer, "on_train_batch_end"), step)

    def on_validation_batch_start(
        self, trainer: Trainer, task: Task, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._evaluated(trainer, "on_validation_batch_start", batch_idx)

    def on_validation_batch_end(
        self, trainer: Trainer, task: Task, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._evaluated(trainer, "on_validation_batch_end", batch_idx)

    def on_test_batch_start(
        self, trainer: Trainer, task: Task, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._evaluated(trainer, "on_test_batch_start", batch_idx)

    def on_test_batch_end(
        self, trainer: Trainer, task: Task, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._evaluated(trainer, "on_test_batch_end", batch_idx)

    def _evaluated(self, trainer: Trainer, hook: str, batch_idx: int) -> None:
        if self._ends is None or trainer.sanity_checking:
            return
        every = self._ends.every
        if isinstance(every, int) and every and (batch_idx + 1) % every == 0:
            self._ends.write(self._values(trainer, hook), trainer.global_step)

    def _values(self, trainer: Trainer, hook: str) -> dict[str, float]:
        device = trainer.strategy.topology.device
        values: dict[str, float] = {}
        statistics = getattr(getattr(torch, device.type, None), "memory_stats", None)
        if statistics is not None and device.type != "cpu":
            values.update(statistics(device))
        if self.cpu_stats or (self.cpu_stats is None and device.type == "cpu"):
            values["cpu_percent"] = psutil.cpu_percent()
            values["cpu_vm_percent"] = psutil.virtual_memory().percent
            values["cpu_swap_percent"] = psutil.swap_memory().percent
        return {f"DeviceStatsMonitor.{hook}/{name}": float(value) for name, value in self._chosen(values).items()}

    def _chosen(self, values: dict[str, float]) -> dict[str, float]:
        if self.filter_keys is None:
            return values
        unknown = sorted(self.filter_keys - values.keys())
        if unknown:
            logger.warning_once(
                "DeviceStatsMonitor: filter_keys contains keys not found among the values: "
                f"{', '.join(unknown)}. Available values: {', '.join(sorted(values)) or 'none'}."
            )
        return {name: value for name, value in values.items() if name in self.filter_keys}
