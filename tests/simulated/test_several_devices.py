"""Trainers of one process on different devices, one after the other and in turn."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator, ConfigurationError, PartialState, Task, Trainer
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


class Loop:
    """A loop with an Accelerator of its own, which can train one epoch after another.

    Args:
        options: Options of the Accelerator.
    """

    def __init__(self, **options: Any) -> None:
        self.accelerator = Accelerator(**options)
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, data())

    def epoch(self) -> tuple[set[str], list[float]]:
        seen = set()
        for (batch,) in self.loader:
            seen.add(str(batch.device))
            self.accelerator.backward(self.model(batch).square().mean())
            self.optimizer.step()
            self.optimizer.zero_grad()
        return seen, self.model.weight.detach().cpu().flatten().tolist()


def loops_in_turn() -> tuple[list[tuple[set[str], list[float]]], list[tuple[set[str], list[float]]], list[str]]:
    sim = start(2)
    trained = [fitted(made("sim", [0]))]
    loops = [Loop(cpu=True)]
    first = [loops[0].epoch()]
    trained += [fitted(made("sim", [1])), fitted(made("cpu"))]
    loops += [Loop(device="sim:0"), Loop(device="sim:1"), Loop(cpu=True)]
    sim.reset_clock(to_device=1e6, to_host=1e6, between=1e6, kernels=1e6)
    first += [loop.epoch() for loop in loops[1:]]
    second = [loop.epoch() for loop in loops]
    assert [str(loop.accelerator.device) for loop in loops] == ["cpu", "sim:0", "sim:1", "cpu"]
    assert [devices for devices, _ in trained] == [{"sim:0"}, {"sim:1"}, {"cpu"}]
    return first, second, sim.hazards


def test_each_accelerator_trains_on_its_own_device() -> None:
    [(first, second, hazards)] = run_in_processes(loops_in_turn, 1, timeout=120)
    for found in (first, second):
        assert [devices for devices, _ in found] == [{"cpu"}, {"sim:0"}, {"sim:1"}, {"cpu"}]
        for _, weights in found:
            assert weights == pytest.approx(found[0][1], abs=5e-6)
    assert first[0][1] != second[0][1]
    assert hazards == []


def a_state_does_not_move() -> str:
    start(2)
    Accelerator(cpu=True)
    with pytest.raises(ConfigurationError) as raised:
        PartialState(device="sim:1")
    return str(raised.value)


def test_only_an_engine_moves_the_process() -> None:
    [said] = run_in_processes(a_state_does_not_move, 1, timeout=120)
    assert "already runs on 'cpu', so it cannot be moved to 'sim:1'" in said


def moved_within_a_group(first: str, engine: str) -> str:
    make = {"trainer": lambda kind: made(kind, "auto"), "accelerator": lambda kind: Accelerator(device=kind)}[engine]
    make(first)
    try:
        make({"sim": "cpu", "cpu": "sim"}[first])
    except ConfigurationError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("engine", ["trainer", "accelerator"])
@pytest.mark.parametrize("first", ["sim", "cpu"])
def test_processes_of_a_group_stay_on_their_devices(first: str, engine: str) -> None:
    for found in run_in_processes(moved_within_a_group, 2, args=(first, engine), env={DEVICE: "sim"}, timeout=120):
        assert f"already runs on '{first}" in found
        assert "cannot be moved to" in found
