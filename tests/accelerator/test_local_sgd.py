"""Local SGD averages parameters every few steps, and in the end."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from drivetrain import FSDP, Accelerator, ConfigurationError, LocalSGD
from tests.pool import run_in_processes


def trained(enabled: bool) -> list[float]:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    seen = []
    with LocalSGD(accelerator, model, local_sgd_steps=2, enabled=enabled) as local:
        for _ in range(5):
            loss = -model(torch.full((1, 1), float(accelerator.process_index + 1))).sum()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            local.step()
            seen.append(accelerator.unwrap_model(model).weight.item())
    return [*seen, accelerator.unwrap_model(model).weight.item()]


def test_parameters_are_averaged_every_few_steps_and_in_the_end():
    first, second = run_in_processes(trained, 2, args=(True,))
    assert first == [1.0, 3.0, 4.0, 6.0, 7.0, 7.5]
    assert second == [2.0, 3.0, 5.0, 6.0, 8.0, 7.5]


def test_switched_off_gradients_are_averaged_as_ever():
    for found in run_in_processes(trained, 2, args=(False,)):
        assert found == [1.5, 3.0, 4.5, 6.0, 7.5, 7.5]


def sharded() -> str:
    accelerator = Accelerator(cpu=True, strategy=FSDP())
    try:
        LocalSGD(accelerator, nn.Linear(1, 1), 2)
    except ConfigurationError as error:
        return str(error)
    return ""


def test_a_sharded_model_is_refused():
    assert all("strategy='ddp'" in each for each in run_in_processes(sharded, 2))
    with pytest.raises(ConfigurationError, match="at least 1"):
        LocalSGD(Accelerator(cpu=True), nn.Linear(1, 1), 0)
