"""Processes that Open MPI itself has started."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.crash,
    pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun (Debian's openmpi-bin) is not installed"),
]

SCRIPT = """
import torch
from drivetrain import PartialState
from drivetrain.runtime.collectives import reduce
from drivetrain.runtime.environment import ProcessEnvironment

place = ProcessEnvironment.detect()
state = PartialState(cpu=True)
total = reduce(torch.tensor(float(state.process_index + 1)), reduction="sum")
line = (place.source, state.process_index, state.num_processes, state.local_process_index, int(total))
print(" ".join(map(str, line)) + "\\n", end="", flush=True)
"""


def test_ranks_come_from_the_variables_of_a_real_mpirun(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    launchers = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_", "DRIVETRAIN_", "PYTEST_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(launchers)}
    flags = ["--allow-run-as-root", "--oversubscribe", "--host", "localhost:2", "-n", "2"]
    # Nothing leaves the machine.
    alone = ["--mca", "btl", "self,vader", "--mca", "oob_tcp_if_include", "lo", "--mca", "plm", "isolated"]
    done = subprocess.run(
        ["mpirun", *flags, *alone, "-x", "MASTER_PORT=29617", sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=150,
        env={**environment, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["openmpi 0 2 0 3", "openmpi 1 2 1 3"]
