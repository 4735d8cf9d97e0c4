"""Tracker that writes to a ClearML server, or to an offline session."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from drivetrain.runtime.errors import CheckpointError, TrackerError
from drivetrain.trackers.base import COMPLETED, Tracker, flatten
from drivetrain.trackers.group import BackgroundTracker
from drivetrain.trackers.index import record_run
from drivetrain.trackers.service import check_reachable, flat_scalars, missing_package, source_is_clean

if TYPE_CHECKING:
    from clearml import Task

_OFFLINE_ADVICE = (
    "ClearMLLogger(online=False) writes a session to disk, which `clearml.Task.import_offline_session` uploads later."
)
_OFFLINE_ID = "offline-"
_SPLITS = ("train", "val", "valid", "test", "eval")
# By default, ClearML 2.1 reports from a forked process. It forks while other threads run, so the child may hold
# their locks and pipes forever.
_NO_FORK = {"sdk": {"development": {"report_use_subprocess": False}}}
_CONFIGURING = threading.Lock()


class ClearMLLogger(BackgroundTracker):
    """Tracker that logs to a ClearML task.

    A background thread sends the values, so training does not wait. `train_loss` and `val_loss` are two series of one
    plot, `loss`. `train/loss` is the series `loss` of the plot `train`. NaN and infinite values are written as text,
    since ClearML would display zeros. A resumed run continues its ClearML task. Offline, it starts a new session with
    the property `continues`. When a `fit` ends, the task is closed with the properties `status` and, if it failed,
    `error`. Later logging reopens the task.

    Args:
        project_name: The project. If None, `CLEARML_PROJECT`, or else `"drivetrain"`.
        task_name: The name of the task. If None, `CLEARML_TASK`, or else the name of the project.
        online: Send values to the server. If False, write a session below `CLEARML_CACHE_DIR`. If None, follow
            `CLEARML_OFFLINE_MODE`.
        access_key: The access key. If None, that of `CLEARML_API_ACCESS_KEY` or of `clearml.conf`.
        secret_key: The secret of the access key. If None, that of `CLEARML_API_SECRET_KEY` or of `clearml.conf`.
        api_host: The address of the API server. If None, that of the environment or of `clearml.conf`.
        task_id: The ID of a task to continue.
        prefix: A prefix for the names of all values, joined by `-`.
        log_model: Upload the best checkpoint when a `fit` ends.
        **kwargs: Arguments of `clearml.Task.init`, such as `tags`, `task_type` or `output_uri`.

    Raises:
        ConfigurationError: If `clearml` is not installed.

    Example:
        ```python
        from drivetrain import ClearMLLogger, Trainer

        trainer = Trainer(logger=ClearMLLogger("digits", "first", online=False))
        ```
    """

    name: ClassVar[str] = "clearml"

    def __init__(
        self,
        project_name: str | None = None,
        task_name: str | None = None,
        online: bool | None = None,
        *,
        access_key: str | None = None,
        secret_key: str | None = None,
        api_host: str | None = None,
        task_id: str | None = None,
        prefix: str | None = None,
        log_model: bool = False,
        **kwargs: Any,
    ) -> None:
        if not self.is_available():
            raise missing_package("ClearMLLogger", "clearml", "clearml")
        project = project_name or os.environ.get("CLEARML_PROJECT") or "drivetrain"
        names = {"project_name": project, "task_name": task_name or os.environ.get("CLEARML_TASK") or project}
        credentials = {"key": access_key, "secret": secret_key, "api_host": api_host}
        self._run_of_clearml = _ClearMLRun(names, credentials, online, task_id, f"{prefix}-" if prefix else "", kwargs)
        super().__init__(self._run_of_clearml)
        self.log_model = log_model

    @classmethod
    def is_available(cls) -> bool:
        return importlib.util.find_spec("clearml") is not None

    @classmethod
    def for_run(cls, save_dir: str | os.PathLike[str], project: str | None, **options: Any) -> Tracker:
        made = cls(**{"project_name": project, **options})
        made._run_of_clearml.save_dir = os.fspath(save_dir)
        return made

    @property
    def version(self) -> str | None:
        """The run's version, which is the ID of its ClearML task, or None before the task is opened."""
        return self._run_of_clearml.task_id


class _ClearMLRun(Tracker):
    name = "clearml"
    save_dir: str | None = None
    """The directory whose index lists the run, or None."""

    def __init__(
        self,
        names: Mapping[str, str],
        credentials: Mapping[str, str | None],
        online: bool | None,
        task_id: str | None,
        prefix: str,
        options: Mapping[str, Any],
    ) -> None:
        self._names, self._online, self._prefix, self._options = dict(names), online, prefix, dict(options)
        self._credentials = {key: value for key, value in credentials.items() if value}
        self.task_id = task_id
        self._is_given = task_id is not None
        self._task: Task | None = None
        self._is_shared = False
        self._properties: dict[str, str] = {}

    @property
    def secrets(self) -> Sequence[str]:
        return [value for key, value in self._credentials.items() if key != "api_host"]

    def load(self) -> None:
        from clearml.config import ConfigSDKWrapper, config_obj

        with _CONFIGURING:  # several threads may open runs at the same time
            if config_obj.get("sdk.development.report_use_subprocess", True):
                config_obj.set_overrides(_NO_FORK)
                ConfigSDKWrapper.clear_config_impl()  # drop the cached configuration

    def start(self) -> None:
        if self._task is not None:
            return
        self.load()
        from clearml import Task

        running: Task | None = Task.current_task()
        if running is not None:  # opened by the script, which also closes it
            self._task, self._is_shared, self.task_id = running, True, running.id
            return
        if self._online is not None:
            Task.set_offline(not self._online)
        if self._credentials and not Task.is_offline():
            Task.set_credentials(**self._credentials)
        if not Task.is_offline():
            _check_server()
        if not source_is_clean("ClearMLLogger", self.secrets):
            os.environ["CLEARML_VCS_DIFF"] = ""  # empty: else ClearML would record the script as the diff
        continued = None if self.task_id is None or self.task_id.startswith(_OFFLINE_ID) else self.task_id
        given: dict[str, Any] = {
            # The logger itself records values, and parsed arguments may contain secrets.
            "auto_connect_frameworks": False,
            "auto_connect_arg_parser": False,
            "reuse_last_task_id": False if continued is None or Task.is_offline() else continued,
            "continue_last_task": False if continued is None or Task.is_offline() else 0,
        }
        task: Task = Task.init(**self._names, **{**given, **self._options})
        if self.task_id is None:
            self.task_id = task.id
        elif task.id != self.task_id:
            self._properties["continues"] = self.task_id
            task.set_user_properties(**self._properties)
        self._task, self._is_shared = task, False
        if self.save_dir is not None:
            place = task.get_offline_mode_folder() if Task.is_offline() else task.get_output_log_web_page()
            record_run(self.save_dir, place or ".", self.secrets)

    @property
    def tracker(self) -> Task:
        self.start()
        assert self._task is not None
        return self._task

    @property
    def _logger(self) -> Any:
        return self.tracker.get_logger()

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        known = self.tracker.get_parameters() or {}
        given = {f"General/{key}": value for key, value in flatten(values).items()}
        self.tracker.set_parameters({**known, **given})

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        numbers, texts = flat_scalars(values)
        for name, value in numbers.items():
            full = name if name == "epoch" else self._prefix + name
            if not math.isfinite(value):
                texts[full] = f"{value}" + ("" if step is None else f" at step {step}")
            elif step is None:
                self._logger.report_single_value(full, value)
            else:
                title, series = plot_of(full)
                self._logger.report_scalar(title, series, value=value, iteration=step)
        for name, text in texts.items():
            self._logger.report_text(f"{name}: {text}", print_console=False)

    def log_images(self, values: Mapping[str, Any], step: int | None = None) -> None:
        for name, images in values.items():
            title, series = plot_of(name)
            for number, image in enumerate(images):
                shown = series if len(images) == 1 else f"{series}_{number}"
                flat = image[..., 0] if image.shape[-1] == 1 else image
                self._logger.report_image(title, shown, iteration=step, image=flat)

    def log_table(
        self, name: str, columns: Sequence[str] | None = None, data: Any = None, step: int | None = None
    ) -> None:
        title, series = plot_of(name)
        self._logger.report_table(title, series, iteration=step, table_plot=[list(columns or ()), *data])

    def log_text(self, values: Mapping[str, str], step: int | None = None) -> None:
        where = "" if step is None else f" (step {step})"
        for name, text in values.items():
            self._logger.report_text(f"{name}{where}: {text}", print_console=False)

    def log_histogram(self, values: Mapping[str, Any], step: int | None = None) -> None:
        import numpy as np

        for name, each in values.items():
            title, series = plot_of(name)
            counts, edges = np.histogram(each, bins=64)
            labels = [f"{edge:.4g}" for edge in edges[:-1]]
            self._logger.report_histogram(
                title, series, iteration=step, values=counts, xlabels=labels, xaxis="value", yaxis="count"
            )

    def log_graph(self, model: Any, input_array: Any = None) -> None:
        self.tracker.set_configuration_object("model", config_text=model)

    def log_artifact(self, path: str | os.PathLike[str], name: str | None = None) -> None:
        given = os.fspath(path)
        if not self.tracker.upload_artifact(name or os.path.basename(given), given, wait_on_upload=True):
            raise OSError(f"{given} could not be uploaded.")

    def save(self) -> None:
        self.tracker.flush()

    def finalize(self, status: str = COMPLETED, message: str = "") -> None:
        task, self._task = self._task, None
        if task is None:
            return
        properties, self._properties = {**self._properties, "status": status}, {}
        is_offline = task.is_offline()
        if is_offline:
            _wait_for_source(task)
        task.set_user_properties(**properties, **({"error": message} if message else {}))
        if self._is_shared:
            task.flush()
            return
        task.close()
        if status != COMPLETED and not is_offline:  # `close` marks the task as completed
            mark = task.mark_failed if status == "failed" else task.mark_stopped
            mark(status_message=f"{status}: {message}" if message else status, force=True)

    def finish(self) -> None:
        self.finalize()

    def state_dict(self) -> dict[str, Any]:
        return {"task_id": self.task_id}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        task_id = state.get("task_id")
        if task_id is None or self._is_given:
            return
        if not (isinstance(task_id, str) and task_id.removeprefix(_OFFLINE_ID).isalnum()):
            raise CheckpointError(
                f"The state of ClearMLLogger in this checkpoint has task_id={task_id!r}, which is not a ClearML ID."
            )
        self.task_id = task_id


def plot_of(name: str) -> tuple[str, str]:
    """Split a metric's name into title and series of a ClearML plot: `val_loss` gives `("loss", "val")`."""
    if "/" in name:
        title, _, series = name.partition("/")
        return title, series
    split, _, rest = name.partition("_")
    return (rest, split) if split in _SPLITS and rest else (name, name)


def _wait_for_source(task: Task) -> None:
    # ClearML 2.1 sets properties without the lock of the thread that analyzes the script. The thread would then
    # overwrite the offline session without the properties.
    with contextlib.suppress(AttributeError, TypeError):  # raised if no requirements were found
        task.get_requirements()


def _check_server() -> None:
    """Raise `TrackerError` if the ClearML server cannot be used."""
    from clearml.backend_api import Session
    from clearml.config import config_obj

    names = ("CLEARML_API_ACCESS_KEY", "CLEARML_API_SECRET_KEY")
    has_keys = all(os.environ.get(name) for name in names) or os.environ.get("CLEARML_AUTH_TOKEN")
    if not (has_keys or config_obj.get("api.credentials.access_key", None) or Session.default_key):
        raise TrackerError(
            "ClearMLLogger has no credentials. Run `clearml-init`, set CLEARML_API_ACCESS_KEY and "
            f"CLEARML_API_SECRET_KEY, or pass access_key= and secret_key=. {_OFFLINE_ADVICE}"
        )
    check_reachable("ClearMLLogger", Session.get_api_server_host(), _OFFLINE_ADVICE)
