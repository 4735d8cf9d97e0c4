"""Callbacks, and the model of the demos, as scripts written for Lightning use them."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.progress import TextColumn
from torch.utils.data import DataLoader

from drivetrain.callbacks import RichModelSummary
from drivetrain.callbacks import TQDMProgressBar as CoreProgressBar
from drivetrain.compat.lightning.fabric import Fabric
from drivetrain.compat.lightning.fabric.utilities.spike import SpikeDetection, TrainingSpikeException
from drivetrain.compat.lightning.pytorch import Trainer
from drivetrain.compat.lightning.pytorch.callbacks import (
    BasePredictionWriter,
    ProgressBar,
    RichProgressBar,
    ThroughputMonitor,
    TQDMProgressBar,
)
from drivetrain.compat.lightning.pytorch.callbacks import SpikeDetection as SpikeCallback
from drivetrain.compat.lightning.pytorch.callbacks.progress.rich_progress import RichProgressBarTheme
from drivetrain.compat.lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from drivetrain.compat.lightning.pytorch.demos import BoringModel, Transformer
from drivetrain.compat.lightning.pytorch.demos.boring_classes import RandomDataset, RandomIterableDataset
from drivetrain.compat.lightning.pytorch.demos.transformer import sinusoids
from drivetrain.compat.lightning.pytorch.trainer import arguments


def fitted(bar: Any, **options: Any) -> Any:
    limits = {"limit_train_batches": 5, "limit_val_batches": 2, "limit_test_batches": 1, "max_epochs": 2}
    settings = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    callbacks = bar if isinstance(bar, list) else [bar]
    trainer = Trainer(**{**limits, **settings, "callbacks": callbacks, **options})
    trainer.fit(Logs())
    return trainer


class Logs(BoringModel):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("seen", float(batch_idx), prog_bar=True)
        return super().training_step(batch, batch_idx)


# predictions


@pytest.mark.parametrize(("dataset", "places"), [(RandomDataset, [[0, 1], [2]]), (RandomIterableDataset, [None, None])])
def test_the_places_of_a_streams_samples_are_its_own(dataset: Any, places: Any) -> None:
    seen: list[Any] = []

    class Writes(BasePredictionWriter):
        def write_on_batch_end(self, trainer: Any, task: Any, prediction: Any, batch_indices: Any, *_: Any) -> None:
            seen.append(batch_indices)

    options = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False}
    Trainer(callbacks=[Writes("batch")], **options).predict(BoringModel(), DataLoader(dataset(32, 3), batch_size=2))
    assert seen == places


# progress bars


class OwnBars(TQDMProgressBar):
    def init_validation_tqdm(self) -> Tqdm:
        bar = super().init_validation_tqdm()
        bar.set_description("checking", refresh=False)
        return bar

    def get_metrics(self, trainer: Any, pl_module: Any) -> dict[str, Any]:
        return {**super().get_metrics(trainer, pl_module), "own": 7}


class OwnRows(RichProgressBar):
    def configure_columns(self, trainer: Any) -> list[Any]:
        return [TextColumn("own {task.description}"), *super().configure_columns(trainer)]


def test_a_bar_of_tqdm_can_be_read_and_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    bar = OwnBars(refresh_rate=3)
    trainer = fitted(bar)
    assert trainer.progress_bar_callback is bar
    assert (bar.train_progress_bar.n, bar.train_progress_bar.total) == (5, 5)
    assert (bar.val_progress_bar.n, bar.val_progress_bar.total, bar.val_progress_bar.leave) == (2, 2, False)
    assert bar.train_progress_bar.postfix == "seen=4.000, own=7"
    shown = capsys.readouterr().out
    assert "checking" in shown
    assert "Epoch 1: 100%" in shown
    assert [f"Epoch 0:  {share}%" in shown for share in (20, 60)] == [False, True]
    assert pickle.loads(pickle.dumps(bar)).refresh_rate == 3


def test_numbers_beside_a_bar_of_tqdm_keep_their_width() -> None:
    shown = [Tqdm.format_num(number) for number in (1, 1.0, 0.25, 1e-5, "a", 12345.678)]
    assert shown == ["1", "1.000", "0.250", "1e-5", "a", "1.23e+4"]


def test_the_environment_slows_a_bar_of_tqdm_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQDM_MINITERS", "5")
    monkeypatch.delenv("COLAB_GPU", raising=False)
    assert [TQDMProgressBar(rate).refresh_rate for rate in (0, 1, 8)] == [5, 5, 8]
    monkeypatch.setenv("COLAB_GPU", "1")
    assert [TQDMProgressBar(rate).refresh_rate for rate in (1, 8)] == [20, 8]


def test_a_bar_of_rich_has_its_rows_and_columns(capsys: pytest.CaptureFixture[str]) -> None:
    bar = OwnRows(theme=RichProgressBarTheme(metrics_format=".1f"), console_kwargs={"width": 120})
    trainer = fitted(bar)
    sanity, train, val = bar.progress.tasks
    assert [(row.completed, row.total, row.visible) for row in (sanity, train, val)] == [
        (2, 2, False),
        (5, 5, True),
        (2, 2, False),
    ]
    assert (train.description, bar.train_progress_bar) == ("Epoch 1/1", train)
    shown = capsys.readouterr().out
    assert "own Epoch 1/1" in shown
    assert "5/5" in shown
    assert "seen: 4.0" in shown
    assert any(isinstance(each, RichModelSummary) for each in Trainer(callbacks=bar, logger=False).callbacks)
    trainer.test(Logs(), verbose=False)
    assert [row.description for row in bar.progress.tasks] == ["Testing"]
    assert pickle.loads(pickle.dumps(bar)).progress is None


def test_what_the_trainer_shows_by_itself_without_rich_counts_as_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "find_spec", lambda name: None)
    bar = Trainer(accelerator="cpu", logger=False).progress_bar_callback
    assert isinstance(bar, ProgressBar)
    assert isinstance(bar, TQDMProgressBar)
    assert not isinstance(bar, RichProgressBar)
    assert not isinstance(TQDMProgressBar(), CoreProgressBar)


def test_the_usual_bar_can_be_read_and_draws_once_a_pass_where_no_one_looks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arguments, "find_spec", lambda name: None)
    trainer = fitted([])
    bar = trainer.progress_bar_callback
    assert (bar.train_progress_bar.n, bar.train_progress_bar.total) == (5, 5)
    assert (bar.val_progress_bar.n, bar.val_progress_bar.total) == (2, 2)
    shown = capsys.readouterr().out
    assert [f"Epoch 0:  {share}%" in shown for share in (20, 40, 60, 80)] == [False] * 4
    assert "Epoch 0: 100%" in shown
    assert "seen=4.000" in shown


# spikes


def losses(path: Path, values: list[float], **options: Any) -> list[int]:
    """Give losses to a detector. Returns the numbers of those that it raised at."""
    found, detector = [], SpikeDetection(exclude_batches_path=path, **options)
    fabric = Fabric(accelerator="cpu")
    for number, value in enumerate(values):
        try:
            detector.on_train_batch_end(fabric, torch.tensor(value), None, number)
        except TrainingSpikeException as spike:
            found.append(spike.batch_idx)
    return found


@pytest.mark.parametrize(
    ("values", "options", "found"),
    [
        ([1.0, 0.9, 0.8, 3.0, 0.8, 5.0, 0.7], {}, [3, 5]),
        ([1.0, 1.0, 1.5], {"atol": 0.1, "rtol": None}, [2]),
        ([1.0, 1.0, 1.5], {"atol": 0.1, "rtol": 0.9}, []),
        ([1.0, 1.0, 0.1], {"mode": "max", "rtol": 0.5}, [2]),
        ([9.0, 100.0], {"warmup": 2}, []),
        ([1.0, float("nan"), float("-inf"), float("inf")], {}, [1, 2, 3]),
        ([1.0, float("nan"), float("-inf"), 1.0, float("inf")], {"finite_only": False}, [4]),
    ],
)
def test_a_loss_far_from_the_mean_of_the_last_ones_is_a_spike(
    tmp_path: Path, values: list[float], options: dict[str, Any], found: list[int]
) -> None:
    assert losses(tmp_path, values, **options) == found
    written = tmp_path / "skip_batches.json"
    assert (json.loads(written.read_text()) if written.exists() else []) == [n + d for n in found for d in (-1, 0)]


def test_a_spike_ends_a_run(tmp_path: Path) -> None:
    class Spiky(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)["loss"]
            return loss * 0 + (9.0 if batch_idx == 3 else 1.0)

    trainer = Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        callbacks=[SpikeCallback()],
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=tmp_path,
    )
    with pytest.raises(TrainingSpikeException, match="batch 3"):
        trainer.fit(Spiky())
    assert json.loads((tmp_path / "skip_batches.json").read_text()) == [2, 3]


# the demo's model


def test_the_transformer_hides_later_tokens_from_its_decoder() -> None:
    torch.manual_seed(0)
    model = Transformer(vocab_size=11, ninp=8, nhid=8).eval()
    inputs, target = torch.arange(10).reshape(2, 5), torch.arange(10).reshape(2, 5)
    changed = target.clone()
    changed[:, -1] = 10
    before, after = (model(inputs, each).reshape(2, 5, 11) for each in (target, changed))
    assert torch.equal(before[:, :-1], after[:, :-1])
    assert not torch.equal(before[:, -1], after[:, -1])
    assert torch.allclose(before.exp().sum(-1), torch.ones(2, 5))
    assert {name.partition(".")[0] for name in model.state_dict()} == {"embedding", "transformer", "decoder"}


def test_positions_are_sines_and_cosines_at_falling_rates() -> None:
    expected = torch.tensor([3.0, 3.0, 0.03, 0.03])
    assert torch.allclose(
        sinusoids(3, 4, like=torch.zeros(1)), torch.stack((expected.sin(), expected.cos()))[[0, 1] * 2, range(4)]
    )
    with pytest.raises(IndexError, match="takes fewer"):
        Transformer(vocab_size=3, ninp=2, nhid=2).pos_encoder(torch.zeros(1, 5000, 2))


# throughput


class Rows:
    """What has a logger's methods, and is of no logger's class."""

    def __init__(self) -> None:
        self.rows: list[Any] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))


def test_throughput_is_logged_from_the_first_batch_on_and_without_validations(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 3.0, 10.0, 12.0, 14.0, 16.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    kept: Any = Rows()
    monitor = ThroughputMonitor(lambda batch: 4, lambda batch: 8, window_size=2, available_flops=10.0)
    model: Any = BoringModel()
    model.flops_per_batch = 6
    options = {"enable_progress_bar": False, "enable_checkpointing": False, "enable_model_summary": False}
    limits = {"limit_train_batches": 2, "limit_val_batches": 1, "num_sanity_val_steps": 1, "max_epochs": 1}
    trainer = Trainer(accelerator="cpu", logger=kept, callbacks=[monitor], log_every_n_steps=1, **options, **limits)
    trainer.fit(model)
    assert trainer.logger is kept
    (_, first), (_, second), (_, checked) = kept.rows
    assert first == {"epoch": 0, "train/time": 1.0, "train/batches": 1, "train/samples": 4, "train/lengths": 8}
    assert (second["train/time"], second["train/device/batches_per_sec"]) == (3.0, 0.5)
    assert (second["train/device/items_per_sec"], second["train/device/mfu"]) == (4.0, pytest.approx(0.3))
    assert checked == {"validate/time": 2.0, "validate/batches": 1, "validate/samples": 4, "validate/lengths": 8}


@pytest.mark.parametrize(("given", "expected"), [("batch", (True, False)), ("batch_and_epoch", (True, True))])
def test_a_writer_of_predictions_shows_when_it_writes(given: str, expected: tuple[bool, bool]) -> None:
    interval = BasePredictionWriter(given).interval
    assert (interval.on_batch, interval.on_epoch, interval == given) == (*expected, True)
