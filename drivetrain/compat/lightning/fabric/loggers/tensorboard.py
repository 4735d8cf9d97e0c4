"""`TensorBoardLogger`, with Fabric's names of its directories."""

from __future__ import annotations

import os
from typing import Any

from drivetrain.compat.lightning.fabric.wrappers import FabricModule
from drivetrain.compat.lightning.pytorch.loggers import files

__all__ = ["TensorBoardLogger"]


class TensorBoardLogger(files.TensorBoardLogger):
    """Writes event files into `<root_dir>/<name>/version_<n>`.

    Args:
        root_dir: The directory of all runs; `~` and variables in it stand for what they are.
        name: The name of the experiment.
        version: The run; the next free number without it.
        default_hp_metric: Taken for Lightning's sake; no value is written that was not logged.
        prefix: Put before the name of every value.
        sub_dir: A directory in that of the run, for the event files.
        log_graph: Whether `log_graph` does anything.
        **kwargs: For torch's `SummaryWriter`.
    """

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
        """The directory of all runs, as it was given."""
        return self._given_root

    @property
    def log_dir(self) -> str:
        """The directory that the event files are written in."""
        inner = [self.sub_dir] if self.sub_dir else []
        return os.path.join(self.run_directory.path, *inner)

    def log_graph(self, model: Any, input_array: Any = None) -> None:
        """Trace a model and write its structure.

        Args:
            model: The module, as it was or as `Fabric.setup` returned it.
            input_array: What it can be called with; its `example_input_array` if None.
        """
        super().log_graph(model.module if isinstance(model, FabricModule) else model, input_array)
