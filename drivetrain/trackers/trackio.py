"""Tracker that writes to Trackio: a local database, a Hugging Face Space or a server."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from drivetrain.runtime.errors import TrackerError
from drivetrain.trackers.base import COMPLETED, Tracker, flatten
from drivetrain.trackers.service import PackageLogger, PackageRun, check_reachable, file_name

_LOCAL_ADVICE = "TrackioLogger without space_id and server_url writes to a local database."

_BATCH_SECONDS = 10.0
"""The maximum seconds to wait for pending values before the configuration is written."""


class TrackioLogger(PackageLogger):
    """Tracker that logs to a Trackio run.

    A background thread sends the values, so training does not wait. Without `space_id` and `server_url`, the run is
    written to the database of the project below `TRACKIO_DIR`, and `trackio show` displays it. A resumed run continues
    its Trackio run, identified by its name. When a `fit` ends, the run is closed, with `status` and, if it failed,
    `error` in its configuration. Later logging reopens the run.

    Args:
        project: The project. If None, `"drivetrain"`.
        run_name: The name of the run. If None, a unique name.
        space_id: The Hugging Face Space to write to. If None, that of `TRACKIO_SPACE_ID`.
        prefix: A prefix for the names of all values, joined by `-`.
        log_model: Store the best checkpoint as an artifact when a `fit` ends.
        save_dir: The directory whose index lists the run.
        **kwargs: Arguments of `trackio.init`, such as `server_url`, `group` or `auto_log_gpu`.

    Raises:
        ConfigurationError: If `trackio` is not installed.

    Example:
        ```python
        from drivetrain import TrackioLogger, Trainer

        trainer = Trainer(logger=TrackioLogger("digits"))
        ```
    """

    name: ClassVar[str] = "trackio"

    def __init__(
        self,
        project: str | None = None,
        run_name: str | None = None,
        space_id: str | None = None,
        prefix: str = "",
        *,
        log_model: bool = False,
        save_dir: str | os.PathLike[str] = ".",
        **kwargs: Any,
    ) -> None:
        name = kwargs.pop("name", run_name)  # `name` is the argument of `trackio.init`
        options = {"project": project or "drivetrain", "space_id": space_id, **kwargs}
        super().__init__(_TrackioRun(os.fspath(save_dir), name, options, f"{prefix}-" if prefix else ""), log_model)

    @classmethod
    def for_run(cls, save_dir: str | os.PathLike[str], project: str | None, **options: Any) -> Tracker:
        return cls(**{"save_dir": save_dir, "project": project, **options})


class _TrackioRun(PackageRun):
    name = "trackio"
    has_own_id = True

    def __init__(self, save_dir: str, run_name: str | None, options: Mapping[str, Any], prefix: str) -> None:
        super().__init__("TrackioLogger", save_dir, run_name)
        self._continues = False  # a given name is that of a new run, since several runs may share a name
        self._options, self._prefix = dict(options), prefix
        self._last_step: int | None = None
        self._configuration: dict[str, Any] = {}

    @property
    def secrets(self) -> Sequence[str]:
        _, _, token = (self._options.get("server_url") or "").partition("write_token=")
        return [token] if token else []

    def load(self) -> None:
        import trackio  # noqa: F401

    def open(self) -> str | None:
        import trackio
        from trackio.sqlite_storage import SQLiteStorage
        from trackio.utils import TRACKIO_DIR

        options = dict(self._options)
        server = options.get("server_url") or os.environ.get("TRACKIO_SERVER_URL")
        space = options.get("space_id") or os.environ.get("TRACKIO_SPACE_ID")
        if space:
            self._check_space()
        elif server:
            check_reachable("TrackioLogger", server, _LOCAL_ADVICE)
        given = {"resume": "allow" if self._continues else "never", "embed": False, **options}
        self._run = trackio.init(**{**given, "name": self.run_id})
        if not (space or server):
            before = SQLiteStorage.get_run_config(options["project"], self.run_id, run_id=self._run.id) or {}
            self._configuration = {**_shown(before), **self._configuration}
        self._run.config.update(self._configuration)
        where = os.path.join(str(TRACKIO_DIR), f"{options['project']}.db")
        return f"https://huggingface.co/spaces/{space}" if space else server.partition("?")[0] if server else where

    def _check_space(self) -> None:
        import huggingface_hub

        if not huggingface_hub.get_token():
            raise TrackerError(
                f"TrackioLogger has no token for its Space. Set HF_TOKEN or run `hf auth login`. {_LOCAL_ADVICE}"
            )
        check_reachable("TrackioLogger", os.environ.get("HF_ENDPOINT", "https://huggingface.co"), _LOCAL_ADVICE)

    def _write(self, values: Mapping[str, Any], step: int | None) -> None:
        named = {name if name == "epoch" else self._prefix + name: value for name, value in values.items()}
        if step is not None:
            self._last_step = max(self._last_step or 0, step)
        self.tracker.log(named, step=step)

    def _configure(self, values: Mapping[str, Any]) -> None:
        run = self.tracker
        deadline = time.monotonic() + _BATCH_SECONDS
        # Trackio 0.43 writes the configuration once, together with the next values. If one batch holds several
        # configurations, it writes the first, so pending values must be sent before.
        while (run._queued_logs or run._sending_batch) and time.monotonic() < deadline:
            time.sleep(0.02)
        self._configuration.update(values)
        run.config.update(self._configuration)
        run._config_logged = False

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        self._configure(_shown(flatten(values)))

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        self._write(self._without_arrays(values), step)

    def log_images(self, values: Mapping[str, Any], step: int | None = None) -> None:
        import trackio

        for name, images in values.items():
            for number, image in enumerate(images):
                title = name if len(images) == 1 else f"{name}_{number}"
                flat = image[..., 0] if image.shape[-1] == 1 else image
                self._write({title: trackio.Image(flat)}, step)

    def log_table(
        self, name: str, columns: Sequence[str] | None = None, data: Any = None, step: int | None = None
    ) -> None:
        import trackio

        self._write({name: trackio.Table(columns=list(columns or ()), data=data)}, step)

    def log_text(self, values: Mapping[str, str], step: int | None = None) -> None:
        import trackio

        self._write({name: trackio.Markdown(text) for name, text in values.items()}, step)

    def log_histogram(self, values: Mapping[str, Any], step: int | None = None) -> None:
        import trackio

        self._write({name: trackio.Histogram(each) for name, each in values.items()}, step)

    def log_artifact(self, path: str | os.PathLike[str], name: str | None = None) -> None:
        given = os.fspath(path)
        title = f"model-{self.run_id}" if name == "best" else name or os.path.basename(given)
        self.tracker.log_artifact(given, file_name(title).replace("/", "-"), "model" if name == "best" else "file")

    def finalize(self, status: str = COMPLETED, message: str = "") -> None:
        if self._run is None:
            return
        self._configuration.pop("error", None)
        self._run.config.pop("error", None)
        self._configure({"status": status, **({"error": message} if message else {})})
        self._run.log({}, step=self._last_step)  # sends the configuration
        run, self._run = self._run, None
        run.finish()


def _shown(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if not key.startswith("_")}
