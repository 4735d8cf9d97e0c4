"""Tracker that writes to MLflow, on a server or in a local database."""

from __future__ import annotations

import contextlib
import os
import time
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from drivetrain.runtime.logging import get_logger
from drivetrain.trackers.base import COMPLETED, Tracker, flatten
from drivetrain.trackers.index import locked
from drivetrain.trackers.secrets import Secrets
from drivetrain.trackers.service import PackageLogger, PackageRun, check_reachable, file_name, flat_scalars

logger = get_logger(__name__)

_LOCAL_ADVICE = "MLFlowLogger(tracking_uri='sqlite:///mlflow.db') writes to a local database."
_STATUS = {COMPLETED: "FINISHED", "failed": "FAILED"}
_LOCK_SECONDS = 120.0
"""The seconds to wait for another run that creates the tables of a new database."""

_BATCH = 100
"""The maximum number of parameters or tags in one MLflow request."""


class MLFlowLogger(PackageLogger):
    """Tracker that logs to an MLflow run.

    A background thread sends the values, so training does not wait. Without a `tracking_uri`, the run is written to the
    database `mlflow.db` in `save_dir`, with its files beside it. `mlflow ui --backend-store-uri` displays it. A resumed
    run continues its MLflow run. When a `fit` ends, the MLflow run is marked as finished, failed or killed, with the
    tags `status` and, if it failed, `error`. Later logging reopens the run. MLflow never changes a parameter: a second
    value is ignored with a warning.

    Args:
        experiment_name: The name of the experiment. If None, `MLFLOW_EXPERIMENT_NAME`, or else `"drivetrain"`.
        run_name: The name of the run.
        tracking_uri: The address of a server or database. If None, that of `MLFLOW_TRACKING_URI`.
        tags: Tags of the run.
        save_dir: The root directory of all runs.
        log_model: Upload the best checkpoint when a `fit` ends.
        prefix: A prefix for the names of all values, joined by `-`.
        artifact_location: The location of the files of a new experiment. If None, the server's default, or `save_dir`.
        run_id: The ID of a run to continue.
        synchronous: Wait until each MLflow call is done. None means True.
        description: The description of the run.
        nested_run: Create the run as a child of the run that the script has opened.
        logging_dir: An alias of `artifact_location`.

    Raises:
        ConfigurationError: If `mlflow` is not installed.

    Example:
        ```python
        from drivetrain import MLFlowLogger, Trainer

        trainer = Trainer(logger=MLFlowLogger("digits", tracking_uri="sqlite:///logs/mlflow.db"))
        ```
    """

    name: ClassVar[str] = "mlflow"

    def __init__(
        self,
        experiment_name: str | None = None,
        run_name: str | None = None,
        tracking_uri: str | None = None,
        tags: Mapping[str, Any] | None = None,
        save_dir: str | os.PathLike[str] | None = "./mlruns",
        log_model: bool | str = False,
        prefix: str = "",
        artifact_location: str | None = None,
        run_id: str | None = None,
        synchronous: bool | None = None,
        *,
        description: str | None = None,
        nested_run: bool = False,
        logging_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        place = os.fspath(save_dir or "./mlruns")
        own_files = artifact_location or (None if logging_dir is None else Path(logging_dir).absolute().as_uri())
        uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            uri = f"sqlite:///{os.path.abspath(place)}/mlflow.db"
            own_files = own_files or Path(place, "artifacts").absolute().as_uri()
        given = {**(tags or {}), **({"mlflow.note.content": description} if description else {})}
        experiment = experiment_name or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "drivetrain"
        run = _MLFlowRun(place, run_id, uri, (experiment, own_files), given)
        run.run_name, run.is_nested, run.synchronous = run_name, nested_run, synchronous
        run.prefix = f"{prefix}-" if prefix else ""
        super().__init__(run, log_model)

    @classmethod
    def for_run(cls, save_dir: str | os.PathLike[str], project: str | None, **options: Any) -> Tracker:
        return cls(**{"save_dir": os.path.join(save_dir, "mlruns"), "experiment_name": project, **options})

    @property
    def run_id(self) -> str | None:
        """The ID of the MLflow run, or None before the run is opened.

        An alias of `version`.
        """
        return self.version


class _MLFlowRun(PackageRun):
    name = "mlflow"
    id_form = r"[0-9a-zA-Z]{1,64}"
    run_name: str | None = None
    is_nested = False
    synchronous: bool | None = None
    prefix = ""

    def __init__(
        self,
        save_dir: str,
        run_id: str | None,
        uri: str,
        experiment: tuple[str, str | None],
        tags: Mapping[str, Any],
    ) -> None:
        super().__init__("MLFlowLogger", os.path.dirname(save_dir.rstrip("/")) or ".", run_id)
        self._uri, self._experiment, self._tags = uri, experiment, dict(tags)
        self._waiting: list[Any] = []
        self._sent: dict[str, str] = {}

    @property
    def secrets(self) -> Sequence[str]:
        parsed = urllib.parse.urlsplit(self._uri)
        return [urllib.parse.unquote(parsed.password), parsed.password] if parsed.password else []

    def load(self) -> None:
        from mlflow import MlflowClient

        _, _, path = self._uri.partition("sqlite:///")
        # Creating the tables of a new database is slow: do it now, so that the first checkpoint does not wait for it.
        if path and not os.path.exists(path):
            with self._alone():
                MlflowClient(self._uri).get_experiment_by_name(self._experiment[0])

    def open(self) -> str | None:
        from mlflow import MlflowClient

        if self._uri.startswith(("http://", "https://")):
            check_reachable("MLFlowLogger", self._uri, _LOCAL_ADVICE)
        with self._alone():
            client = MlflowClient(self._uri)
            continued = client.get_run(self.run_id) if self._continues else None
            experiment = self._find_experiment(client) if continued is None else continued.info.experiment_id
        if continued is not None:
            client.update_run(self.run_id, status="RUNNING")
        else:
            self.run_id = client.create_run(experiment, tags=self._context(), run_name=self.run_name).info.run_id
        self._run = client
        parsed = urllib.parse.urlsplit(self._uri)
        shown = self._uri if parsed.hostname is None else f"{parsed.scheme}://{parsed.hostname}"
        return f"{shown}#/experiments/{experiment}/runs/{self.run_id}"

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        _, is_sqlite, path = self._uri.partition("sqlite:///")
        if not is_sqlite:
            yield
            return
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        # One run at a time creates the tables of the database.
        with locked(f"{path}.lock", _LOCK_SECONDS):
            yield

    def _find_experiment(self, client: Any) -> str:
        from mlflow.exceptions import MlflowException

        name, files = self._experiment
        # Another run may create the experiment between the two calls, so look once more.
        for _ in range(2):
            found = client.get_experiment_by_name(name)
            if found is not None and found.lifecycle_stage != "deleted":
                return str(found.experiment_id)
            with contextlib.suppress(MlflowException):  # another run may create it at the same time
                return str(client.create_experiment(name, artifact_location=files))
        return str(client.create_experiment(name, artifact_location=files))

    def _context(self) -> dict[str, str]:
        import mlflow
        from mlflow.tracking.context.registry import resolve_tags

        tags = dict(self._tags)
        parent = mlflow.active_run() if self.is_nested else None
        if parent is not None:
            tags["mlflow.parentRunId"] = parent.info.run_id
        hidden: dict[str, str] = Secrets(self.secrets).hide(resolve_tags(tags))
        return hidden

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        client = self.tracker
        # A changed value would make its whole request fail. Asynchronous requests may not have arrived yet.
        known = {**client.get_run(self.run_id).data.params, **self._sent}
        given = {_valid(key): str(value) for key, value in flatten(values).items()}
        changed = sorted(key for key, value in given.items() if known.get(key, value) != value)
        if changed:
            logger.warning(
                f"MLFlowLogger: the run keeps its old values of {', '.join(changed)}. MLflow cannot change parameters."
            )
        params = [Param(key, value) for key, value in given.items() if key not in known]
        for first in range(0, len(params), _BATCH):
            self._send(params=params[first : first + _BATCH])
        self._sent |= {param.key: param.value for param in params}

    def _send(self, **entities: Any) -> None:
        found = self.tracker.log_batch(self.run_id, **entities, synchronous=self.synchronous)
        if self.synchronous is False:
            self._waiting.append(found)

    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        from mlflow.entities import Metric, RunTag

        now = int(time.time() * 1000)
        numbers, texts = flat_scalars(values)
        metrics = [Metric(self._full(name), value, now, step or 0) for name, value in numbers.items()]
        self._send(metrics=metrics, tags=[RunTag(self._full(name), text) for name, text in texts.items()], **options)

    def _full(self, name: str) -> str:
        return _valid(name if name == "epoch" else self.prefix + name)

    def log_images(self, values: Mapping[str, Any], step: int | None = None) -> None:
        for name, images in values.items():
            for number, image in enumerate(images):
                key = _valid(name if len(images) == 1 else f"{name}_{number}")
                self.tracker.log_image(self.run_id, image, key=key, step=step or 0)

    def log_table(
        self, name: str, columns: Sequence[str] | None = None, data: Any = None, step: int | None = None
    ) -> None:
        titles = list(columns or ())
        table = {title: [row[index] for row in data] for index, title in enumerate(titles)}
        self.tracker.log_table(self.run_id, table, file_name(f"tables/{name}", step, ".json"))

    def log_text(self, values: Mapping[str, str], step: int | None = None) -> None:
        for name, text in values.items():
            self.tracker.log_text(self.run_id, text, file_name(f"texts/{name}", step, ".txt"))

    def log_graph(self, model: Any, input_array: Any = None) -> None:
        self.tracker.log_text(self.run_id, model, "model.txt")

    def log_artifact(self, path: str | os.PathLike[str], name: str | None = None) -> None:
        given = os.fspath(path)
        if os.path.isdir(given):
            self.tracker.log_artifacts(self.run_id, given, name or os.path.basename(given))
        else:
            self.tracker.log_artifact(self.run_id, given, name)

    def save(self) -> None:
        waiting, self._waiting = self._waiting, []
        for operations in waiting:
            operations.wait()

    def finalize(self, status: str = COMPLETED, message: str = "") -> None:
        client, self._run = self._run, None
        if client is None:
            return
        try:
            self.save()
        finally:
            client.set_tag(self.run_id, "status", status)
            if message:
                client.set_tag(self.run_id, "error", message)
            client.set_terminated(self.run_id, _STATUS.get(status, "KILLED"))


def _valid(name: str) -> str:
    # MLflow allows only these characters in names.
    return "".join(each if each.isalnum() or each in "_-. /:" else "_" for each in name)
