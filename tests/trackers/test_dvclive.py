"""DVCLiveLogger with the real package: what its files hold is what was logged."""

from __future__ import annotations

import csv
import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from drivetrain import CheckpointError, DVCLiveLogger
from tests.pool import run_in_processes
from tests.trackers.package_contract import Found, Kit, PackageContract
from tests.trackers.runs import PICTURE, SCRIPT, TEXT, complaint, pretend

pytestmark = pytest.mark.trackers


def make(place: Path, **options: Any) -> DVCLiveLogger:
    return DVCLiveLogger(dir=place / "live", save_dir=place, dvcyaml=None, save_dvc_exp=False, **options)


def init_kwargs(place: Path) -> Mapping[str, Any]:
    return {"dir": str(place / "live"), "save_dir": str(place), "dvcyaml": None, "save_dvc_exp": False}


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        found.update(flat(value, f"{prefix}{name}/") if isinstance(value, dict) else {prefix + name: value})
    return found


def read(place: Path, run_id: str) -> Found:
    from PIL import Image

    home, found = place / "live", Found()
    assert (home / "run_id").read_text().strip().startswith(run_id)
    for path in (home / "plots" / "metrics").rglob("*.tsv"):
        name = path.relative_to(home / "plots" / "metrics").with_suffix("").as_posix()
        for row in csv.DictReader(path.open(newline=""), delimiter="\t"):
            if name.removeprefix("run-") == "sample":
                assert row[name] in ("some text", TEXT)
                found.media.add("texts")
            else:
                found.values[name, int(row["step"])] = float(row[name])
    summary = json.loads((home / "metrics.json").read_text())
    found.status, found.error = summary["status"], summary.get("error", "")
    if (home / "params.yaml").is_file():
        found.parameters = flat(yaml.safe_load((home / "params.yaml").read_text()))
    for path in (home / "plots" / "images").glob("*picture/2.png"):
        pixels = Image.open(path).convert("RGB")
        assert pixels.getpixel((7, 5)) == tuple(int(each * 255 + 0.5) for each in PICTURE[:, 5, 7])
        found.media.add("images")
    for path in (home / "plots" / "custom").glob("table-2.json"):
        assert json.loads(path.read_text()) == [{"a": 1, "b": 2}, {"a": 3, "b": 4}]
        found.media.add("tables")
    for path in (home / "plots" / "custom").glob("weights-2.json"):
        assert sum(each["count"] for each in json.loads(path.read_text())) == 10
        found.media.add("histograms")
    return found


class TestDVCLiveLogger(PackageContract):
    kit = Kit("dvclive", make, read, init_kwargs, "log_metric", dropped=frozenset({"texts"}), keeps_files=False)


def interrupted_and_resumed(directory: Path) -> tuple[list[int], list[int]]:
    """Values that a killed run wrote after its checkpoint are dropped when it resumes."""
    os.chdir(directory)
    pretend(SCRIPT)
    killed = make(directory)
    for step in range(6):
        killed.log({"loss": float(step), **({"late": 1.0} if step > 3 else {})}, step)
        if step == 3:
            state = json.loads(json.dumps(killed.state_dict()))
    killed.finish()
    resumed = make(directory)
    resumed.load_state_dict(state)
    for step in range(4, 8):
        resumed.log({"loss": float(step)}, step)
    resumed.finish()
    with (directory / "live" / "plots" / "metrics" / "loss.tsv").open(newline="") as file:
        steps = [int(row["step"]) for row in csv.DictReader(file, delimiter="\t")]
    third = make(directory)
    third.log({"loss": 0.0}, 0)
    third.finish()
    late = make(directory)
    late.load_state_dict(state)  # of a run that is gone
    late.log({"loss": 9.0}, 9)
    late.finish()
    return steps, [step for _, step in read(directory, "").values]


def test_a_resumed_run_has_no_value_from_after_its_checkpoint(tmp_path: Path) -> None:
    [(steps, of_another)] = run_in_processes(interrupted_and_resumed, 1, args=(tmp_path,))
    assert steps == list(range(8))
    assert of_another == [9]
    assert not (tmp_path / "live" / "plots" / "metrics" / "late.tsv").exists()


def test_a_state_that_no_run_writes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="files must map names to sizes"):
        make(tmp_path).load_state_dict({"run_id": "abc", "files": {"x": "y"}})


def in_a_repository(directory: Path) -> int:
    pretend(SCRIPT, DVC_NO_ANALYTICS="1")
    os.chdir(directory)
    (directory / "weights").mkdir()
    (directory / "weights" / "model.pt").write_bytes(b"weights")
    logger = DVCLiveLogger(save_dvc_exp=False)
    logger.log({"loss": 1.0}, 1)
    logger.log_artifact("weights", "best")
    logger.finish()
    return logger.lost


def test_the_best_checkpoint_is_tracked_in_a_dvc_repository(tmp_path: Path) -> None:
    for line in ("git init -q", "git -c user.name=a -c user.email=a@b commit -q --allow-empty -m first"):
        subprocess.run(line.split(), cwd=tmp_path, check=True)
    from dvc.repo import Repo

    Repo.init(str(tmp_path)).close()
    assert run_in_processes(in_a_repository, 1, args=(tmp_path,), timeout=100) == [0]
    assert (tmp_path / "dvclive" / "artifacts" / "weights.dvc").is_file()
    assert yaml.safe_load((tmp_path / "dvc.yaml").read_text())["artifacts"]["best"]["type"] == "model"


def artifact_complaint(directory: Path) -> tuple[str, int]:
    os.chdir(directory)

    class Keeping(DVCLiveLogger):
        def log(self, values: Any, step: Any = None, **options: Any) -> None:
            self.log_artifact(directory)

    return complaint(Keeping(dir=directory / "live", dvcyaml=None, save_dvc_exp=False))


def test_files_without_a_repository_are_counted_as_lost(tmp_path: Path) -> None:
    [(line, lost)] = run_in_processes(artifact_complaint, 1, args=(tmp_path,))
    assert "can store files only in a DVC repository. Create one with `dvc init`." in line
    assert lost == 3


def complaint_of(directory: Path) -> tuple[str, int]:
    os.chdir(directory)
    (directory / "live").write_text("a file")
    return complaint(DVCLiveLogger(dir=directory / "live", dvcyaml=None, save_dvc_exp=False))


def test_one_that_cannot_start_names_why_and_the_run_continues(tmp_path: Path) -> None:
    [(line, lost)] = run_in_processes(complaint_of, 1, args=(tmp_path,))
    assert "DVCLiveLogger: It cannot be started: FileExistsError" in line
    assert lost == 3
