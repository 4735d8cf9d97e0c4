"""Histograms of weights and gradients, in trackers that show them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import ConfigurationError, Task, TensorBoardLogger, Trainer, WeightHistograms
from tests.pool import device, run_in_processes
from tests.trackers.test_registry import ListTracker


class Showing(ListTracker):
    def __init__(self) -> None:
        super().__init__()
        self.shown: dict[int, dict[str, torch.Tensor]] = {}

    def log_histogram(self, values: Mapping[str, Any], step: int | None = None) -> None:
        self.shown[step or 0] = dict(values)


class Net(Task):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 4, bias=False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(tracker: Any, strategy: str = "single", root: Any = None, **options: Any) -> dict[int, dict[str, list[float]]]:
    torch.set_num_threads(1)
    trainer = Trainer(
        max_epochs=1,
        accelerator=device(),
        strategy=strategy,
        logger=tracker,
        callbacks=[WeightHistograms(every_n_steps=2, **options)],
        gradient_clip_val=1e-9,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=root,
    )
    torch.manual_seed(1)
    trainer.fit(Net(), DataLoader(TensorDataset(torch.randn(8, 6)), batch_size=2 // trainer.world_size))
    shown = getattr(tracker, "shown", {})
    return {step: {name: sorted(each.tolist()) for name, each in row.items()} for step, row in shown.items()}


def test_each_parameter_and_its_gradient_before_clipping() -> None:
    shown = fit(Showing())
    assert sorted(shown) == [2, 4]
    assert sorted(shown[2]) == ["gradients/layer.weight", "weights/layer.weight"]
    # Clipped to nothing, the weights have stayed what they were.
    assert shown[2]["weights/layer.weight"] == pytest.approx(sorted(Net().layer.weight.flatten().tolist()), abs=1e-6)
    assert max(map(abs, shown[2]["gradients/layer.weight"])) > 1e-4


def fit_sharded(strategy: str) -> Any:
    return fit(Showing(), strategy)


@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp"])
def test_under_strategies_the_distribution_is_that_of_the_whole(strategy: str) -> None:
    alone = fit(Showing())
    first, second = run_in_processes(fit_sharded, 2, (strategy,))
    assert second == {}
    assert sorted(first) == sorted(alone)
    for step, row in alone.items():
        for name, values in row.items():
            assert first[step][name] == pytest.approx(values, abs=1e-6), name


def test_large_tensors_are_sampled() -> None:
    shown = fit(Showing(), max_values=5, gradients=False)
    assert {name: len(values) for name, values in shown[2].items()} == {"weights/layer.weight": 5}


@pytest.mark.slow
def test_tensorboard_shows_them(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(tmp_path)
    fit(logger, root=tmp_path)
    events = EventAccumulator(logger.log_dir, {"histograms": 0})
    events.Reload()
    assert sorted(events.Tags()["histograms"]) == ["gradients/layer.weight", "weights/layer.weight"]
    [first, _] = events.Histograms("weights/layer.weight")
    assert (first.step, first.histogram_value.num) == (2, 24)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="enable weights or gradients"):
        WeightHistograms(weights=False, gradients=False)
    with pytest.raises(ConfigurationError, match="needs a logger, but the Trainer has none"):
        fit(False)
