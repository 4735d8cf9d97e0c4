"""`Logger`: base class of loggers that scripts define."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from drivetrain.compat.lightning.fabric.utilities.rank_zero import rank_zero_only
from drivetrain.trackers import Tracker
from drivetrain.trackers.base import COMPLETED


class Logger(Tracker):
    """Base class of loggers. Override `name`, `version`, `log_metrics` and `log_hyperparams`.

    A run calls `finalize` when it ends, with `"success"`, `"failed"`, or the name of the signal that ended it. A
    script's own logger is called on every process. Decorate methods with `rank_zero_only` to run them on rank 0 only.
    """

    in_background = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if Logger in cls.__bases__ and not cls.__module__.startswith("drivetrain."):
            cls.main_process_only = False
        own = cls.__dict__.get("finalize")
        if own is not None:
            cls.finalize = _in_lightnings_words(own)  # type: ignore[method-assign]

    @property
    @abstractmethod
    def name(self) -> str | None:  # type: ignore[override]
        """Name of the experiment."""

    @property
    @abstractmethod
    def version(self) -> int | str | None:
        """Version of the run."""

    @abstractmethod
    def log_metrics(self, metrics: Mapping[str, float | int | str], step: int | None = None) -> None: ...

    @abstractmethod
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None: ...

    @property
    def root_dir(self) -> str | None:
        """Parent directory of all runs, or None."""
        return None

    @property
    def save_dir(self) -> str | None:
        """Directory of this run's files, or None."""
        return None

    @property
    def log_dir(self) -> str | None:
        """Directory of this run's files, by default `save_dir`."""
        return self.save_dir

    @property
    def group_separator(self) -> str:
        """Separator between the parts of a metric name."""
        return "/"

    def log(self, values: Mapping[str, float | int | str], step: int | None = None) -> None:
        """Call `log_metrics`, for drivetrain's tracker interface."""
        self.log_metrics(values, step)

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Call `log_hyperparams`, for drivetrain's tracker interface."""
        self.log_hyperparams(dict(values))

    def finalize(self, status: str = "success", message: str = "") -> None:
        """Write buffered data at the end of a run."""
        self.save()

    def record_end(self, status: str, message: str) -> None:
        self.finalize("success" if status == COMPLETED else "failed")


def _in_lightnings_words(finalize: Callable[..., None]) -> Callable[..., None]:
    """Wrap a `finalize(status)` method to accept the arguments of drivetrain's tracker interface."""

    @wraps(finalize)
    def called_by_a_run(self: Any, status: str = COMPLETED, message: str = "") -> None:
        finalize(self, "success" if status == COMPLETED else status)

    return called_by_a_run


class DummyLogger(Logger):
    """Logger that discards everything."""

    @property
    def name(self) -> str:  # type: ignore[override]
        return ""

    @property
    def version(self) -> str:
        return ""

    def log_metrics(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    @property
    def experiment(self) -> DummyExperiment:
        """An object that accepts every call and does nothing."""
        return DummyExperiment()

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _nothing


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing, with any arguments."""


class DummyExperiment:
    """Object that accepts every method call and item access, and does nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _nothing

    def __getitem__(self, name: Any) -> DummyExperiment:
        return self

    def __setitem__(self, name: Any, value: Any) -> None:
        pass


def rank_zero_experiment(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Decorate the property `experiment` so that ranks other than 0 get a `DummyExperiment`."""

    @wraps(function)
    def experiment(self: Any) -> Any:
        made = rank_zero_only(function)(self)
        return DummyExperiment() if made is None else made

    return experiment
