"""The step of a candidate with values, in real processes: what it allocates and sends, and how long it takes."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from drivetrain.planning.candidates import Candidate
from drivetrain.planning.run import alone, fake_world
from drivetrain.planning.workload import OPTIMIZERS, PlannedTask
from drivetrain.runtime.state import PartialState
from drivetrain.strategies import DDP
from drivetrain.strategies.base import Given, RunOptions
from drivetrain.strategies.precision.registry import resolve_precision
from drivetrain.strategies.step_module import StepModule
from tests.planning.models import LM

ROWS, TOKENS = 4, 64
SPEED, NETWORK = 1e9, 2e8
"""Bytes per second of simulated kernels, and of simulated links."""
WARM_UP, COUNTED = 2, 4


def step_on_devices(candidate: Candidate, optimizer_name: str) -> dict[str, Any]:
    """Train three steps on simulated devices, and return what the third needs.

    Args:
        candidate: How to train.
        optimizer_name: Name of the optimizer.
    """
    from tests.simulated.collectives import network
    from tests.simulated.devices import started

    step = _prepared(candidate, optimizer_name, PartialState())
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


def peak_in_processes(candidate: Candidate, optimizer_name: str) -> int:
    """Train on the CPU, and return how many bytes torch's allocator holds at most in a step.

    It is the least of several steps, because gloo's threads sometimes free what they have sent a little later.

    Args:
        candidate: How to train.
        optimizer_name: Name of the optimizer.
    """
    return min(_peaks(candidate, optimizer_name, PartialState(), COUNTED))


def peak_alone(candidate: Candidate, optimizer_name: str) -> int:
    """Train as the first rank of a fake process group, and return how many bytes torch's allocator holds in a step.

    Collectives allocate nothing there, as on accelerators.

    Args:
        candidate: How to train.
        optimizer_name: Name of the optimizer.
    """
    with fake_world(0, candidate.world_size) as state, alone():
        (peak,) = _peaks(candidate, optimizer_name, state, 1)
    return peak


def _peaks(candidate: Candidate, optimizer_name: str, state: PartialState, steps: int) -> list[int]:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step = _prepared(candidate, optimizer_name, state)
        for _ in range(WARM_UP):
            step()
        for _ in range(steps):
            gc.collect()
            with record_function("counted"):
                step()
    assert recorded.profiler is not None
    events = recorded.profiler.kineto_results.events()
    counted = [(each.start_ns(), each.end_ns()) for each in events if each.name() == "counted"]
    peaks = [0] * len(counted)
    held = 0
    for each in sorted((each for each in events if each.name() == "[memory]"), key=lambda each: each.start_ns()):
        held += each.nbytes()
        for number, (start, end) in enumerate(counted):
            if start <= each.start_ns() <= end:
                peaks[number] = max(peaks[number], held)
    return peaks


def _prepared(candidate: Candidate, optimizer_name: str, state: PartialState) -> Callable[[], None]:
    precision = resolve_precision(candidate.precision)
    precision.setup(state.kind)
    strategy = DDP() if candidate.strategy == "ddp" else candidate.make("auto")
    strategy.setup(state)
    torch.manual_seed(0)
    model: torch.nn.Module = StepModule(PlannedTask(LM()).train())
    make = OPTIMIZERS[optimizer_name]
    if candidate.kind.has_engine:
        strategy.check(RunOptions(precision, Given("gradient_accumulation_steps", candidate.accumulation)))
        model, (optimizer,) = strategy.prepare(model, [make([*model.parameters()])], precision)
    else:
        model, _ = strategy.prepare(model, [], precision)
        optimizer = make([each for each in model.parameters() if each.requires_grad])
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
