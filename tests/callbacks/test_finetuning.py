from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim import lr_scheduler as lrs

from drivetrain import ConfigurationError
from drivetrain.callbacks import BackboneFinetuning, BaseFinetuning, Callback, ModelCheckpoint
from drivetrain.trainer import Task
from tests.callbacks.guarded import Regression, rows, train
from tests.pool import run_in_processes


class Headed(Regression):
    """A backbone and a head; the optimizer gets what is trained when it is made."""

    def __init__(self) -> None:
        super().__init__({})
        self.backbone = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
        nn.init.eye_(self.backbone[0].weight)  # type: ignore[arg-type]
        nn.init.zeros_(self.backbone[0].bias)  # type: ignore[arg-type]
        self.rates: list[list[float]] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 0:
            self.rates.append([round(group["lr"], 6) for group in self.optimizers().param_groups])
        return nn.functional.mse_loss(self.layer(self.backbone(batch[0])), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05, momentum=0.9)


def by_hand(epochs: int, at: int, batches: list[list[Tensor]]) -> Headed:
    """The same in a plain loop: the backbone joins at an epoch, its rate a tenth and doubled each epoch."""
    task = Headed()
    task.backbone.requires_grad_(False)
    optimizer = task.configure_optimizers()
    for epoch in range(epochs):
        if epoch == at:
            task.backbone.requires_grad_(True)
            optimizer.add_param_group({"params": list(task.backbone.parameters()), "lr": 0.005})
        elif epoch > at:
            optimizer.param_groups[1]["lr"] = min(0.05, 2 * optimizer.param_groups[1]["lr"])
        for inputs, targets in batches:
            optimizer.zero_grad()
            nn.functional.mse_loss(task.layer(task.backbone(inputs)), targets).backward()
            optimizer.step()
    return task


def gap(task: nn.Module, other: nn.Module) -> float:
    pairs = zip(task.parameters(), other.parameters(), strict=True)
    return max(float((one.cpu() - two.cpu()).detach().abs().max()) for one, two in pairs)


def test_the_backbone_joins_at_its_epoch_at_a_rate_of_its_own(tmp_path: Path) -> None:
    task = Headed()
    train(task, tmp_path, [BackboneFinetuning(2)], batches=4, epochs=6, enable_checkpointing=False)
    assert task.rates == [[0.05], [0.05], [0.05, 0.005], [0.05, 0.01], [0.05, 0.02], [0.05, 0.04]]
    assert gap(task, by_hand(6, 2, list(rows(4)))) < 1e-6


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"lambda_func": lambda epoch: 1 + epoch}, [0.005, 0.025, 0.05]),
        (
            {"lambda_func": lambda epoch: 10.0, "backbone_initial_lr": 0.001, "should_align": False},
            [0.001, 0.01, 0.1],
        ),
        ({"backbone_initial_ratio_lr": 0.5, "verbose": True}, [0.025, 0.05, 0.05]),
    ],
)
def test_the_rate_grows_as_it_is_told(options: dict[str, Any], expected: list[float], tmp_path: Path) -> None:
    task = Headed()
    train(task, tmp_path, [BackboneFinetuning(2, **options)], batches=1, epochs=5, enable_checkpointing=False)
    assert [rates[1] for rates in task.rates[2:]] == expected


@pytest.mark.parametrize("step", [6, 9])
def test_a_resumed_run_has_the_same_groups(step: int, tmp_path: Path) -> None:
    def fit(resume: Any = None) -> Headed:
        task = Headed()
        saving = ModelCheckpoint(tmp_path, every_n_train_steps=step, save_top_k=-1, filename="{step}")
        callbacks = [BackboneFinetuning(2), saving]
        train(task, tmp_path, callbacks, batches=4, epochs=5, ckpt_path=resume, enable_checkpointing=True)
        return task

    task, resumed = fit(), fit(tmp_path / f"step={step}.ckpt")
    assert gap(task, resumed) == 0.0
    assert resumed.rates == task.rates[-len(resumed.rates) :]


def test_modules_are_flattened_frozen_and_filtered() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))
            self.inner = nn.Linear(2, 2)

    own, norm = Own(), nn.BatchNorm1d(2)
    modules = [own, [nn.Sequential(nn.ReLU(), norm)]]
    found = BaseFinetuning.flatten_modules(modules)
    assert [type(each).__name__ for each in found] == ["Own", "Linear", "ReLU", "BatchNorm1d"]
    BaseFinetuning.freeze(modules)
    assert list(BaseFinetuning.filter_params(modules)) == [norm.weight, norm.bias]
    assert not list(BaseFinetuning.filter_params(modules, train_bn=False))
    BaseFinetuning.freeze(modules, train_bn=False)
    assert len(list(BaseFinetuning.filter_params(modules, requires_grad=False))) == 5
    assert not norm.track_running_stats
    BaseFinetuning.make_trainable(modules)
    assert norm.track_running_stats
    optimizer = torch.optim.SGD([own.scale], lr=0.1)
    with pytest.warns(UserWarning, match="Did you init your optimizer in configure_optimizers with all"):
        BaseFinetuning.unfreeze_and_add_param_group(own, optimizer)
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 2]
    assert optimizer.param_groups[1]["lr"] == pytest.approx(0.01)


def test_a_task_without_a_backbone_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="has no module `backbone`"):
        train(Regression({}), tmp_path, [BackboneFinetuning()], enable_checkpointing=False)


def fit_over_processes(strategy: str) -> dict[str, Tensor]:
    torch.set_num_threads(1)
    task = Headed()
    trainer = train(
        task, ".", [BackboneFinetuning(1)], batches=3, epochs=3, strategy=strategy, enable_checkpointing=False
    )
    assert trainer.model is not None
    return trainer.strategy.state.model(trainer.model, full=True)


@pytest.mark.sharded
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_what_joins_later_is_averaged_over_processes(strategy: str) -> None:
    batches = list(rows(3, world=2))
    pairs = zip(batches[::2], batches[1::2], strict=True)
    expected = by_hand(3, 1, [[torch.cat(each) for each in zip(one, two, strict=True)] for one, two in pairs])
    found = run_in_processes(fit_over_processes, 2, (strategy,))[0]
    for name, value in expected.state_dict().items():
        assert torch.allclose(found[name], value, atol=1e-6), name


SCHEDULES: dict[str, Callable[[Optimizer], Any]] = {
    "lambda": lambda o: lrs.LambdaLR(o, lambda step: 1 / (1 + step)),
    "lambdas": lambda o: lrs.LambdaLR(o, [lambda step: 0.9**step]),
    "multiplicative": lambda o: lrs.MultiplicativeLR(o, lambda step: 0.9),
    "step": lambda o: lrs.StepLR(o, 2, 0.5),
    "one cycle": lambda o: lrs.OneCycleLR(o, 0.1, total_steps=40),
    "cyclic": lambda o: lrs.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "cosine": lambda o: lrs.CosineAnnealingLR(o, 40),
    "restarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 3),
    "exponential": lambda o: lrs.ExponentialLR(o, 0.9),
    "polynomial": lambda o: lrs.PolynomialLR(o, 40),
    "sequential": lambda o: lrs.SequentialLR(o, [lrs.LinearLR(o, 0.1), lrs.LambdaLR(o, lambda step: 0.9**step)], [5]),
    "chained": lambda o: lrs.ChainedScheduler([lrs.LinearLR(o), lrs.CosineAnnealingLR(o, 40)]),
}


class Scheduled(Headed):
    """Keeps the rates of each step; its optimizer has a scheduler."""

    def __init__(self, schedule: str, interval: str) -> None:
        super().__init__()
        self.schedule, self.interval = schedule, interval
        self.steps: list[list[float]] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.steps.append([float(group["lr"]) for group in self.optimizers().param_groups])
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = SCHEDULES[self.schedule](optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": self.interval}}


class AddsATenth(BaseFinetuning):
    def freeze_before_training(self, task: Task) -> None:
        self.freeze(task.backbone)

    def finetune_function(self, task: Task, epoch: int, optimizer: Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(task.backbone, optimizer, initial_denom_lr=10)


class AddsInAStep(Callback):
    """As a user does it, within an epoch, without any of these callbacks."""

    def setup(self, trainer: Any, task: Task, stage: str) -> None:
        task.backbone.requires_grad_(False)

    def on_train_batch_start(self, trainer: Any, task: Task, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 6:
            task.backbone.requires_grad_(True)
            optimizer = trainer.optimizers[0]
            rate = optimizer.param_groups[0]["lr"] / 10
            optimizer.add_param_group({"params": list(task.backbone.parameters()), "lr": rate})


@pytest.mark.parametrize("adds", [AddsATenth, AddsInAStep])
@pytest.mark.parametrize("interval", ["step", "epoch"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_group_that_joins_follows_the_schedule_of_the_first(
    schedule: str, interval: str, adds: Any, tmp_path: Path
) -> None:
    task, alone = Scheduled(schedule, interval), Scheduled(schedule, interval)
    train(task, tmp_path, [adds()], batches=4, epochs=5, enable_checkpointing=False)
    train(alone, tmp_path, [], batches=4, epochs=5, enable_checkpointing=False)
    assert [rates[0] for rates in task.steps] == [rates[0] for rates in alone.steps]
    joined = [rates for rates in task.steps if len(rates) == 2]
    assert len(joined) in (14, 16)
    assert [rates[1] for rates in joined] == pytest.approx([rates[0] / 10 for rates in joined])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_backbones_rate_grows_from_epoch_to_epoch_and_follows_the_schedule_within(
    schedule: str, tmp_path: Path
) -> None:
    def fit(resume: Any = None) -> Scheduled:
        task = Scheduled(schedule, "step")
        saving = ModelCheckpoint(tmp_path, every_n_train_steps=10, save_top_k=-1, filename="{step}")
        train(task, tmp_path, [BackboneFinetuning(1), saving], 4, 5, resume, enable_checkpointing=True)
        return task

    task = fit()
    told = task.steps[4][0] / 10
    for epoch in range(1, 5):
        first = task.steps[4 * epoch]
        told = first[1] if epoch == 1 else min(2 * told, first[0])
        assert first[1] == pytest.approx(told)
        for rates in task.steps[4 * epoch : 4 * epoch + 4]:
            assert rates[1] == pytest.approx(rates[0] * first[1] / first[0])
    resumed = fit(tmp_path / "step=10.ckpt")
    assert resumed.steps == task.steps[10:]
    assert gap(task, resumed) == 0.0
