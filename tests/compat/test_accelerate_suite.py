"""The runner of Accelerate's own tests, on a small checkout of ours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.compat.accelerate_suite import fill_in
from tests.pool import ROOT

CASES = """
from accelerate import Accelerator
from accelerate.nowhere import Missing
from accelerate.test_utils.testing import AccelerateTestCase


class Cases(AccelerateTestCase):
    def test_passes(self):
        assert Accelerator(cpu=True).num_processes == 1

    def test_fails(self):
        assert Accelerator is AccelerateTestCase

    def test_uses_what_is_missing(self):
        Missing()
"""


@pytest.mark.compat
def test_cases_run_beside_those_that_need_missing_names(tmp_path: Path) -> None:
    scripts = tmp_path / "src" / "accelerate" / "test_utils" / "scripts"
    scripts.mkdir(parents=True)
    for name in ("__init__", "test_script", "test_sync", "test_ops"):
        (scripts / f"{name}.py").write_text("")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_some.py").write_text(CASES)
    command = [sys.executable, "-m", "tests.compat.accelerate_suite", str(tmp_path)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert "2 failed, 1 passed" in ran.stdout, ran.stdout + ran.stderr
    assert "PASSED tests/test_some.py::Cases::test_passes" in ran.stdout


def test_other_imports_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "test_other.py"
    path.write_text("import os\nfrom pathlib import Path\n")
    before = set(sys.modules)
    fill_in(path)
    assert set(sys.modules) == before
