"""The commands that write a file for a scheduler."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests.commands import drivetrain

SCHEMA = json.loads((Path(__file__).parent / "schemas" / "jobset-v1alpha2.json").read_text())


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--nodes", "2", "--gpus_per_node", "8", "--memory", "512Gi", "--cpus-per-node", "64"],
        ["--namespace", "team", "--claim", "weights", "--processes_per_node", "4", "--max_restarts", "0"],
    ],
)
def test_a_manifest_is_one_that_kubernetes_takes(flags: list[str]) -> None:
    validator = pytest.importorskip("jsonschema", reason="jsonschema is not installed").Draft202012Validator(SCHEMA)
    ended = drivetrain("k8s", "--image", "team/train:1", *flags, "train.py", "--lr", "$(0.1)")
    assert ended.exit_code == 0, ended.output
    manifest = yaml.safe_load(ended.stdout)
    assert list(validator.iter_errors(manifest)) == []
    manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]["comand"] = []
    assert len(list(validator.iter_errors(manifest))) == 1  # the schema finds a mistake


def test_each_pod_is_given_its_own_rank_and_the_first_ones_address() -> None:
    ended = drivetrain("k8s", "--image", "i", "--name", "run", "--nodes", "2", "train.py", "--lr", "$(x)")
    pod = yaml.safe_load(ended.stdout)["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    command = pod["containers"][0]["command"]
    assert {"--machine_rank=$(JOB_COMPLETION_INDEX)", "--main_process_ip=run-machine-0-0.run", "--cpu"} <= set(command)
    assert command[-3:] == ["train.py", "--lr", "$$(x)"]  # Kubernetes would put a variable in the place of $(x)


def test_an_sbatch_file_is_written_where_it_was_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "train.sbatch"
    flags = [
        "--nodes",
        "2",
        "--processes-per-node",
        "4",
        "--launch_flags",
        "--mixed_precision bf16",
        "--file",
        str(file),
    ]
    ended = drivetrain("slurm", *flags, "train.py", "--nodes", "7")
    assert ended.exit_code == 0, ended.output
    launch = "drivetrain launch --preemption_grace_period=100 --num_processes=8 --cpu --mixed_precision bf16"
    assert f"{launch} train.py --nodes 7 &" in file.read_text().splitlines()
