"""`CometLogger` with annotations as types rather than strings, which command lines need."""

from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor

from drivetrain.compat.lightning.fabric.utilities.rank_zero import rank_zero_only
from drivetrain.compat.lightning.pytorch.loggers.logger import Logger, rank_zero_experiment
from drivetrain.compat.lightning.pytorch.loggers.packages import check_installed
from drivetrain.runtime.logging import get_logger
from drivetrain.trackers.base import flatten, hyperparameters_of, plain

__all__ = ["CometLogger"]

logger = get_logger(__name__)

_EARLIER_NAMES = {"project_name": "project", "experiment_name": "name", "save_dir": "offline_directory"}
"""What arguments were called in Lightning before 2.5."""


class CometLogger(Logger):
    """Logger for Comet that writes synchronously. `experiment` is the open Comet experiment."""

    def __init__(
        self,
        *,
        api_key: str | None = None,
        workspace: str | None = None,
        project: str | None = None,
        experiment_key: str | None = None,
        mode: Literal["get_or_create", "get", "create"] | None = None,
        online: bool | None = None,
        prefix: str | None = None,
        **kwargs: Any,
    ) -> None:
        check_installed("CometLogger", "comet_ml", "comet")
        super().__init__()
        for earlier, name in _EARLIER_NAMES.items():
            if earlier in kwargs:
                logger.warning(f"CometLogger({earlier}=...) is called {name} now.")
                value = kwargs.pop(earlier)
                if name == "project":
                    project = project or value
                else:
                    kwargs.setdefault(name, value)
        if "offline" in kwargs:
            logger.warning("CometLogger(offline=True) is online=False now.")
            online = not kwargs.pop("offline") if online is None else online
        self._api_key, self._workspace, self._project = api_key, workspace, project
        self._key, self._mode, self._online = experiment_key, mode, online
        self._prefix, self._kwargs = prefix, kwargs
        self._experiment: Any = None
        self._comet_config: Any = None
        self._open()

    @rank_zero_only
    def _open(self) -> None:
        import comet_ml

        self._comet_config = comet_ml.ExperimentConfig(**self._kwargs)
        self._experiment = comet_ml.start(
            api_key=self._api_key,
            workspace=self._workspace,
            project=self._project,
            experiment_key=self._key,
            mode=self._mode,
            online=self._online,
            experiment_config=self._comet_config,
        )
        self._key = self._experiment.get_key()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state with which a copy in another process continues the same experiment."""
        state = {**self.__dict__, "_experiment": None, "_comet_config": None}
        return {**state, "_mode": "get" if self._online is not False else self._mode}

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The Comet experiment. On ranks other than 0, an object that does nothing."""
        if self._experiment is None:
            self._open()
        return self._experiment

    @property
    def name(self) -> str | None:  # type: ignore[override]
        """Name of the project."""
        return self._project

    @property
    def version(self) -> str | None:
        """Key of the experiment, or None before it is opened."""
        return None if self._experiment is None else str(self._experiment.get_key())

    @property
    def save_dir(self) -> str | None:
        """Directory of offline archives, or None."""
        place = getattr(self._comet_config, "offline_directory", None)
        return None if place is None else str(place)

    @rank_zero_only
    def log_hyperparams(self, params: Any) -> None:
        """Log hyper-parameters."""
        self.experiment.log_parameters(plain(hyperparameters_of(params)))

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log the metrics of one step."""
        values = {
            name: value.detach().cpu() if isinstance(value, Tensor) else value
            for name, value in flatten(metrics).items()
        }
        epoch = values.pop("epoch", None)
        self.experiment.log_metrics(
            values, prefix=self._prefix or None, step=step, epoch=None if epoch is None else int(epoch)
        )

    @rank_zero_only
    def log_graph(self, model: Any, input_array: Any = None) -> None:
        self.experiment.set_model_graph(model)

    @rank_zero_only
    def finalize(self, status: str = "success", message: str = "") -> None:
        """Upload buffered data. The experiment stays open."""
        if self._experiment is not None:
            self._experiment.flush()
