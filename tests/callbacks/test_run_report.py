"""The page that every run leaves."""

from __future__ import annotations

import json
import logging
import os
import platform
import random
import re
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drivetrain import ConfigurationError, Trainer
from drivetrain.callbacks import GradientNorm, LearningRateMonitor, ModelCheckpoint, RunReport
from drivetrain.callbacks.report import run_report
from drivetrain.callbacks.report.charts import read_lanes
from drivetrain.callbacks.report.page import list_runs, write_page
from drivetrain.callbacks.report.record import read_record, read_values, write_record
from drivetrain.callbacks.report.run_facts import commit_of
from drivetrain.callbacks.report.run_report import Clock, ReportWriter
from drivetrain.trackers import CSVLogger
from tests.callbacks.tasks import Scripted, numbers
from tests.launch.launching import clean_environment
from tests.pool import ROOT, ProcessesFailed, device, run_in_processes
from tests.trackers.test_report_page import charts_in, shown
from tests.trainer.tasks import Kept

QUIET: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False}


def trainer_in(root: Path, **options: Any) -> Trainer:
    defaults = {"max_epochs": 2, "log_every_n_steps": 1, "num_sanity_val_steps": 0, "default_root_dir": root}
    return Trainer(**{**defaults, **QUIET, **options})


def folder_of(root: Path) -> Path:
    return root / "drivetrain_logs" / "version_0"


class Careless(Scripted):
    """Warns in each epoch."""

    def on_train_epoch_end(self) -> None:
        warnings.warn("this is odd", stacklevel=1)
        logging.getLogger("drivetrain.somewhere").warning("so is <this>")


class Failing(Scripted):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if self.current_epoch == 1:
            raise RuntimeError("the disk is on fire")
        return super().training_step(batch, batch_idx)


def test_every_run_with_a_folder_leaves_a_page(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path, callbacks=[ModelCheckpoint(monitor="val_loss")])
    task = Careless([2.0, 1.0])
    with pytest.warns(UserWarning, match="odd"):
        trainer.fit(task, numbers(8, 4), numbers(8, 4))
    record = read_record(folder_of(tmp_path))
    assert (record["state"], record["reason"]) == ("finished", "max_epochs=2 is reached")
    assert record["progress"] == {"step": 4, "epoch": 2}
    assert (record["best"]["monitor"], record["best"]["value"]) == ("val_loss", 1.0)
    assert [(text, count) for _, _, text, count in record["warnings"]] == [
        ("UserWarning: this is odd", 2),
        ("so is <this>", 2),
    ]
    assert record["data"]["training"] == {"samples": 8, "batch_size": 4, "batches": 2}
    assert record["model"]["parameters"] == 2
    page = (folder_of(tmp_path) / "report.html").read_text()
    assert "so is &lt;this&gt;" in page
    assert page.endswith("</html>\n")
    assert warnings.showwarning.__module__ == "warnings" or "pytest" in repr(warnings.showwarning)
    assert not [each for each in logging.getLogger("drivetrain").handlers if type(each).__name__ == "RunLog"]


def test_a_page_shows_what_was_run_and_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Sized(Scripted):
        def __init__(self, width: int) -> None:
            super().__init__([1.0] * 9)
            self.save_hyperparameters()

    checked_out = {"id": "0123456789abcdef", "branch": "trunk", "changed": True}
    monkeypatch.setattr("drivetrain.callbacks.report.run_facts.commit_of", lambda folder: dict(checked_out))
    monkeypatch.setattr(sys, "orig_argv", ["python", "train.py", "--width", "16"])
    trainer = trainer_in(tmp_path, callbacks=[GradientNorm()], accumulate_grad_batches=2)
    trainer.fit(Sized(16), numbers(12, 4), numbers(8, 4))
    page = (folder_of(tmp_path) / "report.html").read_bytes()
    text = shown(page)
    for part in (
        "command python train.py --width 16",
        "commit 0123456789ab on trunk, with changes that are not committed",
        f"host {os.uname().nodename}",
        "width 16",
        "accumulate_grad_batches 2",
        "precision 32",
        "task Sized",
        "parameters 2",
        "training 12 samples in batches of 4, 3 batches",
        "validation 8 samples in batches of 4, 2 batches",
        f"torch {torch.__version__}",
        f"Python {platform.python_version()}",
        f"trainer.fit(task, ..., resume=&#39;{trainer.checkpoint_callback.newest_model_path}&#39;)",
    ):
        assert part in text, part
    titles = {chart["title"] for chart in charts_in(page)}
    assert {"loss", "grad_norm"} <= titles, titles


def test_a_failed_run_shows_why_at_the_top(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="fire"):
        trainer_in(tmp_path).fit(Failing([1.0] * 9), numbers(8, 4))
    record = read_record(folder_of(tmp_path))
    assert record["state"] == "failed"
    assert record["reason"] == "RuntimeError: the disk is on fire"
    line = 1 + Path(__file__).read_text().splitlines().index('            raise RuntimeError("the disk is on fire")')
    assert record["failed_at"] == f"{__file__}:{line}, in training_step"
    page = (folder_of(tmp_path) / "report.html").read_text()
    header = page[page.index("<header>") : page.index("</header>")]
    assert "Failed: RuntimeError: the disk is on fire." in header
    assert record["failed_at"] in header
    assert "Traceback (most recent call last)" in header


class Broken(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> list[Tensor]:
        raise ValueError("bad row")


class WithoutLoader(Scripted):
    def train_dataloader(self) -> Any:
        raise ValueError("bad row")


@pytest.mark.parametrize("kind", ["dataset", "worker", "loader of the task"])
def test_a_run_whose_data_fail_is_listed_with_the_reason(kind: str, tmp_path: Path) -> None:
    loader = torch.utils.data.DataLoader(Broken(), batch_size=2, num_workers=int(kind == "worker"))
    task, data = (WithoutLoader([1.0]), None) if kind == "loader of the task" else (Scripted([1.0]), loader)
    with pytest.raises(ValueError, match="bad row"):
        trainer_in(tmp_path).fit(task, data)
    [run] = list_runs(tmp_path)
    where = " (in DataLoader worker process 0)" if kind == "worker" else ""
    assert (run.state, run.record["reason"]) == ("failed", f"ValueError: bad row{where}")
    assert f"Failed: ValueError: bad row{where}." in (folder_of(tmp_path) / "report.html").read_text()


class Talking(Careless):
    def on_train_epoch_start(self) -> None:
        self.print("epoch", self.current_epoch, "<begins>", sep=" | ")
        logging.getLogger("drivetrain.somewhere").info("nobody sees this")


def test_a_page_shows_the_lines_of_the_run(tmp_path: Path) -> None:
    run_in_processes(fit_talking, 1, args=(str(tmp_path),))
    lines = (folder_of(tmp_path) / "output.log").read_text().splitlines()
    texts = [line.split("  ", 1)[1] for line in lines]
    assert texts[0].startswith("Training Talking: 1 process on ")
    assert [text for text in texts if "|" in text] == ["epoch | 0 | <begins>", "epoch | 1 | <begins>"]
    assert texts.count("so is <this>") == 2
    assert "UserWarning: this is odd" in texts  # once or twice, as Python's filter of warnings is set
    assert not [text for text in texts if "nobody" in text]
    page = (folder_of(tmp_path) / "report.html").read_text()
    assert "epoch | 1 | &lt;begins&gt;" in page


def fit_talking(root: str) -> None:
    trainer_in(Path(root)).fit(Talking([2.0, 1.0]), numbers(8, 4), numbers(8, 4))


def fit_logging(root: str) -> None:
    logging.basicConfig(level=logging.INFO)
    fit_talking(root)


def test_a_run_that_logs_has_each_line_once(tmp_path: Path) -> None:
    run_in_processes(fit_logging, 1, args=(str(tmp_path),))
    texts = [line.split("  ", 1)[1] for line in (folder_of(tmp_path) / "output.log").read_text().splitlines()]
    assert sum(text.startswith("Training Talking") for text in texts) == 1
    assert texts.count("nobody sees this") == texts.count("so is <this>") == 2


@pytest.mark.parametrize(
    ("logger", "name"),
    [
        ({}, r"[a-z]+-[a-z]+-0"),
        ({"name": "digits"}, r"digits-[a-z]+-[a-z]+-0"),
        ({"name": "digits", "version": "wide"}, "digits-wide"),
        ({"version": 3}, r"[a-z]+-[a-z]+-3"),
    ],
    ids=str,
)
def test_a_run_has_a_name(logger: dict[str, Any], name: str, tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path, logger=CSVLogger(tmp_path, **logger))
    state = random.getstate()
    trainer.fit(Scripted([1.0] * 9), numbers(8, 4))
    assert random.getstate() == state
    assert trainer.log_dir is not None
    record = read_record(trainer.log_dir)
    assert re.fullmatch(name, record["name"])
    page = Path(trainer.log_dir, "report.html").read_text()
    assert f"<title>{record['name']}</title>" in page
    assert f"<h1>{record['name']}</h1>" in page


def test_a_run_has_the_name_that_was_given(tmp_path: Path) -> None:
    trainer_in(tmp_path, callbacks=[RunReport(name="wide layers")]).fit(Scripted([1.0] * 9), numbers(8, 4))
    [run] = list_runs(tmp_path)
    assert (run.title, run.name) == ("wide layers", "version_0")


class Ending(Scripted):
    """Raises an error in a hook, as soon as so many steps were taken."""

    def __init__(self, error: BaseException, hook: str, step: int) -> None:
        super().__init__([1.0])
        self.error, self.hook, self.step = error, hook, step

    def end_in(self, hook: str) -> None:
        if hook == self.hook and self.global_step >= self.step:
            raise self.error

    def prepare_data(self) -> None:
        self.end_in("prepare_data")

    def setup(self, stage: str) -> None:
        self.end_in("setup")

    def configure_optimizers(self) -> Any:
        self.end_in("configure_optimizers")
        return super().configure_optimizers()

    def on_fit_start(self) -> None:
        self.end_in("on_fit_start")

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.end_in("training_step")
        self.log("train_loss", float(self.global_step))
        return self.layer(batch[0]).square().mean()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.end_in("validation_step")
        super().validation_step(batch, batch_idx)


ENDINGS: dict[str, tuple[BaseException, str, int, str]] = {
    "in the first step": (ValueError("bad row"), "training_step", 0, "failed"),
    "in a later step": (ValueError("bad row"), "training_step", 3, "failed"),
    "in preparing the data": (ValueError("bad row"), "prepare_data", 0, "failed"),
    "in setup": (ValueError("bad row"), "setup", 0, "failed"),
    "before placement": (ValueError("bad row"), "configure_optimizers", 0, "failed"),
    "before training": (ValueError("bad row"), "on_fit_start", 0, "failed"),
    "in the sanity check": (ValueError("bad row"), "validation_step", 0, "failed"),
    "by an exit": (SystemExit(3), "training_step", 3, "failed"),
    "without memory": (MemoryError(), "training_step", 3, "failed"),
    "by Ctrl-C": (KeyboardInterrupt(), "training_step", 3, "interrupted"),
}


@pytest.mark.parametrize(("error", "hook", "step", "state"), ENDINGS.values(), ids=ENDINGS.keys())
def test_a_run_that_ends_early_is_listed_with_its_last_values(
    error: BaseException, hook: str, step: int, state: str, tmp_path: Path
) -> None:
    trainer = trainer_in(tmp_path, log_every_n_steps=50, num_sanity_val_steps=1)
    with pytest.raises(type(error)):
        trainer.fit(Ending(error, hook, step), numbers(8, 1), numbers(8, 4))
    [run] = list_runs(tmp_path)
    assert run.state == state
    assert "bad row" in run.record["reason"] or not isinstance(error, ValueError)
    assert (folder_of(tmp_path) / "report.html").is_file()
    assert run.metric == (f"train_loss {step - 1} (last)" if step else "")
    assert run.record["sessions"] == []


@pytest.mark.parametrize(
    "options",
    [
        {"fast_dev_run": True},
        {"barebones": True},
        {"logger": False, "enable_checkpointing": False},
        {"logger": False, "enable_run_report": False},
    ],
)
def test_a_run_without_a_folder_has_none(tmp_path: Path, options: dict[str, Any]) -> None:
    if "barebones" in options:
        options = {**options, "log_every_n_steps": None, **dict.fromkeys(QUIET), "num_sanity_val_steps": None}
    trainer = trainer_in(tmp_path, **options)
    assert not any(isinstance(each, RunReport) for each in trainer.callbacks)
    assert not any(isinstance(each, RunReport) for each in trainer_in(tmp_path, enable_run_report=False).callbacks)


@pytest.mark.parametrize(
    "options",
    [
        {"logger": Kept()},
        {"logger": False},
        {"logger": False, "enable_checkpointing": False, "enable_run_report": True},
        {"logger": False, "enable_checkpointing": False, "callbacks": [RunReport()]},
    ],
    ids=["tracker without files", "checkpoints", "asked for", "callback"],
)
def test_a_run_whose_trackers_leave_no_files_has_one_of_its_own(tmp_path: Path, options: dict[str, Any]) -> None:
    trainer = trainer_in(tmp_path, **options)
    given = list(trainer.loggers)
    trainer.fit(Scripted([2.0, 1.0]), numbers(8, 4), numbers(8, 4))
    assert read_record(folder_of(tmp_path))["state"] == "finished"
    page = (folder_of(tmp_path) / "report.html").read_bytes()
    assert any("val_loss" in str(chart) for chart in charts_in(page))
    assert trainer.loggers == given


def test_a_trial_run_with_a_report_of_its_own_leaves_no_files(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path, logger=False, fast_dev_run=True, callbacks=[RunReport()])
    trainer.fit(Scripted([1.0]), numbers(8, 4), numbers(8, 4))
    assert not list(tmp_path.iterdir())


def test_a_resumed_run_without_trackers_continues_its_page(tmp_path: Path) -> None:
    first = trainer_in(tmp_path, logger=False, max_epochs=1)
    first.fit(Scripted([1.0]), numbers(8, 4), numbers(8, 4))
    saved = next((tmp_path / "checkpoints").iterdir())
    again = trainer_in(tmp_path, logger=False)
    again.fit(Scripted([1.0, 1.0]), numbers(8, 4), numbers(8, 4), resume=saved)
    assert read_record(folder_of(tmp_path))["progress"] == {"step": 4, "epoch": 2}
    assert not folder_of(tmp_path).with_name("version_1").exists()


def test_one_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="must be positive"):
        RunReport(seconds=0)


def test_a_test_adds_its_results(tmp_path: Path) -> None:
    class Tested(Scripted):
        def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
            self.log("test_score", 0.875)

    trainer = trainer_in(tmp_path, max_epochs=1)
    task = Tested([1.0])
    trainer.fit(task, numbers(8, 4))
    trainer.test(task, numbers(8, 4), verbose=False)
    page = (folder_of(tmp_path) / "report.html").read_text()
    assert "test_score" in page
    assert "0.875" in page


def test_a_resumed_run_continues_its_page(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        trainer_in(tmp_path).fit(Failing([1.0] * 9), numbers(8, 4))
    name = read_record(folder_of(tmp_path))["name"]
    trainer_in(tmp_path, max_epochs=3).fit(Scripted([1.0] * 9), numbers(8, 4), resume="auto")
    record = read_record(folder_of(tmp_path))
    assert [each["state"] for each in record["sessions"]] == ["failed"]
    assert record["name"] == name
    assert record["state"] == "finished"
    assert "Parts" in (folder_of(tmp_path) / "report.html").read_text()


def test_what_cannot_be_written_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("drivetrain.callbacks.report.run_report.write_page", full)
    trainer = trainer_in(tmp_path)
    trainer.fit(Scripted([1.0] * 9), numbers(8, 4))
    assert trainer.global_step == 4


def fit_without_room(root: str) -> tuple[int, list[str]]:
    """Train while no file may grow beyond 200 bytes, as on a full disk. Returns the steps, and the table's lines."""
    resource = pytest.importorskip("resource")  # not on Windows
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    trainer = trainer_in(Path(root), max_epochs=40, enable_checkpointing=False, profiler="simple")
    trainer.profiler.filename = "report"
    logging.raiseExceptions = False  # the output of this process is a file, too
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, before[1]))
    try:
        trainer.fit(Scripted(), numbers(8, 1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        logging.raiseExceptions = True
    trainer.logger.log({"train_loss": 1.0}, 1000)
    trainer.logger.finish()
    return trainer.global_step, (folder_of(Path(root)) / "metrics.csv").read_text().splitlines()


def test_a_full_disk_costs_values_and_not_the_run(tmp_path: Path) -> None:
    [(steps, lines)] = run_in_processes(fit_without_room, 1, args=(str(tmp_path),))
    assert steps == 320
    numbers_of_steps = [int(line.split(",")[1]) for line in lines[1:]]
    assert numbers_of_steps == sorted(set(numbers_of_steps))  # no row is there twice, or cut
    assert numbers_of_steps[-1] == 1000


class Clocks:
    """The clocks of the writer's module, moved by hand."""

    def __init__(self) -> None:
        self.now = self.used = 0.0

    def monotonic(self) -> float:
        return self.now

    def thread_time(self) -> float:
        return self.used

    def time(self) -> float:
        return self.now


@pytest.mark.parametrize("costs", [[0.004], [0.001, 0.02, 0.005], [0.001, 0.003, 0.1, 0.003]])
def test_pages_take_eight_ten_thousandths_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, costs: list[float]
) -> None:
    trainer, task, clocks = trainer_in(tmp_path), Scripted([1.0] * 9), Clocks()
    trainer.fit(task, numbers(8, 4))
    monkeypatch.setattr(run_report, "time", clocks)
    pages: list[tuple[float, bool]] = []

    def costly(*_: Any, with_values: bool) -> None:
        clocks.used += costs[min(len(pages), len(costs) - 1)]
        pages.append((clocks.now, with_values))

    monkeypatch.setattr(run_report, "write_page", costly)
    monkeypatch.setattr(run_report, "is_changed", lambda folder: False)
    writer = ReportWriter(trainer, task, str(folder_of(tmp_path)), 10.0, [])
    for tenth in range(10_000):
        clocks.now = tenth / 10
        if writer.due_in <= 0:
            writer.write()
            most = max(costs[: len(pages)])  # a page that costs more than those before it is followed by a pause
            assert len(pages) == 1 or clocks.used <= 8e-4 * clocks.now + most + 1e-9
    assert clocks.used <= 8e-4 * clocks.now
    assert pages[0] == (15.0, False)  # soon, without curves, for a run that is killed early
    assert pages[1][0] == pytest.approx(max(25.0, 2000 * costs[0] / 0.8), abs=0.2)
    assert all(with_values for _, with_values in pages[1:])
    assert len(pages) > 8
    assert all(after - before >= 9.99 for (before, _), (after, _) in pairwise(pages))


def test_the_clock_calls_when_it_was_asked_to_and_no_sooner_than_in_a_tenth_of_a_second() -> None:
    asked, pauses = [7.0, -1.0, 0.3], []

    class Ended:
        def wait(self, pause: float) -> bool:
            pauses.append(pause)
            return not asked

    clock = Clock(lambda: asked.pop(0), "test")
    clock._ended = Ended()  # type: ignore[assignment]
    clock._run()
    assert pauses == [0.1, 7.0, 0.1, 0.3]


def test_the_commit_is_read_from_git(tmp_path: Path) -> None:
    assert commit_of(str(tmp_path)) is None
    environment = clean_environment(GIT_CONFIG_GLOBAL=os.devnull, GIT_CONFIG_NOSYSTEM="1")

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", *words], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    git("init", "-b", "trunk")
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "--allow-empty", "-m", "first")
    (tmp_path / "within").mkdir()
    expected = {"id": git("rev-parse", "HEAD"), "branch": "trunk", "changed": None}
    assert commit_of(str(tmp_path / "within")) == expected
    git("pack-refs", "--all")
    commit_of.cache_clear()
    assert commit_of(str(tmp_path / "within")) == expected


# measured by the process itself


class SlowRows(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> list[Tensor]:
        time.sleep(0.03)
        return [torch.ones(1)]


def test_waiting_for_data_is_seen_without_a_hook_in_the_step(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path, max_epochs=3, enable_checkpointing=False)
    trainer.fit(Scripted([1.0] * 9), torch.utils.data.DataLoader(SlowRows(), batch_size=2))
    [(_, samples)] = read_lanes(folder_of(tmp_path)).values()
    whole = sum(each.seconds for each in samples)
    assert whole > 0.8  # 1.8 if the machine has nothing else to do
    assert sum(each.seconds * each.data for each in samples) / whole > 0.6
    # On the CPU it is the process's memory, else the device's.
    assert max(each.memory for each in samples) > (1e7 if device() == "cpu" else 0)
    assert samples[-1].lr == pytest.approx(1e-4)


def fit_together(root: str) -> str:
    trainer = trainer_in(Path(root), max_epochs=2, limit_train_batches=4)
    trainer.fit(Scripted([1.0] * 9), torch.utils.data.DataLoader(SlowRows(), batch_size=2))
    return str(trainer.log_dir)


def test_each_process_has_a_lane(tmp_path: Path) -> None:
    run_in_processes(fit_together, 2, args=(str(tmp_path),))
    lanes = read_lanes(folder_of(tmp_path))
    assert list(lanes) == [0, 1]
    assert all(samples for _, samples in lanes.values())
    # Rank 0 wrote the page at its own end, at which rank 1 may still have had to write its lane.
    page = write_page(folder_of(tmp_path)).read_text()
    assert "<h3>rank 0 host=" in page
    assert "<h3>rank 1 host=" in page


class Killed(Scripted):
    """Its first process is killed in its first step, as a launcher does once a peer is gone."""

    def __init__(self, moment: str) -> None:
        super().__init__([1.0])
        self.moment = moment

    def end_in(self, moment: str) -> None:
        if moment == self.moment and self.trainer.is_global_zero:
            os.kill(os.getpid(), signal.SIGKILL)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.end_in("training")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.end_in("sanity check")


def fit_until_killed(root: str, moment: str) -> None:
    sanity = 1 if moment == "sanity check" else 0
    trainer_in(Path(root), num_sanity_val_steps=sanity).fit(Killed(moment), numbers(16, 1), numbers(8, 4))


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("moment", ["training", "sanity check"])
def test_a_run_that_is_killed_at_once_is_listed_as_failed(processes: int, moment: str, tmp_path: Path) -> None:
    with pytest.raises(ProcessesFailed):
        run_in_processes(fit_until_killed, processes, args=(str(tmp_path), moment))
    [run] = list_runs(tmp_path)
    assert run.state == "failed"
    assert "ended without recording a reason" in run.record["reason"]
    assert run.record["sessions"] == []


@pytest.mark.crash
def test_a_killed_run_leaves_its_last_page(tmp_path: Path) -> None:
    script = """
        import sys
        import torch
        sys.path.insert(0, sys.argv[1])
        from tests.callbacks.tasks import Scripted
        from tests.callbacks.test_run_report import SlowRows
        from drivetrain import Trainer

        trainer = Trainer(max_epochs=1000, default_root_dir=".", log_every_n_steps=1, enable_progress_bar=False)
        trainer.fit(Scripted([1.0] * 9999), torch.utils.data.DataLoader(SlowRows(), batch_size=10))
    """
    (tmp_path / "train.py").write_text(textwrap.dedent(script))
    environment = clean_environment(PYTHONPATH=str(ROOT), DRIVETRAIN_USE_CPU="1")
    process = subprocess.Popen([sys.executable, "train.py", str(ROOT)], cwd=tmp_path, env=environment)
    page = folder_of(tmp_path) / "report.html"
    try:
        deadline = time.monotonic() + 120
        while not page.exists() and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.05)
        assert read_record(page.parent)["state"] == "running"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    record = read_record(page.parent)
    assert record["state"] == "failed"
    assert "killed" in record["reason"]
    assert page.read_text().endswith("</html>\n")
    assert json.loads((page.parent / "run.json").read_text())["argv"] == [sys.executable, "train.py", str(ROOT)]


class Decays(Scripted):
    """Has two groups of parameters, and a rate that a scheduler changes at once."""

    def configure_optimizers(self) -> Any:
        groups = [{"params": [self.layer.weight]}, {"params": [self.layer.bias], "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.3, amsgrad=True)
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.1)]


def fit_deterministically(root: Path) -> None:
    deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        options: dict[str, Any] = {"limit_train_batches": 0.5, "gradient_clip_val": 1.5, "detect_anomaly": True}
        trainer_in(root, seed=7, deterministic=True, **options).fit(Decays([1, 1]), numbers(16, 4), numbers(4, 4))
    finally:
        torch.use_deterministic_algorithms(deterministic)


def test_a_record_has_the_settings_as_numbers_booleans_and_lists(tmp_path: Path) -> None:
    fit_deterministically(tmp_path)
    record = read_record(folder_of(tmp_path))
    expected = {
        "seed": 7,
        "deterministic": True,
        "max_epochs": 2,
        "limit_train_batches": 0.5,
        "gradient_clip_val": 1.5,
        "detect_anomaly": True,
        "processes": 1,
        "trackers": ["CSVLogger"],
    }
    assert expected.items() <= record["trainer"].items()
    settings = {"lr": 0.01, "weight_decay": [0.3, 0.0], "betas": [0.9, 0.999], "eps": 1e-8, "amsgrad": True}
    assert record["optimizers"] == [{"class": "AdamW", **settings, **_decoupled()}]
    assert record["data"] == {
        "training": {"samples": 16, "batch_size": 4, "batches": 2},
        "validation": {"samples": 4, "batch_size": 4, "batches": 1},
    }
    assert record["model"] == {"task": "Decays", "parameters": 2, "trained_parameters": 2}
    assert record["environment"]["cpus"] == os.cpu_count()


def _decoupled() -> dict[str, bool]:
    """What newer versions of torch write into the groups of AdamW."""
    group = torch.optim.AdamW([torch.zeros(1, requires_grad=True)]).param_groups[0]
    return {"decoupled_weight_decay": True} if "decoupled_weight_decay" in group else {}


def test_a_page_shows_the_settings_in_words(tmp_path: Path) -> None:
    fit_deterministically(tmp_path)
    text = shown((folder_of(tmp_path) / "report.html").read_bytes())
    for part in (
        "seed 7",
        "deterministic True",
        "optimizer AdamW",
        "optimizer lr 0.01",
        "optimizer weight decay 0.3, 0",
        "training 16 samples in batches of 4, 2 batches",
        "trained parameters 2",
    ):
        assert part in text, part


def test_several_loaders_have_a_size_each(tmp_path: Path) -> None:
    trainer_in(tmp_path).fit(Scripted([1.0] * 4), numbers(8, 4), [numbers(4, 4), numbers(6, 2)])
    record = read_record(folder_of(tmp_path))
    assert record["data"]["validation"] == {"samples": [4, 6], "batch_size": [4, 2], "batches": 4}
    page = (folder_of(tmp_path) / "report.html").read_bytes()
    assert "validation 4 samples in batches of 4, 6 samples in batches of 2, 4 batches" in shown(page)


def test_a_record_of_an_older_version_is_shown_as_it_is(tmp_path: Path) -> None:
    trainer_in(tmp_path).fit(Scripted([1.0] * 4), numbers(8, 4))
    record = {**read_record(folder_of(tmp_path)), "version": 1, "optimizers": None}
    record |= {"model": {"parameters": "1,234"}, "data": {"training": "8 samples in batches of 4"}}
    write_record(folder_of(tmp_path), record)
    text = shown(write_page(folder_of(tmp_path)).read_bytes())
    assert "parameters 1,234" in text
    assert "training 8 samples in batches of 4" in text


def test_the_table_of_validations_has_the_epochs_that_ended(tmp_path: Path) -> None:
    """Though rates are logged at the start of the next epoch, which has the same step."""

    class Steps(Scripted):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    trainer_in(tmp_path, callbacks=LearningRateMonitor(), max_epochs=3).fit(
        Steps([3, 2, 1]), numbers(8, 4), numbers(4, 4)
    )
    values = read_values(folder_of(tmp_path))
    assert [values.epochs[step] for step in values.curves["val_loss"].steps] == [0, 1, 2]
    rows = (folder_of(tmp_path) / "metrics.csv").read_text().splitlines()[1:]
    steps = [row.split(",")[1] for row in rows]
    assert len(steps) == len(set(steps))
