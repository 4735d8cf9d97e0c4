"""The summary of a model counts all of it, however it is divided."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from drivetrain import FSDP, DeepSpeed, ModelSummary, Parallel, Trainer
from tests.conformance.language_model import LanguageTask, Run
from tests.conformance.test_parallel import layers_split
from tests.pool import run_in_processes

pytestmark = pytest.mark.sharded

STRATEGIES: dict[str, Any] = {
    "ddp": lambda: "ddp",
    "fsdp": FSDP,
    "tp": lambda: Parallel(tp=2, tp_plan=layers_split()),
    "pp": lambda: Parallel(pp=2),
    "zero-1": lambda: DeepSpeed(stage=1),
    "zero-3": lambda: DeepSpeed(stage=3),
}


def task_with_something_frozen() -> LanguageTask:
    task = LanguageTask(layers=2)
    for name, parameter in task.named_parameters():
        parameter.requires_grad_("norm" not in name)
    return task


def printed() -> dict[str, str]:
    torch.set_num_threads(1)
    return {name: printed_under(make()) for name, make in STRATEGIES.items()}


def printed_under(strategy: Any) -> str:
    trainer = Trainer(
        accelerator="cpu",
        strategy=strategy,
        max_steps=1,
        callbacks=[ModelSummary(max_depth=-1)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    with contextlib.redirect_stdout(io.StringIO()) as text:
        trainer.fit(task_with_something_frozen(), DataLoader(Run("32", 2).data(), batch_size=4))
    return text.getvalue()


def table_in(text: str) -> list[str]:
    """The lines of the summary, without the figures of the run around it."""
    lines = text.splitlines()
    [last] = [number for number, line in enumerate(lines) if line.endswith("of them trainable")]
    return lines[: last + 1]


def test_it_counts_what_peers_hold() -> None:
    expected = table_in(printed_under("single"))
    first, second = run_in_processes(printed, 2, timeout=120)
    assert sum(p.numel() for p in task_with_something_frozen().parameters() if not p.requires_grad) > 0
    for name, text in first.items():
        assert table_in(text) == expected, name
    assert not any("trainable" in text for text in second.values())
