"""`--dry_run` shows processes, devices, environment and where each value comes from, and starts nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from drivetrain.launch import LaunchOptions
from drivetrain.launch.launcher import preview
from drivetrain.launch.settings.sources import collect
from tests.launch.launching import run, write_script


def test_a_dry_run_shows_where_each_value_comes_from_and_starts_nothing(tmp_path: Path) -> None:
    write_script(tmp_path, "raise AssertionError('must not run')", "train.py")
    (tmp_path / "fsdp.yaml").write_text(
        "distributed_type: FSDP\nnum_processes: 8\nuse_cpu: true\nfsdp_config:\n  fsdp_version: 2\n"
    )
    flags = ["--config-file", "fsdp.yaml", "--num_processes", "2", "--dry-run"]
    variables = {"DRIVETRAIN_MIXED_PRECISION": "bf16"}
    ended = run("-m", "drivetrain", "launch", *flags, "train.py", "--lr", "1", cwd=tmp_path, **variables)
    assert (ended.code, ended.err) == (0, "")
    rows = [line.split() for line in ended.out.splitlines()]
    assert ended.out.startswith("2 process(es) would run the script train.py --lr 1\n")
    for row in (
        ["0", "0", "cpu"],
        ["1", "1", "cpu"],
        ["num_processes", "2", "flag", "--num_processes"],
        ["mixed_precision", "bf16", "environment", "DRIVETRAIN_MIXED_PRECISION"],
        ["use_fsdp", "1", "file", "fsdp.yaml"],
        ["DRIVETRAIN_USE_FSDP", "1", "file", "fsdp.yaml"],
        ["OMP_NUM_THREADS", "1", "the", "launcher"],
    ):
        assert row in rows
    assert "has no effect: both run on torch's fully_shard" in ended.out


@pytest.mark.parametrize(
    ("flags", "first"),
    [
        ({"num_processes": 4, "num_machines": "2", "machine_rank": 1, "main_process_ip": "10.0.0.1"}, "2     0"),
        ({"num_processes": 40}, "...   ...         24 more"),
    ],
)
def test_ranks_are_those_of_this_machine(flags: dict[str, object], first: str) -> None:
    given = collect({"cpu": True, **flags}, {"DRIVETRAIN_CONFIG_FILE": "/dev/null"})
    assert first in preview(LaunchOptions.from_given(given), given, "train.py")
