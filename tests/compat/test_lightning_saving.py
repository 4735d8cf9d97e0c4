"""What the mirror's Trainer and its `ModelCheckpoint` write: files, as Lightning's."""

from __future__ import annotations

import logging
import os
import warnings
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import drivetrain
from drivetrain import CheckpointError, checkpoint
from drivetrain.compat.lightning import pytorch as pl
from drivetrain.compat.lightning.pytorch.callbacks import ModelCheckpoint
from drivetrain.compat.lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Logs(BoringModel):
    """Logs the next of its values once each validation."""

    def __init__(self, *values: float) -> None:
        super().__init__()
        self.values = values

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.values[self.current_epoch])


def fit(root: Path, model: Any, *callbacks: Any, resume: Any = None, **options: Any) -> Any:
    settings = QUIET | {"limit_train_batches": 2, "limit_val_batches": 1, "num_sanity_val_steps": 0, "max_epochs": 3}
    trainer = pl.Trainer(default_root_dir=root, callbacks=list(callbacks), **{**settings, **options})
    trainer.fit(model, ckpt_path=resume)
    return trainer


def test_the_usual_checkpoint_is_a_file_that_torch_opens(tmp_path: Path) -> None:
    trainer = fit(tmp_path, BoringModel())
    path = trainer.checkpoint_callback.best_model_path
    assert path == str(tmp_path / "checkpoints" / "epoch=2-step=6.ckpt")
    found = torch.load(path, weights_only=True)
    assert (found["epoch"], found["global_step"]) == (2, 6)
    state = found["callbacks"][trainer.checkpoint_callback.state_key]
    assert state["best_model_path"] == path
    assert trainer.checkpoint_callback.state_key.startswith("ModelCheckpoint{'monitor': None, 'mode': 'min', ")


def test_the_best_files_stay_and_the_rest_go(tmp_path: Path) -> None:
    saving = ModelCheckpoint(tmp_path, "{epoch}", monitor="val_loss", save_top_k=2, save_last=True)
    fit(tmp_path, Logs(2.0, 3.0, 1.0), saving)
    assert sorted(os.listdir(tmp_path)) == ["epoch=0.ckpt", "epoch=2.ckpt", "last.ckpt"]
    assert saving.best_k_models == {str(tmp_path / f"epoch={n}.ckpt"): torch.tensor(v) for n, v in ((0, 2.0), (2, 1.0))}
    assert (saving.best_model_score, saving.kth_value) == (1.0, 2.0)
    assert os.path.isfile(saving.last_model_path)


def test_last_is_a_link_to_the_newest_file(tmp_path: Path) -> None:
    saving = ModelCheckpoint(tmp_path, "{epoch}", save_last="link")
    fit(tmp_path, BoringModel(), saving)
    assert os.readlink(tmp_path / "last.ckpt") == "epoch=2.ckpt"
    assert sorted(os.listdir(tmp_path)) == ["epoch=2.ckpt", "last.ckpt"]


def test_a_resumed_run_continues_the_account_of_its_files(tmp_path: Path) -> None:
    def saving() -> ModelCheckpoint:
        return ModelCheckpoint(tmp_path, "{epoch}", monitor="val_loss", save_last=True)

    fit(tmp_path, Logs(1.0, 2.0), saving(), max_epochs=2)
    again = saving()
    trainer = fit(tmp_path, Logs(1.0, 2.0, 0.5), again, resume=tmp_path / "last.ckpt")
    assert (trainer.current_epoch, trainer.global_step) == (3, 6)
    assert sorted(os.listdir(tmp_path)) == ["epoch=2.ckpt", "last.ckpt"]
    assert again.best_model_score == 0.5


def test_what_another_tool_wrote_is_neither_replaced_nor_removed(tmp_path: Path) -> None:
    for name in ("epoch=0.ckpt", "last.ckpt"):
        torch.save({"theirs": 1}, tmp_path / name)
    fit(tmp_path, BoringModel(), ModelCheckpoint(tmp_path, "{epoch}", save_last=True), max_epochs=2)
    assert sorted(os.listdir(tmp_path)) == ["epoch=0.ckpt", "epoch=1.ckpt", "last-v1.ckpt", "last.ckpt"]
    assert torch.load(tmp_path / "last.ckpt", weights_only=True) == {"theirs": 1}


def test_nan_counts_as_the_worst_value(tmp_path: Path) -> None:
    saving = ModelCheckpoint(tmp_path, monitor="val_loss")
    fit(tmp_path, Logs(float("nan")), saving, max_epochs=1)
    assert saving.best_model_score == float("inf")


def test_the_core_s_trainer_writes_directories_still(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = drivetrain.Trainer(accelerator="cpu", max_steps=1, default_root_dir=tmp_path, **settings)
    trainer.fit(BoringModel())
    assert os.path.isdir(trainer.checkpoint_callback.best_model_path)


@pytest.mark.parametrize("kind", ["drivetrain", "lightning"])
def test_a_format_can_be_chosen(tmp_path: Path, kind: str) -> None:
    trainer = fit(tmp_path, BoringModel(), max_epochs=1, enable_checkpointing=False)
    trainer.save_checkpoint(tmp_path / "x.ckpt", format=kind)
    assert os.path.isfile(tmp_path / "x.ckpt") == (kind == "lightning")


class Saved(BoringModel):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = {"table": torch.arange(3)}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.table: Tensor = checkpoint["mine"]["table"]


def test_what_a_hook_adds_is_in_the_file_under_its_own_name(tmp_path: Path) -> None:
    path = fit(tmp_path, Saved(), max_epochs=1).checkpoint_callback.best_model_path
    assert torch.load(path, weights_only=True)["mine"]["table"].tolist() == [0, 1, 2]
    assert Saved.load_from_checkpoint(path).table.tolist() == [0, 1, 2]


class TakesAnything(BoringModel):
    def __init__(self, width: int = 1, **kwargs: Any) -> None:
        super().__init__()
        self.given = width, kwargs

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["hyper_parameters"] = {"width": 3, "depth": 2}
        checkpoint["hparams_name"] = "kwargs"


def test_hyper_parameters_under_the_name_of_the_keyword_arguments_are_given_one_by_one(tmp_path: Path) -> None:
    path = fit(tmp_path, TakesAnything(), max_epochs=1).checkpoint_callback.best_model_path
    assert TakesAnything.load_from_checkpoint(path).given == (3, {"depth": 2})


# objects, which Lightning pickles


@dataclass
class Scaler:
    mean: float


class Trap:
    """Makes a directory where it is unpickled."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (self.folder,)


class SavesObject(BoringModel):
    added: Any = Scaler(0.5)

    def __init__(self, scaler: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["scaler"] = self.added
        checkpoint["hyper_parameters"]["first"] = self.added

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.found = checkpoint["scaler"], checkpoint["hyper_parameters"]["first"]


@pytest.fixture(scope="module")
def with_object(tmp_path_factory: pytest.TempPathFactory) -> str:
    saving = ModelCheckpoint(filename="{epoch}", save_top_k=1)
    trainer = fit(tmp_path_factory.mktemp("objects"), SavesObject(abs), saving)
    assert os.listdir(os.path.dirname(saving.best_model_path)) == ["epoch=2.ckpt"]  # the older ones are gone
    return str(trainer.checkpoint_callback.best_model_path)


def test_an_object_that_a_hook_adds_is_in_the_file_as_lightning_writes_it(with_object: str) -> None:
    found = torch.load(with_object, weights_only=False)
    assert (found["scaler"], found["hyper_parameters"]) == (Scaler(0.5), {"scaler": abs, "first": Scaler(0.5)})
    one = checkpoint.checkpoint_at(with_object)
    assert (one.step, one.world_size, checkpoint.is_checkpoint(with_object)) == (6, 1, True)


def test_a_file_with_objects_opens_where_that_is_asked_for_alone(
    with_object: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for refused in (None, True):
        with pytest.raises(CheckpointError, match=r"holds objects of .*Scaler.*weights_only=False"):
            SavesObject.load_from_checkpoint(with_object, weights_only=refused)
    assert SavesObject.load_from_checkpoint(with_object, weights_only=False).found == (Scaler(0.5), Scaler(0.5))
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    assert SavesObject.load_from_checkpoint(with_object).hparams.scaler is abs
    monkeypatch.delenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")
    monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "1")
    with pytest.raises(CheckpointError, match="Scaler"):
        SavesObject.load_from_checkpoint(with_object, weights_only=False)


def test_a_run_resumes_from_a_file_with_objects_where_that_is_asked_for(with_object: str, tmp_path: Path) -> None:
    trainer = pl.Trainer(default_root_dir=tmp_path, max_epochs=4, limit_train_batches=2, limit_val_batches=0, **QUIET)
    with pytest.raises(CheckpointError, match="Scaler"):
        trainer.fit(SavesObject(), ckpt_path=with_object)
    task = SavesObject()
    trainer.fit(task, ckpt_path=with_object, weights_only=False)
    assert (trainer.global_step, task.found[0]) == (8, Scaler(0.5))
    with pytest.raises(CheckpointError, match="Scaler"):
        trainer.validate(task, ckpt_path=with_object)


def make(folder: str) -> None:
    os.mkdir(folder)


class OwnTrap(Trap):
    def __reduce__(self) -> Any:
        return make, (self.folder,)


class Act(Enum):
    RELU = "relu"


class ObjectsAlone(BoringModel):
    """Has objects among its hyper-parameters, and nowhere else in its checkpoints."""

    def __init__(
        self, act: Any = Act.RELU, kind: type = nn.Tanh, function: Any = torch.relu, given: Any = None
    ) -> None:
        super().__init__()
        self.save_hyperparameters()


class DataWithObject(BoringDataModule):
    def __init__(self, act: Any = Act.RELU) -> None:
        super().__init__()
        self.save_hyperparameters()


def test_objects_among_hyper_parameters_come_back_where_that_is_asked_for(tmp_path: Path) -> None:
    given = {"scaler": [Scaler(0.5)], "made": partial(nn.Linear, 2), "dtype": torch.float16}
    trainer = pl.Trainer(default_root_dir=tmp_path, max_epochs=1, limit_train_batches=2, limit_val_batches=0, **QUIET)
    trainer.fit(ObjectsAlone(given=given), datamodule=DataWithObject())
    path = trainer.checkpoint_callback.best_model_path
    found = torch.load(path, weights_only=False)
    assert found["hyper_parameters"]["given"]["scaler"] == [Scaler(0.5)]
    hparams = ObjectsAlone.load_from_checkpoint(path, weights_only=False).hparams
    assert (hparams.act, hparams.kind, hparams.function) == (Act.RELU, nn.Tanh, torch.relu)
    assert (hparams.given["made"].func, hparams.given["dtype"]) == (nn.Linear, torch.float16)
    assert DataWithObject.load_from_checkpoint(path, weights_only=False).hparams.act is Act.RELU
    with pytest.raises(CheckpointError, match=r"holds objects of .*Act.*weights_only=False"):
        ObjectsAlone.load_from_checkpoint(path)


def test_a_run_resumes_without_the_objects_among_hyper_parameters(tmp_path: Path) -> None:
    path = fit(tmp_path, ObjectsAlone(given=Scaler(0.5)), max_epochs=1).checkpoint_callback.best_model_path
    trainer = pl.Trainer(default_root_dir=tmp_path, max_epochs=2, limit_train_batches=2, limit_val_batches=0, **QUIET)
    task = ObjectsAlone(given=Scaler(1.5))
    trainer.fit(task, ckpt_path=path)
    assert (trainer.global_step, task.hparams.given) == (4, Scaler(1.5))
    trainer.validate(task, ckpt_path=path)


def test_nothing_runs_what_the_hyper_parameters_of_a_file_hold(tmp_path: Path) -> None:
    path = fit(
        tmp_path, ObjectsAlone(given=OwnTrap(str(tmp_path / "made"))), max_epochs=1
    ).checkpoint_callback.best_model_path
    pl.Trainer(default_root_dir=tmp_path, **QUIET).validate(ObjectsAlone(), ckpt_path=path)
    assert not (tmp_path / "made").exists()


def test_the_user_is_warned_of_objects_in_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Added(SavesObject):
        added = torch.nn.Linear(1, 1)

    logging.getLogger("drivetrain").propagate = True
    fit(tmp_path, Added(), max_epochs=1)
    assert [each for each in caplog.messages if "hold objects of" in each and "torch.nn" in each]


def test_nothing_runs_what_a_file_holds_unless_asked(tmp_path: Path) -> None:
    class Added(SavesObject):
        added = Trap(str(tmp_path / "made"))

    path = fit(tmp_path, Added(), max_epochs=1).checkpoint_callback.best_model_path
    assert checkpoint.newest_checkpoint(os.path.dirname(path)) == path
    with pytest.raises(CheckpointError, match="mkdir"):
        drivetrain.Task.load_from_checkpoint(path, weights_only=False)
    assert not (tmp_path / "made").exists()


def test_what_cannot_be_pickled_is_refused(tmp_path: Path) -> None:
    class Added(SavesObject):
        added = staticmethod(lambda: None)

    with pytest.raises(CheckpointError, match="could not be written"):
        fit(tmp_path, Added(), max_epochs=1)
    assert os.listdir(tmp_path / "checkpoints") == []


def test_the_core_refuses_objects(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = drivetrain.Trainer(accelerator="cpu", max_steps=1, default_root_dir=tmp_path, **settings)
    with pytest.raises(CheckpointError, match=r"first is a .*Scaler, which a checkpoint cannot hold.*in its place"):
        trainer.fit(SavesObject())


def test_the_state_of_a_callback_that_no_run_has_used_is_taken_silently(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), warnings.catch_warnings():
        warnings.simplefilter("error")
        saving = ModelCheckpoint()
        saving.load_state_dict(ModelCheckpoint().state_dict())
    assert not caplog.text
    assert saving.best_model_path == ""


# what derived callbacks call and override


class WritesBeside(ModelCheckpoint):
    def _save_checkpoint(self, trainer: Any, filepath: str) -> None:
        super()._save_checkpoint(trainer, filepath)
        Path(f"{filepath}.txt").write_text("beside")


class SavesItself(ModelCheckpoint):
    """Saves by its own rule, by a metric that nothing has logged."""

    def _monitor_candidates(self, trainer: Any) -> dict[str, Any]:
        return {**super()._monitor_candidates(trainer), "own": torch.tensor(float(-trainer.current_epoch))}

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if not self._should_skip_saving_checkpoint(trainer) and self._should_save_on_train_epoch_end(trainer):
            candidates = self._monitor_candidates(trainer)
            if self._every_n_epochs >= 1 and (trainer.current_epoch + 1) % self._every_n_epochs == 0:
                self._save_topk_checkpoint(trainer, candidates)
            self._save_last_checkpoint(trainer, candidates)


def test_a_derived_callback_writes_each_checkpoint_by_its_own_method(tmp_path: Path) -> None:
    fit(tmp_path, Logs(2.0, 3.0, 1.0), WritesBeside(tmp_path, "{epoch}", monitor="val_loss", save_top_k=2))
    found = [path.name for path in sorted(tmp_path.glob("*.txt"))]
    assert found == ["epoch=0.ckpt.txt", "epoch=1.ckpt.txt", "epoch=2.ckpt.txt"]


def test_a_derived_callback_saves_by_its_own_rule_and_metric(tmp_path: Path) -> None:
    saving = SavesItself(tmp_path, "{epoch}-{own:.0f}", monitor="own", save_last=True, every_n_epochs=2)
    fit(tmp_path, BoringModel(), saving, max_epochs=4, limit_val_batches=0)
    assert sorted(os.listdir(tmp_path)) == ["epoch=3-own=-3.ckpt", "last.ckpt"]
    assert (saving.best_model_score, saving._last_global_step_saved) == (-3.0, 8)
