"""Scripts end: a model that is wrapped at the top of a module must not hang the process at exit.

A reducer that outlives its process group waits for gloo's thread, which waits for the interpreter: about one
two-process run in forty hung so.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

from drivetrain import Accelerator
from tests.pool import run_in_processes

SCRIPT = Path(__file__).with_name("exit_script.py")
ROOT = Path(__file__).parents[2]
LAUNCHERS = {
    "drivetrain launch": ["-m", "drivetrain", "launch", "--cpu", "--num_processes", "2"],
    "torch.distributed.run": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
}


def run_to_its_end(launcher: str) -> None:
    """Run the script once; kill all of it if it does not end."""
    environment = {**os.environ, "DRIVETRAIN_USE_CPU": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, *LAUNCHERS[launcher], str(SCRIPT)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail(f"{launcher} still ran after 60 s:\n{process.communicate()[0]}")
    assert process.returncode == 0, output
    assert output.count("trained on 2") == 1, output
    for word in ("destroy_process_group", "Traceback", "terminate called"):
        assert word not in output, output


def test_a_script_ends_by_itself():
    run_to_its_end("drivetrain launch")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_script_ends_by_itself_every_time(launcher):
    for _ in range(40):
        run_to_its_end(launcher)


def end_while_it_is_held() -> list[bool]:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(2, 2))
    accelerator.backward(model(torch.ones(1, 2)).sum())
    reducer = weakref.ref(model.reducer) if hasattr(type(model.reducer), "__weakref__") else None
    accelerator.end_training()
    gone = reducer is None or reducer() is None
    return ["reducer" not in model.__dict__, gone, not torch.distributed.is_initialized()]


def test_reducers_go_before_the_process_group_also_where_the_model_is_held():
    assert run_in_processes(end_while_it_is_held, 2) == [[True] * 3] * 2
