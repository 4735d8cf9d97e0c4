"""What a training step costs on a device beside a bare loop: kernels, copies, collectives, waits of the host, memory.

    python benchmarks/devices.py
    python benchmarks/devices.py --device cuda

On simulated devices (tests/simulated) everything is counted, in one process or in two. On a GPU the profiler and the
warnings of torch about synchronisations count, in one process. See benchmarks/README.md.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import click
from tables import as_table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.pool import DEVICE, run_in_processes, stop
from tests.simulated import building
from tests.simulated.costs import COUNTED, FIRST, Meter, cost, run_driver

DRIVERS = ("bare", "trainer", "accelerator")
CASES = [
    (strategy, world, precision, accumulate)
    for strategy, world in (("single", 1), ("ddp", 2), ("fsdp", 2))
    for precision in ("32", "bf16-mixed")
    for accumulate in (1, 2)
]


class GPUMeter(Meter):
    """Counts what CUDA launched between two micro-batches, and where the host waited for it."""

    def __init__(self) -> None:
        self._passes = 0
        self.counts: dict[str, Any] = {}

    def tick(self) -> None:
        import torch

        self._passes += 1
        if self._passes == FIRST:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self._caught = warnings.catch_warnings(record=True)
            self._warned = self._caught.__enter__()
            warnings.simplefilter("always")
            activities = [torch.profiler.ProfilerActivity.CUDA]
            self._profile = torch.profiler.profile(activities=activities).__enter__()
            torch.cuda.set_sync_debug_mode("warn")
        elif self._passes == FIRST + COUNTED:
            torch.cuda.set_sync_debug_mode("default")
            torch.cuda.synchronize()
            self._profile.__exit__(None, None, None)
            self._caught.__exit__(None, None, None)
            waits = [f"{each.filename}:{each.lineno}" for each in self._warned if "synchronizing" in str(each.message)]
            events = [e for e in self._profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
            names = Counter(
                "copies" if "HtoD" in e.name else "collectives" if "nccl" in e.name else "kernels"
                for e in events
                if "Memset" not in e.name and "DtoH" not in e.name
            )
            self.counts = {
                "synchronisations": waits,
                "kernels": names["kernels"],
                "copies": (names["copies"], 0),
                "collectives": {"nccl": names["collectives"]} if names["collectives"] else {},
                "bytes": 0,
                "seconds": 0.0,
                "peak": torch.cuda.max_memory_allocated(),
                "hazards": [],
            }


def on_gpu(driver: str, strategy: str, precision: str, accumulate: int, world: int) -> dict[str, Any]:
    """Count in this process, of one GPU."""
    meter = GPUMeter()
    run_driver(driver, strategy, precision, accumulate, world, meter)
    return meter.counts


def counted(device: str) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Counts of each driver in each case."""
    found = {}
    if device == "sim":
        os.environ["DRIVETRAIN_TESTS_SIMULATED"] = str(building.library())
    for strategy, world, precision, accumulate in CASES:
        for driver in DRIVERS:
            world = world if device == "sim" else 1
            function, env = (cost, {DEVICE: "sim"}) if device == "sim" else (on_gpu, {"DRIVETRAIN_USE_CPU": None})
            args = (driver, strategy, precision, accumulate, world)
            found[strategy, world, precision, accumulate, driver] = run_in_processes(
                function, world, args=args, env=env, timeout=180
            )[0]
    return found


@click.command()
@click.option("--device", type=click.Choice(["sim", "cuda"]), default="sim", show_default=True)
def main(device: str) -> None:
    found = counted(device)
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
                f"{counts['seconds'] / bare['seconds']:.4f}" if bare["seconds"] else "",
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
