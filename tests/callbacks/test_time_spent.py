"""The sentence about where the time went: from figures, and from runs that really sleep."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from drivetrain import Callback, SpeedMonitor, Trainer
from drivetrain.runtime.timing import TimeSpent
from tests.pool import device
from tests.trainer.tasks import Weight

MANY = 64  # cores


@pytest.mark.parametrize(
    ("spent", "expected"),
    [
        (
            TimeSpent(100, waiting=62, model=38, samples=55_800, workers=0, cores=MANY),
            "62 % of the step waits for data: the loader gives 900 samples/s with 0 workers, the model takes 1,470; "
            "try num_workers=3.",
        ),
        (
            TimeSpent(100, waiting=62, model=38, samples=90_000, workers=4, cores=MANY),
            "62 % of the step waits for data: the loader gives 900 samples/s with 4 workers, the model takes 2,370; "
            "try num_workers=12.",
        ),
        (
            TimeSpent(100, waiting=62, model=38, samples=90_000, workers=4, cores=2),
            "62 % of the step waits for data: the loader gives 900 samples/s with 4 workers, the model takes 2,370; "
            "try num_workers=12. This process has 2 cores: if loading is limited by computing and not by files, make "
            "the dataset cheaper, for example by caching what it computes.",
        ),
        (
            TimeSpent(100, waiting=62, model=38, samples=None, workers=0),
            "62 % of the step waits for data: make the dataset cheaper, for example by caching what it computes, or "
            "give its loader more workers (num_workers).",
        ),
        (
            # A validation is no part of a step.
            TimeSpent(100, waiting=40, model=20, validating=40, samples=4000, workers=None),
            "67 % of the step waits for data: the loader gives 100 samples/s, the model takes 200; make the dataset "
            "cheaper, for example by caching what it computes.",
        ),
        (
            TimeSpent(100, waiting=10, model=50, validating=40),
            "40 % of the time is validation: validate less often (check_val_every_n_epoch, val_check_interval), on "
            "fewer batches (limit_val_batches) or larger ones.",
        ),
        (
            TimeSpent(100, model=70, saving=30),
            "30 % of the time is saving checkpoints: save less often (ModelCheckpoint(every_n_train_steps=...)), or "
            "beside training (async_save=True).",
        ),
        (
            TimeSpent(100, model=60, syncing=40),
            "40 % of the time is waiting for other processes: find the slow one (StragglerMonitor), or exchange "
            "gradients less often (accumulate_grad_batches).",
        ),
        (
            TimeSpent(100, model=60, callbacks={"Fast": 5, "Slow": 35}),
            "35 % of the time is in Slow: make it cheaper, or run it less often.",
        ),
        (
            TimeSpent(100, waiting=5, model=90, validating=5),
            "90 % of the time is the model's own (forward, backward, optimizer), 5 % waits for data: to be faster, "
            "the model must be.",
        ),
        (TimeSpent(0), ""),
    ],
)
def test_a_sentence_names_what_takes_most(spent: TimeSpent, expected: str) -> None:
    assert spent.sentence() == expected


# Runs


class Slow(Dataset[Any]):
    """Samples that take their time."""

    def __init__(self, size: int, seconds: float) -> None:
        self.size, self.seconds = size, seconds
        self.slept = 0.0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> list[torch.Tensor]:
        began = time.perf_counter()
        time.sleep(self.seconds)
        self.slept += time.perf_counter() - began
        return [torch.ones(1)]


class Sleeping(Weight):
    """A model that takes its time.

    Args:
        training: Seconds of a training step.
        validating: Seconds of a validation step.
    """

    def __init__(self, training: float = 0.0, validating: float = 0.0) -> None:
        super().__init__()
        self.seconds = training, validating
        self.slept = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        began = time.perf_counter()
        time.sleep(self.seconds[0])
        self.slept += time.perf_counter() - began
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        time.sleep(self.seconds[1])


class Idling(Callback):
    def on_train_batch_end(self, trainer: Any, task: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        time.sleep(0.02)


MEASURED = pytest.mark.parametrize("measured", ["simple", pytest.param("speed", marks=pytest.mark.slow)])


def sentence_of(
    measured: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], task: Any, loaders: list[Any], **options: Any
) -> str:
    """The last line of a run that has a share of the time."""
    callbacks = [SpeedMonitor()] if measured == "speed" else []
    trainer = Trainer(
        max_epochs=1,
        logger="csv",
        profiler="simple" if measured == "simple" else None,
        callbacks=[*callbacks, *options.pop("callbacks", [])],
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        num_sanity_val_steps=0,
        accelerator=device(),
        default_root_dir=tmp_path,
        **options,
    )
    trainer.fit(task, *loaders)
    return [line for line in capsys.readouterr().out.splitlines() if re.match(r"\d+ % of the ", line)][-1]


@MEASURED
def test_waiting_for_data_is_seen_with_its_rates(measured: str, tmp_path: Path, capsys: Any) -> None:
    data, task = Slow(200, 0.005), Sleeping(training=0.005)
    torch.optim.SGD([torch.zeros(1)])  # the first optimizer of a process imports for seconds
    began = time.perf_counter()
    sentence = sentence_of(measured, tmp_path, capsys, task, [DataLoader(data, batch_size=4)])
    elapsed = time.perf_counter() - began
    found = re.match(
        r"(\d+) % of the step waits for data: the loader gives ([\d.]+) samples/s with 0 workers, "
        r"the model takes ([\d.,]+); try num_workers=(\d+)",
        sentence,
    )
    assert found is not None, sentence
    share, loads, takes, workers = (float(each.replace(",", "")) for each in found.groups())
    # The waiting is what the data set slept, and at most that and what neither of the two did.
    other = elapsed - data.slept - task.slept
    assert data.slept * 0.99 <= 200 / loads <= (data.slept + other) * 1.01
    assert task.slept * 0.99 <= 200 / takes <= (task.slept + other) * 1.01
    assert share == pytest.approx(100 * takes / (loads + takes), abs=3)
    assert abs(workers - takes / loads - 1.5) <= 0.6  # the next whole number, and one more, of rounded rates


@MEASURED
def test_validation_is_seen(measured: str, tmp_path: Path, capsys: Any) -> None:
    loaders = [DataLoader(Slow(4, 0.0)), DataLoader(Slow(10, 0.0))]
    sentence = sentence_of(measured, tmp_path, capsys, Sleeping(validating=0.03), loaders)
    assert re.match(r"\d\d % of the time is validation", sentence), sentence


@pytest.mark.slow
@MEASURED
def test_a_model_that_computes_all_the_time_is_left_alone(measured: str, tmp_path: Path, capsys: Any) -> None:
    sentence = sentence_of(measured, tmp_path, capsys, Sleeping(training=0.15), [DataLoader(Slow(6, 0.0))])
    assert re.match(r"\d\d % of the time is the model's own", sentence), sentence


def test_a_profiler_names_the_slow_callback(tmp_path: Path, capsys: Any) -> None:
    sentence = sentence_of("simple", tmp_path, capsys, Sleeping(), [DataLoader(Slow(10, 0.0))], callbacks=[Idling()])
    assert re.match(r"\d\d % of the time is in Idling: ", sentence), sentence


class SavesSlowly(Sleeping):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        time.sleep(0.05)


class Saving(Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Any, task: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer.save_checkpoint(self.folder / str(batch_idx))


@pytest.mark.parametrize("measured", [pytest.param("simple", marks=pytest.mark.slow), "speed"])
def test_saving_is_seen_and_no_wait_for_data(measured: str, tmp_path: Path, capsys: Any) -> None:
    saving = [Saving(tmp_path / "saves")]
    sentence = sentence_of(measured, tmp_path, capsys, SavesSlowly(), [DataLoader(Slow(3, 0.0))], callbacks=saving)
    assert re.match(r"\d\d % of the time is saving checkpoints", sentence), sentence


@pytest.mark.slow
def test_without_a_profiler_or_a_speed_monitor_there_is_none(tmp_path: Path, capsys: Any) -> None:
    trainer = Trainer(max_epochs=1, logger=False, enable_checkpointing=False, default_root_dir=tmp_path)
    trainer.fit(Sleeping(), DataLoader(Slow(3, 0.01)))
    assert "% of the" not in capsys.readouterr().out
