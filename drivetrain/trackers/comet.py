"""Tracker that writes to Comet, or to an offline archive."""

from __future__ import annotations

import importlib.util
import os
import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from drivetrain.runtime.errors import CheckpointError, ConfigurationError, TrackerError
from drivetrain.trackers.base import COMPLETED, Tracker
from drivetrain.trackers.group import BackgroundTracker
from drivetrain.trackers.index import record_run
from drivetrain.trackers.service import check_reachable, flat_scalars, missing_package, script_path, source_is_clean

if TYPE_CHECKING:
    from comet_ml import CometExperiment

_OFFLINE_ADVICE = "CometLogger(online=False) writes an archive to disk, which `comet upload` sends later."
_MODES = ("get_or_create", "get", "create")
_SOURCE_OPTIONS = ("log_git_patch", "log_git_metadata", "log_env_host", "parse_args")


class CometLogger(BackgroundTracker):
    """Tracker that logs to a Comet experiment.

    A background thread sends the values, so training does not wait. A resumed run continues its Comet experiment. When
    a `fit` ends, the experiment is closed with `status` and, if it failed, `error` as other values. Later logging
    reopens the experiment. Offline, each time that the experiment is open creates an archive. `comet upload` sends the
    archives in the order of their creation.

    Args:
        api_key: The API key. If None, that of `COMET_API_KEY` or of Comet's configuration.
        workspace: The workspace. If None, the default one.
        project: The project.
        experiment_key: The key of an experiment to continue, or of the new one: 32 to 50 letters and digits.
        mode: `"create"`, `"get"` or `"get_or_create"`.
        online: Send values to the server. If False, write an archive into `offline_directory`.
        prefix: A prefix for the names of all values, joined by `_`.
        log_model: Upload the best checkpoint when a `fit` ends.
        project_name: An alias of `project`.
        **kwargs: Arguments of `comet_ml.ExperimentConfig`, such as `name`, `tags`, `offline_directory` or `log_code`.

    Raises:
        ConfigurationError: If `comet_ml` is not installed, or an argument is invalid.

    Example:
        ```python
        from drivetrain import CometLogger, Trainer

        trainer = Trainer(logger=CometLogger(project="digits", online=False, offline_directory="logs"))
        ```
    """

    name: ClassVar[str] = "comet"

    def __init__(
        self,
        api_key: str | None = None,
        workspace: str | None = None,
        project: str | None = None,
        experiment_key: str | None = None,
        mode: str | None = None,
        online: bool | None = None,
        prefix: str | None = None,
        *,
        log_model: bool = False,
        project_name: str | None = None,
        **kwargs: Any,
    ) -> None:
        if not self.is_available():
            raise missing_package("CometLogger", "comet_ml", "comet")
        if mode is not None and mode not in _MODES:
            raise ConfigurationError(f"CometLogger(mode={mode!r}): use one of {', '.join(map(repr, _MODES))}.")
        if project is not None and project_name not in (None, project):
            raise ConfigurationError(
                f"CometLogger got project={project!r} and project_name={project_name!r}, which are aliases. "
                "Pass only one.",
            )
        if mode == "get" and experiment_key is None:
            raise ConfigurationError("CometLogger(mode='get') needs the experiment_key of the experiment to continue.")
        place = {"workspace": workspace, "project_name": project or project_name, "online": online}
        self._run_of_comet = _CometRun(api_key, place, experiment_key, mode, prefix or "", kwargs)
        super().__init__(self._run_of_comet)
        self.log_model = log_model

    @classmethod
    def is_available(cls) -> bool:
        return importlib.util.find_spec("comet_ml") is not None

    @classmethod
    def for_run(cls, save_dir: str | os.PathLike[str], project: str | None, **options: Any) -> Tracker:
        given = {"offline_directory": os.path.join(save_dir, "comet"), "project_name": project}
        if "project" in options:
            del given["project_name"]
        made = cls(**{**given, **options})
        made._run_of_comet.save_dir = os.fspath(save_dir)
        return made

    @property
    def version(self) -> str:
        """The key of the Comet experiment. Pass it as `experiment_key` to continue the experiment."""
        return self._run_of_comet.key

    def state_dict(self) -> dict[str, Any]:
        return self._run_of_comet.state_dict()  # does not wait until the experiment is open


class _CometRun(Tracker):
    name = "comet"
    save_dir: str | None = None
    """The directory whose index lists the run, or None."""

    def __init__(
        self,
        api_key: str | None,
        place: Mapping[str, Any],
        key: str | None,
        mode: str | None,
        prefix: str,
        options: Mapping[str, Any],
    ) -> None:
        self._api_key, self._place, self._prefix, self._options = api_key, dict(place), prefix, dict(options)
        self.key = key or uuid.uuid4().hex
        self._mode = mode or ("create" if key is None else "get_or_create")
        self._experiment: CometExperiment | None = None

    @property
    def secrets(self) -> Sequence[str]:
        return [self._api_key] if self._api_key else []

    def load(self) -> None:
        # Comet's auto-logging would patch torch and other packages, and log values twice.
        os.environ.setdefault("COMET_DISABLE_AUTO_LOGGING", "1")
        import comet_ml  # noqa: F401

    def start(self) -> None:
        if self._experiment is not None:
            return
        self.load()
        import comet_ml

        online = self._place["online"]
        if online is None:
            online = comet_ml.get_config().get_bool(None, "comet.start.online", default=None, not_set_value=None)
        if online is not False:
            self._check_server(comet_ml)
        # Comet would record this file instead of the user's script.
        options = {**self._options, "log_code": False}
        is_clean = source_is_clean("CometLogger", self.secrets)
        if not is_clean:
            options |= dict.fromkeys(_SOURCE_OPTIONS, False)
        experiment = comet_ml.start(
            api_key=self._api_key,
            experiment_key=self.key,
            mode=self._mode,
            experiment_config=comet_ml.ExperimentConfig(**options),
            **self._place,
        )
        if not experiment.alive:
            raise TrackerError(f"CometLogger could not open an experiment on the server. {_OFFLINE_ADVICE}")
        script = script_path()
        if is_clean and script is not None and self._options.get("log_code", self._mode != "get"):
            experiment.log_code(script)
            experiment.set_filename(script)
        self.key, self._mode = experiment.get_key(), "get"  # a later start continues this experiment
        self._experiment = experiment
        if self.save_dir is not None:
            place = getattr(experiment, "url", None) if online is not False else None
            record_run(self.save_dir, place or self._options.get("offline_directory", "."), self.secrets)

    def _check_server(self, comet_ml: Any) -> None:
        if not (self._api_key or comet_ml.get_config("comet.api_key")):
            raise TrackerError(
                "CometLogger has no API key. Set COMET_API_KEY, run `comet login`, or give api_key=. " + _OFFLINE_ADVICE
            )
        check_reachable("CometLogger", comet_ml.get_config("comet.url_override"), _OFFLINE_ADVICE)

    @property
    def tracker(self) -> CometExperiment:
        self.start()
        assert self._experiment is not None
        return self._experiment

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        self.tracker.log_parameters(dict(values))

    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        numbers, texts = flat_scalars(values)
        epoch = numbers.pop("epoch", None)
        if epoch is not None:
            options = {"epoch": int(epoch), **options}
        if numbers:
            self.tracker.log_metrics(numbers, prefix=self._prefix or None, step=step, **options)
        elif epoch is not None:
            self.tracker.set_epoch(int(epoch))
        for key, text in texts.items():
            self.tracker.log_other(key, text)

    def log_images(self, values: Mapping[str, Any], step: int | None = None) -> None:
        for name, images in values.items():
            for number, image in enumerate(images):
                title = name if len(images) == 1 else f"{name}_{number}"
                flat = image[..., 0] if image.shape[-1] == 1 else image
                self.tracker.log_image(flat, name=title, step=step)

    def log_table(
        self, name: str, columns: Sequence[str] | None = None, data: Any = None, step: int | None = None
    ) -> None:
        if step is not None:
            self.tracker.set_step(step)
        self.tracker.log_table(f"{name}.csv", tabular_data=data, headers=list(columns or ()))

    def log_text(self, values: Mapping[str, str], step: int | None = None) -> None:
        for name, text in values.items():
            self.tracker.log_text(text, step=step, metadata={"name": name})

    def log_histogram(self, values: Mapping[str, Any], step: int | None = None) -> None:
        for name, each in values.items():
            self.tracker.log_histogram_3d(each, name=name, step=step)

    def log_graph(self, model: Any, input_array: Any = None) -> None:
        self.tracker.set_model_graph(model)

    def log_artifact(self, path: str | os.PathLike[str], name: str | None = None) -> None:
        given = os.fspath(path)
        self.tracker.log_model(name or os.path.basename(given), given)

    def save(self) -> None:
        self.tracker.flush()

    def finalize(self, status: str = COMPLETED, message: str = "") -> None:
        if self._experiment is not None:
            self._experiment.log_other("status", status)
            if message:
                self._experiment.log_other("error", message)
            self._experiment.end()
            self._experiment = None

    def finish(self) -> None:
        self.finalize()

    def state_dict(self) -> dict[str, Any]:
        return {"experiment_key": self.key}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        key = state.get("experiment_key")
        if key is None:
            return
        if not (isinstance(key, str) and key.isalnum() and 32 <= len(key) <= 50):
            raise CheckpointError(
                f"The state of CometLogger in this checkpoint has experiment_key={key!r}, which is not a Comet key: "
                "a key has 32 to 50 letters and digits."
            )
        if self._mode == "create" or key == self.key:  # not if the user selected another experiment
            self.key, self._mode = key, "get"
