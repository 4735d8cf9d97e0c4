"""Callback that logs memory use, and writes the allocation history when memory runs out."""

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
    """Callback that logs the current and peak memory use, each as the maximum over all processes.

    Every `log_every_n_steps` steps it logs these values in MiB:

    - `memory/current`: memory held by tensors on the device.
    - `memory/peak`: the maximum of that since the last log.
    - `memory/reserved`: memory held by the device's caching allocator, if it has one.
    - `memory/host`: the resident memory of the process.

    On the CPU, current and peak are the resident memory, and the peak is that since the process started. Under every
    strategy, each process counts its own shard.

    If memory runs out on CUDA, the allocation history is written to `memory-rank<rank>-step<step>.pickle`. Open the
    file on https://pytorch.org/memory_viz to inspect it. On other devices a warning shows the figures.

    Cost on a device: no kernel, and no wait of the host.

    Args:
        snapshot_dir: The directory for the allocation history. If None, `trainer.log_dir`.
        snapshot: Record the allocation history, at a cost of about one microsecond per allocation.
        max_entries: The maximum number of allocations in the history.
        every: The interval, in place of `log_every_n_steps`: a number of steps, or a duration such as `"500 steps"`,
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
        self.schedule = self.every if isinstance(self.every, Duration) else None
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
            # Each logged peak covers only the time since the previous log.
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
        logger.warning("%s The allocation history is in %s. Open it on https://pytorch.org/memory_viz.", where, path)

    def teardown(self, trainer: Trainer, task: Task, stage: str) -> None:
        if self._history is not None:
            self._history.stop()
            self._history = None
