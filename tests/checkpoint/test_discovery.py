"""Which checkpoints there are, and what dead runs left."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from drivetrain import PartialState, newest_checkpoint
from drivetrain.checkpoint import (
    Checkpoint,
    clean_stale,
    list_checkpoints,
    load_run_state,
    remove_checkpoint,
    save_run_state,
)
from drivetrain.checkpoint.storage import OTHER_HOST_PATIENCE, UNRECORDED_PATIENCE, writer_of, writer_token
from tests.checkpoint.states import alone, leftovers, own_state, reseal_manifest, run_state, seed_of, write
from tests.pool import run_in_processes


def test_the_newest_is_the_one_of_the_highest_step(tmp_path: Path) -> None:
    for seed in (3, 10, 7):
        write(tmp_path / f"step_{seed}", seed)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "out.txt").write_text("not a checkpoint")
    assert [one.step for one in list_checkpoints(tmp_path)] == [10, 7, 3]
    assert newest_checkpoint(tmp_path) == str(tmp_path / "step_10")


def test_of_one_step_the_later_one_is_newer(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        write(tmp_path / name, 1)
    assert newest_checkpoint(tmp_path) == str(tmp_path / "c")


def test_where_there_is_none_there_is_none(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path) is None
    assert newest_checkpoint(tmp_path / "not" / "there") is None


def test_bad_ones_are_passed_over_with_a_warning_each(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for seed in range(1, 5):
        write(tmp_path / f"step_{seed}", seed)
    (tmp_path / "step_4" / "MANIFEST.json").unlink()
    flipped = tmp_path / "step_3" / "tensors" / "rank_0_0.safetensors"
    flipped.write_bytes(flipped.read_bytes()[:-1] + b"\xee")
    (tmp_path / "step_2" / "state.json").unlink()
    with caplog.at_level(logging.WARNING):
        assert newest_checkpoint(tmp_path) == str(tmp_path / "step_1")
    for number, file in ((4, "MANIFEST.json"), (3, "rank_0_0.safetensors"), (2, "state.json")):
        [message] = [text for text in caplog.messages if f"step_{number}" in text]
        assert file in message
    assert newest_checkpoint(tmp_path, verify=False) == str(tmp_path / "step_3")


def look_together(root: str) -> str | None:
    return newest_checkpoint(root, state=PartialState())


def test_all_processes_get_the_main_ones_answer(tmp_path: Path) -> None:
    write(tmp_path / "one", 1)
    assert run_in_processes(look_together, 2, args=(str(tmp_path),)) == [str(tmp_path / "one")] * 2


def leave(root: Path, name: str, writer: dict[str, object] | None, age: float = 0.0) -> Path:
    """A half-written checkpoint."""
    place = root / name
    (place / "tensors").mkdir(parents=True)
    (place / "state.json").write_text("{}")
    if writer is not None:
        (place / "WRITER.json").write_text(json.dumps(writer))
    for path in (place / "WRITER.json", place):
        if path.exists():
            os.utime(path, (time.time() - age, time.time() - age))
    return place


def this_process() -> dict[str, object]:
    return writer_of(os.getpid())


def dead_writer() -> dict[str, object]:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return {**writer_of(os.getpid()), "pid": child.pid}


LIVE, DAY = this_process, OTHER_HOST_PATIENCE


@pytest.mark.parametrize(
    ("writer", "age", "stays"),
    [
        (this_process, 10 * DAY, True),
        (dead_writer, 0, False),
        (lambda: {**writer_of(os.getpid()), "started": 1.0}, 0, False),  # its number was given to another process
        (lambda: {**writer_of(os.getpid()), "host": "elsewhere"}, DAY - 60, True),
        (lambda: {**writer_of(os.getpid()), "host": "elsewhere"}, DAY + 60, False),
        (lambda: None, UNRECORDED_PATIENCE - 60, True),
        (lambda: None, UNRECORDED_PATIENCE + 60, False),
    ],
    ids=["live", "dead", "another process", "other host", "other host, long ago", "just begun", "never begun"],
)
def test_what_dead_runs_left_is_removed_and_what_live_ones_write_is_not(
    writer: object, age: float, stays: bool, tmp_path: Path
) -> None:
    assert callable(writer)
    leave(tmp_path, ".step_1.0123456789ab.writing", writer(), age)
    removed = clean_stale(str(tmp_path))
    assert bool(leftovers(tmp_path)) is stays
    assert bool(removed) is not stays


def test_a_clock_that_is_set_does_not_make_a_live_writer_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import psutil

    live = leave(tmp_path, ".step_1.0123456789ab.writing", writer_of(os.getpid()))
    started, now = psutil.Process().create_time(), time.time()
    for step in (3600.0, -3600.0, 10 * DAY):
        monkeypatch.setattr(psutil.Process, "create_time", lambda self, step=step: started + step)
        monkeypatch.setattr(time, "time", lambda step=step: now + step)
        assert clean_stale(str(tmp_path)) == []
        assert leftovers(tmp_path) == [live.name]


def file_of_a_dead_writer(root: Path, name: str, what: str) -> Path:
    """Leave a file beside `name` that a process which has ended was writing."""
    code = "from drivetrain.checkpoint.storage import writer_token; print(writer_token())"
    token = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    path = root / f".{name}.{token}.{what}"
    path.write_text("left")
    return path


def test_files_that_dead_runs_left_are_removed_or_given_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "last.ckpt").write_text("new")
    left = [file_of_a_dead_writer(tmp_path, "last.ckpt", what) for what in ("writing", "replaced", "link")]
    lost = file_of_a_dead_writer(tmp_path, "best.ckpt", "replaced")
    live = tmp_path / f".last.ckpt.{writer_token()}.writing"
    other = tmp_path / ".last.ckpt.0123456789ab.writing"  # of an earlier version, which does not say whose it is
    for path in (live, other):
        path.write_text("half")
    assert sorted(clean_stale(str(tmp_path))) == sorted(map(str, [*left, lost]))
    assert sorted(os.listdir(tmp_path)) == sorted(["last.ckpt", "best.ckpt", live.name, other.name])
    assert (tmp_path / "best.ckpt").read_text() == "left"
    assert "The previous checkpoint is restored" in caplog.text
    os.utime(other, (0, 0))
    clean_stale(str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == sorted(["last.ckpt", "best.ckpt", live.name])


def test_a_zombie_is_dead(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    import psutil

    writer = {**writer_of(os.getpid()), "pid": child.pid, "started": psutil.Process(child.pid).create_time()}
    leave(tmp_path, ".step_1.0123456789ab.writing", writer)
    assert clean_stale(str(tmp_path)) == []
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and nobody has asked how
    assert len(clean_stale(str(tmp_path))) == 1
    child.wait()


def test_the_next_save_cleans_up(tmp_path: Path) -> None:
    leave(tmp_path, ".step_1.0123456789ab.writing", dead_writer())
    live = leave(tmp_path, ".step_2.0123456789ac.writing", writer_of(os.getpid()))
    write(tmp_path / "step_3", 3)
    assert leftovers(tmp_path) == [live.name]


def test_a_run_that_died_between_the_two_renames_leaves_the_old_checkpoint_to_be_found(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path / "last", 1)
    os.rename(tmp_path / "last", tmp_path / ".last.0123456789ab.replaced")
    leave(tmp_path, ".last.0123456789ab.writing", dead_writer())
    assert load_run_state(tmp_path / "last", alone())[0]["global_step"] == 1  # by its name, before anyone looked
    with caplog.at_level(logging.WARNING):
        assert newest_checkpoint(tmp_path) == str(tmp_path / "last")
    assert "The previous checkpoint is restored" in caplog.text
    assert seed_of(tmp_path / "last") == 1
    assert leftovers(tmp_path) == []


def test_a_live_run_between_the_two_renames_is_left_alone(tmp_path: Path) -> None:
    write(tmp_path / "last", 1)
    os.rename(tmp_path / "last", tmp_path / ".last.0123456789ab.replaced")
    leave(tmp_path, ".last.0123456789ab.writing", writer_of(os.getpid()))
    before = leftovers(tmp_path)
    assert clean_stale(str(tmp_path)) == []
    assert leftovers(tmp_path) == before


def test_a_replaced_one_that_was_not_removed_is_removed(tmp_path: Path) -> None:
    write(tmp_path / "last", 1)
    shutil.copytree(tmp_path / "last", tmp_path / ".last.0123456789ab.replaced")
    (tmp_path / "last" / "WRITER.json").write_text(json.dumps(dead_writer()))
    clean_stale(str(tmp_path))
    assert os.listdir(tmp_path) == ["last"]


def test_other_hidden_things_are_not_touched(tmp_path: Path) -> None:
    for name in (".git", ".step_1.mine.writing.bak", ".writing"):
        (tmp_path / name).mkdir()
    assert clean_stale(str(tmp_path)) == []
    assert len(leftovers(tmp_path)) == 3


def test_a_checkpoint_is_removed_and_its_absence_is_no_error(tmp_path: Path) -> None:
    write(tmp_path / "one", 1)
    (tmp_path / "link").symlink_to("one")
    remove_checkpoint(tmp_path / "link")
    assert seed_of(tmp_path / "one") == 1
    remove_checkpoint(tmp_path / "one")
    remove_checkpoint(tmp_path / "one")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("shape", ["as the Trainer writes it", "as a driver's entry"])
def test_one_that_was_saved_after_a_loss_that_was_not_finite_is_the_last_choice(
    shape: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mark = {"loss_is_finite": False}
    for step in (1, 2):
        write(tmp_path / f"step={step}", step)
    marked = {**run_state(3), **(mark if shape.startswith("as the") else {"driver": mark})}
    save_run_state(tmp_path / "step=3", marked, own_state(), alone(), step=3)
    assert [one.finite_loss for one in list_checkpoints(tmp_path)] == [False, True, True]
    assert newest_checkpoint(tmp_path) == str(tmp_path / "step=2")
    assert "is skipped" in caplog.text
    assert "non-finite" in caplog.text
    for step in (1, 2):
        remove_checkpoint(tmp_path / f"step={step}")
    assert newest_checkpoint(tmp_path) == str(tmp_path / "step=3")


def test_a_manifest_of_before_the_mark_counts_as_unmarked(tmp_path: Path) -> None:
    write(tmp_path / "one", 1)
    reseal_manifest(tmp_path / "one", lambda manifest: manifest.pop("finite_loss"))
    assert Checkpoint(tmp_path / "one").manifest.finite_loss
