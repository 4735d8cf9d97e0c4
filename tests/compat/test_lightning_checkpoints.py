"""Files that Lightning wrote continue here as there, and files written here continue under Lightning."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.compat.lightning.version import VERSION
from tests.pool import ROOT

SCRIPT = ROOT / "tests" / "compat" / "lightning_checkpoints.py"
BENCH = ROOT / os.environ.get("BENCH_VENV", ".venv-bench") / "bin" / "python"
LIGHTNING = sys.executable if find_spec("lightning") else str(BENCH)

pytestmark = [
    pytest.mark.compat,
    pytest.mark.skipif(not find_spec("lightning") and not BENCH.exists(), reason=f"needs Lightning {VERSION}"),
]


def run(python: str, under: str, verb: str, folder: Path, *names: str) -> dict[str, Any]:
    done = subprocess.run(
        [python, str(SCRIPT), under, verb, str(folder), *names],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(lines[-1].removeprefix("FOUND "))
    return found


def near(found: Any, expected: Any) -> None:
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-6, abs=1e-6)
    assert found["best"] == pytest.approx(expected["best"], rel=1e-6)
    assert found["ended"] == expected["ended"]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The same run under both, and each file resumed by both."""
    found: dict[str, Any] = {}
    for writer, python in (("lightning", LIGHTNING), ("drivetrain", sys.executable)):
        folder = tmp_path_factory.mktemp(writer)
        found[writer] = {"folder": folder, **run(python, writer, "save", folder)}
        for reader, other in (("lightning", LIGHTNING), ("drivetrain", sys.executable)):
            found[writer, reader] = run(other, reader, "resume", folder, "end", "middle")
    return found


@pytest.mark.parametrize("writer", ["lightning", "drivetrain"])
def test_a_file_of_an_epoch_s_end_continues_alike(written: dict[str, Any], writer: str) -> None:
    there, here = written[writer, "lightning"]["end"], written[writer, "drivetrain"]["end"]
    near(here, there)
    assert here["losses"] == pytest.approx(written["lightning"]["whole"]["losses"][8:], rel=1e-6)
    assert (there["loaded"], here["loaded"]) == ([0.5], [0.5])


@pytest.mark.parametrize("writer", ["lightning", "drivetrain"])
def test_a_file_of_the_middle_of_an_epoch_continues_at_the_next_batch(written: dict[str, Any], writer: str) -> None:
    here = written[writer, "drivetrain"]["middle"]
    assert here["losses"] == pytest.approx(written["lightning"]["whole"]["losses"][12:], rel=1e-6)


def test_lightning_continues_either_file_of_the_middle_of_an_epoch_alike(written: dict[str, Any]) -> None:
    near(written["drivetrain", "lightning"]["middle"], written["lightning", "lightning"]["middle"])


@pytest.mark.parametrize("name", ["end", "middle", "after"])
def test_the_files_have_the_same_entries(written: dict[str, Any], name: str) -> None:
    files = [written[writer]["folder"] / f"{name}.ckpt" for writer in ("lightning", "drivetrain")]
    theirs, ours = (torch.load(file, weights_only=True) for file in files)
    assert ours.keys() == {*theirs, "drivetrain"}
    assert [ours[key] for key in ("epoch", "global_step")] == [theirs[key] for key in ("epoch", "global_step")]
    assert ours["callbacks"].keys() == theirs["callbacks"].keys()
    ours_fit, theirs_fit = ours["loops"]["fit_loop"], theirs["loops"]["fit_loop"]
    assert ours_fit.keys() == theirs_fit.keys()
    for part in ("epoch_progress", "epoch_loop.batch_progress"):
        assert ours_fit[part]["current"] == theirs_fit[part]["current"], part
    torch.testing.assert_close(ours["state_dict"], theirs["state_dict"])
    assert ours["optimizer_states"][0]["param_groups"] == theirs["optimizer_states"][0]["param_groups"]
