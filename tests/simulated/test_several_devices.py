"""Trainers of one process on different devices, one after the other and in turn."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator, ConfigurationError, Task, Trainer
from tests.pool import DEVICE, run_in_processes
from tests.simulated.devices import simulated as simulated
from tests.simulated.devices import start

pytestmark = pytest.mark.usefixtures("simulated")


class Learns(Task):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 1)
        self.seen: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen.append(str(batch[0].device))
        loss = self.layer(batch[0]).square().mean()
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def data() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(32.0).reshape(8, 4)), batch_size=2)


def made(accelerator: str, devices: Any = 1) -> Trainer:
    return Trainer(
        accelerator=accelerator,
        devices=devices,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def fitted(trainer: Trainer) -> tuple[set[str], list[float]]:
    task = Learns()
    trainer.max_epochs = trainer.current_epoch + 1
    trainer.fit(task, data())
    return set(task.seen), task.layer.weight.detach().cpu().flatten().tolist()


def in_turn() -> list[tuple[set[str], list[float]]]:
    start(2)
    first = made("sim", [0])
    found = [fitted(first)]
    second = made("cpu")
    found += [fitted(second), fitted(made("sim", [1])), fitted(made("cpu")), fitted(first), fitted(second)]
    return found


def test_each_trainer_trains_on_its_own_device() -> None:
    [found] = run_in_processes(in_turn, 1, timeout=120)
    assert [devices for devices, _ in found] == [{"sim:0"}, {"cpu"}, {"sim:1"}, {"cpu"}, {"sim:0"}, {"cpu"}]
    for _, weights in found:
        assert weights == pytest.approx(found[0][1], abs=5e-6)


def accelerator_between() -> tuple[str, str, str, list[str]]:
    start(2)
    accelerator = Accelerator(device="sim:0")
    model, loader = accelerator.prepare(nn.Linear(4, 1), data())
    before = str(accelerator.device)
    made("cpu").fit(Learns(), data())
    [first, *_] = [str(batch[0].device) for batch in loader]
    late = accelerator.prepare(nn.Linear(2, 2))
    devices = [str(next(module.parameters()).device) for module in (model, late)]
    return before, str(accelerator.device), first, devices


def test_an_accelerator_stays_on_its_device() -> None:
    [found] = run_in_processes(accelerator_between, 1, timeout=120)
    assert found == ("sim:0", "sim:0", "sim:0", ["sim:0", "sim:0"])


def moved_within_a_group() -> str:
    made("sim", "auto")
    try:
        made("cpu", "auto")
    except ConfigurationError as error:
        return str(error)
    return ""


def test_processes_of_a_group_stay_on_their_devices() -> None:
    for found in run_in_processes(moved_within_a_group, 2, env={DEVICE: "sim"}, timeout=120):
        assert "already runs on 'sim:" in found
        assert "cannot be moved to 'cpu'" in found
