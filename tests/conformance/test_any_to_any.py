"""A run that one strategy saved goes on under any other as if nothing had happened, optimizer and all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from drivetrain import DDP, FSDP, Callback, DeepSpeed, Parallel, Trainer
from tests.conformance import language_model
from tests.conformance.harness import MAX_NORM
from tests.conformance.language_model import LanguageTask, Run
from tests.conformance.test_parallel import layers_split
from tests.pool import run_in_processes

pytestmark = pytest.mark.sharded

RUN = Run(accumulate=2, layers=2)
SAVED_AFTER = 2  # of four steps

STRATEGIES: dict[str, tuple[int, Any]] = {
    "single": (1, lambda: "single"),
    "ddp": (2, DDP),
    "fsdp": (2, FSDP),
    "fsdp-hybrid": (4, lambda: FSDP(replicate_size=2)),
    "tp": (2, lambda: Parallel(tp=2, tp_plan=layers_split())),
    "cp": (2, lambda: Parallel(cp=2)),
    "pp": (2, lambda: Parallel(pp=2)),
    "tp-fsdp": (4, lambda: Parallel(tp=2, dp_shard=2, tp_plan=layers_split())),
    "pp-fsdp": (4, lambda: Parallel(pp=2, dp_shard=2)),
    "zero-1": (2, lambda: DeepSpeed(stage=1)),
    "zero-3": (2, lambda: DeepSpeed(stage=3)),
}
EASY = [name for name, (processes, _) in STRATEGIES.items() if processes <= 2]


class SaveOnce(Callback):
    def __init__(self, directory: str) -> None:
        self.directory = directory

    def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx):
        if trainer.global_step == SAVED_AFTER and (batch_idx + 1) % RUN.accumulate == 0:
            trainer.save_checkpoint(self.directory)


def train(strategy: str, resume: str | None = None, save_to: str | None = None) -> dict[str, torch.Tensor]:
    torch.set_num_threads(1)
    trainer = Trainer(
        accelerator="cpu",
        strategy=STRATEGIES[strategy][1](),
        accumulate_grad_batches=RUN.accumulate,
        gradient_clip_val=MAX_NORM,
        max_steps=SAVED_AFTER if save_to else -1,
        max_epochs=1,
        callbacks=[SaveOnce(save_to)] if save_to else [],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    rows = RUN.rows(trainer.strategy.topology.data_shard.count)
    trainer.fit(LanguageTask(layers=RUN.layers), DataLoader(RUN.data(), batch_size=rows), resume=resume)
    assert trainer.global_step == (SAVED_AFTER if save_to else 4)
    return trainer.strategy.state.full(trainer.model)


def resume_each(strategy: str, directories: list[str]) -> list[dict[str, torch.Tensor]]:
    return [train(strategy, resume=directory) for directory in directories]


def check(writers: list[str], reader: str, root: Path) -> None:
    expected = language_model.train_plain(RUN).parameters
    directories = [str(root / writer) for writer in writers]
    for writer, directory in zip(writers, directories, strict=True):
        if not Path(directory).exists():
            run_in_processes(train, STRATEGIES[writer][0], args=(writer,), kwargs={"save_to": directory}, timeout=90)
    whole = run_in_processes(resume_each, STRATEGIES[reader][0], args=(reader, directories), timeout=300)[0]
    for writer, parameters in zip(writers, whole, strict=True):
        assert parameters.keys() == {f"model.{name}" for name in expected}
        for name, value in expected.items():
            torch.testing.assert_close(
                parameters[f"model.{name}"],
                value,
                atol=5e-6,
                rtol=5e-6,
                msg=lambda m, w=writer, n=name: f"{w} to {reader}, {n}: {m}",
            )


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the strategies have saved, each once for all readers."""
    return tmp_path_factory.mktemp("any_to_any")


@pytest.mark.parametrize("reader", EASY)
def test_goes_on_under_another_strategy(reader: str, root: Path) -> None:
    check(EASY, reader, root)


@pytest.mark.slow
@pytest.mark.parametrize("reader", STRATEGIES)
def test_goes_on_over_four_processes_and_back(reader: str, root: Path) -> None:
    hard = [name for name in STRATEGIES if name not in EASY]
    check(hard if reader in EASY else list(STRATEGIES), reader, root)
