"""fp16: the loss scale, overflow, clipping, several optimizers, fused optimizers, and what a checkpoint keeps."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from drivetrain import FSDP, Accelerator, ConfigurationError, GradScalerKwargs, Task
from tests.pool import run_in_processes
from tests.strategies.quiet import quiet_trainer


def engine(steps: int = 1, **scaling: Any) -> Accelerator:
    options = {"init_scale": 64.0, "growth_interval": 3, **scaling}
    return Accelerator(
        cpu=True,
        mixed_precision="fp16",
        gradient_accumulation_steps=steps,
        kwargs_handlers=[GradScalerKwargs(**options)],
    )


def weight_model(value: float = 1.0) -> nn.Linear:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, value)
    return model


def scale_of(accelerator: Accelerator) -> float:
    """The scale that the next loss gets."""
    assert accelerator.scaler is not None
    return accelerator.precision.state_dict()["scale"]


OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.5),
    "foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.5, foreach=True),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.5, fused=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_overflow_skips_the_step_and_halves_the_scale(name):
    accelerator = engine()
    model = weight_model()
    model, optimizer = accelerator.prepare(model, OPTIMIZERS[name](model.parameters()))
    history = []
    for factor in (1.0, math.inf, 1.0, math.nan, 1.0):
        before = model.weight.item()
        optimizer.zero_grad()
        accelerator.backward(model(torch.ones(1, 1)).sum() * factor)
        optimizer.step()
        history.append((model.weight.item() != before, accelerator.optimizer_step_was_skipped, scale_of(accelerator)))
    assert history == [
        (True, False, 64),
        (False, True, 32),
        (True, False, 32),
        (False, True, 16),
        (True, False, 16),
    ]


def test_the_scale_grows_after_as_many_good_steps_as_said():
    accelerator = engine(growth_factor=4.0)
    model = weight_model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    scales = []
    for _ in range(7):
        optimizer.zero_grad()
        accelerator.backward(model(torch.ones(1, 1)).sum())
        optimizer.step()
        scales.append(scale_of(accelerator))
    assert scales == [64, 64, 256, 256, 256, 1024, 1024]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_those_without_a_scale(name):
    results = []
    for precision in ("no", "fp16"):
        accelerator = Accelerator(cpu=True, mixed_precision=precision)
        model = weight_model(0.5)
        model, optimizer = accelerator.prepare(model, OPTIMIZERS[name](model.parameters()))
        for _ in range(3):
            optimizer.zero_grad()
            accelerator.backward(0.001 * model(torch.ones(1, 1)).square().sum())
            accelerator.clip_grad_norm_(model.parameters(), 1e-4)
            optimizer.step()
        results.append(model.weight.item())
    assert results[1] == pytest.approx(results[0], rel=1e-3)


def test_accumulated_overflow_skips_the_whole_window():
    accelerator = engine(steps=2)
    model = weight_model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    weights = []
    for factor in (math.inf, 1.0, 1.0, 1.0):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 1)).sum() * factor)
            optimizer.step()
            optimizer.zero_grad()
        weights.append(model.weight.item())
    assert weights == [1.0, 1.0, 1.0, 0.5]


def test_two_optimizers_update_the_scale_once_per_step():
    accelerator = engine(growth_interval=2)
    models = [weight_model(), weight_model()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in models]
    first, second, *optimizers = accelerator.prepare(*models, *optimizers)
    scales = []
    for factor in (1.0, 1.0, math.inf):
        for optimizer in optimizers:
            optimizer.zero_grad()
        accelerator.backward(first(torch.ones(1, 1)).sum() + factor * second(torch.ones(1, 1)).sum())
        for model, optimizer in zip((first, second), optimizers, strict=True):
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        scales.append(scale_of(accelerator))
    assert scales == [64, 128, 64]
    # clipped to 0.5 at a rate of 0.5; the last step was the first one's alone
    assert (first.weight.item(), second.weight.item()) == pytest.approx((0.25, 0.5), abs=1e-5)
    assert [optimizer.step_was_skipped for optimizer in optimizers] == [False, True]


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_one_optimizer_s_step_does_not_rescale_what_another_still_accumulates(steps):
    """As in a GAN: in each micro-batch one backward and step, then the other's. The scale changes after each step."""
    accelerator = engine(steps=steps, growth_interval=1)
    critic, maker = weight_model(), weight_model()
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in (critic, maker)]
    critic, maker, first, second = accelerator.prepare(critic, maker, *optimizers)
    gradients = []
    second.optimizer.register_step_pre_hook(lambda *_: gradients.append(maker.weight.grad.item()))
    for _ in range(4 * steps):
        with accelerator.accumulate(critic, maker):
            for model, optimizer in ((critic, first), (maker, second)):
                optimizer.zero_grad()
                accelerator.backward(model(torch.ones(1, 1)).sum())
                accelerator.clip_grad_norm_(model.parameters(), 100.0)
                optimizer.step()
    assert gradients == pytest.approx([1.0] * 4, rel=1e-3)
    assert scale_of(accelerator) > 64


def test_an_optimizer_without_gradients_takes_part():
    accelerator = engine()
    used, unused = weight_model(), weight_model()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in (used, unused)]
    used, unused, *optimizers = accelerator.prepare(used, unused, *optimizers)
    for _ in range(2):
        accelerator.backward(used(torch.ones(1, 1)).sum())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert (used.weight.item(), unused.weight.item()) == (0.0, 1.0)
    assert not accelerator.optimizer_step_was_skipped


def test_what_a_checkpoint_keeps():
    accelerator = engine()
    model = weight_model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    for factor in (math.inf, 1.0, 1.0):
        optimizer.zero_grad()
        accelerator.backward(model(torch.ones(1, 1)).sum() * factor)
        optimizer.step()
    state = accelerator.precision.state_dict()
    assert (state["scale"], state["_growth_tracker"]) == (32, 2)
    other = engine(init_scale=4096.0)
    other.precision.load_state_dict(state)
    assert scale_of(other) == 32
    model = weight_model()
    model, optimizer = other.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    other.backward(model(torch.ones(1, 1)).sum())
    optimizer.step()
    assert scale_of(other) == 64  # the third good step in a row
    other.precision.load_state_dict({})  # a checkpoint of a run without a scale changes nothing
    assert scale_of(other) == 64


def test_a_closure_is_refused():
    accelerator = engine()
    model = weight_model()
    model, optimizer = accelerator.prepare(model, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(ConfigurationError, match=r"optimizers that call a closure.*Use 'bf16' or '32'"):
        optimizer.step(lambda: model(torch.ones(1, 1)).sum())


def test_scaling_can_be_switched_off():
    accelerator = engine(enabled=False)
    model = weight_model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    accelerator.backward(model(torch.ones(1, 1)).sum())
    assert model.weight.grad.item() == 1.0
    accelerator.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    assert model.weight.item() == pytest.approx(0.75)


def on_one_rank() -> list[Any]:
    """The gradient overflows on rank 1 only: the reduced one does so everywhere."""
    accelerator = engine()
    model = weight_model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    history: list[Any] = []
    for factor in (1.0, math.inf, 1.0):
        optimizer.zero_grad()
        mine = factor if accelerator.process_index == 1 else 1.0
        accelerator.backward(model(torch.ones(1, 1)).sum() * mine)
        optimizer.step()
        weight = accelerator.unwrap_model(model).weight.item()
        history.append((weight, accelerator.optimizer_step_was_skipped, scale_of(accelerator)))
    return history


def test_all_processes_skip_together():
    expected = [(0.5, False, 64), (0.5, True, 32), (0.0, False, 32)]
    assert run_in_processes(on_one_rank, 2) == [expected] * 2


class Half(Task):
    def __init__(self, trained: bool = True) -> None:
        super().__init__()
        self.base, self.head = nn.Linear(2, 2).half().requires_grad_(trained), nn.Linear(2, 1)

    def forward(self, batch: Any) -> Any:
        return self.head(self.base(batch)).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


WORDS = "trainable weights are float16: base.weight, base.bias. Convert them to float32"


def refusals(strategy: str) -> list[str]:
    """What trained float16 weights are refused with by each driver, and where they stay whole, those trained later."""
    found = []
    task = Half()
    made: Any = {"fsdp": lambda: FSDP(wrap=nn.Linear)}.get(strategy, lambda: strategy)
    accelerator = Accelerator(cpu=True, strategy=made(), mixed_precision="fp16")
    with pytest.raises(ConfigurationError) as refused:
        accelerator.prepare(task, task.configure_optimizers())
    found.append(str(refused.value))
    with pytest.raises(ConfigurationError) as refused:
        quiet_trainer(made(), precision="fp16").fit(Half(), DataLoader(torch.ones(4, 2), batch_size=2))
    found.append(str(refused.value))
    if strategy == "fsdp":
        return found
    task = Half(trained=False)
    accelerator = Accelerator(cpu=True, strategy=strategy, mixed_precision="fp16")
    model, optimizer = accelerator.prepare(task, task.configure_optimizers())
    accelerator.backward(model(torch.ones(2, 2)))
    optimizer.step()
    optimizer.zero_grad()
    task.base.requires_grad_(True)
    accelerator.backward(model(torch.ones(2, 2)))
    with pytest.raises(ConfigurationError) as refused:
        optimizer.step()
    found.append(str(refused.value))
    return found


@pytest.mark.parametrize(("strategy", "world"), [("single", 1), ("ddp", 2)])
def test_float16_weights_are_refused_when_their_optimizer_is_prepared(strategy: str, world: int) -> None:
    for accelerator, trainer, later in run_in_processes(refusals, world, (strategy,)):
        assert WORDS in accelerator
        assert WORDS in trainer
        assert "trainable weights are float16: parameter 0 of group 0, parameter 1 of group 0" in later


@pytest.mark.sharded
def test_float16_shards_are_refused_too() -> None:
    for found in run_in_processes(refusals, 2, ("fsdp",)):
        assert all(WORDS in message for message in found)
