"""`Accelerator`: the raw engine that a plain PyTorch loop drives, and that the Trainer drives too."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, BinaryIO, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from drivetrain import checkpoint
from drivetrain.accelerator.accelerate_names import (
    AutocastKwargs,
    DeepSpeedPlugin,
    DynamoBackend,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    Launched,
    ParallelismConfig,
    Plugins,
    ProfileKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
    checked_handlers,
    find_handler,
)
from drivetrain.accelerator.megatron_plugin import MegatronLMPlugin
from drivetrain.accelerator.metrics import gather_real_rows
from drivetrain.accelerator.preparation import (
    FUSED_HINT,
    AcceleratorState,
    Preparation,
    PreparationOptions,
    accelerate_name,
    autocast_context,
    backend_of,
    is_spread,
    make_accumulation,
    make_dataloader_config,
    make_precision,
    make_project,
    make_state,
    set_up_strategy,
)
from drivetrain.accelerator.prepared import (
    AccumulationWindow,
    GradientState,
    Prepared,
    PreparedOptimizer,
    PreparedScheduler,
)
from drivetrain.accelerator.run_state import LoadHook, NumberedCheckpoints, RunState, SaveHook
from drivetrain.accelerator.step import OptimizerStep
from drivetrain.accelerator.tracking import LogWith, RunTracking, checked_trackers
from drivetrain.data import (
    ActiveLoaders,
    DataLoaderConfiguration,
    DataShard,
    PreparedLoader,
    SkippingLoader,
    TailPolicy,
)
from drivetrain.data import skip_first_batches as skip_first_batches_of
from drivetrain.runtime import collectives
from drivetrain.runtime.devices import DeviceKind
from drivetrain.runtime.errors import ConfigurationError, MadeAgain, known_keywords, warn_ignored
from drivetrain.runtime.state import DistributedType, PartialState
from drivetrain.strategies import Strategy
from drivetrain.strategies.base import Given, RunOptions, SplitsSequences
from drivetrain.strategies.precision import Precision
from drivetrain.strategies.registry import grid_rank
from drivetrain.trackers import Tracker, TrackerGroup

# The part of the Accelerator's face that exchanges values between processes


class Collectives:
    """`gather`, `reduce` and what belongs to them."""

    state: AcceleratorState
    strategy: Strategy
    active_loaders: ActiveLoaders
    _is_triggered = False

    def gather(self, tensor: Any) -> Any:
        """Concatenate tensors of all processes along the first dimension, on every process."""
        return collectives.gather(tensor)

    def gather_for_metrics(
        self,
        input_data: Any,
        use_gather_object: bool = False,
        *,
        loader: PreparedLoader | SkippingLoader | None = None,
    ) -> Any:
        """Gather per-sample values of the current batch, without the rows that only pad it.

        A tensor is per-sample where its first dimension is the batch's number of rows; others are gathered whole.

        Args:
            input_data: Nested structure of tensors, and of lists that hold one object per sample, such as a string.
            use_gather_object: Gather as objects even where all are tensors.
            loader: Whose batch this is, where several loaders are iterated at once.

        Returns:
            The real rows of all processes, in the order of the plain loader.
        """
        return gather_real_rows(input_data, loader, self.active_loaders, self.strategy.topology, use_gather_object)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Combine tensors of all processes elementwise: `"sum"`, `"mean"`, `"max"`, `"min"` or `"none"`."""
        return collectives.reduce(tensor, reduction, scale)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Pad tensors of all processes to the largest size along one dimension."""
        return collectives.pad_across_processes(tensor, dim, pad_index, pad_first)

    def set_trigger(self) -> None:
        """Raise a flag on this process that `check_trigger` sees on all."""
        self._is_triggered = True

    def check_trigger(self) -> bool:
        """Lower the flag on all processes. Returns whether any process had raised it."""
        flag = torch.tensor(int(self._is_triggered), device=self.state.device)
        self._is_triggered = False
        return bool(collectives.reduce(flag, "max").item())


# Who am I, who goes first, who speaks: the process control of `PartialState` on the Accelerator


Function = TypeVar("Function", bound=Callable[..., Any])


class ProcessControl:
    """The members about processes, each the one of `self.state`."""

    state: AcceleratorState

    @property
    def device(self) -> torch.device:
        """Where this process's tensors live."""
        return self.state.device

    @property
    def distributed_type(self) -> DistributedType:
        """How the processes are spread."""
        return self.state.distributed_type

    @property
    def use_distributed(self) -> bool:
        """Whether there is more than one process."""
        return self.state.use_distributed

    @property
    def multi_device(self) -> bool:
        """Whether there is more than one process, each with a device of its own."""
        return self.state.use_distributed

    @property
    def num_processes(self) -> int:
        """Number of processes of the run."""
        return self.state.num_processes

    @property
    def process_index(self) -> int:
        """Global rank of this process."""
        return self.state.process_index

    @property
    def local_process_index(self) -> int:
        """Rank of this process on its machine."""
        return self.state.local_process_index

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return self.state.is_main_process

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first process of its machine."""
        return self.state.is_local_main_process

    @property
    def is_last_process(self) -> bool:
        """Whether this is the process with the highest rank."""
        return self.state.is_last_process

    def wait_for_everyone(self) -> None:
        """Wait until every process is here."""
        self.state.wait_for_everyone()

    def main_process_first(self) -> AbstractContextManager[None]:
        """Run the body on the main process first, then on the others."""
        return self.state.main_process_first()

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Run the body on each machine's first process first, then on the others."""
        return self.state.local_main_process_first()

    def split_between_processes(
        self, inputs: Any, apply_padding: bool = False, dynamic: bool = False
    ) -> AbstractContextManager[Any]:
        """Give each process its part of `inputs`, or the next item each time; see `PartialState`."""
        return self.state.split_between_processes(inputs, apply_padding, dynamic)

    def on_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """Decorate a function so that only the main process runs it."""
        return self.state.on_main_process(function)

    def on_local_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """Decorate a function so that only each machine's first process runs it."""
        return self.state.on_local_main_process(function)

    def on_last_process(self, function: Function) -> Function:
        """Decorate a function so that only the last process runs it."""
        return self.state.on_last_process(function)

    def on_process(self, function: Function | None = None, process_index: int | None = None) -> Any:
        """Decorate a function so that only the process with this rank runs it."""
        return self.state.on_process(function, process_index)

    def on_local_process(self, function: Function | None = None, local_process_index: int | None = None) -> Any:
        """Decorate a function so that only the process with this rank on its machine runs it."""
        return self.state.on_local_process(function, local_process_index)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print once per machine."""
        self.state.print(*args, **kwargs)


# The part of the Accelerator's face that saves and loads; `RunState` does the work


class StateSaving:
    """`save_state` and what belongs to it."""

    run_state: RunState
    project_configuration: ProjectConfiguration

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save and load further objects with the run.

        Raises:
            ConfigurationError: One has no `state_dict` and `load_state_dict`.
            CheckpointError: The state of one holds what no checkpoint can.
        """
        self.run_state.register(objects)

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write a prepared model's weights as `safetensors` and `transformers` open them.

        Call it on all processes. The main process writes, or with `ProjectConfiguration(save_on_each_node=True)` the
        first one of each machine.

        Args:
            model: A prepared model.
            save_directory: The directory, which gets `model.safetensors`, or several files and an index.
            max_shard_size: Bytes in a file at most, such as `"5GB"`.
            safe_serialization: Whether as safetensors; else as `pytorch_model.bin`, which `torch.load` opens.
        """
        self.run_state.export(
            model, save_directory, max_shard_size, safe_serialization, self.project_configuration.save_on_each_node
        )

    def register_save_state_pre_hook(self, hook: SaveHook) -> RemovableHandle:
        """Call a function before `save_state` writes.

        Args:
            hook: Called on every process as `hook(models, weights, output_dir)` with the prepared models and their
                state dicts, and a directory that becomes the checkpoint: what it writes there is part of it. What it
                takes out of `weights` is not saved again.

        Returns:
            A handle whose `remove()` takes it back.
        """
        handle = RemovableHandle(self.run_state.save_hooks)
        self.run_state.save_hooks[handle.id] = hook
        return handle

    def register_load_state_pre_hook(self, hook: LoadHook) -> RemovableHandle:
        """Call a function before `load_state` loads.

        Args:
            hook: Called on every process as `hook(models, input_dir)`. What it takes out of `models` is not loaded.

        Returns:
            A handle whose `remove()` takes it back.
        """
        handle = RemovableHandle(self.run_state.load_hooks)
        self.run_state.load_hooks[handle.id] = hook
        return handle

    @property
    def save_queue(self) -> checkpoint.SaveQueue:
        """What writes checkpoints; `check()` raises what has failed in the background, `finish()` waits."""
        return self.run_state.saves

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        *,
        block: bool = True,
        **save_model_func_kwargs: Any,
    ) -> str:
        """Write models, optimizers, schedulers, loss scale, loader positions and random states.

        Call it on all processes. The directory appears complete or not at all.

        Args:
            output_dir: The checkpoint's directory or URL; numbered under `project_dir/checkpoints` with automatic
                naming.
            safe_serialization: Accepted; nothing in a checkpoint is pickled.
            block: Whether to return only when it is there. Else the state is copied and written while training
                continues, optimizers' states copied until their next step; what fails then is raised by the next
                `save_state`, by `save_queue.check()` or `.finish()`.
            **save_model_func_kwargs: Accepted; models are written in one way.

        Returns:
            The directory.

        Raises:
            CheckpointError: It could not be written, which is raised on all processes; or an optimizer is within its
                step.
        """
        return self.run_state.save(output_dir, block)

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: Mapping[str, Any] | None = None,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Load a checkpoint into what is prepared now, in the same order of preparation.

        It may also be one of another tool's format, whose files are read without executing what they hold.
        A loader's next iteration is the epoch that was interrupted, in the same order and from its start: skip what
        the run has seen with `skip_first_batches`, or by counting. With
        `DataLoaderConfiguration(use_stateful_dataloader=True)` it begins with the next sample by itself. Where fewer
        objects are prepared than were saved, those are loaded and a warning names the rest. Of a Trainer's checkpoint
        the engine's part is loaded; what the Trainer has added is kept, and written again by `save_state`.

        Args:
            input_dir: The checkpoint's directory; with automatic naming the latest one if None.
            load_kwargs: Accepted; tensors are read onto the devices of what they replace.
            **load_model_func_kwargs: Accepted, as `load_kwargs`.

        Raises:
            CheckpointError: There is none, or it lacks the state of an object that is prepared.
        """
        self.run_state.load(input_dir)


# What may be asked of an Accelerator, and the few settings that may change


class EngineStatus:
    """What an Accelerator reports of its parts, and their settings."""

    state: AcceleratorState
    strategy: Strategy
    precision: Precision
    accumulation: AccumulationWindow
    preparation: Preparation
    project_configuration: ProjectConfiguration
    prepared: Prepared

    @property
    def mixed_precision(self) -> str:
        """Name of the precision; full precision is `"no"`."""
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


# The part of the Accelerator's face that speaks to experiment trackers; `RunTracking` does the work


class Tracking:
    """The members about trackers."""

    tracking: RunTracking

    def init_trackers(
        self,
        project_name: str,
        config: Mapping[str, Any] | None = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Open the trackers that `log_with` asked for; call it on all processes.

        After `load_state` they continue the runs of the checkpoint.

        Args:
            project_name: The name of the project, or of the directory of its runs.
            config: Hyper-parameters; secrets among them are left out.
            init_kwargs: Further arguments of trackers, by name: `{"comet_ml": {"online": False}}`.
        """
        self.tracking.init(project_name, config, init_kwargs)

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Give values to the trackers; only the main process does anything, and does not wait for slow ones.

        Args:
            values: Names and values: numbers, tensors of one element, text.
            step: The step that they belong to.
            log_kwargs: Further arguments of a tracker's own `log`, by name.
        """
        self.tracking.group.log(values, step, log_kwargs)

    def log_images(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Give images to the trackers; only the main process does anything.

        Args:
            values: Names and images, one or several of a name: tensors or arrays of shape (H, W), (C, H, W), (H, W, C)
                or with the number of images before it, in [0, 1] or of bytes; or PIL images.
            step: The step that they belong to.
        """
        self.tracking.group.log_images(values, step)

    def log_table(
        self, name: str, columns: Sequence[str] | None = None, data: Any = None, step: int | None = None
    ) -> None:
        """Give a table to the trackers; only the main process does anything.

        Args:
            name: Its name.
            columns: The names of its columns; the first row of `data` if None, or a DataFrame's own.
            data: The rows, or a pandas DataFrame.
            step: The step that it belongs to.
        """
        self.tracking.group.log_table(name, columns, data, step)

    @property
    def trackers(self) -> list[Tracker]:
        """The trackers of the run."""
        return self.tracking.group.trackers

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """One of the trackers; on other processes than the main one, an object that ignores every call.

        Args:
            name: Its name.
            unwrap: Whether to return the raw object behind it, such as TensorBoard's `SummaryWriter`.

        Raises:
            ConfigurationError: There is none with this name.
        """
        return self.tracking.get(name, unwrap)


# Torch's profiler around a part of a loop


@contextmanager
def profiling(handler: ProfileKwargs | None, usual: ProfileKwargs | None, state: PartialState) -> Iterator[Any]:
    """Record what the body does; each process writes its trace where one is asked for."""
    options = handler or usual or ProfileKwargs()
    with options.build() as profiler:
        yield profiler
    if options.output_trace_dir is not None:
        os.makedirs(options.output_trace_dir, exist_ok=True)
        path = os.path.join(options.output_trace_dir, f"profile_{state.process_index}.json")
        profiler.export_chrome_trace(path)
        state.wait_for_everyone()


# Writing single objects once for all processes


def save_object(
    obj: Any,
    f: str | os.PathLike[str] | BinaryIO,
    save_on_each_node: bool = False,
    safe_serialization: bool = False,
) -> None:
    """Write an object once for all processes."""
    state = PartialState()
    if not (state.is_local_main_process if save_on_each_node else state.is_main_process):
        return
    if safe_serialization:
        _save_tensors(obj, f)
    else:
        torch.save(obj, f)


def _save_tensors(tensors: Any, path: Any) -> None:
    """Write tensors by name as one safetensors file."""
    from safetensors.torch import save_file

    if not isinstance(tensors, Mapping) or not all(isinstance(value, torch.Tensor) for value in tensors.values()):
        raise ConfigurationError(
            f"safe_serialization=True writes a dict of tensors, but got a {type(tensors).__name__} of other values. "
            "Leave it out for other objects.",
        )
    if not isinstance(path, str | os.PathLike):
        raise ConfigurationError(f"safe_serialization=True writes to a path, but got a {type(path).__name__}.")
    first: dict[tuple[Any, ...], str] = {}
    for name, tensor in tensors.items():
        memory = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride()) if tensor.numel() else (name,)
        first.setdefault(memory, name)
    kept = {name: tensors[name].detach().clone(memory_format=torch.contiguous_format) for name in first.values()}
    save_file(kept, os.fspath(path), metadata={"format": "pt"})


# The part of the Accelerator's face that gives models back, and ends with them


class ModelHandling:
    """The members about models outside of the step."""

    preparation: Preparation
    optimizer_step: OptimizerStep
    tracking: RunTracking
    state: AcceleratorState
    project_configuration: ProjectConfiguration
    profile_handler: ProfileKwargs | None

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """The user's own module.

        Args:
            model: A prepared model.
            keep_fp32_wrapper: Whether its forward keeps running under the precision. Without that the prepared model no
                longer does either; where FSDP gathers the weights in bf16 or fp16, it then takes inputs of that dtype
                only.
            keep_torch_compile: Whether one that was prepared as what `torch.compile` returns is returned as such,
                rather than the module inside of it.
        """
        return self.preparation.unwrap_model(model, keep_fp32_wrapper, keep_torch_compile)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """All parameters and buffers under their canonical names, whole, on the CPU; call it on all processes.

        Args:
            model: A prepared model.
            unwrap: Accepted; names are always those of the user's own module.

        Returns:
            The state, on every process where each holds the whole model; else on the main process, and an empty dict on
            the others.
        """
        return self.preparation.whole_state(model)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> SkippingLoader:
        """A view of a loader that leaves out the first batches, without reading their data; for a resumed epoch.

        After `load_state` the order is that of the epoch that was interrupted. Loaders that continue by themselves
        (`use_stateful_dataloader`) are not skipped in twice.
        """
        return skip_first_batches_of(dataloader, num_batches)

    def free_memory(self, *objects: Any) -> list[None]:
        """Release everything prepared and give memory back to the device.

        Args:
            *objects: The caller's references, to be overwritten with what is returned.

        Returns:
            A None for each object: `model, optimizer = accelerator.free_memory(model, optimizer)`.
        """
        return self.preparation.release(objects)

    def clear(self, *objects: Any) -> list[None]:
        """The same as `free_memory`."""
        return self.preparation.release(objects)

    def end_training(self) -> None:
        """Close the trackers, and leave the process group after waiting for the peers.

        Within the handling of an exception the trackers' runs end as failed. The end of the script does the same, so it
        is needed only where a script continues alone.
        """
        self.tracking.leave()

    def save(self, obj: Any, f: str | os.PathLike[str] | BinaryIO, safe_serialization: bool = False) -> None:
        """Write an object once for all processes; with `ProjectConfiguration(save_on_each_node=True)` on each machine.

        Args:
            obj: What to write; with `safe_serialization` a dict of tensors.
            f: The file, or its path.
            safe_serialization: Write safetensors rather than what `torch.load` reads.
        """
        save_object(obj, f, self.project_configuration.save_on_each_node, safe_serialization)

    def verify_device_map(self, model: nn.Module) -> bool:
        """Whether a model, or one inside of it, has been spread over several devices by an `hf_device_map`."""
        return is_spread(model)

    def profile(self, profile_handler: ProfileKwargs | None = None) -> AbstractContextManager[Any]:
        """Context in which torch's profiler records.

        Args:
            profile_handler: Options of this context; those of `kwargs_handlers`, else the profiler's own, if None.

        Returns:
            The context; its value is the profiler. With `output_trace_dir` each process writes its trace there.
        """
        return profiling(profile_handler, self.profile_handler, self.state)

    def lomo_backward(self, loss: torch.Tensor, learning_rate: float) -> None:
        """Backward and step in one, for LOMO optimizers, which hold no gradients.

        Args:
            loss: The mean loss.
            learning_rate: The step's learning rate.

        Raises:
            ConfigurationError: None of the prepared optimizers is one.
        """
        self.optimizer_step.fused_backward(loss, learning_rate)

    def trigger_sync_in_backward(self, model: nn.Module) -> AbstractContextManager[None]:
        """Context in which the next backward reduces gradients, although the forward ran under `no_sync`.

        Args:
            model: The prepared model.
        """
        return self.optimizer_step.sync_in_backward(model)


_ACCUMULATION = "Accelerator(gradient_accumulation_steps)"


class Accelerator(MadeAgain, EngineStatus, ProcessControl, Collectives, ModelHandling, StateSaving, Tracking):
    """The raw engine under a training loop: four changed lines in a plain PyTorch loop.

    Arguments that are given win over the launcher's environment variables. State belongs to the
    instance: a second Accelerator changes nothing about the first.

    Args:
        device_placement: Whether `prepare` and prepared loaders move models and batches to the device.
        split_batches: Whether a loader's batch is the global one and is split; else each process takes a whole one.
        mixed_precision: A precision's name or a `Precision`; the launcher's `--mixed_precision`, else full.
        gradient_accumulation_steps: Micro-batches per optimizer step; the launcher's, else 1.
        cpu: Run on the CPU even where there is an accelerator.
        dataloader_config: How loaders are sharded.
        strategy: A strategy's name or a `Strategy`; `"auto"` takes the launcher's, else DDP among several processes.
        project_dir: Where the run writes.
        project_config: The same in more detail.
        gradient_accumulation_plugin: Accumulation in more detail; give this or `gradient_accumulation_steps`.
        step_scheduler_with_optimizer: Whether prepared schedulers follow the optimizers.
        step_scheduler_per_process: Whether a prepared scheduler steps once per process for each optimizer step,
            unless `split_batches`; False steps it once.
        rng_types: Accepted for scripts that move over; every loader's order is the same on all processes anyway.
        kwargs_handlers: Option holders, such as `DistributedDataParallelKwargs`.
        dynamo_backend: Compile prepared models with this backend of `torch.compile`; `dynamo_plugin` has more.
        dynamo_plugin: How prepared models are compiled.
        deepspeed_plugins: Several of `deepspeed_plugin` by name; the first one places models, until
            `state.select_deepspeed_plugin` selects another.
        torch_tp_plugin: A size of tensor parallelism in an older holder; `parallelism_config` has more.
        fsdp_plugin: Options of `strategy="fsdp"` as a plugin, or the keys of an `fsdp_config`.
        deepspeed_plugin: Options of `strategy="deepspeed"` as a plugin, or the keys of a
            `deepspeed_config`.
        parallelism_config: Sizes of the grid of processes, also as a dict;
            `strategy=Parallel(...)` has more.
        megatron_lm_plugin: Options of `strategy="megatron"` as a plugin, or the keys of a
            `megatron_lm_config`.
        device: Name of the kind of device, such as `"cuda"`, or of this process's device, such as `"cuda:1"`; found if
            None.
        fused_optimizer: Deprecated, without effect. Give `fused=True` to the optimizer itself.
        log_with: Trackers that `init_trackers` opens: names, objects, several of them, or `"all"`.

    Raises:
        ConfigurationError: Options contradict each other or cannot run here; the message names what can.

    Example:
        ```python
        import torch
        from drivetrain import Accelerator

        accelerator = Accelerator()
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = torch.utils.data.DataLoader(torch.randn(16, 4), batch_size=4)
        model, optimizer, data = accelerator.prepare(model, optimizer, data)
        for batch in data:
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            accelerator.backward(loss)
            optimizer.step()
        ```
    """

    @known_keywords
    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool = False,
        mixed_precision: str | Precision | None = None,
        gradient_accumulation_steps: int | None = None,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        deepspeed_plugin: DeepSpeedPlugin | Mapping[str, Any] | None = None,
        fsdp_plugin: FullyShardedDataParallelPlugin | Mapping[str, Any] | None = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: MegatronLMPlugin | Mapping[str, Any] | None = None,
        rng_types: Sequence[Any] | None = None,
        log_with: LogWith = None,
        *,
        strategy: str | Strategy = "auto",
        project_dir: str | os.PathLike[str] | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        step_scheduler_per_process: bool = True,
        kwargs_handlers: Sequence[Any] | None = None,
        dynamo_backend: DynamoBackend | str | None = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        deepspeed_plugins: Mapping[str, DeepSpeedPlugin] | None = None,
        parallelism_config: ParallelismConfig | Mapping[str, Any] | None = None,
        device: str | None = None,
        fused_optimizer: bool | None = None,
    ) -> None:
        if fused_optimizer is not None:
            warn_ignored(
                "Accelerator",
                "fused_optimizer",
                fused_optimizer,
                FUSED_HINT,
                since="0.1.0",
                removed_in="0.3.0",
                stacklevel=5,
            )
        handlers = checked_handlers(kwargs_handlers) if kwargs_handlers else []
        group = find_handler(handlers, InitProcessGroupKwargs)
        process = PartialState(
            cpu, device=device, backend=getattr(group, "backend", None), timeout=getattr(group, "timeout", None)
        )
        launched = Launched()
        self.project_configuration = make_project(project_dir, project_config)
        self.rng_types = list(rng_types or ["generator"])
        self.profile_handler = find_handler(handlers, ProfileKwargs)
        if dynamo_backend is not None and dynamo_plugin is not None:
            raise ConfigurationError("dynamo_backend and dynamo_plugin are given both; give one.")
        dynamo_plugin = TorchDynamoPlugin(dynamo_backend) if dynamo_backend is not None else dynamo_plugin
        options = PreparationOptions(
            device_placement,
            make_dataloader_config(split_batches, dataloader_config),
            step_scheduler_with_optimizer,
            step_scheduler_per_process,
            launched.compilation if dynamo_plugin is None else dynamo_plugin.compilation(),
        )
        plugins = Plugins.given(
            fsdp_plugin, deepspeed_plugin, deepspeed_plugins, parallelism_config, megatron_lm_plugin, torch_tp_plugin
        )
        self.strategy = set_up_strategy(strategy, plugins, launched, process, handlers)
        self.precision = make_precision(mixed_precision, handlers, launched, self.strategy)
        self.precision.setup(process.kind)
        self.state = make_state(self.precision, self.strategy, process, plugins, launched, dynamo_plugin)
        accumulation = make_accumulation(gradient_accumulation_steps, gradient_accumulation_plugin, launched)
        self.strategy.check(RunOptions(self.precision, Given(_ACCUMULATION, accumulation.num_steps)))

        self.active_loaders, self.prepared = ActiveLoaders(), Prepared()
        self.accumulation = AccumulationWindow(accumulation, self.active_loaders, self.prepared, self.strategy)
        self.gradient_state = GradientState(window=self.accumulation, active=self.active_loaders)
        self.optimizer_step = OptimizerStep(self.strategy, self.precision, self.prepared, self.accumulation)
        self.precision.hold_scale_while(lambda: self.accumulation.holds_gradients)
        engine = (self.state, self.strategy, self.precision)
        self.preparation = Preparation(*engine, self.optimizer_step, self.prepared, self.active_loaders, options)
        trackers = TrackerGroup([], process.is_main_process)
        asked = None if log_with is None else checked_trackers(log_with)
        self.tracking = RunTracking(self.state, self.project_configuration, trackers, asked)
        numbered = NumberedCheckpoints(self.project_configuration, self.state)
        self.run_state = RunState(*engine, numbered, self.prepared, self.tracking, self.optimizer_step)

    def __deepcopy__(self, memo: dict[int, Any]) -> Accelerator:
        # It stands for this process's run, of which there is one.
        return self

    # prepare

    def prepare(self, *objects: Any, device_placement: Sequence[bool | None] | None = None) -> Any:
        """Prepare models, optimizers, loaders and schedulers, in any order.

        Args:
            *objects: Modules, optimizers, DataLoaders and learning-rate schedulers; anything else is returned as it is.
            device_placement: For each object, whether to move it; the instance's own choice where None.

        Returns:
            The prepared objects in the order given; one object alone is not wrapped in a tuple. What is prepared
            already is returned as it is, and a model, optimizer or scheduler that is given again as it was before
            gets what was made of it then.

        Raises:
            ConfigurationError: `device_placement` has another length than the objects.
        """
        return self.preparation.objects(objects, device_placement)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Prepare one model.

        Args:
            model: The model.
            device_placement: Whether to move it; the instance's own choice if None.
            evaluation_mode: Place it without wrapping it for training.

        Returns:
            The module to call.
        """
        return self.preparation.model(model, device_placement, evaluation_mode)

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> PreparedOptimizer:
        """Prepare one optimizer, so that it steps where accumulation windows end."""
        return self.preparation.optimizer(optimizer)

    def prepare_scheduler(self, scheduler: Any, *, steps_per_call: int | None = None) -> PreparedScheduler:
        """Prepare one learning-rate scheduler, so that it steps when its optimizer does.

        Args:
            scheduler: The scheduler.
            steps_per_call: How often it steps for one optimizer step; as `step_scheduler_per_process` asks if None.
        """
        return self.preparation.scheduler(scheduler, steps_per_call)

    def prepare_data_loader(
        self,
        data_loader: Any,
        device_placement: bool | None = None,
        *,
        tail: TailPolicy | None = None,
        place: Callable[[Any], Any] | None = None,
        shard: DataShard | None = None,
        fill: bool | None = None,
    ) -> PreparedLoader:
        """Prepare one loader: this process's share of exactly the order that the loader has by itself.

        Args:
            data_loader: A DataLoader, or any iterable of batches.
            device_placement: Whether batches are moved to the device; the instance's own choice if None.
            tail: What happens at the end where the number of batches is no multiple of the processes; from
                `even_batches` if None.
            place: Moves one batch to the device, instead of the default.
            shard: Which part of the data is this process's; the strategy's if None.
            fill: Whether a short batch is filled up where the strategy wants batches of one shape; from `even_batches`
                if None.

        Returns:
            The prepared loader.
        """
        return self.preparation.loader(data_loader, device_placement, tail, place, shard, fill)

    def forget_loader(self, loader: Any) -> None:
        """Release a prepared loader, so that the run's state no longer includes it."""
        self.preparation.forget_loader(loader)

    def default_placement(self) -> Callable[[Any], Any] | None:
        """The function that moves a batch to the device; None on the CPU, where loaders make their batches."""
        return self.preparation.default_placement()

    # step

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        """Context of one micro-batch: inside it, optimizers step and gradients are reduced only where a window ends.

        Args:
            *models: The prepared models whose gradients accumulate; all of them if none is named.
        """
        return self.optimizer_step.accumulate(models)

    def no_sync(self, model: nn.Module | None) -> AbstractContextManager[None]:
        """Context in which the model's gradients are not reduced over processes."""
        return self.optimizer_step.without_sync(model)

    def backward(self, loss: torch.Tensor, *, weight: torch.Tensor | float | None = None, **kwargs: Any) -> None:
        """Compute gradients: the loss is normalised by the window's micro-batches, scaled, and differentiated.

        With `weight`, the gradients that clipping and the optimizer see are those of the weighted mean over all
        micro-batches of the window and all processes. Give it for every micro-batch, once for each.

        Args:
            loss: The mean loss of this micro-batch, a scalar; with `weight` the sum of its losses.
            weight: What that sum weighs, such as the number of tokens.
            **kwargs: Arguments of `Tensor.backward`.
        """
        self.optimizer_step.backward(loss, weight, **kwargs)

    def unscale_gradients(self, optimizer: Optimizer | Sequence[Optimizer] | None = None) -> None:
        """Bring gradients back to their true size, before reading or clipping them.

        Args:
            optimizer: One or several prepared optimizers; all if None.
        """
        self.optimizer_step.unscale(optimizer)

    def clip_grad_norm_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Scale gradients down to a total norm of at most `max_norm`, where a window ends.

        Returns:
            The total norm before clipping; within a window that of what this process has accumulated, unclipped.
        """
        return self.optimizer_step.clip_norm(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: torch.Tensor | Iterable[torch.Tensor], clip_value: float) -> None:
        """Clamp every gradient to [-clip_value, clip_value], where a window ends."""
        self.optimizer_step.clip_value(parameters, clip_value)

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """The precision's context, for computations outside a prepared model, such as a loss.

        Args:
            autocast_handler: Options of this context alone; `AutocastKwargs(enabled=False)` computes in full.
        """
        return autocast_context(self.precision, self.state.kind, autocast_handler)

    def maybe_context_parallel(
        self,
        buffers: Sequence[torch.Tensor] | None = None,
        buffer_seq_dims: Sequence[int] | None = None,
        no_restore_buffers: Collection[torch.Tensor] | None = None,
    ) -> AbstractContextManager[Any]:
        """Context of one batch's forward and backward, in which its sequences are split over processes.

        With a strategy that does not split sequences it changes nothing.

        Args:
            buffers: Tensors that hold whole sequences, such as tokens, labels and positions.
            buffer_seq_dims: For each, which dimension is the sequence.
            no_restore_buffers: Those that need not be whole again afterwards.
        """
        if not isinstance(self.strategy, SplitsSequences):
            return nullcontext()
        return self.strategy.split_sequences(buffers or (), buffer_seq_dims or (), no_restore_buffers or ())

    def init_context(self) -> AbstractContextManager[Any]:
        """The strategy's context for building a model in."""
        return self.strategy.init_context()

    def join_uneven_inputs(
        self, joinables: Sequence[nn.Module], even_batches: bool | None = None
    ) -> AbstractContextManager[Any]:
        """Context for a loop in which processes may have different numbers of batches.

        Args:
            joinables: The prepared models.
            even_batches: Overrides the instance's choice for loops that start in the context.
        """
        return self.preparation.uneven_inputs(joinables, even_batches)
