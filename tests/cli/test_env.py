"""The report for bug reports: all that matters, and no secret."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from drivetrain import ConfigurationError
from tests.commands import drivetrain


@pytest.fixture(autouse=True)
def no_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the configuration of the user who runs the tests."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def report(*arguments: str) -> str:
    ended = drivetrain("env", *arguments)
    assert ended.exit_code == 0
    return ended.output


def test_secrets_are_hidden_wherever_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "abcdefgh12345678")
    monkeypatch.setenv("DRIVETRAIN_NOTE", "key abcdefgh12345678 of mine")
    monkeypatch.setenv("TORCH_ACCESS_TOKEN", "zyxwvuts")
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump({"num_processes": 2, "fsdp_config": {"fsdp_version": 2}, "password": "1234"}))
    printed = report("--config_file", str(file))
    for secret in ("abcdefgh12345678", "zyxwvuts", "1234\n"):
        assert secret not in printed
    assert "key <hidden> of mine" in printed
    rows = {line.split()[0]: line.split()[1:] for line in printed.splitlines() if line.startswith("  ")}
    assert rows["num_processes"] == ["2"]
    assert rows["fsdp_config.fsdp_version"] == ["2"]
    assert rows["password"] == ["<hidden>"]


def test_the_home_directory_is_not_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HF_HOME", f"{tmp_path}/cache")
    printed = report()
    assert "~/cache  (environment)" in printed
    assert str(tmp_path) not in printed


def test_the_users_own_configuration_is_shown(tmp_path: Path) -> None:
    assert "Configuration file" not in report()
    file = tmp_path / "config" / "drivetrain" / "default_config.yaml"
    file.parent.mkdir(parents=True)
    file.write_text("num_processes: 3\n")
    rows = [line.split() for line in report().splitlines()]
    assert ["num_processes", "3"] in rows
    assert ["read", "from", str(file)] in rows


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no-such"):
        report("--config-file", str(tmp_path / "no-such.yaml"))
