"""Checkpoints that Accelerate's save_state wrote open, convert, and execute nothing."""

from __future__ import annotations

import os
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from drivetrain import FSDP, Accelerator, CheckpointError, ConfigurationError, load_checkpoint_in_model
from drivetrain.checkpoint import read_foreign
from tests.commands import drivetrain
from tests.pool import device, run_in_processes


class Counter:
    def __init__(self) -> None:
        self.n = 0

    def state_dict(self) -> dict[str, int]:
        return {"n": self.n}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.n = state["n"]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2, bias=False)
        self.drop = nn.Dropout(0.5)
        self.second = nn.Linear(2, 2, bias=False)
        self.second.weight = self.first.weight
        self.last = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.second(self.drop(self.first(x))))


def objects() -> tuple[Any, ...]:
    torch.manual_seed(3)
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])


def steps(model: Any, optimizer: Any, schedule: Any, number: int) -> list[float]:
    losses = []
    for _ in range(number):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 2)).square().mean()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


def written(folder: Path, safe: bool = True, prefix: str = "") -> list[float]:
    """Write what Accelerate 1.15 writes, file by file, and train on."""
    model, optimizer, schedule = objects()
    steps(model, optimizer, schedule, 3)
    folder.mkdir(parents=True)
    weights = {prefix + name: value.clone() for name, value in model.state_dict().items()}
    if safe:
        weights.pop(f"{prefix}second.weight")  # tied tensors are written once
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        torch.save(weights, folder / "pytorch_model.bin")
    torch.save(optimizer.state_dict(), folder / "optimizer.bin")
    torch.save(schedule.state_dict(), folder / "scheduler.bin")
    torch.save({"n": 7}, folder / "custom_checkpoint_0.pkl")
    states = {
        "step": 0,
        "random_state": random.getstate(),
        "numpy_random_seed": np.random.get_state(),
        "torch_manual_seed": torch.get_rng_state(),
    }
    torch.save(states, folder / "random_states_0.pkl")
    return steps(model, optimizer, schedule, 3)


def continued(folder: str, strategy: Any = "auto") -> list[float]:
    accelerator = Accelerator(device=device(), strategy=strategy)
    model, optimizer, schedule = accelerator.prepare(*objects())
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    torch.rand(3)
    accelerator.load_state(folder)
    assert counter.n == 7
    return steps(model, optimizer, schedule, 3)


@pytest.mark.cpu("the dropout of the run that wrote them drew from the CPU's generator")
@pytest.mark.parametrize(("safe", "prefix"), [(True, ""), (False, ""), (False, "module.")])
def test_a_run_continues_from_accelerate_s_files(tmp_path, safe, prefix):
    expected = written(tmp_path / "theirs", safe, prefix)
    assert continued(str(tmp_path / "theirs")) == expected


@pytest.mark.cpu("the dropout of the run that wrote them drew from the CPU's generator")
def test_a_converted_checkpoint_continues_the_same(tmp_path):
    expected = written(tmp_path / "theirs")
    result = drivetrain("import-checkpoint", tmp_path / "theirs", tmp_path / "ours")
    assert (result.exit_code, result.output.strip()) == (0, str(tmp_path / "ours")), result.output
    assert continued(str(tmp_path / "ours")) == expected
    with pytest.raises(ConfigurationError, match="there already"):
        drivetrain("import-checkpoint", tmp_path / "theirs", tmp_path / "ours")


def sharded(folder: str) -> list[float]:
    found = []
    for name in ("theirs", "ours"):
        accelerator = Accelerator(device=device(), strategy=FSDP())
        model, optimizer, _ = objects()
        model.drop.p = 0.0
        model, optimizer = accelerator.prepare(model, optimizer)
        accelerator.load_state(f"{folder}/{name}")
        loss = model(torch.ones(2, 2)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        state = accelerator.get_state_dict(model)
        found.append([loss.item(), *(float(value.sum()) for value in state.values())])
    return found


@pytest.mark.sharded
def test_shards_take_what_accelerate_wrote(tmp_path):
    written(tmp_path / "theirs")
    drivetrain("import-checkpoint", tmp_path / "theirs", tmp_path / "ours")
    for theirs, ours in run_in_processes(sharded, 2, args=(str(tmp_path),)):
        assert theirs == pytest.approx(ours, abs=1e-7)


class Harm:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.place),)

    def __init__(self, place: Path) -> None:
        self.place = place


@pytest.mark.parametrize("name", ["optimizer.bin", "custom_checkpoint_0.pkl", "random_states_0.pkl", "sampler.bin"])
def test_nothing_in_a_file_is_executed(tmp_path, name):
    written(tmp_path / "theirs")
    torch.save(Harm(tmp_path / "harmed"), tmp_path / "theirs" / name)
    if name == "sampler.bin":
        read_foreign(tmp_path / "theirs")
    else:
        with pytest.raises(CheckpointError, match=f"{name} contains objects that are not tensors"):
            read_foreign(tmp_path / "theirs")
    assert not (tmp_path / "harmed").exists()


class Sampler:
    def __init__(self) -> None:
        self.epoch, self.data = 5, [1, 2]


def test_a_sampler_s_epoch_is_read_without_its_class(tmp_path):
    written(tmp_path / "theirs")
    torch.save(Sampler(), tmp_path / "theirs" / "sampler.bin")
    shared, _ = read_foreign(tmp_path / "theirs")
    assert shared["engine"]["loaders"][0]["epoch"] == 5


@pytest.mark.parametrize("safe", [True, False])
def test_weights_are_saved_in_parts_and_loaded_back(tmp_path, safe):
    accelerator, model = Accelerator(device=device()), Tied()
    accelerator.save_model(model, tmp_path, max_shard_size=20, safe_serialization=safe)
    suffix = "safetensors" if safe else "bin"
    assert len(list(tmp_path.glob(f"*-of-0000*.{suffix}"))) >= 2
    other = Tied()
    load_checkpoint_in_model(other, tmp_path, strict=True)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    with torch.device("meta"):
        empty = Tied()
    load_checkpoint_in_model(empty, tmp_path, {"": "cpu"}, dtype="bf16")
    assert empty.last.weight.dtype == torch.bfloat16
    with pytest.raises(CheckpointError, match="does not fit Linear"):
        load_checkpoint_in_model(nn.Linear(1, 1), tmp_path, strict=True)


def test_pickled_weights_are_not_executed(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Harm(tmp_path / "harmed")))
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin"):
        load_checkpoint_in_model(nn.Linear(1, 1), tmp_path)
    assert not (tmp_path / "harmed").exists()
