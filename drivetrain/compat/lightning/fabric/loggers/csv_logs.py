"""`CSVLogger` with Fabric's directory arguments."""

from __future__ import annotations

import os

from drivetrain.compat.lightning.pytorch.loggers import files
from drivetrain.compat.lightning.pytorch.loggers.experiment_writer import ExperimentWriter

__all__ = ["CSVLogger"]


class CSVLogger(files.CSVLogger):
    """Logger that writes `metrics.csv` to `<root_dir>/<name>/version_<n>`."""

    def __init__(
        self,
        root_dir: str | os.PathLike[str],
        name: str | None = "lightning_logs",
        version: int | str | None = None,
        prefix: str = "",
        flush_logs_every_n_steps: int = 100,
    ) -> None:
        super().__init__(root_dir, name, version, prefix, flush_logs_every_n_steps)
        self._root_dir = os.fspath(root_dir)

    @property
    def root_dir(self) -> str:
        """Parent directory of all runs."""
        return self._root_dir


_ExperimentWriter = ExperimentWriter
