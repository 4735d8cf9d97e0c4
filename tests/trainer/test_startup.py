"""What `from drivetrain import Accelerator, Trainer` imports: what takes long comes when it is used."""

from __future__ import annotations

import json
import subprocess
import sys

HEAVY = {
    "matplotlib",
    "psutil",
    "rich",
    "pandas",
    "sklearn",
    "sympy",
    "tensorboard",
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.checkpoint",
    "torch.distributed.elastic",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor",
    "torch.utils.flop_counter",
    "torchao",
    "torchmetrics",
    "torchvision",
    "transformers",
    "yaml",
}


def imported_by(statement: str) -> set[str]:
    """What a statement imports beside torch."""
    code = f"import json, sys, torch\nbefore = set(sys.modules)\n{statement}"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nprint(json.dumps(sorted(set(sys.modules) - before)))"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_the_first_import_brings_nothing_heavy_beside_torch() -> None:
    loaded = imported_by("from drivetrain import Accelerator, Trainer")
    assert "drivetrain.accelerator.accelerator" in loaded
    assert loaded & HEAVY == set()


FIT = """
import torch
from drivetrain import Task, Trainer
class First(Task):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
    def training_step(self, batch, batch_idx):
        loss = self.layer(batch).mean()
        self.log("loss", loss, prog_bar=True)
        return loss
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.layer(batch).mean())
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())
batches = torch.utils.data.DataLoader(torch.ones(4, 1), batch_size=2)
trainer = Trainer(accelerator="cpu", max_steps=2, logger=False, enable_checkpointing=False)
trainer.fit(First(), batches, batches)
assert trainer.global_step == 2
"""
UNUSED = {"matplotlib", "pandas", "rich", "sklearn", "tensorboard", "torchmetrics", "torchvision", "transformers"}


def test_a_run_imports_none_of_the_packages_that_it_does_not_use() -> None:
    loaded = imported_by(FIT)
    assert "drivetrain.trainer.loops.fit_loop" in loaded
    assert loaded & UNUSED == set()
