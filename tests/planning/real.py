"""The step of a candidate with values, in real processes: what it allocates and sends, and how long it takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from drivetrain.planning.candidates import Candidate
from drivetrain.planning.workload import OPTIMIZERS, PlannedTask
from drivetrain.runtime.state import PartialState
from drivetrain.strategies import DDP
from drivetrain.strategies.precision.registry import resolve_precision
from drivetrain.strategies.step_module import StepModule
from tests.planning.models import LM

ROWS, TOKENS = 4, 64
SPEED, NETWORK = 1e9, 2e8
"""Bytes per second of simulated kernels, and of simulated links."""
WARM_UP = 2


def step_on_devices(candidate: Candidate, optimizer_name: str) -> dict[str, Any]:
    """Train three steps on simulated devices, and return what the third needs.

    Args:
        candidate: How to train.
        optimizer_name: Name of the optimizer.
    """
    from tests.simulated.collectives import network
    from tests.simulated.devices import started

    step = _prepared(candidate, optimizer_name)
    for _ in range(WARM_UP):
        step()
    torch.accelerator.synchronize()
    sim, index = started(), torch.accelerator.current_device_index()
    sim.reset_peak(index)
    network.calls.clear()
    sim.reset_clock(to_device=SPEED, to_host=SPEED, between=SPEED, kernels=SPEED)
    network.bandwidth = NETWORK
    step()
    torch.accelerator.synchronize()
    calls = [(call.name.removesuffix("_single"), call.ranks, call.bytes) for call in network.calls]
    return {"peak": sim.peak(index), "calls": calls, "seconds": sim.now}


def _prepared(candidate: Candidate, optimizer_name: str) -> Callable[[], None]:
    state = PartialState()
    precision = resolve_precision(candidate.precision)
    precision.setup(state.kind)
    strategy = DDP() if candidate.strategy == "ddp" else candidate.make("auto")
    strategy.setup(state)
    torch.manual_seed(0)
    model, _ = strategy.prepare(StepModule(PlannedTask(LM()).train()), [], precision)
    optimizer = OPTIMIZERS[optimizer_name]([each for each in model.parameters() if each.requires_grad])
    task, view = strategy.unwrap(model), strategy.view(model, "train")

    def run(batch: Any, probe: bool = False) -> torch.Tensor:
        with precision.forward_context():
            loss: torch.Tensor = view(task.training_step, batch)
        strategy.backward(precision.scale(loss))
        return loss.detach()

    def step() -> None:
        tokens = [torch.zeros(ROWS, TOKENS, dtype=torch.int64, device=state.device)] * candidate.accumulation
        outputs = strategy.forward_backward(model, run, [((each,), {}) for each in tokens])
        strategy.optimizer_step(optimizer, precision)
        optimizer.zero_grad()
        del outputs

    return step
