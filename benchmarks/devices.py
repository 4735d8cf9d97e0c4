"""Costs of a training step on a device beside a bare loop: kernels, copies, collectives, waits of the host, memory.

    python benchmarks/devices.py

The devices are simulated (tests/simulated), in up to four processes. See benchmarks/README.md.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain, product
from pathlib import Path
from typing import Any

import click
from tables import as_table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.pool import DEVICE, run_in_processes, stop
from tests.simulated import building
from tests.simulated.costs import COUNTED, WORLDS, cost, costs_with_callbacks, drivers_of, log_point
from tests.simulated.devices import LIBRARY

Row = tuple[str, str, dict[str, Any], dict[str, Any]]
"""Case, driver, the counts, and those of the bare loop."""


def counted(function: Callable[..., Any], world: int, *args: Any) -> Any:
    """Return what a function counts on the devices of `world` processes, in the last of them."""
    return run_in_processes(function, world, args=args, env={DEVICE: "sim"}, timeout=600)[-1]


def steps() -> Iterator[Row]:
    """Yield the costs of each strategy, precision and accumulation with each driver."""
    for (strategy, world), precision, accumulate in product(WORLDS.items(), ("32", "bf16-mixed"), (1, 2)):
        bare: dict[str, Any] = {}
        for driver in drivers_of(strategy):
            counts = counted(cost, world, driver, strategy, precision, accumulate, world)
            bare = bare or counts
            yield f"{strategy}, {world} x {precision}, {accumulate}", driver, counts, bare


def log_points() -> Iterator[Row]:
    """Yield the costs of micro-batches with a log point among them, beside a bare loop that logs nothing."""
    for strategy in ("single", "ddp"):
        world = WORLDS[strategy]
        bare = counted(cost, world, "bare", strategy, "32", 1, world)
        yield f"{strategy}, {world} x 32, 1: a log point", "trainer", counted(log_point, world, strategy, world), bare


def callbacks() -> Iterator[Row]:
    """Yield the costs with ten callbacks together, beside a Trainer that logs but has none of them."""
    found = counted(costs_with_callbacks, 1, ("none", "ten"))
    yield "single, 1 x 32, 1: ten callbacks", "trainer", found["ten"], found["none"]


@click.command()
def main() -> None:
    os.environ[LIBRARY] = str(building.library())
    rows = []
    for case, driver, counts, bare in chain(steps(), log_points(), callbacks()):
        rows.append(
            [
                case,
                driver,
                str(len(counts["synchronisations"])),
                f"{counts['kernels'] / COUNTED:.1f}",
                f"{counts['copies'][0] / COUNTED:.1f}",
                f"{sum(counts['collectives'].values()) / COUNTED:.1f}",
                f"{counts['bytes'] / COUNTED / 1e3:.1f}",
                f"{counts['seconds'] / bare['seconds']:.4f}",
                f"{counts['peak'] / bare['peak']:.4f}",
                str(len(counts["hazards"])),
            ]
        )
        for line, count in Counter(counts["synchronisations"]).items():
            print(f"{case}, {driver}: {count} waits: {line}")
    stop()
    columns = ["strategy, processes x precision, accumulation", "", "waits:", "kernels:", "copies:", "collectives:"]
    columns += ["kB sent:", "time / bare:", "peak / bare:", "hazards:"]
    print(f"Of {COUNTED} micro-batches in the last process; kernels to kB sent are of one micro-batch.\n")
    print(as_table(columns, rows))


if __name__ == "__main__":
    main()
