"""The engine tells an observer of what it does, and computes the same as without one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator, Task, Trainer, TrainerCLI
from drivetrain.runtime import observer
from drivetrain.runtime.observer import Observer


class Fit(Task):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.layer(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def loader() -> DataLoader:
    return DataLoader(TensorDataset(torch.arange(12.0).reshape(6, 2)), 2)


def trained(folder: Path) -> list[torch.Tensor]:
    """Return weights that the Trainer and a loop with the Accelerator have trained."""
    task = TrainerCLI(Fit, run=False, args=["--trainer.accelerator=cpu"]).model
    Trainer(max_epochs=1, accelerator="cpu", gradient_clip_val=1.0, default_root_dir=folder / "runs").fit(
        task, loader()
    )
    accelerator = Accelerator(cpu=True, project_dir=str(folder))
    accelerator.init_trackers("run")
    task = Fit()
    optimizer = torch.optim.SGD(task.layer.parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    model, optimizer, schedule, data = accelerator.prepare(task.layer, optimizer, schedule, loader())
    for (x,) in data:
        accelerator.backward(model(x).square().mean())
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.save_state(str(folder / "state"))
    accelerator.load_state(str(folder / "state"))
    return [task.layer.weight.detach(), *(each.detach() for each in model.parameters())]


class Counting(Observer):
    """Observer that counts the calls of each method, and otherwise is the base class."""

    def __init__(self) -> None:
        self.calls: dict[str, int] = {}
        self.rows = 0

    def __getattribute__(self, name: str) -> Any:
        if name in vars(Observer) and not name.startswith("_"):
            self.calls[name] = self.calls.get(name, 0) + 1
        return super().__getattribute__(name)

    def batches(self, loader: Any, pairs: Iterator[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
        for batch, info in pairs:
            self.rows += info.rows
            yield batch, info


def test_an_observer_is_called_and_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = trained(tmp_path / "without")
    watching = Counting()
    monkeypatch.setattr(observer, "current", watching)

    found = trained(tmp_path / "with")

    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    methods = {name for name in vars(Observer) if not name.startswith("_")}
    assert set(watching.calls) == methods
    assert watching.rows == 12
    assert watching.calls["model"] == 2


def test_there_is_no_observer_by_default() -> None:
    assert observer.current is None
