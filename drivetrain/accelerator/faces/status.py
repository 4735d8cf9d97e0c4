"""What may be asked of an Accelerator, and the few settings that may change."""

from __future__ import annotations

from typing import Any

import torch

from drivetrain.accelerator.accumulation import AccumulationWindow
from drivetrain.accelerator.building import accelerate_name, backend_of
from drivetrain.accelerator.engine_state import AcceleratorState
from drivetrain.accelerator.handlers import ProjectConfiguration
from drivetrain.accelerator.preparation import Preparation
from drivetrain.accelerator.prepared import Prepared
from drivetrain.data import DataLoaderConfiguration
from drivetrain.runtime.devices import DeviceKind
from drivetrain.strategies import Strategy
from drivetrain.strategies.accelerate_names import grid_rank
from drivetrain.strategies.precision import Precision


class EngineStatus:
    """What an Accelerator reports of its parts, and their settings, in Accelerate's words."""

    state: AcceleratorState
    strategy: Strategy
    precision: Precision
    accumulation: AccumulationWindow
    preparation: Preparation
    project_configuration: ProjectConfiguration
    prepared: Prepared

    @property
    def mixed_precision(self) -> str:
        """Name of the precision; full precision is `"no"`, as in Accelerate."""
        return accelerate_name(self.precision, self.strategy)

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
    def dispatch_batches(self) -> bool | None:
        """Whether rank 0 reads for all; None where iterable datasets are read so."""
        return self.preparation.options.dataloader_config.dispatch_batches

    @property
    def use_seedable_sampler(self) -> bool:
        """Whether random samplers are seeded at each epoch."""
        return self.preparation.options.dataloader_config.use_seedable_sampler

    @property
    def use_stateful_dataloader(self) -> bool:
        """Whether loaders continue by themselves after `load_state`."""
        return self.preparation.options.dataloader_config.use_stateful_dataloader

    @property
    def non_blocking(self) -> bool:
        """Whether batches are copied without waiting."""
        return self.preparation.options.dataloader_config.non_blocking

    @property
    def deepspeed_plugin(self) -> Any:
        """The DeepSpeed plugin in use, if one was given."""
        return self.state.deepspeed_plugin

    @property
    def parallelism_config(self) -> Any:
        """The sizes of the grid of processes, if they were given."""
        return self.state.parallelism_config

    @property
    def is_fsdp2(self) -> bool:
        """Whether parameters are sharded by torch's `fully_shard`."""
        return self.state.is_fsdp2

    @property
    def is_composable_parallelism_enabled(self) -> bool:
        """Whether parameters are sharded by torch's `fully_shard`, which other ways of sharding compose with."""
        return self.state.is_fsdp2

    @property
    def tensor_parallel_rank(self) -> int:
        """This process's place among those that split its layers."""
        return grid_rank(self.strategy, "tp")

    @property
    def pipeline_parallel_rank(self) -> int:
        """This process's stage."""
        return grid_rank(self.strategy, "pp")

    @property
    def context_parallel_rank(self) -> int:
        """This process's place among those that split its sequences."""
        return grid_rank(self.strategy, "cp")

    @property
    def data_parallel_rank(self) -> int:
        """This process's replica."""
        return grid_rank(self.strategy, "dp_replicate")

    @property
    def data_parallel_shard_rank(self) -> int:
        """This process's place among those that shard parameters."""
        return grid_rank(self.strategy, "dp_shard")

    @property
    def fp8_backend(self) -> str | None:
        """Which package computes in 8 bits; None under other precisions."""
        return backend_of(self.precision)

    @property
    def should_save_model(self) -> bool:
        """Whether this process is one that writes weights."""
        return self.state.is_main_process

    @property
    def save_iteration(self) -> int:
        """The number of the next checkpoint."""
        return self.project_configuration.iteration

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
