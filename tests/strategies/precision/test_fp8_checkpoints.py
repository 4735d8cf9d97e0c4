"""Checkpoints and exports of FP8 runs hold plain weights under plain names, and resume to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from drivetrain import FP8, FSDP, Accelerator, Callback, Trainer
from tests.pool import run_in_processes
from tests.strategies.precision.fp8_models import FLOAT8, NetTask, adamw, float8_layers, loader, net
from tests.strategies.quiet import quiet_trainer

LAYOUTS: dict[str, tuple[Any, Any, int]] = {
    "single": (lambda: "single", lambda: FP8(), 1),
    "rowwise": (lambda: "single", lambda: FP8(recipe="rowwise"), 1),
    "ddp": (lambda: "ddp", lambda: FP8(), 2),
}
SHARDED: dict[str, tuple[Any, Any, int]] = {
    "fsdp": (lambda: FSDP(), lambda: FP8(), 2),
    "all-gather": (lambda: FSDP(), lambda: FP8(float8_all_gather=True), 2),
}
EVERY = [*LAYOUTS, *(pytest.param(name, marks=pytest.mark.sharded) for name in SHARDED)]


def trainer_of(layout: str, **options: Any) -> Trainer:
    torch.set_num_threads(1)
    strategy, precision, _ = (LAYOUTS | SHARDED)[layout]
    return quiet_trainer(strategy(), precision=precision(), max_epochs=2, **options)


class SavesMidway(Callback):
    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx):
        if trainer.global_step == 3:
            trainer.save_checkpoint(self.path)


def local(tensor: Any) -> Any:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def bits(trainer: Trainer) -> list[Tensor]:
    """What this process holds of the parameters and of the optimizer's state."""
    (optimizer,) = trainer.optimizers
    state = optimizer.state_dict()["state"]
    moments = [local(value) for values in state.values() for value in values.values()]
    return [*(local(p.detach()).clone() for p in trainer.model.parameters()), *moments]


def resume_midway(layout: str, root: str) -> bool:
    """Whether a run that resumes after three steps ends as the one that was not interrupted, bit for bit."""
    whole = trainer_of(layout, callbacks=[SavesMidway(f"{root}/midway")])
    whole.fit(NetTask(), loader(16 // whole.world_size))
    resumed = trainer_of(layout)
    resumed.fit(NetTask(), loader(16 // resumed.world_size), resume=f"{root}/midway")
    assert len(float8_layers(resumed.model)) == len(FLOAT8)
    assert whole.global_step == resumed.global_step == 8
    pairs = list(zip(bits(whole), bits(resumed), strict=True))
    assert len(pairs) > 40
    return all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("layout", EVERY)
def test_resuming_is_exact_to_the_bit(tmp_path, layout):
    processes = (LAYOUTS | SHARDED)[layout][2]
    assert all(run_in_processes(resume_midway, processes, args=(layout, str(tmp_path)), timeout=120))


def write(layout: str, root: str) -> dict[str, Tensor]:
    """One run with its checkpoint; what its weights are."""
    trainer = trainer_of(layout)
    trainer.fit(NetTask(), loader(16 // trainer.world_size))
    trainer.save_checkpoint(f"{root}/checkpoint")
    return {
        name.removeprefix("net."): value
        for name, value in trainer.strategy.state.model(trainer.model, full=True).items()
    }


@pytest.mark.parametrize("layout", EVERY)
def test_the_checkpoint_of_an_fp8_run_opens_in_a_plain_one(tmp_path, layout):
    processes = (LAYOUTS | SHARDED)[layout][2]
    written = run_in_processes(write, processes, args=(layout, str(tmp_path)), timeout=120)[0]
    plain = net()
    assert list(written) == list(plain.state_dict())
    assert {(type(value), value.dtype) for value in written.values()} == {(Tensor, torch.float32)}
    task = NetTask()
    trainer = quiet_trainer("single", max_epochs=3)
    trainer.fit(task, loader(), resume=tmp_path / "checkpoint")
    assert trainer.global_step == 12
    assert float8_layers(task) == []
    assert type(task.net.blocks[0].up) is nn.Linear


def test_the_checkpoint_of_a_plain_run_opens_in_an_fp8_one(tmp_path):
    plain = quiet_trainer("single", max_epochs=2)
    plain.fit(NetTask(), loader())
    plain.save_checkpoint(tmp_path / "checkpoint")
    task = NetTask()
    trainer = quiet_trainer("single", precision="fp8", max_epochs=3)
    trainer.fit(task, loader(), resume=tmp_path / "checkpoint")
    assert trainer.global_step == 12
    assert len(float8_layers(task)) == len(FLOAT8)


def export(layout: str, root: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    strategy, precision, _ = (LAYOUTS | SHARDED)[layout]
    accelerator = Accelerator(cpu=True, strategy=strategy(), mixed_precision=precision())
    model = net()
    model, optimizer, batches = accelerator.prepare(model, adamw(model.parameters()), loader(8))
    for x, y in batches:
        optimizer.zero_grad()
        accelerator.backward(F.mse_loss(model(x), y))
        optimizer.step()
    accelerator.save_model(model, f"{root}/export")
    accelerator.save_state(f"{root}/state")
    state = accelerator.get_state_dict(model)
    x, _ = next(iter(loader()))
    with torch.no_grad():
        before = model(x)
        for parameter in model.parameters():
            parameter.mul_(3.0)
    optimizer.step()  # with scales of these weights
    accelerator.load_state(f"{root}/state")
    with torch.no_grad():
        assert torch.equal(model(x), before), "scales of the weights before loading were used"
    return {"state": dict(state), "output": before}


@pytest.mark.parametrize("layout", EVERY)
def test_exports_are_plain_weights_under_plain_names(tmp_path, layout):
    processes = (LAYOUTS | SHARDED)[layout][2]
    outcome = run_in_processes(export, processes, args=(layout, str(tmp_path)), timeout=120)[0]
    exported = load_file(tmp_path / "export" / "model.safetensors")
    plain = net()
    assert exported.keys() == outcome["state"].keys() == plain.state_dict().keys()
    for name, value in exported.items():
        assert value.dtype == torch.float32
        assert torch.equal(value, outcome["state"][name])
    plain.load_state_dict(exported)
    x, _ = next(iter(loader()))
    torch.testing.assert_close(plain(x), outcome["output"], atol=0.1, rtol=0)


def test_a_model_in_bfloat16_is_exported_in_bfloat16(tmp_path):
    accelerator = Accelerator(cpu=True, mixed_precision="fp8")
    accelerator.save_model(accelerator.prepare(net().bfloat16()), tmp_path)
    assert {value.dtype for value in load_file(tmp_path / "model.safetensors").values()} == {torch.bfloat16}
