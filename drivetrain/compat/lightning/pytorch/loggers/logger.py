"""`Logger`: the base of loggers that scripts define."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from drivetrain.compat.lightning.fabric.utilities.rank_zero import rank_zero_only
from drivetrain.trackers import Tracker
from drivetrain.trackers.base import COMPLETED


class Logger(Tracker):
    """Where the values of a run are written. Override `name`, `version`, `log_metrics` and `log_hyperparams`.

    A run calls `finalize` when it ends, with `"success"`, `"failed"`, or the name of the signal that ended it. A
    script's own logger is called on every process: `rank_zero_only` around a method leaves it to the first.
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
        """The name of the experiment."""

    @property
    @abstractmethod
    def version(self) -> int | str | None:
        """The version of the run."""

    @abstractmethod
    def log_metrics(self, metrics: Mapping[str, float | int | str], step: int | None = None) -> None: ...

    @abstractmethod
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None: ...

    @property
    def root_dir(self) -> str | None:
        """The directory of all runs, if there is one."""
        return None

    @property
    def save_dir(self) -> str | None:
        """The directory in which runs are written, if there is one."""
        return None

    @property
    def log_dir(self) -> str | None:
        """The same as `save_dir`."""
        return self.save_dir

    @property
    def group_separator(self) -> str:
        """What stands between the parts of a name."""
        return "/"

    def log(self, values: Mapping[str, float | int | str], step: int | None = None) -> None:
        """The same as `log_metrics`."""
        self.log_metrics(values, step)

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """The same as `log_hyperparams`."""
        self.log_hyperparams(dict(values))

    def finalize(self, status: str = "success", message: str = "") -> None:
        """Write what is left."""
        self.save()

    def record_end(self, status: str, message: str) -> None:
        self.finalize("success" if status == COMPLETED else "failed")


def _in_lightnings_words(finalize: Callable[..., None]) -> Callable[..., None]:
    """A logger's own `finalize`, which takes a status alone, as a run calls it."""

    @wraps(finalize)
    def called_by_a_run(self: Any, status: str = COMPLETED, message: str = "") -> None:
        finalize(self, "success" if status == COMPLETED else status)

    return called_by_a_run


class DummyLogger(Logger):
    """Writes nothing."""

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
        """Takes every call."""
        return DummyExperiment()

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _nothing


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Take every argument."""


class DummyExperiment:
    """Takes every call and every item, and does nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _nothing

    def __getitem__(self, name: Any) -> DummyExperiment:
        return self

    def __setitem__(self, name: Any, value: Any) -> None:
        pass


def rank_zero_experiment(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Let `experiment` make the real object on the first process alone; others get one that does nothing."""

    @wraps(function)
    def experiment(self: Any) -> Any:
        made = rank_zero_only(function)(self)
        return DummyExperiment() if made is None else made

    return experiment
