"""What Accelerate's FSDP saved: shards by torch's distributed checkpoint, or a full state dict. Nothing is executed."""

from __future__ import annotations

import os
import pickle
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)

from drivetrain import FSDP, Accelerator, CheckpointError, PartialState
from drivetrain.checkpoint import read_foreign
from tests.commands import drivetrain
from tests.pool import device, run_in_processes

SHARDS, WHOLE = "sharded", "full"


class Net(nn.Module):
    """Sizes that no number of processes divides, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 5), nn.BatchNorm1d(5, momentum=None), nn.Linear(5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)).tanh())


def objects() -> tuple[Any, ...]:
    torch.manual_seed(4)
    model = Net()
    biases = [value for name, value in model.named_parameters() if name.endswith("bias")]
    others = [value for name, value in model.named_parameters() if not name.endswith("bias")]
    # In another order than the model's, as scripts group them.
    optimizer = torch.optim.AdamW([{"params": biases, "weight_decay": 0.0}, {"params": others}], lr=0.1)
    return model, optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])


def steps(model: Any, optimizer: Any, schedule: Any, number: int = 3) -> list[float]:
    losses = []
    for _ in range(number):
        optimizer.zero_grad()
        inputs = torch.arange(12.0, device=next(model.parameters()).device).reshape(4, 3)
        loss = (model(inputs) - 1).square().mean()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


def save(folder: Path, kind: str, model: nn.Module, optimizer: Any, schedule: Any) -> None:
    """Write what Accelerate 1.15 writes under FSDP, file by file; call it on all processes."""
    folder.mkdir(parents=True, exist_ok=True)
    rank = int(os.environ.get("RANK", 0))
    options = StateDictOptions(full_state_dict=kind == WHOLE, cpu_offload=kind == WHOLE)
    weights = get_model_state_dict(model, options=options)
    states = get_optimizer_state_dict(model, optimizer, options=options)
    if kind == WHOLE:
        torch.save(weights, folder / "pytorch_model_fsdp.bin")
        torch.save(states, folder / "optimizer.bin")
    else:
        dcp.save({"model": weights}, storage_writer=dcp.FileSystemWriter(folder / "pytorch_model_fsdp_0"))
        dcp.save({"optimizer": states}, storage_writer=dcp.FileSystemWriter(folder / "optimizer_0"))
    torch.save(schedule.state_dict(), folder / "scheduler.bin")
    found = {
        "step": 0,
        "random_state": random.getstate(),
        "numpy_random_seed": np.random.get_state(),
        "torch_manual_seed": torch.get_rng_state(),
    }
    torch.save(found, folder / f"random_states_{rank}.pkl")


def written(folder: Path, kind: str = SHARDS) -> list[float]:
    """Train, write, and train on."""
    of_run = objects()
    steps(*of_run)
    save(folder, kind, *of_run)
    return steps(*of_run)


def continued(folder: str) -> list[float]:
    accelerator = Accelerator(device=device())
    prepared = accelerator.prepare(*objects())
    accelerator.load_state(folder)
    return steps(*prepared)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "theirs"
    written(folder)
    return folder


@pytest.mark.parametrize("kind", [SHARDS, WHOLE])
def test_a_run_continues_from_the_files_and_from_what_they_are_converted_to(tmp_path: Path, kind: str) -> None:
    expected = written(tmp_path / "theirs", kind)
    assert continued(str(tmp_path / "theirs")) == expected
    PartialState._reset_state()  # the command is on the CPU
    result = drivetrain("import-checkpoint", tmp_path / "theirs", tmp_path / "ours")
    PartialState._reset_state()
    assert result.exit_code == 0, result.output
    assert continued(str(tmp_path / "ours")) == expected


@pytest.mark.parametrize("below", ["", "pytorch_model_fsdp_0"])
def test_their_shards_become_plain_weights(theirs: Path, tmp_path: Path, below: str) -> None:
    arguments = ["merge-weights", str(theirs / below), str(tmp_path / "out"), "--dtype", "bfloat16"]
    result = drivetrain(*arguments)
    assert result.exit_code == 0, result.output
    expected = read_foreign(theirs)[0]["engine"]["models"][0]
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value.bfloat16() if value.is_floating_point() else value)


@pytest.mark.parametrize("below", ["", "pytorch_model_fsdp_0"])
def test_the_function_of_scripts_merges_them_too(theirs: Path, tmp_path: Path, below: str) -> None:
    from drivetrain.compat.accelerate.utils import merge_fsdp_weights

    merge_fsdp_weights(shutil.copytree(theirs, tmp_path / "run") / below, tmp_path / "out", remove_checkpoint_dir=True)
    expected = read_foreign(theirs)[0]["engine"]["models"][0]
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert not (tmp_path / "run" / below).exists()


class Harm:
    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.place),)


@pytest.mark.parametrize("part", ["pytorch_model_fsdp_0", "optimizer_0"])
def test_what_the_description_holds_is_not_executed(theirs: Path, tmp_path: Path, part: str) -> None:
    shutil.copytree(theirs, tmp_path / "theirs")
    (tmp_path / "theirs" / part / ".metadata").write_bytes(pickle.dumps(Harm(tmp_path / "harmed")))
    with pytest.raises(CheckpointError, match=r"\.metadata contains objects that do not belong .*: posix\.mkdir"):
        read_foreign(tmp_path / "theirs")
    assert not (tmp_path / "harmed").exists()


def test_nor_is_what_a_shard_holds(tmp_path: Path) -> None:
    written(tmp_path / "theirs")
    folder = tmp_path / "theirs" / "optimizer_0"
    shutil.rmtree(folder)
    dcp.save({"optimizer": {"param_groups": [Harm(tmp_path / "harmed")]}}, checkpoint_id=folder)
    with pytest.raises(CheckpointError, match=r"distcp contains objects that are not tensors or plain values"):
        read_foreign(tmp_path / "theirs")
    assert not (tmp_path / "harmed").exists()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:300])


def elsewhere(path: Path) -> None:
    description = path.parent / ".metadata"
    description.write_bytes(description.read_bytes().replace(b"\x8c\x0c__0_0.distcp", b"\x8c\x0c../_0.distcp"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (Path.unlink, "__0_0.distcp cannot be read: No such file"),
        (cut, "__0_0.distcp cannot be read"),
        (elsewhere, "in an unsupported form"),
        (lambda path: cut(path.parent / ".metadata"), ".metadata cannot be read"),
    ],
)
def test_damage_is_named(theirs: Path, tmp_path: Path, damage: Any, message: str) -> None:
    shutil.copytree(theirs, tmp_path / "theirs")
    damage(tmp_path / "theirs" / "pytorch_model_fsdp_0" / "__0_0.distcp")
    with pytest.raises(CheckpointError, match=message):
        read_foreign(tmp_path / "theirs")


def test_a_local_state_dict_is_refused_by_name(theirs: Path, tmp_path: Path) -> None:
    shutil.copytree(theirs, tmp_path / "theirs")
    (tmp_path / "theirs" / "pytorch_model_fsdp_rank0.bin").touch()
    with pytest.raises(CheckpointError, match=r"pytorch_model_fsdp_rank0.bin.*SHARDED_STATE_DICT or FULL_STATE_DICT"):
        read_foreign(tmp_path / "theirs")


def saved_by_two(folder: str) -> list[float]:
    """Shards of torch's own FSDP on two processes, and what follows."""
    from torch.distributed.fsdp import fully_shard

    accelerator = Accelerator(device=device(), strategy="ddp")  # whose process group torch's FSDP takes
    model = objects()[0].to(accelerator.device)
    fully_shard(model)
    biases = [value for name, value in model.named_parameters() if name.endswith("bias")]
    others = [value for name, value in model.named_parameters() if not name.endswith("bias")]
    optimizer = torch.optim.AdamW([{"params": biases, "weight_decay": 0.0}, {"params": others}], lr=0.1)
    of_run = model, optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])
    steps(*of_run)
    save(Path(folder), SHARDS, *of_run)
    return steps(*of_run)


def continued_by_two(folder: str) -> list[float]:
    accelerator = Accelerator(device=device(), strategy=FSDP())
    prepared = accelerator.prepare(*objects())
    accelerator.load_state(folder)
    return steps(*prepared[:2], prepared[2].scheduler)


@pytest.mark.sharded
def test_shards_of_two_processes_continue_on_two_and_on_one(tmp_path: Path) -> None:
    folder = str(tmp_path / "theirs")
    expected, _ = run_in_processes(saved_by_two, 2, args=(folder,))
    assert len(list(Path(folder, "pytorch_model_fsdp_0").glob("*.distcp"))) == 2
    for found in (*run_in_processes(continued_by_two, 2, args=(folder,)), continued(folder)):
        assert found == pytest.approx(expected, abs=5e-6)
