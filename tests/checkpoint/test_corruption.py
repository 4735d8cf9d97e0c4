"""A checkpoint that is not what was written is refused, and the file that is wrong is named."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drivetrain import CheckpointError, PartialState
from drivetrain.checkpoint import Checkpoint, load_run_state, save_run_state
from drivetrain.checkpoint.manifest import VERSION, Manifest
from drivetrain.checkpoint.storage import FileDigest, LocalStorage
from tests.checkpoint.states import alone, own_state, run_state, seed_of, write
from tests.pool import run_in_processes

FILES = [
    "MANIFEST.json",
    "WRITER.json",
    "state.json",
    "process_0.json",
    "process_1.json",
    "tensors/index.json",
    "tensors/rank_0_0.safetensors",
    "tensors/rank_1_0.safetensors",
]


def write_in_world(directory: str) -> None:
    state = PartialState()
    save_run_state(directory, run_state(), own_state(state.process_index), state)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two processes, which both wrote tensors."""
    directory = tmp_path_factory.mktemp("written") / "one"
    run_in_processes(write_in_world, 2, args=(str(directory),))
    return directory


@pytest.fixture
def checkpoint(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "one"))


def flip(position: Callable[[int], int], bit: int) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[position(len(content))] ^= 1 << bit
        path.write_bytes(content)

    return damage


def truncate(keep: Callable[[int], int]) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, keep(path.stat().st_size))


DAMAGES: dict[str, Callable[[Path], None]] = {
    "deleted": Path.unlink,
    "emptied": truncate(lambda size: 0),
    "cut in the middle": truncate(lambda size: size // 2),
    "cut by one byte": truncate(lambda size: size - 1),
    "grown": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "first bit": flip(lambda size: 0, 0),
    "bit in the middle": flip(lambda size: size // 2, 3),
    "last bit": flip(lambda size: size - 1, 7),
    "a bit of each byte's case": flip(lambda size: size // 3, 5),
    "zeroed": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "a directory": lambda path: (path.unlink(), path.mkdir())[0],
}


def test_the_table_has_every_file(written: Path) -> None:
    found = sorted(str(path.relative_to(written)) for path in written.rglob("*") if path.is_file())
    assert found == sorted(FILES)
    assert load_run_state(written)[0]["global_step"] == 0


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=list(DAMAGES))
@pytest.mark.parametrize("name", FILES)
def test_every_damage_to_every_file_is_found_and_named(
    name: str, damage: Callable[[Path], None], checkpoint: Path
) -> None:
    damage(checkpoint / name)
    with pytest.raises(CheckpointError) as raised:
        load_run_state(checkpoint)
    assert Path(name).name in str(raised.value)
    with pytest.raises(CheckpointError):
        Checkpoint(checkpoint).verify()


@pytest.mark.parametrize("position", range(0, 1000, 9))
def test_no_bit_of_the_manifest_can_change_unseen(position: int, checkpoint: Path) -> None:
    path = checkpoint / "MANIFEST.json"
    flip(lambda size: position % size, position % 8)(path)
    with pytest.raises(CheckpointError, match=r"MANIFEST\.json"):
        Checkpoint(checkpoint)


def forge(checkpoint: Path, change: Callable[[dict[str, FileDigest]], Any]) -> None:
    """Write another manifest, whose checksum is right."""
    path = checkpoint / "MANIFEST.json"
    manifest = Manifest.from_bytes(path.read_bytes(), str(path))
    change(manifest.files)
    path.write_bytes(manifest.to_bytes())


NAME = "tensors/rank_0_0.safetensors"
LIES: dict[str, Callable[[dict[str, FileDigest]], Any]] = {
    "size": lambda files: files.update({NAME: FileDigest(files[NAME].size + 1, files[NAME].sha256)}),
    "hash": lambda files: files.update({NAME: FileDigest(files[NAME].size, "0" * 64)}),
    "type": lambda files: files.update({NAME: FileDigest(files[NAME].size, 7)}),  # type: ignore[arg-type]
    "a file left out": lambda files: files.pop(NAME),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=list(LIES))
def test_a_manifest_that_lies_is_found_out(lie: Callable[[dict[str, FileDigest]], Any], checkpoint: Path) -> None:
    forge(checkpoint, lie)
    with pytest.raises(CheckpointError, match=r"rank_0_0\.safetensors"):
        load_run_state(checkpoint)


def test_a_manifest_that_lists_a_file_that_is_not_there_is_found_out(checkpoint: Path) -> None:
    forge(checkpoint, lambda files: files.update({"tensors/rank_9_0.safetensors": FileDigest(3, "0" * 64)}))
    with pytest.raises(CheckpointError, match=r"rank_9_0\.safetensors is missing"):
        load_run_state(checkpoint)


@pytest.mark.parametrize("name", ["notes.txt", "tensors/rank_2_0.safetensors", "deep/down/file"])
def test_a_file_that_does_not_belong_is_named(name: str, checkpoint: Path) -> None:
    (checkpoint / name).parent.mkdir(parents=True, exist_ok=True)
    (checkpoint / name).write_bytes(b"x")
    with pytest.raises(CheckpointError, match=rf"{Path(name).name} does not belong to the checkpoint"):
        load_run_state(checkpoint)


def test_an_index_that_points_outside_its_file_is_refused_even_if_its_hash_is_right(checkpoint: Path) -> None:
    path = checkpoint / "tensors/index.json"
    index = json.loads(path.read_bytes())
    for one in index["tensors"].values():
        one["chunks"][0]["start"] += 10**6
    put(checkpoint, "tensors/index.json", json.dumps(index).encode())
    with pytest.raises(CheckpointError, match=r"tensors/index\.json is damaged"):
        load_run_state(checkpoint)


def test_a_newer_version_is_refused_by_its_number(checkpoint: Path) -> None:
    path = checkpoint / "MANIFEST.json"
    manifest = Manifest.from_bytes(path.read_bytes(), str(path))
    newer = Manifest(manifest.files, 2, version=VERSION + 1)
    path.write_bytes(newer.to_bytes())
    with pytest.raises(CheckpointError, match=rf"version {VERSION + 1}, but .* reads versions up to {VERSION}"):
        load_run_state(checkpoint)


def put(checkpoint: Path, name: str, content: bytes) -> None:
    """Replace a file, and its line in the manifest."""
    (checkpoint / name).write_bytes(content)
    digest = FileDigest(len(content), hashlib.sha256(content).hexdigest())
    forge(checkpoint, lambda files: files.update({name: digest}))


class Bomb:
    """Creates a file where it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("protocol", [0, 4])
@pytest.mark.parametrize("name", FILES)
def test_a_pickle_in_the_place_of_a_file_is_never_executed(
    name: str, protocol: int, checkpoint: Path, tmp_path: Path
) -> None:
    bomb = pickle.dumps(Bomb(str(tmp_path / "exploded")), protocol)
    (tmp_path / "probe").write_bytes(bomb)
    if name == "MANIFEST.json":
        (checkpoint / name).write_bytes(bomb)
    else:
        put(checkpoint, name, bomb)  # as an attacker would, who can count too
    if name not in ("process_0.json", "process_1.json", "WRITER.json"):  # which nobody reads here
        with pytest.raises(CheckpointError):
            load_run_state(checkpoint)
    else:
        load_run_state(checkpoint)
    assert not (tmp_path / "exploded").exists()
    pickle.loads((tmp_path / "probe").read_bytes())
    assert (tmp_path / "exploded").exists()  # so it would have


def test_what_is_no_checkpoint_is_called_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such directory"):
        load_run_state(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"MANIFEST\.json is missing"):
        load_run_state(tmp_path / "empty")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file"):
        load_run_state(tmp_path / "file")


def test_with_sizes_only_a_cut_file_is_found_and_a_flipped_bit_is_not(checkpoint: Path) -> None:
    flip(lambda size: size - 1, 0)(checkpoint / NAME)
    load_run_state(checkpoint, verify="size")
    truncate(lambda size: size - 1)(checkpoint / NAME)
    with pytest.raises(CheckpointError, match="rank_0_0"):
        load_run_state(checkpoint, verify="size")


class UnreadableStorage(LocalStorage):
    """A disk that cannot read one file any more."""

    def open(self, path: str, once: bool = False) -> Any:
        if path.endswith("rank_0_0.safetensors"):
            raise OSError(errno.EIO, "Input/output error", path)
        return super().open(path)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    write(tmp_path / "one", 1)
    with pytest.raises(CheckpointError, match=r"rank_0_0\.safetensors cannot be read: .*Input/output"):
        load_run_state(tmp_path / "one", alone(), storage=UnreadableStorage())


def load_damaged(directory: str) -> str:
    state = PartialState()
    storage = UnreadableStorage() if state.process_index == 1 else LocalStorage()
    try:
        load_run_state(directory, state, storage=storage)
    except CheckpointError as error:
        return str(error)
    return "loaded"


def test_what_one_process_cannot_read_is_raised_on_all(tmp_path: Path) -> None:
    write(tmp_path / "one", 2)
    assert seed_of(tmp_path / "one") == 2
    messages = run_in_processes(load_damaged, 2, args=(str(tmp_path / "one"),))
    assert all("rank 1: " in message and "rank_0_0.safetensors cannot be read" in message for message in messages)
