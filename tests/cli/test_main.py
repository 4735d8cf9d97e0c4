"""The command line: it answers at once, and mistakes are told without a traceback."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import drivetrain
from tests.launch.launching import run, write_script

HEAVY = (
    "torch",
    "numpy",
    "psutil",
    "yaml",
    "drivetrain.trainer",
    "drivetrain.strategies",
    "drivetrain.launch.launcher",
)


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["launch", "--help"], ["config", "--help"], ["config", "show", "--help"], ["--version"]],
    ids=" ".join,
)
def test_help_imports_nothing_heavy(tmp_path: Path, arguments: list[str]) -> None:
    ended = run("-X", "importtime", "-m", "drivetrain", *arguments, cwd=tmp_path)
    assert ended.code == 0
    imported = {line.rsplit("|", 1)[1].strip() for line in ended.err.splitlines() if "|" in line}
    assert "click" in imported  # the listing works
    assert not imported.intersection(HEAVY)


def test_help_lists_every_command(tmp_path: Path) -> None:
    out = run("-m", "drivetrain", "--help", cwd=tmp_path).out
    assert re.search(r"launch +Run a script", out)
    assert re.search(r"env +Show versions", out)


def test_the_version_is_the_packages(tmp_path: Path) -> None:
    assert drivetrain.__version__ in run("-m", "drivetrain", "--version", cwd=tmp_path).out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["launch", "--num_proceses", "2", "train.py"], ["--num_proceses", "--num_processes"]),
        (["lunch"], ["'lunch'", "Did you mean 'launch'?"]),
        (["launch"], ["Missing argument 'SCRIPT'"]),
        (["launch", "trian.py"], ["'trian.py'", "Did you mean 'train.py'?", "-m"]),
        (["launch", "--num_processes", "two", "train.py"], ["'two'", "integer"]),
        (["launch", "--num_processes", "0", "train.py"], ["num_processes is 0", "at least 1"]),
        (["launch", "--mixed-precision", "bf61", "train.py"], ["'bf61'", "Did you mean 'bf16'?"]),
        (["launch", "--no_python", "no-such-program"], ["'no-such-program'", "PATH"]),
        (["launch", "--config_file", "non.yaml", "train.py"], ["'non.yaml'", "drivetrain config"]),
        (["launch", "--zero-stage", "2", "train.py"], ["--zero_stage", "--use_deepspeed"]),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_on_the_command_line_is_told_without_a_traceback(
    tmp_path: Path, arguments: list[str], said: list[str]
) -> None:
    write_script(tmp_path, "raise AssertionError('must not run')", "train.py")
    ended = run("-m", "drivetrain", *arguments, cwd=tmp_path)
    assert ended.code == 2
    assert "Traceback" not in ended.err
    for part in said:
        assert part in ended.err


def test_env_shows_versions_devices_and_where_settings_come_from(tmp_path: Path) -> None:
    ended = run("-m", "drivetrain", "env", cwd=tmp_path, DRIVETRAIN_MIXED_PRECISION="bf16")
    assert ended.code == 0, ended.err
    for pattern in (
        r"torch +\d",
        r"cpu +\d+ cores.*gloo",
        r"MIXED_PRECISION +bf16  \(environment\)",
        r"USE_CPU +not set",
    ):
        assert re.search(pattern, ended.out), pattern
