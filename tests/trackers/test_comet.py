"""CometLogger with the real package, offline: what its archives hold is what was logged."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from drivetrain import CheckpointError, CometLogger, ConfigurationError
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

pytest.importorskip("comet_ml", reason="comet_ml is not installed")


def logger_in(place: Path, **options: Any) -> CometLogger:
    return CometLogger(
        api_key=PLANTED,
        project_name="digits",
        online=False,
        prefix="run",
        offline_directory=str(place),
        name="first",
        tags=["a", "b"],
        **options,
    )


def trainer_runs(directory: Path) -> dict[str, Any]:
    """A fit, its resumption, and one that fails, each with an experiment in a directory of its own."""
    pretend(SCRIPT, COMET_API_KEY=PLANTED)
    logger = logger_in(directory / "fit", log_model=True)
    trainer, logged = fit(directory / "run", logger)
    best = Path(trainer.checkpoint_callbacks[0].best_model_path)
    files = {str(path.relative_to(best)) for path in best.rglob("*") if path.is_file()}
    log_media(logger)
    logger.finish()
    again = logger_in(directory / "resumed")
    _, resumed = fit(directory / "run", again, max_epochs=3, resume="auto")
    pretend(HERE)
    with pytest.raises(ValueError, match="no more"):
        fit(directory / "failing", logger_in(directory / "failed"), Failing(**secrets()), enable_checkpointing=False)
    return {
        "key": logger.version,
        "key_again": again.version,
        "lost": logger.lost + again.lost,
        "logged": (logged.values, logged.epochs),
        "resumed": resumed.values,
        "best": files,
    }


def raw_runs(directory: Path) -> Any:
    options = {"online": False, "offline_directory": str(directory / "raw"), "display_summary_level": 0}
    return raw_loop(directory, "comet_ml", options)


def resumed_raw_run(directory: Path) -> Any:
    options = {"online": False, "offline_directory": str(directory / "raw_again"), "display_summary_level": 0}
    return raw_loop(directory, "comet_ml", options, resume=str(directory / "state"))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("comet")


@pytest.fixture(scope="module")
def runs(directory: Path) -> list[dict[str, Any]]:
    return run_in_processes(trainer_runs, 2, args=(directory,), timeout=150)


@pytest.fixture(scope="module")
def raw(directory: Path) -> list[Any]:
    first = run_in_processes(raw_runs, 2, args=(directory,), timeout=100)
    return [first[0], run_in_processes(resumed_raw_run, 2, args=(directory,), timeout=100)[0]]


def archives(place: Path) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """What comet_ml has written: about the experiment, and its messages."""
    found = []
    for path in sorted(place.glob("*.zip"), key=lambda path: path.stat().st_mtime_ns):
        with zipfile.ZipFile(path) as archive:
            messages = [json.loads(line) for line in archive.read("messages.json").splitlines()]
            found.append((json.loads(archive.read("experiment.json")), messages))
    return found


def metrics(messages: list[dict[str, Any]]) -> dict[tuple[str, int], tuple[float, int]]:
    every = [message["payload"]["metric"] for message in messages if message["type"] == "metric_msg"]
    return {
        (each["metricName"], each["step"]): (each["metricValue"], each["epoch"])
        for each in every
        if not each["metricName"].startswith(("sys.", "process"))
    }


def sources(messages: list[dict[str, Any]]) -> list[str]:
    uploads = [message["payload"] for message in messages if message["type"] == "file_upload"]
    return [
        Path(each["additional_params"]["fileName"]).name
        for each in uploads
        if (each["additional_params"] or {}).get("type") == "source_code"
    ]


def others(messages: list[dict[str, Any]]) -> dict[str, Any]:
    found = [message["payload"] for message in messages if message["type"] == "log_other"]
    return {each["key"]: each["value"] for each in found}


def test_a_fit_on_two_processes_is_one_experiment_that_equals_what_was_logged(
    runs: list[dict[str, Any]], directory: Path
) -> None:
    experiment, messages = archives(directory / "fit")[0]
    values, epochs = runs[0]["logged"]
    assert len(values) >= 8
    expected = {(f"run_{name}", step): (value, epochs[name, step]) for (name, step), value in values.items()}
    assert metrics(messages) == expected
    assert runs[1]["logged"] == ({}, {})
    assert (experiment["project_name"], sorted(experiment["tags"])) == ("digits", ["a", "b"])
    assert experiment["offline_id"] == runs[0]["key"]
    assert runs[0]["lost"] == 0
    assert others(messages)["status"] == "completed"
    assert others(messages)["Name"] == "first"


def test_parameters_graph_source_environment_and_the_best_checkpoint_are_there(
    runs: list[dict[str, Any]], directory: Path
) -> None:
    _, messages = archives(directory / "fit")[0]
    parameters = {
        message["payload"]["param"]["paramName"]: message["payload"]["param"]["paramValue"]
        for message in messages
        if message["type"] == "parameter_msg"
    }
    assert {name: parameters[name] for name in ("lr", "width", "token", "nested|api_key")} == {
        "lr": 0.05,
        "width": 4,
        "token": "<hidden>",
        "nested|api_key": "<hidden>",
    }
    kinds = {message["type"] for message in messages}
    assert {"graph", "installed_packages", "system_details"} <= kinds
    [graph] = [message["payload"]["graph"] for message in messages if message["type"] == "graph"]
    assert graph.startswith("Planted(")
    uploads = [message["payload"] for message in messages if message["type"] == "file_upload"]
    assert sources(messages) == [SCRIPT.name]
    model = [each for each in uploads if (each["additional_params"] or {}).get("groupingName") == "best"]
    names = {each["additional_params"]["fileName"].partition("/")[2] for each in model}
    assert "MANIFEST.json" in names
    assert names == runs[0]["best"]


def test_what_is_logged_after_a_fit_continues_its_experiment(runs: list[dict[str, Any]], directory: Path) -> None:
    _, (experiment, messages) = archives(directory / "fit")
    assert (experiment["offline_id"], experiment["resume_strategy"]) == (runs[0]["key"], "get")
    uploads = [message["payload"]["upload_type"] for message in messages if message["type"] == "file_upload"]
    assert sorted(uploads) == ["asset", "histogram3d", "text-sample", "visualization"]


def test_a_resumed_fit_continues_the_experiment_after_its_checkpoint(
    runs: list[dict[str, Any]], directory: Path
) -> None:
    [(experiment, messages)] = archives(directory / "resumed")
    assert runs[0]["key_again"] == runs[0]["key"] == experiment["offline_id"]
    assert experiment["resume_strategy"] == "get"
    expected = {(f"run_{name}", step): value for (name, step), value in runs[0]["resumed"].items()}
    assert {key: value for key, (value, _) in metrics(messages).items()} == expected
    before = {step for _, step in runs[0]["logged"][0]}
    assert min(step for _, step in expected) > max(before)


def test_a_fit_that_fails_says_so_with_the_first_line_of_the_error(runs: list[dict[str, Any]], directory: Path) -> None:
    [(_, messages)] = archives(directory / "failed")
    assert others(messages)["status"] == "failed"
    assert others(messages)["error"] == "ValueError: no more of <hidden>"


def test_a_script_that_holds_a_secret_is_not_recorded(runs: list[dict[str, Any]], directory: Path) -> None:
    [(_, messages)] = archives(directory / "failed")
    assert sources(messages) == []
    assert "git-patch" not in {message["payload"].get("upload_type") for message in messages}


def test_a_raw_loop_on_two_processes_is_written_once_and_resumed_in_place(raw: list[Any], directory: Path) -> None:
    [(experiment, messages)] = archives(directory / "raw")
    assert experiment["project_name"] == "raw"
    assert {key: value for key, (value, _) in metrics(messages).items()} == raw[0]
    assert others(messages)["status"] == "completed"
    assert len([message for message in messages if message["payload"].get("upload_type") == "text-sample"]) == 1
    [(continued, after)] = archives(directory / "raw_again")
    assert (continued["offline_id"], continued["resume_strategy"]) == (experiment["offline_id"], "get")
    assert {key: value for key, (value, _) in metrics(after).items()} == raw[1]
    index = (directory / "drivetrain_logs" / "index").read_text().splitlines()
    assert [line.split("  ")[1] for line in index[1:]] == ["../raw_again", "../raw"]


def test_no_planted_secret_is_in_anything_that_was_written(
    runs: list[dict[str, Any]], raw: list[Any], directory: Path
) -> None:
    assert len(list(directory.rglob("*.zip"))) >= 5
    assert len(list(directory.rglob("MANIFEST.json"))) >= 2
    assert files_with(PLANTED, directory) == []


# that cannot start


def complaint_of(options: dict[str, Any]) -> tuple[str, int]:
    return complaint(CometLogger(**options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "has no API key. Set COMET_API_KEY, run `comet login`, or give api_key=."),
        ({"api_key": PLANTED}, "cannot connect to 127.0.0.1 (Connection refused)."),
    ],
)
def test_one_that_cannot_start_names_why_and_the_run_continues(options: dict[str, Any], message: str) -> None:
    env = {"COMET_URL_OVERRIDE": "http://127.0.0.1:9/clientlib/", "COMET_API_KEY": None, "HOME": "/nonexistent"}
    [(line, lost)] = run_in_processes(complaint_of, 1, args=(options,), env=env)
    assert message in line
    assert "online=False" in line
    assert PLANTED not in line
    assert lost == 3


def test_what_is_wrong_with_the_arguments_is_raised_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match=r"mode='append'.*'get_or_create'"):
        CometLogger(mode="append")
    with pytest.raises(ConfigurationError, match="needs the experiment_key"):
        CometLogger(mode="get")
    with pytest.raises(ConfigurationError, match="are aliases"):
        CometLogger(project="a", project_name="b")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"pip install 'drivetrain\[comet\]'"):
        CometLogger()


def test_a_key_that_is_none_is_refused_and_a_given_one_is_kept() -> None:
    logger = CometLogger(online=False)
    with pytest.raises(CheckpointError, match="not a Comet key"):
        logger.load_state_dict({"experiment_key": "../../etc"})
    logger.load_state_dict({"experiment_key": "a" * 32})
    assert logger.version == "a" * 32
    given = CometLogger(online=False, experiment_key="b" * 40)
    given.load_state_dict({"experiment_key": "a" * 32})
    assert given.version == "b" * 40
