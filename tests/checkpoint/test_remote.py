"""Checkpoints on file systems that fsspec knows."""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from drivetrain import CheckpointError, PartialState
from drivetrain.checkpoint import (
    consolidate,
    list_checkpoints,
    load_run_state,
    newest_checkpoint,
    remove_checkpoint,
    save_run_state,
)
from drivetrain.checkpoint.storage import FsspecStorage, LocalStorage, storage_of
from tests.checkpoint.states import alone, assert_same, own_state, run_state, seed_of, write
from tests.pool import run_in_processes


@pytest.fixture
def memory() -> Iterator[Any]:
    system = fsspec.filesystem("memory")
    system.store.clear()
    yield system
    system.store.clear()


@pytest.mark.parametrize(
    ("path", "kind", "as_stored"),
    [
        ("memory://run/one", FsspecStorage, "memory://run/one"),
        (Path("memory://run/one"), FsspecStorage, "memory://run/one"),  # a Path has one slash of two
        ("file:///run/one", LocalStorage, "/run/one"),
        ("/run/one/", LocalStorage, "/run/one"),
        ("~root/one", LocalStorage, str(Path("~root").expanduser() / "one")),
    ],
    ids=str,
)
def test_a_path_says_where_it_is(path: str | Path, kind: type, as_stored: str) -> None:
    storage, found = storage_of(path)
    assert (type(storage), found) == (kind, as_stored)


def test_an_unknown_protocol_is_named() -> None:
    with pytest.raises(CheckpointError, match="nowhere://"):
        load_run_state("nowhere://run/one")


def test_what_is_saved_is_loaded(memory: Any) -> None:
    write("memory://run/one", 3)
    assert seed_of("memory://run/one") == 3
    into = {"state_dict": run_state(0)["state_dict"]}
    load_run_state("memory://run/one", into=into)
    assert_same(into["state_dict"], run_state(3)["state_dict"])


def test_a_file_url_is_a_local_directory(tmp_path: Path) -> None:
    write(f"file://{tmp_path}/one", 3)
    assert seed_of(tmp_path / "one") == 3


def test_without_a_manifest_it_is_incomplete(memory: Any, caplog: pytest.LogCaptureFixture) -> None:
    for seed in (1, 2):
        write(f"memory://run/step_{seed}", seed)
    memory.rm("/run/step_2/MANIFEST.json")
    with pytest.raises(CheckpointError, match=r"MANIFEST\.json is missing"):
        load_run_state("memory://run/step_2")
    with caplog.at_level(logging.WARNING):
        assert newest_checkpoint("memory://run") == "memory://run/step_1"
    assert "step_2" in caplog.text


def test_a_damaged_file_is_named(memory: Any) -> None:
    write("memory://run/one", 1)
    [path] = [path for path in memory.find("/run/one") if path.endswith("rank_0_0.safetensors")]
    content = bytearray(memory.cat_file(path))
    content[-1] ^= 1
    memory.pipe_file(path, bytes(content))
    with pytest.raises(CheckpointError, match=r"rank_0_0\.safetensors is damaged"):
        load_run_state("memory://run/one")


def test_replacing_switches_from_the_old_to_the_new_by_one_file(memory: Any) -> None:
    write("memory://run/last", 1)
    before = set(memory.find("/run/last"))
    write("memory://run/last", 2)
    assert seed_of("memory://run/last") == 2
    after = set(memory.find("/run/last"))
    assert before & after == {"/run/last/MANIFEST.json"}
    assert len(after) == len(before)


class BrokenStorage(FsspecStorage):
    """Fails in writing one of its files."""

    def __init__(self, url: str, fail_at: int) -> None:
        super().__init__(url)
        self.left = fail_at

    def write(self, path: str, parts: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            raise OSError(errno.EIO, "the network is down", path)
        return super().write(path, parts)

    def publish(self, place: str, directory: str, token: str, manifest: bytes) -> None:
        self.left -= 1
        if self.left == 0:
            raise OSError(errno.EIO, "the network is down", directory)
        super().publish(place, directory, token, manifest)


@pytest.mark.parametrize("number", range(1, 7))
def test_a_fault_leaves_what_was_there(number: int, memory: Any) -> None:
    write("memory://run/last", 1)
    before = set(memory.find("/run"))
    with pytest.raises(CheckpointError, match="the network is down"):
        write("memory://run/last", 2, storage=BrokenStorage("memory://run", number))
    assert set(memory.find("/run")) == before
    assert seed_of("memory://run/last") == 1
    with pytest.raises(CheckpointError, match="the network is down"):
        write("memory://run/new", 2, storage=BrokenStorage("memory://run", number))
    assert [one.path for one in list_checkpoints("memory://run")] == ["memory://run/last"]


def test_a_write_that_was_broken_off_does_not_make_the_old_one_bad(memory: Any) -> None:
    write("memory://run/last", 1)
    memory.pipe_file("/run/last/data-0123456789ab/state.json", b"{}")
    assert seed_of("memory://run/last") == 1
    memory.pipe_file("/run/last/other", b"{}")
    with pytest.raises(CheckpointError, match="other does not belong"):
        load_run_state("memory://run/last")


def test_they_are_listed_and_removed(memory: Any) -> None:
    for seed in (1, 3, 2):
        write(f"memory://run/step_{seed}", seed)
    assert [one.step for one in list_checkpoints("memory://run")] == [3, 2, 1]
    remove_checkpoint("memory://run/step_3")
    remove_checkpoint("memory://run/step_3")
    assert newest_checkpoint("memory://run") == "memory://run/step_2"
    assert newest_checkpoint("memory://nothing") is None


def test_the_weights_are_exported_from_there(memory: Any, tmp_path: Path) -> None:
    import safetensors.torch

    write("memory://run/one", 4)
    consolidate("memory://run/one", tmp_path)
    assert_same(safetensors.torch.load_file(tmp_path / "model.safetensors")["layer.bias"], bias(4))


def bias(seed: int) -> Any:
    return run_state(seed)["state_dict"]["layer.bias"]


def save_remotely(url: str) -> None:
    state = PartialState()
    storage = FsspecStorage(url)
    save_run_state(url, run_state(6), own_state(state.process_index), state, block=False, storage=storage).wait(60)


def test_two_processes_write_one(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/one"
    run_in_processes(save_remotely, 2, args=(url,))
    assert [entry.name for entry in tmp_path.iterdir()] == ["one"]
    shared, _ = load_run_state(tmp_path / "one")  # copied to a disk, it is read like any other
    assert_same(shared, run_state(6))
    assert alone().num_processes == 1
