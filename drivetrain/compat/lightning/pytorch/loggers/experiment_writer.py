"""`ExperimentWriter`: the type of `CSVLogger.experiment`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, ClassVar

from drivetrain.trackers import CSVLogger


class ExperimentWriter:
    """Writer of one run's metrics and hyper-parameters."""

    NAME_METRICS_FILE: ClassVar[str] = "metrics.csv"
    NAME_HPARAMS_FILE: ClassVar[str] = "hparams.yaml"

    def __init__(self, log_dir: str, logger: CSVLogger | None = None) -> None:
        self.log_dir = log_dir
        self._logger = logger or CSVLogger(os.path.dirname(log_dir), "", os.path.basename(log_dir))
        self._logger.start()

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Rows that are not yet written."""
        return self._logger.waiting

    @property
    def metrics_file_path(self) -> str:
        """Path of `metrics.csv`."""
        return os.path.join(self.log_dir, self.NAME_METRICS_FILE)

    def log_metrics(self, metrics_dict: Mapping[str, float], step: int | None = None) -> None:
        """Add the metrics of one step."""
        self._logger.log(metrics_dict, step)

    def log_hparams(self, params: Mapping[str, Any]) -> None:
        """Write the hyper-parameters."""
        self._logger.store_init_configuration(params)

    def save(self) -> None:
        """Write the buffered rows."""
        self._logger.save()
