"""Tracker that writes to SwanLab, or to an offline directory."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from drivetrain.runtime.errors import TrackerError
from drivetrain.trackers.base import COMPLETED, Tracker
from drivetrain.trackers.service import PackageLogger, PackageRun, check_reachable, source_is_clean

_OFFLINE_ADVICE = "SwanLabLogger(mode='offline') writes the run to disk, which `swanlab sync` sends later."
_STATES = {COMPLETED: "success", "failed": "crashed"}
_PROBES = ("runtime", "git")
"""The SwanLab probes that record the command line and the repository."""


class SwanLabLogger(PackageLogger):
    """Tracker that logs to a SwanLab run.

    A background thread sends the values, so training does not wait. A resumed run continues its SwanLab run. Offline,
    it writes another directory with the same ID. When a `fit` ends, `status` and, if it failed, `error` are added to
    the configuration, and the run is closed as successful, crashed or aborted. Later logging reopens the run. A run
    that the script has opened is used, and left open.

    Args:
        project: The project. If None, `SWANLAB_PROJ_NAME`, or else `"drivetrain"`.
        experiment_name: The name of the run.
        workspace: The workspace. If None, the default one.
        mode: `"online"`, `"offline"`, `"local"` or `"disabled"`. If None, that of `SWANLAB_MODE`.
        save_dir: The root directory of all runs. The run is written below its subdirectory `swanlog/`.
        run_id: The ID of a run to continue, or of the new run.
        prefix: A prefix for the names of all values, joined by `-`.
        log_model: Store the best checkpoint with the run when a `fit` ends.
        **kwargs: Arguments of `swanlab.init`, such as `tags`, `description`, `group` or `settings`.

    Raises:
        ConfigurationError: If `swanlab` is not installed.

    Example:
        ```python
        from drivetrain import SwanLabLogger, Trainer

        trainer = Trainer(logger=SwanLabLogger("digits", mode="offline", save_dir="logs"))
        ```
    """

    name: ClassVar[str] = "swanlab"

    def __init__(
        self,
        project: str | None = None,
        experiment_name: str | None = None,
        workspace: str | None = None,
        mode: str | None = None,
        save_dir: str | os.PathLike[str] = ".",
        run_id: str | None = None,
        prefix: str = "",
        *,
        log_model: bool = False,
        **kwargs: Any,
    ) -> None:
        options = {
            "project": project or os.environ.get("SWANLAB_PROJ_NAME") or "drivetrain",
            "name": experiment_name,
            "workspace": workspace,
            "mode": mode,
            **kwargs,
        }
        given = run_id or options.pop("id", None)
        run = _SwanLabRun(os.fspath(save_dir), given, options, f"{prefix}-" if prefix else "")
        super().__init__(run, log_model)

    @classmethod
    def for_run(cls, save_dir: str | os.PathLike[str], project: str | None, **options: Any) -> Tracker:
        return cls(**{"save_dir": save_dir, "project": project, **options})


class _SwanLabRun(PackageRun):
    name = "swanlab"
    has_own_id = True

    def __init__(self, save_dir: str, run_id: str | None, options: Mapping[str, Any], prefix: str) -> None:
        super().__init__("SwanLabLogger", save_dir, run_id)
        self._options, self._prefix = dict(options), prefix
        self._is_shared = False

    def load(self) -> None:
        import swanlab  # noqa: F401

    def open(self) -> str | None:
        import swanlab

        if swanlab.has_run():  # opened by the script, which also closes it
            self._run, self._is_shared = swanlab.get_run(), True
            self.run_id = self._run.id
            return str(self._run.dir)
        settings = self._settings(swanlab)
        directory = os.path.join(self.save_dir, "swanlog")
        os.makedirs(self.save_dir, exist_ok=True)
        given = {"log_dir": directory, "id": self.run_id, "resume": "allow", **self._options, "settings": settings}
        hook = sys.excepthook
        try:
            self._run, self._is_shared = swanlab.init(**given), False
        finally:
            # The hook of SwanLab 0.10 would record full tracebacks, which may contain secrets, and close the run.
            sys.excepthook = hook
        return str(self._run.dir) if self._run.mode != "online" else str(self._run.url)

    def _settings(self, swanlab: Any) -> Any:
        from swanlab.sdk.internal.settings import create_settings

        settings = create_settings()
        if self._options.get("settings"):
            settings.merge_settings(self._options["settings"])
        if not source_is_clean("SwanLabLogger", self.secrets):
            settings.merge_settings({"probe": dict.fromkeys(_PROBES, False), "console": {"proxy_type": "none"}})
        if (self._options.get("mode") or settings.mode) == "online":
            if not settings.api_key:
                raise TrackerError(
                    f"SwanLabLogger has no API key. Set SWANLAB_API_KEY or run `swanlab login`. {_OFFLINE_ADVICE}"
                )
            check_reachable("SwanLabLogger", settings.api_host, _OFFLINE_ADVICE)
        return settings

    def _write(self, values: Mapping[str, Any], step: int | None) -> None:
        named = {name if name == "epoch" else self._prefix + name: value for name, value in values.items()}
        self.tracker.log(named, step=step)

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        self.tracker.config.update(dict(values))

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        import swanlab

        kept = self._without_arrays(values)
        self._write({name: swanlab.Text(each) if isinstance(each, str) else each for name, each in kept.items()}, step)

    def log_images(self, values: Mapping[str, Any], step: int | None = None) -> None:
        import swanlab
        from PIL import Image

        for name, images in values.items():
            shown = [Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image) for image in images]
            self._write({name: [swanlab.Image(image, file_type="png") for image in shown]}, step)

    def log_table(
        self, name: str, columns: Sequence[str] | None = None, data: Any = None, step: int | None = None
    ) -> None:
        import swanlab

        self._write({name: swanlab.echarts.Table().add(list(columns or ()), data)}, step)

    def log_text(self, values: Mapping[str, str], step: int | None = None) -> None:
        self.log(values, step)

    def log_histogram(self, values: Mapping[str, Any], step: int | None = None) -> None:
        import numpy as np
        import swanlab

        for name, each in values.items():
            counts, edges = np.histogram(each, bins=64)
            chart = swanlab.echarts.Bar().add_xaxis([f"{edge:.4g}" for edge in edges[:-1]])
            self._write({name: chart.add_yaxis("count", counts.tolist())}, step)

    def log_artifact(self, path: str | os.PathLike[str], name: str | None = None) -> None:
        given = os.path.abspath(path)
        pattern = os.path.join(given, "**") if os.path.isdir(given) else given
        if not self.tracker.save(pattern, base_path=os.path.dirname(given), policy="now"):
            raise OSError(f"{given} could not be saved.")

    def finalize(self, status: str = COMPLETED, message: str = "") -> None:
        run, self._run = self._run, None
        if run is None:
            return
        run.config.update({"status": status, **({"error": message} if message else {})})
        if self._is_shared:
            return
        state = _STATES.get(status, "aborted")
        run.finish(state, error=message or status if state != "success" else None)
