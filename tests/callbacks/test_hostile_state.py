"""A checkpoint whose callbacks and trackers name what is not theirs: nothing of that is read, written or removed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drivetrain import CheckpointError, CSVLogger, ModelCheckpoint
from tests.callbacks.tasks import Scripted, fit
from tests.checkpoint.states import reseal, write
from tests.checkpoint.test_hostile import nothing_outside_touched

EXPECTED = "in this checkpoint has"


def saver(root: Path) -> ModelCheckpoint:
    return ModelCheckpoint(root / "ckpt", "{epoch}", monitor="val_loss", save_top_k=2, save_last=True)


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run's last checkpoint, and beside the run things that are not its own."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")  # what a path such as "." would lead to, were it followed
    root = tmp_path / "root"
    fit(Scripted([1, 2]), root, 2, [saver(root)], logger=CSVLogger(root))
    for name in ("thesis", "run"):
        (tmp_path / "outside" / name).mkdir(parents=True)
    (tmp_path / "outside" / "thesis" / "text.txt").write_text("mine")
    (tmp_path / "outside" / "run" / "metrics.csv").write_text("a,b\n1,2\n3,4\n")
    write(tmp_path / "outside" / "checkpoint")
    return root / "ckpt" / "last.ckpt"


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def states_in(tree: Any, has: str) -> list[dict[str, Any]]:
    """Every dict within a packed state that has a key, wherever the schema keeps it."""
    found = []
    if isinstance(tree, dict):
        found += [tree] if has in tree else []
        tree = list(tree.values())
    if isinstance(tree, list):
        found += [each for item in tree for each in states_in(item, has)]
    return found


def edit(checkpoint: Path, has: str, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads((checkpoint / "state.json").read_bytes())
    found = states_in(content, has)
    assert found
    for state in found:
        change(state)
    reseal(checkpoint, "state.json", json.dumps(content).encode())


def resume(checkpoint: Path, **options: Any) -> None:
    root = checkpoint.parent.parent
    fit(Scripted([3, 4, 5]), root, 4, [saver(root)], logger=CSVLogger(root), resume=str(checkpoint), **options)


FIELDS: dict[str, Callable[[str], dict[str, Any]]] = {
    "doomed": lambda path: {"doomed": [path]},
    "passing": lambda path: {"passing": [path]},
    "best_k_models": lambda path: {"best_k_models": [[path, 9.0], ["b.ckpt", 8.0]]},
    "beside": lambda path: {"beside": path},
    "last_model_path": lambda path: {"last_model_path": path},
    "newest_model_path": lambda path: {"newest_model_path": path},
    "newest_of_best": lambda path: {"newest_of_best": path},
    "below_root": lambda path: {"below_root": path},
}
PATHS: dict[str, str] = {
    "an absolute path": "{outside}/thesis",
    "a checkpoint that is not its own": "{outside}/checkpoint",
    "a path above": "../../outside/thesis",
    "a path above, by a detour": "last.ckpt/../../../outside/thesis",
    "a URL": "memory://outside/thesis",
    "a dot": ".",
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("field", FIELDS)
def test_a_path_in_the_state_of_model_checkpoint_is_refused(field: str, path: str, saved: Path, tmp_path: Path) -> None:
    hostile = PATHS[path].format(outside=tmp_path / "outside")
    edit(saved, "doomed", lambda state: state.update(FIELDS[field](hostile)))
    before = contents(tmp_path)
    with nothing_outside_touched(), pytest.raises(CheckpointError, match=f"{EXPECTED} {field}="):
        resume(saved)
    assert contents(tmp_path / "outside") == {
        name.removeprefix("outside/"): content for name, content in before.items() if name.startswith("outside/")
    }


ODD: dict[str, dict[str, Any]] = {
    "doomed": {"doomed": "epoch=0.ckpt"},
    "passing": {"passing": [3]},
    "best_k_models": {"best_k_models": [["a", "b"]]},
    "beside": {"beside": None},
    "dirpath": {"dirpath": ["x"]},
    "validations": {"validations": "1"},
    "last_step": {"last_step": None},
    "current_score": {"current_score": "low"},
    "waits_for_validation": {"waits_for_validation": 3},
}


@pytest.mark.parametrize("field", ODD)
def test_a_state_of_another_type_is_refused(field: str, saved: Path) -> None:
    edit(saved, "doomed", lambda state: state.update(ODD[field]))
    with pytest.raises(CheckpointError, match=f"{EXPECTED} {field}="):
        resume(saved)


def test_a_directory_of_the_run_that_is_no_checkpoint_is_not_removed(
    saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (saved.parent / "notes").mkdir()
    (saved.parent / "notes" / "a.txt").write_text("mine")
    edit(saved, "doomed", lambda state: state.update(doomed=["notes"]))
    resume(saved)
    assert (saved.parent / "notes" / "a.txt").read_text() == "mine"
    assert "notes is not removed: it is not a checkpoint" in caplog.text


def test_what_a_link_in_the_run_leads_to_is_left_alone(
    saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (saved.parent / "far.ckpt").symlink_to(tmp_path / "outside" / "checkpoint")
    edit(saved, "doomed", lambda state: state.update(doomed=["far.ckpt"]))
    before = contents(tmp_path / "outside")
    resume(saved)
    assert contents(tmp_path / "outside") == before
    assert (saved.parent / "far.ckpt").is_symlink()
    assert "far.ckpt in" in caplog.text


def test_the_directory_that_a_checkpoint_names_is_not_saved_in(saved: Path, tmp_path: Path) -> None:
    """A run that was given no directory continues in one of its own, wherever the checkpoint says it was."""
    root = tmp_path / "fresh"
    edit(saved, "doomed", lambda state: state.update(dirpath=str(tmp_path / "outside" / "run"), below_root=None))
    before = contents(tmp_path / "outside")
    checkpoint = ModelCheckpoint(filename="{epoch}", monitor="val_loss", save_top_k=2, save_last=True)
    with nothing_outside_touched():
        fit(Scripted([3, 4, 5]), root, 3, [checkpoint], resume=str(saved))
    assert checkpoint.dirpath == str(root / "checkpoints")
    assert contents(tmp_path / "outside") == before


def test_a_state_with_paths_as_they_were_written_before_is_taken_by_their_names(saved: Path) -> None:
    directory = str(saved.parent)

    def as_before(state: dict[str, Any]) -> None:
        state["best_k_models"] = [[f"{directory}/{name}", score] for name, score in state["best_k_models"]]
        for key in ("last_model_path", "newest_model_path", "newest_of_best"):
            state[key] = f"{directory}/{state[key]}"

    edit(saved, "doomed", as_before)
    checkpoint = saver(saved.parent.parent)
    fit(Scripted([0.5, 0.6]), saved.parent.parent, 3, [checkpoint], resume=str(saved))
    assert sorted(os.listdir(directory)) == ["epoch=0.ckpt", "epoch=2.ckpt", "last.ckpt"]


def test_a_run_that_was_moved_as_a_whole_finds_its_checkpoints_by_their_names(saved: Path, tmp_path: Path) -> None:
    root = tmp_path / "elsewhere" / "moved"
    shutil.copytree(saved.parent.parent, root)
    shutil.rmtree(saved.parent.parent)
    checkpoint = saver(root)
    fit(Scripted([0.5]), root, 3, [checkpoint], logger=CSVLogger(root), resume=str(root / "ckpt" / "last.ckpt"))
    assert sorted(os.listdir(root / "ckpt")) == ["epoch=0.ckpt", "epoch=2.ckpt", "last.ckpt"]
    assert checkpoint.best_model_path == str(root / "ckpt" / "epoch=2.ckpt")


# trackers

VERSIONS: dict[str, Any] = {
    "an absolute path": "{outside}/run",
    "a path above": "../../outside/run",
    "a path above, by a detour": "version_0/../../../outside/run",
    "a list": ["version_0"],
    "nothing": None,
    "an empty text": "",
    "true": True,
    "a number below zero": -1,
}


@pytest.mark.parametrize("version", VERSIONS)
def test_a_version_that_is_none_is_refused(version: str, saved: Path, tmp_path: Path) -> None:
    hostile = VERSIONS[version]
    if isinstance(hostile, str):
        hostile = hostile.format(outside=tmp_path / "outside")
    edit(saved, "columns", lambda state: state.update(version=hostile))
    before = contents(tmp_path / "outside")
    with nothing_outside_touched(), pytest.raises(CheckpointError, match=f"{EXPECTED} version="):
        resume(saved)
    assert contents(tmp_path / "outside") == before


@pytest.mark.parametrize("change", [{"rows": "1"}, {"columns": {}}, {"last_row": []}], ids=str)
def test_a_table_that_no_run_wrote_is_refused(change: dict[str, Any], saved: Path) -> None:
    edit(saved, "columns", lambda state: state.update(change))
    with pytest.raises(CheckpointError, match=f"{EXPECTED} {next(iter(change))}="):
        resume(saved)


def test_a_version_that_leads_elsewhere_is_not_continued(
    saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (saved.parent.parent / "drivetrain_logs" / "far").symlink_to(tmp_path / "outside" / "run")
    edit(saved, "columns", lambda state: state.update(version="far"))
    before = contents(tmp_path / "outside")
    resume(saved)
    assert contents(tmp_path / "outside") == before
    assert "so it is not continued" in caplog.text
