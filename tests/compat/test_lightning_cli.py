"""`LightningCLI`: what Lightning's command line has written, and its variables, seeds and names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import drivetrain.compat
from drivetrain import Callback
from drivetrain.compat.lightning.pytorch.demos.boring_classes import BoringModel
from tests.pool import ROOT, run_in_processes

# The keys of a Trainer are all that Lightning 2.6 writes there.
WRITTEN = """# lightning.pytorch==2.6.6
seed_everything: 3
trainer:
  accelerator: cpu
  strategy: auto
  devices: 1
  num_nodes: 1
  precision: null
  logger: false
  callbacks:
  - class_path: lightning.pytorch.callbacks.EarlyStopping
    init_args:
      monitor: x
      strict: false
  fast_dev_run: false
  max_epochs: 1
  min_epochs: null
  max_steps: -1
  min_steps: null
  max_time: null
  limit_train_batches: 2
  limit_val_batches: 1
  limit_test_batches: null
  limit_predict_batches: null
  overfit_batches: 0.0
  val_check_interval: null
  check_val_every_n_epoch: 1
  num_sanity_val_steps: null
  log_every_n_steps: null
  enable_checkpointing: null
  enable_progress_bar: false
  enable_model_summary: false
  accumulate_grad_batches: 1
  gradient_clip_val: null
  gradient_clip_algorithm: null
  deterministic: null
  benchmark: null
  inference_mode: true
  use_distributed_sampler: true
  profiler: null
  detect_anomaly: false
  barebones: false
  plugins: null
  sync_batchnorm: false
  reload_dataloaders_every_n_epochs: 0
  default_root_dir: null
  enable_autolog_hparams: true
  model_registry: null
model:
  class_path: tests.compat.test_lightning_cli.Saved
  init_args:
    width: 5
data: null
optimizer:
  class_path: torch.optim.Adam
  init_args:
    lr: 0.25
lr_scheduler: null
ckpt_path: null
weights_only: null
"""


class Saved(BoringModel):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.width = width


def run_what_lightning_wrote() -> dict[str, Any]:
    drivetrain.compat.install("lightning", "pytorch_lightning", "lightning_fabric")
    from lightning.pytorch import LightningModule
    from lightning.pytorch.cli import LightningCLI

    Path("written.yaml").write_text(WRITTEN)
    made = LightningCLI(args=["fit", "--config", "written.yaml"])
    saved = yaml.safe_load(Path("config.yaml").read_text())
    made.trainer.save_checkpoint("saved")
    again = LightningModule.load_from_checkpoint("saved")
    os.environ["PL_TRAINER__LIMIT_TRAIN_BATCHES"] = "7"
    by_variable = LightningCLI(type(made.model), run=False, args=[], parser_kwargs={"default_env": True})
    return {
        "steps": made.trainer.global_step,
        "learning rate": made.trainer.optimizers[0].defaults["lr"],
        "fused": made.trainer.optimizers[0].param_groups[0]["fused"],
        "seed": os.environ["PL_GLOBAL_SEED"],
        "written again": saved["trainer"]["callbacks"][0]["class_path"],
        "instantiator": made.model.hparams.get("_instantiator"),
        "loaded": [type(again).__name__, again.width],
        "by variable": by_variable.trainer.limit_train_batches,
    }


@pytest.mark.compat
def test_a_configuration_that_lightning_wrote_runs_and_is_written_again_for_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["train.py"])
    [seen] = run_in_processes(run_what_lightning_wrote, 1)
    assert seen == {
        "steps": 2,
        "learning rate": 0.25,
        "fused": None,
        "seed": "3",
        "written again": "lightning.pytorch.callbacks.EarlyStopping",
        "instantiator": "lightning.pytorch.cli.instantiate_module",
        "loaded": ["Saved", 5],
        "by variable": 7,
    }


SHORT = [
    *("--trainer.accelerator=cpu", "--trainer.logger=false", "--trainer.enable_checkpointing=false"),
    *("--trainer.enable_progress_bar=false", "--trainer.limit_train_batches=2", "--trainer.limit_val_batches=0"),
    *("--trainer.max_epochs=1", "--trainer.callbacks=lightning.pytorch.callbacks.EarlyStopping"),
    *("--trainer.callbacks.monitor=x", "--trainer.callbacks.strict=false"),
]


def run_and_save(folder: str, *options: str) -> dict[str, Any]:
    """What our command line has saved of a run under Lightning's name."""
    drivetrain.compat.install("lightning", "pytorch_lightning", "lightning_fabric")
    from lightning.pytorch.cli import LightningCLI
    from lightning.pytorch.demos.boring_classes import BoringModel

    os.chdir(folder)
    LightningCLI(BoringModel, args=["fit", *SHORT, *options])
    return yaml.safe_load(Path("config.yaml").read_text())["trainer"]


def test_what_lightning_has_not_is_saved_where_it_was_set_alone(tmp_path: Path) -> None:
    recorded = json.loads((ROOT / "docs" / "migration" / "lightning_names.json").read_text())
    known = set(recorded["modules"]["lightning"]["Trainer"]["arguments"])
    [saved] = run_in_processes(run_and_save, 1, args=(str(tmp_path),))
    assert set(saved) == known
    (tmp_path / "config.yaml").unlink()
    options = ("--trainer.on_interrupt=return", "--trainer.max_duration=1 epoch", "--trainer.max_epochs=null")
    [saved] = run_in_processes(run_and_save, 1, args=(str(tmp_path), *options))
    assert {name: saved[name] for name in set(saved) - known} == {"on_interrupt": "return", "max_duration": "1 epoch"}


@pytest.mark.compat
def test_lightning_runs_a_configuration_that_we_saved(tmp_path: Path) -> None:
    run_in_processes(run_and_save, 1, args=(str(tmp_path),))
    script = (
        "from lightning.pytorch.cli import LightningCLI\n"
        "from lightning.pytorch.demos.boring_classes import BoringModel\n"
        "made = LightningCLI(BoringModel, save_config_callback=None)\n"
        "print(type(made.trainer).__module__, made.trainer.global_step, made.trainer.early_stopping_callback.monitor)"
    )
    command = [sys.executable, "-c", script, "fit", "--config", "config.yaml"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout.splitlines()[-1] == "lightning.pytorch.trainer.trainer 2 x"


def test_forced_callbacks_and_modules_are_added_under_lightnings_name() -> None:
    from drivetrain.compat.lightning.pytorch.cli import LightningArgumentParser

    class Counting(Callback):
        def __init__(self, upto: int = 3) -> None:
            self.upto = upto

    parser = LightningArgumentParser()
    parser.add_lightning_class_args(Counting, "counting")
    assert parser.callback_keys == ["counting"]
    assert parser.parse_args(["--counting.upt=5"]).counting.upto == 5
