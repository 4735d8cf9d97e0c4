"""AimLogger with the real package: what its repository holds is what was logged, read with Aim's own SDK."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from drivetrain import AimLogger
from tests.pool import run_in_processes
from tests.trackers.package_contract import Found, Kit, PackageContract
from tests.trackers.runs import PICTURE, PLANTED, SCRIPT, TEXT, complaint, files_with, pretend

pytestmark = pytest.mark.trackers


def make(place: Path, **options: Any) -> AimLogger:
    return AimLogger(place, "digits", run_name="first", system_tracking_interval=None, **options)


def init_kwargs(place: Path) -> Mapping[str, Any]:
    return {"repo": str(place), "system_tracking_interval": None}


def runs_in(place: Path, run_id: str = "") -> list[Any]:
    """The runs of a repository; Aim reads what its index holds, to which `aim up` adds runs, and `index` here."""
    from aim import Repo, Run
    from aim.sdk.index_manager import RepoIndexManager

    repo = Repo(str(place))
    hashes = [run_id] if run_id else repo.list_all_runs()
    for each in hashes:
        RepoIndexManager.get_index_manager(repo).index(each)
    return [Run(each, repo=repo, read_only=True) for each in hashes]


def read_in_process(place: Path, run_id: str) -> Found:
    """What Aim reads of a run; in a process of its own, since Aim keeps repositories open."""
    [run] = runs_in(place, run_id)
    found = Found()
    for metric in run.metrics():
        for row in metric.dataframe().itertuples():
            found.values[metric.name, int(row.step)] = row.value
            if row.epoch == row.epoch and row.epoch is not None:  # a raw loop has none
                found.values["epoch", int(row.step)] = int(row.epoch)
    hparams = run["hparams"]
    found.parameters = {**hparams, **{f"nested/{key}": value for key, value in hparams.get("nested", {}).items()}}
    found.status, found.error = run["status"], run.get("error") or ""
    assert run.experiment in ("digits", "raw")
    for name, context, _ in run.iter_sequence_info_by_type(("aim.image", "aim.text", "aim.distribution")):
        read_media(found, run, name.removeprefix("run-"), name, context)
    artifacts = place / "artifacts" / run.hash / "best"
    found.files = {path.name for path in artifacts.rglob("*") if path.is_file()}
    assert {name.rpartition("/")[2] for name in run.artifacts} == found.files
    return found


def read_media(found: Found, run: Any, short: str, name: str, context: Any) -> None:
    if short == "picture":
        [(step, image)] = list(zip(*run.get_image_sequence(name, context).values.sparse_list(), strict=True))
        pixels = image.to_pil_image().convert("RGB")
        assert (step, pixels.size) == (2, (8, 6))
        assert pixels.getpixel((7, 5)) == tuple(int(each * 255 + 0.5) for each in PICTURE[:, 5, 7])
        found.media.add("images")
    elif short in ("sample", "table"):
        texts = [each.data for each in run.get_text_sequence(name, context).values.sparse_list()[1]]
        table = "| a | b |\n| --- | --- |\n| 1 | 2 |\n| 3 | 4 |"
        expected = (["some text"], [TEXT], [TEXT, TEXT]) if short == "sample" else ([table],)
        assert texts in expected
        found.media.add("texts" if short == "sample" else "tables")
    elif short == "weights":
        [distribution] = run.get_distribution_sequence(name, context).values.sparse_list()[1]
        assert distribution.weights.sum() == 10
        found.media.add("histograms")


def read(place: Path, run_id: str) -> Found:
    [found] = run_in_processes(read_in_process, 1, args=(place, run_id), timeout=60)
    return found


class TestAimLogger(PackageContract):
    kit = Kit("aim", make, read, init_kwargs, "track")


def with_system_params(directory: Path) -> None:
    pretend(SCRIPT, SOME_SERVICE_TOKEN=PLANTED, HARMLESS="shown-as-it-is")
    logger = AimLogger(directory, log_system_params=True, system_tracking_interval=None)
    logger.log({"loss": 1.0}, 1)
    logger.finish()


def system_params(directory: Path) -> dict[str, Any]:
    [run] = runs_in(directory)
    found: dict[str, Any] = run["__system_params"]
    return {"variables": dict(found["env_variables"]), "packages": dict(found["packages"])}


def test_environment_variables_are_written_without_secrets(tmp_path: Path) -> None:
    run_in_processes(with_system_params, 1, args=(tmp_path,), timeout=60)
    [found] = run_in_processes(system_params, 1, args=(tmp_path,), timeout=60)
    assert found["variables"]["SOME_SERVICE_TOKEN"] == "<hidden>"
    assert found["variables"]["HARMLESS"] == "shown-as-it-is"
    assert "torch" in found["packages"]
    assert files_with(PLANTED, tmp_path) == []


def complaint_of(directory: Path) -> tuple[str, int]:
    (directory / ".aim").write_text("a file, where Aim wants a directory")
    return complaint(AimLogger(directory))


def test_one_that_cannot_start_names_why_and_the_run_continues(tmp_path: Path) -> None:
    [(line, lost)] = run_in_processes(complaint_of, 1, args=(tmp_path,), timeout=60)
    assert "AimLogger: It cannot be started: " in line
    assert "The run continues without it." in line
    assert lost == 3
