"""Copies and pickles of an engine and of what it has prepared."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from drivetrain import Accelerator, PartialState
from tests.pool import run_in_processes


def unpickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


COPIES: dict[str, Callable[[Any], Any]] = {"deepcopy": copy.deepcopy, "pickle": unpickled}


def prepared(precision: str) -> tuple[Any, ...]:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    data = DataLoader(torch.arange(12.0).reshape(6, 2), batch_size=2, shuffle=True)
    model, optimizer, schedule, data = accelerator.prepare(model, optimizer, schedule, data)
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    schedule.step()
    return accelerator, model, optimizer, schedule, data


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_a_copied_model_computes_with_its_own_weights(precision, copied):
    _, model, _, _, _ = prepared(precision)
    other = copied(model)
    assert torch.equal(other(torch.ones(1, 2)), model(torch.ones(1, 2)))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert other(torch.ones(1, 2)).item() == 0.0
    assert model(torch.ones(1, 2)).item() != 0.0
    assert other(torch.ones(1, 2)).dtype == torch.float32


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_a_copied_optimizer_and_schedule_step_by_themselves(copied):
    _, _, optimizer, schedule, _ = prepared("no")
    other, another = copied((optimizer, schedule))
    [weight, _] = other.param_groups[0]["params"]
    before, moments = weight.detach().clone(), next(iter(other.state.values()))["step"].item()
    assert moments == 1
    weight.grad = torch.ones_like(weight)
    other.step()
    another.step()
    assert not torch.equal(weight, before)
    assert (schedule.get_last_lr(), another.get_last_lr()) == ([0.25], [0.125])


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_a_copied_loader_is_where_the_first_one_is_and_goes_on_alone(copied):
    *_, loader = prepared("no")
    for batch in loader:
        first = batch
        break
    other = copied(loader)
    rest, again = [batch.tolist() for batch in other], [batch.tolist() for batch in other]
    assert sorted(row for batch in [first.tolist(), *rest] for row in batch) == [
        [2.0 * i, 2.0 * i + 1] for i in range(6)
    ]
    assert len(again) == 3
    assert loader.epoch == 0


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_the_state_of_the_process_stays_one(copied):
    state = PartialState(cpu=True)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=3)
    assert vars(copied(state)) is vars(state)
    assert copied(accelerator.state).mixed_precision == "bf16"
    other = copied(accelerator)
    assert (other.mixed_precision, other.gradient_accumulation_steps) == ("bf16", 3)
    assert other.device == accelerator.device


def after_a_reset() -> list[Any]:
    accelerator = Accelerator(cpu=True)
    before = accelerator.process_index
    accelerator.state._reset_state(True)
    old = accelerator.process_index, PartialState().num_processes
    again = Accelerator(cpu=True)
    return [before == old[0], old[1], again.gather(torch.tensor([again.process_index])).tolist()]


@pytest.mark.parametrize("processes", [1, 2])
def test_the_state_is_usable_after_a_reset(processes):
    for found in run_in_processes(after_a_reset, processes):
        assert found == [True, processes, list(range(processes))]


def wrapped_copy() -> list[float]:
    accelerator, model, *_ = prepared("bf16")
    other = copy.deepcopy(accelerator.unwrap_model(model))
    with torch.no_grad():
        other.weight.zero_()
        other.bias.zero_()
    return [other(torch.ones(1, 2)).item(), len(copy.deepcopy(model).state_dict())]


def test_models_of_several_processes_are_copied_too():
    assert run_in_processes(wrapped_copy, 2) == [[0.0, 2]] * 2
