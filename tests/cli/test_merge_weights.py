"""Weights out of a checkpoint: what the flags of `merge-weights` add to `consolidate`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from drivetrain import Accelerator, ConfigurationError
from tests.commands import drivetrain


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Embedding(6, 4), torch.nn.Linear(4, 6, bias=False)
        self.last.weight = self.first.weight


@pytest.fixture(scope="module")
def model() -> Tied:
    return Tied()


@pytest.fixture
def checkpoint(tmp_path: Path, model: Tied) -> Path:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(model)
    return Path(accelerator.save_state(str(tmp_path / "checkpoint")))


def merge(*arguments: object) -> str:
    ended = drivetrain("merge-weights", *arguments)
    assert ended.exit_code == 0, ended.output
    return ended.stdout


def test_weights_are_written_and_the_checkpoint_is_kept(checkpoint: Path, tmp_path: Path, model: Tied) -> None:
    assert str(tmp_path / "out" / "model.safetensors") in merge(checkpoint, tmp_path / "out")
    (written,) = load_file(tmp_path / "out" / "model.safetensors").values()
    assert torch.equal(written, model.first.weight)
    assert checkpoint.is_dir()


@pytest.mark.parametrize("flag", ["--unsafe_serialization", "--unsafe-serialization"])
def test_a_pickle_holds_tied_weights_under_both_names(checkpoint: Path, tmp_path: Path, model: Tied, flag: str) -> None:
    printed = merge(checkpoint, tmp_path / "out", flag, "--max_shard_size", "50B")
    assert printed.split()[-1] == str(tmp_path / "out" / "pytorch_model.bin")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["pytorch_model.bin"]
    weights = torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True)
    assert set(weights) == {"first.weight", "last.weight"}
    assert torch.equal(weights["last.weight"], model.first.weight)


def test_the_checkpoint_is_removed_when_asked(checkpoint: Path, tmp_path: Path) -> None:
    merge(checkpoint, tmp_path / "out", "--remove_checkpoint_dir")
    assert not checkpoint.exists()
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_weights_inside_the_checkpoint_are_not_removed_with_it(checkpoint: Path) -> None:
    with pytest.raises(ConfigurationError, match="would also remove the new weights"):
        merge(checkpoint, checkpoint / "out", "--remove_checkpoint_dir")
    assert checkpoint.is_dir()
