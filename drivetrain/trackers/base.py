"""Base classes of experiment trackers, and conversions of the values that they receive."""

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
"""Aliases of the status `"completed"`."""


class Tracker(ABC):
    """Base class of experiment trackers, which write the hyper-parameters and metric values of one run.

    Trackers may be created on every process, but only the main process may call them. The first call that needs it
    opens the run, and a call after `finish` opens it again. `log_metrics`, `log_hyperparams` and `experiment` are
    aliases of `log`, `store_init_configuration` and `tracker`. Values that a tracker cannot store, such as images in a
    CSV table, are ignored with one warning.

    Attributes:
        name: The name of the kind of tracker, such as `"csv"`.
        in_background: True if a run calls the tracker on a separate thread, so that a slow tracker does not delay
            training. Set it to False for fast trackers, and for those that must stay on the thread that created them.
        main_process_only: True if only the main process of a run calls the tracker.
        log_model: True if the tracker receives the best checkpoint when a `fit` ends.

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
        """Return True if all packages that this tracker needs are installed."""
        return True

    @classmethod
    def for_run(cls, save_dir: str | os.PathLike[str], project: str | None, **options: Any) -> Tracker:
        """Create the tracker that a Trainer was given by name, as in `Trainer(logger="csv")`.

        Args:
            save_dir: The root directory of the run.
            project: The name of the project or experiment, or None.
            **options: Further arguments of the constructor.
        """
        return cls(**options)

    @property
    def secrets(self) -> Sequence[str]:
        """Secret values of this tracker, such as its API key, which are removed from all logged values."""
        return ()

    def load(self) -> None:
        """Import the packages that this tracker needs, before training starts.

        Called on the main thread.
        """

    def start(self) -> None:
        """Open the tracker's run now instead of at the first logged value.

        Does nothing if the run is already open.
        """

    @abstractmethod
    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Write hyper-parameters of the run, such as the learning rate, to the tracker's file or service.

        Further calls add to the values that are already stored.

        Args:
            values: A dict from name to value. Nested dicts and lists are allowed.
        """

    @abstractmethod
    def log(self, values: Mapping[str, float | int | str], step: int | None = None) -> None:
        """Log metric values of one optimizer step, such as `{"train_loss": 0.3}`.

        Args:
            values: A dict from name to a number, or to text if the tracker supports it. `epoch` is the epoch of the
                step.
            step: The optimizer step of the values.
        """

    def log_images(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Log images, for example samples of a generative model.

        Args:
            values: A dict from name to one or several images. An image is a PIL image, or a tensor or array of shape
                (H, W), (C, H, W) or (H, W, C), with floats in [0, 1] or bytes. A leading dimension holds several
                images.
            step: The optimizer step of the images.
        """
        self._leave_out("images")

    def log_table(
        self, name: str, columns: Sequence[str] | None = None, data: Any = None, step: int | None = None
    ) -> None:
        """Log a table, for example of predictions and targets.

        Args:
            name: The name of the table.
            columns: The column names. If None, the first row of `data`, or the columns of a DataFrame.
            data: The rows, or a pandas DataFrame.
            step: The optimizer step of the table.
        """
        self._leave_out("tables")

    def log_text(self, values: Mapping[str, str], step: int | None = None) -> None:
        """Log texts, such as samples generated by a language model.

        Args:
            values: A dict from name to text.
            step: The optimizer step of the texts.
        """
        self.log(dict(values), step)

    def log_histogram(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Write histograms, such as distributions of weights or gradients, to the run.

        Args:
            values: A dict from name to the values of the distribution, as a tensor, an array or a sequence.
            step: The optimizer step of the histograms.
        """
        self._leave_out("histograms")

    def log_graph(self, model: Any, input_array: Any = None) -> None:
        """Write the structure of a model to the run. `fit` calls this method with the task.

        Args:
            model: The module, or a text that describes it.
            input_array: An example input, for trackers that trace the model.
        """

    def log_artifact(self, path: str | os.PathLike[str], name: str | None = None) -> None:
        """Store a file or directory, such as a checkpoint, with the run.

        Args:
            path: The file or directory.
            name: The name in the run. If None, that of the file.
        """
        self._leave_out("artifacts")

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        """Run code each time a `ModelCheckpoint` has saved a checkpoint, for example to upload the file.

        Args:
            checkpoint_callback: The callback, with its paths and scores.
        """

    def _leave_out(self, what: str) -> None:
        logger.warning_once(f"{type(self).__name__} does not support {what}. They are ignored.")

    def _leave_out_value(self, name: str, value: Any) -> None:
        self._leave_out(f"values such as {name!r}, of type {type(value).__name__}")

    def _without_arrays(self, values: Mapping[str, Any]) -> dict[str, Any]:
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
        """Flush all buffered values to disk or to the tracker's server."""

    def finish(self) -> None:
        """Write all remaining values and close the tracker's run.

        Logging further values opens the run again.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint stores so that a resumed run can continue this tracker's run, such as its ID.

        Called on the main process for each checkpoint. All values logged before must be on disk when it returns.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the tracker run that a checkpoint describes, and remove values logged after that checkpoint.

        Called on the main process, before anything is logged.

        Args:
            state: The dict that `state_dict` returned.
        """

    @property
    def tracker(self) -> Any:
        """The run object of the tracker's library, such as a `SummaryWriter`.

        Opens the run if necessary.
        """
        self.start()
        return self

    @property
    def log_dir(self) -> str | None:
        """The directory to which this run is written, or None if the tracker has no directory."""
        return None

    # aliases

    def log_metrics(self, metrics: Mapping[str, float | int | str], step: int | None = None) -> None:
        """Log metric values of one optimizer step. An alias of `log`."""
        self.log(metrics, step)

    def log_hyperparams(self, params: Any) -> None:
        """Write the hyper-parameters of the run, given as a dict, a dataclass instance or an `argparse.Namespace`.

        Args:
            params: The hyper-parameters.

        Raises:
            ConfigurationError: If `params` has another type.
        """
        self.store_init_configuration(hyperparameters_of(params))

    @property
    def experiment(self) -> Any:
        """The run object of the tracker's library, such as a `SummaryWriter`.

        An alias of `tracker`.
        """
        return self.tracker

    # end of the run

    def finalize(self, status: str = COMPLETED, message: str = "") -> None:
        """Record how the run ended, write all remaining values and close the run.

        Trackers that cannot store a status only call `finish`.

        Args:
            status: `"completed"` (or `"success"`), `"failed"`, `"interrupted"` or `"preempted"`.
            message: The first line of the error that ended the run.
        """
        self.finish()

    def record_end(self, status: str, message: str) -> None:
        """Tell the tracker how the run ended.

        Override this method to report the status in the service's own terms.

        Args:
            status: The status of the run, as for `finalize`.
            message: The first line of the error that ended the run.
        """
        self.finalize(status, message)


def write_values(tracker: Tracker, values: Mapping[str, Any], step: int | None, **options: Any) -> None:
    """Log values with the tracker's `log_metrics` if it has one, else with `log`."""
    # A user's class may override either name. The inherited `log_metrics` calls `log`.
    if options or type(tracker).log_metrics is Tracker.log_metrics:
        tracker.log(values, step, **options)
    else:
        tracker.log_metrics(metrics=values, step=step)


def write_hyper_parameters(tracker: Tracker, values: Mapping[str, Any]) -> None:
    # A tracker that overrides `log_hyperparams` gets all hyper-parameters there.
    if type(tracker).log_hyperparams is Tracker.log_hyperparams:
        tracker.store_init_configuration(values)
    else:
        tracker.log_hyperparams(values)


def hyperparameters_of(params: Any) -> dict[str, Any]:
    """Convert hyper-parameters, such as a dataclass or a namespace, to a dict."""
    if params is None:
        return {}
    if isinstance(params, Mapping):
        return {str(key): value for key, value in params.items()}
    if isinstance(params, argparse.Namespace):
        return dict(vars(params))
    if dataclasses.is_dataclass(params) and not isinstance(params, type):
        return dataclasses.asdict(params)
    raise ConfigurationError(
        f"Hyper-parameters cannot be of type {type(params).__name__}. "
        "Give a dict, a dataclass instance or an argparse.Namespace.",
    )


def plain(value: Any, keep: bool = False) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item, keep) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, keep) for item in value]
    # Sorted, so that equal sets become equal lists.
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
    """Flatten nested dicts: `{"a": {"b": 1}}` becomes `{"a/b": 1}`."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat.update({f"{key}{separator}{rest}": item for rest, item in flatten(value, separator).items()})
        else:
            flat[str(key)] = value
    return flat


# Custom trackers


Method = TypeVar("Method", bound=Callable[..., Any])


def on_main_process(function: Method) -> Method:
    """Decorate a tracker method so that it runs on the main process only.

    Args:
        function: The method.
    """

    @functools.wraps(function)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "main_process_only", False):
            state = PartialState.existing()
            # Before the processes are initialized, the rank comes from the launcher's environment variables.
            rank = state.process_index if state is not None else ProcessEnvironment.detect().rank
            if rank != 0:
                return None
        return function(self, *args, **kwargs)

    return run  # type: ignore[return-value]


class GeneralTracker(Tracker):
    """Base class for custom trackers, for use with `Accelerator.init_trackers` or as the logger of a Trainer.

    A subclass defines `name`, `requires_logging_directory` and the property `tracker`, and overrides the methods that
    it needs. With `main_process_only = True`, only the main process calls it, on a separate thread. With False, every
    process calls it, on the main thread.

    Attributes:
        requires_logging_directory: True if the constructor takes a directory to write to.

    Raises:
        ConfigurationError: If the class lacks one of the three definitions.

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
        # A subclass may also assign `tracker` in its constructor.
        if "tracker" not in vars(self) and type(self).tracker is Tracker.tracker:
            missing.append("tracker")
        if missing and not _blank:
            raise ConfigurationError(
                f"The tracker class {type(self).__name__} has no {', '.join(missing)}. A tracker must define `name` "
                "(text), `requires_logging_directory` (bool) and `tracker` (a property, the underlying object).",
                see="trackers.md",
            )

    @classmethod
    def for_run(cls, save_dir: str | os.PathLike[str], project: str | None, **options: Any) -> GeneralTracker:
        """Create the tracker that a Trainer was given by name, as in `Trainer(logger="my_tracker")`.

        Passes the project, and `save_dir` if required.

        Args:
            save_dir: The root directory of the run.
            project: The name of the project, or None.
            **options: Further arguments of the constructor.
        """
        places = [os.fspath(save_dir)] if cls.requires_logging_directory else []
        made: Any = cls
        return made(project, *places, **options)  # type: ignore[no-any-return]

    def store_init_configuration(self, values: Mapping[str, Any]) -> None: ...

    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        """Log metric values of one step. Subclasses override this method.

        Args:
            values: A dict from name to value.
            step: The step of the values.
            **options: Options for this tracker that were passed to `Accelerator.log`.
        """


# Conversion of images, tables and distributions. They are copied, since the run may change its tensors later.


_CHANNELS = (1, 3, 4)


def as_images(values: Mapping[str, Any]) -> dict[str, list[NDArray[Any]]]:
    """Convert tensors, arrays and PIL images to uint8 arrays of shape (H, W, C)."""
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
    # If both layouts are possible, a tensor has its channels first.
    if stack.ndim == 4 and first and (not last or hasattr(value, "detach")):
        stack = stack.transpose(0, 2, 3, 1)
    if stack.ndim != 4 or stack.shape[-1] not in _CHANNELS:
        raise ConfigurationError(
            f"The image {name!r} has the shape {tuple(array.shape)}. Use (H, W), (C, H, W), (H, W, C) with 1, 3 or 4 "
            "channels, or (N, C, H, W) or (N, H, W, C) for several images.",
        )
    if stack.dtype.kind == "f":
        # Adding 0.5 rounds to the nearest integer, since `astype` truncates.
        stack = np.nan_to_num(stack).clip(0, 1) * 255 + 0.5
    elif stack.dtype.kind == "b":
        stack = stack * 255
    return list(stack.clip(0, 255).astype(np.uint8))


def as_png(image: NDArray[Any]) -> bytes:
    """Encode an image of shape (H, W, C) as a PNG file."""
    import struct
    import zlib

    import numpy as np

    height, width, channels = image.shape
    # Each row begins with the number of its filter, here 0 for none.
    rows = np.zeros((height, 1 + width * channels), np.uint8)
    rows[:, 1:] = image.reshape(height, -1)
    # The colour types are grey, RGB, and RGB with transparency.
    header = struct.pack(">IIBBBBB", width, height, 8, {1: 0, 3: 2, 4: 6}[channels], 0, 0, 0)
    parts = {b"IHDR": header, b"IDAT": zlib.compress(rows.tobytes()), b"IEND": b""}
    chunks = (
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in parts.items()
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def as_array(value: Any) -> NDArray[Any]:
    """Copy a tensor, an image or a sequence of numbers to a new NumPy array."""
    import numpy as np

    if hasattr(value, "detach"):
        value = value.detach().cpu()
        # NumPy has no bfloat16.
        value = value.float().numpy() if value.is_floating_point() else value.numpy()
    return np.array(value)


def as_rows(columns: Sequence[str] | None, data: Any) -> tuple[list[str], list[list[Any]]]:
    # A DataFrame, recognized without importing pandas.
    if hasattr(data, "columns") and hasattr(data, "values"):
        names = data.columns if columns is None else columns
        return [str(name) for name in names], [list(row) for row in data.values.tolist()]
    rows = [list(row) for row in data or ()]
    if columns is None:
        columns, rows = (rows[0] if rows else []), rows[1:]
    return [str(name) for name in columns], rows


# Lost values


class Losses:
    """Counts the values that a tracker has failed to log, and warns the user about them.

    Attributes:
        owner: The name of the tracker, for messages.
        secrets: The secrets that messages must not contain.
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
        return self._total

    def count_given(self, values: int) -> None:
        with self._lock:
            self._given += values

    def count_lost(self, values: int, error: BaseException | str, advice: str = "") -> None:
        cause = self.secrets.in_text(error if isinstance(error, str) else first_line(error))
        # Messages that differ only in numbers or addresses count as one cause.
        kind = re.sub(r"0x[0-9a-f]+|\d+", "#", cause)
        with self._lock:
            self._total += values
            self._by_cause[kind] += values
            is_new = kind not in self._warned
            self._warned.add(kind)
        if is_new:
            logger.warning(f"{self.owner}: {cause}{advice or ' The run continues without these values.'}")

    def report(self) -> None:
        with self._lock:
            causes, given = [each for each in self._by_cause.most_common() if each[1]], self._given
            self._by_cause.clear()
            self._given = 0
        if causes:
            lost = sum(count for _, count in causes)
            listed = "; ".join(f"{count} by {cause.rstrip('.')}" for cause, count in causes)
            logger.warning(f"{self.owner} lost {lost} of {max(lost, given)} values: {listed}.")


def first_line(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


def outcome_of(error: BaseException | None) -> tuple[str, str]:
    """Return the final status of a run and the first line of its error."""
    if error is None:
        return COMPLETED, ""
    return ("interrupted" if isinstance(error, KeyboardInterrupt) else "failed"), first_line(error)
