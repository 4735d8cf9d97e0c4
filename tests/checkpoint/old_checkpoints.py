"""Checkpoints of an earlier version, kept in `old_checkpoints.tar.xz`: the runs that wrote them and resume from them.

Each run takes `STEPS` steps and is saved after `SAVED_AT`. To make the file again with some version of the package:

    git worktree add /tmp/old 2e0406f4
    PYTHONPATH=/tmp/old python tests/checkpoint/old_checkpoints.py tests/checkpoint/old_checkpoints.tar.xz
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator, Callback, Task, Trainer, set_seed

STEPS, SAVED_AT = 7, 3
"""An epoch has four steps: a run is saved within its first epoch and ends within its second."""

ROWS = 16

DEVICE = os.environ.get("DRIVETRAIN_TESTS_DEVICE", "cpu")
"""`device()` of tests/pool.py, which earlier versions do not have."""


class Counting(Callback):
    """Counts batches, and saves the run after a step.

    Args:
        directory: Where to; nothing is saved if None.
        weights_only: Whether the weights alone are saved.
    """

    def __init__(self, directory: str | None, weights_only: bool = False) -> None:
        self._directory, self._weights_only = directory, weights_only
        self.seen = 0

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]

    def on_train_batch_end(self, trainer: Trainer, task: Task, *batch: Any) -> None:
        self.seen += 1
        if self._directory is not None and trainer.global_step == SAVED_AT:
            trainer.save_checkpoint(self._directory, weights_only=self._weights_only)


class Tiny(Task):
    """A model whose weights depend on the order of the data, on dropout, and on all of its optimizer's state."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = network()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        rows, targets = batch
        return nn.functional.mse_loss(self.layers(rows), targets)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05, eps=1e-3)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.25), nn.Linear(8, 2))


def loader(batch_size: int = 4) -> DataLoader[Any]:
    rows = torch.linspace(-1, 1, ROWS * 4).reshape(ROWS, 4)
    return DataLoader(TensorDataset(rows, rows[:, :2].sin()), batch_size=batch_size, shuffle=True)


def train(
    root: str, save: str | None = None, resume: str | None = None, strategy: str = "auto", weights_only: bool = False
) -> tuple[dict[str, Tensor], int]:
    """Train with a Trainer, from the beginning or from a checkpoint. Returns the weights and the batches counted."""
    set_seed(7)
    counting, task = Counting(save, weights_only), Tiny()
    trainer = Trainer(
        max_steps=STEPS,
        max_epochs=2,
        accelerator=DEVICE,
        strategy=strategy,
        default_root_dir=root,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[counting],
    )
    trainer.fit(task, loader(2 if strategy == "fsdp" else 4), resume=resume)
    assert trainer.model is not None
    return trainer.accelerator.get_state_dict(trainer.model), counting.seen


def train_raw(save: str | None = None, resume: str | None = None) -> dict[str, Tensor]:
    """Train in a loop of one's own, from the beginning or from a checkpoint. Returns the weights."""
    set_seed(7)
    accelerator = Accelerator(device=DEVICE)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    model, optimizer, data, scheduler = accelerator.prepare(model, optimizer, loader(), scheduler)
    if resume is not None:
        accelerator.load_state(resume)
    step = 0 if resume is None else SAVED_AT
    while step < STEPS:
        for rows, targets in accelerator.skip_first_batches(data, step) if step == SAVED_AT else data:
            accelerator.backward(nn.functional.mse_loss(model(rows), targets))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            if save is not None and step == SAVED_AT:
                accelerator.save_state(save)
            if step == STEPS:
                break
    return accelerator.get_state_dict(model)


def make(archive: str) -> None:
    """Write all checkpoints, and beside each the weights with which the run that wrote it ended."""
    with tempfile.TemporaryDirectory() as folder:
        weights, seen = train(folder, f"{folder}/trainer")
        assert seen == STEPS
        save_file(weights, f"{folder}/trainer.safetensors")
        train(folder, f"{folder}/weights_only", weights_only=True)
        save_file(train_raw(f"{folder}/accelerator"), f"{folder}/accelerator.safetensors")
        accelerator = Accelerator(device=DEVICE)
        accelerator.save_model(accelerator.prepare(network()), f"{folder}/exported")
        launched = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", __file__, folder, "fsdp"]
        subprocess.run(launched, check=True)
        with tarfile.open(archive, "w:xz") as file:
            for name in sorted(os.listdir(folder)):
                file.add(f"{folder}/{name}", name)


def make_sharded(folder: str) -> None:
    """Write the checkpoint of two processes that shard the model between them; call it on both."""
    weights, _ = train(folder, f"{folder}/fsdp", strategy="fsdp")
    if int(os.environ["RANK"]) == 0:
        save_file(weights, f"{folder}/fsdp.safetensors")


if __name__ == "__main__":
    (make_sharded if sys.argv[2:] else make)(sys.argv[1])
