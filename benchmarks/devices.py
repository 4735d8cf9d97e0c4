"""Costs of a training step on a device beside a bare loop: kernels, copies, collectives, waits of the host, memory.

    python benchmarks/devices.py

The devices are simulated (tests/simulated), in up to four processes. See benchmarks/README.md.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import click
from tables import as_table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.pool import DEVICE, run_in_processes, stop
from tests.simulated import building
from tests.simulated.costs import COUNTED, cost
from tests.simulated.devices import LIBRARY

DRIVERS = ("bare", "trainer", "accelerator")
CASES = [
    (strategy, world, precision, accumulate)
    for strategy, world in (("single", 1), ("ddp", 2), ("fsdp", 2), ("hsdp", 4))
    for precision in ("32", "bf16-mixed")
    for accumulate in (1, 2)
]


def counted() -> dict[tuple[Any, ...], dict[str, Any]]:
    """Return the counts of each driver in each case."""
    os.environ[LIBRARY] = str(building.library())
    found = {}
    for strategy, world, precision, accumulate in CASES:
        for driver in DRIVERS:
            args = (driver, strategy, precision, accumulate, world)
            found[strategy, world, precision, accumulate, driver] = run_in_processes(
                cost, world, args=args, env={DEVICE: "sim"}, timeout=180
            )[0]
    return found


@click.command()
def main() -> None:
    found = counted()
    stop()
    rows = []
    for (strategy, world, precision, accumulate, driver), counts in found.items():
        bare = found[strategy, world, precision, accumulate, "bare"]
        rows.append(
            [
                f"{strategy}, {world} x {precision}, {accumulate}",
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
            print(f"{strategy}, {precision}, {accumulate}, {driver}: {count} waits: {line}")
    columns = ["strategy, processes x precision, accumulation", "", "waits:", "kernels:", "copies:", "collectives:"]
    columns += ["kB sent:", "time / bare:", "peak / bare:", "hazards:"]
    print(f"Of {COUNTED} micro-batches between two log points; kernels to kB sent are of one micro-batch.\n")
    print(as_table(columns, rows))


if __name__ == "__main__":
    main()
