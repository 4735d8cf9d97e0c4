"""Tracker that writes the files of DVCLive."""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from drivetrain.runtime.errors import CheckpointError, TrackerError
from drivetrain.runtime.logging import get_logger
from drivetrain.trackers.base import COMPLETED, Tracker, flatten, plain
from drivetrain.trackers.service import PackageLogger, PackageRun, file_name

logger = get_logger(__name__)

_OWN_FILE = "run_id"
"""The name of the file in the directory that stores the ID of the run."""


class DVCLiveLogger(PackageLogger):
    """Tracker that writes DVCLive files.

    A background thread writes the values, so training does not wait. A new run replaces the earlier one in its
    directory, as is usual with DVC. A resumed run continues the run of its checkpoint, and removes the values after the
    checkpoint. If the directory holds another run by then, it starts a new one. When a `fit` ends, `status` and, if it
    failed, `error` are added to the summary, and in a Git repository with DVC the run is saved as an experiment. Later
    logging reopens the run. Tables and histograms are stored as custom plots.

    Args:
        run_name: The name of the experiment.
        prefix: A prefix for the names of all values, joined by `-`.
        log_model: Track the best checkpoint with DVC when a `fit` ends. This needs a DVC repository.
        dir: The directory to write to.
        live: A `dvclive.Live` object of the script, which is left open.
        save_dir: The directory whose index lists the run.
        **kwargs: Arguments of `dvclive.Live`, such as `report`, `save_dvc_exp`, `dvcyaml` or `monitor_system`.

    Raises:
        ConfigurationError: If `dvclive` is not installed.

    Example:
        ```python
        from drivetrain import DVCLiveLogger, Trainer

        trainer = Trainer(logger=DVCLiveLogger(dir="logs/dvclive"))
        ```
    """

    name: ClassVar[str] = "dvclive"

    def __init__(
        self,
        run_name: str | None = None,
        prefix: str = "",
        log_model: bool = False,
        dir: str | os.PathLike[str] = "dvclive",
        live: Any = None,
        *,
        save_dir: str | os.PathLike[str] = ".",
        **kwargs: Any,
    ) -> None:
        options = {"exp_name": run_name, **kwargs}
        run = _DVCLiveRun(os.fspath(save_dir), os.fspath(dir), live, options, f"{prefix}-" if prefix else "")
        super().__init__(run, log_model)

    @classmethod
    def for_run(cls, save_dir: str | os.PathLike[str], project: str | None, **options: Any) -> Tracker:
        return cls(**{"save_dir": save_dir, "dir": os.path.join(save_dir, "dvclive"), **options})


class _DVCLiveRun(PackageRun):
    name = "dvclive"
    id_form = r"[0-9a-f]{1,32}"

    def __init__(self, save_dir: str, directory: str, live: Any, options: Mapping[str, Any], prefix: str) -> None:
        super().__init__("DVCLiveLogger", save_dir, None)
        self._directory, self._live, self._options, self._prefix = Path(directory), live, dict(options), prefix
        self._sizes: Mapping[str, int] | None = None

    def load(self) -> None:
        import dvclive  # noqa: F401

    def open(self) -> str | None:
        from dvclive import Live

        if self._live is not None:
            self._run, self._directory = self._live, Path(self._live.dir)
            self.run_id = self.run_id or uuid.uuid4().hex
        else:
            continues = self._continues and self._is_still_there()
            if not continues:
                self.run_id = uuid.uuid4().hex
            elif self._sizes is not None:
                self._cut(self._sizes)
            self._sizes = None
            self._run = Live(**{"dir": str(self._directory), "resume": continues, **self._options})
            (self._directory / _OWN_FILE).write_text(f"{self.run_id}\n", encoding="utf-8")
        return str(self._directory)

    def _is_still_there(self) -> bool:
        file = self._directory / _OWN_FILE
        # The file with the ID shows whether another run has replaced the directory's content.
        found = file.read_text(encoding="utf-8").strip() if file.is_file() else None
        if found != self.run_id:
            logger.warning(f"{self._directory} no longer contains the run to continue, so a new run starts there.")
        return found == self.run_id

    def _files(self) -> dict[str, Path]:
        # the files that grow with logged values
        found = sorted((self._directory / "plots" / "metrics").rglob("*.tsv"))
        return {path.relative_to(self._directory).as_posix(): path for path in found}

    def _cut(self, sizes: Mapping[str, int]) -> None:
        for name, path in self._files().items():
            if name not in sizes:
                path.unlink()
            elif path.stat().st_size > sizes[name] >= 0:
                os.truncate(path, sizes[name])

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        self.tracker.log_params(plain(values))

    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        live = self.tracker
        if step is not None:
            live.step = step
        for name, value in flatten(values).items():
            full = name if name == "epoch" else self._prefix + name
            live.log_metric(full, value if isinstance(value, (int, float)) else str(value), **options)

    def log_images(self, values: Mapping[str, Any], step: int | None = None) -> None:
        for name, images in values.items():
            for number, image in enumerate(images):
                title = name if len(images) == 1 else f"{name}_{number}"
                flat = image[..., 0] if image.shape[-1] == 1 else image
                self.tracker.log_image(file_name(f"{self._prefix}{title}/{step or 0}", None, ".png"), flat)

    def log_table(
        self, name: str, columns: Sequence[str] | None = None, data: Any = None, step: int | None = None
    ) -> None:
        titles = list(columns or ())
        rows = [dict(zip(titles, plain(list(row)), strict=False)) for row in data]
        if titles:
            self.tracker.log_plot(file_name(name, step), rows, titles[0], titles[1:] or titles, template="simple")

    def log_text(self, values: Mapping[str, str], step: int | None = None) -> None:
        self.log(values, step)

    def log_histogram(self, values: Mapping[str, Any], step: int | None = None) -> None:
        import numpy as np

        for name, each in values.items():
            counts, edges = np.histogram(each, bins=64)
            rows = [{"value": float(edge), "count": int(count)} for edge, count in zip(edges[:-1], counts, strict=True)]
            self.tracker.log_plot(file_name(name, step), rows, "value", "count", template="simple")

    def log_artifact(self, path: str | os.PathLike[str], name: str | None = None) -> None:
        live = self.tracker
        if live._dvc_repo is None:
            raise TrackerError("DVCLiveLogger can store files only in a DVC repository. Create one with `dvc init`.")
        title = re.sub(r"[^0-9a-z]+", "-", (name or os.path.basename(path)).lower()).strip("-") or "file"
        live.log_artifact(os.fspath(path), type="model" if name == "best" else None, name=title, copy=True)

    def save(self) -> None:
        self.tracker.make_summary()

    def state_dict(self) -> dict[str, Any]:
        if self._run is not None:
            self.save()
        return {**super().state_dict(), "files": {name: path.stat().st_size for name, path in self._files().items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        files = state.get("files", {})
        if not (isinstance(files, Mapping) and all(type(size) is int for size in files.values())):
            raise CheckpointError(
                f"The state of DVCLiveLogger in this checkpoint has files={files!r}, but files must map names to sizes."
            )
        self._sizes = dict(files) if state.get("run_id") == self.run_id else None

    def finalize(self, status: str = COMPLETED, message: str = "") -> None:
        live, self._run = self._run, None
        if live is None:
            return
        live.summary.pop("error", None)
        live.summary.update({"status": status, **({"error": message} if message else {})})
        if self._live is not None:
            live.make_summary()
        else:
            live.end()
