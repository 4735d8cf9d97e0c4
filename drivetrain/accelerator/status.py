"""What may be asked of an Accelerator, and the few settings that may change."""

from __future__ import annotations

import torch

from drivetrain.accelerator.accumulation import AccumulationWindow
from drivetrain.accelerator.handlers import (
    ProjectConfiguration,
)
from drivetrain.accelerator.prepared import Prepared
from drivetrain.data import (
    DataLoaderConfiguration,
)
from drivetrain.runtime.devices import DeviceKind
from drivetrain.runtime.state import PartialState
from drivetrain.strategies.precision import Precision


class EngineStatus:
    """The read-only face of `Accelerator`, in Accelerate's words."""

    state: PartialState
    precision: Precision
    accumulation: AccumulationWindow
    dataloader_config: DataLoaderConfiguration
    project_configuration: ProjectConfiguration
    prepared: Prepared

    @property
    def mixed_precision(self) -> str:
        """Name of the precision; full precision is `"no"`, as in Accelerate."""
        return "no" if self.precision.name == "32" else self.precision.name

    @property
    def kind(self) -> DeviceKind:
        """The kind of device that this run is on."""
        return self.state.kind

    @property
    def sync_gradients(self) -> bool:
        """Whether the current micro-batch ends an accumulation window."""
        return self.accumulation.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self.accumulation.sync_gradients = value

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per optimizer step."""
        return self.accumulation.plugin.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, value: int) -> None:
        self.accumulation.set_steps(value)

    @property
    def split_batches(self) -> bool:
        """Whether a loader's batch is the global one."""
        return self.dataloader_config.split_batches

    @property
    def even_batches(self) -> bool:
        """Whether every process gets as many batches, the tail completed with rows that metrics drop."""
        return self.dataloader_config.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self.dataloader_config.even_batches = value

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The loss scaler of the precision, if it has one."""
        return getattr(self.precision, "scaler", None)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last step of any optimizer was skipped on overflow."""
        return any(optimizer.step_was_skipped for optimizer in self.prepared.optimizers)

    @property
    def project_dir(self) -> str | None:
        """Where the run writes."""
        return self.project_configuration.project_dir

    @property
    def logging_dir(self) -> str | None:
        """Where trackers write."""
        return self.project_configuration.logging_dir
