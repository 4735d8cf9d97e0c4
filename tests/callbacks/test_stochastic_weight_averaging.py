from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn

from drivetrain import ConfigurationError
from drivetrain.callbacks import Callback, ModelCheckpoint, StochasticWeightAveraging
from tests.callbacks.guarded import Regression, rows, train
from tests.pool import run_in_processes


class Plain(Regression):
    def __init__(self) -> None:
        super().__init__({})
        self.rates: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 0:
            self.rates.append(self.optimizers().param_groups[0]["lr"])
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)]


class Normed(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.norm(x))


def by_torch(kind: type[Plain], epochs: int, start: int, annealing: int, strategy: str) -> tuple[AveragedModel, Plain]:
    """Torch's recipe in a plain loop: the average of the weights that each epoch begins with."""
    task = kind()
    average = AveragedModel(task)
    [optimizer], [scheduler] = task.configure_optimizers()
    swa: Any = None
    for epoch in range(epochs):
        if epoch >= start:
            if swa is None:
                swa = SWALR(optimizer, swa_lr=0.01, anneal_epochs=annealing, anneal_strategy=strategy)  # type: ignore[arg-type]
            average.update_parameters(task)
        task.rates.append(optimizer.param_groups[0]["lr"])
        for inputs, targets in rows(4):
            optimizer.zero_grad()
            nn.functional.mse_loss(task(inputs), targets).backward()
            optimizer.step()
        (scheduler if swa is None else swa).step()
    update_bn(rows(4), average)
    return average, task


@pytest.mark.parametrize("kind", [Plain, Normed])
@pytest.mark.parametrize(("given", "start", "annealing", "strategy"), [(3, 2, 2, "cos"), (0.5, 2, 3, "linear")])
def test_the_model_ends_as_torchs_own_average(
    kind: type[Plain], given: Any, start: int, annealing: int, strategy: str, tmp_path: Path
) -> None:
    task = kind()
    callback = StochasticWeightAveraging(0.01, given, annealing, strategy)
    trainer = train(task, tmp_path, [callback], batches=4, epochs=6, enable_checkpointing=False)
    average, other = by_torch(kind, 6, start, annealing, strategy)
    for name, value in average.module.state_dict().items():  # type: ignore[union-attr]
        assert torch.allclose(task.state_dict()[name].cpu(), value, atol=1e-6), name
    assert task.rates[:6] == pytest.approx(other.rates)
    assert len(task.rates) == (7 if kind is Normed else 6)
    assert (trainer.max_epochs, trainer.global_step) == (6, 24)
    assert (callback.swa_start, callback.swa_end) == (start, 5)


@pytest.mark.parametrize("step", [14, 24])
def test_a_resumed_run_ends_alike(step: int, tmp_path: Path) -> None:
    def fit(resume: Any = None) -> Normed:
        task = Normed()
        saving = ModelCheckpoint(tmp_path, every_n_train_steps=step, save_top_k=-1, filename="{step}")
        callbacks = [StochasticWeightAveraging([0.01], 3, 2), saving]
        train(task, tmp_path, callbacks, batches=4, epochs=6, ckpt_path=resume, enable_checkpointing=True)
        return task

    task = fit()
    resumed = fit(tmp_path / f"step={step}.ckpt")
    for name, value in task.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name


@pytest.mark.parametrize("kind", [Plain, Normed])
def test_a_run_without_a_last_epoch_averages_until_it_ends(
    kind: type[Plain], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    task, callback = kind(), StochasticWeightAveraging(0.01, swa_epoch_start=2, annealing_epochs=1)
    weights: list[Tensor] = []

    class Watches(Callback):
        def on_train_epoch_start(self, trainer: Any, task: Any) -> None:
            weights.append(task.layer.weight.detach().clone())

    options = {"max_steps": 8, "enable_checkpointing": False}
    trainer = train(task, tmp_path, [Watches(), callback], batches=2, epochs=-1, **options)
    assert (trainer.max_epochs, trainer.global_step, callback.n_averaged) == (-1, 8, 3)
    if kind is Plain:
        assert torch.allclose(task.layer.weight, torch.stack(weights[1:4]).mean(0))
    assert ("ended before the epoch that computes batch norm" in caplog.text) is (kind is Normed)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"swa_lrs": 0.0}, "a positive float"),
        ({"swa_lrs": [0.1, -1]}, "a list of positive floats"),
        ({"swa_lrs": 0.1, "swa_epoch_start": 0}, ">0 integer"),
        ({"swa_lrs": 0.1, "swa_epoch_start": 1.5}, "a fraction"),
        ({"swa_lrs": 0.1, "annealing_strategy": "cosine"}, "Did you mean 'cos'"),
        ({"swa_lrs": 0.1, "annealing_epochs": -1}, "0 or more"),
    ],
)
def test_what_cannot_be_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        StochasticWeightAveraging(**arguments)


def test_runs_that_it_does_not_fit_are_refused(tmp_path: Path) -> None:
    class Two(Plain):
        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD([parameter], lr=0.1) for parameter in self.parameters()]

    def refused(task: Plain, callback: StochasticWeightAveraging, **options: Any) -> str:
        with pytest.raises(ConfigurationError) as caught:
            train(task, tmp_path, [callback], enable_checkpointing=False, **options)
        return str(caught.value)

    assert "one optimizer" in refused(Two(), StochasticWeightAveraging(0.1))
    assert "max_epochs" in refused(Plain(), StochasticWeightAveraging(0.1), max_epochs=-1, max_steps=3)
    assert "1 parameter group" in refused(Plain(), StochasticWeightAveraging([0.1, 0.1]))


def fit_over_processes(strategy: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    task = Plain()
    callbacks = [StochasticWeightAveraging(0.01, 2, 2)]
    trainer = train(task, ".", callbacks, batches=3, epochs=4, strategy=strategy, enable_checkpointing=False)
    assert trainer.model is not None
    return trainer.strategy.state.model(trainer.model, full=True)


@pytest.mark.sharded
def test_shards_are_averaged_where_they_are() -> None:
    copied, sharded = (run_in_processes(fit_over_processes, 2, (name,))[0] for name in ("ddp", "fsdp"))
    for name, value in copied.items():
        assert torch.allclose(sharded[name], value, atol=1e-6), name
