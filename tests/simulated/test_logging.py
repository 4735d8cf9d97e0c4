"""Values that a task logs from a device, from the CPU, and of metrics, in one epoch and over a resumption."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from drivetrain import Task, Trainer
from tests.pool import DEVICE, run_in_processes
from tests.simulated.devices import simulated as simulated

pytestmark = pytest.mark.usefixtures("simulated")

ROWS = 8


class Logs(Task):
    """Logs one name from two devices in turn, every reduction, and a metric beside a mean."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3)
        self.accuracy = MulticlassAccuracy(3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.layer(batch[0])
        loss = nn.functional.cross_entropy(logits, batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("turns", loss.detach().cpu() if batch_idx % 2 else loss.detach(), on_step=False, on_epoch=True)
        for reduction in ("min", "max", "sum"):
            self.log(reduction, loss.detach(), on_step=False, on_epoch=True, reduce_fx=reduction)
        self.log("number", float(batch_idx), on_step=False, on_epoch=True)
        self.accuracy(logits, batch[1])
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def logged(device: str, folder: str, resumes: bool) -> dict[str, float]:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(160 * ROWS, 4, generator=generator), torch.randint(0, 3, (160 * ROWS,), generator=generator)

    def trainer(**options: Any) -> Trainer:
        quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
        return Trainer(accelerator=device, devices=1, logger="csv", default_root_dir=folder, **quiet, **options)

    loader = DataLoader(TensorDataset(x, y), batch_size=ROWS)
    path = None
    if resumes:  # so late that values have been folded to a total, and in the middle of an epoch
        first = trainer(max_epochs=1, max_steps=100)
        first.fit(Logs(), loader)
        path = str(Path(folder) / "middle.ckpt")
        first.save_checkpoint(path)
    last = trainer(max_epochs=1)
    last.fit(Logs(), loader, ckpt_path=path)
    return {name: float(value) for name, value in last.callback_metrics.items()}


@pytest.mark.parametrize("resumes", [False, True], ids=["whole", "resumed"])
def test_values_of_several_devices_are_those_of_the_cpu(tmp_path: Path, resumes: bool) -> None:
    (expected,) = run_in_processes(logged, 1, args=("cpu", str(tmp_path / "cpu"), resumes), timeout=150)
    (found,) = run_in_processes(
        logged, 1, args=("sim", str(tmp_path / "sim"), resumes), env={DEVICE: "sim"}, timeout=150
    )
    assert len(expected) >= 8
    assert found == pytest.approx(expected, abs=1e-6)
