"""A loop of one's own calls a prepared model with tensors of the CPU, as torch's DDP lets it on a device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from drivetrain import Accelerator
from tests.pool import DEVICE, run_in_processes
from tests.simulated.devices import simulated as simulated

pytestmark = pytest.mark.usefixtures("simulated")


def called_from_the_cpu() -> tuple[str, list[float]]:
    accelerator = Accelerator()
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    model = accelerator.prepare(model)
    output = model(torch.full((1, 2), accelerator.process_index + 1.0))
    accelerator.backward(output.sum())
    return str(output.device), next(model.parameters()).grad.flatten().tolist()


def test_ddp_moves_what_a_model_is_called_with():
    found = run_in_processes(called_from_the_cpu, 2, env={DEVICE: "sim"}, timeout=150)
    assert found == [(f"sim:{rank}", [1.5, 1.5]) for rank in range(2)]
