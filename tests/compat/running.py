"""Runs a program with the original Accelerate and with ours in its place, and compares what it reports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.pool import ROOT

PROGRAMS = Path(__file__).parent / "programs"
TIMEOUT = 240


def environment(folder: Path, result: Path, **variables: str) -> dict[str, str]:
    """The variables of a run: no hub is asked, and each process has one thread."""
    folder.mkdir(parents=True, exist_ok=True)
    return {
        **os.environ,
        "COMPAT_FOLDER": str(folder),
        "COMPAT_RESULT": str(result),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **variables,
    }


def run(command: list[str], variables: dict[str, str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(command, env=variables, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT)


def with_original(
    script: Path, arguments: list[str], processes: int, folder: Path, **variables: str
) -> dict[str, float]:
    """What a program reports with the original Accelerate, started by torchrun."""
    result = folder.with_suffix(".json")
    settings = environment(folder, result, ACCELERATE_USE_CPU="true", **variables)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"] if processes > 1 else []
    done = run([sys.executable, *launcher, str(script), *arguments], settings, folder)
    assert done.returncode == 0, f"the original fails:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return json.loads(result.read_text())


def launch_with_ours(
    script: Path, arguments: list[str], processes: int, folder: Path, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a program, unchanged, under `drivetrain launch --as accelerate`."""
    path = os.pathsep.join(filter(None, [str(ROOT), variables.pop("PYTHONPATH", None)]))
    settings = environment(folder, folder.with_suffix(".json"), PYTHONPATH=path, **variables)
    flags = ["--cpu", "--num_processes", str(processes), "--as", "accelerate"]
    return run([sys.executable, "-m", "drivetrain", "launch", *flags, str(script), *arguments], settings, folder)


def with_ours(script: Path, arguments: list[str], processes: int, folder: Path, **variables: str) -> dict[str, float]:
    """What a program reports under ours."""
    done = launch_with_ours(script, arguments, processes, folder, **variables)
    assert done.returncode == 0, f"{script.name} fails under ours:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return json.loads(folder.with_suffix(".json").read_text())


def furthest(theirs: dict[str, float], ours: dict[str, float]) -> float:
    """The largest difference between values of the same name."""
    assert theirs.keys() == ours.keys()
    return max(abs(theirs[name] - ours[name]) / max(1.0, abs(theirs[name])) for name in theirs)
