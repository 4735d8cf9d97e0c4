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


def run_suite(folder: Path, cases: str, *options: str) -> tuple[subprocess.CompletedProcess[str], dict[str, str]]:
    """Run a suite of one file. Returns the process, and the line about each case that has not passed."""
    tests = folder / "tests" / "tests_pytorch"
    tests.mkdir(parents=True)
    (tests / "test_some.py").write_text(cases)
    command = [sys.executable, "-m", "tests.compat.lightning_suite", str(folder), "test_some.py", "--why", *options]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = [line for line in ran.stdout.splitlines() if "::test_" in line and "  " in line]
    return ran, {line.split("::")[1].split()[0]: line for line in lines}


@pytest.mark.compat
def test_cases_are_sorted_by_what_they_are_about(tmp_path: Path) -> None:
    ran, reasons = run_suite(tmp_path, CASES)
    assert ran.stdout.splitlines()[-1].split() == ["all", "1", "2", "2", "0"], ran.stdout + ran.stderr
    assert "uses _FitLoop" in reasons["test_of_machinery"]
    assert "reads _data_connector" in reasons["test_of_a_private_attribute"]
    assert "NameMissing: lightning.pytorch.nowhere.Missing" in reasons["test_of_a_missing_name"]
    assert ran.returncode == 1


MORE_CASES = """
from unittest import mock

import pytest
from lightning.pytorch.loops import _Loop


def helper():
    return Trainer(logger=False)._data_connector


class Model(LightningModule):
    _private = 1

    def step(self):
        return self._private


@pytest.fixture
def cuda_count_2():
    pass


def test_that_uses_a_helper():
    helper()


def test_that_replaces_a_part():
    with mock.patch("lightning.pytorch.Trainer.fit"):
        pass


def test_that_pretends_devices(cuda_count_2):
    pass


def test_that_names_a_private_import():
    assert _Loop is not None


def test_of_a_class_with_private_names_of_its_own():
    assert Model().step() == 1
"""


@pytest.mark.compat
def test_public_cases_are_selected_by_their_sources(tmp_path: Path) -> None:
    ran, reasons = run_suite(tmp_path, CASES + MORE_CASES, "--public")
    assert ran.stdout.splitlines()[-1].split() == ["all", "2", "2", "0", "0"], ran.stdout + ran.stderr
    assert reasons.keys() == {"test_fails", "test_of_a_missing_name"}
