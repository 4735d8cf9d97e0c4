"""`TensorBoardLogger` with Fabric's directory arguments."""

from __future__ import annotations

import os
from typing import Any

from drivetrain.compat.lightning.fabric.wrappers import FabricModule
from drivetrain.compat.lightning.pytorch.loggers import files

__all__ = ["TensorBoardLogger"]


class TensorBoardLogger(files.TensorBoardLogger):
    """Logger that writes TensorBoard event files to `<root_dir>/<name>/version_<n>`."""

    def __init__(
        self,
        root_dir: str | os.PathLike[str],
        name: str | None = "lightning_logs",
        version: int | str | None = None,
        default_hp_metric: bool = True,
        prefix: str = "",
        sub_dir: str | os.PathLike[str] | None = None,
        log_graph: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(root_dir, name, version, log_graph, default_hp_metric, prefix, sub_dir, **kwargs)
        self._given_root = os.fspath(root_dir)

    @property
    def root_dir(self) -> str:
        """Parent directory of all runs, as passed to the constructor."""
        return self._given_root

    @property
    def log_dir(self) -> str:
        """Directory of the event files."""
        inner = [self.sub_dir] if self.sub_dir else []
        return os.path.join(self.run_directory.path, *inner)

    def log_graph(self, model: Any, input_array: Any = None) -> None:
        """Trace a model on `input_array`, and log its graph."""
        super().log_graph(model.module if isinstance(model, FabricModule) else model, input_array)
