"""How long it takes from the launch command to the end of the first backward on all processes.

    make bench
    python benchmarks/launch.py --processes 2 --processes 8 --rounds 10

Every launcher starts the same script, which uses nothing but torch: it joins a gloo group, wraps a model in DDP, makes
an optimizer, and runs one backward. Each is measured in turn, right after torchrun.
"""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import click
from tables import as_table
from timing import Comparison, compare, version_of

SCRIPT = """
import os, sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(32, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(4, 32)).sum().backward()
ended = time.time()
with open(f"{sys.argv[1]}/{dist.get_rank()}of{dist.get_world_size()}", "w") as file:
    file.write(str(ended))
dist.destroy_process_group()
os._exit(0)  # a DDP model that outlives its group aborts the interpreter at its end once in a while (torch 2.13)
"""

# name -> (what must be installed, how it is started with N processes)
LAUNCHERS = {
    "torchrun": ("torch", "-m torch.distributed.run --standalone --nproc_per_node {processes}"),
    "drivetrain": ("drivetrain", "-m drivetrain launch --cpu --num_processes {processes}"),
    "accelerate": ("accelerate", "-m accelerate.commands.launch --config_file {config} --num_processes {processes}"),
}
# Without a file of its own, Accelerate starts one process on the CPU, whatever --num_processes says.
ACCELERATE_CONFIG = """
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
use_cpu: true
machine_rank: 0
num_machines: 1
num_processes: 2
main_training_function: main
mixed_precision: 'no'
"""


def measure(launcher: str, processes: int) -> float:
    """Seconds from the command to the end of the last process's backward."""
    with tempfile.TemporaryDirectory() as folder:
        (script := Path(folder) / "script.py").write_text(SCRIPT)
        (config := Path(folder) / "config.yaml").write_text(ACCELERATE_CONFIG)
        (output := Path(folder) / "output").mkdir()
        command = LAUNCHERS[launcher][1].format(processes=processes, config=config).split()
        start = time.time()
        done = subprocess.run(
            [sys.executable, *command, str(script), str(output)],
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        )
        ended = [float(file.read_text()) for file in output.glob(f"*of{processes}")]
        if done.returncode or len(ended) != processes:
            raise click.ClickException(f"{launcher} with {processes} processes failed:\n{done.stdout}{done.stderr}")
        return max(ended) - start


@click.command()
@click.option("--processes", "counts", type=int, multiple=True, default=(2, 4, 8), show_default=True)
@click.option("--rounds", default=5, show_default=True, help="How often each launcher is measured.")
@click.option("--only", multiple=True, help="A part of a launcher's name; can be given several times.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the figures there too.")
def main(counts: tuple[int, ...], rounds: int, only: tuple[str, ...], json_file: Path | None) -> None:
    chosen = []
    for name, (module, _) in LAUNCHERS.items():
        if name == "torchrun" or (only and not any(part in name for part in only)):
            continue
        if importlib.util.find_spec(module) is None:
            print(f"{name}: left out, {module} is not installed. `make bench` installs what is compared.")
            continue
        chosen.append(name)
    print(f"Medians of {rounds} rounds, {versions()}, {os.cpu_count()} cores.\n")
    results = {}
    for count in counts:
        results[count] = compare(
            partial(measure, "torchrun", count), {name: partial(measure, name, count) for name in chosen}, rounds
        )
        print(table(count, results[count]), flush=True)
    if json_file is not None:
        figures = [
            {**each.as_dict(), "processes": count, "unit": "s"} for count, found in results.items() for each in found
        ]
        json_file.write_text(json.dumps({"results": figures}, indent=2))


def versions() -> str:
    return ", ".join(f"{name} {version_of(name)}" for name in ("torch", "accelerate"))


def table(count: int, found: list[Comparison]) -> str:
    rows = []
    for each in found:
        own, base = statistics.median(each.own), statistics.median(each.base)
        rows.append([each.name, f"{own:.2f}", f"{base:.2f}", f"{each.ratio:.2f}"])
    return as_table([f"{count} processes:", "seconds:", "torchrun in turn:", "times torchrun:"], rows) + "\n"


if __name__ == "__main__":
    main()
