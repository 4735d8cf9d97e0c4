"""The mirror's `save_hyperparameters`: what scripts written for Lightning read of it, and what reaches a file."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from drivetrain import CheckpointError
from drivetrain.compat.lightning import pytorch as pl
from drivetrain.compat.lightning.pytorch.core.saving import save_hparams_to_yaml
from drivetrain.compat.lightning.pytorch.demos.boring_classes import BoringModel
from drivetrain.compat.lightning.pytorch.loggers import CSVLogger
from tests.compat.test_lightning_saving import fit


class Taking(BoringModel):
    def __init__(self, loss: Any = None, width: int = 2, convert: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()


def test_a_module_is_kept_in_memory_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="'loss' is an instance of `nn.Module` and is already saved"):
        model = Taking(loss=nn.MSELoss())
    assert isinstance(model.hparams.loss, nn.MSELoss)
    assert list(model.hparams_initial) == ["loss", "width", "convert"]


@pytest.mark.filterwarnings("ignore:Attribute 'loss'")
def test_lightnings_files_hold_modules_among_the_hyper_parameters_and_directories_do_not(tmp_path: Path) -> None:
    trainer = fit(tmp_path, Taking(loss=nn.MSELoss()), max_epochs=1)
    trainer.save_checkpoint(tmp_path / "directory", format="drivetrain")
    assert Taking.load_from_checkpoint(tmp_path / "directory").hparams == {"loss": None, "width": 2, "convert": None}
    trainer.save_checkpoint(tmp_path / "x.ckpt", format="lightning")
    assert isinstance(Taking.load_from_checkpoint(tmp_path / "x.ckpt", weights_only=False).hparams.loss, nn.MSELoss)
    trainer.validate(Taking(), ckpt_path=tmp_path / "x.ckpt", verbose=False)


@pytest.mark.filterwarnings("ignore:Attribute 'loss'")
def test_what_is_given_again_need_not_be_unpickled(tmp_path: Path) -> None:
    fit(tmp_path, Taking(loss=nn.MSELoss(), width=3), max_epochs=1).save_checkpoint(tmp_path / "x.ckpt")
    given = nn.L1Loss()
    found = Taking.load_from_checkpoint(tmp_path / "x.ckpt", loss=given).hparams
    assert (found.loss, found.width) == (given, 3)
    with pytest.raises(CheckpointError, match=r"MSELoss.*weights_only=False"):
        Taking.load_from_checkpoint(tmp_path / "x.ckpt", width=4)


@pytest.mark.filterwarnings("ignore:Attribute 'loss'")
def test_no_logger_gets_a_module(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    fit(tmp_path, Taking(loss=nn.MSELoss()), max_epochs=1, logger=logger)
    assert yaml.safe_load((Path(logger.log_dir) / "hparams.yaml").read_text()) == {"width": 2, "convert": None}


def test_what_cannot_be_pickled_is_removed_when_a_run_begins(tmp_path: Path) -> None:
    model = Taking(convert=lambda value: value)
    with pytest.warns(UserWarning, match="'convert' removed from hparams because it cannot be pickled"):
        fit(tmp_path, model, max_epochs=1)
    assert model.hparams == {"loss": None, "width": 2}


def test_arguments_that_the_constructor_does_not_take_are_left_out(tmp_path: Path) -> None:
    fit(tmp_path, Taking(), max_epochs=1).save_checkpoint(tmp_path / "x.ckpt")
    assert Taking.load_from_checkpoint(tmp_path / "x.ckpt", width=3, depth=4).hparams.width == 3


@pytest.mark.parametrize("values", [(3,), (0.5, "width"), (True,)])
def test_a_number_by_itself_is_refused(values: tuple[Any, ...]) -> None:
    class Wrong(BoringModel):
        def __init__(self, width: Any = 0) -> None:
            super().__init__()
            self.save_hyperparameters(*values)

    with pytest.raises(ValueError, match=r"Primitives .* are not allowed"):
        Wrong()


def test_a_part_has_the_arguments_of_what_it_is_made_within_too() -> None:
    class Part(pl.LightningModule):
        def __init__(self, width: int, rate: float) -> None:
            super().__init__()
            self.save_hyperparameters(ignore="rate")

    class Whole(pl.LightningModule):
        def __init__(self, width: int, depth: int, rate: float = 0.5) -> None:
            super().__init__()
            self.part = Part(width + 1, rate)

    assert Whole(2, 3).part.hparams == {"width": 3, "depth": 3}


def test_members_of_an_enum_are_written_by_name_and_what_yaml_has_no_form_for_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "hparams.yaml"
    with pytest.warns(UserWarning, match="Skipping 'kind' parameter"):
        save_hparams_to_yaml(path, {"kind": torch.float32, "verb": pl.trainer.states.RunningStage.TESTING, "width": 2})
    assert yaml.safe_load(path.read_text()) == {"verb": "TESTING", "width": 2}


def test_hyper_parameters_of_plain_values_come_without_a_warning(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Attribute")
        fit(tmp_path, Taking(), max_epochs=1)
