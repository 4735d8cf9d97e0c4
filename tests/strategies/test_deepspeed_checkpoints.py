"""Runs under DeepSpeed stop and resume: under another stage, with master weights, from DeepSpeed's own files."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from drivetrain import DDP, CheckpointError, DeepSpeed
from drivetrain.checkpoint import load_run_state, read_foreign
from tests.commands import drivetrain
from tests.shared_runs import SharedRuns
from tests.strategies.deepspeed_models import EXACT, NEEDS_DEEPSPEED, STAGES, Loop, assert_all_below, furthest

pytestmark = NEEDS_DEEPSPEED

runs = SharedRuns(__name__, timeout=240)


@pytest.fixture
def result_of() -> Callable[[Callable[..., Any]], Any]:
    return lambda run: runs.of(run)[0]


@runs
def resume_under_any_stage(directory: Path) -> dict[str, float]:
    """Three steps under one stage, three more under another: how far from six without a break."""
    kinds: dict[str, Any] = {f"stage {stage}": lambda stage=stage: DeepSpeed(stage) for stage in STAGES}
    kinds["offload"] = lambda: DeepSpeed(3, offload_optimizer="cpu", offload_param="cpu")
    kinds["ddp"] = DDP
    unbroken = {name: Loop(make()).train(6).weights() for name, make in kinds.items()}
    for name, make in kinds.items():
        Loop(make()).train(3).accelerator.save_state(directory / name)
    gaps = {}
    names = list(kinds)
    for number, name in enumerate(names):
        for then in {name, names[(number + 1) % len(names)], "ddp"}:
            loop = Loop(kinds[then]())
            loop.accelerator.load_state(directory / name)
            gaps[f"{name} -> {then}"] = furthest(loop.train(3).weights(), unbroken[then])
    return gaps


def test_a_run_goes_on_exactly_under_the_same_stage_or_another_or_ddp(result_of):
    gaps = result_of(resume_under_any_stage)
    assert len(gaps) >= 16
    assert_all_below(gaps, EXACT)


@runs
def resume_with_master_weights(directory: Path) -> dict[str, float]:
    """The same in bfloat16, where the 32-bit master weights must survive."""
    gaps = {}
    for stage in STAGES:
        unbroken = Loop(DeepSpeed(stage), "bf16-true").train(6).weights()
        Loop(DeepSpeed(stage), "bf16-true").train(3).accelerator.save_state(directory / str(stage))
        loop = Loop(DeepSpeed(stage), "bf16-true")
        loop.accelerator.load_state(directory / str(stage))
        gaps[str(stage)] = furthest(loop.train(3).weights(), unbroken)
    return gaps


def test_a_run_goes_on_exactly_with_its_master_weights(result_of):
    assert_all_below(result_of(resume_with_master_weights), 0.0)


@runs
def native_checkpoints(directory: Path) -> dict[str, Any]:
    """Written by the engine and read by it: how far from without a break; and the weights, to be merged later."""
    found: dict[str, Any] = {}
    for stage in STAGES:
        unbroken = Loop(DeepSpeed(stage)).train(6).weights()
        loop = Loop(DeepSpeed(stage)).train(3)
        loop.accelerator.strategy.save_native(loop.model, directory / str(stage))
        halfway = loop.weights()
        again = Loop(DeepSpeed(stage))
        again.accelerator.strategy.load_native(again.model, directory / str(stage))
        again.schedule.load_state_dict(loop.schedule.state_dict())
        again.loader.load_state_dict(loop.loader.state_dict())
        found[str(stage)] = (furthest(again.train(3).weights(), unbroken), halfway)
    return found


def test_deepspeeds_own_checkpoints_go_on_exactly(result_of):
    assert_all_below({stage: gap for stage, (gap, _) in result_of(native_checkpoints).items()}, 0.0)


@pytest.mark.parametrize("stage", ["0", "1", "2", "3"])
def test_weights_come_out_of_deepspeeds_own_checkpoints(result_of, tmp_path, stage):
    _, expected = result_of(native_checkpoints)[stage]
    arguments = ["merge-weights", str(runs.directory_of(native_checkpoints) / stage), str(tmp_path / "out")]
    assert drivetrain(*arguments).exit_code == 0
    found = load_file(tmp_path / "out" / "model.safetensors")
    for name in found:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=0)
    # Tied weights are written once; a count of batches is none.
    assert expected.keys() - found.keys() <= {"tied.weight", "norm.num_batches_tracked"}


@runs
def accelerates_folders(directory: Path) -> dict[str, float]:
    """What Accelerate's `save_state` leaves of a run under each stage, opened by DDP: how far from the run itself."""
    gaps = {}
    for stage in STAGES:
        folder = directory / str(stage)
        loop = Loop(DeepSpeed(stage)).train(3)
        loop.accelerator.strategy.save_native(loop.model, folder, "pytorch_model")
        torch.save(loop.schedule.state_dict(), folder / "scheduler.bin")
        states = {
            "random_state": random.getstate(),
            "numpy_random_seed": np.random.get_state(),
            "torch_manual_seed": torch.get_rng_state(),
        }
        torch.save(states, folder / f"random_states_{loop.accelerator.process_index}.pkl")
        loop.accelerator.wait_for_everyone()
        again = Loop(DDP())
        again.accelerator.load_state(folder)
        gaps[str(stage)] = furthest(again.train(3).weights(), loop.train(3).weights())
    return gaps


def test_what_accelerate_saves_under_deepspeed_continues_under_ddp(result_of):
    assert_all_below(result_of(accelerates_folders), EXACT)


def test_and_is_converted_without_deepspeed_and_without_executing_it(result_of, tmp_path):
    result_of(accelerates_folders)
    source = runs.directory_of(accelerates_folders) / "2"
    hidden = "import sys; sys.modules['deepspeed'] = None; from drivetrain.cli.main import cli; cli()"
    command = [sys.executable, "-c", hidden, "import-checkpoint", str(source), str(tmp_path / "ours")]
    subprocess.run(command, check=True, timeout=120)
    whole, _ = read_foreign(source)
    saved, _ = load_run_state(tmp_path / "ours")
    for one, other in zip(whole["engine"]["optimizers"], saved["engine"]["optimizers"], strict=True):
        assert one["param_groups"] == other["param_groups"]
        torch.testing.assert_close(one["state"], other["state"], rtol=0, atol=0)

    harmful = tmp_path / "harmful"
    shutil.copytree(source, harmful)
    torch.save(Harm(tmp_path / "harmed"), next((harmful / "pytorch_model").glob("*rank_1*optim_states.pt")))
    with pytest.raises(
        CheckpointError, match=r"optim_states\.pt contains objects that are not tensors or plain values"
    ):
        read_foreign(harmful)
    assert not (tmp_path / "harmed").exists()
    next((harmful / "pytorch_model").glob("*rank_1*optim_states.pt")).unlink()
    with pytest.raises(CheckpointError, match="holds the files of 1 of the 2 processes"):
        read_foreign(harmful)


class Harm:
    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.place),)
