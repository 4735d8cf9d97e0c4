"""The Accelerator's hooks around saving and loading, and its numbered checkpoints."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain import Accelerator, CheckpointError, ProjectConfiguration
from drivetrain.checkpoint import Checkpoint
from tests.checkpoint.states import leftovers
from tests.pool import device, run_in_processes


def prepared() -> tuple[Accelerator, nn.Module]:
    accelerator = Accelerator(device=device())
    return accelerator, accelerator.prepare(nn.Linear(2, 2))


def save_adapter(models: list[nn.Module], weights: list[dict[str, Any]], output_dir: str) -> None:
    """What diffusers' training scripts do: write a model their own way, and keep it from being saved again."""
    for model in models:
        os.makedirs(os.path.join(output_dir, "adapter"))
        with open(os.path.join(output_dir, "adapter", "weights.json"), "w") as file:
            json.dump(model.weight.tolist(), file)
        weights.pop()


def load_adapter(models: list[nn.Module], input_dir: str) -> None:
    model = models.pop()
    with open(os.path.join(input_dir, "adapter", "weights.json")) as file, torch.no_grad():
        model.weight.copy_(torch.tensor(json.load(file)))


@pytest.mark.parametrize("block", [True, False])
def test_what_a_hook_writes_is_part_of_the_checkpoint(block: bool, tmp_path: Path) -> None:
    accelerator, model = prepared()
    accelerator.register_save_state_pre_hook(save_adapter)
    accelerator.register_load_state_pre_hook(load_adapter)
    before = model.weight.detach().clone()
    accelerator.save_state(tmp_path / "one", block=block)
    accelerator.save_queue.finish()
    assert "adapter/weights.json" in Checkpoint(tmp_path / "one").manifest.files
    assert Checkpoint(tmp_path / "one").shared()[0]["engine"]["models"] == []
    assert leftovers(tmp_path) == []
    with torch.no_grad():
        model.weight.zero_()
    accelerator.load_state(tmp_path / "one")
    torch.testing.assert_close(model.weight, before)
    (tmp_path / "one" / "adapter" / "weights.json").write_text("[[0, 0], [0, 0]]")
    with pytest.raises(CheckpointError, match=r"weights\.json"):
        Checkpoint(tmp_path / "one").verify()


def test_a_hook_can_be_taken_back(tmp_path: Path) -> None:
    accelerator, _ = prepared()
    calls: list[str] = []
    first = accelerator.register_save_state_pre_hook(lambda models, weights, path: calls.append("first"))
    accelerator.register_save_state_pre_hook(lambda models, weights, path: calls.append("second"))
    loading = accelerator.register_load_state_pre_hook(lambda models, path: calls.append("loading"))
    accelerator.save_state(tmp_path / "one")
    accelerator.load_state(tmp_path / "one")
    first.remove()
    loading.remove()
    loading.remove()
    accelerator.save_state(tmp_path / "one")
    accelerator.load_state(tmp_path / "one")
    assert calls == ["first", "second", "loading", "second"]


def test_files_of_hooks_need_a_local_directory() -> None:
    accelerator, _ = prepared()
    accelerator.register_save_state_pre_hook(save_adapter)
    with pytest.raises(CheckpointError, match="local"):
        accelerator.save_state("memory://run/one")


def save_with_a_hook(directory: str) -> list[str]:
    accelerator, _ = prepared()

    def hook(models: list[nn.Module], weights: list[dict[str, Any]], output_dir: str) -> None:
        (Path(output_dir) / f"note_{accelerator.process_index}.txt").write_text("mine")

    accelerator.register_save_state_pre_hook(hook)
    accelerator.save_state(directory)
    accelerator.load_state(directory)
    return sorted(name for name in Checkpoint(directory).manifest.files if name.startswith("note"))


def test_hooks_run_on_every_process(tmp_path: Path) -> None:
    results = run_in_processes(save_with_a_hook, 2, args=(str(tmp_path / "one"),))
    assert results == [["note_0.txt", "note_1.txt"]] * 2


def test_the_oldest_go_once_the_newest_is_there(tmp_path: Path) -> None:
    configuration = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(device=device(), project_config=configuration)
    accelerator.prepare(nn.Linear(2, 2))
    for _ in range(4):
        accelerator.save_state(block=False)
    accelerator.save_queue.finish()
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["checkpoint_2", "checkpoint_3"]
    accelerator.load_state()
    assert accelerator.save_state() == str(tmp_path / "checkpoints" / "checkpoint_4")
