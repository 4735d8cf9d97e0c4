"""Tracker that writes to Weights & Biases, or to an offline directory."""

from __future__ import annotations

import os
import urllib.parse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from drivetrain.runtime.errors import ConfigurationError, TrackerError
from drivetrain.trackers.base import COMPLETED, Tracker, flatten
from drivetrain.trackers.service import PackageLogger, PackageRun, check_reachable, file_name, source_is_clean

_OFFLINE_ADVICE = "WandbLogger(offline=True) writes the run to disk, which `wandb sync` sends later."
STEP = "trainer/global_step"
"""The name of the value that is the x axis of all others."""

_OFFLINE_MODES = ("offline", "dryrun")
_POLICIES = ("mutable", "immutable")


class WandbLogger(PackageLogger):
    """Tracker that logs to a Weights & Biases run.

    A background thread sends the values, so training does not wait. The x axis of all values is `trainer/global_step`,
    so values of an earlier step than the last one are not dropped. A resumed run continues its W&B run. Offline, it
    writes another directory with the same ID. When a `fit` ends, the run is closed, with `status` and, if it failed,
    `error` in its summary. Later logging reopens the run. A run that the script has opened is used, and left open.

    Args:
        name: The name of the run.
        save_dir: The root directory of all runs. The run is written below its subdirectory `wandb/`.
        version: The ID of a run to continue, or of the new run.
        offline: Write the run to disk only. If False, `mode` or `WANDB_MODE` decides.
        dir: An alias of `save_dir`.
        id: An alias of `version`.
        anonymous: Has no effect, since Weights & Biases no longer has anonymous runs.
        project: The project. If None, `WANDB_PROJECT`, or else `"drivetrain"`.
        log_model: Store the best checkpoint as an artifact when a `fit` ends.
        experiment: An open run to use, which is left open.
        prefix: A prefix for the names of all values, joined by `-`.
        checkpoint_name: The artifact name of the best checkpoint. If None, `model-<id>`.
        add_file_policy: `"mutable"` copies artifact files before they are uploaded, `"immutable"` does not.
        **kwargs: Arguments of `wandb.init`, such as `entity`, `group`, `tags`, `notes`, `job_type` or `settings`.

    Raises:
        ConfigurationError: If `wandb` is not installed, or an argument is invalid.

    Example:
        ```python
        from drivetrain import Trainer, WandbLogger

        trainer = Trainer(logger=WandbLogger(project="digits", save_dir="logs", offline=True))
        ```
    """

    name: ClassVar[str] = "wandb"

    def __init__(
        self,
        name: str | None = None,
        save_dir: str | os.PathLike[str] = ".",
        version: str | None = None,
        offline: bool = False,
        dir: str | os.PathLike[str] | None = None,
        id: str | None = None,
        anonymous: bool | None = None,
        project: str | None = None,
        log_model: bool | str = False,
        experiment: Any = None,
        prefix: str = "",
        checkpoint_name: str | None = None,
        add_file_policy: str = "mutable",
        **kwargs: Any,
    ) -> None:
        if add_file_policy not in _POLICIES:
            raise ConfigurationError(
                f"WandbLogger(add_file_policy={add_file_policy!r}): use one of {', '.join(map(repr, _POLICIES))}.",
            )
        place = os.fspath(dir) if dir is not None and save_dir == "." else os.fspath(save_dir)
        options = {
            "name": name,
            "project": project or os.environ.get("WANDB_PROJECT") or "drivetrain",
            **({"mode": "offline"} if offline else {}),
            **kwargs,
        }
        run = _WandbRun(place, version or id, options, experiment, f"{prefix}-" if prefix else "")
        run.artifact_name, run.policy = checkpoint_name, add_file_policy
        super().__init__(run, log_model)

    @classmethod
    def for_run(cls, save_dir: str | os.PathLike[str], project: str | None, **options: Any) -> Tracker:
        place = {} if options.get("dir") is not None else {"save_dir": save_dir}
        return cls(**{**place, "project": project, **options})


class _WandbRun(PackageRun):
    name = "wandb"
    has_own_id = True
    artifact_name: str | None = None
    policy = "mutable"

    def __init__(
        self, save_dir: str, run_id: str | None, options: Mapping[str, Any], experiment: Any, prefix: str
    ) -> None:
        super().__init__("WandbLogger", save_dir, run_id)
        self._options, self._experiment, self._prefix = dict(options), experiment, prefix
        self._is_shared = False

    @property
    def secrets(self) -> Sequence[str]:
        given = self._options.get("settings")
        key = given.get("api_key") if isinstance(given, Mapping) else getattr(given, "api_key", None)
        return [key] if key else []

    def load(self) -> None:
        import wandb  # noqa: F401

    def open(self) -> str | None:
        import wandb

        running = self._experiment or wandb.run
        if running is not None:  # opened by the script, which also closes it
            self._run, self._is_shared, self.run_id = running, True, running.id
        else:
            os.makedirs(self.save_dir, exist_ok=True)
            settings = self._settings(wandb)
            self._check_server(wandb, settings)
            given = {"dir": self.save_dir, "id": self.run_id, "resume": "allow", **self._options}
            self._run, self._is_shared = wandb.init(**{**given, "settings": settings}), False
        # wandb drops values whose own step is lower than the last one, so the x axis is a metric of its own.
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP, step_sync=True)
        return str(Path(self._run.dir).parent) if self._run.offline else str(self._run.url)

    def _settings(self, wandb: Any) -> Any:
        given = self._options.get("settings") or {}
        settings = wandb.Settings(**given) if isinstance(given, Mapping) else given
        if not source_is_clean("WandbLogger", self.secrets):
            settings.disable_code = settings.disable_git = settings.x_disable_meta = True
            settings.save_code = False
        return settings

    def _check_server(self, wandb: Any, settings: Any) -> None:
        """Raise `TrackerError` if there is no connection to wandb or no API key."""
        known = wandb.setup().settings
        mode = self._options.get("mode") or os.environ.get("WANDB_MODE") or known.mode
        if mode in (*_OFFLINE_MODES, "disabled"):
            return
        host = settings.base_url if "base_url" in settings.model_fields_set else known.base_url
        has_key = settings.api_key or known.api_key or os.environ.get("WANDB_IDENTITY_TOKEN_FILE")
        if not (has_key or os.environ.get("WANDB_API_KEY") or _is_in_netrc(urllib.parse.urlsplit(host).hostname)):
            raise TrackerError(f"WandbLogger has no API key. Set WANDB_API_KEY or run `wandb login`. {_OFFLINE_ADVICE}")
        check_reachable("WandbLogger", host, _OFFLINE_ADVICE)

    def _write(self, values: Mapping[str, Any], step: int | None, **options: Any) -> None:
        named = {name if name == "epoch" else self._prefix + name: value for name, value in values.items()}
        self.tracker.log(named | ({} if step is None else {STEP: step}), **options)

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        self.tracker.config.update(dict(values), allow_val_change=True)

    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        self._write(flatten(values), step, **options)

    def log_images(self, values: Mapping[str, Any], step: int | None = None) -> None:
        import wandb

        shown = {name: [wandb.Image(_picture(image)) for image in images] for name, images in values.items()}
        self._write(shown, step)

    def log_table(
        self, name: str, columns: Sequence[str] | None = None, data: Any = None, step: int | None = None
    ) -> None:
        import wandb

        self._write({name: wandb.Table(columns=list(columns or ()), data=data)}, step)

    def log_text(self, values: Mapping[str, str], step: int | None = None) -> None:
        self._write(values, step)

    def log_histogram(self, values: Mapping[str, Any], step: int | None = None) -> None:
        import wandb

        self._write({name: wandb.Histogram(each, num_bins=64) for name, each in values.items()}, step)

    def log_artifact(self, path: str | os.PathLike[str], name: str | None = None) -> None:
        import wandb

        given = os.fspath(path)
        title = (self.artifact_name or f"model-{self.run_id}") if name == "best" else name or os.path.basename(given)
        artifact = wandb.Artifact(file_name(title).replace("/", "-"), type="model" if name == "best" else "file")
        if os.path.isdir(given):
            artifact.add_dir(given, policy=self.policy)
        else:
            artifact.add_file(given, policy=self.policy)
        self.tracker.log_artifact(artifact, aliases=["latest", "best"] if name == "best" else None)

    def finalize(self, status: str = COMPLETED, message: str = "") -> None:
        run, self._run = self._run, None
        if run is None:
            return
        run.summary.update({"status": status, **({"error": message} if message else {})})
        if self._is_shared:
            return
        if status == "preempted":
            run.mark_preempting()
        run.finish(exit_code=0 if status == COMPLETED else 1)


def _picture(array: Any) -> Any:
    from PIL import Image

    # wandb rescales the values of arrays, but not those of PIL images.
    return Image.fromarray(array[..., 0] if array.shape[-1] == 1 else array)


def _is_in_netrc(host: str | None) -> bool:
    import netrc  # imported late: rarely needed

    try:
        return host is not None and netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
