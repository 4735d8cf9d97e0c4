"""Loggers that write files, with Lightning's default name of the experiment."""

from __future__ import annotations

import os
from typing import Any, ClassVar

from drivetrain import trackers


class CSVLogger(trackers.CSVLogger):
    """Writes `metrics.csv` and `hparams.yaml` into `<save_dir>/<name>/version_<n>`.

    Args:
        save_dir: The directory of all runs.
        name: The name of the experiment.
        version: The run; the next free number without it.
        prefix: Put before the name of every value.
        flush_logs_every_n_steps: Rows that may wait in memory.
    """

    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        name: str | None = "lightning_logs",
        version: int | str | None = None,
        prefix: str = "",
        flush_logs_every_n_steps: int = 100,
    ) -> None:
        super().__init__(save_dir, name, version, prefix, flush_logs_every_n_steps)

    @property
    def name(self) -> str:  # type: ignore[override]
        """The name of the experiment."""
        return self.run_directory.name

    @property
    def root_dir(self) -> str:
        """The directory that holds the versions."""
        return str(self.run_directory.root)


class TensorBoardLogger(trackers.TensorBoardLogger):
    """Writes event files and `hparams.yaml` into `<save_dir>/<name>/version_<n>`.

    Args:
        save_dir: The directory of all runs.
        name: The name of the experiment.
        version: The run; the next free number without it.
        log_graph: Whether to write the structure of the model.
        default_hp_metric: Taken for Lightning's sake; no value is written that was not logged.
        prefix: Put before the name of every value.
        sub_dir: A directory in that of the run, for the event files.
        comment: For torch's `SummaryWriter`.
        max_queue: The same.
        flush_secs: The same.
        filename_suffix: The same.
        **kwargs: The same.
    """

    NAME_HPARAMS_FILE: ClassVar[str] = "hparams.yaml"

    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        name: str | None = "lightning_logs",
        version: int | str | None = None,
        log_graph: bool = False,
        default_hp_metric: bool = True,
        prefix: str = "",
        sub_dir: str | os.PathLike[str] | None = None,
        comment: str = "",
        max_queue: int = 10,
        flush_secs: int = 120,
        filename_suffix: str = "",
        **kwargs: Any,
    ) -> None:
        kwargs.update(comment=comment, max_queue=max_queue, flush_secs=flush_secs, filename_suffix=filename_suffix)
        inner = None if sub_dir is None else os.path.expandvars(os.path.expanduser(sub_dir))
        super().__init__(save_dir, name, version, prefix, inner, **kwargs)
        self._shows_graph = log_graph
        self.sub_dir = inner

    @property
    def name(self) -> str:  # type: ignore[override]
        """The name of the experiment."""
        return self.run_directory.name

    @property
    def root_dir(self) -> str:
        """The directory that holds the versions."""
        return str(self.run_directory.root)

    def log_graph(self, model: Any, input_array: Any = None) -> None:
        if self._shows_graph:
            super().log_graph(model, input_array)
