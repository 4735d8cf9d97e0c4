"""A script started with plain `python` that starts its own processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from drivetrain import LaunchError
from drivetrain.launch import already_launched, relaunch_script
from tests.launch.launching import run, write_script

RELAUNCHES = """
    import os, sys
    from drivetrain import PartialState
    from drivetrain.launch import already_launched, relaunch_script

    if not already_launched():
        relaunch_script(2, cpu=True)
    print(os.environ["RANK"], sys.argv[1:], sys.warnoptions, sys.flags.no_user_site, __name__, __package__, flush=True)
    PartialState(cpu=True).wait_for_everyone()  # the first rank that fails ends the other
    sys.exit(7)
"""


@pytest.mark.parametrize(
    ("command", "package"),
    [(["script.py"], None), (["-m", "pkg.train"], "pkg")],
    ids=["script", "module"],
)
def test_a_script_starts_its_own_processes_with_its_arguments_and_options(
    tmp_path: Path, command: list[str], package: str | None
) -> None:
    write_script(tmp_path, RELAUNCHES)
    write_script(tmp_path, RELAUNCHES, "pkg/train.py")
    # Not -O: torch would have to be compiled for it first.
    ended = run("-W", "error::UserWarning", "-s", *command, "--lr", "1", cwd=tmp_path)
    assert ended.code == 7, ended.err
    rest = f"['--lr', '1'] ['error::UserWarning'] 1 __main__ {package}"
    assert sorted(ended.out.splitlines()) == [f"0 {rest}", f"1 {rest}"]


@pytest.mark.parametrize(
    ("arguments", "where"),
    [(["-c", "from drivetrain.launch import relaunch_script; relaunch_script(2)"], "`python -c`"), ([], "stdin")],
    ids=["command", "stdin"],
)
def test_without_a_script_the_error_names_what_to_do(tmp_path: Path, arguments: list[str], where: str) -> None:
    if not arguments:
        path = write_script(tmp_path, "from drivetrain.launch import relaunch_script\nrelaunch_script(2)\n")
        arguments = ["-c", f"import subprocess, sys; subprocess.run([sys.executable, '-'], stdin=open({str(path)!r}))"]
    ended = run(*arguments, cwd=tmp_path)
    assert where in ended.err
    assert "notebook_launcher(function, num_processes=2)" in ended.err
    assert "drivetrain launch --num_processes 2" in ended.err


def test_a_test_is_never_started_again() -> None:
    with pytest.raises(LaunchError, match="this is a test"):
        relaunch_script(2)


@pytest.mark.parametrize(
    ("variables", "launched"),
    [
        ({}, False),
        ({"DRIVETRAIN_LAUNCHED": "1"}, True),
        (
            {
                "RANK": "1",
                "WORLD_SIZE": "2",
                "LOCAL_RANK": "1",
                "LOCAL_WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": "29500",
            },
            True,
        ),
    ],
    ids=["plain", "drivetrain", "torchrun"],
)
def test_already_launched_knows_every_launcher(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], launched: bool
) -> None:
    for name in ("DRIVETRAIN_LAUNCHED", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert already_launched() is launched
