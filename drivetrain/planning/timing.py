"""Duration of a step on a cluster: each operation by the roofline model, and collectives beside the computation.

The roofline model (Williams et al., 2009) bounds an operation by its arithmetic or by the bytes it moves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from drivetrain.planning.hardware import Cluster
from drivetrain.planning.simulate import Collective, Event, Step

_SENT: dict[str, Callable[[int], float]] = {
    # Share of the given bytes that a process sends in a ring of n processes.
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: n - 1,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
}


@dataclass(frozen=True)
class StepTime:
    """Predicted duration of an optimizer step.

    Attributes:
        seconds: All of the step.
        computing: Seconds in which the device computes.
        waiting: Seconds in which it waits for collectives or for other pipeline stages.
    """

    seconds: float
    computing: float
    waiting: float


def seconds_of(collective: Collective, cluster: Cluster) -> float:
    """Predict the seconds that a collective operation, such as an all-reduce, takes on a cluster's idle links.

    Args:
        collective: The collective.
        cluster: The devices. Ranks are numbered machine by machine.
    """
    ranks = collective.ranks
    count = len(ranks)
    machines = {rank // cluster.devices for rank in ranks}
    speed = cluster.device.link_speed
    if len(machines) > 1:
        # Each device has its own network card, and rings pass through all of them.
        speed = min(speed, math.ceil(count / len(machines)) * cluster.device.network_speed)
    share = _SENT[collective.operation](count) if collective.operation in _SENT else 1.0
    return share * collective.bytes / (cluster.link_share * speed) + cluster.latency * math.log2(max(2, count))


def crosses_machines(collective: Collective, cluster: Cluster) -> bool:
    """Return True if the processes of a collective are on several machines.

    Args:
        collective: The collective.
        cluster: The devices.
    """
    return len({rank // cluster.devices for rank in collective.ranks}) > 1


def time_of(
    steps: Sequence[Step], cluster: Cluster, stages: int = 1, microbatches: int = 1, offload: bool = False
) -> StepTime:
    """Predict how long a training step takes on the given hardware, from its recorded operations.

    Args:
        steps: What was counted, on each kind of rank.
        cluster: The devices.
        stages: Pipeline stages.
        microbatches: Micro-batches of a step, between which stages wait for each other.
        offload: True if parameters, gradients and optimizer state are in host memory, where the optimizer computes.
    """
    times = [_Clock(cluster, offload).run(step.events) for step in steps]
    longest = max(times, key=lambda time: time.seconds)
    if stages == 1:
        return longest
    # Stages begin one after the other, and end so, too.
    bubble = longest.seconds * (stages - 1) / microbatches
    return StepTime(longest.seconds + bubble, longest.computing, longest.waiting + bubble)


class _Clock:
    """Simulates a device's streams on the recorded operations of a step, to predict the step's duration."""

    def __init__(self, cluster: Cluster, offload: bool = False) -> None:
        self._cluster, self._offload = cluster, offload
        self._free: dict[object, float] = {}
        self._ready: dict[int, float] = {}
        self._host = self._computing = 0.0

    def run(self, events: Sequence[Event]) -> StepTime:
        beside = _prepares_gathers(events)
        received: set[int] = set()
        for index, event in enumerate(events):
            self._host += self._cluster.launch
            collective = event.collective
            stream: object = "compute"
            if collective is not None:
                duration = seconds_of(collective, self._cluster) + self._copied(collective)
                stream = collective.ranks
                if event.name.endswith("_") and collective.operation in ("reduce_scatter", "all_reduce"):
                    received.update(event.writes)
            else:
                duration = self._duration(event)
                if index in beside:  # FSDP copies shards in advance, beside the computation
                    stream = "gather"
                elif event.phase == "backward" and not event.flops and received.intersection(event.reads):
                    stream = "received"  # what FSDP does with reduced gradients, beside the backward pass
                    received.update(event.writes)
                else:
                    self._computing += duration
            waits = max((self._ready.get(key, 0.0) for key in event.reads), default=0.0)
            end = max(self._host, self._free.get(stream, 0.0), waits) + duration
            self._free[stream] = end
            self._ready.update(dict.fromkeys(event.writes, end))
        total = max(self._free.values(), default=0.0)
        return StepTime(total, self._computing, max(0.0, total - self._computing))

    def _copied(self, collective: Collective) -> float:
        parts = {"all_gather": 1, "reduce_scatter": len(collective.ranks)}  # of its bytes, those of this process
        # Offloaded shards are copied from or to host memory.
        if not self._offload or collective.operation not in parts:
            return 0.0
        return collective.bytes / parts[collective.operation] / self._cluster.device.host_speed

    def _duration(self, event: Event) -> float:
        device = self._cluster.device
        if self._offload and event.phase == "step":
            return event.bytes * self._cluster.devices / self._cluster.host_memory_speed
        arithmetic = event.flops / (device.matrix_share * device.flops(event.dtype)) if event.flops else 0.0
        return max(arithmetic, event.bytes / (self._cluster.memory_share * device.memory_speed))


def _prepares_gathers(events: Sequence[Event]) -> set[int]:
    writer: dict[int, int] = {}
    found: set[int] = set()
    for index, event in enumerate(events):
        if event.collective is not None and event.collective.operation == "all_gather":
            waiting = [writer[key] for key in event.reads if key in writer]
            for _ in range(3):
                found.update(waiting)
                waiting = [
                    writer[key] for at in waiting for key in events[at].reads if key in writer and writer[key] < at
                ]
                waiting = [at for at in waiting if events[at].collective is None and not events[at].flops]
        elif event.collective is None:
            for key in event.writes:
                writer[key] = index
    return found
