"""The base of all experiment trackers: where the values of a run are written."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import os
import re
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from drivetrain.runtime.environment import ProcessEnvironment
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.logging import get_logger
from drivetrain.runtime.state import PartialState
from drivetrain.trackers.secrets import Secrets

if TYPE_CHECKING:
    from numpy.typing import NDArray


logger = get_logger(__name__)

COMPLETED = "completed"
STATUS_WORDS = {"success": COMPLETED, "finished": COMPLETED}
"""Other words for how a run ends."""


class Tracker(ABC):
    """Writes the hyper-parameters and the values of one run to one place.

    Trackers may be made on every process, but only the main process may call them. A run is opened by the
    first call that needs it, and a call after `finish` opens it again. Other names
    (`log_metrics`, `log_hyperparams`, `experiment`) lead to the same methods. What a tracker cannot show, such as
    images in a table, it leaves out with one warning.

    Attributes:
        name: The word that names the kind of tracker, such as `"csv"`.
        in_background: Whether a run calls the tracker on a thread of its own, so that a slow one delays no step. False
            for what is fast, and for what must stay on the thread that made it.
        main_process_only: Whether only the main process of a run calls it.
        log_model: Whether it gets the best checkpoint when a `fit` ends.

    Example:
        ```python
        from drivetrain.trackers import Tracker, register_tracker

        class PrintTracker(Tracker):
            name = "print"

            def store_init_configuration(self, values):
                print("with", values)

            def log(self, values, step=None, **options):
                print(step, values)

        register_tracker(PrintTracker)
        ```
    """

    name: ClassVar[str]
    in_background: ClassVar[bool] = True
    main_process_only: bool = True
    log_model: bool = False

    @classmethod
    def is_available(cls) -> bool:
        """Whether everything that this tracker needs is installed."""
        return True

    @classmethod
    def for_run(cls, save_dir: str | os.PathLike[str], project: str | None, **options: Any) -> Tracker:
        """Make the tracker for a run that gave its name alone.

        Args:
            save_dir: Where the run writes.
            project: The name of the project or experiment, if the run gave one.
            **options: Further arguments of the constructor.
        """
        return cls(**options)

    @property
    def secrets(self) -> Sequence[str]:
        """Values that must be written nowhere, such as the key that the tracker was given."""
        return ()

    def load(self) -> None:
        """Import what the tracker needs; a run calls it before its first step, on the thread of the loop."""

    def start(self) -> None:
        """Open the run now rather than at the first use; has no effect on an open run."""

    @abstractmethod
    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Write the hyper-parameters of the run; may be called again with more of them.

        Args:
            values: Names and values; nested mappings and sequences are allowed.
        """

    @abstractmethod
    def log(self, values: Mapping[str, float | int | str], step: int | None = None) -> None:
        """Write values of one step.

        Args:
            values: Names and values: numbers, or text where the tracker can show it. `epoch` is the epoch of the step.
            step: The optimizer step that the values belong to.
        """

    def log_images(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Write images.

        Args:
            values: Names and images, one or several of a name: tensors or arrays of shape (H, W), (C, H, W), (H, W, C)
                or with the number of images before it, in [0, 1] or of bytes; or PIL images.
            step: The optimizer step that they belong to.
        """
        self._leave_out("images")

    def log_table(
        self, name: str, columns: Sequence[str] | None = None, data: Any = None, step: int | None = None
    ) -> None:
        """Write a table.

        Args:
            name: Its name.
            columns: The names of its columns; the first row of `data` if None, or a DataFrame's own.
            data: The rows, or a pandas DataFrame.
            step: The optimizer step that it belongs to.
        """
        self._leave_out("tables")

    def log_text(self, values: Mapping[str, str], step: int | None = None) -> None:
        """Write texts, such as samples of a language model.

        Args:
            values: Names and texts.
            step: The optimizer step that they belong to.
        """
        self.log(dict(values), step)

    def log_histogram(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Write distributions.

        Args:
            values: Names and values, as tensors, arrays or sequences.
            step: The optimizer step that they belong to.
        """
        self._leave_out("histograms")

    def log_graph(self, model: Any, input_array: Any = None) -> None:
        """Write the structure of a model; a `fit` calls it with its task.

        Args:
            model: The module, or a text that describes it.
            input_array: What the model can be called with, for trackers that trace it.
        """

    def log_artifact(self, path: str | os.PathLike[str], name: str | None = None) -> None:
        """Keep a file or a directory with the run.

        Args:
            path: The file or directory.
            name: Its name in the run; that of the file if None.
        """
        self._leave_out("artefacts")

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        """Called each time that a `ModelCheckpoint` has saved.

        Args:
            checkpoint_callback: The callback, with its paths and scores.
        """

    def _leave_out(self, what: str) -> None:
        logger.warning_once(f"{type(self).__name__} has no place for {what}, which are left out.")

    def _leave_out_value(self, name: str, value: Any) -> None:
        self._leave_out(f"values such as {name!r}, of type {type(value).__name__}")

    def _without_arrays(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return flat values with numbers for tensors of one element; those of several are left out with a warning."""
        kept: dict[str, Any] = {}
        for name, value in flatten(values).items():
            if not (hasattr(value, "item") and hasattr(value, "ndim")):
                kept[name] = value
            elif math.prod(value.shape) == 1:
                kept[name] = value.item()
            else:
                self._leave_out_value(name, value)
        return kept

    def save(self) -> None:
        """Bring everything logged so far to disk, or to the server."""

    def finish(self) -> None:
        """Write what is left and close the run."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to continue where this one is: values that JSON can hold.

        Called with each checkpoint, on the main process; what was logged before is on disk when it returns.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where a run was when `state_dict` was called: what it wrote after that is dropped.

        Called on the main process, before anything is logged.

        Args:
            state: What `state_dict` returned.
        """

    @property
    def tracker(self) -> Any:
        """The raw object behind this tracker, for what only it can do; opens the run."""
        self.start()
        return self

    @property
    def log_dir(self) -> str | None:
        """The directory in which this run is written, or None where there is no such directory."""
        return None

    # Other words for the same things

    def log_metrics(self, metrics: Mapping[str, float | int | str], step: int | None = None) -> None:
        """The same as `log`."""
        self.log(metrics, step)

    def log_hyperparams(self, params: Any) -> None:
        """The same as `store_init_configuration`, also for a dataclass or an `argparse.Namespace`.

        Args:
            params: The hyper-parameters.

        Raises:
            ConfigurationError: If they are neither a mapping, a dataclass nor a namespace.
        """
        self.store_init_configuration(hyperparameters_of(params))

    @property
    def experiment(self) -> Any:
        """The same as `tracker`."""
        return self.tracker

    # the end

    def finalize(self, status: str = COMPLETED, message: str = "") -> None:
        """Record how the run ended, write what is left, and close it. Without a place for that the same as `finish`.

        Args:
            status: `"completed"` (or `"success"`), `"failed"`, `"interrupted"` or `"preempted"`.
            message: The first line of the error that ended it.
        """
        self.finish()

    def record_end(self, status: str, message: str) -> None:
        """Called when a run ends: `finalize`, with the words that the tracker takes.

        Args:
            status: How it ended; see `finalize`.
            message: The first line of the error that ended it.
        """
        self.finalize(status, message)


def write_values(tracker: Tracker, values: Mapping[str, Any], step: int | None, **options: Any) -> None:
    """Let a tracker write values of one step, through its own `log_metrics` where it has one."""
    if options or type(tracker).log_metrics is Tracker.log_metrics:
        tracker.log(values, step, **options)
    else:
        tracker.log_metrics(metrics=values, step=step)


def write_hyper_parameters(tracker: Tracker, values: Mapping[str, Any]) -> None:
    """Let a tracker write hyper-parameters, through its own `log_hyperparams` where it has one."""
    if type(tracker).log_hyperparams is Tracker.log_hyperparams:
        tracker.store_init_configuration(values)
    else:
        tracker.log_hyperparams(values)


def hyperparameters_of(params: Any) -> dict[str, Any]:
    """Return hyper-parameters given as mapping, dataclass or namespace as a dict."""
    if params is None:
        return {}
    if isinstance(params, Mapping):
        return {str(key): value for key, value in params.items()}
    if isinstance(params, argparse.Namespace):
        return dict(vars(params))
    if dataclasses.is_dataclass(params) and not isinstance(params, type):
        return dataclasses.asdict(params)
    raise ConfigurationError(
        f"Hyper-parameters were given as {type(params).__name__}. "
        "Give a dict, a dataclass instance or an argparse.Namespace.",
    )


def plain(value: Any, keep: bool = False) -> Any:
    """Return a value as what YAML and JSON can hold; what has no such form becomes its text."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item, keep) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, keep) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((plain(item, keep) for item in value), key=str)
    if isinstance(value, PurePath):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain(dataclasses.asdict(value), keep)
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):  # a number as tensor or numpy scalar
        return plain(value.item(), keep)
    return value if keep else str(value)


def flatten(values: Mapping[str, Any], separator: str = "/") -> dict[str, Any]:
    """Return nested mappings as one level: `{"a": {"b": 1}}` becomes `{"a/b": 1}`."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat.update({f"{key}{separator}{rest}": item for rest, item in flatten(value, separator).items()})
        else:
            flat[str(key)] = value
    return flat


# The base of custom trackers for raw loops


Method = TypeVar("Method", bound=Callable[..., Any])


def on_main_process(function: Method) -> Method:
    """Decorate a tracker's method so that only the main process runs it, where its class asks for that.

    Args:
        function: The method.
    """

    @functools.wraps(function)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "main_process_only", False):
            state = PartialState.existing()
            rank = state.process_index if state is not None else ProcessEnvironment.detect().rank
            if rank != 0:
                return None
        return function(self, *args, **kwargs)

    return run  # type: ignore[return-value]


class GeneralTracker(Tracker):
    """A tracker of the user's own for raw loops, which also works in a Trainer.

    A subclass has `name`, `requires_logging_directory` and the property `tracker`, and overrides the methods that it
    needs. With `main_process_only = True` it is called on the main process, on a thread of its own; with False on every
    process, on the thread of the loop.

    Attributes:
        requires_logging_directory: Whether it needs a directory to write to.

    Raises:
        ConfigurationError: The class lacks one of the three.

    Example:
        ```python
        from drivetrain import Accelerator, GeneralTracker

        class Printed(GeneralTracker):
            name = "printed"
            requires_logging_directory = False

            @property
            def tracker(self):
                return print

            def log(self, values, step=None, **options):
                print(step, values)

        accelerator = Accelerator(cpu=True, log_with=Printed())
        accelerator.init_trackers("digits")
        accelerator.log({"loss": 0.5}, step=1)
        accelerator.end_training()
        ```
    """

    requires_logging_directory: bool
    log_dir: str | None = None

    def __init__(self, _blank: bool = False) -> None:
        missing = [name for name in ("name", "requires_logging_directory") if not hasattr(self, name)]
        if "tracker" not in vars(self) and type(self).tracker is Tracker.tracker:
            missing.append("tracker")
        if missing and not _blank:
            raise ConfigurationError(
                f"The tracker class {type(self).__name__} lacks {', '.join(missing)}. Define them in the class: `name` "
                "(text), `requires_logging_directory` (bool) and `tracker` (a property, the object behind it).",
                see="trackers.md",
            )

    @classmethod
    def for_run(cls, save_dir: str | os.PathLike[str], project: str | None, **options: Any) -> GeneralTracker:
        """Make the tracker of the project's name and, if it needs one, a directory.

        Args:
            save_dir: Where the run writes.
            project: The name of the project, if the run gave one.
            **options: Further arguments of the constructor.
        """
        places = [os.fspath(save_dir)] if cls.requires_logging_directory else []
        made: Any = cls
        return made(project, *places, **options)  # type: ignore[no-any-return]

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Write the hyper-parameters of the run."""

    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        """Write values of one step.

        Args:
            values: Names and values.
            step: The step that they belong to.
            **options: What `Accelerator.log` was given for this tracker.
        """


# Images, tables and distributions as the arrays that trackers take, copied so that a run may change its own


_CHANNELS = (1, 3, 4)


def as_images(values: Mapping[str, Any]) -> dict[str, list[NDArray[Any]]]:
    """Return images of every form as lists of byte arrays of shape (H, W, 1), (H, W, 3) or (H, W, 4), by name."""
    return {
        name: [image for each in _several(value) for image in _images(name, each)] for name, value in values.items()
    }


def _several(value: Any) -> Iterable[Any]:
    return value if isinstance(value, (list, tuple)) else [value]


def _images(name: str, value: Any) -> list[NDArray[Any]]:
    import numpy as np

    array = as_array(value)
    if array.ndim == 2:
        array = array[..., None]
        first, last = False, True
    else:
        first, last = array.ndim > 2 and array.shape[-3] in _CHANNELS, array.ndim > 2 and array.shape[-1] in _CHANNELS
    stack = array if array.ndim == 4 else array[None]
    # Where both could be meant, a tensor has its channels first.
    if stack.ndim == 4 and first and (not last or hasattr(value, "detach")):
        stack = stack.transpose(0, 2, 3, 1)
    if stack.ndim != 4 or stack.shape[-1] not in _CHANNELS:
        raise ConfigurationError(
            f"The image {name!r} has the shape {tuple(array.shape)}. Give (H, W), (C, H, W), (H, W, C) with 1, 3 or 4 "
            "channels, or several as (N, C, H, W) or (N, H, W, C).",
        )
    if stack.dtype.kind == "f":
        stack = np.nan_to_num(stack).clip(0, 1) * 255 + 0.5
    elif stack.dtype.kind == "b":
        stack = stack * 255
    return list(stack.clip(0, 255).astype(np.uint8))


def as_array(value: Any) -> NDArray[Any]:
    """Return a tensor, an array, an image or a sequence of numbers as an array of its own."""
    import numpy as np

    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = value.float().numpy() if value.is_floating_point() else value.numpy()
    return np.array(value)


def as_rows(columns: Sequence[str] | None, data: Any) -> tuple[list[str], list[list[Any]]]:
    """Return a table as the names of its columns and its rows."""
    if hasattr(data, "columns") and hasattr(data, "values"):
        names = data.columns if columns is None else columns
        return [str(name) for name in names], [list(row) for row in data.values.tolist()]
    rows = [list(row) for row in data or ()]
    if columns is None:
        columns, rows = (rows[0] if rows else []), rows[1:]
    return [str(name) for name in columns], rows


# What trackers could not write: one warning for each cause, counted, and reported at the end


class Losses:
    """Counts the values that one tracker could not write, by cause.

    Attributes:
        owner: The tracker, for messages.
        secrets: What no message may hold.
    """

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.secrets = Secrets()
        self._lock = threading.Lock()
        self._given = self._total = 0
        self._by_cause: Counter[str] = Counter()
        self._warned: set[str] = set()

    @property
    def total(self) -> int:
        """How many values were lost since the tracker was made."""
        return self._total

    def count_given(self, values: int) -> None:
        """Count values that the tracker was given."""
        with self._lock:
            self._given += values

    def count_lost(self, values: int, error: BaseException | str, advice: str = "") -> None:
        """Count values that were lost, and warn of a cause that is new."""
        cause = self.secrets.in_text(error if isinstance(error, str) else first_line(error))
        kind = re.sub(r"0x[0-9a-f]+|\d+", "#", cause)
        with self._lock:
            self._total += values
            self._by_cause[kind] += values
            is_new = kind not in self._warned
            self._warned.add(kind)
        if is_new:
            logger.warning(f"{self.owner}: {cause}{advice or ' The run continues; what is lost is counted.'}")

    def report(self) -> None:
        """Report what was lost since the last report."""
        with self._lock:
            causes, given = [each for each in self._by_cause.most_common() if each[1]], self._given
            self._by_cause.clear()
            self._given = 0
        if causes:
            lost = sum(count for _, count in causes)
            listed = "; ".join(f"{count} by {cause.rstrip('.')}" for cause, count in causes)
            logger.warning(f"{self.owner} has lost {lost} of {max(lost, given)} values: {listed}.")


def first_line(error: BaseException) -> str:
    """The type of an error and the first line of its message."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


def outcome_of(error: BaseException | None) -> tuple[str, str]:
    """The status with which a run ends that an error may have ended, and the first line of that error."""
    if error is None:
        return COMPLETED, ""
    return ("interrupted" if isinstance(error, KeyboardInterrupt) else "failed"), first_line(error)
