"""Optimizers and schedulers: how many, when they step, and who may decide otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adam
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau

from drivetrain import Task
from drivetrain.strategies.precision import Float16Mixed
from tests.pool import run_in_processes
from tests.trainer.tasks import Weight, fitted, ones, quiet, rows


class Pair(Task):
    """Two weights, a and b, each with the loss of its distance from the batch's mean."""

    def __init__(self, make: Callable[[Pair], Any]) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(()))
        self.make = make
        self.rates: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        mean = batch[0].mean()
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        return (self.a - mean).square() + (self.b - mean).square()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", 1.0)

    def configure_optimizers(self) -> Any:
        return self.make(self)

    @property
    def values(self) -> tuple[float, float]:
        return round(float(self.a.detach()), 6), round(float(self.b.detach()), 6)


def both(task: Pair) -> list[SGD]:
    return [SGD([task.a], lr=0.25), SGD([task.b], lr=0.5)]


# what configure_optimizers may return; after one step from 0 towards 1: a = 2 * lr of its optimizer
SHAPES: list[tuple[str, Callable[[Pair], Any], tuple[float, float]]] = [
    ("an optimizer", lambda t: SGD([t.a], lr=0.25), (0.5, 0.0)),
    ("two groups", lambda t: SGD([{"params": [t.a]}, {"params": [t.b], "lr": 0.5}], lr=0.25), (0.5, 1.0)),
    ("a list", lambda t: both(t), (0.5, 1.0)),
    ("a tuple", lambda t: tuple(both(t)), (0.5, 1.0)),
    ("lists", lambda t: (both(t), []), (0.5, 1.0)),
    ("lists with schedulers", lambda t: ((o := both(t)), [ExponentialLR(o[1], 0.5)]), (0.5, 1.0)),
    ("a list and a scheduler", lambda t: ((o := both(t)), ExponentialLR(o[1], 0.5)), (0.5, 1.0)),
    ("a list and a dict", lambda t: [(o := both(t)), {"scheduler": ExponentialLR(o[1], 0.5)}], (0.5, 1.0)),
    ("a dict", lambda t: {"optimizer": both(t)[0]}, (0.5, 0.0)),
    ("a dict of None", lambda t: {"optimizer": both(t)[1], "lr_scheduler": None}, (0.0, 1.0)),
    ("dicts", lambda t: [{"optimizer": o, "lr_scheduler": ExponentialLR(o, 0.5)} for o in both(t)], (0.5, 1.0)),
]


@pytest.mark.parametrize(("make", "values"), [case[1:] for case in SHAPES], ids=[case[0] for case in SHAPES])
def test_every_optimizer_steps_on_the_one_loss(make: Callable[[Pair], Any], values: tuple[float, float]) -> None:
    task = Pair(make)
    trainer = fitted(task, ones(1))
    assert task.values == values
    assert trainer.global_step == 1


# schedulers


def scheduled(**options: Any) -> Callable[[Pair], Any]:
    def make(task: Pair) -> Any:
        optimizer = SGD([task.a], lr=1.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": ExponentialLR(optimizer, 0.5), **options}}

    return make


# options of the scheduler, of the trainer, the learning rate in each batch; of 3 epochs of 3 batches
RATES: list[tuple[dict[str, Any], dict[str, Any], list[float]]] = [
    ({}, {}, [1, 1, 1, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25]),
    ({"frequency": 2}, {}, [1, 1, 1, 1, 1, 1, 0.5, 0.5, 0.5]),
    ({"interval": "step"}, {"max_epochs": 1}, [1, 0.5, 0.25]),
    ({"interval": "step", "frequency": 2}, {}, [1, 1, 0.5, 0.5, 0.25, 0.25, 0.125, 0.125, 0.0625]),
    ({"interval": "step"}, {"accumulate_grad_batches": 2}, [1, 1, 0.5, 0.25, 0.25, 0.125, 0.0625, 0.0625, 0.03125]),
    ({}, {"val_check_interval": 1}, [1, 1, 1, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25]),
    ({}, {"check_val_every_n_epoch": None, "val_check_interval": 6}, [1, 1, 1, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25]),
]


@pytest.mark.parametrize(("scheduler", "options", "rates"), RATES, ids=[f"{case[0]} {case[1]}" for case in RATES])
def test_schedulers_step_by_epoch_or_by_step(
    scheduler: dict[str, Any], options: dict[str, Any], rates: list[float]
) -> None:
    task = Pair(scheduled(**scheduler))
    fitted(task, ones(3), ones(1), **{"max_epochs": 3, **options})
    assert task.rates == rates


def rates_on_two(interval: str) -> list[float]:
    task = Pair(scheduled(interval=interval))
    fitted(task, ones(6), max_epochs=2)
    return task.rates


def rates_of_both_intervals() -> list[list[float]]:
    return [rates_on_two("step"), rates_on_two("epoch")]


def test_a_scheduler_steps_once_a_step_on_any_number_of_processes() -> None:
    for by_step, by_epoch in run_in_processes(rates_of_both_intervals, 2):
        assert by_step == [0.5**n for n in range(6)]
        assert by_epoch == [1, 1, 1, 0.5, 0.5, 0.5]


@pytest.mark.parametrize("where", ["validation_step", "on_train_epoch_end", "training_step"])
def test_a_plateau_is_judged_by_the_epoch_that_just_ended(where: str) -> None:
    values = iter([1.0, 2.0, 3.0, 3.0])

    def log(self: Any, *args: Any) -> Any:
        if where != "training_step":
            self.log("watched", next(values))
            return None
        if args[1] == 0:
            self.log("watched", next(values), on_step=False, on_epoch=True)
        return Pair.training_step(self, *args)

    kind = type("Watched", (Pair,), {where: log})

    def make(task: Pair) -> Any:
        optimizer = SGD([task.a], lr=1.0)
        plateau = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "watched"}}

    task = kind(make)
    fitted(task, ones(1), ones(1), max_epochs=4)
    assert task.rates == [1.0, 1.0, 0.5, 0.25]


def test_a_plateau_may_do_without_its_value_if_it_is_told_so() -> None:
    def make(task: Pair) -> Any:
        optimizer = SGD([task.a], lr=1.0)
        scheduler = {"scheduler": ReduceLROnPlateau(optimizer), "monitor": "nothing", "strict": False}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    with pytest.warns(RuntimeWarning, match="'nothing' which is not available"):
        fitted(Pair(make), ones(1))


def test_a_task_that_optimizes_by_hand_is_warned_of_keys_without_effect() -> None:
    class ByHand(Pair):
        automatic_optimization = False

    def make(task: Pair) -> Any:
        optimizer = SGD([task.a], lr=1.0)
        return [optimizer], [{"scheduler": ReduceLROnPlateau(optimizer), "monitor": "watched", "interval": "step"}]

    with pytest.warns(RuntimeWarning, match=r"\['monitor'\], but the keys will be ignored"):
        fitted(ByHand(make), ones(1))


def test_a_task_may_step_its_schedulers_itself() -> None:
    seen: list[Any] = []

    class Own(Pair):
        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            seen.append((type(scheduler).__name__, metric))

    fitted(Own(scheduled()), ones(1), max_epochs=2)
    assert seen == [("ExponentialLR", None)] * 2


class Overflowing(Pair):
    """Its gradient is infinite in the second batch."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss * (float("inf") if batch_idx == 1 else 1.0)


def rates_with_an_overflow() -> tuple[list[float], int]:
    task = Overflowing(scheduled(interval="step"))
    trainer = fitted(task, ones(8), precision=Float16Mixed(init_scale=4.0))
    return task.rates, trainer.global_step


@pytest.mark.parametrize("processes", [1, 2])
def test_a_step_that_overflows_is_left_out_together_with_its_scheduler(processes: int) -> None:
    steps = 8 // processes
    for rates, counted in run_in_processes(rates_with_an_overflow, processes):
        assert rates[:4] == [1.0, 0.5, 0.5, 0.25]
        assert counted == steps - 1


# clipping

# options, the gradients (a, b) that are stepped with, where the true ones are 3 and 4
CLIPPED: list[tuple[dict[str, Any], tuple[float, float]]] = [
    ({}, (3.0, 4.0)),
    ({"gradient_clip_val": 1.0}, (0.6, 0.8)),
    ({"gradient_clip_val": 10}, (3.0, 4.0)),
    ({"gradient_clip_val": 2.5, "gradient_clip_algorithm": "norm"}, (1.5, 2.0)),
    ({"gradient_clip_val": 3.5, "gradient_clip_algorithm": "value"}, (3.0, 3.5)),
    ({"gradient_clip_val": 1.0, "accumulate_grad_batches": 2}, (0.6, 0.8)),
    ({"gradient_clip_val": 1.0, "precision": Float16Mixed(init_scale=1024.0)}, (0.6, 0.8)),
]


class ThreeFour(Task):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return (self.w * torch.tensor([3.0, 4.0])).sum() * batch[0].mean()

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=1.0)


@pytest.mark.parametrize(("options", "gradients"), CLIPPED, ids=[str(case[0])[:60] for case in CLIPPED])
def test_gradients_are_clipped_by_norm_or_value(options: dict[str, Any], gradients: tuple[float, float]) -> None:
    task = ThreeFour()
    fitted(task, ones(2), **{"max_steps": 1, **options})
    assert (-task.w.detach()).tolist() == pytest.approx(gradients, abs=1e-5)


def clipped_on_two() -> list[list[float]]:
    found = []
    for options in ({"gradient_clip_val": 1.0}, {"gradient_clip_val": 3.5, "gradient_clip_algorithm": "value"}):
        task = ThreeFour()
        fitted(task, rows([0.0, 2.0]), **options)
        found.append((-task.w.detach()).tolist())
    return found


def test_what_is_clipped_is_the_gradient_of_all_processes() -> None:
    for by_norm, by_value in run_in_processes(clipped_on_two, 2):
        assert by_norm == pytest.approx([0.6, 0.8], abs=1e-5)
        assert by_value == pytest.approx([3.0, 3.5], abs=1e-5)


def test_a_task_may_clip_itself() -> None:
    seen: list[Any] = []

    class Own(ThreeFour):
        def configure_gradient_clipping(
            self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
        ) -> None:
            seen.append((type(optimizer).__name__, gradient_clip_val, gradient_clip_algorithm))
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")

    task = Own()
    fitted(task, ones(1), gradient_clip_val=9.0)
    assert seen == [("SGD", 9.0, None)]
    assert (-task.w.detach()).tolist() == pytest.approx([0.3, 0.4], abs=1e-5)


# closures


class Bowl(Task):
    """A quadratic that L-BFGS solves in one step."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([3.0, -2.0]))
        self.evaluations = 0

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.evaluations += 1
        return ((self.w - batch[0].mean()) * torch.tensor([1.0, 5.0])).square().sum()

    def configure_optimizers(self) -> Any:
        return LBFGS(self.parameters(), max_iter=20, line_search_fn="strong_wolfe")


@pytest.mark.parametrize("accumulate", [1, 2])
def test_lbfgs_evaluates_the_whole_window_as_often_as_it_likes(accumulate: int) -> None:
    task = Bowl()
    trainer = fitted(task, ones(accumulate), accumulate_grad_batches=accumulate)
    assert task.w.tolist() == pytest.approx([1.0, 1.0], abs=1e-4)
    assert trainer.global_step == 1
    assert task.evaluations > accumulate


def test_a_closure_computes_gradients_in_a_step_under_no_grad() -> None:
    class Undifferentiated(SGD):
        @torch.no_grad()
        def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
            closure()
            return super().step()

    class Task(Weight):
        def configure_optimizers(self) -> Any:
            return Undifferentiated(self.parameters(), lr=1.0)

    task = Task()
    assert fitted(task, ones(2)).global_step == 2
    assert float(task.w.detach()) == -2.0


def lbfgs_on_two() -> list[float]:
    task = Bowl()
    fitted(task, rows([0.0, 2.0]))
    return task.w.tolist()  # type: ignore[no-any-return]


def test_lbfgs_finds_the_minimum_of_the_global_batch() -> None:
    first, second = run_in_processes(lbfgs_on_two, 2)
    assert first == second == pytest.approx([1.0, 1.0], abs=1e-4)


class WarmUp(Weight):
    """The pattern of Lightning's documentation: change the learning rate, then step with the closure."""

    def __init__(self) -> None:
        super().__init__(lr=1.0)
        self.told: list[Any] = []

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        self.told.append((epoch, batch_idx))
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * (self.trainer.global_step + 1)
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)


def test_an_overridden_optimizer_step_may_change_the_learning_rate() -> None:
    task = WarmUp()
    trainer = fitted(task, ones(3), max_epochs=1)
    assert float(task.w.detach()) == pytest.approx(-0.6)
    assert task.told == [(0, 0), (0, 1), (0, 2)]
    assert (trainer.global_step, task.gradients) == (3, [1.0] * 3)


def test_an_overridden_optimizer_step_may_leave_a_step_out() -> None:
    class EverySecond(Weight):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            if batch_idx % 2:
                optimizer.step(closure=optimizer_closure)
            else:
                optimizer_closure()

    task = EverySecond(lr=1.0)
    trainer = fitted(task, ones(4))
    assert (float(task.w.detach()), trainer.global_step) == (-2.0, 2)


# training by hand


class Adversaries(Task):
    """As in a GAN: two optimizers, two backwards, in a step that does it by itself."""

    automatic_optimization = False

    def __init__(self, toggles: bool = True) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.generator = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1))
        self.critic = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1))
        self.toggles = toggles
        self.frozen: list[bool] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        generator, critic = self.optimizers()
        x = batch[0]
        self.turn(generator, lambda: -self.critic(self.generator(x)).mean())
        self.turn(critic, lambda: self.critic(self.generator(x).detach()).mean() - self.critic(x).mean())

    def turn(self, optimizer: Any, loss_of: Callable[[], Tensor]) -> None:
        if self.toggles:
            self.toggle_optimizer(optimizer)
            self.frozen.append(next(self.critic.parameters()).requires_grad)
        loss = loss_of()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        if self.toggles:
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [SGD(self.generator.parameters(), lr=0.1), SGD(self.critic.parameters(), lr=0.1)]


def adversaries(toggles: bool, batch_size: int) -> tuple[list[float], int, list[bool]]:
    task = Adversaries(toggles)
    trainer = fitted(task, rows([0.5, -1.0, 2.0, 1.0], batch_size))
    parameters = torch.cat([p.detach().flatten() for p in task.parameters()])
    assert all(p.requires_grad for p in task.parameters())
    return parameters.tolist(), trainer.global_step, task.frozen


def adversaries_both_ways(batch_size: int) -> list[Any]:
    return [adversaries(True, batch_size), adversaries(False, batch_size)]


def test_two_adversaries_train_alike_on_one_and_two_processes_and_each_of_their_steps_counts() -> None:
    [alone] = run_in_processes(adversaries_both_ways, 1, args=(2,))
    assert alone[0][0] == pytest.approx(alone[1][0], abs=1e-6)
    for together in run_in_processes(adversaries_both_ways, 2, args=(1,)):
        for (parameters, steps, frozen), (expected, expected_steps, expected_frozen) in zip(
            together, alone, strict=True
        ):
            assert parameters == pytest.approx(expected, abs=1e-6)
            assert (steps, frozen) == (expected_steps, expected_frozen)
    assert alone[0][1:] == (4, [False, True] * 2)
    assert alone[1][1:] == (4, [])


def test_toggling_puts_back_what_was_frozen_before() -> None:
    class Frozen(Adversaries):
        def on_train_start(self) -> None:
            self.critic[0].weight.requires_grad_(False)

    task = Frozen()
    fitted(task, ones(1))
    assert not task.critic[0].weight.requires_grad
    assert task.critic[0].bias.requires_grad


def test_a_task_may_accumulate_and_clip_by_hand() -> None:
    class ByHand(Weight):
        automatic_optimization = False

        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
            optimizer = self.optimizers()
            self.manual_backward(self.w * batch[0].mean() / 2)
            if batch_idx % 2:
                self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
                optimizer.step()
                optimizer.zero_grad()

    task = ByHand(lr=1.0)
    trainer = fitted(task, ones(4), ones(1), val_check_interval=1)
    assert float(task.w.detach()) == pytest.approx(-1.0, abs=1e-5)
    assert trainer.global_step == 2


def test_a_task_that_optimizes_by_hand_finds_its_schedulers() -> None:
    class ByHand(Pair):
        automatic_optimization = False

        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
            optimizer = self.optimizers()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()
            self.lr_schedulers().step()

    task = ByHand(scheduled())
    fitted(task, ones(3))
    assert task.rates == [1.0, 0.5, 0.25]


def test_a_task_that_optimizes_by_hand_may_have_a_scheduler_of_any_kind() -> None:
    class Rates:
        def state_dict(self) -> dict[str, float]:
            return {}

        def load_state_dict(self, state: dict[str, float]) -> None: ...

    class ByHand(Pair):
        automatic_optimization = False

        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
            self.rates.append(float(isinstance(self.lr_schedulers(), Rates)))

    task = ByHand(lambda t: ([SGD([t.a], lr=0.1)], [Rates()]))
    fitted(task, ones(1))
    assert task.rates == [1.0]


def test_a_task_without_optimizers_may_train_by_hand() -> None:
    class Nothing(Weight):
        automatic_optimization = False

        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
            self.batches.append((0, batch_idx, 0.0))

        def configure_optimizers(self) -> None:
            return None

    task = Nothing()
    assert fitted(task, ones(3)).global_step == 0
    assert len(task.batches) == 3


def test_a_run_without_an_optimizer_is_warned_of_and_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class Unchanged(Weight):
        def configure_optimizers(self) -> None:
            return None

        def on_after_backward(self) -> None:
            self.gradients.append(float(self.w.grad))

    task = Unchanged()
    assert fitted(task, ones(3)).global_step == 3
    assert task.gradients == [1.0] * 3  # of each batch alone: they do not add up
    assert float(task.w.detach()) == 0.0
    assert "Unchanged.configure_optimizers returned None, so this fit will run with no optimizer" in caplog.text


def test_each_optimizer_that_steps_by_hand_counts_and_any_dict_may_be_returned() -> None:
    class Two(Adversaries):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
            super().training_step(batch, batch_idx)
            return {"generator": 1.0}

    assert fitted(Two(), ones(8), max_steps=4).global_step == 4
    assert fitted(Two(), ones(8), max_steps=4).progress.total_batches == 2


# batches left out


class Choosy(Weight):
    """Leaves out some batches, on some ranks."""

    def __init__(self, leaves_out: Callable[[int, int], bool]) -> None:
        super().__init__(lr=1.0)
        self.leaves_out = leaves_out

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if self.leaves_out(self.global_rank, batch_idx) else loss


def test_a_batch_left_out_takes_no_step() -> None:
    task = Choosy(lambda rank, batch: batch == 1)
    trainer = fitted(task, ones(4))
    assert (task.gradients, trainer.global_step) == ([1.0] * 3, 3)


def left_out(*, find_unused: bool = False) -> tuple[list[float], int]:
    task = Choosy(lambda rank, batch: rank == 1 and batch == 1)
    strategy = "ddp_find_unused_parameters_true" if find_unused else "ddp"
    trainer = fitted(task, ones(8), strategy=strategy)
    return task.gradients, trainer.global_step


def left_out_in_all_ways() -> list[Any]:
    return [left_out(), left_out(find_unused=True)]


def test_a_batch_left_out_on_one_rank_alone_counts_as_zero_there_and_hangs_nobody() -> None:
    for of_rank in run_in_processes(left_out_in_all_ways, 2, timeout=40):
        assert of_rank == [([1.0, 0.5, 1.0, 1.0], 4)] * 2


def test_zero_grad_hooks_see_every_optimizer_once_a_step() -> None:
    seen: list[Any] = []

    class Noting(Pair):
        def on_before_zero_grad(self, optimizer: Any) -> None:
            seen.append(optimizer.param_groups[0]["lr"])

    fitted(Noting(both), ones(4), accumulate_grad_batches=2)
    assert seen == [0.25, 0.5] * 2


def test_optimizers_are_the_users_own_and_tell_their_state() -> None:
    task = Pair(lambda t: Adam([t.a], lr=0.1))
    trainer = quiet()
    trainer.fit(task, ones(3))
    [optimizer] = trainer.optimizers
    assert type(optimizer) is Adam
    assert float(optimizer.state[task.a]["step"]) == 3
    assert task.optimizers().param_groups is optimizer.param_groups
    assert task.optimizers(use_pl_optimizer=False) is optimizer
