"""Model and optimizer state under the names of the bare model, so that any strategy can take it up."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drivetrain import Accelerator, CheckpointError, Task, Trainer
from tests.pool import run_in_processes


def groups(model: nn.Sequential, turned: bool = False, other: bool = False) -> torch.optim.Optimizer:
    first, second = list(model[0].parameters()), list(model[1].parameters())
    if turned:
        first, second = first[::-1], second[::-1]
    if other:
        first, second = second, first
    return torch.optim.AdamW([{"params": first, "lr": 0.1}, {"params": second, "lr": 0.01, "weight_decay": 0.0}])


def model_of(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))


def train(steps: int, turned: bool, state: dict[str, Any] | None = None) -> dict[str, Any]:
    accelerator = Accelerator(cpu=True)
    module = model_of(0 if state is None else 1)
    model, optimizer = accelerator.prepare(module, groups(module, turned))
    strategy = accelerator.strategy
    if state is not None:
        strategy.state.load_model(model, state["model"])
        strategy.state.load_optimizer(model, optimizer.optimizer, state["optimizer"])
    for step in range(steps):
        optimizer.zero_grad()
        x = torch.full((1, 3), 1.0 + (0 if state is None else 10) + step)
        accelerator.backward(model(x).square().sum())
        optimizer.step()
    return {
        "model": {name: value.clone() for name, value in strategy.state.model(model).items()},
        "optimizer": strategy.state.optimizer(model, optimizer.optimizer),
    }


def straight(steps: int) -> dict[str, Any]:
    """As many steps and three more without a break."""
    accelerator = Accelerator(cpu=True)
    module = model_of(0)
    model, optimizer = accelerator.prepare(module, groups(module))
    for value in [*(1.0 + i for i in range(steps)), *(11.0 + i for i in range(3))]:
        optimizer.zero_grad()
        accelerator.backward(model(torch.full((1, 3), value)).square().sum())
        optimizer.step()
    return {"model": accelerator.strategy.state.model(model)}


@pytest.mark.parametrize(("writers", "readers"), [(2, 1), (1, 2), (2, 2)])
def test_state_moves_between_strategies_and_orders_of_parameters(writers, readers):
    saved = run_in_processes(train, writers, args=(2, False))[0]
    assert list(saved["model"]) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert sorted(saved["optimizer"]["state"]) == ["0.bias", "0.weight", "1.bias", "1.weight"]
    assert [group["params"] for group in saved["optimizer"]["param_groups"]] == [
        ["0.weight", "0.bias"],
        ["1.weight", "1.bias"],
    ]
    expected = run_in_processes(straight, 1, args=(2,))[0]
    for each in run_in_processes(train, readers, args=(3, True, saved)):
        for name, value in expected["model"].items():
            torch.testing.assert_close(each["model"][name], value, atol=5e-6, rtol=0)
        assert [group["lr"] for group in each["optimizer"]["param_groups"]] == [0.1, 0.01]


def test_groups_of_other_parameters_are_refused():
    accelerator = Accelerator(cpu=True)
    strategy = accelerator.strategy
    model = model_of(0)
    saved = strategy.state.optimizer(model, groups(model))
    with pytest.raises(CheckpointError, match=r"2 group\(s\) here, 2 saved"):
        strategy.state.load_optimizer(model, groups(model, other=True), saved)
    with pytest.raises(CheckpointError, match=r"1 group\(s\) here, 2 saved; not in the checkpoint: \[\]"):
        strategy.state.load_optimizer(model, torch.optim.AdamW(model.parameters()), saved)


def test_a_parameter_that_is_not_the_model_s_cannot_be_named():
    accelerator = Accelerator(cpu=True)
    loose = torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=0.1)
    with pytest.raises(
        CheckpointError, match=r"SGD holds a parameter of shape \(3,\) that does not belong to the model"
    ):
        accelerator.strategy.state.optimizer(model_of(0), loose)


# memory layout: fused implementations pair a parameter and its state by their places in memory


class Turned(nn.Module):
    """Parameters in channels_last, transposed, and in one piece."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.conv = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
        self.linear = nn.Linear(16, 2)
        self.factor = nn.Parameter(torch.randn(2, 5).t())

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(self.conv(x).flatten(1)) @ self.factor.t()).square().mean()


FUSED: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, amsgrad=True, fused=True),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, fused=True),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.01, fused=True),
}
IMAGES = torch.randn(6, 2, 3, 3, 3, generator=torch.Generator().manual_seed(2))


def stepped(prepared: Any, images: Tensor) -> list[Tensor]:
    accelerator, model, optimizer = prepared
    for image in images:
        optimizer.zero_grad()
        accelerator.backward(model(image))
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def prepared(kind: str) -> Any:
    accelerator, model = Accelerator(cpu=True), Turned()
    return accelerator, *accelerator.prepare(model, FUSED[kind](model.parameters()))


def in_one_piece(state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state as a file of contiguous tensors gives it."""
    copied = copy.deepcopy(state)
    for values in copied["state"].values():
        values.update({key: each.contiguous() for key, each in values.items() if isinstance(each, Tensor)})
    return copied


def by_load_state(first: Any, kind: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        first[0].save_state(folder)
        again = prepared(kind)
        again[0].load_state(folder)
    return again


def by_the_prepared_optimizer(first: Any, kind: str) -> Any:
    again = prepared(kind)
    again[1].load_state_dict(first[1].state_dict())
    again[2].load_state_dict(in_one_piece(first[2].state_dict()))
    return again


def before_it_is_prepared(first: Any, kind: str) -> Any:
    accelerator, model = Accelerator(cpu=True), Turned()
    model.load_state_dict(first[1].state_dict())
    optimizer = FUSED[kind](model.parameters())
    optimizer.load_state_dict(in_one_piece(first[2].state_dict()))
    return accelerator, *accelerator.prepare(model, optimizer)


@pytest.mark.parametrize("kind", FUSED)
@pytest.mark.parametrize("load", [by_load_state, by_the_prepared_optimizer, before_it_is_prepared])
def test_loaded_state_is_laid_out_as_its_parameters_are(load: Callable[[Any, str], Any], kind: str) -> None:
    expected = stepped(prepared(kind), IMAGES)
    first = prepared(kind)
    stepped(first, IMAGES[:3])
    again = load(first, kind)
    found = stepped(again, IMAGES[3:])
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    for parameter, state in again[2].state.items():
        held = [value for value in state.values() if isinstance(value, Tensor) and value.shape == parameter.shape]
        assert held
        assert {value.stride() for value in held} == {parameter.stride()}


def test_state_of_a_parameter_that_is_not_dense_stays_dense() -> None:
    whole = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    results = []
    for loads in (False, True):
        model = nn.ParameterList([nn.Parameter(whole.clone()[:, :3])])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for step in range(4):
            if loads and step == 2:
                saved, optimizer = optimizer.state_dict(), torch.optim.AdamW(model.parameters(), lr=0.1)
                _, optimizer = Accelerator(cpu=True).prepare(model, optimizer)
                optimizer.load_state_dict(saved)
                assert next(iter(optimizer.state.values()))["exp_avg"].is_contiguous()
            model[0].grad = torch.full((4, 3), step + 1.0)
            optimizer.step()
        results.append(model[0].detach())
    assert torch.equal(*results)


class TurnedTask(Task):
    def __init__(self) -> None:
        super().__init__()
        self.net = Turned()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return FUSED["AdamW"](self.parameters())


def resumed_run(folder: str) -> list[float]:
    """Train with a break and without. Returns how far the weights are apart, for each format of checkpoints."""

    def fit(path: str | None = None, save: str | None = None, **options: Any) -> list[Tensor]:
        quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
        task, trainer = TurnedTask(), Trainer(default_root_dir=folder, **quiet, **options)
        trainer.fit(task, torch.utils.data.DataLoader(IMAGES.flatten(0, 1), batch_size=2), resume=path)
        if save is not None:
            trainer.save_checkpoint(save, format="lightning" if save.endswith(".ckpt") else None)
        return [parameter.detach() for parameter in task.parameters()]

    whole, apart = fit(max_epochs=2), []
    for name in ("half", "half.ckpt"):
        fit(save=f"{folder}/{name}", max_epochs=1)
        found = fit(f"{folder}/{name}", max_epochs=2)
        apart.append(max(float((one - other).abs().max()) for one, other in zip(found, whole, strict=True)))
    return apart


@pytest.mark.parametrize("processes", [1, 2])
def test_a_resumed_run_equals_the_undisturbed_one_whatever_the_layout(processes: int, tmp_path: Path) -> None:
    assert run_in_processes(resumed_run, processes, args=(str(tmp_path),)) == [[0.0, 0.0]] * processes
