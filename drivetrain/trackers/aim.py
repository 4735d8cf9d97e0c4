"""Tracker that writes to an Aim repository."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from drivetrain.runtime.errors import TrackerError
from drivetrain.trackers.base import COMPLETED, Tracker
from drivetrain.trackers.index import locked
from drivetrain.trackers.secrets import Secrets
from drivetrain.trackers.service import PackageLogger, PackageRun, file_name, flat_scalars

_LOCK_SECONDS = 120.0
"""The seconds to wait for another run that creates the repository."""


class AimLogger(PackageLogger):
    """Tracker that logs to an Aim run.

    A background thread writes the values, so training does not wait. If the repository does not exist, it is created.
    `aim up` displays it. A resumed run continues its Aim run. When a `fit` ends, the run is closed with the parameters
    `status` and, if it failed, `error`. Later logging reopens the run. Texts and tables are stored as text.

    Args:
        repo: The directory of the repository, or an address `aim://`. If None, the current directory.
        experiment: The name of the experiment. If None, `"drivetrain"`.
        run_name: The name of the run.
        run_hash: The hash of a run to continue.
        prefix: A prefix for the names of all values, joined by `-`.
        log_model: Copy the best checkpoint to `artifacts` beside the repository when a `fit` ends.
        log_system_params: Store installed packages, environment variables (without secrets), Git state and command
            line.
        capture_terminal_logs: Store the unfiltered terminal output of the script.
        **kwargs: Arguments of `aim.Run`, such as `system_tracking_interval`, or `force_resume` to continue a run that
            another machine has left open.

    Raises:
        ConfigurationError: If `aim` is not installed.

    Example:
        ```python
        from drivetrain import AimLogger, Trainer

        trainer = Trainer(logger=AimLogger("logs", experiment="digits"))
        ```
    """

    name: ClassVar[str] = "aim"

    def __init__(
        self,
        repo: str | os.PathLike[str] | None = None,
        experiment: str | None = None,
        run_name: str | None = None,
        run_hash: str | None = None,
        prefix: str = "",
        *,
        log_model: bool = False,
        log_system_params: bool = False,
        capture_terminal_logs: bool = False,
        **kwargs: Any,
    ) -> None:
        options = {"capture_terminal_logs": capture_terminal_logs, **kwargs}
        run = _AimRun(os.fspath(repo or "."), run_hash, experiment or "drivetrain", options)
        run.run_name, run.prefix, run.has_system_params = run_name, f"{prefix}-" if prefix else "", log_system_params
        super().__init__(run, log_model)

    @classmethod
    def for_run(cls, save_dir: str | os.PathLike[str], project: str | None, **options: Any) -> Tracker:
        return cls(**{"repo": save_dir, "experiment": project, **options})


class _AimRun(PackageRun):
    name = "aim"
    id_form = r"[0-9a-z]{1,64}"
    run_name: str | None = None
    prefix = ""
    has_system_params = False

    def __init__(self, repo: str, run_hash: str | None, experiment: str, options: Mapping[str, Any]) -> None:
        is_remote = repo.startswith("aim://")
        super().__init__("AimLogger", "." if is_remote else repo, run_hash)
        self._repo, self._is_remote, self._experiment, self._options = repo, is_remote, experiment, dict(options)

    def load(self) -> None:
        from aim import Repo

        if self._is_remote or Repo.exists(self._repo):
            return
        os.makedirs(self._repo, exist_ok=True)
        with locked(os.path.join(self._repo, ".aim.lock"), _LOCK_SECONDS):
            # Another run may have created the repository while this one waited for the lock.
            if not Repo.exists(self._repo):
                Repo.from_path(self._repo, init=True)

    def open(self) -> str | None:
        from aim import Run

        self.load()
        continued = self.run_id if self._continues else None
        options = {"experiment": self._experiment, **self._options}
        run = Run(continued, repo=self._repo, **options)
        self._run, self.run_id = run, run.hash
        if self.run_name:
            run.name = self.run_name
        if self.has_system_params:
            run["__system_params"] = self._system_params()
        return self._repo if self._is_remote else os.path.join(self._repo, ".aim")

    def _system_params(self) -> dict[str, Any]:
        import sys
        from importlib.metadata import distributions

        from aim.ext.utils import get_environment_variables, get_git_info

        found: dict[str, Any] = Secrets(self.secrets).hide(
            {
                # Aim 3.29 lists packages with pkg_resources, which setuptools no longer has.
                "packages": {each.name: each.version for each in distributions()},
                "env_variables": get_environment_variables(),
                "git_info": get_git_info(),
                "executable": sys.executable,
                "arguments": list(sys.argv),
            }
        )
        return found

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        known = self.tracker.get("hparams", {})
        self.tracker["hparams"] = {**known, **values}

    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        from aim import Text

        numbers, texts = flat_scalars({name: value for name, value in values.items() if not _is_aim_object(value)})
        epoch = numbers.pop("epoch", None)
        given = {"step": step, "epoch": None if epoch is None else int(epoch), **options}
        for name, value in numbers.items():
            self.tracker.track(float(value), name=self.prefix + name, **given)
        for name, text in texts.items():
            self.tracker.track(Text(text), name=self.prefix + name, **given)
        for name, value in values.items():
            if _is_aim_object(value):
                self.tracker.track(value, name=self.prefix + name, **given)

    def log_images(self, values: Mapping[str, Any], step: int | None = None) -> None:
        from aim import Image

        for name, images in values.items():
            shown = [Image(image[..., 0] if image.shape[-1] == 1 else image) for image in images]
            self.tracker.track(shown[0] if len(shown) == 1 else shown, name=self.prefix + name, step=step)

    def log_table(
        self, name: str, columns: Sequence[str] | None = None, data: Any = None, step: int | None = None
    ) -> None:
        lines = [list(columns or ()), ["---"] * len(columns or ()), *data]
        text = "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)
        self.log_text({name: text}, step)

    def log_text(self, values: Mapping[str, str], step: int | None = None) -> None:
        from aim import Text

        for name, text in values.items():
            self.tracker.track(Text(text), name=self.prefix + name, step=step)

    def log_histogram(self, values: Mapping[str, Any], step: int | None = None) -> None:
        from aim import Distribution

        for name, each in values.items():
            self.tracker.track(Distribution(each), name=self.prefix + name, step=step)

    def log_graph(self, model: Any, input_array: Any = None) -> None:
        self.tracker["model"] = model

    def log_artifact(self, path: str | os.PathLike[str], name: str | None = None) -> None:
        run = self.tracker
        if run.artifacts_uri is None:
            if self._is_remote:
                raise TrackerError(
                    "AimLogger has no artifact storage yet. Call set_artifacts_uri on its `tracker` first."
                )
            place = Path(self._repo, "artifacts").absolute()
            place.mkdir(exist_ok=True)
            run.set_artifacts_uri(place.as_uri())
        given = os.fspath(path)
        title = file_name(name or os.path.basename(given))
        # Without block=True, Aim 3.29 copies on a thread that the end of the run does not wait for.
        if os.path.isdir(given):
            run.log_artifacts(given, title, block=True)
        else:
            run.log_artifact(given, title, block=True)

    def finalize(self, status: str = COMPLETED, message: str = "") -> None:
        run, self._run = self._run, None
        if run is None:
            return
        run["status"] = status
        if message:
            run["error"] = message
        elif run.get("error") is not None:
            del run["error"]
        if status == COMPLETED:
            run.report_successful_finish(block=True)
        run.close()


def _is_aim_object(value: Any) -> bool:
    # Objects such as `aim.Image` are passed on unchanged.
    return type(value).__module__.split(".")[0] == "aim"
