"""A room that can be taken out leaves a package that imports, trains and keeps its floors."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pool import ROOT

# By room: its files. `compat` is the top floor, which may import any other: what of it mirrors a room goes with that.
ROOMS = {
    "compat": ["compat"],
    "inference": ["inference", "planning"],
    "planning": ["planning"],
    "verification": ["verification"],
    "deepspeed": ["strategies/deepspeed"],
    "megatron": ["strategies/megatron", "trainer/megatron_task.py"],
    "xla": ["strategies/xla"],
    "ray": ["launch/ray_launcher.py"],
    "trackers": [
        f"trackers/{name}.py"
        for name in ("aim", "clearml", "comet", "dvclive", "mlflow", "swanlab", "tensorboard", "trackio", "wandb")
    ],
}
ROOMS["all"] = list(dict.fromkeys(path for paths in ROOMS.values() for path in paths))

TRAIN = """
import importlib, json, pkgutil, sys
import drivetrain, torch
from torch.utils.data import DataLoader, TensorDataset

missing = []
for module in pkgutil.walk_packages(drivetrain.__path__, "drivetrain."):
    if ".stand_ins" in module.name or module.name.endswith(("__main__", ".ray_launcher")):
        continue
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("drivetrain") and not module.name.startswith("drivetrain.compat"):
            missing.append(f"{module.name}: {error}")

class Fit(drivetrain.Task):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
    def training_step(self, batch, batch_idx):
        loss = self.layer(batch[0]).pow(2).mean()
        self.log("loss", loss)
        return loss
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

trainer = drivetrain.Trainer(max_epochs=1, accelerator="cpu", enable_progress_bar=False)
trainer.fit(Fit(), DataLoader(TensorDataset(torch.ones(8, 2)), 4))
trainer.save_checkpoint("last")
try:
    trainer.save_checkpoint("last.ckpt", format="lightning")
    trainer.fit(Fit(), DataLoader(TensorDataset(torch.ones(8, 2)), 4), ckpt_path="last.ckpt")
    assert drivetrain.checkpoint.is_checkpoint("last.ckpt")
except drivetrain.ConfigurationError as error:
    assert "needs drivetrain.compat.formats.lightning_file, which is not installed" in str(error), error
    missing += [] if not importlib.util.find_spec("drivetrain.compat") else [str(error)]
    torch.save({"state_dict": Fit().state_dict()}, "theirs.ckpt")
    try:
        drivetrain.import_checkpoint("theirs.ckpt", "ours")
    except drivetrain.CheckpointError as error:
        assert "The formats lightning, accelerate" in str(error) and "Install drivetrain again" in str(error), error
print(json.dumps([missing, trainer.global_step, hasattr(drivetrain, "CSVLogger")]))
"""


@pytest.mark.parametrize("room", ROOMS)
def test_without_a_room_the_rest_imports_trains_and_keeps_its_floors(tmp_path: Path, room: str) -> None:
    package = shutil.copytree(
        ROOT / "drivetrain", tmp_path / "drivetrain", ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for path in ROOMS[room]:
        gone = package / path
        shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    trained = subprocess.run(
        [sys.executable, "-c", TRAIN], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert trained.returncode == 0, trained.stderr
    assert json.loads(trained.stdout.splitlines()[-1]) == [[], 2, True]
    floors = "from importlinter.cli import lint_imports_command as run; run()"
    command = [sys.executable, "-c", floors, "--no-cache", "--no-logo"]
    linted = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert linted.returncode == 0, linted.stdout
