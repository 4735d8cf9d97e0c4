"""What mpirun is asked for."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from drivetrain import LaunchError
from drivetrain.launch import LaunchOptions
from drivetrain.launch.launcher import mpi_command
from tests.launch.launching import run, write_script

# A program in the place of mpirun: it starts the ranks of one machine one after the other, as Open MPI would name them.
MPIRUN = """
    import os, subprocess, sys
    if sys.argv[1:] == ["--version"]:
        print("mpirun (Open MPI) 4.1.4")
        raise SystemExit
    arguments = sys.argv[1:]
    count = int(arguments[arguments.index("-n") + 1])
    command = arguments[arguments.index(sys.executable):]
    for rank in range(count):
        place = {"RANK": rank, "SIZE": count, "LOCAL_RANK": rank, "LOCAL_SIZE": count}
        place = {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in place.items()}
        subprocess.run(command, env={**os.environ, **place}, check=True)
"""
SCRIPT = """
    import json, os, sys
    from drivetrain.launch.settings.sources import settings_in_environment
    from drivetrain.runtime.environment import ProcessEnvironment

    place = ProcessEnvironment.detect()
    print(json.dumps([place.rank, place.world_size, place.source, sys.argv[1:], settings_in_environment()]))
"""


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A file of hosts, and a program named mpirun on PATH."""
    program = write_script(tmp_path, f"#!{sys.executable}\n" + MPIRUN.replace("\n    ", "\n"), "bin/mpirun")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    return str(tmp_path / "hosts")


def test_ranks_that_mpirun_starts_find_their_place_and_their_settings(tmp_path: Path, hosts: str) -> None:
    write_script(tmp_path, SCRIPT)
    flags = ["--cpu", "--num_processes", "2", "--mixed_precision", "bf16", "--mpirun_hostfile", hosts]
    ended = run("-m", "drivetrain", "launch", *flags, "script.py", "--lr", "1", cwd=tmp_path)
    assert ended.code == 0, ended.err
    settings = {"cpu": True, "mixed_precision": "bf16"}
    assert [json.loads(line) for line in ended.out.splitlines()] == [
        [rank, 2, "openmpi", ["--lr", "1"], settings] for rank in range(2)
    ]


def test_processes_are_spread_over_the_machines(hosts: str) -> None:
    options = LaunchOptions(
        num_processes=4, num_machines=2, main_process_ip="10.0.0.1", cpu=True, mpirun_config={"mpirun_hostfile": hosts}
    )
    command, variables = mpi_command(options, "train.py", ["--lr", "1"])
    joined = " ".join(command)
    assert f"--hostfile {hosts} -n 4 --npernode 2 --bind-to none" in joined
    assert "-x DRIVETRAIN_USE_CPU" in joined
    assert joined.endswith("train.py --lr 1")
    assert (variables["MASTER_ADDR"], variables["MASTER_PORT"]) == ("10.0.0.1", "29500")


def test_without_mpirun_the_message_names_what_to_install(hosts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(LaunchError, match=r"neither mpirun nor mpiexec.*openmpi-bin"):
        mpi_command(LaunchOptions(cpu=True, mpirun_config={"mpirun_hostfile": hosts}), "train.py")
