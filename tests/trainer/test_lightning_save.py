"""A run that is saved as a file in Lightning's format resumes from it as exactly as from a directory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Callback, CheckpointError, Task, consolidate
from drivetrain.checkpoint import checkpoint_at, is_checkpoint, list_checkpoints, newest_checkpoint, remove_checkpoint
from tests.pool import run_in_processes
from tests.trainer.lightning_files import quiet, write


class Noisy(Task):
    """Draws in every step, and logs a mean over the epoch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.means: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = (self.layers(batch[0]) - batch[1]).square().mean()
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.means.append(float(self.trainer.callback_metrics["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.05)


class SavesAt(Callback):
    def __init__(self, path: str, step: int) -> None:
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer: Any, task: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path, format="lightning")


def shuffled(batch_size: int) -> DataLoader[Any]:
    x = torch.randn(24, 2, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=batch_size, shuffle=True)


def fit(path: str, step: int = 0, resume: str | None = None, batch_size: int = 4) -> tuple[list[float], list[Tensor]]:
    task = Noisy()
    callbacks = [SavesAt(path, step)] if step else []
    quiet(Path(path).parent, max_epochs=2, callbacks=callbacks, seed=5).fit(task, shuffled(batch_size), resume=resume)
    return task.means, [parameter.detach().clone() for parameter in task.parameters()]


def whole_and_resumed(path: str) -> tuple[Any, Any]:
    whole = fit(path, step=4, batch_size=2)
    return whole, fit(path, resume=path, batch_size=2)


@pytest.mark.parametrize("step", [3, 6, 8])
def test_the_order_the_draws_and_the_open_means_continue(tmp_path: Path, step: int) -> None:
    path = str(tmp_path / "x.ckpt")
    means, weights = fit(path, step)
    resumed, again = fit(path, resume=path)
    assert resumed == means[-len(resumed) :]
    assert all(map(torch.equal, weights, again))


def test_each_of_two_processes_continues_with_its_own_state(tmp_path: Path) -> None:
    path = str(tmp_path / "x.ckpt")
    for (means, weights), (resumed, again) in run_in_processes(whole_and_resumed, 2, args=(path,)):
        assert resumed == means
        assert all(map(torch.equal, weights, again))
    assert fit(path, resume=path)[0]  # one process takes over what two have written
    assert checkpoint_at(path).world_size == 2


def test_a_file_is_found_with_its_step_as_a_directory_is(tmp_path: Path) -> None:
    for step in (3, 6):
        fit(str(tmp_path / f"{step}.ckpt"), step)
    write(tmp_path / "other.ckpt", 6, True)
    found = [(os.path.basename(one.path), one.step) for one in list_checkpoints(tmp_path)]
    assert found == [("6.ckpt", 6), ("3.ckpt", 3)]
    assert newest_checkpoint(tmp_path) == str(tmp_path / "6.ckpt")


def test_a_damaged_file_is_refused_and_passed_over(tmp_path: Path) -> None:
    for step in (3, 6):
        fit(str(tmp_path / f"{step}.ckpt"), step)
    path = tmp_path / "6.ckpt"
    weight = torch.load(path, weights_only=True)["state_dict"]["layers.0.weight"]
    raw = bytearray(path.read_bytes())
    raw[raw.index(weight.numpy().tobytes())] ^= 1
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match="damaged"):
        fit(str(path), resume=str(path))
    assert newest_checkpoint(tmp_path) == str(tmp_path / "3.ckpt")


def test_weights_that_were_changed_in_the_file_count(tmp_path: Path) -> None:
    path = str(tmp_path / "x.ckpt")
    fit(path, 3)
    content = torch.load(path, weights_only=True)
    content["state_dict"]["layers.2.bias"] += 1
    torch.save(content, path)
    assert Noisy.load_from_checkpoint(path).layers[2].bias == content["state_dict"]["layers.2.bias"]


def test_plain_weights_come_out_of_a_file(tmp_path: Path) -> None:
    path = str(tmp_path / "x.ckpt")
    _, weights = fit(path, 12)
    [file] = consolidate(path, tmp_path / "plain", dtype="bfloat16")
    found = load_file(file)
    assert torch.equal(found["layers.0.weight"], weights[0].to(torch.bfloat16))


def test_only_files_of_this_package_are_removed(tmp_path: Path) -> None:
    ours, theirs, text = tmp_path / "x.ckpt", write(tmp_path / "y.ckpt", 6, True), tmp_path / "z.ckpt"
    fit(str(ours), 3)
    text.write_text("thesis")
    assert [is_checkpoint(path) for path in (ours, theirs, text)] == [True, False, False]
    remove_checkpoint(ours)
    for path in (theirs, text):
        with pytest.raises(CheckpointError, match="is not removed"):
            remove_checkpoint(path)
    assert sorted(os.listdir(tmp_path)) == ["y.ckpt", "z.ckpt"]
