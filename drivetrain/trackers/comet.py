"""Values of a run on Comet, or in an archive for it."""

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
from drivetrain.trackers.service import check_reachable, flat_scalars, refuse_missing, script_path, source_is_clean

if TYPE_CHECKING:
    from comet_ml import CometExperiment

_OFFLINE_ADVICE = "CometLogger(online=False) writes an archive to disk, which `comet upload` sends later."
_MODES = ("get_or_create", "get", "create")
_SOURCE_OPTIONS = ("log_git_patch", "log_git_metadata", "log_env_host", "parse_args")


class CometLogger(BackgroundTracker):
    """Writes to an experiment on Comet; all calls return at once, and a thread makes them.

    A resumed run continues the experiment of the run before it. When a `fit` ends, the experiment gets `status` and, of
    a failed one, `error` among its other values, and is closed; what logs later continues it. Offline, each time that
    it is open makes an archive; `comet upload` sends them in the order in which they were made.

    Args:
        api_key: The API key; that of the environment (`COMET_API_KEY`) or of Comet's own configuration if None.
        workspace: The workspace; the default one if None.
        project: The project.
        experiment_key: The experiment to continue, or the key that a new one gets: 32 to 50 letters and digits.
        mode: `"create"`, `"get"` or `"get_or_create"`.
        online: Whether values go to the server; False writes an archive into `offline_directory`.
        prefix: Put before the name of every value, with a `_` between.
        log_model: Whether the best checkpoint is uploaded when a `fit` ends.
        project_name: The same as `project`.
        **kwargs: For `comet_ml.ExperimentConfig`, such as `name`, `tags`, `offline_directory` or `log_code`.

    Raises:
        ConfigurationError: If `comet_ml` is not installed, or an argument cannot be.

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
            raise refuse_missing("CometLogger", "comet_ml", "comet")
        if mode is not None and mode not in _MODES:
            raise ConfigurationError(f"CometLogger(mode={mode!r}): allowed are {', '.join(map(repr, _MODES))}.")
        if project is not None and project_name not in (None, project):
            raise ConfigurationError(
                f"CometLogger got project={project!r} and project_name={project_name!r}, which mean the same. "
                "Give one.",
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
        """The key of the experiment."""
        return self._run_of_comet.key

    def state_dict(self) -> dict[str, Any]:
        return self._run_of_comet.state_dict()  # needs no experiment that is open


class _CometRun(Tracker):
    """One experiment, called on the thread of a `CometLogger`."""

    name = "comet"
    save_dir: str | None = None
    """The directory in whose index of runs it is listed."""

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
        # Comet would replace functions of torch and other packages, which log what is logged here.
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
        # Comet would take the file that calls it for the script.
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
            raise TrackerError(f"CometLogger got no experiment from the server. {_OFFLINE_ADVICE}")
        script = script_path()
        if is_clean and script is not None and self._options.get("log_code", self._mode != "get"):
            experiment.log_code(script)
            experiment.set_filename(script)
        self.key, self._mode = experiment.get_key(), "get"  # from now on it is this one that is continued
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
                f"The state of CometLogger in this checkpoint has experiment_key={key!r}, which is no key of Comet's: "
                "32 to 50 letters and digits."
            )
        if self._mode == "create" or key == self.key:  # unless another experiment was asked for
            self.key, self._mode = key, "get"
