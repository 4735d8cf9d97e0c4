"""What tasks, data modules and callbacks that were written for Lightning count on."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import (
    Callback,
    CheckpointError,
    ConfigurationError,
    DataModule,
    LearningRateMonitor,
    ModelCheckpoint,
    Task,
    Trainer,
)
from drivetrain.trackers import CSVLogger
from drivetrain.trainer.setup import _chosen_devices
from tests.pool import run_in_processes
from tests.simulated.devices import simulated as simulated
from tests.simulated.devices import start
from tests.trainer.tasks import Kept, Weight, fitted, ones, quiet


class Line(Task):
    """One weight, trained towards the batch; it remembers which steps ran."""

    def __init__(self, lr: float = 0.1, **more: Any) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(1, 1)
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = (self.layer(batch[0]) - 1).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.layer.weight.sum())

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("tested", self.layer.weight.sum())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


# steps


class BatchAlone(Line):
    def training_step(self, batch: Any) -> torch.Tensor:  # type: ignore[override]
        return super().training_step(batch, 0)

    def validation_step(self, batch: Any) -> None:  # type: ignore[override]
        self.seen.append("validated")

    def predict_step(self, batch: Any) -> Any:  # type: ignore[override]
        return self.layer(batch[0]).shape


class Iterated(Line):
    takes = 1

    def training_step(self, dataloader_iter: Any) -> torch.Tensor:  # type: ignore[override]
        for _ in range(self.takes):
            batch, batch_idx, dataloader_idx = next(dataloader_iter)
        self.seen.append((batch_idx, dataloader_idx))
        return super().training_step(batch, batch_idx)

    def validation_step(self, dataloader_iter: Any) -> None:  # type: ignore[override]
        self.seen.append([batch_idx for _, (_, batch_idx, _) in zip(range(self.takes), dataloader_iter, strict=False)])

    def predict_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        return [next(dataloader_iter)[1] for _ in range(self.takes)]


def test_a_step_may_take_the_batch_alone() -> None:
    task = BatchAlone()
    trainer = fitted(task, ones(2), ones(1))
    assert trainer.global_step == 2
    assert "validated" in task.seen
    assert trainer.predict(task, ones(1)) == [torch.Size([1, 1])]


def test_a_step_may_take_an_iterator_of_batches_and_ends_the_epoch_where_there_are_no_more() -> None:
    task = Iterated()
    fitted(task, ones(2))
    assert task.seen == [(0, 0), (1, 0)]
    task.takes = 2
    task.seen.clear()
    trainer = fitted(task, ones(4), ones(3), num_sanity_val_steps=0)
    assert task.seen == [(1, 0), (3, 0), [0, 1], [2]]
    assert (trainer.global_step, trainer.progress.total_batches) == (2, 4)
    trainer = fitted(task, ones(5))  # the last batch has none after it
    assert (trainer.global_step, trainer.current_epoch, trainer.progress.total_batches) == (2, 1, 4)
    assert trainer.predict(task, ones(3)) == [[0, 1]]


def test_none_in_the_place_of_a_step_is_no_step() -> None:
    class NoValidation(Line):
        validation_step = None  # type: ignore[assignment]

    trainer = fitted(NoValidation(), ones(1), ones(1))
    assert trainer.global_step == 1
    with pytest.raises(ConfigurationError, match="No `validation_step"):
        trainer.validate(NoValidation(), ones(1))


def test_a_compiled_task_trains_and_logs() -> None:
    task = Line()
    trainer = quiet(max_epochs=1)
    trainer.fit(torch.compile(task, backend="eager"), ones(2))
    assert trainer.task is task
    assert "loss" in trainer.callback_metrics


# where what is


def test_the_trainer_has_the_task_as_its_model_before_the_optimizers_are_built() -> None:
    models: list[Any] = []

    class Looks(Line):
        def configure_optimizers(self) -> Any:
            models.append(self.trainer.model)
            return super().configure_optimizers()

    task = Looks()
    fitted(task, ones(1))
    assert models == [task]


def test_the_trainer_shows_the_users_loaders_and_the_last_batch() -> None:
    last: list[int] = []

    class Watch(Callback):
        def on_train_batch_start(self, trainer: Trainer, task: Task, batch: Any, batch_idx: int) -> None:
            if trainer.is_last_batch:
                last.append(batch_idx)

    train, val = ones(3), ones(1)
    trainer = quiet(Watch(), max_epochs=2, limit_train_batches=2, num_sanity_val_steps=0)
    trainer.fit(Line(), train, val)
    assert (trainer.train_dataloader, trainer.val_dataloaders) == (train, val)
    assert last == [1, 1]
    assert (trainer.num_devices, trainer.num_nodes) == (1, 1)


# values


def test_a_callback_logs_by_itself() -> None:
    class Logs(Callback):
        def on_train_batch_end(self, *arguments: Any) -> None:
            self.log("own", 2.0)
            self.log_dict({"other": 3.0})

    callback = Logs()
    trainer = fitted(Line(), ones(1), callbacks=callback)
    assert (float(trainer.callback_metrics["own"]), float(trainer.callback_metrics["other"])) == (2.0, 3.0)
    assert not hasattr(callback, "log")


def test_values_are_those_of_the_last_verb() -> None:
    task = Line()
    trainer = fitted(task, ones(1))
    assert set(trainer.callback_metrics) == {"loss"}
    trainer.test(task, ones(1), verbose=False)
    assert set(trainer.callback_metrics) == {"tested"}


def test_metrics_of_a_fit_that_ended_within_an_epoch_begin_again() -> None:
    import torchmetrics

    class Counts(Line):
        def __init__(self) -> None:
            super().__init__()
            self.total = torchmetrics.SumMetric()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.total(1.0)
            self.log("total", self.total, on_step=False, on_epoch=True)
            if batch_idx == 1 and self.trainer.max_epochs == 5:
                raise RuntimeError("enough")
            return super().training_step(batch, batch_idx)

    task = Counts()
    trainer = quiet(max_epochs=5)
    with pytest.raises(RuntimeError, match="enough"):
        trainer.fit(task, ones(3))
    trainer.max_epochs = 1
    trainer.fit(task, ones(3))
    assert float(trainer.callback_metrics["total"]) == 3.0


def test_learning_rates_can_be_watched(tmp_path: Path) -> None:
    best = ModelCheckpoint(tmp_path, monitor="lr-SGD")
    trainer = Trainer(
        max_epochs=1,
        logger=Kept(),
        callbacks=[LearningRateMonitor("epoch"), best],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Line(), ones(1))
    assert best.best_model_score == pytest.approx(0.1)


def test_a_loggers_own_log_metrics_is_called(tmp_path: Path) -> None:
    written: list[Any] = []

    class Own(CSVLogger):
        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            written.append((dict(metrics), step))
            super().log_metrics(metrics, step)

        def log_hyperparams(self, params: Any) -> None:
            written.append(dict(params))
            super().log_hyperparams(params)

    logger = Own(tmp_path)
    fitted(Line(lr=0.5), ones(1), logger=logger, log_every_n_steps=1)
    assert written[0] == {"lr": 0.5}
    assert [step for _, step in written[1:]] == [1]
    assert "loss" in (Path(logger.log_dir) / "metrics.csv").read_text()


# verbs


def test_test_after_fit_takes_the_best_checkpoint_and_says_so(
    tmp_path: Path,
) -> None:
    task = Line()
    saved = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=1, monitor="loss", mode="max")
    trainer = fitted(task, ones(3), callbacks=saved, enable_checkpointing=True)
    now = task.layer.weight.sum().item()
    with pytest.warns(UserWarning, match="best model of the previous `fit`") as warned:
        best = trainer.test(dataloaders=ones(1), verbose=False)[0]["tested"]
    assert best != now
    assert saved.best_model_path in str(warned[0].message)
    assert trainer.test(task, ones(1), verbose=False)[0]["tested"] == best  # the task has these weights now


def test_an_interval_of_validations_counts_for_nothing_where_nothing_is_validated() -> None:
    trainer = fitted(Line(), ones(2), ones(1), val_check_interval=100, limit_val_batches=0)
    assert trainer.global_step == 2


def test_loaders_are_made_again_in_training_without_validation() -> None:
    made: list[int] = []

    class Makes(Line):
        def train_dataloader(self) -> Any:
            made.append(self.current_epoch)
            return ones(1)

    quiet(max_epochs=3, reload_dataloaders_every_n_epochs=1).fit(Makes())
    assert made == [0, 1, 2]


@pytest.mark.parametrize(
    ("given", "count", "numbers"), [([0], 1, [0]), ("0,1", 2, [0, 1]), ("1,", 1, [1]), ("2", 2, None), (-1, -1, None)]
)
def test_devices_are_a_number_or_named(given: Any, count: int, numbers: list[int] | None) -> None:
    assert _chosen_devices(given) == (count, numbers)


@pytest.mark.parametrize("given", [[], [0, 0], "0,x", [True]])
def test_devices_that_cannot_be_are_refused(given: Any) -> None:
    with pytest.raises(ConfigurationError, match="Use different device indices"):
        Trainer(accelerator="cpu", devices=given)


def test_a_named_device_is_one_process() -> None:
    assert quiet(accelerator="cpu", devices=[0]).num_devices == 1


@pytest.mark.parametrize("given", [[3], "1,", [0, 2]])
def test_numbers_that_the_cpu_does_not_have_are_refused(given: Any) -> None:
    with pytest.raises(ConfigurationError, match="is not valid for the CPU"):
        Trainer(accelerator="cpu", devices=given)


def run_on_the_second_device() -> tuple[str, str]:
    start(2)
    before = dict(os.environ)
    task, trainer = Line(), quiet(accelerator="sim", devices=[1], max_epochs=1)
    trainer.fit(task, DataLoader(TensorDataset(torch.ones(4, 1)), batch_size=2))
    assert dict(os.environ) == before
    assert str(Trainer(accelerator="sim", devices=[0]).strategy.topology.device) == "sim:0"
    with pytest.raises(ConfigurationError, match=r"'sim:2' was requested, but this process sees 2"):
        Trainer(accelerator="sim", devices=[2])
    return str(trainer.strategy.topology.device), str(next(task.parameters()).device)


def run_on_devices_in_another_order() -> str:
    start(2)
    return str(quiet(accelerator="sim", devices=[1, 0]).strategy.topology.device)


@pytest.mark.usefixtures("simulated")
def test_named_devices_are_chosen_by_their_number_and_the_environment_stays() -> None:
    assert run_in_processes(run_on_the_second_device, 1) == [("sim:1", "sim:1")]
    assert run_in_processes(run_on_devices_in_another_order, 2) == ["sim:1", "sim:0"]


def test_the_positions_of_a_checkpoint_callbacks_arguments_are_lightnings(tmp_path: Path) -> None:
    made = ModelCheckpoint(tmp_path, None, None, False, None, 1, True, True)
    assert (made.save_on_exception, made.save_weights_only) == (True, True)


# hyper-parameters


def test_hyper_parameters_may_be_saved_before_the_base_is_there() -> None:
    class Early(Task):
        def __init__(self, width: int = 3) -> None:
            self.save_hyperparameters()
            super().__init__()

    assert Early(4).hparams == {"width": 4}


def test_hyper_parameters_of_a_dataclass() -> None:
    @dataclass
    class Data(DataModule):
        size: int = 2
        folder: str = "x"

        def __post_init__(self) -> None:
            super().__init__()
            self.save_hyperparameters(ignore="folder")

    assert Data(5).hparams == {"size": 5}


def test_what_one_class_ignores_is_forgotten() -> None:
    class Child(Line):
        def __init__(self, lr: float, secret: int, width: int) -> None:
            super().__init__(lr)
            self.save_hyperparameters(ignore=["secret"])

    assert Child(0.1, 1, 2).hparams == {"lr": 0.1, "width": 2}


def test_modules_are_left_out_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    task = Line(0.1, net=nn.Linear(1, 1))
    assert task.hparams == {"lr": 0.1}
    assert "does not save 'net', because it is a module" in caplog.text


def test_a_data_module_has_hyper_parameters_which_are_logged_and_saved(tmp_path: Path) -> None:
    class Data(DataModule):
        def __init__(self, size: int = 2, folder: str = "x") -> None:
            self.save_hyperparameters()

        def train_dataloader(self) -> Any:
            return ones(self.hparams.size)

    kept = Kept()
    trainer = quiet(max_epochs=1, logger=kept)
    trainer.fit(Line(), datamodule=Data(size=3))
    assert trainer.global_step == 3
    assert kept.configuration == {"size": 3, "folder": "x", "lr": 0.1}
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    assert Data.load_from_checkpoint(tmp_path / "x.ckpt", folder="y").hparams == {"size": 3, "folder": "y"}


def test_a_data_module_of_datasets() -> None:
    data = DataModule.from_datasets(ones(4).dataset, [ones(2).dataset, ones(1).dataset], batch_size=2)
    trainer = quiet(max_epochs=1)
    trainer.fit(Line(), data)
    assert (trainer.global_step, trainer.num_val_batches) == (2, [1, 1])


def test_a_task_is_loaded_with_hyper_parameters_of_a_file_and_others_given(tmp_path: Path) -> None:
    task = Line(0.3)
    trainer = fitted(task, ones(1))
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    (tmp_path / "hparams.yaml").write_text("lr: 0.7\nwidth: 2\n")
    loaded = Line.load_from_checkpoint(tmp_path / "x.ckpt", hparams_file=tmp_path / "hparams.yaml", weights_only=True)
    assert loaded.hparams == {"lr": 0.7, "width": 2}
    assert torch.equal(loaded.layer.weight, task.layer.weight)
    assert Line.load_from_checkpoint(tmp_path / "x.ckpt", lr=0.9).hparams == {"lr": 0.9}
    with pytest.raises(CheckpointError, match="is not a YAML or CSV file"):
        Line.load_from_checkpoint(tmp_path / "x.ckpt", hparams_file=tmp_path / "none.yaml")


def test_a_task_that_took_its_hyper_parameters_as_one_argument_gets_them_so(tmp_path: Path) -> None:
    class Configured(Weight):
        def __init__(self, config: dict[str, float]) -> None:
            super().__init__()
            self.save_hyperparameters(config)
            self.rate = config["rate"]

    trainer = fitted(Configured({"rate": 0.4}), ones(1))
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    assert Configured.load_from_checkpoint(tmp_path / "x.ckpt").rate == 0.4
