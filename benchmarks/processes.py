"""Measuring in the processes of a launch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click


def measure_in_processes(script: str, name: str, processes: int, **options: Any) -> Any:
    """Run `script --measure NAME` under the launcher, and return what it wrote to its `--json` file.

    Args:
        script: The benchmark.
        name: What it is to measure.
        processes: How many processes, on the CPU with one thread each.
        options: Further options of the benchmark.

    Raises:
        click.ClickException: The launch failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "measured.json"
        command = [sys.executable, "-m", "drivetrain", "launch", "--cpu", "--num_processes", str(processes)]
        command += [script, "--measure", name, "--json", str(file)]
        command += [text for option, value in options.items() for text in (f"--{option}", str(value))]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=3600)
        if done.returncode:
            raise click.ClickException(f"{name} on {processes} process(es) failed:\n{done.stdout}{done.stderr}")
        return json.loads(file.read_text())
