"""Batches reach the device one ahead: beside the computation, and never more than two at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Task, Trainer
from tests.shared_runs import SharedRuns
from tests.simulated.devices import Simulated, start
from tests.simulated.devices import simulated as simulated

pytestmark = pytest.mark.usefixtures("simulated")

runs = SharedRuns(__name__, world_size=1)

MB = 1_000_000
BATCHES = 8


class SlowOptimizer(torch.optim.SGD):
    """Steps for some seconds of the device."""

    def __init__(self, parameters: Any, sim: Simulated, seconds: float) -> None:
        super().__init__(parameters, lr=0.1)
        self.sim, self.seconds = sim, seconds

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        super().step(closure)
        self.sim.spend(self.seconds, device=0)


class Mean(Task):
    """Takes some seconds of the device for each micro-batch, and waits for it, as one that reads its loss does."""

    def __init__(self, sim: Simulated, in_step: float = 0, in_optimizer: float = 0) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.sim, self.in_step, self.in_optimizer = sim, in_step, in_optimizer
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = (batch[0].mean() - self.weight) ** 2
        self.sim.spend(self.in_step, device=0)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return SlowOptimizer(self.parameters(), self.sim, self.in_optimizer)


class Augmenting(Mean):
    """Has a hook of its own around the transfer."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] + 1]


def train(
    accumulate: int, workers: int = 0, kind: type[Mean] = Mean, **seconds: float
) -> tuple[float, int, list[str], list[float]]:
    """Train on batches of 1 MB that take 0.1 s to copy: seconds in all, most bytes on the device, faults, losses."""
    sim = start(2)
    rows = torch.arange(BATCHES, dtype=torch.float32)[:, None].expand(BATCHES, MB // 4).contiguous()
    loader = DataLoader(TensorDataset(rows), batch_size=1, num_workers=workers, pin_memory=True)
    if workers:
        loader.collate_fn = lambda samples: [torch.stack([sample[0] for sample in samples])]  # read by workers then
    trainer = Trainer(
        accelerator="sim",
        devices=1,
        max_epochs=1,
        accumulate_grad_batches=accumulate,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    task = kind(sim, **seconds)

    def begin(*args: Any) -> None:
        torch.accelerator.synchronize()
        sim.reset_clock(to_device=10 * MB)
        sim.reset_peak(0)

    task.on_train_start = begin  # type: ignore[method-assign]
    trainer.fit(task, loader)
    torch.accelerator.synchronize()
    return sim.now, sim.peak(0), sim.hazards, task.losses


@runs
def window_of_four() -> Any:
    return train(4, in_step=0.1)


@runs
def window_of_one() -> Any:
    return train(1, in_step=0.1)


@runs
def workers_and_a_window_of_one() -> Any:
    return train(1, workers=1, in_step=0.1)


@runs
def workers_and_a_slow_optimizer() -> Any:
    return train(2, workers=1, in_optimizer=0.2)


@runs
def hooks_and_a_window_of_four() -> Any:
    return train(4, kind=Augmenting, in_step=0.1)


@pytest.mark.parametrize(
    ("run", "seconds"),
    [
        # In each of two windows, the first batch is copied beside nothing.
        pytest.param(window_of_four, 0.1 * (BATCHES + 2), id="the micro-batches of a window"),
        pytest.param(workers_and_a_window_of_one, 0.1 * (BATCHES + 1), id="batches that workers have read"),
        # Four steps of the optimizer, of 0.2 s each, and the two copies before the first.
        pytest.param(workers_and_a_slow_optimizer, 0.2 * 4 + 0.1 * 2, id="beside the optimizer"),
        pytest.param(window_of_one, 0.2 * BATCHES, id="not what is read only once the step is over"),
        pytest.param(hooks_and_a_window_of_four, 0.2 * BATCHES, id="not through a hook, whose turn is later"),
    ],
)
def test_a_batch_is_copied_while_the_one_before_is_computed_on(run: Callable[[], Any], seconds: float) -> None:
    ((taken, _, hazards, _),) = runs.of(run)
    assert taken == pytest.approx(seconds, abs=0.01)
    assert hazards == []


@pytest.mark.parametrize("run", [window_of_four, workers_and_a_window_of_one, workers_and_a_slow_optimizer])
def test_no_more_than_two_batches_are_on_the_device(run: Callable[[], Any]) -> None:
    ((_, peak, _, _),) = runs.of(run)
    assert 2 * MB <= peak < 2.5 * MB


def test_losses_are_those_of_batches_that_are_copied_in_turn() -> None:
    ((_, _, _, alone),) = runs.of(window_of_one)
    ((_, _, _, ahead),) = runs.of(workers_and_a_window_of_one)
    assert len(alone) == BATCHES
    assert ahead == alone
