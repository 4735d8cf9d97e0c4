"""Tracker that writes TensorBoard event files."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from drivetrain.runtime.errors import ConfigurationError
from drivetrain.trackers.base import as_array, as_images, as_rows, flatten, plain
from drivetrain.trackers.directory import DirectoryTracker
from drivetrain.trackers.secrets import Secrets

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoardLogger(DirectoryTracker):
    """Tracker that writes event files and `hparams.yaml` into `<save_dir>/<name>/version_<n>`.

    TensorBoard is imported when the first value is written. An existing version is continued in a new event file. A
    resumed run continues the version of the earlier run. Values after the checkpoint are cut from its event files, and
    a running TensorBoard discards them.

    Args:
        save_dir: The root directory of all runs.
        name: The name of the experiment, a directory in `save_dir`.
        version: The number of the run, for a directory `version_<n>`, or the name of its directory. If None, the next
            free number.
        prefix: A prefix for the names of all values, joined by `-`.
        sub_dir: A subdirectory of the run directory, for the event files.
        **kwargs: Arguments of `torch.utils.tensorboard.SummaryWriter`, such as `flush_secs` or `purge_step`.

    Raises:
        ConfigurationError: If TensorBoard is not installed.

    Example:
        ```python
        from drivetrain import TensorBoardLogger, Trainer

        trainer = Trainer(logger=TensorBoardLogger("logs", name="digits"))
        ```
    """

    name: ClassVar[str] = "tensorboard"

    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        name: str | None = "drivetrain_logs",
        version: int | str | None = None,
        prefix: str = "",
        sub_dir: str | None = None,
        **kwargs: Any,
    ) -> None:
        if not self.is_available():
            raise ConfigurationError(
                "TensorBoardLogger needs TensorBoard, which is not installed. "
                "Install it with `pip install 'drivetrain[tensorboard]'`, or use CSVLogger instead.",
            )
        super().__init__(save_dir, name, version, prefix)
        self._sub_dir = sub_dir or ""
        self._writer_options = kwargs
        self._writer: SummaryWriter | None = None
        self._unnumbered = 0
        self._groups: set[str] = set()  # directories of charts with several curves
        self._last_step = -1
        self._purge_step: int | None = None

    @classmethod
    def is_available(cls) -> bool:
        return importlib.util.find_spec("tensorboard") is not None

    def start(self) -> None:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self.run_directory.create()
            options = {"purge_step": self._purge_step, **self._writer_options}
            self._writer = SummaryWriter(log_dir=str(self._event_directory), **options)
            self._purge_step = None

    def __getstate__(self) -> dict[str, Any]:
        # File handles cannot be copied. The copy opens a new event file.
        self.save()
        return {**self.__dict__, "_writer": None}

    @property
    def _event_directory(self) -> Path:
        return Path(self.run_directory.path, self._sub_dir)

    @property
    def tracker(self) -> SummaryWriter:
        """The `SummaryWriter` of this run, with which a script can use all features of TensorBoard.

        Opens the run if necessary.
        """
        self.start()
        assert self._writer is not None
        return self._writer

    @property
    def writer(self) -> SummaryWriter:
        """The `SummaryWriter` of this run. An alias of `tracker`."""
        return self.tracker

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        super().store_init_configuration(values)
        from torch.utils.tensorboard.summary import hparams

        allowed = {
            key: value if isinstance(value, (bool, int, float, str)) else str(value)
            for key, value in flatten(Secrets().hide(plain(values))).items()
        }
        file_writer = self.tracker._get_file_writer()  # type: ignore[no-untyped-call]
        for summary in hparams(allowed, {}):  # type: ignore[no-untyped-call]
            file_writer.add_summary(summary)

    def log(self, values: Mapping[str, float | int | str], step: int | None = None) -> None:
        """Log values of one step: a number as a curve, a dict of numbers as one chart, and a string as text.

        Args:
            values: A dict from name to value.
            step: The optimizer step of the values. If None, calls are numbered from 0.
        """
        writer = self.tracker
        if step is None:
            step, self._unnumbered = self._unnumbered, self._unnumbered + 1
        self._last_step = max(self._last_step, step)
        for key, value in values.items():
            name = self._prefix + key
            if isinstance(value, str):
                writer.add_text(name, value, step)
            elif isinstance(value, Mapping):
                numbers = {each: self._number(f"{key}/{each}", item) for each, item in flatten(value).items()}
                known = {each: number for each, number in numbers.items() if number is not None}
                writer.add_scalars(name, known, step)
                # `add_scalars` writes each curve to a directory of its own, which a resumed run must cut too.
                self._groups |= {f"{name.replace('/', '_')}_{each}" for each in known}
            elif (number := self._number(key, value)) is not None:
                writer.add_scalar(name, number, step)

    def _number(self, name: str, value: Any) -> float | None:
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError, RuntimeError):
            self._leave_out_value(name, value)
            return None

    def log_images(self, values: Mapping[str, Any], step: int | None = None) -> None:
        for name, images in as_images(values).items():
            for number, image in enumerate(images):
                title = self._prefix + (name if len(images) == 1 else f"{name}/{number}")
                self.tracker.add_image(title, image, step, dataformats="HWC")

    def log_table(
        self, name: str, columns: Sequence[str] | None = None, data: Any = None, step: int | None = None
    ) -> None:
        titles, rows = as_rows(columns, data)
        lines = [titles, ["---"] * len(titles), *rows]
        text = "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)
        self.tracker.add_text(self._prefix + name, text, step)

    def log_text(self, values: Mapping[str, str], step: int | None = None) -> None:
        for name, text in values.items():
            self.tracker.add_text(self._prefix + name, text, step)

    def log_histogram(self, values: Mapping[str, Any], step: int | None = None) -> None:
        for name, each in values.items():
            self.tracker.add_histogram(self._prefix + name, as_array(each), step)

    def log_graph(self, model: Any, input_array: Any = None) -> None:
        """Write the graph of a model, traced with an example input.

        Does nothing if `input_array` is None.

        Args:
            model: The module.
            input_array: An example input of the module.
        """
        if input_array is not None:
            self.tracker.add_graph(model, input_array)

    def save(self) -> None:
        if self._writer is not None:
            self._writer.flush()

    def state_dict(self) -> dict[str, Any]:
        return {
            **super().state_dict(),
            "files": {self._name_of(path): path.stat().st_size for path in self._event_files()},
            "last_step": self._last_step,
            "unnumbered": self._unnumbered,
        }

    def _resume_from(self, state: Mapping[str, Any]) -> None:
        files = {name: size for name, size in self._checked(state, "files", dict).items() if isinstance(size, int)}
        self._last_step = self._checked(state, "last_step", int)
        self._unnumbered = self._checked(state, "unnumbered", int)
        self._groups |= {str(Path(name).parent) for name in files if "/" in name and ".." not in name}
        for path in self._event_files():
            size = files.get(self._name_of(path))
            if size is None:
                path.unlink()
            elif path.stat().st_size > max(0, size):
                os.truncate(path, max(0, size))
        # A running TensorBoard has already read the values that were cut: the purge step makes it discard them.
        self._purge_step = self._last_step + 1

    def _event_files(self) -> list[Path]:
        directories = [self._event_directory, *(self._event_directory / name for name in sorted(self._groups))]
        return [path for each in directories for path in sorted(each.glob("events.out.tfevents.*"))]

    def _name_of(self, path: Path) -> str:
        return path.relative_to(self._event_directory).as_posix()

    def finish(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        self.run_directory.release()
