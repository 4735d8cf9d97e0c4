"""The memory of a run, as the process itself sees it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from drivetrain import MemoryMonitor, PartialState, Trainer, release_memory
from tests.pool import device, run_in_processes
from tests.trackers.test_registry import ListTracker
from tests.trainer.tasks import Weight, ones

MIB = 2**20


class Hoarding(Weight):
    """Keeps 8 MiB of each batch; on the second process twice as much."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[torch.Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.kept.append(torch.ones(MIB * 2 * (1 + self.trainer.global_rank), device=self.w.device))
        return super().training_step(batch, batch_idx)


def quiet(tracker: ListTracker | bool, **options: Any) -> Trainer:
    given = {"max_epochs": 1, "accelerator": device(), "log_every_n_steps": 1, "enable_checkpointing": False}
    given |= {"enable_progress_bar": False, "enable_model_summary": False, "logger": tracker}
    return Trainer(**(given | options))


def resident() -> float:
    """The memory of this process, in MiB."""
    return float(psutil.Process(os.getpid()).memory_info().rss / MIB)


def rows_of(tracker: ListTracker) -> list[dict[str, float]]:
    return [row for _, row in tracker.rows if "memory/current" in row]


def test_what_a_step_keeps_shows() -> None:
    tracker = ListTracker()
    PartialState(device=device())
    release_memory()  # what earlier tests have freed would be used again
    quiet(tracker, callbacks=[MemoryMonitor()]).fit(Hoarding(), ones(4))
    rows = rows_of(tracker)
    assert len(rows) == 4
    assert rows[3]["memory/current"] - rows[0]["memory/current"] == pytest.approx(3 * 8, abs=6)
    assert rows[3]["memory/current"] <= rows[3]["memory/peak"]
    assert rows[3]["memory/host"] == pytest.approx(resident(), rel=0.2)


def fit_hoarding() -> Any:
    torch.set_num_threads(1)
    tracker = ListTracker()
    quiet(tracker, strategy="ddp", callbacks=[MemoryMonitor()]).fit(Hoarding(), ones(8))
    return rows_of(tracker), resident()


@pytest.mark.slow
def test_the_process_that_takes_the_most_counts() -> None:
    (rows, own), (_, other) = run_in_processes(fit_hoarding)
    assert other > own + 20  # 4 x 8 MiB more
    assert rows[-1]["memory/current"] > own + 15


def test_running_out_of_memory_is_reported_with_figures(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Weight):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 1:
                raise torch.OutOfMemoryError("on purpose")
            return super().training_step(batch, batch_idx)

    with pytest.raises(torch.OutOfMemoryError):
        quiet(ListTracker(), callbacks=[MemoryMonitor()]).fit(Failing(), ones(3))
    [line] = [record.getMessage() for record in caplog.records if "out of memory" in record.getMessage()]
    assert line.startswith("Rank 0 has run out of memory in step 2: ")


@pytest.mark.gpu
def test_the_history_of_allocations_is_written(tmp_path: Path) -> None:
    class Greedy(Weight):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return torch.ones(2**50, device=self.device).sum() * self.w

    trainer = quiet(ListTracker(), accelerator="cuda", callbacks=[MemoryMonitor(tmp_path)])
    with pytest.raises(torch.OutOfMemoryError):
        trainer.fit(Greedy(), ones(3))
    [path] = tmp_path.glob("memory-rank0-step0.pickle")
    assert path.stat().st_size > 0
