"""The runner of Lightning's own tests: how it sorts cases, on a small suite of ours in the same places."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.compat.lightning_suite import is_machinery
from tests.pool import ROOT

CASES = """
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loops import _FitLoop
from lightning.pytorch.nowhere import Missing


def test_passes():
    assert issubclass(LightningModule, object)


def test_fails():
    assert Trainer is LightningModule


def test_of_machinery():
    _FitLoop(None)


def test_of_a_private_attribute():
    assert Trainer(logger=False)._data_connector


def test_of_a_missing_name():
    Missing()
"""


@pytest.mark.parametrize(
    ("name", "is_private"),
    [
        ("lightning.pytorch.Trainer", False),
        ("lightning.pytorch.callbacks.ModelCheckpoint.__init__", False),
        ("lightning.pytorch.trainer.connectors.data_connector.request", True),
        ("lightning.pytorch.core.module._TrainerFabricShim", True),
    ],
)
def test_machinery_is_what_is_private_by_its_name_or_its_module(name: str, is_private: bool) -> None:
    assert is_machinery(name) is is_private


@pytest.mark.compat
def test_cases_are_sorted_by_what_they_are_about(tmp_path: Path) -> None:
    folder = tmp_path / "tests" / "tests_pytorch"
    folder.mkdir(parents=True)
    (folder / "test_some.py").write_text(CASES)
    command = [sys.executable, "-m", "tests.compat.lightning_suite", str(tmp_path), "test_some.py", "--why"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = ran.stdout.splitlines()
    reasons = {line.split("::")[1].split()[0]: line for line in lines if "::test_" in line and "  " in line}
    assert lines[-1].split() == ["all", "1", "2", "2", "0"], ran.stdout + ran.stderr
    assert "uses _FitLoop" in reasons["test_of_machinery"]
    assert "reads _data_connector" in reasons["test_of_a_private_attribute"]
    assert "NameMissing: lightning.pytorch.nowhere.Missing" in reasons["test_of_a_missing_name"]
    assert ran.returncode == 1
