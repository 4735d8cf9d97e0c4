"""A TPU: a process for each device, all devices of one process, and what the processor cannot show."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

from drivetrain import XLAFSDP, Accelerator, notebook_launcher
from drivetrain.runtime import xla
from tests.pool import run_in_processes
from tests.strategies.xla.running import Classifier, gap, make_model, make_optimizer, make_trainer, samples, train_plain

pytestmark = [pytest.mark.tpu, pytest.mark.timeout(900)]

STEPS, ROWS = 6, 8
ON_TPU = {"PJRT_DEVICE": "TPU", "DRIVETRAIN_USE_CPU": None, "RANK": None, "WORLD_SIZE": None}


def train_in_each_process(model: torch.nn.Module, directory: str) -> None:
    accelerator = Accelerator()
    loader = DataLoader(samples(ROWS * STEPS), ROWS // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, make_optimizer(model), loader)
    for x, y in loader:
        optimizer.zero_grad()
        accelerator.backward(F.cross_entropy(model(x), y))
        optimizer.step()
    state = accelerator.get_state_dict(model)
    torch.save(state, f"{directory}/{accelerator.process_index}.pt")


def launch(directory: str) -> int:
    devices = xla.device_count()
    notebook_launcher(train_in_each_process, (make_model(), directory), num_processes=devices)
    return devices


def test_a_process_for_each_device_trains_as_one_plain_process(tmp_path: Path) -> None:
    [devices] = run_in_processes(launch, 1, args=(str(tmp_path),), env=ON_TPU, timeout=800)
    expected = train_plain(samples(ROWS * STEPS), ROWS)[0].state_dict()
    states = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(devices)]
    assert all(gap(state, states[0]) == 0 for state in states)
    assert gap(states[0], expected) <= 1e-2  # a TPU multiplies in bfloat16


def train_sharded() -> dict[str, Any]:
    trainer, task = make_trainer(strategy=XLAFSDP()), Classifier()
    trainer.fit(task, DataLoader(samples(ROWS * STEPS), ROWS))
    return trainer.strategy.state.model(task.net, full=True)


def test_one_process_drives_all_devices() -> None:
    [state] = run_in_processes(train_sharded, 1, env=ON_TPU, timeout=600)
    assert gap(state, train_plain(samples(ROWS * STEPS), ROWS)[0].state_dict()) <= 1e-2


def time_a_step() -> tuple[float, float]:
    """Seconds until the host is ahead again, and until the device has computed."""
    accelerator = Accelerator()
    model = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096) for _ in range(8)))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    x = torch.randn(4096, 4096, device=accelerator.device)
    for _ in range(4):
        begun = time.perf_counter()
        accelerator.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        ahead = time.perf_counter() - begun
        xla.wait()
    return ahead, time.perf_counter() - begun


def test_the_host_does_not_wait_for_a_step() -> None:
    [(ahead, done)] = run_in_processes(time_a_step, 1, env=ON_TPU, timeout=600)
    assert ahead < done / 2
