from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import sys
import termios
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drivetrain import ConfigurationError
from drivetrain.callbacks import ModelCheckpoint, TQDMProgressBar
from drivetrain.callbacks.progress_bar import LineDisplay, Stage, fit_line, share_done, to_numbers
from tests.callbacks.tasks import Scripted, fit, numbers
from tests.pool import run_in_processes


class Terminal:
    """A real terminal as stdout, and what was written to it."""

    def __init__(self, columns: int = 100) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("4H", 24, columns, 0, 0))
        self.stdout = os.fdopen(slave, "w", encoding="utf-8")
        self._read: list[bytes] = []
        self._reader = threading.Thread(target=self._drain, daemon=True)
        self._reader.start()

    def _drain(self) -> None:
        while True:
            try:
                chunk = os.read(self._master, 65536)
            except OSError:  # what Linux says once the other end is closed
                return
            if not chunk:
                return
            self._read.append(chunk)

    def __enter__(self) -> Terminal:
        self._before, sys.stdout = sys.stdout, self.stdout
        return self

    def __exit__(self, *_: object) -> None:
        sys.stdout = self._before
        self.stdout.close()
        self._reader.join(10)
        self.shown = b"".join(self._read).decode()


def run(root: Path, bar: TQDMProgressBar, epochs: int = 2, **options: Any) -> None:
    fit(Scripted([1.0] * 99), root, epochs, [bar], enable_progress_bar=True, **options)


def test_in_a_file_there_is_one_line_for_each_epoch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, TQDMProgressBar(), num_sanity_val_steps=1)
    first, *lines, why, _checkpoint = capsys.readouterr().out.splitlines()
    assert first.startswith("Training Scripted: ")  # the Trainer's own, as the last two
    assert why.startswith("Done: ")
    pattern = r"Epoch {}/1: 2 batches in [\d.]+ s \([\d.e+]+ it/s\){}, train_loss=[\d.e-]+"
    assert len(lines) == 2
    for epoch, line in enumerate(lines):
        left = r", [\d.]+ s left in all" if epoch == 0 else ""
        assert re.fullmatch(pattern.format(epoch, left), line), line


def test_a_value_that_a_callback_monitors_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    callbacks = [TQDMProgressBar(), ModelCheckpoint(tmp_path, monitor="val_loss")]
    options = {"enable_progress_bar": True, "enable_checkpointing": True}
    fit(Scripted([0.75]), tmp_path, 1, callbacks, **options)
    assert "val_loss=0.750" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("max_epochs", "max_steps", "duration", "share"),
    [
        *[(4, -1, 0.0, 0.375), (-1, 20, 0.0, 0.5), (4, 20, 0.0, 0.5), (4, 10, 0.0, 1.0), (-1, -1, 0.0, 0.0)],
        *[(-1, -1, 0.25, 0.25), (4, -1, 0.25, 0.375), (4, -1, 0.5, 0.5)],
    ],
)
def test_the_share_that_is_done_is_that_of_the_nearest_limit(
    max_epochs: int, max_steps: int, duration: float, share: float
) -> None:
    control = SimpleNamespace(share_of_duration=duration)
    trainer = SimpleNamespace(
        max_epochs=max_epochs, max_steps=max_steps, current_epoch=1, global_step=10, control=control
    )
    assert share_done(trainer, 0.5) == share  # type: ignore[arg-type]


@pytest.mark.parametrize("limit", ["32 samples", "0.5 s"])
def test_the_time_left_is_known_by_a_limit_of_samples_or_time(
    limit: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, TQDMProgressBar(), epochs=-1, max_duration=limit, validate=False)
    first = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("Epoch 0"))
    assert re.search(r", [\d.]+ s left in all", first), first


def test_a_terminal_sees_the_time_that_the_whole_run_still_takes(tmp_path: Path) -> None:
    with Terminal() as terminal:
        run(tmp_path, TQDMProgressBar(leave=True, refresh_seconds=0.0))
    assert re.search(r"Epoch 0/1: 100%\|.*train_loss=[\d.e-]+, [\d.]+ s left in all\]", terminal.shown)


def test_what_the_task_logs_when_an_epoch_ends_is_in_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class AtTheEnd(Scripted):
        def on_train_epoch_end(self) -> None:
            self.log("at_the_end", float(self.current_epoch + 7), prog_bar=True)

    fit(AtTheEnd([1.0] * 9), tmp_path, 2, [TQDMProgressBar()], enable_progress_bar=True)
    _, *lines = capsys.readouterr().out.splitlines()
    assert ["at_the_end=7.000" in lines[0], "at_the_end=8.000" in lines[1]] == [True, True]


def test_a_long_epoch_in_a_file_has_a_line_every_so_often(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.perf_counter()
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    display = LineDisplay(refresh_seconds=0.0)
    stage = Stage("Epoch 0", [100])
    stage.started -= 10
    stage.done = 20
    display.draw(stage, {"loss": 0.25})
    assert capsys.readouterr().out == "Epoch 0: 20/100 batches, 2 it/s, 40 s left, loss=0.250\n"


def test_what_was_done_before_a_resume_makes_no_rate(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.perf_counter()
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    display = LineDisplay(refresh_seconds=0.0)
    stage = Stage("Epoch 0", [100], before=60)
    stage.started -= 10
    stage.done = 80
    display.draw(stage, {})
    stage.done = 100
    display.finish(stage, {})
    assert capsys.readouterr().out == (
        "Epoch 0: 80/100 batches, 2 it/s, 10 s left\nEpoch 0: 100 batches in 10 s (4 it/s)\n"
    )


def test_the_bar_of_an_epoch_that_is_resumed_begins_where_the_run_was() -> None:
    bar, trainer = TQDMProgressBar(refresh_seconds=0.0), Run()
    trainer.progress.batches_in_epoch = 7_500
    with Terminal() as terminal:
        bar.setup(trainer, None, "fit")  # type: ignore[arg-type]
        bar.on_train_epoch_start(trainer, None)  # type: ignore[arg-type]
        bar.teardown(trainer, None, "fit")  # type: ignore[arg-type]
    assert "75%" in terminal.shown
    assert "7500/10000" in terminal.shown


def test_on_a_terminal_the_bar_ends_with_all_batches_and_their_values(tmp_path: Path) -> None:
    with Terminal() as terminal:
        run(tmp_path, TQDMProgressBar(leave=True), num_sanity_val_steps=1)
    final = [part for part in re.split(r"[\r\n]+", terminal.shown) if "100%" in part and part.startswith("Epoch")]
    assert any(part.startswith("Epoch 0/1: 100%") for part in final)
    assert re.search(r"Epoch 1/1: 100%\|.*\| 2/2 \[.*it/s, train_loss=[\d.e-]+\]", final[-1])
    assert re.search(r"Sanity check: +0%.*0/1", terminal.shown)
    assert re.search(r"Validation: +0%.*0/1", terminal.shown)


class Run:
    """What the bar asks of a Trainer, for a loop whose steps cost nothing."""

    is_global_zero, max_epochs, current_epoch, num_training_batches, task = True, 1, 0, 10_000, None
    global_step = 10_000

    def __init__(self) -> None:
        self.reads = 0
        self.progress = SimpleNamespace(batches_in_epoch=0)
        self.logged = SimpleNamespace(copy_step_values=lambda: None)

    @property
    def progress_bar_metrics(self) -> dict[str, Any]:
        self.reads += 1
        return {"loss": torch.tensor(0.5)}


def test_the_bar_is_redrawn_on_a_clock_and_reads_tensors_only_then() -> None:
    bar, trainer = TQDMProgressBar(refresh_seconds=0.002), Run()
    with Terminal() as terminal:
        bar.setup(trainer, None, "fit")  # type: ignore[arg-type]
        bar.on_train_epoch_start(trainer, None)  # type: ignore[arg-type]
        started = time.perf_counter()
        for index in range(10_000):
            bar.on_train_batch_end(trainer, None, None, None, index)  # type: ignore[arg-type]
        seconds = time.perf_counter() - started
        assert trainer.reads <= seconds / 0.002 + 1
        bar.on_train_epoch_end(trainer, None)  # type: ignore[arg-type]
        bar.teardown(trainer, None, "fit")  # type: ignore[arg-type]
    assert "10000/10000" in terminal.shown


def test_a_terminal_that_does_not_know_its_width_shows_the_bar() -> None:
    bar, trainer = TQDMProgressBar(), Run()
    with Terminal(columns=0) as terminal:
        bar.setup(trainer, None, "fit")  # type: ignore[arg-type]
        bar.on_train_epoch_start(trainer, None)  # type: ignore[arg-type]
        bar.teardown(trainer, None, "fit")  # type: ignore[arg-type]
    assert "Epoch 0/0:   0%|" in terminal.shown


def test_a_batch_between_two_redraws_asks_the_clock_and_does_nothing_else() -> None:
    bar = TQDMProgressBar(refresh_seconds=1000)
    with Terminal():
        bar.setup(Run(), None, "fit")  # type: ignore[arg-type]
    calls: list[str] = []

    def note(frame: Any, event: str, function: Any) -> None:
        if event in ("call", "c_call"):
            calls.append(function.__name__ if event == "c_call" else frame.f_code.co_name)

    hook = bar.on_train_batch_end
    sys.setprofile(note)
    try:
        hook(None, None, None, None, 1)  # type: ignore[arg-type]
    finally:
        sys.setprofile(None)
    assert calls[:-1] == ["on_train_batch_end", "perf_counter"]  # the last is this function's own setprofile


def test_printed_text_has_a_line_of_its_own(tmp_path: Path) -> None:
    class Talking(Scripted):
        def on_train_epoch_end(self) -> None:
            self.print("hello from the task")

    with Terminal() as terminal:
        fit(Talking([1.0]), tmp_path, 1, [TQDMProgressBar()], enable_progress_bar=True)
    assert re.search(r"(^|[\r\n])hello from the task\r\n", terminal.shown), terminal.shown


@pytest.mark.parametrize("bar", [TQDMProgressBar(refresh_rate=0), "disabled"])
def test_a_bar_turned_off_shows_nothing(bar: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if bar == "disabled":
        bar = TQDMProgressBar()
        bar.disable()
    assert bar.is_disabled
    run(tmp_path, bar)
    first, why, checkpoint = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in (first, why, checkpoint)] == ["Training", "Done:", "No"]  # the Trainer's own
    bar.enable()
    assert bar.is_enabled == (bar.refresh_rate > 0)


def test_numbers_come_in_their_order_whatever_they_are() -> None:
    metrics = {"a": torch.tensor(1.5), "b": 2, "c": torch.tensor(3, dtype=torch.int64), "d": torch.tensor([0.25])}
    assert list(to_numbers(metrics).items()) == [("a", 1.5), ("b", 2), ("c", 3.0), ("d", 0.25)]


def test_negative_rates_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="refresh_rate must be at least 0"):
        TQDMProgressBar(refresh_rate=-1)


def run_on_processes(root: str) -> None:
    run(Path(root), TQDMProgressBar(), epochs=1)


def test_only_the_main_process_shows_progress(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_in_processes(run_on_processes, args=(str(tmp_path),))
    assert capsys.readouterr().out.count("Epoch 0/0:") == 1


def test_a_test_after_training_does_not_show_the_values_of_the_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Tested(Scripted):
        def test_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
            self.log("test_loss", 1.0)

    task = Tested([1.0])
    trainer = fit(task, tmp_path, 1, [TQDMProgressBar()], enable_progress_bar=True)
    trainer.test(task, numbers(8, 4), verbose=False)
    assert re.fullmatch(r"Test: 2 batches in [\d.]+ s \([\d.e+]+ it/s\)", capsys.readouterr().out.splitlines()[-1])


def test_a_subclass_chooses_what_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Own(TQDMProgressBar):
        def get_metrics(self, trainer: Any, task: Any) -> dict[str, Any]:
            return {**super().get_metrics(trainer, task), "width": 16, "phase": "warm"}

    run(tmp_path, Own(), epochs=1)
    assert re.search(r"train_loss=[\d.e-]+, width=16, phase=warm", capsys.readouterr().out)


def test_what_goes_to_another_file_is_not_beside_the_bar(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Talking(Scripted):
        def on_train_epoch_end(self) -> None:
            self.print("to", "errors", file=sys.stderr)

    fit(Talking([1.0]), tmp_path, 1, [TQDMProgressBar()], enable_progress_bar=True)
    out, err = capsys.readouterr()
    assert ("to errors" in out, err.endswith("to errors\n")) == (False, True)


# narrow terminals


class Talkative(Scripted):
    """Logs four values for the bar in each step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        for name in ("accuracy", "perplexity", "gradient_norm"):
            self.log(f"train/{name}", 0.125, prog_bar=True)
        return loss


VALUES = ["train_loss", "train/accuracy", "train/perplexity", "train/gradient_norm"]


def last_lines(columns: int, root: Path, bar: TQDMProgressBar) -> list[str]:
    with Terminal(columns=columns) as terminal:
        fit(Talkative([1.0] * 9), root, 1, [bar], enable_progress_bar=True, validate=False)
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal.shown)
    return [line.rstrip() for line in re.split(r"[\r\n]+", shown) if line.startswith("Epoch 0/0")]


@pytest.mark.parametrize(
    ("columns", "values", "has_bar"), [(200, 4, True), (100, 3, False), (80, 2, False), (60, 1, False)]
)
def test_a_terminal_shows_whole_values(columns: int, values: int, has_bar: bool, tmp_path: Path) -> None:
    last = last_lines(columns, tmp_path, TQDMProgressBar())[-1]
    assert last.startswith("Epoch 0/0: 100%")
    assert "2/2" in last
    assert len(last) <= columns
    assert ("it/s" in last) == has_bar == ("|" in last)
    found = re.findall(r"(\w[\w/]*)=([\d.]+(?:e-?\d+)?)", last)
    assert [name for name, _ in found] == VALUES[:values]
    assert last.endswith("]" if has_bar else f", +{4 - values} more")


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_what_fits_is_chosen_by_importance(columns: int) -> None:
    values = {"loss": 0.5, "accuracy": 0.25}
    parts, text = fit_line(columns, 20, values, (12, 15, 13, 20))
    assert text == "loss=0.500, accuracy=0.250"
    assert parts == {60: 1, 80: 2, 200: 4}[columns]
    assert fit_line(40, 20, values, (12,)) == (0, "loss=0.500, +1 more")
    assert fit_line(10, 20, values, (12,)) == (0, "loss=0.500, +1 more")  # one value is always shown
