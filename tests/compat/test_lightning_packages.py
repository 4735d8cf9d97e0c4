"""What packages for Lightning read of its Trainer, each in a small stand-in."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PathDistribution
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.compat.aliases import STAND_INS
from drivetrain.compat.lightning.fabric.utilities.cloud_io import get_filesystem
from drivetrain.compat.lightning.pytorch import Trainer
from drivetrain.compat.lightning.pytorch.callbacks.progress.progress_bar import get_standard_metrics
from drivetrain.compat.lightning.pytorch.core import saving
from drivetrain.compat.lightning.pytorch.demos.boring_classes import BoringModel
from drivetrain.compat.lightning.pytorch.loggers import CSVLogger
from drivetrain.compat.lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector
from drivetrain.compat.lightning.pytorch.utilities.rank_zero import rank_prefixed_message


def quiet(**options: Any) -> Any:
    settings = {"max_epochs": 1, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    limits = {"limit_train_batches": 2, "limit_val_batches": 1, "limit_predict_batches": 1}
    return Trainer(**{"accelerator": "cpu", "enable_model_summary": False, **settings, **limits, **options})


class MonitorsWhatThereIs(BoringModel):
    """Monitors the validation's loss where there is one, as forecasting packages do."""

    def configure_optimizers(self) -> Any:
        source = self.trainer.fit_loop.epoch_loop.val_loop._data_source
        self.monitor = "val_loss" if source.is_defined() else "train_loss"
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_configure_optimizers_sees_whether_there_is_validation_data() -> None:
    model = MonitorsWhatThereIs()
    quiet().fit(model)
    assert model.monitor == "val_loss"


def test_configure_optimizers_sees_that_there_is_no_validation_data() -> None:
    model = MonitorsWhatThereIs()
    model.val_dataloader = None
    quiet().fit(model)
    assert model.monitor == "train_loss"


def test_before_any_verb_no_loop_has_data() -> None:
    assert not quiet().validate_loop._data_source.is_defined()


class CountsBatches(BoringModel):
    def configure_optimizers(self) -> Any:
        if self.trainer.train_dataloader is None:
            _ = self.trainer.estimated_stepping_batches
        self.batches = self.trainer.num_training_batches
        return super().configure_optimizers()


def test_configure_optimizers_may_ask_for_the_batches_of_an_epoch() -> None:
    model = CountsBatches()
    quiet(limit_train_batches=3).fit(model)
    assert model.batches == 3


def test_the_signature_names_no_argument_that_lightning_does_not_have() -> None:
    # In a process of its own: Lightning's command line, which another test may have imported, shows them all.
    script = "import inspect; from drivetrain.compat.lightning.pytorch import Trainer; "
    script += "print(*inspect.signature(Trainer.__init__).parameters)"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    names = set(ran.stdout.split())
    assert {"accelerator", "max_epochs", "plugins"} <= names
    assert not {"seed", "num_workers", "on_interrupt"} & names


def test_options_of_predict_may_be_given_by_their_places() -> None:
    model = BoringModel()
    assert len(quiet().predict(model, model.predict_dataloader(), None, None, None)) == 1
    assert quiet().predict(model, model.predict_dataloader(), None, False) is None


@pytest.mark.parametrize(("devices", "expected"), [("auto", 1), (2, 2)])
def test_devices_are_parsed_without_a_trainer(devices: Any, expected: Any) -> None:
    connector = _AcceleratorConnector(accelerator="cpu", devices=devices)
    assert (connector._accelerator_flag, connector._devices_flag) == ("cpu", expected)
    assert connector.parallel_devices[0] == torch.device("cpu")


class LoadsInItsOwnWay(BoringModel):
    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, **kwargs: Any) -> Any:
        model = saving._load_from_checkpoint(cls, checkpoint_path, "cpu", None, False, **kwargs)
        model.own_way = True
        return model


def test_a_module_may_load_checkpoints_in_its_own_way(tmp_path: Path) -> None:
    trainer, model = quiet(), LoadsInItsOwnWay()
    trainer.fit(model)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    again = LoadsInItsOwnWay.load_from_checkpoint(tmp_path / "one.ckpt")
    assert again.own_way
    assert torch.equal(again.layer.weight, model.layer.weight)


def test_bars_of_packages_begin_with_the_version_of_the_logger(tmp_path: Path) -> None:
    assert get_standard_metrics(quiet(logger=CSVLogger(tmp_path, version=3))) == {"v_num": 3}
    assert get_standard_metrics(quiet()) == {}


def test_small_tools_are_where_packages_import_them_from() -> None:
    assert saving.get_filesystem is get_filesystem
    assert rank_prefixed_message("over", 1) == "[rank: 1] over"
    assert rank_prefixed_message("over", None) == "over"


@pytest.mark.parametrize(("name", "owner"), [("accelerate", "huggingface"), ("lightning", "Lightning-AI")])
def test_a_stand_in_names_the_owner_that_packages_check(name: str, owner: str) -> None:
    [folder] = (STAND_INS / name).glob(f"{name}-*.dist-info")
    metadata = PathDistribution(folder).metadata
    assert metadata["Name"] == name
    assert owner in metadata["Home-page"]
