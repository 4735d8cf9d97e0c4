"""Checkpoints go from any layout to any other, and back into the same one bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from drivetrain import FSDP, Accelerator, Callback, Task, Trainer
from tests.pool import run_in_processes
from tests.strategies.fsdp_models import (
    NetTask,
    gap,
    loader,
    net,
    plain_task,
    prepared,
    train,
    whole,
)
from tests.strategies.quiet import quiet_trainer

pytestmark = pytest.mark.sharded

LAYOUTS: dict[str, tuple[str, int]] = {
    "single": ("single", 1),
    "ddp on 2": ("ddp", 2),
    "fsdp on 2": ("fsdp", 2),
}
SLOW_LAYOUTS = {
    "fsdp on 1": ("fsdp", 1),
    "ddp on 4": ("ddp", 4),
    "fsdp on 4": ("fsdp", 4),
    "hybrid on 4": ("hybrid", 4),
}


def strategy_of(name: str) -> Any:
    return FSDP(replicate_size=2) if name == "hybrid" else name


def write(strategy: str, root: str, layout: str) -> None:
    """One epoch, and a checkpoint at its end."""
    torch.set_num_threads(1)
    trainer = quiet_trainer(strategy_of(strategy))
    trainer.fit(NetTask(), loader(8 // trainer.world_size))
    trainer.save_checkpoint(f"{root}/{layout}")


def go_on(strategy: str, root: str, layouts: list[str]) -> dict[str, float]:
    """The second epoch from each layout's checkpoint: how far it is from two epochs of plain torch."""
    torch.set_num_threads(1)
    found = {}
    for layout in layouts:
        trainer = quiet_trainer(strategy_of(strategy), max_epochs=2)
        trainer.fit(NetTask(), loader(8 // trainer.world_size), resume=f"{root}/{layout}")
        found[layout] = gap(whole(trainer, trainer.model), plain_task(2))
    return found


def check_all(root: Path, layouts: dict[str, tuple[str, int]]) -> None:
    for name, (strategy, processes) in layouts.items():
        run_in_processes(write, processes, args=(strategy, str(root), name), timeout=60)
    for name, (strategy, processes) in layouts.items():
        # Between the others is another test's matter.
        chosen = [other for other in layouts if strategy in ("fsdp", "hybrid") or other.startswith(("fsdp", "hybrid"))]
        for found in run_in_processes(go_on, processes, args=(strategy, str(root), chosen), timeout=90):
            assert list(found) == chosen
            assert max(found.values()) < 5e-6, (name, found)


def test_from_any_layout_to_any_other(tmp_path):
    check_all(tmp_path, LAYOUTS)


@pytest.mark.slow
def test_from_any_layout_to_any_other_on_four_processes(tmp_path):
    check_all(tmp_path, {**LAYOUTS, **SLOW_LAYOUTS})


def bits(trainer: Trainer) -> list[Tensor]:
    """This process's shards of the parameters and of the optimizer's state."""
    tensors = [*trainer.model.parameters()]
    for state in trainer.optimizers[0].state.values():
        tensors += [value for value in state.values() if isinstance(value, Tensor)]
    return [(each.to_local() if isinstance(each, DTensor) else each).detach().clone() for each in tensors]


class Noisy(NetTask):
    """Draws random numbers in each step, as dropout does."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (1 + 0.1 * torch.rand(()))


class SavesMidway(Callback):
    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Trainer, task: Task, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 4 and batch_idx == 1:
            trainer.save_checkpoint(self.path)


def resume_midway(root: str) -> bool:
    """Three epochs of three steps; the second one's first step has just been made where the other run goes on."""
    torch.set_num_threads(1)
    options: dict[str, Any] = {"max_epochs": 3, "accumulate_grad_batches": 2, "gradient_clip_val": 0.1, "seed": 3}
    reference = quiet_trainer(FSDP(activation_checkpointing=True), callbacks=[SavesMidway(f"{root}/midway")], **options)
    reference.fit(Noisy(), shuffled(), loader())
    resumed = quiet_trainer(FSDP(activation_checkpointing=True), **options)
    resumed.fit(Noisy(), shuffled(), loader(), resume=f"{root}/midway")
    assert resumed.global_step == reference.global_step == 9
    return all(torch.equal(one, other) for one, other in zip(bits(resumed), bits(reference), strict=True))


def shuffled() -> Any:
    return torch.utils.data.DataLoader(loader().dataset, batch_size=2, shuffle=True)


def test_resuming_within_an_epoch_is_exact_to_the_bit(tmp_path):
    assert run_in_processes(resume_midway, 2, args=(str(tmp_path),), timeout=60) == [True, True]


class Peeking(NetTask):
    """Wants to see the weights before they are loaded."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"]["extra"] += 1.0


def read_in_shards(root: str) -> dict[str, Any]:
    """Which shapes are allocated to read into, where nothing wants to see the whole."""
    from drivetrain import checkpoint

    write("fsdp", root, "written")
    seen: list[bool] = []
    original = checkpoint.load_run_state

    def watched(*args: Any, **options: Any) -> Any:
        read = original(*args, **options)
        engine = read[0].get("engine", {})
        for model in engine.get("models", []):
            seen.extend(isinstance(v, DTensor) for v in model.values() if v.dim() > 1)
        for optimizer in engine.get("optimizers", []):
            seen.extend(isinstance(v["exp_avg"], DTensor) for v in optimizer["state"].values())
        return read

    checkpoint.load_run_state = watched
    found = {}
    for task in (NetTask(), Peeking()):
        seen.clear()
        trainer = quiet_trainer("fsdp", max_epochs=2)
        trainer.fit(task, loader(), resume=f"{root}/written")
        found[type(task).__name__] = (len(seen) > 10, all(seen))
        found[f"{type(task).__name__} extra"] = float(whole(trainer, trainer.model)["extra"].mean())
    return found


def test_a_resumed_run_reads_its_shards_alone_unless_a_hook_wants_to_see_the_whole(tmp_path):
    for found in run_in_processes(read_in_shards, 2, args=(str(tmp_path),), timeout=60):
        assert found["NetTask"] == (True, True)
        assert found["Peeking"] == (True, False)
        assert found["Peeking extra"] - found["NetTask extra"] == pytest.approx(1.0, abs=0.1)


def save_and_load(root: str) -> dict[str, Any]:
    """The same through the raw Accelerator, with two models and a step after loading."""
    accelerator, model, optimizer = prepared(net, FSDP())
    train(accelerator, model, optimizer, steps=2)
    accelerator.save_state(f"{root}/state")
    train(accelerator, model, optimizer)
    after = whole(accelerator, model)
    fresh, model, optimizer = prepared(net, FSDP())
    for parameter in model.parameters():
        parameter.data.to_local().fill_(7.0)
    fresh.load_state(f"{root}/state")
    train(fresh, model, optimizer)
    accelerator.save_model(model, f"{root}/export")
    return {"gap": gap(whole(fresh, model), after)}


def test_the_accelerator_saves_loads_and_exports(tmp_path):
    from safetensors.torch import load_file

    for found in run_in_processes(save_and_load, 2, args=(str(tmp_path),), timeout=60):
        assert found["gap"] == 0
    exported = load_file(tmp_path / "export" / "model.safetensors")
    assert {name: tuple(value.shape) for name, value in exported.items()} == {
        name: tuple(value.shape) for name, value in net().state_dict().items()
    }


def start_from_a_checkpoint(root: str) -> dict[str, Any]:
    """A model built without values takes them from a Trainer's checkpoint, and one with values too."""
    write("fsdp", root, "written")
    found = {}

    class Late(Task):
        def configure_model(self) -> None:
            self.net = net()
            self.extra = torch.nn.Parameter(torch.ones(3))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.net(batch[0]).sum() * 0

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = quiet_trainer(FSDP(weights=f"{root}/written"))
    trainer.fit(Late(), loader())
    found["late"] = gap(whole(trainer, trainer.model), plain_task(1))
    accelerator = Accelerator(cpu=True, strategy=FSDP())
    model = accelerator.prepare(NetTask())
    accelerator.strategy.state.load_weights(model, f"{root}/written")
    found["prepared"] = gap(whole(accelerator, model), plain_task(1))
    return found


def test_weights_come_from_a_checkpoint_too(tmp_path):
    for found in run_in_processes(start_from_a_checkpoint, 2, args=(str(tmp_path),), timeout=60):
        assert max(found.values()) < 5e-6, found
