"""Loggers over packages of their own, as scripts written for Lightning use them: with the real packages, offline."""

from __future__ import annotations

import os
import pickle
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drivetrain import ConfigurationError
from drivetrain.compat.lightning.pytorch import Trainer
from drivetrain.compat.lightning.pytorch.demos.boring_classes import BoringModel
from drivetrain.compat.lightning.pytorch.loggers import (
    CometLogger,
    CSVLogger,
    Logger,
    MLFlowLogger,
    TensorBoardLogger,
    WandbLogger,
)
from drivetrain.compat.lightning.pytorch.loggers.checkpoint_uploads import CheckpointUploads
from tests.pool import run_in_processes
from tests.trackers.test_wandb import items, records

packages = pytest.mark.trackers


class Own(Logger):
    """Keeps nothing, and says where it would."""

    def __init__(self, save_dir: Path | None, version: int | str) -> None:
        super().__init__()
        self._save_dir, self._version = save_dir, version

    @property
    def name(self) -> str:  # type: ignore[override]
        return "own"

    @property
    def version(self) -> int | str:
        return self._version

    @property
    def save_dir(self) -> str | None:
        return None if self._save_dir is None else str(self._save_dir)

    def log_metrics(self, metrics: Any, step: int | None = None) -> None: ...

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None: ...


def fit(root: Path, logger: Any, **options: Any) -> Trainer:
    quiet = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False, "max_epochs": 1}
    limits = {"limit_train_batches": 2, "limit_val_batches": 1, "num_sanity_val_steps": 0, "log_every_n_steps": 1}
    trainer = Trainer(default_root_dir=root, logger=logger, **{**quiet, **limits, **options})
    trainer.fit(Logs())
    return trainer


class Logs(BoringModel):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("seen", float(batch_idx))
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(("version", "run"), [(3, "version_3"), ("third", "third")])
def test_checkpoints_are_below_the_loggers_directory_experiment_and_version(
    tmp_path: Path, version: int | str, run: str
) -> None:
    trainer = fit(tmp_path / "root", Own(tmp_path / "logs", version))
    assert trainer.log_dir == str(tmp_path / "logs")
    assert trainer.checkpoint_callback.dirpath == str(tmp_path / "logs" / "own" / run / "checkpoints")


def test_checkpoints_of_a_logger_without_a_directory_are_below_that_of_the_trainer(tmp_path: Path) -> None:
    trainer = fit(tmp_path, Own(None, 0), max_steps=1)
    assert trainer.checkpoint_callback.dirpath == str(tmp_path / "own" / "version_0" / "checkpoints")


def test_loggers_that_write_files_are_loggers() -> None:
    assert all(issubclass(kind, Logger) for kind in (CSVLogger, TensorBoardLogger, WandbLogger, MLFlowLogger))


def test_the_graph_of_a_module_without_a_trainer_is_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    logger, model = TensorBoardLogger(tmp_path, log_graph=True), BoringModel()
    logger.log_graph(model, torch.rand(2, 32))
    logger.save()
    [events] = Path(logger.log_dir).glob("*tfevents*")
    assert b"aten::linear" in events.read_bytes()
    assert model.training  # as before
    with pytest.raises(RuntimeError, match="not attached"):
        _ = model.trainer


@pytest.mark.parametrize("kind", [WandbLogger, MLFlowLogger])
def test_a_missing_package_is_a_missing_module(kind: Any) -> None:
    if find_spec(kind.__name__.removesuffix("Logger").lower()) is not None:
        pytest.skip("the package is installed")
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'drivetrain\["):
        kind()


# which checkpoints are uploaded


def saver(folder: Path, best: str, *names: str, keeps: int = 2, monitor: str | None = "epoch") -> Any:
    """What a logger sees of a `ModelCheckpoint`, with files whose times are their order."""
    paths = []
    for number, name in enumerate(names):
        paths.append(folder / name)
        paths[-1].write_text(name)
        os.utime(paths[-1], (number, number))
    return SimpleNamespace(
        last_model_path="",
        current_score=None,
        best_model_path=str(folder / best),
        best_model_score=1.0,
        best_k_models={str(path): float(number) for number, path in enumerate(paths)},
        monitor=monitor,
        mode="min",
        save_last=False,
        save_top_k=keeps,
        save_weights_only=False,
        every_n_train_steps=None,
    )


def test_each_checkpoint_is_found_once_and_again_when_it_is_written_again(tmp_path: Path) -> None:
    uploads, one = CheckpointUploads("all"), saver(tmp_path, "a", "b", "a")
    found = uploads.after_save(one)
    assert [os.path.basename(each.path) for each in found] == ["b", "a"]
    assert [each.aliases for each in found] == [["latest"], ["latest", "best"]]
    assert [each.metadata["score"] for each in found] == [0, 1]
    assert isinstance(found[0].score, int)  # epochs are counted
    assert uploads.after_save(one) == uploads.at_end() == []
    os.utime(tmp_path / "b", (9, 9))
    assert [each.metadata["original_filename"] for each in uploads.after_save(one)] == ["b"]


def test_checkpoints_are_found_at_the_end_unless_all_are_kept_or_none(tmp_path: Path) -> None:
    one, others = saver(tmp_path, "a", "a", monitor=None), saver(tmp_path, "b", "b", keeps=-1, monitor="loss")
    uploads, none = CheckpointUploads(True), CheckpointUploads(False)
    assert [none.after_save(one), none.at_end()] == [[], []]
    assert uploads.after_save(one) == []
    assert [each.score for each in uploads.after_save(others)] == [0.0]
    assert [os.path.basename(each.path) for each in uploads.at_end()] == ["a"]


# the packages


def test_an_experiment_of_comet_has_the_values_and_stays_open(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("comet_ml", reason="comet_ml is not installed")
    from tests.trackers.test_comet import archives, metrics

    logger = CometLogger(online=False, project_name="digits", offline_directory=str(tmp_path), prefix="own")
    assert "project_name=...) is called project now" in caplog.text
    trainer = fit(tmp_path / "root", logger, enable_checkpointing=False)
    assert (trainer.log_dir, logger.name) == (str(tmp_path), "digits")
    logger.log_metrics({"later": 2.0, "epoch": 1}, step=7)
    assert logger.version == logger.experiment.get_key()
    logger.experiment.end()
    found = metrics(archives(tmp_path)[0][1])
    assert (found["own_seen", 1], found["own_later", 7]) == ((1.0, 0), (2.0, 1))


def write_to_wandb(place: Path) -> tuple[Any, ...]:
    logger = WandbLogger(project="digits", save_dir=place, offline=True, prefix="own", id="first")
    fit(place / "root", logger)
    logger.log_table("rows", ["a"], [[1]], step=3)
    logger.log_hyperparams({"width": 3, "at": place})
    copy = pickle.loads(pickle.dumps(logger))
    found = logger.name, logger.version, logger.save_dir, copy.experiment.id
    logger.experiment.finish()
    return found


@packages
def test_a_run_of_wandb_has_values_media_and_hyper_parameters(tmp_path: Path) -> None:
    # In a process of its own: the package's service writes the rest when that ends.
    [found] = run_in_processes(write_to_wandb, 1, args=(tmp_path,), timeout=150)
    assert found == ("digits", "first", str(tmp_path), "first")
    assert (tmp_path / "digits" / "first" / "checkpoints").is_dir()
    [path] = tmp_path.glob("wandb/offline-run-*-first/*.wandb")
    rows = [items(each.history.item) for each in records(path) if each.WhichOneof("record_type") == "history"]
    assert any({"own-seen": 1.0, "trainer/global_step": 1}.items() <= row.items() for row in rows)
    assert any(row.get("own-rows", {}).get("_type") == "table-file" for row in rows)
    configs = [items(each.config.update) for each in records(path) if each.WhichOneof("record_type") == "config"]
    assert any(each.get("width") == 3 for each in configs)


def test_an_offline_run_of_wandb_uploads_no_checkpoints() -> None:
    if find_spec("wandb") is None:
        pytest.skip("wandb is not installed")
    with pytest.raises(ConfigurationError, match="cannot be uploaded in offline mode"):
        WandbLogger(offline=True, log_model=True)


@packages
def test_a_run_of_mlflow_has_values_parameters_and_checkpoints(tmp_path: Path) -> None:
    place = str(tmp_path / "mlruns")
    logger = MLFlowLogger("digits", save_dir=place, log_model=True, tags={"kind": "test"}, run_name="first")
    trainer = fit(tmp_path / "root", logger)
    logger.log_hyperparams({"long": "x" * 300, "nested": {"width": 3}})
    with pytest.warns(RuntimeWarning, match="special characters in metric name"):
        logger.log_metrics({"a[b]": 1.0}, step=4)
    run = logger.experiment.get_run(logger.run_id)
    assert (run.info.status, run.info.run_name, run.data.tags["kind"]) == ("FINISHED", "first", "test")
    assert (run.data.metrics["seen"], run.data.metrics["a_b_"]) == (1.0, 1.0)
    assert (len(run.data.params["long"]), run.data.params["nested/width"]) == (250, "3")
    assert (logger.save_dir, trainer.log_dir) == (place, place)
    best = Path(trainer.checkpoint_callback.best_model_path)
    assert best.parent == Path(place, logger.experiment_id, logger.run_id, "checkpoints")
    kept = logger.experiment.list_artifacts(logger.run_id, f"model/checkpoints/{best.stem}")
    assert sorted(Path(each.path).name for each in kept) == ["aliases.txt", best.name, "metadata.yaml"]
    copy = pickle.loads(pickle.dumps(logger))
    assert copy.experiment.get_run(copy.run_id).info.run_id == logger.run_id
