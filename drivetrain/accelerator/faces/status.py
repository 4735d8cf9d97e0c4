"""What may be asked of an Accelerator, and the few settings that may change."""

from __future__ import annotations

import torch

from drivetrain.accelerator.accumulation import AccumulationWindow
from drivetrain.accelerator.building import accelerate_name
from drivetrain.accelerator.handlers import ProjectConfiguration
from drivetrain.accelerator.preparation import Preparation
from drivetrain.accelerator.prepared import Prepared
from drivetrain.data import DataLoaderConfiguration
from drivetrain.runtime.devices import DeviceKind
from drivetrain.runtime.state import PartialState
from drivetrain.strategies.precision import Precision


class EngineStatus:
    """What an Accelerator reports of its parts, and their settings, in Accelerate's words."""

    state: PartialState
    precision: Precision
    accumulation: AccumulationWindow
    preparation: Preparation
    project_configuration: ProjectConfiguration
    prepared: Prepared

    @property
    def mixed_precision(self) -> str:
        """Name of the precision; full precision is `"no"`, as in Accelerate."""
        return accelerate_name(self.precision)

    @property
    def kind(self) -> DeviceKind:
        """The kind of device that this run is on."""
        return self.state.kind

    @property
    def device_placement(self) -> bool:
        """Whether `prepare` and prepared loaders move models and batches to the device."""
        return self.preparation.options.device_placement

    @device_placement.setter
    def device_placement(self, value: bool) -> None:
        self.preparation.options.device_placement = value

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
    def dataloader_config(self) -> DataLoaderConfiguration:
        """How loaders are sharded."""
        return self.preparation.options.dataloader_config

    @dataloader_config.setter
    def dataloader_config(self, value: DataLoaderConfiguration) -> None:
        self.preparation.options.dataloader_config = value

    @property
    def split_batches(self) -> bool:
        """Whether a loader's batch is the global one."""
        return self.preparation.options.dataloader_config.split_batches

    @property
    def even_batches(self) -> bool:
        """Whether every process gets as many batches, the tail completed with rows that metrics drop."""
        return self.preparation.options.dataloader_config.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self.preparation.options.dataloader_config.even_batches = value

    @property
    def step_scheduler_with_optimizer(self) -> bool:
        """Whether prepared schedulers follow the optimizers."""
        return self.preparation.options.step_scheduler_with_optimizer

    @step_scheduler_with_optimizer.setter
    def step_scheduler_with_optimizer(self, value: bool) -> None:
        self.preparation.options.step_scheduler_with_optimizer = value

    @property
    def step_scheduler_per_process(self) -> bool:
        """Whether a prepared scheduler steps once per process for each optimizer step."""
        return self.preparation.options.step_scheduler_per_process

    @step_scheduler_per_process.setter
    def step_scheduler_per_process(self, value: bool) -> None:
        self.preparation.options.step_scheduler_per_process = value

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The loss scaler of the precision, if it has one."""
        return getattr(self.precision, "scaler", None)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last step of any optimizer was skipped on overflow."""
        return self.prepared.step_was_skipped

    @property
    def project_dir(self) -> str | None:
        """Where the run writes."""
        return self.project_configuration.project_dir

    @property
    def logging_dir(self) -> str | None:
        """Where trackers write."""
        return self.project_configuration.logging_dir
