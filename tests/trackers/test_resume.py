from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

from drivetrain.trackers import CSVLogger, TensorBoardLogger, Tracker, resolve_trackers


def table(directory: str | Path) -> str:
    return Path(directory, "metrics.csv").read_text()


def curve(directory: str | Path, name: str) -> list[tuple[int, float]]:
    accumulator = EventAccumulator(str(directory))
    accumulator.Reload()
    # Files of one process and second are read by the number in their names, of which ".10" comes before ".9".
    events = sorted(accumulator.Scalars(name), key=lambda event: event.wall_time)
    return [(event.step, event.value) for event in events]


def through_json(state: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(state))
    return found


def log_steps(logger: Tracker, steps: range, late_from: int = 100) -> None:
    for step in steps:
        logger.log({"epoch": step // 4, "loss": 1 / (step + 1)}, step)
        if step >= late_from:
            logger.log({"epoch": step // 4, "late": float(step)}, step)


@pytest.mark.parametrize("flush", [1, 3, 100])
@pytest.mark.parametrize("late_from", [3, 6, 100])
def test_a_resumed_table_is_that_of_a_run_that_was_never_interrupted(
    flush: int, late_from: int, tmp_path: Path
) -> None:
    whole = CSVLogger(tmp_path / "whole", flush_logs_every_n_steps=flush)
    log_steps(whole, range(10), late_from)
    whole.finish()

    killed = CSVLogger(tmp_path / "run", flush_logs_every_n_steps=flush)
    log_steps(killed, range(5), late_from)
    state = through_json(killed.state_dict())
    log_steps(killed, range(5, 8), late_from)
    killed.save()

    resumed = CSVLogger(tmp_path / "run", flush_logs_every_n_steps=flush)
    resumed.load_state_dict(state)
    log_steps(resumed, range(5, 10), late_from)
    resumed.finish()
    assert resumed.log_dir == killed.log_dir
    assert table(resumed.log_dir) == table(whole.log_dir)


def test_the_row_of_the_step_of_the_checkpoint_takes_what_is_logged_after_it(tmp_path: Path) -> None:
    killed = CSVLogger(tmp_path)
    killed.log({"loss": 1.0}, 1)
    killed.log({"loss": 0.5}, 2)
    state = through_json(killed.state_dict())
    killed.log({"val_loss": 9.0}, 2)  # of a validation that the resumed run does again
    killed.finish()
    resumed = CSVLogger(tmp_path)
    resumed.load_state_dict(state)
    assert table(resumed.log_dir) == "step,loss\n1,1.0\n2,0.5\n"
    resumed.log({"val_loss": 0.25}, 2)
    resumed.finish()
    assert table(resumed.log_dir) == "step,loss,val_loss\n1,1.0,\n2,0.5,0.25\n"


def test_a_checkpoint_from_before_anything_was_logged_drops_the_whole_table(tmp_path: Path) -> None:
    killed = CSVLogger(tmp_path)
    killed.log_hyperparams({"lr": 0.1})
    state = through_json(killed.state_dict())
    killed.log({"loss": 1.0}, 1)
    killed.finish()
    resumed = CSVLogger(tmp_path)
    resumed.load_state_dict(state)
    resumed.log({"other": 2.0}, 1)
    resumed.finish()
    assert table(killed.log_dir) == "step,other\n1,2.0\n"
    assert yaml.safe_load(Path(killed.log_dir, "hparams.yaml").read_text()) == {"lr": 0.1}


def test_rows_that_did_not_reach_the_disk_are_missed_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    killed = CSVLogger(tmp_path)
    log_steps(killed, range(4))
    state = killed.state_dict()
    killed.finish()
    path = Path(killed.log_dir, "metrics.csv")
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))
    resumed = CSVLogger(tmp_path)
    resumed.load_state_dict(state)
    log_steps(resumed, range(4, 5))
    resumed.finish()
    assert [line.split(",")[1] for line in table(resumed.log_dir).splitlines()] == ["step", "0", "3", "4"]
    assert "contains only 1 of the 4 rows" in caplog.text


@pytest.mark.parametrize("make", [CSVLogger, TensorBoardLogger])
def test_another_version_that_was_asked_for_is_not_touched(make: Callable[..., Any], tmp_path: Path) -> None:
    killed = make(tmp_path)
    killed.log({"loss": 1.0}, 1)
    state = killed.state_dict()
    killed.finish()
    own = make(tmp_path, version=7)
    own.load_state_dict(state)
    own.log({"loss": 2.0}, 2)
    own.finish()
    assert own.log_dir.endswith("version_7")
    again = make(tmp_path, version=0)
    again.load_state_dict(state)
    assert again.log_dir == killed.log_dir


@pytest.mark.parametrize("make", [CSVLogger, TensorBoardLogger])
def test_a_run_whose_directory_is_gone_begins_one_of_its_own(make: Callable[..., Any], tmp_path: Path) -> None:
    make(tmp_path).log({"loss": 1.0}, 1)
    killed = make(tmp_path)
    killed.log({"loss": 1.0}, 1)
    state = killed.state_dict()
    killed.finish()
    shutil.rmtree(killed.log_dir)
    resumed = make(tmp_path, "elsewhere")
    resumed.load_state_dict(state)
    resumed.log({"loss": 2.0}, 2)
    resumed.finish()
    assert resumed.log_dir == str(tmp_path / "elsewhere" / "version_0")


def test_resumed_curves_hold_no_value_from_after_the_checkpoint(tmp_path: Path) -> None:
    killed = TensorBoardLogger(tmp_path)
    log_steps(killed, range(5))
    state = through_json(killed.state_dict())
    killed.log({"val_loss": 9.0}, 4)
    log_steps(killed, range(5, 8))
    killed.finish()
    killed.log({"val_loss": 9.0}, 8)  # in a further file
    killed.finish()

    resumed = TensorBoardLogger(tmp_path)
    resumed.load_state_dict(state)
    resumed.log({"val_loss": 0.5}, 4)
    log_steps(resumed, range(5, 10))
    resumed.finish()
    assert resumed.log_dir == killed.log_dir
    assert curve(resumed.log_dir, "val_loss") == [(4, 0.5)]
    assert [step for step, _ in curve(resumed.log_dir, "loss")] == list(range(10))


def test_a_tensorboard_that_watches_forgets_what_was_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # TensorBoard numbers the files of a process, and reads those of one second in the order of their names: 9 after 10.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))
    killed = TensorBoardLogger(tmp_path)
    log_steps(killed, range(5))
    state = killed.state_dict()
    log_steps(killed, range(5, 8))
    killed.finish()
    watching = EventAccumulator(killed.log_dir)
    watching.Reload()
    assert len(watching.Scalars("loss")) == 8
    resumed = TensorBoardLogger(tmp_path)
    resumed.load_state_dict(state)
    log_steps(resumed, range(5, 7))
    resumed.finish()
    watching.Reload()
    assert [event.step for event in watching.Scalars("loss")] == list(range(7))


def test_trackers_that_share_a_version_still_share_it_after_a_resume(tmp_path: Path) -> None:
    def trackers() -> list[Tracker]:
        return resolve_trackers(["csv", "tensorboard"], save_dir=tmp_path)

    killed = trackers()
    for tracker in killed:
        log_steps(tracker, range(3))
    states = [tracker.state_dict() for tracker in killed]
    for tracker in killed:
        log_steps(tracker, range(3, 6))
        tracker.finish()
    resumed = trackers()
    for tracker, state in zip(resumed, states, strict=True):
        tracker.load_state_dict(state)
        log_steps(tracker, range(3, 4))
        tracker.finish()
    assert {tracker.log_dir for tracker in resumed} == {killed[0].log_dir}
    assert len(table(str(killed[0].log_dir)).splitlines()) == 5
    assert [step for step, _ in curve(str(killed[0].log_dir), "loss")] == [0, 1, 2, 3]


def test_a_tracker_of_ones_own_need_not_have_a_state() -> None:
    class Quiet(Tracker):
        name = "quiet"

        def store_init_configuration(self, values: Any) -> None: ...

        def log(self, values: Any, step: int | None = None) -> None: ...

    quiet = Quiet()
    assert quiet.state_dict() == {}
    quiet.load_state_dict({})
