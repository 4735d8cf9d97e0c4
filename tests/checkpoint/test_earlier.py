"""What did not change since the checkpoint before is linked from it, and each of the two is whole without the other."""

from __future__ import annotations

import copy
import errno
import hashlib
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain import FSDP, Accelerator, CheckpointError
from drivetrain.checkpoint import load_run_state, remove_checkpoint, save_run_state
from drivetrain.checkpoint.manifest import read_manifest
from drivetrain.checkpoint.storage import LocalStorage, Storage
from tests.checkpoint.states import CountingStorage, alone, assert_same
from tests.pool import run_in_processes

WIDTH = 800  # 2.6 MB a matrix, 1.3 MB for each of two processes


class Adapted(nn.Module):
    """Frozen weights, trained ones, and data."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.head = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("samples", torch.randn(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.base(x))  # type: ignore[no-any-return]


class Run:
    """A training run that saves.

    Args:
        root: where to.
        block: whether saves return only once they are there.
    """

    def __init__(self, root: Path, block: bool = True) -> None:
        self.root, self.block = root, block
        self.model = Adapted()
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.shared: dict[str, Any] = {}

    def save(self, name: str, storage: Storage | None = None, optimizer: torch.optim.Optimizer | None = None) -> Path:
        self.model(torch.randn(4, WIDTH)).square().mean().backward()
        self.optimizer.step()
        shown = [optimizer or self.optimizer]
        save_run_state(
            self.root / name, self.state(), {}, alone(), block=self.block, optimizers=shown, storage=storage
        ).wait(60)
        return self.root / name

    def state(self) -> dict[str, Any]:
        state = self.optimizer.state_dict()["state"]
        return {
            "model": self.model.state_dict(),
            "states": {str(key): one for key, one in state.items()},
            **self.shared,
        }


@pytest.fixture(params=[True, False], ids=["at once", "in the background"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    return Run(tmp_path, request.param)


def inodes(directory: Path) -> dict[str, int]:
    """For each large tensor the file that it is in."""
    tensors = json.loads((directory / "tensors/index.json").read_bytes())["tensors"]
    return {
        key: (directory / chunk["file"]).stat().st_ino
        for key, one in tensors.items()
        for chunk in one["chunks"]
        if chunk["nbytes"] >= 1 << 20
    }


def shared_by(one: Path, other: Path) -> set[str]:
    first, second = inodes(one), inodes(other)
    return {key for key in first if first[key] == second.get(key)}


def assert_whole(directory: Path, state: Any) -> None:
    loaded, _ = load_run_state(directory, alone(), verify="hash")
    assert_same(loaded, state)


UNCHANGED = {"model/base.weight", "model/samples"}


class WrittenBytes(LocalStorage):
    """Counts what is written."""

    def __init__(self) -> None:
        self.count = 0

    def _write(self, descriptor: int, data: memoryview, path: str) -> int:
        count = super()._write(descriptor, data, path)
        self.count += count
        return count


def test_frozen_weights_and_data_are_linked_and_what_is_trained_is_written(run: Run) -> None:
    one = run.save("one")
    storage = WrittenBytes()
    two = run.save("two", storage)
    assert shared_by(one, two) == UNCHANGED
    assert 3 * 4 * WIDTH**2 < storage.count < 3.1 * 4 * WIDTH**2  # weights of the head and two moments
    assert_whole(two, run.state())


def test_each_is_whole_without_the_other(run: Run) -> None:
    one, two = run.save("one"), run.save("two")
    state = copy.deepcopy(run.state())
    remove_checkpoint(one)
    assert_whole(two, state)
    three = run.save("three")
    assert shared_by(two, three) == UNCHANGED
    remove_checkpoint(three)
    assert_whole(two, state)


def test_a_checkpoint_that_is_replaced_hands_its_files_on(run: Run) -> None:
    before = inodes(run.save("last"))
    after = inodes(run.save("last"))
    assert {key for key in before if before[key] == after[key]} == UNCHANGED
    assert_whole(run.root / "last", run.state())


def test_a_run_that_begins_again_links_from_what_it_finds(tmp_path: Path) -> None:
    first = Run(tmp_path)
    one = first.save("one")
    again = Run(tmp_path)
    again.model.load_state_dict(first.model.state_dict())
    assert shared_by(one, again.save("two")) == UNCHANGED


@pytest.mark.parametrize("at", [(0, 0), (1, 1), (WIDTH - 1, WIDTH - 1)], ids=["first", "inner", "last"])
def test_one_changed_value_has_its_file_written(at: tuple[int, int], run: Run) -> None:
    one = run.save("one")
    run.model.base.weight[at] += 1
    two = run.save("two")
    assert "model/base.weight" not in shared_by(one, two)
    assert_whole(two, run.state())


def test_averages_that_no_optimizer_knows_do_not_keep_the_rest_from_being_linked(run: Run) -> None:
    run.shared["average"] = {"weight": torch.zeros(WIDTH, WIDTH)}
    for name in ("one", "two", "three"):
        run.shared["average"]["weight"] += 1
        run.save(name)
    assert shared_by(run.root / "two", run.root / "three") == UNCHANGED
    assert_whole(run.root / "three", run.state())


@pytest.mark.parametrize("block", [True, False], ids=["at once", "in the background"])
def test_an_optimizer_that_shows_neither_its_state_nor_its_parameters_hinders_no_save(
    block: bool, tmp_path: Path
) -> None:
    class Bare(torch.optim.Optimizer):
        def __init__(self) -> None:
            pass

    run = Run(tmp_path, block)
    for name in ("one", "two", "three"):
        run.save(name, optimizer=Bare())
    assert shared_by(tmp_path / "two", tmp_path / "three") == UNCHANGED
    assert_whole(tmp_path / "three", run.state())


def test_weights_that_are_frozen_during_the_run_are_linked_from_then_on(run: Run) -> None:
    run.save("one")
    run.optimizer = torch.optim.AdamW(run.model.head.requires_grad_(False).parameters())
    run.model.base.requires_grad_(True)
    run.optimizer = torch.optim.AdamW(run.model.base.parameters())
    two, three = run.save("two"), run.save("three")
    assert shared_by(two, three) == {"model/head.weight", "model/samples"}


@pytest.mark.parametrize("reason", [errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP])
def test_where_nothing_can_be_linked_it_is_written_with_a_warning(
    reason: int, run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError(reason, os.strerror(reason))

    one = run.save("one")
    monkeypatch.setattr(os, "link", refuse)
    with caplog.at_level(logging.WARNING):
        two = run.save("two")
    assert shared_by(one, two) == set()
    assert os.strerror(reason) in caplog.text
    assert_whole(two, run.state())


def test_a_link_that_is_reported_as_failed_but_was_made_is_written_over(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = os.link

    def unheard(*args: Any, **kwargs: Any) -> None:
        link(*args, **kwargs)
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))

    one = run.save("one")
    monkeypatch.setattr(os, "link", unheard)
    two = run.save("two")
    assert shared_by(one, two) == set()
    assert_whole(two, run.state())


def test_what_is_removed_meanwhile_is_written(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    link = os.link

    def too_late(*args: Any, **kwargs: Any) -> None:
        if (run.root / "one").exists():
            remove_checkpoint(run.root / "one")
        link(*args, **kwargs)

    run.save("one")
    monkeypatch.setattr(os, "link", too_late)
    two = run.save("two")
    assert_whole(two, run.state())


def cut(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)


def edit(path: Path) -> None:
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(size // 2 + 5000)
        byte = file.read(1)[0]
        file.seek(size // 2 + 5000)
        file.write(bytes([byte ^ 1]))


def file_of(directory: Path, key: str) -> Path:
    tensors = json.loads((directory / "tensors/index.json").read_bytes())["tensors"]
    return directory / tensors[key]["chunks"][0]["file"]


DAMAGES: dict[str, tuple[Callable[[Path], Path], Callable[[Path], None]]] = {
    "a file is cut": (lambda one: file_of(one, "model/base.weight"), cut),
    "a file is edited": (lambda one: file_of(one, "model/base.weight"), edit),
    "a file is missing": (lambda one: file_of(one, "model/base.weight"), lambda path: path.unlink()),
    "the manifest is cut": (lambda one: one / "MANIFEST.json", cut),
    "the manifest is missing": (lambda one: one / "MANIFEST.json", lambda path: path.unlink()),
    "the index is edited": (lambda one: one / "tensors/index.json", cut),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_damaged_is_not_linked(damage: str, run: Run) -> None:
    one = run.save("one")
    which, do = DAMAGES[damage]
    path = which(one)
    do(path)
    files = {file.stat().st_ino: file for file in one.rglob("*") if file.is_file()}
    two = run.save("two")
    linked = [files[node] for node in {file.stat().st_ino for file in two.rglob("*")} & files.keys()]
    if damage == "a file is edited":  # the others are as good as before
        assert path not in linked
    else:
        assert linked == []
    assert_whole(two, run.state())


def test_a_save_that_fails_after_it_has_linked_leaves_the_one_before_as_it_was(run: Run) -> None:
    one = run.save("one")
    before = {path: (path.read_bytes(), path.stat().st_ino) for path in sorted(one.rglob("*")) if path.is_file()}
    counted = CountingStorage(only=("fsync",))
    run.save("two", counted)
    remove_checkpoint(run.root / "two")
    with pytest.raises(CheckpointError, match="No space left"):
        run.save("three", CountingStorage(fail_at=len(counted.calls) - 2, error=errno.ENOSPC, only=("fsync",)))
    assert {path: (path.read_bytes(), path.stat().st_ino) for path in before} == before
    assert sorted(path.name for path in run.root.iterdir()) == ["one"]
    assert all(path.stat().st_nlink == 1 for path in before)


def test_a_file_that_was_hashed_first_and_has_changed_is_listed_with_what_it_holds(run: Run) -> None:
    run.save("one")
    run.model.base.weight[1, 1] += 1  # where no probe is taken
    two = run.save("two")
    listed = read_manifest(LocalStorage(), str(two)).files
    for name, digest in listed.items():
        assert hashlib.sha256((two / name).read_bytes()).hexdigest() == digest.sha256


def test_little_tensors_are_not_linked(tmp_path: Path) -> None:
    for name in ("one", "two"):
        save_run_state(tmp_path / name, {"data": torch.ones(1000)}, {}, alone())
    files = [{path.stat().st_ino for path in (tmp_path / name).rglob("*")} for name in ("one", "two")]
    assert not files[0] & files[1]


def save_sharded(root: str, names: list[str]) -> None:
    torch.manual_seed(0)
    accelerator = Accelerator(strategy=FSDP())
    model = Adapted()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    before = Path(root, "two")
    if before.exists():
        accelerator.load_state(before)
    for name in names:
        accelerator.backward(model(torch.randn(4, WIDTH)).square().mean())
        optimizer.step()
        accelerator.save_state(f"{root}/{name}", block=False)
        accelerator.save_queue.finish()


def test_each_process_links_its_shards_also_after_the_run_was_resumed(tmp_path: Path) -> None:
    run_in_processes(save_sharded, 2, args=(str(tmp_path), ["one", "two"]))
    run_in_processes(save_sharded, 2, args=(str(tmp_path), ["three"]))
    for earlier, later in (("one", "two"), ("two", "three")):
        files = [
            {path.stat().st_ino: path.name for path in (tmp_path / name / "tensors").iterdir()}
            for name in (earlier, later)
        ]
        linked = {files[0][node] for node in files[0].keys() & files[1].keys()}
        assert {name.split("_")[1] for name in linked} == {"0", "1"}
    remove_checkpoint(tmp_path / "one")
    remove_checkpoint(tmp_path / "two")
    shared, _ = load_run_state(tmp_path / "three")
    assert shared["engine"]["models"]
