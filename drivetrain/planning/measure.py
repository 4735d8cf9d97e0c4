"""Training steps on a device of this machine, to compare their duration with the predicted one."""

from __future__ import annotations

import copy
import os
import statistics
import time
from dataclasses import replace

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from drivetrain.planning.candidates import Candidate
from drivetrain.planning.hardware import Cluster
from drivetrain.planning.run import estimate, fill, give_values, loaded_of
from drivetrain.planning.workload import Loaded, Workload
from drivetrain.runtime.devices import detect_device_kind
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.host import as_bytes
from drivetrain.runtime.state import PartialState, forget_process
from drivetrain.strategies.precision.registry import resolve_precision
from drivetrain.strategies.step_module import StepModule

STEPS, WARM_UP = 10, 3


def measure(workload: Workload, cluster: Cluster, precision: str, batch: int) -> tuple[float, float]:
    """Train a few steps on this machine. Return the step's measured seconds and the planner's prediction.

    Call it in a process of its own, which uses all cores meanwhile.

    Args:
        workload: What is trained. Its weights get values in this machine's device.
        cluster: The devices that the plan is for. They must be of the kind of this machine.
        precision: Name of the precision.
        batch: Rows of the batch.

    Raises:
        ConfigurationError: This machine has no such device, or the model does not fit into it.
    """
    kind = detect_device_kind()
    if kind.name == "cpu" and not cluster.device.name.startswith("this"):
        raise ConfigurationError(
            f"--measure trains on this machine, which has no {cluster.device.name}. Use --hardware this, or run it on "
            "a machine with such a device."
        )
    candidate = Candidate("single", 1, precision, batch)
    predicted = estimate(workload, candidate, replace(cluster, devices=1, machines=1))
    if predicted.peak > cluster.device.memory:
        raise ConfigurationError(
            f"--measure trains the model in one process of this machine, where {candidate.label} needs "
            f"{as_bytes(predicted.peak)} of {as_bytes(cluster.device.memory)}. Use a smaller --batch, or a smaller "
            "model."
        )
    threads = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)
    try:
        return _seconds_of_step(loaded_of(workload), candidate), predicted.seconds
    finally:
        torch.set_num_threads(threads)
        forget_process()


def _seconds_of_step(loaded: Loaded, candidate: Candidate) -> float:
    # The duration does not depend on the values of weights and batches.
    state = PartialState()
    precision = resolve_precision(candidate.precision)
    precision.setup(state.kind)
    strategy = candidate.make()
    strategy.setup(state)
    module = StepModule(copy.deepcopy(loaded.task))
    with torch.device(state.device):
        fill(module)
        give_values(module)
    model, _ = strategy.prepare(module, [], precision)
    optimizer = loaded.make_optimizer([each for each in model.parameters() if each.requires_grad])
    view, task = strategy.view(model, "train"), strategy.unwrap(model)
    batch = tree_map(
        lambda each: torch.zeros_like(each, device=state.device) if isinstance(each, Tensor) else each,
        precision.convert_batch(loaded.batch_of(candidate.batch)),
    )
    durations = []
    for _ in range(WARM_UP + STEPS):
        start = time.perf_counter()
        with precision.forward_context():
            loss: Tensor = view(task.training_step, batch)
        strategy.backward(precision.scale(loss))
        strategy.optimizer_step(optimizer, precision)
        optimizer.zero_grad()
        if state.device.type != "cpu":
            torch.accelerator.synchronize()
        durations.append(time.perf_counter() - start)
    return statistics.median(durations[WARM_UP:])
