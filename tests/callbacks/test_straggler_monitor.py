"""The process that the others wait for is named."""

from __future__ import annotations

import logging
import re
import socket
import time
from typing import Any

import pytest
import torch

from drivetrain import Callback, ConfigurationError, StragglerMonitor, Trainer
from drivetrain.callbacks.straggler_monitor import OwnTime
from tests.pool import device, run_in_processes
from tests.trackers.test_registry import ListTracker
from tests.trainer.tasks import Weight, ones

SECONDS = 0.03


class SlowOnRank1(Weight):
    """Takes its time on the second process, where it is said to."""

    def __init__(self, forward: float, backward: float) -> None:
        super().__init__()
        self.seconds = forward, backward

    def sleep(self, seconds: float) -> None:
        if self.trainer.global_rank == 1:
            time.sleep(seconds)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(SECONDS / 10)
        self.sleep(self.seconds[0])
        return super().training_step(batch, batch_idx)


class Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def fit(forward: float, every: int) -> tuple[list[str], list[Any], list[tuple[Any, ...]]]:
    torch.set_num_threads(1)
    messages, tracker = Messages(), ListTracker()
    logging.getLogger("drivetrain").addHandler(messages)
    monitor = StragglerMonitor(every_n_steps=every, measured_steps=4)
    trainer = Trainer(
        accelerator=device(),
        strategy="ddp",
        max_epochs=2,
        logger=tracker,
        callbacks=[monitor],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(SlowOnRank1(forward, 0.0), ones(20))
    named = [line for line in messages.lines if "All processes wait for this one" in line]
    rows = [(step, row) for step, row in tracker.rows if "straggler/rank" in row]
    return named, rows, [tuple(each) for each in monitor.latest]


def test_one_slow_process_is_named_with_its_machine_once() -> None:
    (named, rows, latest), (silent, *_) = run_in_processes(fit, 2, (SECONDS, 5))
    assert silent == []
    assert len(named) == 1
    found = re.match(
        r"At step 5 rank 1 on (\S+) takes ([\d.]+) times as long as the other 1 for its own part of a step: "
        r"([\d.]+) ms \(.* ms waiting for its loader, ([\d.]+) ms in the forward\)",
        named[0],
    )
    assert found is not None, named
    assert found[1] == socket.gethostname()
    assert float(found[4]) >= 1000 * SECONDS  # what it really took
    assert float(found[2]) >= 1.5
    assert [step for step, _ in rows] == [5, 10, 15, 20]
    assert all(row["straggler/rank"] == 1 and row["straggler/slowest"] >= SECONDS for _, row in rows)
    fast, slow = (OwnTime(*each) for each in latest)
    assert (fast.rank, slow.rank) == (0, 1)
    assert slow.forward >= SECONDS > 0


@pytest.mark.slow
def test_a_loader_that_is_slow_on_one_process_is_told_from_a_slow_forward() -> None:
    (named, *_), _ = run_in_processes(fit_with_a_slow_loader, 2)
    waiting, forward = re.search(r"\((.*) ms waiting for its loader, (.*) ms in the forward\)", named[0]).groups()
    assert float(waiting) >= 1000 * SECONDS > float(forward) / 2


class Loading(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> list[torch.Tensor]:
        if index % 2:  # those of the second process
            time.sleep(SECONDS)
        return [torch.ones(1)]


def fit_with_a_slow_loader() -> tuple[list[str], Any]:
    torch.set_num_threads(1)
    messages = Messages()
    logging.getLogger("drivetrain").addHandler(messages)
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    monitor = StragglerMonitor(every_n_steps=10, measured_steps=5)
    trainer = Trainer(accelerator=device(), strategy="ddp", max_epochs=1, callbacks=[monitor], **options)
    trainer.fit(SlowOnRank1(0.0, 0.0), torch.utils.data.DataLoader(Loading()))
    return [line for line in messages.lines if "All processes wait for this one" in line], None


def test_one_process_alone_has_nothing_to_compare(tmp_path: Any) -> None:
    monitor: Callback = StragglerMonitor(every_n_steps=2)
    trainer = Trainer(max_epochs=1, logger=False, callbacks=[monitor], enable_checkpointing=False)
    trainer.fit(Weight(), ones(5))
    assert len(monitor.latest) == 1


@pytest.mark.parametrize("given", [{"every_n_steps": 0}, {"threshold": 1.0}, {"measured_steps": 0}])
def test_arguments_that_cannot_be_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"StragglerMonitor\(every_n_steps="):
        StragglerMonitor(**given)
