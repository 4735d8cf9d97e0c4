"""Log how much memory a run takes, and keep what held it when it ran out."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain.callbacks.base import Callback
from drivetrain.callbacks.step_schedule import StepLog, checked_every
from drivetrain.runtime.collectives import gather_object
from drivetrain.runtime.durations import Duration
from drivetrain.runtime.logging import get_logger
from drivetrain.runtime.memory import MemoryHistory, MemoryUse, is_out_of_memory

if TYPE_CHECKING:
    from drivetrain.trainer.task import Task
    from drivetrain.trainer.trainer import Trainer

logger = get_logger(__name__)


class MemoryMonitor(Callback):
    """Logs the memory that a run takes, now and at most, of the process that takes the most.

    Every `log_every_n_steps` it logs in MiB `memory/current` and `memory/peak`: what tensors hold on the device, and
    the most since the row before; `memory/reserved`, what the device's allocator holds, where it has one; and
    `memory/host`, the resident memory of the process. On the CPU current and peak are the resident memory, the peak
    that since the process began. Under every strategy each process counts its own part.

    When memory runs out on a device with a history of allocations (CUDA), the history is written to
    `memory-rank<rank>-step<step>.pickle`: drop that file on https://pytorch.org/memory_viz to see what held the memory.
    Elsewhere a warning has the figures.

    Args:
        snapshot_dir: The directory of that file; `trainer.log_dir` if None.
        snapshot: Whether the history is recorded at all; that takes about a microsecond for each allocation.
        max_entries: How many allocations the history holds.
        every: How often, in place of `log_every_n_steps`: a number of steps, or a duration such as `"500 steps"`,
            `"1M samples"`, `"10 min"` or `"10%"`.

    Raises:
        ConfigurationError: If the Trainer has no logger.

    Example:
        ```python
        from drivetrain import MemoryMonitor, Trainer

        trainer = Trainer(callbacks=[MemoryMonitor()], logger="csv")
        ```
    """

    saves_within_steps = False

    def __init__(
        self,
        snapshot_dir: str | os.PathLike[str] | None = None,
        snapshot: bool = True,
        max_entries: int = 100_000,
        every: int | str | Duration | None = None,
    ) -> None:
        self.snapshot_dir, self.snapshot, self.max_entries = snapshot_dir, snapshot, max_entries
        self.every = checked_every(every, "MemoryMonitor")
        self.rhythm = self.every if isinstance(self.every, Duration) else None
        self._log: StepLog | None = None
        self._history: MemoryHistory | None = None

    def on_fit_start(self, trainer: Trainer, task: Task) -> None:
        self._log = StepLog("MemoryMonitor", trainer, self.every)
        if self.snapshot:
            self._history = MemoryHistory(trainer.strategy.topology.device, self.max_entries)
            self._history.start()

    def on_train_start(self, trainer: Trainer, task: Task) -> None:
        if self._log is not None:
            self._log.begin()

    def on_train_batch_end(self, trainer: Trainer, task: Task, outputs: Any, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step
        if self._log is not None and self._log.is_due(step):
            topology = trainer.strategy.topology
            use = MemoryUse.read(topology.kind, topology.device)
            topology.kind.reset_peak_memory(topology.device)
            everyone = [MemoryUse(*each) for each in gather_object([tuple(use)])]
            most = {name: max(getattr(each, name) or 0 for each in everyone) for name in MemoryUse._fields}
            self._log.write({f"memory/{name}": value / 2**20 for name, value in most.items() if value}, step)

    def on_exception(self, trainer: Trainer, task: Task, exception: BaseException) -> None:
        if not is_out_of_memory(exception):
            return
        topology = trainer.strategy.topology
        use = MemoryUse.read(topology.kind, topology.device)
        figures = f"{use.current / 2**20:,.0f} MiB in use, {use.peak / 2**20:,.0f} MiB at most"
        where = f"Rank {trainer.global_rank} has run out of memory in step {trainer.global_step + 1}: {figures}."
        if self._history is None or not self._history.is_recording:
            logger.warning(where)
            return
        folder = Path(self.snapshot_dir or trainer.local_dir)
        path = folder / f"memory-rank{trainer.global_rank}-step{trainer.global_step}.pickle"
        self._history.write(path)
        logger.warning("%s What held it is in %s: drop that file on https://pytorch.org/memory_viz.", where, path)

    def teardown(self, trainer: Trainer, task: Task, stage: str) -> None:
        if self._history is not None:
            self._history.stop()
            self._history = None
