"""What a SLURM job says about a launch, from its variables."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import pytest

from drivetrain import ConfigurationError
from drivetrain.launch.slurm import slurm_options
from tests.launch.launching import run, write_script

TWO_MACHINES = {
    "SLURM_JOB_ID": "4712345",
    "SLURM_JOB_NODELIST": "node[07-08]",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[07-08]",
    "SLURM_NTASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "1",
}


def test_a_step_on_two_machines_needs_no_flags() -> None:
    assert slurm_options({}, TWO_MACHINES) == {
        "num_machines": 2,
        "machine_rank": 1,
        "main_process_ip": "node07",
        "main_process_port": 22345,
    }


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, {}),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node1"}, {}),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node1", "SLURM_NTASKS": "4"}, {"num_processes": 4}),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node1", "SLURM_NTASKS": "1"}, {}),
    ],
)
def test_a_batch_script_on_one_machine_starts_as_many_processes_as_tasks(
    environ: dict[str, str], expected: dict[str, int]
) -> None:
    assert slurm_options({}, environ) == expected


@pytest.mark.parametrize("name", ["num_machines", "machine_rank", "main_process_ip", "rdzv_backend"])
def test_a_launch_that_says_how_machines_meet_is_left_alone(name: str) -> None:
    assert slurm_options({name: "1"}, TWO_MACHINES) == {}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x2)"}, "--ntasks-per-node=1"),
        ({"SLURM_STEP_NODELIST": "node[7-"}, "is not a list of hosts"),
        ({"SLURM_NODEID": "first"}, "is not a number"),
    ],
)
def test_variables_that_cannot_be_are_refused(change: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        slurm_options({}, {**TWO_MACHINES, **change})


def test_a_batch_script_on_several_machines_starts_the_launcher_on_each_with_srun(tmp_path: Path) -> None:
    srun = write_script(
        tmp_path, f"#!{sys.executable}\nimport os, sys\nprint(sys.argv[1:], os.environ['KEPT'])", "srun"
    )
    srun.chmod(srun.stat().st_mode | stat.S_IXUSR)
    write_script(tmp_path, "")
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NTASKS": "8", "KEPT": "kept"}
    ended = run(
        "-m", "drivetrain", "launch", "--cpu", "script.py", "--lr", "1",
        cwd=tmp_path, PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}", **job,
    )  # fmt: skip
    assert ended.code == 0, ended.err
    assert "'--nodes=2', '--ntasks=2', '--ntasks-per-node=1'" in ended.out
    assert "'-m', 'drivetrain', 'launch', '--cpu', 'script.py', '--lr', '1'] kept" in ended.out


def test_without_srun_the_refusal_says_what_to_do(tmp_path: Path) -> None:
    write_script(tmp_path, "")
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-2]"}
    ended = run("-m", "drivetrain", "launch", "script.py", cwd=tmp_path, PATH=str(tmp_path), **job)
    assert ended.code == 2
    assert "is not on PATH" in ended.err
    assert "--num_machines 1" in ended.err


def test_the_processes_of_a_job_are_passed_on_to_each_machine() -> None:
    assert slurm_options({}, {**TWO_MACHINES, "DRIVETRAIN_SLURM_PROCESSES": "8"})["num_processes"] == 8
