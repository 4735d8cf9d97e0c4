from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain import Accelerator, ConfigurationError, CSVLogger, GeneralTracker, TensorBoardLogger, Trainer
from tests.pool import ROOT, run_in_processes
from tests.trainer.tasks import Weight, ones, quiet


class Noted(GeneralTracker):
    """Notes every call, on one process or on all; values once `gate` is open."""

    name = "noted"
    requires_logging_directory = False

    def __init__(self, everywhere: bool = False) -> None:
        super().__init__()
        self.main_process_only = not everywhere
        self.gate = threading.Event()
        self.gate.set()
        self.calls: list[tuple[Any, ...]] = []

    @property
    def tracker(self) -> Any:
        return self.calls

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        assert self.gate.wait(30)
        self.calls.append(("configuration", dict(values)))

    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        assert self.gate.wait(30)
        self.calls.append(("log", dict(values), step, options))

    def finalize(self, status: str = "completed", message: str = "") -> None:
        self.calls.append(("finalize", status, message))


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_raw_loop_logs_to_trackers_given_by_name_and_as_objects(tmp_path: Path) -> None:
    noted = Noted()
    accelerator = Accelerator(cpu=True, log_with=["csv", noted], project_dir=tmp_path)
    assert accelerator.trackers == []
    accelerator.init_trackers("digits", {"lr": 0.1, "api_key": "s3cret"}, {"csv": {"version": 7}})
    accelerator.log({"loss": torch.tensor(0.5), "n": 3}, step=1, log_kwargs={"noted": {"extra": True}})
    accelerator.end_training()
    assert [type(each) for each in accelerator.trackers] == [CSVLogger, Noted]
    assert rows(tmp_path / "digits" / "version_7" / "metrics.csv") == [{"step": "1", "loss": "0.5", "n": "3"}]
    assert noted.calls == [
        ("configuration", {"lr": 0.1, "api_key": "<hidden>"}),
        ("log", {"loss": 0.5, "n": 3}, 1, {"extra": True}),
        ("finalize", "completed", ""),
    ]


class Shown(Noted):
    """Notes images and tables, too."""

    name = "shown"

    def log_images(self, values: Mapping[str, Any], step: int | None = None) -> None:
        self.calls.append(("images", {name: [image.shape for image in each] for name, each in values.items()}, step))

    def log_table(self, name: str, columns: Any = None, data: Any = None, step: int | None = None) -> None:
        self.calls.append(("table", name, columns, data, step))


def test_images_and_tables_go_to_the_trackers_that_show_them_without_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_SERVICE_TOKEN", "planted-0123456789")
    shown = Shown()
    accelerator = Accelerator(cpu=True, log_with=["csv", shown], project_dir=tmp_path)
    accelerator.init_trackers("digits")
    accelerator.log_images({"sample": torch.rand(2, 3, 4, 5)}, step=1)
    accelerator.log_table("errors", ["digit", "note"], [[3, "planted-0123456789"]], step=1)
    accelerator.end_training()
    assert shown.calls[:2] == [
        ("images", {"sample": [(4, 5, 3), (4, 5, 3)]}, 1),
        ("table", "errors", ["digit", "note"], [[3, "<hidden>"]], 1),
    ]
    assert (tmp_path / "digits" / "version_0" / "tables" / "errors-1.csv").is_file()


def test_a_tracker_is_found_by_its_name_with_the_raw_object_behind_it(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=tmp_path)
    accelerator.init_trackers("digits")
    assert isinstance(accelerator.get_tracker("tensorboard"), TensorBoardLogger)
    assert type(accelerator.get_tracker("tensorboard", unwrap=True)).__name__ == "SummaryWriter"
    with pytest.raises(ConfigurationError, match=r"no tracker 'csv' in this run. Its trackers: 'tensorboard'"):
        accelerator.get_tracker("csv")
    accelerator.end_training()


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("tensorbord", "no tracker 'tensorbord'"),
        ([3], "3 is not a tracker"),
        (Noted, r"contains the class Noted. Pass an instance instead: Noted\(\)"),
    ],
)
def test_what_is_no_tracker_is_refused_when_the_accelerator_is_made(asked: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Accelerator(cpu=True, log_with=asked)


def test_training_that_ends_within_an_exception_has_failed() -> None:
    noted = Noted()

    def train() -> None:
        accelerator = Accelerator(cpu=True, log_with=noted)
        accelerator.init_trackers("digits")
        try:
            accelerator.log({"loss": 1.0}, step=1)
            raise ValueError("no more\nof this")
        finally:
            accelerator.end_training()

    with pytest.raises(ValueError, match="no more"):
        train()
    assert noted.calls[-1] == ("finalize", "failed", "ValueError: no more")


def on_two_processes(directory: Path) -> tuple[list[Any], list[Any], bool]:
    one, every = Noted(), Noted(everywhere=True)
    every.name = "everywhere"  # type: ignore[misc]
    accelerator = Accelerator(cpu=True, log_with=["csv", one, every], project_dir=directory)
    accelerator.init_trackers("digits", {"lr": 0.1})
    for step in range(3):
        accelerator.log({"loss": float(step)}, step=step)
    accelerator.get_tracker("csv", unwrap=True)
    accelerator.get_tracker("noted").log({"own": 1.0}, 9)
    ignored = not accelerator.get_tracker("noted", unwrap=True) and not accelerator.is_main_process
    accelerator.end_training()
    return one.calls, every.calls, ignored


def test_on_two_processes_the_main_one_writes_and_custom_trackers_choose(tmp_path: Path) -> None:
    (one, every, _), (other_one, other_every, ignored) = run_in_processes(on_two_processes, 2, args=(tmp_path,))
    assert len(rows(tmp_path / "digits" / "version_0" / "metrics.csv")) == 3
    assert not (tmp_path / "digits" / "version_1").exists()
    assert ("log", {"own": 1.0}, 9, {}) in one
    assert [call for call in one if call[0] == "log" and "loss" in call[1]] == [
        ("log", {"loss": float(step)}, step, {}) for step in range(3)
    ]
    assert (other_one, ignored) == ([], True)
    assert every == other_every
    assert len(every) == 5


def test_a_loop_does_not_wait_for_a_slow_tracker() -> None:
    noted = Noted()
    noted.gate.clear()  # until after the loop
    accelerator = Accelerator(cpu=True, log_with=noted)
    accelerator.init_trackers("digits")
    for step in range(40):
        accelerator.log({"loss": 1.0}, step=step)
    assert noted.calls == []
    noted.gate.set()
    accelerator.end_training()
    assert [call[2] for call in noted.calls if call[0] == "log"] == list(range(40))


class Logging(Weight):
    """Logs in each step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


def test_a_fit_neither_waits_for_a_slow_tracker_nor_stops_for_one_that_raises(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken(Noted):
        name = "broken"

        def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
            raise ConnectionError(f"gone at step {step}")

    noted = Noted()
    noted.gate.clear()

    class Watching(Logging):
        def on_train_end(self) -> None:
            assert noted.calls == []
            noted.gate.set()

    quiet(logger=[noted, Broken()], log_every_n_steps=1).fit(Watching(), ones(40))
    assert [call[2] for call in noted.calls if call[0] == "log" and "loss" in call[1]] == list(range(1, 41))
    assert noted.calls[-1] == ("finalize", "completed", "")
    once, report = (record.getMessage() for record in caplog.records if "Broken" in record.getMessage())
    assert once == "Broken: ConnectionError: gone at step 1 The run continues without these values."
    assert report == "Broken lost 80 of 80 values: 80 by ConnectionError: gone at step #."


@pytest.mark.parametrize(
    ("stop", "status", "message"),
    [
        (ValueError("no more\nof this"), "failed", "ValueError: no more"),
        (KeyboardInterrupt(), "interrupted", "KeyboardInterrupt"),
    ],
)
def test_trackers_learn_how_a_fit_ended(stop: BaseException, status: str, message: str) -> None:
    class Stopped(Logging):
        def on_train_batch_end(self, *arguments: Any) -> None:
            raise stop

    noted = Noted()
    with pytest.raises(type(stop)):
        quiet(logger=noted).fit(Stopped(), ones(3))
    assert noted.calls[-1] == ("finalize", status, message)


def test_a_preempted_fit_ends_as_preempted(tmp_path: Path) -> None:
    class Preempted(Logging):
        def on_train_batch_end(self, *arguments: Any) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    noted = Noted()
    with pytest.raises(SystemExit):
        quiet(logger=noted, default_root_dir=tmp_path).fit(Preempted(), ones(3))
    assert noted.calls[-1] == ("finalize", "preempted", "")


def test_a_raw_loop_under_a_trainer_logs_to_its_trackers_and_the_other_way_round(tmp_path: Path) -> None:
    trainer = quiet(logger=CSVLogger(tmp_path / "a"))
    assert trainer.accelerator.trackers == trainer.loggers
    accelerator = Accelerator(cpu=True, log_with="csv", project_dir=tmp_path)
    accelerator.init_trackers("digits")
    assert Trainer(accelerator=accelerator, enable_progress_bar=False).loggers == accelerator.trackers
    own = quiet(accelerator=accelerator, logger=Noted())
    assert own.loggers != accelerator.trackers


def resumable(directory: Path, resume: bool) -> CSVLogger:
    accelerator = Accelerator(cpu=True, log_with="csv", project_dir=directory)
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    if resume:
        accelerator.load_state(directory / "state")
    accelerator.init_trackers("digits")
    for step in range(3 if resume else 0, 6 if resume else 5):
        accelerator.log({"loss": float(step)}, step=step)
        if step == 2:
            accelerator.save_state(directory / "state")
    accelerator.end_training()
    assert model is not None
    return accelerator.get_tracker("csv")


def test_a_resumed_raw_loop_continues_its_table_from_the_checkpoint(tmp_path: Path) -> None:
    resumable(tmp_path, resume=False)
    logger = resumable(tmp_path, resume=True)
    assert Path(logger.log_dir).name == "version_0"
    assert [row["step"] for row in rows(Path(logger.log_dir, "metrics.csv"))] == ["0", "1", "2", "3", "4", "5"]


LEFT_OPEN = """
import sys
from drivetrain import Accelerator
accelerator = Accelerator(cpu=True, log_with="csv", project_dir=sys.argv[1])
accelerator.init_trackers("digits")
for step in range(3):
    accelerator.log({"loss": float(step)}, step=step)
"""


def test_a_script_that_forgets_the_end_has_its_rows_nevertheless(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", LEFT_OPEN, str(tmp_path)], check=True, cwd=ROOT, timeout=60)
    assert len(rows(tmp_path / "digits" / "version_0" / "metrics.csv")) == 3


def test_secrets_among_hyper_parameters_are_in_no_checkpoint(tmp_path: Path) -> None:
    class Keyed(Weight):
        def __init__(self, lr: float = 0.0, api_key: str | None = None) -> None:
            super().__init__(lr)
            self.save_hyperparameters()

    trainer = quiet(logger=CSVLogger(tmp_path / "log"))
    trainer.fit(Keyed(0.5, api_key="planted-secret"), ones(2))
    trainer.save_checkpoint(tmp_path / "saved")
    trainer.logger.finish()
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in written if b"planted-secret" in path.read_bytes()]
    assert "api_key: <hidden>" in Path(trainer.logger.log_dir, "hparams.yaml").read_text()
    task = Keyed.load_from_checkpoint(tmp_path / "saved")
    assert (task.hparams.lr, task.hparams.api_key) == (0.5, None)
