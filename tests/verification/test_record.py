"""What the recorder measures, and which of a script's outputs it takes over."""

from __future__ import annotations

import math
import statistics
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
from drivetrain.verification.record import SilentTracker, sums_of


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


LARGE = torch.randn(600_000, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "tensor",
    [
        LARGE,
        LARGE.bfloat16(),
        LARGE.double().reshape(600, 1000).T,
        torch.tensor([3 + 4j, 1j]),
        torch.tensor([[3, 4]]),
        torch.tensor(-2.0),
        torch.tensor([]),
    ],
    ids=lambda tensor: f"{tensor.dtype} {tuple(tensor.shape)}",
)
def test_sums_have_the_size_of_the_tensor_and_its_factors(tensor: torch.Tensor) -> None:
    wide = tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
    is_small = tensor.numel() <= 32

    sums = sums_of(tensor)

    assert math.hypot(*sums) == pytest.approx(float(torch.linalg.vector_norm(wide)), rel=1e-6 if is_small else 0.3)
    assert sums_of(4 * tensor) == pytest.approx([4 * each for each in sums])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_sums_differ_as_much_as_tensors_do(dtype: torch.dtype) -> None:
    tensor = torch.randn(1000, 501, generator=torch.Generator().manual_seed(0)).to(dtype)
    sums = sums_of(tensor)
    ratios = []
    for row in range(0, 1000, 20):
        other = tensor.clone()
        other[row] *= 0.5
        ratios.append(math.dist(sums, sums_of(other)) / float(torch.dist(tensor, other)))
    assert statistics.median(ratios) == pytest.approx(0.7, abs=0.3)
    assert sum(ratio < 0.1 for ratio in ratios) <= 8


def test_sums_of_small_tensors_are_their_elements() -> None:
    tensor = torch.tensor([[1.0, -2.0], [0.5, 0.0]])

    assert [abs(each) for each in sums_of(tensor)] == [1.0, 2.0, 0.5, 0.0]
