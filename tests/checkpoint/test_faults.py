"""A save that fails or is killed, wherever it is, leaves the last good checkpoint as it was."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from drivetrain import CheckpointError, PartialState
from drivetrain.checkpoint import clean_stale, newest_checkpoint, save_run_state
from tests.checkpoint.states import CountingStorage, alone, leftovers, own_state, run_state, seed_of, write
from tests.pool import ProcessesFailed, run_in_processes


def calls_of_a_save(root: Path) -> list[str]:
    """What can fail in replacing a checkpoint, in order."""
    write(root / "counted", 1)
    storage = CountingStorage()
    write(root / "counted", 2, storage=storage)
    return storage.calls


def test_every_kind_of_call_is_met(tmp_path: Path) -> None:
    calls = calls_of_a_save(tmp_path)
    assert {kind: calls.count(kind) for kind in ("mkdir", "open", "fsync", "rename")} == {
        "mkdir": 2,  # the checkpoint and tensors/
        "open": 6,
        "fsync": 6 + 3,  # the files, the two directories, and the one that they are in
        "rename": 2,  # aside, and in
    }
    assert calls.count("write") > 6


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO], ids=["ENOSPC", "EIO"])
@pytest.mark.parametrize("replaces", [True, False], ids=["replacing", "new"])
def test_a_fault_at_any_call_leaves_what_was_there(replaces: bool, error: int, tmp_path: Path) -> None:
    count = len(calls_of_a_save(tmp_path / "count"))
    count -= 0 if replaces else 1
    root = tmp_path / "run"
    write(root / "good", 1)
    target = root / ("good" if replaces else "next")
    for number in range(1, count + 1):
        with pytest.raises(CheckpointError, match=f"errno {error}"):
            write(target, 2, storage=CountingStorage(number, error))
        assert leftovers(root) == [], f"call {number}"
        assert os.listdir(root) == ["good"], f"call {number}"
        assert seed_of(root / "good") == 1, f"call {number}"
    storage = CountingStorage(count + 1, error)
    write(target, 2, storage=storage)
    assert len(storage.calls) == count
    assert seed_of(target) == 2


def fail_in_world(root: str, rank: int, count: int) -> list[str]:
    """Fail at each call of one rank in turn; report what all ranks see."""
    state = PartialState()
    save_run_state(f"{root}/good", run_state(1), own_state(), state)
    messages = []
    for number in range(1, count + 1):
        storage = CountingStorage(number if state.process_index == rank else 0, errno.ENOSPC)
        try:
            save_run_state(f"{root}/good", run_state(2), own_state(), state, storage=storage)
            messages.append("saved")
        except CheckpointError as error:
            messages.append(str(error))
        state.wait_for_everyone()
        assert leftovers(root) == []
        state.wait_for_everyone()
    return messages


@pytest.mark.crash
@pytest.mark.parametrize(("rank", "count"), [(0, 12), (1, 8)])
def test_a_fault_on_one_process_is_raised_on_all(rank: int, count: int, tmp_path: Path) -> None:
    results = run_in_processes(fail_in_world, 2, args=(str(tmp_path), rank, count))
    assert results[0] == results[1]
    for message in results[0]:
        assert f"rank {rank}: {tmp_path}" in message
        assert "No space left on device" in message


def killed_while_saving(root: str, number: int) -> None:
    write(f"{root}/good", 2, storage=CountingStorage(number))


@pytest.mark.crash
def test_a_kill_at_any_call_leaves_a_checkpoint_that_is_found(tmp_path: Path) -> None:
    calls = calls_of_a_save(tmp_path / "count")
    renames = [number for number, kind in enumerate(calls, 1) if kind == "rename"]
    root = tmp_path / "run"
    numbers = sorted({1, 2, 3, 5, 9, len(calls) // 2, *renames, len(calls) - 3, len(calls)})
    for number in numbers:
        write(root / "good", 1)
        with pytest.raises(ProcessesFailed):
            run_in_processes(killed_while_saving, 1, args=(str(root), number))
        clean_stale(str(root))
        found = newest_checkpoint(root)
        assert found == str(root / "good"), f"killed at call {number}, {calls[number - 1]}"
        assert seed_of(found) == (2 if number > renames[-1] else 1), f"killed at call {number}"
        for name in leftovers(root):
            # It did not come to say whose it is, so it is kept for a while: there is nothing in it yet.
            assert number <= calls.index("fsync") + 1
            assert not any(path.stat().st_size > 100 for path in (root / name).rglob("*.*"))
            os.utime(root / name, (0, 0))
        clean_stale(str(root))
        assert leftovers(root) == [], f"killed at call {number}"


def test_a_directory_that_may_not_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match=r"file.*\(errno"):
        write(tmp_path / "file" / "one")
    if os.geteuid() != 0:  # root may write anywhere
        (tmp_path / "locked").mkdir(mode=0o500)
        with pytest.raises(CheckpointError, match=r"locked.*Permission denied"):
            write(tmp_path / "locked" / "one")


def test_a_read_only_file_system_is_named_and_nothing_stays(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"{tmp_path}.*Read-only file system"):
        write(tmp_path / "one", storage=CountingStorage(1, errno.EROFS))
    assert list(tmp_path.iterdir()) == []


def test_a_saved_state_is_there_under_its_name_alone(tmp_path: Path) -> None:
    for seed in range(3):
        write(tmp_path / "last", seed)
    assert os.listdir(tmp_path) == ["last"]
    assert seed_of(tmp_path / "last") == 2
    assert alone().num_processes == 1
