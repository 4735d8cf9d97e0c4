"""Batch files for schedulers."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import pytest

from drivetrain import ConfigurationError
from drivetrain.launch.slurm import JobSetManifest, SbatchFile
from tests.launch.launching import clean_environment


def test_directives_stand_before_the_first_command_and_are_those_that_were_given() -> None:
    lines = (
        SbatchFile(nodes=2, gpus_per_node=8, time="1-12:00:00", setup=("module load cuda",))
        .render("a b.py")
        .split("\n")
    )
    assert lines[0] == "#!/bin/bash"
    directives = [line for line in lines if line.startswith("#SBATCH")]
    assert lines[1 : 1 + len(directives)] == directives
    assert {"#SBATCH --nodes=2", "#SBATCH --gpus-per-node=8", "#SBATCH --time=1-12:00:00"} <= set(directives)
    assert {"#SBATCH --requeue", "#SBATCH --signal=B:USR1@120"} <= set(directives)
    assert not any("partition" in line for line in lines)
    assert lines.index("module load cuda") < lines.index("drivetrain launch --preemption_grace_period=100 'a b.py' &")


@pytest.mark.parametrize("ends_first", [False, True])
@pytest.mark.parametrize(("code", "requeued"), [(75, True), (0, False), (3, False), (143, False)])
def test_the_job_goes_back_to_the_queue_when_it_has_saved(
    tmp_path: Path, code: int, requeued: bool, ends_first: bool
) -> None:
    """The file itself runs, with a launcher that ends once it was asked to, also before the job waits again."""
    commands = {
        "drivetrain": f"trap 'exit {code}' USR1; touch ready; while :; do sleep 0.05; done",
        "scontrol": 'echo "$@" > requeued',
    }
    for name, body in commands.items():
        path = tmp_path / name
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    # What SLURM does with the signal two minutes before the end, once the launcher runs.
    ask = "(while [ ! -e ready ]; do sleep 0.05; done; kill -USR1 $$) &"
    slow = 'kill() { command kill "$@"; sleep 0.5; }' if ends_first else ""
    (tmp_path / "job.sbatch").write_text(SbatchFile(setup=(ask, slow)).render("train.py"))
    subprocess.run(["bash", "-n", "job.sbatch"], cwd=tmp_path, check=True)
    environment = clean_environment(PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}", SLURM_JOB_ID="47")
    done = subprocess.run(["bash", "job.sbatch"], cwd=tmp_path, env=environment, timeout=30)
    assert done.returncode == code
    assert (tmp_path / "requeued").exists() == requeued
    if requeued:
        assert (tmp_path / "requeued").read_text() == "requeue 47\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"nodes": 0}, "nodes is 0"),
        ({"time": "tomorrow"}, "time is 'tomorrow'"),
        ({"memory": "64 GB"}, "memory is '64 GB'"),
        ({"signal_seconds": 5}, "signal_seconds is 5"),
        ({"partition": "a b"}, "partition is 'a b'"),
    ],
)
def test_what_slurm_would_refuse_is_refused(arguments: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        SbatchFile(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"name": "My_Run"}, "name is 'My_Run'"),
        ({"memory": "64 GB"}, "memory is '64 GB'"),
        ({"max_restarts": -1}, "max_restarts is -1"),
        ({"image": ""}, "image is ''"),
    ],
)
def test_what_kubernetes_would_refuse_is_refused(arguments: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        JobSetManifest(**{"image": "team/train:1", **arguments})  # type: ignore[arg-type]
