"""What a Trainer's own Accelerator says and does inside a step: it is the engine that the Trainer itself drives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import ExponentialLR

from drivetrain import Accelerator, Task
from drivetrain.strategies.precision import Float16Mixed
from tests.pool import run_in_processes
from tests.trainer.tasks import fitted, ones, rows


class ByHand(Task):
    """A weight at 0 whose loss is six times it; `training_step` drives the engine as a raw loop does."""

    automatic_optimization = False

    def __init__(self, weight: float | None = None, clip: float | None = None) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))
        self.weight, self.clip = weight, clip

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        accelerator, optimizer = self.trainer.accelerator, self.optimizers()
        optimizer.zero_grad()
        accelerator.backward(6 * self.w * batch[0].mean(), weight=self.weight)
        if self.clip is not None:
            accelerator.clip_grad_norm_([self.w], self.clip)
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=1.0)


@pytest.mark.parametrize("precision", ["32", "bf16", "fp16"])
def test_a_step_by_hand_clips_gradients_of_their_true_size(precision: str) -> None:
    task = ByHand(clip=1.0)
    fitted(task, ones(1), precision=precision)
    assert float(task.w.detach()) == pytest.approx(-1.0, abs=1e-4)


@pytest.mark.parametrize("precision", ["32", "fp16"])
def test_so_does_the_tasks_own_clip_gradients(precision: str) -> None:
    class Own(ByHand):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
            optimizer = self.optimizers()
            self.manual_backward(6 * self.w * batch[0].mean())
            self.clip_gradients(optimizer, gradient_clip_val=1.0)
            optimizer.step()

    task = Own()
    fitted(task, ones(1), precision=precision)
    assert float(task.w.detach()) == pytest.approx(-1.0, abs=1e-4)


def by_the_raw_engine(weight: float) -> float:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    model, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=1.0))
    accelerator.backward(6 * model(torch.ones(1, 1)).sum(), weight=weight)
    optimizer.step()
    return float(accelerator.unwrap_model(model).weight.detach())


def test_a_weighted_backward_means_the_same_in_a_step_by_hand_and_in_a_raw_loop() -> None:
    task = ByHand(weight=3.0)
    fitted(task, ones(1))
    assert float(task.w.detach()) == by_the_raw_engine(3.0) == -2.0


class Asking(Task):
    """Asks its trainer's Accelerator what it has, in each micro-batch and hook."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))
        self.had: list[tuple[int, ...]] = []
        self.syncs: list[bool] = []
        self.sizes: list[int] = []
        self.skipped: list[bool] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        prepared = self.trainer.accelerator.prepared
        self.had.append((len(prepared.models), len(prepared.optimizers), len(prepared.schedulers)))
        self.syncs.append(self.trainer.accelerator.sync_gradients)
        self.sizes.append(self.trainer.accelerator.gradient_accumulation_steps)
        return self.w * batch[0].mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.skipped.append(self.trainer.accelerator.optimizer_step_was_skipped)

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=1.0)
        return [optimizer], [ExponentialLR(optimizer, 0.5)]


def test_inside_fit_the_engine_holds_the_model_its_optimizers_and_schedulers() -> None:
    task = Asking()
    trainer = fitted(task, ones(2), max_epochs=2)
    assert task.had == [(1, 1, 1)] * 4
    assert trainer.accelerator.unwrap_model(trainer.accelerator.prepared.models[0]) is task
    trainer.fit(task, ones(1))
    assert task.had[-1] == (1, 1, 1)


def test_sync_gradients_is_true_on_the_last_micro_batch_of_a_step_only() -> None:
    task = Asking()
    fitted(task, ones(5), accumulate_grad_batches=2)
    assert task.syncs == [False, True, False, True, True]
    assert task.sizes == [2] * 5


def test_an_overflow_shows_on_the_accelerator() -> None:
    class Overflowing(Asking):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) * (float("inf") if batch_idx == 1 else 1.0)

    task = Overflowing()
    trainer = fitted(task, ones(3), precision=Float16Mixed(init_scale=4.0))
    assert task.skipped == [False, True, False]
    assert trainer.global_step == 2


def test_a_step_by_hand_that_overflows_is_not_counted() -> None:
    class Overflowing(ByHand):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
            super().training_step([batch[0] * (float("inf") if batch_idx == 1 else 1.0)], batch_idx)

    trainer = fitted(Overflowing(), ones(3), precision=Float16Mixed(init_scale=4.0))
    assert trainer.global_step == 2


def test_nothing_of_a_broken_window_outlives_fit() -> None:
    class Breaking(Asking):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            if batch_idx == 3:
                raise KeyError("enough")
            return super().training_step(batch, batch_idx)

    task = Breaking()
    with pytest.raises(KeyError, match="enough"):
        fitted(task, ones(4), accumulate_grad_batches=2)
    accelerator = task.trainer.accelerator
    assert accelerator.sync_gradients
    optimizer = accelerator.prepared.optimizers[0]
    for _ in range(2):
        with accelerator.accumulate():
            optimizer.zero_grad()
            accelerator.backward(2 * task.w)
    assert task.w.grad == 2.0


# batches that are left out


class LeavingOut(Task):
    """Leaves out the batches whose values are negative; `unused` takes part in no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.unused = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(()))
        self.rates: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        return None if batch[0].mean() < 0 else self.w * batch[0].mean()

    def configure_optimizers(self) -> Any:
        optimizer = AdamW(self.parameters(), lr=0.5, weight_decay=0.5)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": ExponentialLR(optimizer, 0.5), "interval": "step"},
        }


class UsingAll(LeavingOut):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        return None if loss is None else loss + self.unused * batch[0].mean()


def left_out(values: list[float], strategy: str, unused: bool, accumulate: int = 1) -> tuple[list[float], int, float]:
    task = LeavingOut() if unused else UsingAll()
    trainer = fitted(task, rows(values), strategy=strategy, accumulate_grad_batches=accumulate)
    rate = trainer.optimizers[0].param_groups[0]["lr"]
    return [float(task.w.detach()), float(task.unused.detach())], trainer.global_step, rate


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_that_every_process_leaves_out_is_no_step(accumulate: int) -> None:
    values = [1.0, 1.0, 1.0, 1.0, -1.0, -1.0, -1.0, -1.0]
    [alone] = run_in_processes(left_out, 1, args=(values[::2], "auto", False, accumulate))
    for together in run_in_processes(left_out, 2, args=(values, "ddp", False, accumulate)):
        assert together == alone
    assert alone[1:] == (2 // accumulate, 0.5 ** (1 + 2 // accumulate))


def test_a_step_that_one_process_leaves_out_is_a_step_on_all() -> None:
    first, second = run_in_processes(left_out, 2, args=([2.0, -1.0, -1.0, 2.0], "ddp", False))
    assert first == second
    assert first[1] == 2


def test_a_parameter_that_no_process_used_does_not_decay() -> None:
    strategy = "ddp_find_unused_parameters_true"
    for values, unused in run_in_processes(unused_on_two, 2, args=(strategy,)):
        assert unused == 1.0
        assert values < 1.0


def unused_on_two(strategy: str) -> list[float]:
    return left_out([1.0, -1.0, -1.0, 1.0], strategy, True)[0]


# schedulers of a task that steps them itself


def test_schedulers_of_a_task_that_optimizes_by_hand_are_its_own() -> None:
    class Own(ByHand):
        def __init__(self, steps: bool) -> None:
            super().__init__()
            self.steps = steps

        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
            super().training_step(batch, batch_idx)
            if self.steps:
                self.lr_schedulers()[0].step()

        def configure_optimizers(self) -> Any:
            optimizer = SGD(self.parameters(), lr=1.0)
            by_epoch = ExponentialLR(optimizer, 0.5)
            by_step = {"scheduler": ExponentialLR(optimizer, 0.5), "interval": "step"}
            return [optimizer], [by_epoch, by_step]

    for steps, rate in ((False, 1.0), (True, 0.25)):
        task = Own(steps)
        trainer = fitted(task, ones(1), max_epochs=2)
        assert trainer.optimizers[0].param_groups[0]["lr"] == rate


# after fit


@pytest.mark.parametrize("precision", ["32", "bf16"])
def test_a_loop_after_fit_runs_what_fit_prepared(precision: str) -> None:
    computed: list[bool] = []

    class Plain(Task):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            computed.append(torch.is_autocast_enabled("cpu"))
            return self.w * x.mean()

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            return self(batch[0])

        def configure_optimizers(self) -> Any:
            return SGD(self.parameters(), lr=1.0)

    task = Plain()
    trainer = fitted(task, ones(2), precision=precision)
    accelerator = trainer.accelerator
    model, optimizer = accelerator.prepare(task, trainer.optimizers[0])
    optimizer.zero_grad()
    accelerator.backward(model(torch.ones(1)))
    optimizer.step()
    assert float(task.w.detach()) == -3.0
    assert computed == [precision == "bf16"] * 3
    assert len(accelerator.prepared.models) == len(accelerator.prepared.optimizers) == 1
