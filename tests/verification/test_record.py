"""What the recorder measures, and which of a script's outputs it takes over."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.compat.accelerate import Accelerator
from drivetrain.compat.lightning import Fabric
from drivetrain.compat.lightning.pytorch import Trainer
from drivetrain.compat.lightning.pytorch.loggers import CSVLogger
from drivetrain.runtime import observer
from drivetrain.verification.record import SilentTracker, norm_and_sums


class Silencing(observer.Observer):
    """Observer that replaces all trackers by one that keeps what is logged."""

    def __init__(self) -> None:
        self.logged: list[Mapping[str, Any]] = []

    def trackers(self, trackers: list[Any]) -> list[Any]:
        return [SilentTracker(lambda values, step: self.logged.append(values))]


def test_trackers_that_are_set_later_are_silenced_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    silencing = Silencing()
    monkeypatch.setattr(observer, "current", silencing)

    trainer = Trainer(logger=False, accelerator="cpu", default_root_dir=tmp_path)
    trainer.logger = CSVLogger(tmp_path)
    fabric = Fabric(accelerator="cpu", loggers=CSVLogger(tmp_path))
    trainer.logger.log_metrics({"accuracy": 0.5}, step=1)
    fabric.log("loss", 2.0)
    accelerator = Accelerator(cpu=True)
    accelerator.trackers = [CSVLogger(tmp_path)]
    accelerator.log({"rows": 3.0})

    assert silencing.logged == [{"accuracy": 0.5}, {"loss": 2.0}, {"rows": 3.0}]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "tensor",
    [
        torch.linspace(-1, 1, 600_000),
        torch.linspace(-1, 1, 600_000).bfloat16(),
        torch.linspace(-1, 1, 600_000, dtype=torch.float64).reshape(600, 1000).T,
        torch.tensor([3 + 4j, 1j]),
        torch.tensor([[3, 4]]),
        torch.tensor(-2.0),
        torch.tensor([]),
    ],
    ids=lambda tensor: f"{tensor.dtype} {tuple(tensor.shape)}",
)
def test_norms_are_those_of_double_precision(tensor: torch.Tensor) -> None:
    wide = tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)

    assert norm_and_sums(tensor)[0] == pytest.approx(float(torch.linalg.vector_norm(wide)), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_sums_differ_as_much_as_tensors_do(dtype: torch.dtype) -> None:
    tensor = torch.randn(1000, 501, generator=torch.Generator().manual_seed(0)).to(dtype)
    other = tensor.clone()
    other[900] *= 0.5

    norm, *sums = norm_and_sums(tensor)
    changed, *different = norm_and_sums(other)

    assert math.dist(sums, different) == pytest.approx(float(torch.dist(tensor, other)), rel=0.3)
    assert abs(norm - changed) < 0.05 * math.dist(sums, different)


def test_sums_of_small_tensors_are_their_elements() -> None:
    tensor = torch.tensor([[1.0, -2.0], [0.5, 0.0]])

    assert [abs(each) for each in norm_and_sums(tensor)[1:]] == [1.0, 2.0, 0.5, 0.0]
