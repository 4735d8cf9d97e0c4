"""The command line: it answers at once, and mistakes are told without a traceback."""

from __future__ import annotations

import json
import re
from pathlib import Path

import click
import pytest

import drivetrain
from drivetrain.cli.main import cli
from tests.launch.launching import run, write_script

COMMANDS = ["--version", "", "config", "config default", "config show", "config update"]
COMMANDS += [name for name in cli.list_commands(click.Context(cli)) if name != "config"]
# None of these is needed to explain a command, and each takes milliseconds. The help of every command has 200.
HEAVY = {
    "torch",
    "numpy",
    "psutil",
    "yaml",
    "ray",
    "questionary",
    "safetensors",
    "multiprocessing",
    "asyncio",
    "importlib.metadata",
    "email",
    "logging",
    "drivetrain.trainer",
    "drivetrain.accelerator",
    "drivetrain.strategies",
    "drivetrain.launch.launcher",
}

# Each help in a fork of an interpreter that has imported nothing: as alone, without starting an interpreter for each.
EXPLAINS = """
    import json, os, sys

    for command in json.loads(sys.argv[1]):
        sys.stdout.flush()
        if os.fork() == 0:
            import drivetrain.cli.main
            arguments = command.split() if command.startswith("-") else [*command.split(), "--help"]
            drivetrain.cli.main.cli(arguments, standalone_mode=False)
            print("\\n" + json.dumps([command, sorted(sys.modules)]), flush=True)
            os._exit(0)
        if os.wait()[1]:
            raise SystemExit(f"the help of {command!r} failed")
"""


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What the help of each command imports."""
    home = tmp_path_factory.mktemp("help")
    write_script(home, EXPLAINS)
    ended = run("script.py", json.dumps(COMMANDS), cwd=home)
    assert (ended.code, ended.err) == (0, "")
    return dict(json.loads(line) for line in ended.out.splitlines() if line.startswith("["))


@pytest.mark.parametrize("command", COMMANDS)
def test_help_imports_nothing_heavy(imported: dict[str, list[str]], command: str) -> None:
    assert "click" in imported[command]  # the listing works
    assert HEAVY.intersection(imported[command]) == set()


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
