"""MLFlowLogger with the real package and a database of its own: what its client reads is what was logged."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from drivetrain import MLFlowLogger, PartialState
from drivetrain.trackers.mlflow import _valid
from tests.pool import run_in_processes
from tests.trackers.package_contract import Found, Kit, PackageContract
from tests.trackers.runs import PICTURE, PLANTED, SCRIPT, TEXT, complaint, pretend

pytestmark = pytest.mark.trackers


def uri_in(place: Path) -> str:
    return f"sqlite:///{place}/mlruns/mlflow.db"


def make(place: Path, **options: Any) -> MLFlowLogger:
    return MLFlowLogger("digits", "first", save_dir=place / "mlruns", tags={"note": PLANTED, "kind": "test"}, **options)


def init_kwargs(place: Path) -> Mapping[str, Any]:
    return {"save_dir": str(place)}


def runs_in(place: Path) -> tuple[Any, list[Any]]:
    from mlflow import MlflowClient

    client = MlflowClient(uri_in(place))
    experiments = [each.experiment_id for each in client.search_experiments() if each.name != "Default"]
    return client, client.search_runs(experiments)


def read(place: Path, run_id: str) -> Found:
    from PIL import Image

    client, runs = runs_in(place)
    [run] = [each for each in runs if run_id in ("", each.info.run_id)]
    found = Found()
    for name in run.data.metrics:
        for metric in client.get_metric_history(run.info.run_id, name):
            found.values[metric.key, metric.step] = metric.value
    found.parameters = dict(run.data.params)
    found.status, found.error = run.data.tags["status"], run.data.tags.get("error", "")
    assert run.info.status == {"completed": "FINISHED", "failed": "FAILED"}[found.status]
    files = Path(run.info.artifact_uri.removeprefix("file://"))
    found.files = {path.name for path in (files / "best").rglob("*") if path.is_file()}
    for path in files.glob("images/picture+step+2+*.png"):
        pixels = Image.open(path).convert("RGB")
        assert pixels.getpixel((7, 5)) == tuple(int(each * 255 + 0.5) for each in PICTURE[:, 5, 7])
        found.media.add("images")
    for path in files.glob("tables/table-2.json"):
        table = json.loads(path.read_text())
        assert (table["columns"], table["data"]) == (["a", "b"], [[1, 2], [3, 4]])
        found.media.add("tables")
    for path in (files / "texts").glob("sample-*.txt"):
        assert path.read_text() in ("some text", TEXT)
        found.media.add("texts")
    return found


class TestMLFlowLogger(PackageContract):
    kit = Kit("mlflow", make, read, init_kwargs, "log_batch", media=frozenset({"images", "tables", "texts"}))

    def test_tags_context_and_graph_are_there(self, runs: list[dict[str, Any]], directory: Path) -> None:
        client, found = runs_in(directory / "fit")
        [run] = found
        assert run.info.run_name == "first"
        assert client.get_experiment(run.info.experiment_id).name == "digits"
        assert run.data.tags["kind"] == "test"
        assert run.data.tags["mlflow.source.name"].endswith(SCRIPT.name)
        assert client.download_artifacts(run.info.run_id, "model.txt")
        text = Path(client.download_artifacts(run.info.run_id, "model.txt")).read_text()
        assert text.startswith("Planted(")

    def test_a_raw_loop_names_the_experiment(self, raw: list[Any], directory: Path) -> None:
        client, [run] = runs_in(directory / "raw")
        assert client.get_experiment(run.info.experiment_id).name == "raw"


def begin_at_once(directory: Path) -> tuple[str | None, int]:
    """A run of its own on each process, in a database that none of them has made yet."""
    import os

    import torch.distributed

    rank = PartialState().process_index
    import mlflow  # noqa: F401

    torch.distributed.barrier()
    PartialState._reset_state()
    os.environ["RANK"] = "0"
    logger = MLFlowLogger("digits", save_dir=directory / "mlruns")
    logger.log({"loss": float(rank)}, 1)
    logger.finish()
    return logger.version, logger.lost


def test_runs_that_begin_at_once_in_a_new_database_are_all_there(tmp_path: Path) -> None:
    outcomes = run_in_processes(begin_at_once, 3, args=(tmp_path,), timeout=150)
    assert [lost for _, lost in outcomes] == [0, 0, 0]
    found = {each.info.run_id: each.data.metrics["loss"] for each in runs_in(tmp_path)[1]}
    assert found == {run_id: float(rank) for rank, (run_id, _) in enumerate(outcomes)}


def changed_parameters(directory: Path) -> tuple[str | None, int, list[str]]:
    import logging

    pretend(SCRIPT)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("drivetrain").addHandler(handler)
    logger = MLFlowLogger("digits", save_dir=directory / "mlruns", synchronous=False)
    logger.log_hyperparams({"lr": 0.1, "width": 4})
    logger.log_hyperparams({"lr": 0.2, "depth": 2})
    logger.log({"loss": 1.0, "note": "text"}, 1)
    logger.finish()
    return logger.version, logger.lost, [line for line in lines if "cannot change parameters" in line]


def test_a_parameter_keeps_its_first_value_and_calls_that_do_not_wait_are_waited_for(tmp_path: Path) -> None:
    [(_, lost, lines)] = run_in_processes(changed_parameters, 1, args=(tmp_path,), timeout=100)
    _, [run] = runs_in(tmp_path)
    assert run.data.params == {"lr": "0.1", "width": "4", "depth": "2"}
    assert (run.data.metrics["loss"], run.data.tags["note"], lost) == (1.0, "text", 0)
    assert "old values of lr" in lines[0]


def complaint_of(options: dict[str, Any]) -> tuple[str, int]:
    return complaint(MLFlowLogger(**options))


def test_one_that_cannot_start_names_why_and_the_run_continues(tmp_path: Path) -> None:
    options = {"tracking_uri": f"http://user:{PLANTED}@127.0.0.1:9", "save_dir": tmp_path}
    [(line, lost)] = run_in_processes(complaint_of, 1, args=(options,))
    assert "cannot connect to 127.0.0.1 (Connection refused)." in line
    assert "tracking_uri='sqlite:///mlflow.db'" in line
    assert PLANTED not in line
    assert lost == 3


@pytest.mark.parametrize(("name", "valid"), [("val_loss/0", "val_loss/0"), ("loss@5", "loss_5"), ("a b:c", "a b:c")])
def test_a_name_has_the_characters_that_mlflow_takes(name: str, valid: str) -> None:
    assert _valid(name) == valid
