"""A loss for each optimizer, by name, in automatic mode: as by hand, over processes, shards and number formats."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import ConfigurationError, Task
from drivetrain.strategies.precision import Float16Mixed
from tests.pool import run_in_processes
from tests.trainer.tasks import quiet


class Adversaries(Task):
    """A generator and a critic."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        self.critic = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))

    def fooled(self, fake: Tensor) -> Tensor:
        return bce(self.critic(fake), torch.ones(len(fake), 1))

    def found(self, real: Tensor, fake: Tensor) -> Tensor:
        zeros, ones = torch.zeros(len(real), 1), torch.ones(len(real), 1)
        return bce(self.critic(real), ones) + bce(self.critic(fake.detach()), zeros)

    def optimizers_by_name(self) -> dict[str, Any]:
        return {
            "generator": Adam(self.generator.parameters(), lr=0.05),
            "critic": Adam(self.critic.parameters(), lr=0.02),
        }


class Automatic(Adversaries):
    """The losses by name."""

    leave_out = -1

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        if batch_idx == self.leave_out:
            return None
        real, noise = batch
        fake = self.generator(noise)
        return {"generator": self.fooled(fake), "critic": self.found(real, fake)}

    def configure_optimizers(self) -> Any:
        return self.optimizers_by_name()


class Scheduled(Automatic):
    """The critic's learning rate falls with its steps."""

    def configure_optimizers(self) -> Any:
        named = self.optimizers_by_name()
        scheduler = {"scheduler": StepLR(named["critic"], 2, 0.5), "interval": "step"}
        return {**named, "critic": {"optimizer": named["critic"], "lr_scheduler": scheduler}}


class Manual(Adversaries):
    """The same by hand."""

    automatic_optimization = False

    def __init__(self, clip: float | None = None) -> None:
        super().__init__()
        self.clip = clip

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        real, noise = batch
        generator, critic = self.optimizers()
        self.toggle_optimizer(generator)
        fake = self.generator(noise)
        self.step(generator, self.fooled(fake))
        self.untoggle_optimizer(generator)
        self.toggle_optimizer(critic)
        self.step(critic, self.found(real, fake))
        self.untoggle_optimizer(critic)

    def step(self, optimizer: Any, loss: Tensor) -> None:
        optimizer.zero_grad()
        self.manual_backward(loss)
        if self.clip is not None:
            self.clip_gradients(optimizer, self.clip, "norm")
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return list(self.optimizers_by_name().values())


def data(batch_size: int, count: int = 24) -> DataLoader[Any]:
    fixed = torch.Generator().manual_seed(1)
    real = torch.randn(count, 2, generator=fixed) + 2
    return DataLoader(TensorDataset(real, torch.randn(count, 4, generator=fixed)), batch_size)


def weights_after(task: Adversaries, batch_size: int = 8, count: int = 24, **options: Any) -> dict[str, Tensor]:
    """The weights after two epochs."""
    trainer = quiet(**{"max_epochs": 2, **options})
    trainer.fit(task, data(batch_size, count))
    state: dict[str, Tensor] = trainer.accelerator.get_state_dict(trainer.model)
    return state


def assert_equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        torch.testing.assert_close(tensor, right[name], rtol=0, atol=1e-6)


def test_losses_by_name_train_as_by_hand() -> None:
    assert_equal(weights_after(Automatic()), weights_after(Manual()))


def test_each_optimizer_is_clipped_by_itself() -> None:
    clipped = weights_after(Automatic(), gradient_clip_val=0.01)
    assert_equal(clipped, weights_after(Manual(clip=0.01)))
    assert not torch.equal(clipped["critic.0.weight"], weights_after(Automatic())["critic.0.weight"])


def test_micro_batches_accumulate_to_the_batch() -> None:
    assert_equal(weights_after(Automatic(), 4, accumulate_grad_batches=2), weights_after(Automatic(), 8))


@pytest.mark.parametrize("scale", [2.0**16, 2.0**8], ids=["the first step overflows", "nothing overflows"])
def test_the_scaler_of_half_precision_serves_all_losses(scale: float) -> None:
    automatic, manual = (
        weights_after(task, precision=Float16Mixed(init_scale=scale)) for task in (Automatic(), Manual())
    )
    assert_equal(automatic, manual)


def test_schedulers_follow_their_optimizer() -> None:
    task = Scheduled()
    quiet(max_epochs=1).fit(task, data(8))
    generator, critic = task.optimizers()  # type: ignore[misc]
    assert [each.param_groups[0]["lr"] for each in (generator, critic)] == [0.05, 0.01]


# strategy, options, rows of a process's batch
OVER_PROCESSES = [
    ("ddp", {"accumulate_grad_batches": 2}, 2),
    pytest.param("ddp", {}, 4, marks=pytest.mark.slow),
    pytest.param("ddp_find_unused_parameters_true", {}, 4, marks=pytest.mark.slow),
    ("fsdp", {"accumulate_grad_batches": 2, "gradient_clip_val": 0.01}, 2),
    pytest.param("fsdp", {}, 4, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("strategy", "options", "batch_size"), OVER_PROCESSES, ids=str)
def test_losses_by_name_train_as_in_one_process(strategy: str, options: dict[str, Any], batch_size: int) -> None:
    alone = weights_after(Automatic(), 8, gradient_clip_val=options.get("gradient_clip_val"))
    for state in run_in_processes(
        weights_after, args=(Automatic(), batch_size), kwargs={"strategy": strategy, **options}
    ):
        if state:
            assert_equal(state, alone)


class LeavesOut(Automatic):
    """Leaves out the second batch of rank 1."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        self.leave_out = 1 if self.global_rank == 1 else -1
        return super().training_step(batch, batch_idx)


def test_a_batch_left_out_on_one_process_counts_for_nothing() -> None:
    states = run_in_processes(weights_after, args=(LeavesOut(), 4, 24), kwargs={"strategy": "ddp"})
    assert_equal(states[0], states[1])
    assert all(tensor.isfinite().all() for tensor in states[0].values())


def test_hooks_see_each_loss_and_the_outputs() -> None:
    class Watch(Automatic):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def on_before_backward(self, loss: Tensor) -> None:
            self.seen.append("backward")

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.seen += sorted(outputs)

    task = Watch()
    quiet(max_steps=1).fit(task, data(8))
    assert task.seen == ["backward", "backward", "critic", "generator"]


class Odd(Automatic):
    """Whatever a function makes of the step's output and of the optimizers."""

    def __init__(self, output: Any = None, optimizers: Any = None) -> None:
        super().__init__()
        self.output, self.configured = output, optimizers

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        losses = super().training_step(batch, batch_idx)
        return losses if self.output is None else self.output(losses)

    def configure_optimizers(self) -> Any:
        return super().configure_optimizers() if self.configured is None else self.configured(self)


REFUSED: list[tuple[Odd, dict[str, Any], str]] = [
    (Odd(lambda losses: {"generator": losses["generator"]}), {}, "without a loss for the optimizer 'critic'"),
    (Odd(lambda losses: {"generator": losses["generator"], "critc": 1}), {}, "Did you mean 'critc'"),
    (Odd(lambda losses: losses["critic"]), {}, "returned a Tensor, without a loss for the optimizer 'generator'"),
    (Odd(lambda losses: {**losses, "critic": torch.ones(3)}), {}, r"a tensor of shape \(3,\)"),
    (Odd(optimizers=lambda t: {"loss": SGD(t.parameters(), 0.1)}), {}, "with the name 'loss'"),
    (
        Odd(optimizers=lambda t: {"a": SGD(t.parameters(), 0.1), "b": SGD(t.critic.parameters(), 0.1)}),
        {},
        "'a' and 'b' have a parameter in common",
    ),
    (Odd(optimizers=lambda t: {"a": torch.optim.LBFGS(t.parameters())}), {}, "needs a closure.*uses a single loss"),
    (Odd(optimizers=lambda t: {"optimiser": SGD(t.parameters(), 0.1)}), {}, "Did you mean 'optimizer'"),
]


@pytest.mark.parametrize(("task", "options", "said"), REFUSED, ids=[case[2] for case in REFUSED])
def test_what_cannot_be_is_refused_with_the_reason(task: Odd, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        quiet(**options).fit(task, data(8))
