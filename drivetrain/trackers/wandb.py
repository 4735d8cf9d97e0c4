"""Values of a run on Weights & Biases, or in a directory for it."""

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
"""The value that is the axis of all others."""

_OFFLINE_MODES = ("offline", "dryrun")
_POLICIES = ("mutable", "immutable")


class WandbLogger(PackageLogger):
    """Writes to a run on Weights & Biases; all calls return at once, and a thread makes them.

    All values have the axis `trainer/global_step`, so none is dropped that belongs to an earlier step than the one
    before. A resumed run continues the run before it; offline, as a further directory with the same ID. When a `fit`
    ends, the run's summary gets `status` and, of a failed one, `error`, and it is closed; what logs later continues it.
    A run that the script has opened itself is used, and left open.

    Args:
        name: The name of the run.
        save_dir: The directory of all runs; `wandb/` within it gets this one.
        version: The ID of the run to continue, or that a new one gets.
        offline: Whether the run is written to disk only. If False, as `mode` or `WANDB_MODE` asks.
        dir: The same as `save_dir`.
        id: The same as `version`.
        anonymous: Without effect: Weights & Biases has no anonymous runs any more.
        project: The project; that of `WANDB_PROJECT` if None, else `"drivetrain"`.
        log_model: Whether the best checkpoint is kept as an artifact when a `fit` ends.
        experiment: A run that is open, which stays open.
        prefix: Put before the name of every value, with a `-` between.
        checkpoint_name: The name of the artifact of the best checkpoint; `model-<id>` if None.
        add_file_policy: `"mutable"` copies files of artifacts before they are uploaded, `"immutable"` does not.
        **kwargs: For `wandb.init`, such as `entity`, `group`, `tags`, `notes`, `job_type` or `settings`.

    Raises:
        ConfigurationError: If `wandb` is not installed, or an argument cannot be.

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
                f"WandbLogger(add_file_policy={add_file_policy!r}): allowed are {', '.join(map(repr, _POLICIES))}.",
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
    """One run, called on the thread of a `WandbLogger`."""

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
        if running is not None:  # the script's own, which it closes
            self._run, self._is_shared, self.run_id = running, True, running.id
        else:
            os.makedirs(self.save_dir, exist_ok=True)
            settings = self._settings(wandb)
            self._check_server(wandb, settings)
            given = {"dir": self.save_dir, "id": self.run_id, "resume": "allow", **self._options}
            self._run, self._is_shared = wandb.init(**{**given, "settings": settings}), False
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP, step_sync=True)
        return str(Path(self._run.dir).parent) if self._run.offline else str(self._run.url)

    def _settings(self, wandb: Any) -> Any:
        """The settings of the run: those given, without the source where it holds a secret."""
        given = self._options.get("settings") or {}
        settings = wandb.Settings(**given) if isinstance(given, Mapping) else given
        if not source_is_clean("WandbLogger", self.secrets):
            settings.disable_code = settings.disable_git = settings.x_disable_meta = True
            settings.save_code = False
        return settings

    def _check_server(self, wandb: Any, settings: Any) -> None:
        """Raise where no key is found, which wandb would ask for, or there is no connection."""
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
    """An image as Pillow's, whose values wandb takes as they are."""
    from PIL import Image

    return Image.fromarray(array[..., 0] if array.shape[-1] == 1 else array)


def _is_in_netrc(host: str | None) -> bool:
    import netrc  # here: no other part needs it

    try:
        return host is not None and netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
