"""`MLFlowLogger` with annotations as types rather than strings, which command lines need."""

import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from drivetrain.compat.lightning.fabric.utilities.rank_zero import rank_zero_only, rank_zero_warn
from drivetrain.compat.lightning.pytorch.loggers.checkpoint_uploads import CheckpointUploads, SavedCheckpoint
from drivetrain.compat.lightning.pytorch.loggers.logger import Logger, rank_zero_experiment
from drivetrain.compat.lightning.pytorch.loggers.packages import check_installed, with_prefix
from drivetrain.trackers.base import flatten, hyperparameters_of, plain

__all__ = ["MLFlowLogger"]

_FILES = "file:"
_STATUS = {"success": "FINISHED", "finished": "FINISHED", "failed": "FAILED"}
_BATCH = 100
"""How many parameters MLflow takes in one request."""
_LENGTH = 250
"""How many characters of a parameter MLflow keeps."""


class MLFlowLogger(Logger):
    """Logger for MLflow that writes synchronously. `experiment` is the `MlflowClient`."""

    def __init__(
        self,
        experiment_name: str = "lightning_logs",
        run_name: str | None = None,
        tracking_uri: str | None = None,
        tags: dict[str, Any] | None = None,
        save_dir: str | None = "./mlruns",
        log_model: Literal["all"] | bool = False,
        prefix: str = "",
        artifact_location: str | None = None,
        run_id: str | None = None,
        synchronous: bool | None = None,
    ) -> None:
        check_installed("MLFlowLogger", "mlflow", "mlflow")
        super().__init__()
        self._save_dir = os.fspath(save_dir or "./mlruns")
        self._tracking_uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or _address_of(self._save_dir)
        if artifact_location is None and self._tracking_uri == _database_in(self._save_dir):
            artifact_location = Path(self._save_dir, "artifacts").absolute().as_uri()  # MLflow's choice is ./mlruns
        self._experiment_name, self._artifact_location = experiment_name, artifact_location
        self._experiment_id: str | None = None
        self._run_id = run_id
        self._tags = {**(tags or {}), **({"mlflow.runName": run_name} if run_name else {})}
        self._uploads = CheckpointUploads(log_model)
        self._prefix = prefix
        self._call_options = {} if synchronous is None else {"synchronous": synchronous}
        self._initialized = False
        self._mlflow_client = self._connect()

    def _connect(self) -> Any:
        from mlflow.tracking import MlflowClient

        return MlflowClient(self._tracking_uri)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_mlflow_client": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._mlflow_client = self._connect()

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The `MlflowClient`. On ranks other than 0, an object that does nothing."""
        if not self._initialized:
            import mlflow

            mlflow.set_tracking_uri(self._tracking_uri)
            self._open()
            self._initialized = True
        return self._mlflow_client

    def _open(self) -> None:
        """Look up the run to continue, or create a run."""
        client = self._mlflow_client
        if self._run_id is not None:
            self._experiment_id = client.get_run(self._run_id).info.experiment_id
            return
        if self._experiment_id is None:
            found = client.get_experiment_by_name(self._experiment_name)
            if found is not None and getattr(found, "lifecycle_stage", "active") != "deleted":
                self._experiment_id = found.experiment_id
            else:
                self._experiment_id = client.create_experiment(
                    name=self._experiment_name, artifact_location=self._artifact_location
                )
        run = client.create_run(experiment_id=self._experiment_id, tags=_with_context(self._tags))
        self._run_id = run.info.run_id

    @property
    def run_id(self) -> str | None:
        """ID of the run. Reading it opens the run."""
        _ = self.experiment
        return self._run_id

    @property
    def experiment_id(self) -> str | None:
        """ID of the experiment. Reading it opens the run."""
        _ = self.experiment
        return self._experiment_id

    @property
    def name(self) -> str | None:  # type: ignore[override]
        """ID of the experiment. Reading it opens the run."""
        return self.experiment_id

    @property
    def version(self) -> str | None:
        """ID of the run. Reading it opens the run."""
        return self.run_id

    @property
    def save_dir(self) -> str | None:
        """Directory of all runs, or None if a server stores them."""
        if self._tracking_uri.startswith(_FILES):
            return self._tracking_uri.removeprefix(_FILES)
        return self._save_dir if self._tracking_uri == _database_in(self._save_dir) else None

    # values

    @rank_zero_only
    def log_hyperparams(self, params: Any) -> None:
        """Log hyper-parameters as MLflow parameters, with values cut to MLflow's length limit."""
        from mlflow.entities import Param

        flat = flatten(plain(hyperparameters_of(params)))
        entities = [Param(key=name, value=str(value)[:_LENGTH]) for name, value in flat.items()]
        for first in range(0, len(entities), _BATCH):
            self._send(params=entities[first : first + _BATCH])

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log the metrics of one step."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        entities = []
        for name, value in with_prefix(metrics, self._prefix).items():
            if isinstance(value, str):
                rank_zero_warn(
                    f"MLFlowLogger: {name} is the text {value!r}, and left out: MLflow's metrics are numbers."
                )
                continue
            entities.append(Metric(key=_valid(name), value=plain(value), timestamp=now, step=step or 0))
        self._send(metrics=entities)

    def _send(self, **entities: Any) -> None:
        self.experiment.log_batch(run_id=self.run_id, **entities, **self._call_options)

    # checkpoints

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        for saved in self._uploads.after_save(checkpoint_callback):
            self._upload(saved)

    @rank_zero_only
    def finalize(self, status: str = "success", message: str = "") -> None:
        if not self._initialized:
            return
        for saved in self._uploads.at_end():
            self._upload(saved)
        if self.experiment.get_run(self.run_id):
            self.experiment.set_terminated(self.run_id, _STATUS.get(status, "KILLED"))

    def _upload(self, saved: SavedCheckpoint) -> None:
        import yaml

        place = f"model/checkpoints/{Path(saved.path).stem}"
        if os.path.isdir(saved.path):
            self.experiment.log_artifacts(self.run_id, saved.path, place)
        else:
            self.experiment.log_artifact(self.run_id, saved.path, place)
        with tempfile.TemporaryDirectory(prefix="checkpoint-") as folder:
            Path(folder, "metadata.yaml").write_text(yaml.safe_dump(saved.metadata), encoding="utf-8")
            Path(folder, "aliases.txt").write_text(str(saved.aliases), encoding="utf-8")
            self.experiment.log_artifacts(self.run_id, folder, place)


def _address_of(save_dir: str) -> str:
    """Return the tracking URI of a directory: file-based, or SQLite for MLflow versions without a file store."""
    try:
        from mlflow.environment_variables import MLFLOW_ALLOW_FILE_STORE
    except ImportError:
        return f"{_FILES}{save_dir}"
    if MLFLOW_ALLOW_FILE_STORE.get():
        return f"{_FILES}{save_dir}"
    os.makedirs(save_dir, exist_ok=True)
    return _database_in(save_dir)


def _database_in(save_dir: str) -> str:
    return f"sqlite:///{os.path.abspath(save_dir)}/mlflow.db"


def _with_context(tags: Mapping[str, Any]) -> Any:
    """Return the tags together with MLflow's context tags, such as the user and the source file."""
    try:
        from mlflow.tracking.context.registry import resolve_tags
    except ImportError:
        return dict(tags)
    return resolve_tags(dict(tags))


def _valid(name: str) -> str:
    """Replace characters in a metric name that MLflow does not allow by `_`, with a warning."""
    valid = "".join(each if each.isalnum() or each in "_-. /" else "_" for each in name)
    if valid != name:
        rank_zero_warn(
            f"MLflow takes no special characters in metric names but '_', '-', '/', '.' and ' '; with those special "
            f"characters in metric name {name!r} it is logged as {valid!r}.",
            category=RuntimeWarning,
        )
    return valid
