"""Commands for the workers of a TPU pod, as gcloud takes them."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import yaml

from drivetrain import ConfigurationError
from tests.commands import drivetrain, exit_code_of

TPU = ("--tpu_name", "pod", "--tpu-zone", "us-central1-a")


@pytest.fixture(autouse=True)
def no_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the configuration of the user who runs the tests."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def printed(*arguments: str) -> list[str]:
    """The words of the command that would run."""
    ended = drivetrain("tpu-config", *arguments, "--debug")
    assert ended.exit_code == 0, ended.output
    words = shlex.split(ended.output)
    assert words[0] == "Running"
    return words[1:]


def test_a_command_reaches_all_workers() -> None:
    assert printed(*TPU, "--command", "echo 'a b'", "--command", "ls") == [
        *("gcloud", "compute", "tpus", "tpu-vm", "ssh", "pod", "--zone", "us-central1-a"),
        *("--command", "cd /usr/share; echo 'a b'; ls", "--worker", "all"),
    ]


@pytest.mark.parametrize(
    ("flags", "installs"),
    [
        (["--install_accelerate"], "pip install accelerate -U"),
        (["--install_accelerate", "--accelerate_version", "1.15.0"], "pip install accelerate==1.15.0"),
        (
            ["--install_accelerate", "--accelerate_version", "dev"],
            "pip install git+https://github.com/huggingface/accelerate.git",
        ),
        (["--install_drivetrain", "--drivetrain_version", "0.1.0"], "pip install drivetrain==0.1.0"),
    ],
)
def test_packages_are_installed_first(flags: list[str], installs: str) -> None:
    assert f"cd /usr/share; {installs}; ls" in printed(*TPU, *flags, "--command", "ls")


def test_a_file_of_settings_names_the_pod_and_its_commands(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump({"tpu_name": "mine", "tpu_zone": "here", "commands": ["one", "two"]}))
    words = printed("--config_file", str(file), "--use_alpha")
    assert words[:2] == ["gcloud", "alpha"]
    assert words[words.index("ssh") + 1] == "mine"
    assert "cd /usr/share; one; two" in words
    (tmp_path / "commands").write_text("three\n\nfour\n")
    assert "cd /usr/share; three; four" in printed(
        "--config_file", str(file), "--command_file", str(tmp_path / "commands")
    )


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--command", "ls"], "tpu_name"),
        ([*TPU], "no command to run"),
        ([*TPU, "--command_file", "no-such-file"], "'no-such-file'"),
        ([*TPU, "--command", "ls", "--install_accelerate", "--accelerate_version", "newest"], "'newest'"),
    ],
)
def test_what_is_missing_is_named(arguments: list[str], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        drivetrain("tpu-config", *arguments, "--debug")


def test_gcloud_itself_is_run_and_its_exit_code_returned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "gcloud"
    program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {tmp_path}/given\nexit 7\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    code = exit_code_of("tpu-config", *TPU, "--command", "ls -l")
    assert code == 7
    assert "cd /usr/share; ls -l" in (tmp_path / "given").read_text().splitlines()
