"""`Trainer(optimizer_in_backward=True)`: the same numbers, without gradients that wait for each other."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from drivetrain import (
    FSDP,
    BaseFinetuning,
    Callback,
    CheckpointError,
    ConfigurationError,
    GradientAccumulationScheduler,
    GradientNorm,
    NaNGuard,
    OnExceptionCheckpoint,
    Task,
    Trainer,
    Tuner,
    WeightHistograms,
)
from tests.pool import run_in_processes
from tests.trainer.tasks import Shuffled, quiet

OPTIMIZERS: dict[str, Any] = {
    "SGD": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "Adam": {"amsgrad": True},
    "AdamW": {},
    "Adamax": {},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {"centered": True, "momentum": 0.5},
    "Rprop": {},
    "Adagrad": {"lr_decay": 0.1},
    "Adadelta": {},
    "ASGD": {"t0": 2},
    "Adafactor": {},
}
IMPLEMENTATIONS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "foreach": {"foreach": True},
    "one by one": {"foreach": False},
    "fused": {"fused": True},
}
FUSED = ("SGD", "Adam", "AdamW", "Adagrad")
CASES = [
    (name, how)
    for name in OPTIMIZERS
    for how in IMPLEMENTATIONS
    if (how != "fused" or name in FUSED) and not (name == "Adafactor" and how == "foreach")
]


class Tied(Task):
    """Two groups with options of their own, a weight used twice, one that is frozen and one without a gradient.

    Attributes:
        held: The most gradients that were there after a parameter's was, in any backward.
    """

    def __init__(self, optimizer: str = "AdamW", **options: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.tied, self.last = nn.Linear(2, 4), nn.Linear(4, 4), nn.Linear(4, 1)
        self.unused, self.frozen = nn.Linear(2, 2), nn.Linear(4, 4).requires_grad_(False)
        self.kind, self.options = optimizer, options
        self.losses: list[Tensor] = []
        self.held = 0

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        hidden = self.tied(torch.tanh(self.tied(torch.tanh(self.first(x))))) + self.frozen(self.first(x))
        loss = nn.functional.mse_loss(self.last(hidden), y)
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> Any:
        decayed = [*self.first.parameters(), *self.frozen.parameters(), *self.unused.parameters()]
        others = [*self.tied.parameters(), *self.last.parameters()]
        groups = [{"params": decayed, "lr": 0.02}, {"params": others}]
        optimizer = getattr(torch.optim, self.kind)(groups, lr=0.01, **self.options)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def state_of(task: Task, trainer: Trainer) -> dict[str, Tensor]:
    """Every number of the model and its optimizer, by name."""
    found = dict(task.state_dict())
    for number, each in trainer.optimizers[0].state_dict()["state"].items():
        found.update({f"{number}.{key}": torch.as_tensor(value) for key, value in each.items() if value is not None})
    return found


def trained(task: Task, in_backward: bool, **options: Any) -> tuple[Task, dict[str, Tensor], Trainer]:
    trainer = quiet(optimizer_in_backward=in_backward, max_epochs=2, **options)
    trainer.fit(task, Shuffled.data())
    return task, state_of(task, trainer), trainer


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.parametrize(("name", "how"), CASES, ids=lambda part: str(part))
def test_losses_weights_and_the_optimizers_state_are_the_same_bit_for_bit(name: str, how: str) -> None:
    options = {**OPTIMIZERS[name], **IMPLEMENTATIONS[how]}
    torch.manual_seed(0)
    plain, expected, _ = trained(Tied(name, **options), False)
    torch.manual_seed(0)
    task, state, _ = trained(Tied(name, **options), True)
    assert torch.equal(torch.stack(task.losses), torch.stack(plain.losses))
    assert len(state) > len(task.state_dict())
    assert_equal(state, expected)


@pytest.mark.parametrize(
    "options", [{"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}, {"precision": "bf16"}], ids=str
)
def test_so_they_are_with(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    _, expected, _ = trained(Tied("SGD"), False, **options)
    torch.manual_seed(0)
    assert_equal(trained(Tied("SGD"), True, **options)[1], expected)
    torch.manual_seed(0)
    different = trained(Tied("SGD"), True)[1]
    assert any(not torch.equal(different[name], expected[name]) for name in expected)


class Counting(Tied):
    """Counts gradients wherever one is ready."""

    def on_train_start(self) -> None:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]

        def count(_: Tensor) -> None:
            self.held = max(self.held, sum(parameter.grad is not None for parameter in trained))

        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(count)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.left = sum(parameter.grad is not None for parameter in self.parameters())


def test_no_gradient_is_held_once_its_parameter_is_stepped() -> None:
    task = trained(Counting(), True)[0]
    assert (task.held, task.left) == (0, 0)
    plain = trained(Counting(), False)[0]
    assert (plain.held, plain.left) == (6, 6)


class Descent(torch.optim.Optimizer):
    """One of the user's own, with a number of its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.share = 0.5

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=group["lr"] * self.share)


class Watched(Tied):
    """Has a hook on its optimizer's steps."""

    def configure_optimizers(self) -> Any:
        self.steps = 0
        optimizer = Descent(self.parameters())
        optimizer.register_step_post_hook(self.count)
        return optimizer

    def count(self, *_: Any) -> None:
        self.steps += 1


def test_hooks_on_the_optimizers_steps_run_once_in_each_step_and_what_it_keeps_counts() -> None:
    results = []
    for in_backward in (False, True):
        torch.manual_seed(0)
        task, state, trainer = trained(Watched(), in_backward)
        assert task.steps == trainer.global_step == 12
        assert len(trainer.optimizers[0].param_groups[0]["params"]) == 10
        results.append(state)
    assert_equal(*results)


def test_a_parameter_that_is_used_twice_is_stepped_once() -> None:
    _, _, trainer = trained(Tied("Adam"), True)
    steps = {float(each["step"]) for each in trainer.optimizers[0].state.values()}
    assert steps == {trainer.global_step} == {12}
    assert len(trainer.optimizers[0].state) == 6  # neither the frozen ones nor those without a gradient


def test_a_run_can_be_resumed_with_it_and_without(tmp_path: Path) -> None:
    def run(in_backward: bool, resume: Path | None, epochs: int) -> tuple[dict[str, Tensor], Trainer]:
        task = Tied("AdamW")
        trainer = quiet(optimizer_in_backward=in_backward, max_epochs=epochs, seed=7)
        trainer.fit(task, Shuffled.data(generator=True), resume=resume)
        return state_of(task, trainer), trainer

    whole, _ = run(False, None, 2)
    for first in (False, True):
        path = tmp_path / f"{first}"
        run(first, None, 1)[1].save_checkpoint(path)
        assert_equal(run(not first, path, 2)[0], whole)


def test_a_second_fit_and_a_fit_without_it_step_once() -> None:
    task = Tied("Adam")
    for in_backward in (True, True, False):
        trainer = quiet(optimizer_in_backward=in_backward)
        trainer.fit(task, Shuffled.data())
        assert {float(each["step"]) for each in trainer.optimizers[0].state.values()} == {6}
    hooks = [parameter._post_accumulate_grad_hooks for parameter in task.parameters()]
    assert not any(hooks)


class Unfreezes(BaseFinetuning):
    def freeze_before_training(self, task: Task) -> None:
        self.freeze(task.last)

    def finetune_function(self, task: Task, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(task.last, optimizer, lr=0.01)


class Partly(Counting):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([*self.first.parameters(), *self.tied.parameters()], lr=0.01)


def test_parameters_that_are_unfrozen_and_added_are_stepped_so_too() -> None:
    results = []
    for in_backward in (False, True):
        torch.manual_seed(0)
        task, state, _ = trained(Partly(), in_backward, callbacks=Unfreezes())
        assert task.left == 6 * (not in_backward)
        results.append(state)
    assert_equal(*results)


def test_the_learning_rate_and_the_batch_size_can_be_searched_before() -> None:
    torch.manual_seed(0)
    expected = trained(Tied(), False)[1]
    torch.manual_seed(0)
    task = Tied()
    trainer = quiet(optimizer_in_backward=True, max_epochs=2)
    Tuner(trainer).lr_find(task, Shuffled.data(), num_training=5, update_attr=False)
    trainer.fit(task, Shuffled.data())
    assert len(expected) == len(state_of(task, trainer))


# several processes


class Stack(Task):
    """Blocks to shard, a scalar that stays whole on every process."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.Tanh()) for _ in range(3)))
        self.scale = nn.Parameter(torch.tensor(1.5))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.blocks(batch[0]).sum(1, keepdim=True) * self.scale, batch[1])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.left = sum(parameter.grad is not None for parameter in self.parameters())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


class LateStack(Stack):
    """Trains the scalar and a block from the third step on."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        trained = self.current_epoch > 0 or batch_idx >= 2
        self.scale.requires_grad_(trained)
        self.blocks[1].requires_grad_(trained)


class GrowingStack(Stack):
    """Adds a parameter after the first step."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.scale = nn.Parameter(torch.tensor(1.5))
            self.trainer.optimizers[0].add_param_group({"params": [self.scale]})


def grown() -> str:
    with pytest.raises(ConfigurationError) as caught:
        quiet(strategy=FSDP(), optimizer_in_backward=True, max_epochs=1).fit(GrowingStack(), Shuffled.data(count=24))
    return str(caught.value)


def test_a_parameter_that_is_added_to_a_sharded_model_is_refused() -> None:
    for error in run_in_processes(grown, 2):
        assert "A parameter of shape () is no part of the model that FSDP has sharded" in error


def sharded(options: dict[str, Any], kind: type[Stack] = Stack) -> tuple[dict[str, Tensor], int]:
    states = []
    for in_backward in (False, True):
        task = kind()
        trainer = quiet(strategy=FSDP(**options), optimizer_in_backward=in_backward, max_epochs=2)
        trainer.fit(task, Shuffled.data(count=24))
        states.append({name: each.clone() for name, each in trainer.strategy.state.full(trainer.model).items()})
    assert_equal(*states)
    return states[1], task.left


@pytest.mark.parametrize(
    ("options", "kind"),
    [({}, Stack), ({}, LateStack), ({"replicate_size": 2}, Stack), ({"cpu_offload": True}, Stack)],
    ids=str,
)
def test_shards_are_stepped_once_their_gradients_are_reduced(options: dict[str, Any], kind: type[Stack]) -> None:
    (state, left), (_, other) = run_in_processes(sharded, 2, args=(options, kind))
    assert left == other == 0
    alone = kind()
    quiet(max_epochs=2).fit(alone, Shuffled.data(count=24, batch_size=8))
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=5e-6)


# refused


class Weighs(Tied):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx) * 2, "weight": 2}


class ByHand(Tied):
    automatic_optimization = False


class OwnStep(Tied):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)


class Named(Tied):
    def configure_optimizers(self) -> Any:
        return {"a": torch.optim.SGD(self.first.parameters()), "b": torch.optim.SGD(self.last.parameters())}


class Searches(Tied):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class Twice(Tied):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.SGD(self.last.parameters(), lr=0.1)]


class Reads(Tied):
    def on_after_backward(self) -> None:
        pass


class Whole(torch.optim.SGD):
    """Keeps a number over all of a group's parameters."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        super().step()


class Counts(torch.optim.SGD):
    """Keeps a number over all of its parameters."""

    count = 0

    def step(self, closure: Any = None) -> None:
        self.count += 1
        super().step()


class Counted(Tied):
    def configure_optimizers(self) -> Any:
        return Counts(self.parameters(), lr=0.1)


class Global(Tied):
    def configure_optimizers(self) -> Any:
        return Whole(self.parameters(), lr=0.1)


class Patched(Tied):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        optimizer.step = lambda closure=None: None
        return optimizer


class Reentrant(Tied):
    """Runs a block in two checkpoints that have backwards of their own."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        hidden = self.first(batch[0])
        for _ in range(2):
            hidden = checkpoint(self.tied, hidden, use_reentrant=True)
        return self.last(hidden).mean()


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (Weighs, "Return the mean loss alone"),
        (ByHand, "optimizes by hand"),
        (OwnStep, "optimizer_step of its own"),
        (Named, "a loss for each of several optimizers"),
        (Searches, "evaluates the loss several times"),
        (Twice, "is in two optimizers"),
        (Reads, "Reads.on_after_backward would find no gradients"),
        (Global, "Whole keeps 'k' over all parameters of a group"),
        (Counted, "Counts keeps 'count' over all parameters of a group"),
        (Patched, "has replaced step"),
        (Reentrant, "use_reentrant=False"),
    ],
)
def test_tasks_are_refused_that_need_gradients_together(task: type[Task], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        trained(task(), True)


@pytest.mark.parametrize(
    "callback",
    [
        lambda: GradientNorm(),
        lambda: NaNGuard(),
        lambda: WeightHistograms(),
        lambda: GradientAccumulationScheduler({0: 2}),
    ],
)
def test_so_are_callbacks(callback: Any, tmp_path: Path) -> None:
    made = callback()
    with pytest.raises(ConfigurationError, match=f"optimizer_in_backward=True.*{type(made).__name__}"):
        trained(Tied(), True, callbacks=made, logger="csv", default_root_dir=tmp_path)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"accumulate_grad_batches": 2}, "accumulate_grad_batches=2"),
        ({"gradient_clip_val": 1.0}, "gradient_clip_algorithm='value'"),
        ({"auto_micro_batch": True}, "auto_micro_batch=True"),
        ({"precision": "fp16"}, "Use 'bf16' or '32'"),
    ],
)
def test_so_are_options(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        quiet(optimizer_in_backward=True, **options)


def test_so_is_an_option_that_is_set_later() -> None:
    trainer = quiet(optimizer_in_backward=True)
    with pytest.raises(ConfigurationError, match="accumulate_grad_batches=4"):
        trainer.accumulate_grad_batches = 4


def refused_by(strategy: str) -> str:
    with pytest.raises(ConfigurationError) as raised:
        quiet(strategy=strategy, optimizer_in_backward=True)
    return str(raised.value)


def test_so_is_a_strategy_that_reduces_gradients_after_the_backward() -> None:
    for message in run_in_processes(refused_by, 2, args=("ddp",)):
        assert "strategy='single' and 'fsdp'" in message


class Fails(Tied):
    """Raises within the second backward, once some parameters are stepped."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        hidden = self.first(x)
        if batch_idx == 1:
            hidden.register_hook(_fail)
        return nn.functional.mse_loss(self.last(self.tied(hidden)), y)


def _fail(gradient: Tensor) -> None:
    raise RuntimeError("no luck")


def test_no_checkpoint_is_written_of_a_step_that_was_taken_in_part(tmp_path: Path) -> None:
    trainer = quiet(OnExceptionCheckpoint(tmp_path), optimizer_in_backward=True, enable_checkpointing=None)
    seen: list[Any] = []

    class Sees(Callback):
        def on_exception(self, trainer: Trainer, task: Task, exception: BaseException) -> None:
            with pytest.raises(CheckpointError, match="begun to change parameters"):
                trainer.save_checkpoint(tmp_path / "torn")
            seen.append(copy.copy(exception))

    trainer.callbacks.append(Sees())
    with pytest.raises(RuntimeError, match="no luck"):
        trainer.fit(Fails(), Shuffled.data())
    assert seen
    assert list(tmp_path.iterdir()) == []
