"""Model and optimizer state under the names of the bare model, so that any strategy can take it up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from drivetrain import Accelerator, CheckpointError
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
    with pytest.raises(CheckpointError, match=r"SGD holds a parameter of shape \(3,\) that is not the model's"):
        accelerator.strategy.state.optimizer(model_of(0), loose)
