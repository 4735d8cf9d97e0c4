"""ClearMLLogger with the real package, offline: what its sessions hold is what was logged."""

from __future__ import annotations

import json
import math
import threading
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from drivetrain import CheckpointError, ClearMLLogger, ConfigurationError
from drivetrain.trackers.clearml import plot_of
from tests.pool import run_in_processes
from tests.trackers.runs import (
    HERE,
    PLANTED,
    SCRIPT,
    Failing,
    complaint,
    files_with,
    fit,
    log_media,
    pretend,
    raw_loop,
    secrets,
)

pytest.importorskip("clearml", reason="clearml is not installed")

CREDENTIALS = {"CLEARML_API_ACCESS_KEY": PLANTED, "CLEARML_API_SECRET_KEY": PLANTED}


def logger_of(name: str, **options: Any) -> ClearMLLogger:
    quick = {"auto_resource_monitoring": False, "auto_connect_streams": False}
    return ClearMLLogger("digits", name, online=False, secret_key=PLANTED, tags=["a", "b"], **quick, **options)


def trainer_run(directory: Path) -> dict[str, Any]:
    """A fit with everything else that a tracker takes."""
    pretend(SCRIPT, **CREDENTIALS, CLEARML_CACHE_DIR=str(directory / "fit"))
    logger = logger_of("first", log_model=True)
    log_media(logger)
    logger.log({"odd": math.nan}, 3)
    trainer, logged = fit(directory / "run", logger)
    best = trainer.checkpoint_callbacks[0].best_model_path
    return {"id": logger.version, "lost": logger.lost, "logged": (logged.values, logged.epochs), "best": best}


def let_source_detection_write_last() -> None:
    """Let the thread that looks at the source read the session before the end of the run, and write it after."""
    from clearml import Task

    reload, set_user_properties = Task._reload, Task.set_user_properties
    was_read = threading.Event()

    def read_early(task: Task) -> Any:
        found = reload(task)
        if "_update_repository" in threading.current_thread().name and not was_read.is_set():
            was_read.set()
            time.sleep(1.0)
        return found

    def set_late(task: Task, **properties: str) -> bool:
        if "status" in properties:
            assert was_read.wait(30.0)
        return set_user_properties(task, **properties)

    Task._reload, Task.set_user_properties = read_early, set_late


def resumed_run(directory: Path) -> dict[str, Any]:
    """Resumes that fit, and lets it fail."""
    pretend(HERE, **CREDENTIALS, CLEARML_CACHE_DIR=str(directory / "resumed"))
    let_source_detection_write_last()
    logger = logger_of("first")
    with pytest.raises(ValueError, match="no more"):
        fit(directory / "run", logger, Failing(**secrets()), max_epochs=3, resume="auto")
    return {"id": logger.version}


def raw_run(directory: Path) -> Any:
    pretend(SCRIPT, **CREDENTIALS, CLEARML_CACHE_DIR=str(directory / "raw"))
    return raw_loop(directory, "clearml", {"online": False, "auto_resource_monitoring": False})


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("clearml")


@pytest.fixture(scope="module")
def runs(directory: Path) -> list[dict[str, Any]]:
    return run_in_processes(trainer_run, 2, args=(directory,), timeout=150)


def session(place: Path) -> tuple[dict[str, Any], list[dict[str, Any]], str, list[str]]:
    """The one session below a directory: the task, its events, its log, and the names of its files."""
    [path] = place.rglob("offline-*.zip")
    with zipfile.ZipFile(path) as archive:
        lines = archive.read("metrics.jsonl").splitlines()
        events = [event for line in lines for event in json.loads(line)]
        log = archive.read("log.jsonl").decode()
        return json.loads(archive.read("task.json")), events, log, archive.namelist()


def scalars(events: list[dict[str, Any]]) -> dict[tuple[str, str, int], float]:
    return {
        (event["metric"], event["variant"], event["iter"]): event["value"]
        for event in events
        if event["type"] == "training_stats_scalar"
    }


def properties(task: dict[str, Any]) -> dict[str, str]:
    return {name: each["value"] for name, each in task["hyperparams"]["properties"].items()}


def test_a_fit_on_two_processes_is_one_session_that_equals_what_was_logged(
    runs: list[dict[str, Any]], directory: Path
) -> None:
    task, events, log, _ = session(directory / "fit")
    values, epochs = runs[0]["logged"]
    expected = {(*plot_of(name), step): value for (name, step), value in values.items()}
    expected |= {("epoch", "epoch", step): epochs[name, step] for name, step in values}
    assert len(values) >= 8
    assert scalars(events) == expected
    assert runs[1]["logged"] == ({}, {})
    assert (task["id"], task["name"], task["project_name"], sorted(task["tags"])) == (
        runs[0]["id"],
        "first",
        "digits",
        ["a", "b"],
    )
    assert properties(task) == {"status": "completed"}
    assert "odd: nan at step 3" in log
    assert runs[0]["lost"] == 0


def test_parameters_graph_media_environment_and_the_best_checkpoint_are_there(
    runs: list[dict[str, Any]], directory: Path
) -> None:
    task, events, log, names = session(directory / "fit")
    parameters = {name: each["value"] for name, each in task["hyperparams"]["General"].items()}
    assert {name: parameters[name] for name in ("lr", "width", "token", "nested/api_key")} == {
        "lr": "0.05",
        "width": "4",
        "token": "<hidden>",
        "nested/api_key": "<hidden>",
    }
    assert task["configuration"]["model"]["value"].startswith("Planted(")
    assert "torch" in json.dumps(task["script"]["requirements"])
    assert task["script"]["entry_point"].endswith(SCRIPT.name)
    assert "sample (step 2): some text" in log
    assert {event["metric"] for event in events if event["type"] == "plot"} == {"table", "weights"}
    assert any(name.endswith(("picture_picture_00000000.jpeg", ".jpeg", ".png")) for name in names)
    [artifact] = task["execution"]["artifacts"]
    assert artifact["key"] == "best"
    best = Path(runs[0]["best"])
    assert all(path.name in artifact["type_data"]["preview"] for path in best.rglob("*") if path.is_file())


def test_a_resumed_fit_names_the_session_that_it_continues_and_how_it_failed(
    runs: list[dict[str, Any]], directory: Path
) -> None:
    again = run_in_processes(resumed_run, 2, args=(directory,), timeout=150)
    assert again[0]["id"] == runs[0]["id"]
    task, events, _, _ = session(directory / "resumed")
    assert properties(task) == {
        "continues": runs[0]["id"],
        "status": "failed",
        "error": "ValueError: no more of <hidden>",
    }
    assert task["script"]["diff"] == ""  # the script holds the secret
    before = max(step for _, step in runs[0]["logged"][0])
    assert min(step for *_, step in scalars(events)) > before
    assert files_with(PLANTED, directory / "resumed") == []


def test_a_raw_loop_on_two_processes_is_written_once(directory: Path) -> None:
    logged = run_in_processes(raw_run, 2, args=(directory,), timeout=150)[0]
    task, events, log, _ = session(directory / "raw")
    assert scalars(events) == {(*plot_of(name), step): value for (name, step), value in logged.items()}
    assert (task["project_name"], properties(task)["status"]) == ("raw", "completed")
    assert log.count("on every process, written once") == 1
    assert "/offline-" in (directory / "drivetrain_logs" / "index").read_text()
    assert files_with(PLANTED, directory / "raw", directory / "state") == []


def test_no_planted_secret_is_in_anything_that_was_written(runs: list[dict[str, Any]], directory: Path) -> None:
    assert list(directory.rglob("task.json"))
    assert list(directory.rglob("MANIFEST.json"))
    assert files_with(PLANTED, directory) == []


# that cannot start


def complaint_of(options: dict[str, Any]) -> tuple[str, int]:
    return complaint(ClearMLLogger("digits", **options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "has no credentials. Run `clearml-init`, set CLEARML_API_ACCESS_KEY and CLEARML_API_SECRET_KEY"),
        (
            {"access_key": PLANTED, "secret_key": PLANTED, "api_host": "http://127.0.0.1:9"},
            "cannot connect to 127.0.0.1 (Connection refused).",
        ),
    ],
)
def test_one_that_cannot_start_names_why_and_the_run_continues(options: dict[str, Any], message: str) -> None:
    env = {"CLEARML_CONFIG_FILE": "/nonexistent", "CLEARML_API_ACCESS_KEY": None, "CLEARML_API_SECRET_KEY": None}
    [(line, lost)] = run_in_processes(complaint_of, 1, args=(options,), env=env)
    assert message in line
    assert "online=False" in line
    assert PLANTED not in line
    assert lost == 3


@pytest.mark.parametrize(
    ("name", "plot"),
    [
        ("loss", ("loss", "loss")),
        ("train_loss", ("loss", "train")),
        ("val_loss", ("loss", "val")),
        ("val/loss", ("val", "loss")),
        ("train", ("train", "train")),
        ("learning_rate", ("learning_rate", "learning_rate")),
    ],
)
def test_a_name_is_a_series_of_a_plot(name: str, plot: tuple[str, str]) -> None:
    assert plot_of(name) == plot


def test_without_the_package_the_error_names_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"pip install 'drivetrain\[clearml\]'"):
        ClearMLLogger()


def test_an_id_that_is_none_is_refused_and_a_given_one_is_kept() -> None:
    logger = ClearMLLogger("digits")
    with pytest.raises(CheckpointError, match="not a ClearML ID"):
        logger.load_state_dict({"task_id": "../../etc"})
    logger.load_state_dict({"task_id": "offline-abc123"})
    assert logger.version == "offline-abc123"
    given = ClearMLLogger("digits", task_id="def456")
    given.load_state_dict({"task_id": "abc123"})
    assert given.version == "def456"
