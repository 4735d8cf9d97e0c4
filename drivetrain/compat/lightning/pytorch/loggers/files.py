"""`CSVLogger` and `TensorBoardLogger` with Lightning's default experiment name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, ClassVar

from torch import Tensor

from drivetrain import trackers
from drivetrain.compat.lightning.fabric.utilities.rank_zero import rank_zero_warn
from drivetrain.compat.lightning.pytorch.loggers.experiment_writer import ExperimentWriter
from drivetrain.compat.lightning.pytorch.loggers.logger import Logger, rank_zero_experiment
from drivetrain.trackers.base import COMPLETED
from drivetrain.trackers.directory import DirectoryTracker
from drivetrain.trainer.export import Exporting
from drivetrain.trainer.task import Task


class EndsByStatus:
    """Mixin that calls `finalize(status)` at the end of a run if the script overrides it."""

    def record_end(self: Any, status: str, message: str) -> None:
        """Call an overridden `finalize` when a run ends."""
        is_own = "finalize" in vars(self) or not type(self).finalize.__module__.startswith("drivetrain.")
        if is_own:
            self.finalize("success" if status == COMPLETED else "failed")
        else:
            self.finalize(status, message)


class CSVLogger(EndsByStatus, trackers.CSVLogger):
    """Logger that writes `metrics.csv` and `hparams.yaml` to `<save_dir>/<name>/version_<n>`."""

    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        name: str | None = "lightning_logs",
        version: int | str | None = None,
        prefix: str = "",
        flush_logs_every_n_steps: int = 100,
    ) -> None:
        super().__init__(save_dir, name, version, prefix, flush_logs_every_n_steps)
        self._every = max(1, flush_logs_every_n_steps)
        self._unnumbered = 0

    @property
    def name(self) -> str:  # type: ignore[override]
        """Name of the experiment."""
        return self.run_directory.name

    @property
    def root_dir(self) -> str:
        """Parent directory of the versions."""
        return str(self.run_directory.root)

    def log_hyperparams(self, params: Any = None) -> None:
        """Write hyper-parameters to `hparams.yaml`."""
        super().log_hyperparams(params)

    def log(self, values: Mapping[str, float | int | str], step: int | None = None) -> None:
        """Log the metrics of one step. Without `step`, steps are numbered consecutively."""
        if step is None:
            step = self._unnumbered
        self._unnumbered = step + 1
        super().log(values, step)
        if (step + 1) % self._every == 0:
            self.save()

    @property
    @rank_zero_experiment
    def experiment(self) -> ExperimentWriter:
        """The writer of the files. On ranks other than 0, an object that does nothing."""
        return ExperimentWriter(self.log_dir, self)


class TensorBoardLogger(EndsByStatus, trackers.TensorBoardLogger):
    """Logger that writes event files and `hparams.yaml` to `<save_dir>/<name>/version_<n>`."""

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
        inner = None if sub_dir is None else _expanded(sub_dir)
        super().__init__(_expanded(save_dir), name, version, prefix, inner, **kwargs)
        self._shows_graph = log_graph
        self.sub_dir = inner

    @property
    def name(self) -> str:  # type: ignore[override]
        """Name of the experiment."""
        return self.run_directory.name

    @property
    def root_dir(self) -> str:
        """Parent directory of the versions."""
        return os.path.join(self.save_dir, self.name)

    @property
    def log_dir(self) -> str:
        """Directory of the event files."""
        version = self.version if isinstance(self.version, str) else f"version_{self.version}"
        return os.path.join(self.root_dir, version, *([self.sub_dir] if self.sub_dir else []))

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The `SummaryWriter`. On ranks other than 0, an object that does nothing."""
        return self.tracker

    def start(self) -> None:
        # A subclass may override the name or version.
        self.run_directory.name, self.run_directory.version = self.name or "", self.version
        super().start()
        self._write_hparams()

    def save(self) -> None:
        super().save()
        self._write_hparams()

    def _write_hparams(self) -> None:
        """Write `hparams.yaml` if it does not exist yet, even without hyper-parameters."""
        if not (self.run_directory.path / self.NAME_HPARAMS_FILE).exists():
            DirectoryTracker.store_init_configuration(self, {})

    def log_hyperparams(
        self, params: Any, metrics: Mapping[str, Any] | float | None = None, step: int | None = None
    ) -> None:
        """Write hyper-parameters to `hparams.yaml` and to TensorBoard's HParams tab."""
        super().log_hyperparams(params)
        if metrics is not None:
            self.log(metrics if isinstance(metrics, Mapping) else {"hp_metric": metrics}, step or 0)

    def log_graph(self, model: Any, input_array: Any = None) -> None:
        if not self._shows_graph:
            return
        found = getattr(model, "example_input_array", None) if input_array is None else input_array
        if found is None:
            rank_zero_warn(
                "Could not log computational graph to TensorBoard: The `model.example_input_array` attribute is not "
                "set, or `input_array` was not given."
            )
        elif not isinstance(found, Tensor | tuple):
            rank_zero_warn(
                f"Could not log computational graph to TensorBoard: a {type(found).__name__} as `example_input_array` "
                "can't be traced by TensorBoard."
            )
        else:
            with nullcontext() if _can_be_traced(model) else Exporting(model):
                super().log_graph(model, found)


def _can_be_traced(model: Any) -> bool:
    """Return True if `torch.jit.trace` can read all attributes. `trainer` raises on a detached task."""
    try:
        model.trainer  # noqa: B018 - whether it raises
    except AttributeError:
        return True
    except RuntimeError:
        return not isinstance(model, Task)
    return True


for _kind in (CSVLogger, TensorBoardLogger):
    Logger.register(_kind)


def _expanded(path: str | os.PathLike[str]) -> str:
    return os.path.expandvars(os.path.expanduser(os.fspath(path)))
