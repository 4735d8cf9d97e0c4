"""Checkpoints that an earlier version wrote go on where they stood."""

from __future__ import annotations

import tarfile
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from drivetrain.checkpoint import Checkpoint, consolidate, load_run_state, open_weights, save_run_state
from tests.checkpoint.old_checkpoints import SAVED_AT, STEPS, Tiny, network, train, train_raw
from tests.checkpoint.states import alone, assert_same
from tests.pool import run_in_processes


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """The earlier version's checkpoints, elsewhere than they were written."""
    with tarfile.open(Path(__file__).with_name("old_checkpoints.tar.xz")) as file:
        file.extractall(tmp_path / "old", filter="data")
    return tmp_path / "old"


def assert_ends_as(expected: Path, weights: dict[str, Tensor]) -> None:
    """Compare with the weights of the earlier version's run, which was not interrupted."""
    torch.testing.assert_close(weights, load_file(expected), rtol=0, atol=5e-6)


def sorted_by_name(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: weights[name] for name in sorted(weights)}


@pytest.mark.cpu("the dropout of the run that wrote them drew from the CPU's generator")
def test_a_trainers_run_goes_on_in_the_middle_of_its_epoch(old: Path, tmp_path: Path) -> None:
    weights, seen = train(str(tmp_path), resume=str(old / "trainer"))
    assert_ends_as(old / "trainer.safetensors", weights)
    assert seen == STEPS  # the callback has its state


@pytest.mark.cpu("the dropout of the run that wrote them drew from the CPU's generator")
def test_an_accelerators_loop_goes_on(old: Path) -> None:
    assert_ends_as(old / "accelerator.safetensors", train_raw(resume=str(old / "accelerator")))


def resume_sharded(root: str, path: str) -> tuple[dict[str, Tensor], int]:
    return train(root, resume=path, strategy="fsdp")


@pytest.mark.sharded
@pytest.mark.cpu("the dropout of the run that wrote them drew from the CPU's generator")
def test_a_sharded_run_of_two_processes_goes_on(old: Path, tmp_path: Path) -> None:
    weights, seen = run_in_processes(resume_sharded, 2, args=(str(tmp_path), str(old / "fsdp")))[0]
    assert_ends_as(old / "fsdp.safetensors", weights)
    assert seen == STEPS


def test_the_weights_alone_are_those_of_the_saved_step(old: Path, tmp_path: Path) -> None:
    task = Tiny.load_from_checkpoint(old / "weights_only")
    whole, _ = load_run_state(old / "trainer")
    assert_same(dict(task.state_dict()), whole["engine"]["models"][0])
    exported = sorted_by_name(open_weights(old / "exported"))
    assert_same(exported, sorted_by_name(network().state_dict()))


@pytest.mark.parametrize("name", ["trainer", "accelerator", "fsdp", "weights_only"])
def test_an_old_checkpoint_is_whole_and_keeps_its_state_when_it_is_written_again(
    name: str, old: Path, tmp_path: Path
) -> None:
    before = Checkpoint(old / name)
    before.verify()
    assert before.manifest.step == (None if name == "accelerator" else SAVED_AT)
    shared, _ = before.shared()
    own = before.own(0)
    save_run_state(tmp_path / "again", shared, own, alone())
    assert_same(load_run_state(tmp_path / "again", alone()), (shared, own))
    consolidate(tmp_path / "again", tmp_path / "weights")
    assert_same(sorted_by_name(open_weights(tmp_path / "weights")), sorted_by_name(shared["engine"]["models"][0]))
