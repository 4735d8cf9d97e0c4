"""Values of a run in a repository of Aim."""

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
"""How long a run waits for another that makes a new repository."""


class AimLogger(PackageLogger):
    """Writes to a run in a repository of Aim; all calls return at once, and a thread makes them.

    A repository that is not there yet is made; `aim up` shows it. A resumed run continues the run before it. When a
    `fit` ends, the run gets the parameters `status` and, of a failed one, `error`, and is closed; what logs later
    continues it. Values that are texts, and tables, are shown as texts.

    Args:
        repo: The directory of the repository, or an address `aim://`; the current directory if None.
        experiment: The experiment; `"drivetrain"` if None.
        run_name: The name of the run.
        run_hash: The run to continue.
        prefix: Put before the name of every value, with a `-` between.
        log_model: Whether the best checkpoint is copied to `artifacts` beside the repository when a `fit` ends.
        log_system_params: Whether the packages, the environment variables (without secrets), the state of Git and the
            command line are written.
        capture_terminal_logs: Whether what the script prints is written, as it is.
        **kwargs: For `aim.Run`, such as `system_tracking_interval`, or `force_resume` to continue a run that another
            machine has left open.

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
    """One run, called on the thread of an `AimLogger`."""

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
        """Import Aim, and make a new local repository: the first checkpoint does not wait for it."""
        from aim import Repo

        if self._is_remote or Repo.exists(self._repo):
            return
        os.makedirs(self._repo, exist_ok=True)
        with locked(os.path.join(self._repo, ".aim.lock"), _LOCK_SECONDS):
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
        """What Aim writes of the system, which has secrets among the environment variables, without them."""
        import sys
        from importlib.metadata import distributions

        from aim.ext.utils import get_environment_variables, get_git_info

        found: dict[str, Any] = Secrets(self.secrets).hide(
            {
                # Aim's own list (3.29) needs pkg_resources, which setuptools no longer has.
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

        numbers, texts = flat_scalars({name: value for name, value in values.items() if not _is_aims(value)})
        epoch = numbers.pop("epoch", None)
        given = {"step": step, "epoch": None if epoch is None else int(epoch), **options}
        for name, value in numbers.items():
            self.tracker.track(float(value), name=self.prefix + name, **given)
        for name, text in texts.items():
            self.tracker.track(Text(text), name=self.prefix + name, **given)
        for name, value in values.items():
            if _is_aims(value):
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
                    "AimLogger has no place for artefacts. Call set_artifacts_uri on its `tracker` first."
                )
            place = Path(self._repo, "artifacts").absolute()
            place.mkdir(exist_ok=True)
            run.set_artifacts_uri(place.as_uri())
        given = os.fspath(path)
        title = file_name(name or os.path.basename(given))
        # Aim (3.29) would copy on a thread that the end of the run does not wait for.
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


def _is_aims(value: Any) -> bool:
    """Whether a value is one of Aim's own kinds, which it takes as it is."""
    return type(value).__module__.split(".")[0] == "aim"
