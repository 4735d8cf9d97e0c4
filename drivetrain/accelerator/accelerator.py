"""`Accelerator`: the engine for training loops of your own. The Trainer uses it as well."""

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
from drivetrain.runtime.errors import ConfigurationError, MadeAgain, hide_inner_frames, known_keywords, warn_ignored
from drivetrain.runtime.state import DistributedType, PartialState
from drivetrain.strategies import Strategy
from drivetrain.strategies.base import Given, RunOptions, SplitsSequences
from drivetrain.strategies.precision import Precision
from drivetrain.strategies.precision.registry import PrecisionName
from drivetrain.strategies.registry import StrategyName, grid_rank
from drivetrain.trackers import Tracker, TrackerGroup

# Methods of the Accelerator that exchange values between processes


class Collectives:
    """Mixin of `Accelerator` with collective operations on tensors, such as `gather`."""

    state: AcceleratorState
    strategy: Strategy
    active_loaders: ActiveLoaders
    _is_triggered = False

    def gather(self, tensor: Any) -> Any:
        """Concatenate the tensors of all processes along the first dimension.

        Return the result on each process.

        Args:
            tensor: A tensor, or a nested structure of tensors. All processes must pass the same shapes.

        Returns:
            The same structure with the gathered tensors.
        """
        return collectives.gather(tensor)

    def gather_for_metrics(
        self,
        input_data: Any,
        use_gather_object: bool = False,
        *,
        loader: PreparedLoader | SkippingLoader | None = None,
    ) -> Any:
        """Gather predictions or targets from all processes, without the samples that only fill the last batch.

        Samples are repeated to fill the last batch. A tensor counts as per-sample if its first dimension is the batch
        size. Other tensors are gathered completely.

        Args:
            input_data: A nested structure of tensors, and of lists with one object per sample, such as strings.
            use_gather_object: True to gather as Python objects even if all values are tensors.
            loader: The loader of the batch, if several loaders are being iterated.

        Returns:
            The values of the real rows of all processes, in the order of a single-process loader.
        """
        return gather_real_rows(input_data, loader, self.active_loaders, self.strategy.topology, use_gather_object)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Combine tensors of all processes elementwise, for example by a sum.

        Return the result on every process.

        Args:
            tensor: A tensor, or a nested structure of tensors.
            reduction: `"sum"`, `"mean"`, `"max"`, `"min"`, or `"none"` to return the tensors unchanged.
            scale: A factor for the result.

        Returns:
            The same structure with the combined tensors.
        """
        return collectives.reduce(tensor, reduction, scale)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Pad tensors along one dimension to the same size on all processes.

        `gather` requires equal sizes.

        Args:
            tensor: A tensor, or a nested structure of tensors.
            dim: The dimension to pad.
            pad_index: The padding value.
            pad_first: True to pad at the start of the dimension instead of the end.

        Returns:
            The same structure with the padded tensors.
        """
        return collectives.pad_across_processes(tensor, dim, pad_index, pad_first)

    def set_trigger(self) -> None:
        """Set a flag on one process that all processes then see in `check_trigger`, for example to stop early.

        The flag is cleared by the next `check_trigger`.
        """
        self._is_triggered = True

    def check_trigger(self) -> bool:
        """Return True on all processes if any has called `set_trigger` since the last check.

        All must call this.
        """
        flag = torch.tensor(int(self._is_triggered), device=self.state.device)
        self._is_triggered = False
        return bool(collectives.reduce(flag, "max").item())


# Rank, order and synchronization of processes, forwarded to `PartialState`


Function = TypeVar("Function", bound=Callable[..., Any])


class ProcessControl:
    """Base class of `Accelerator` with the methods that concern processes: ranks, devices and barriers."""

    state: AcceleratorState

    @property
    def device(self) -> torch.device:
        """The device on which this process trains, such as `cuda:0`."""
        return self.state.device

    @property
    def distributed_type(self) -> DistributedType:
        """Kind of distribution of the run, for example over several GPUs or by DeepSpeed."""
        return self.state.distributed_type

    @property
    def use_distributed(self) -> bool:
        """True if the run has more than one process."""
        return self.state.use_distributed

    @property
    def multi_device(self) -> bool:
        """True if the run has several processes, each with its own device."""
        return self.state.use_distributed

    @property
    def num_processes(self) -> int:
        """The number of processes in the run (world size)."""
        return self.state.num_processes

    @property
    def process_index(self) -> int:
        """The global rank of this process, counted over all machines."""
        return self.state.process_index

    @property
    def local_process_index(self) -> int:
        """The rank of this process among those on the same machine."""
        return self.state.local_process_index

    @property
    def is_main_process(self) -> bool:
        """True if this process is the main process of the run, which has rank 0."""
        return self.state.is_main_process

    @property
    def is_local_main_process(self) -> bool:
        """True if this process is the first one on its machine."""
        return self.state.is_local_main_process

    @property
    def is_last_process(self) -> bool:
        """True if this process has the highest rank of the run."""
        return self.state.is_last_process

    def wait_for_everyone(self) -> None:
        """Wait until all processes of the run have called this method."""
        self.state.wait_for_everyone()

    def main_process_first(self) -> AbstractContextManager[None]:
        """Return a context manager whose body runs on the main process before the others."""
        return self.state.main_process_first()

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Return a context manager that lets one process per machine run first, for example to download data."""
        return self.state.local_main_process_first()

    def split_between_processes(
        self, inputs: Any, apply_padding: bool = False, dynamic: bool = False
    ) -> AbstractContextManager[Any]:
        """Return a context manager that gives each process a part of a list or tensor.

        `inputs` may also be a tuple or a dict.

        Args:
            inputs: A list, tuple, dict or tensor to split.
            apply_padding: True to repeat the last element, so that all parts have the same length.
            dynamic: True to hand out one item at a time to whichever process is free.
        """
        return self.state.split_between_processes(inputs, apply_padding, dynamic)

    def on_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """Decorate a function so that only the main process, rank 0, runs it."""
        return self.state.on_main_process(function)

    def on_local_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """Decorate a function so that only the first process of each machine runs it."""
        return self.state.on_local_main_process(function)

    def on_last_process(self, function: Function) -> Function:
        """Decorate a function so that only the process with the highest rank runs it."""
        return self.state.on_last_process(function)

    def on_process(self, function: Function | None = None, process_index: int | None = None) -> Any:
        """Decorate a function so that it runs on one process, and returns None at once on all others.

        Args:
            function: The function, or None if the decorator is used with arguments.
            process_index: The global rank of the process that runs the function.
        """
        return self.state.on_process(function, process_index)

    def on_local_process(self, function: Function | None = None, local_process_index: int | None = None) -> Any:
        """Decorate a function to run only on the process with a given local rank."""
        return self.state.on_local_process(function, local_process_index)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print values like Python's `print`, but only on the first process of each machine."""
        self.state.print(*args, **kwargs)


# Saving and loading, implemented by `RunState`


class StateSaving:
    """Mixin of `Accelerator` with the methods that save and load checkpoints."""

    state: AcceleratorState
    run_state: RunState
    project_configuration: ProjectConfiguration

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Add objects of your own to the state that `save_state` saves and `load_state` restores.

        Args:
            *objects: Objects with `state_dict` and `load_state_dict`.

        Raises:
            ConfigurationError: An object lacks one of these methods.
            CheckpointError: An object's state contains values that a checkpoint cannot store.
        """
        self.run_state.register(objects)

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Save the weights of a prepared model as safetensors.

        Other libraries, such as transformers, can load them. Call it on all processes. The main process writes the
        files. With `ProjectConfiguration(save_on_each_node=True)`, the first process of each machine does.

        Args:
            model: A prepared model.
            save_directory: The directory for `model.safetensors`, or for several files and an index.
            max_shard_size: The maximum size of a file, in bytes or as text such as `"5GB"`.
            safe_serialization: True for safetensors. False for `pytorch_model.bin`, which `torch.load` reads.
        """
        self.run_state.export(
            model, save_directory, max_shard_size, safe_serialization, self.project_configuration.save_on_each_node
        )

    def register_save_state_pre_hook(self, hook: SaveHook) -> RemovableHandle:
        """Register a function that `save_state` calls before it writes a checkpoint.

        Args:
            hook: Called on every process as `hook(models, weights, output_dir)`: the prepared models, their state
                dicts, and a directory. Files that the hook writes there become part of the checkpoint. State dicts that
                it removes from `weights` are not saved.

        Returns:
            A handle whose `remove()` unregisters the hook.
        """
        handle = RemovableHandle(self.run_state.save_hooks)
        self.run_state.save_hooks[handle.id] = hook
        return handle

    def register_load_state_pre_hook(self, hook: LoadHook) -> RemovableHandle:
        """Register a function that `load_state` calls before it reads a checkpoint.

        Args:
            hook: Called on every process as `hook(models, input_dir)`. Models that it removes from `models` are not
                loaded.

        Returns:
            A handle whose `remove()` unregisters the hook.
        """
        handle = RemovableHandle(self.run_state.load_hooks)
        self.run_state.load_hooks[handle.id] = hook
        return handle

    @property
    def save_queue(self) -> checkpoint.SaveQueue:
        """The queue of checkpoints that are being written in the background.

        Its method `finish()` waits for all of them, and `check()` raises the errors of failed ones.
        """
        return checkpoint.save_queue(self.state)

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        *,
        block: bool = True,
        **save_model_func_kwargs: Any,
    ) -> str:
        """Save models, optimizers and all other state of training as a checkpoint.

        Call it on all processes. The checkpoint directory appears only after it is complete.

        Args:
            output_dir: The checkpoint's directory or URL. With automatic naming, it is numbered under
                `project_dir/checkpoints`.
            safe_serialization: Accepted without effect. Nothing in a checkpoint is pickled.
            block: True to return after the checkpoint is written. False to copy the state and write it while training
                continues. An error is then raised by the next `save_state`, by `save_queue.check()` or by
                `save_queue.finish()`.
            **save_model_func_kwargs: Accepted without effect.

        Returns:
            The directory.

        Raises:
            CheckpointError: The checkpoint could not be written, or an optimizer step is in progress. All processes
                raise the error.
        """
        return self.run_state.save(output_dir, block)

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: Mapping[str, Any] | None = None,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Load a checkpoint into the prepared objects, which must have been prepared in the same order.

        A checkpoint of another tool can be loaded as well. No code from its files is executed. The next iteration of a
        loader is the interrupted epoch, in the same order and from its start. Skip the batches already seen with
        `skip_first_batches`. With `DataLoaderConfiguration(use_stateful_dataloader=True)`, the loader continues at the
        next sample instead. If the checkpoint holds more objects than are prepared, a warning names the rest. Of a
        Trainer's checkpoint, only the engine's part is loaded. The next `save_state` writes the rest again.

        Args:
            input_dir: The checkpoint's directory. None loads the latest one if checkpoints are named automatically.
            load_kwargs: Accepted without effect. Tensors are loaded onto the devices of the existing ones.
            **load_model_func_kwargs: Accepted without effect.

        Raises:
            CheckpointError: There is no checkpoint, or it lacks the state of a prepared object.
        """
        self.run_state.load(input_dir)


# Settings and status


class EngineStatus:
    """Mixin of `Accelerator` with properties for its settings and its current status."""

    state: AcceleratorState
    strategy: Strategy
    precision: Precision
    accumulation: AccumulationWindow
    preparation: Preparation
    project_configuration: ProjectConfiguration
    prepared: Prepared

    @property
    def mixed_precision(self) -> str:
        """The selected precision, such as `"bf16"`. It is `"no"` for full precision."""
        return accelerate_name(self.precision, self.strategy)

    @property
    def device(self) -> torch.device:
        """The device on which this process trains, such as `cuda:0`."""
        return self.strategy.topology.device

    @property
    def kind(self) -> DeviceKind:
        """The device type on which the run trains, such as CUDA or the CPU."""
        return self.strategy.topology.kind

    @property
    def device_placement(self) -> bool:
        """True if `prepare` moves models and batches to the device."""
        return self.preparation.options.device_placement

    @device_placement.setter
    def device_placement(self, value: bool) -> None:
        self.preparation.options.device_placement = value

    @property
    def sync_gradients(self) -> bool:
        """True during the last micro-batch before an optimizer step."""
        return self.accumulation.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self.accumulation.sync_gradients = value

    @property
    def gradient_accumulation_steps(self) -> int:
        """The number of micro-batches whose gradients accumulate for each optimizer step."""
        return self.accumulation.plugin.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, value: int) -> None:
        self.accumulation.set_steps(value)

    @property
    def dataloader_config(self) -> DataLoaderConfiguration:
        """The settings for data loaders, such as how batches are split between processes."""
        return self.preparation.options.dataloader_config

    @dataloader_config.setter
    def dataloader_config(self, value: DataLoaderConfiguration) -> None:
        self.preparation.options.dataloader_config = value

    @property
    def split_batches(self) -> bool:
        """True if a data loader's `batch_size` is split over the processes."""
        return self.preparation.options.dataloader_config.split_batches

    @property
    def even_batches(self) -> bool:
        """True if samples are repeated to give all processes equally many batches.

        `gather_for_metrics` removes the repeated samples.
        """
        return self.preparation.options.dataloader_config.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self.preparation.options.dataloader_config.even_batches = value

    @property
    def dispatch_batches(self) -> bool | None:
        """True if only rank 0 reads the data, and sends each process its part of every batch.

        None does this only for iterable datasets.
        """
        return self.preparation.options.dataloader_config.dispatch_batches

    @property
    def use_seedable_sampler(self) -> bool:
        """True if samplers that shuffle get a new, reproducible seed in each epoch."""
        return self.preparation.options.dataloader_config.use_seedable_sampler

    @property
    def use_stateful_dataloader(self) -> bool:
        """True if data loaders continue at the next sample after `load_state`, also within an epoch."""
        return self.preparation.options.dataloader_config.use_stateful_dataloader

    @property
    def non_blocking(self) -> bool:
        """True if batches are copied to the device asynchronously, while the host continues."""
        return self.preparation.options.dataloader_config.non_blocking

    @property
    def deepspeed_plugin(self) -> Any:
        """The DeepSpeed plugin in use, or None if the run does not use DeepSpeed."""
        return self.state.deepspeed_plugin

    @property
    def parallelism_config(self) -> Any:
        """The sizes of the device mesh, or None without a mesh.

        They come from the script or the launcher.
        """
        return self.state.parallelism_config

    @property
    def is_fsdp2(self) -> bool:
        """True if the run shards parameters with torch's `fully_shard` (FSDP 2)."""
        return self.state.is_fsdp2

    @property
    def is_composable_parallelism_enabled(self) -> bool:
        """True if the run uses FSDP 2, which can be combined with tensor parallelism."""
        return self.state.is_fsdp2

    @property
    def tensor_parallel_rank(self) -> int:
        """The rank of this process among those that split the same layers by tensor parallelism."""
        return grid_rank(self.strategy, "tp")

    @property
    def pipeline_parallel_rank(self) -> int:
        """The index of the pipeline stage that this process runs. 0 without pipeline parallelism."""
        return grid_rank(self.strategy, "pp")

    @property
    def context_parallel_rank(self) -> int:
        """The rank of this process among those that split the same sequences by context parallelism."""
        return grid_rank(self.strategy, "cp")

    @property
    def data_parallel_rank(self) -> int:
        """The index of the model replica to which this process belongs. 0 if there is only one."""
        return grid_rank(self.strategy, "dp_replicate")

    @property
    def data_parallel_shard_rank(self) -> int:
        """The rank of this process in the mesh dimension `dp_shard`, over which FSDP shards parameters."""
        return grid_rank(self.strategy, "dp_shard")

    @property
    def fp8_backend(self) -> str | None:
        """The package that computes in FP8, such as `"torchao"`.

        None if the precision is not FP8.
        """
        return backend_of(self.precision)

    @property
    def should_save_model(self) -> bool:
        """True on the main process, which alone writes model weights."""
        return self.state.is_main_process

    @property
    def save_iteration(self) -> int:
        """The number in the next checkpoint's name, with automatic checkpoint naming."""
        return self.project_configuration.iteration

    @property
    def step_scheduler_with_optimizer(self) -> bool:
        """True if learning-rate schedulers step only when their optimizers do."""
        return self.preparation.options.step_scheduler_with_optimizer

    @step_scheduler_with_optimizer.setter
    def step_scheduler_with_optimizer(self, value: bool) -> None:
        self.preparation.options.step_scheduler_with_optimizer = value

    @property
    def step_scheduler_per_process(self) -> bool:
        """True if each optimizer step advances a learning rate scheduler by one step for every process."""
        return self.preparation.options.step_scheduler_per_process

    @step_scheduler_per_process.setter
    def step_scheduler_per_process(self, value: bool) -> None:
        self.preparation.options.step_scheduler_per_process = value

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The gradient scaler of fp16 mixed precision. None for precisions without loss scaling."""
        return getattr(self.precision, "scaler", None)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """True if an optimizer skipped its last step because gradients overflowed in fp16."""
        return self.prepared.step_was_skipped

    @property
    def project_dir(self) -> str | None:
        """The folder for the run's output, such as numbered checkpoints. None if it is not set."""
        return self.project_configuration.project_dir

    @property
    def logging_dir(self) -> str | None:
        """The folder for the files of experiment trackers, such as TensorBoard.

        None if it is not set.
        """
        return self.project_configuration.logging_dir


# Logging to experiment trackers, implemented by `RunTracking`


class Tracking:
    """Mixin of `Accelerator` for logging to experiment trackers, such as TensorBoard."""

    tracking: RunTracking

    def init_trackers(
        self,
        project_name: str,
        config: Mapping[str, Any] | None = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Start a run in each experiment tracker that `log_with` selects.

        Call it on all processes. After `load_state`, the trackers continue the checkpoint's runs.

        Args:
            project_name: The name of the project, or of the directory of its runs.
            config: Hyper-parameters to log. Secrets such as passwords are left out.
            init_kwargs: Additional arguments for trackers, by tracker name: `{"comet_ml": {"online": False}}`.
        """
        self.tracking.init(project_name, config, init_kwargs)

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Log values to all experiment trackers.

        Only the main process logs, and it does not wait for slow trackers.

        Args:
            values: Numbers, single-element tensors or text, by name.
            step: The step of the values.
            log_kwargs: Additional arguments for the `log` of a tracker, by tracker name.
        """
        self.tracking.group.log(values, step, log_kwargs)

    def log_images(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Log images to all experiment trackers. Only the main process logs.

        Args:
            values: One or several images by name. Tensors or arrays of shape (H, W), (C, H, W), (H, W, C), or with a
                leading batch dimension, with floats in [0, 1] or bytes. PIL images are accepted too.
            step: The step of the images.
        """
        self.tracking.group.log_images(values, step)

    def log_table(
        self, name: str, columns: Sequence[str] | None = None, data: Any = None, step: int | None = None
    ) -> None:
        """Log a table of values to all experiment trackers. Only the main process logs.

        Args:
            name: The name of the table.
            columns: The column names. None uses the first row of `data`, or the columns of a DataFrame.
            data: The rows, or a pandas DataFrame.
            step: The step of the table.
        """
        self.tracking.group.log_table(name, columns, data, step)

    @property
    def trackers(self) -> list[Tracker]:
        """The experiment trackers that `init_trackers` has started."""
        return self.tracking.group.trackers

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return the experiment tracker called `name`, to use methods that the Accelerator does not offer.

        Its methods do nothing except on the main process.

        Args:
            name: The tracker's name.
            unwrap: True to return the library's own object, such as TensorBoard's `SummaryWriter`.

        Raises:
            ConfigurationError: No tracker has this name.
        """
        return self.tracking.get(name, unwrap)


# Torch's profiler around a part of a loop


@contextmanager
def profiling(handler: ProfileKwargs | None, usual: ProfileKwargs | None, state: PartialState) -> Iterator[Any]:
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
    """Save an object to a file, with `torch.save` or as safetensors.

    Only the main process writes the file.

    Args:
        obj: The object. With `safe_serialization`, a dict of tensors.
        f: The file, or its path.
        save_on_each_node: True to save on the first process of each machine, False to save on the main process.
        safe_serialization: True to write safetensors, False to use `torch.save`.
    """
    state = PartialState()
    if not (state.is_local_main_process if save_on_each_node else state.is_main_process):
        return
    if safe_serialization:
        _save_tensors(obj, f)
    else:
        torch.save(obj, f)


def _save_tensors(tensors: Any, path: Any) -> None:
    """Save a dict of tensors as one safetensors file, in which tied weights are stored only once."""
    from safetensors.torch import save_file

    if not isinstance(tensors, Mapping) or not all(isinstance(value, torch.Tensor) for value in tensors.values()):
        raise ConfigurationError(
            f"safe_serialization=True can only save a dict of tensors, but got a {type(tensors).__name__} with other "
            "values. Use safe_serialization=False for other objects.",
        )
    if not isinstance(path, str | os.PathLike):
        raise ConfigurationError(
            f"safe_serialization=True can only save to a path, but got a {type(path).__name__}. Pass a path, or use "
            "safe_serialization=False for file objects."
        )
    # safetensors rejects tensors that share memory. Of tied weights, only the first name is written.
    first: dict[tuple[Any, ...], str] = {}
    for name, tensor in tensors.items():
        memory = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride()) if tensor.numel() else (name,)
        first.setdefault(memory, name)
    kept = {name: tensors[name].detach().clone(memory_format=torch.contiguous_format) for name in first.values()}
    save_file(kept, os.fspath(path), metadata={"format": "pt"})


# Models outside the training step


class ModelHandling:
    """Mixin of `Accelerator` with methods for models, such as unwrapping, saving and profiling."""

    preparation: Preparation
    optimizer_step: OptimizerStep
    tracking: RunTracking
    state: AcceleratorState
    project_configuration: ProjectConfiguration
    profile_handler: ProfileKwargs | None

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """Return the user's original module from a prepared model, without wrappers such as DDP.

        Args:
            model: A prepared model.
            keep_fp32_wrapper: True to keep the precision's autocast around the module's forward. False removes it, from
                the prepared model as well. If FSDP gathers weights in bf16 or fp16, the module then accepts only inputs
                of that dtype.
            keep_torch_compile: True to return the compiled module if the model was compiled before `prepare`, False to
                return the module inside it.
        """
        return self.preparation.unwrap_model(model, keep_fp32_wrapper, keep_torch_compile)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return a prepared model's full state dict with tensors on the CPU.

        All processes must call this method.

        Args:
            model: A prepared model.
            unwrap: Accepted without effect. Names are always those of the original module.

        Returns:
            Full parameters and buffers by name. If the model is sharded, only the main process gets them, and all
                others get an empty dict.
        """
        return self.preparation.whole_state(model)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> SkippingLoader:
        """Return a data loader that skips `num_batches` batches in its next epoch, to resume within an epoch.

        Skipped batches are not read. After `load_state`, the order is that of the interrupted epoch. Loaders that
        continue by themselves (`use_stateful_dataloader`) are not skipped twice.

        Args:
            dataloader: A prepared loader.
            num_batches: The number of batches to skip.
        """
        return skip_first_batches_of(dataloader, num_batches)

    def free_memory(self, *objects: Any) -> list[None]:
        """Release all prepared objects, and free cached device memory.

        Args:
            *objects: Objects whose references the caller wants to clear.

        Returns:
            A None for each object, to assign: `model, optimizer = accelerator.free_memory(model, optimizer)`.
        """
        return self.preparation.release(objects)

    def clear(self, *objects: Any) -> list[None]:
        """Release all prepared models, optimizers and data loaders, and free cached device memory."""
        return self.preparation.release(objects)

    def end_training(self) -> None:
        """End a run: close the experiment trackers and destroy the process group.

        If an exception is being handled, the trackers mark their runs as failed. The end of the script does the same,
        so the call is only needed if the script continues on a single process.
        """
        self.tracking.leave()

    def save(self, obj: Any, f: str | os.PathLike[str] | BinaryIO, safe_serialization: bool = False) -> None:
        """Save an object to a file on the main process, with `torch.save` or in the safetensors format.

        Only the main process writes the file. With `ProjectConfiguration(save_on_each_node=True)`, the first process of
        each machine saves it.

        Args:
            obj: The object. With `safe_serialization`, a dict of tensors.
            f: The file, or its path.
            safe_serialization: True to write safetensors, False to use `torch.save`.
        """
        save_object(obj, f, self.project_configuration.save_on_each_node, safe_serialization)

    def verify_device_map(self, model: nn.Module) -> bool:
        """Return True if a model is spread over several devices by a `device_map`."""
        return is_spread(model)

    def profile(self, profile_handler: ProfileKwargs | None = None) -> AbstractContextManager[Any]:
        """Return a context manager that profiles its body with torch's profiler.

        It yields the profiler.

        Args:
            profile_handler: Options of the profiler. None uses those of `kwargs_handlers`, or else torch's defaults.
                With `output_trace_dir`, each process writes its trace there.
        """
        return profiling(profile_handler, self.profile_handler, self.state)

    def lomo_backward(self, loss: torch.Tensor, learning_rate: float) -> None:
        """Run the backward pass and update the weights during it, as LOMO optimizers do to save memory.

        Args:
            loss: The mean loss, a scalar tensor.
            learning_rate: The learning rate of this step.

        Raises:
            ConfigurationError: No LOMO optimizer is prepared.
        """
        self.optimizer_step.fused_backward(loss, learning_rate)

    def trigger_sync_in_backward(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context manager in which `backward` reduces gradients, even after a forward in `no_sync`.

        Use it if a script finds out only after the forward pass that an optimizer step follows.

        Args:
            model: The prepared model.
        """
        return self.optimizer_step.sync_in_backward(model)


_ACCUMULATION = "Accelerator(gradient_accumulation_steps)"


class Accelerator(MadeAgain, EngineStatus, ProcessControl, Collectives, ModelHandling, StateSaving, Tracking):
    """Engine for running your own PyTorch training loop on any number of devices.

    Arguments win over environment variables of the launcher. Several instances are independent of each other.

    Args:
        device_placement: True if `prepare` moves models, and prepared loaders move batches, to the device.
        split_batches: True if a loader's batch is the global batch and is split over processes. False if each process
            gets a full batch.
        mixed_precision: The name of a precision, or a `Precision`. None uses the launcher's `--mixed_precision`, or
            else full precision.
        gradient_accumulation_steps: The number of micro-batches per optimizer step. None uses the launcher's value, or
            else 1.
        cpu: True to use the CPU even if an accelerator is available.
        dataloader_config: Settings by which loaders are sharded over processes.
        strategy: The name of a strategy, or a `Strategy`. `"auto"` uses the launcher's choice, or else DDP if there are
            several processes.
        project_dir: The directory for the run's output.
        project_config: Further settings of the output directory and of automatic checkpoint names.
        gradient_accumulation_plugin: Further settings of gradient accumulation, instead of
            `gradient_accumulation_steps`.
        step_scheduler_with_optimizer: True if prepared schedulers step together with their optimizers.
        step_scheduler_per_process: True to step a prepared scheduler once per process for each optimizer step, unless
            `split_batches` is set. False steps it once.
        rng_types: Accepted without effect. The order of every loader is equal on all processes anyway.
        kwargs_handlers: Option objects, such as `DistributedDataParallelKwargs`.
        dynamo_backend: The `torch.compile` backend for prepared models. `dynamo_plugin` has more options.
        dynamo_plugin: Options for compiling prepared models.
        deepspeed_plugins: Several DeepSpeed plugins by name. The first is active until `state.select_deepspeed_plugin`
            selects another.
        torch_tp_plugin: The size of tensor parallelism. `parallelism_config` has more options.
        fsdp_plugin: Options of `strategy="fsdp"`, as a plugin or as the keys of an `fsdp_config`.
        deepspeed_plugin: Options of `strategy="deepspeed"`, as a plugin or as the keys of a `deepspeed_config`.
        parallelism_config: The sizes of the device mesh, also as a dict. `strategy=Parallel(...)` has more options.
        megatron_lm_plugin: Options of `strategy="megatron"`, as a plugin or as the keys of a `megatron_lm_config`.
        device: The device type, such as `"cuda"`, or this process's device, such as `"cuda:1"`. None detects it.
        fused_optimizer: Deprecated, without effect. Pass `fused=True` to the optimizer instead.
        log_with: The trackers that `init_trackers` starts: a name, a tracker, a list of them, or `"all"`.

    Raises:
        ConfigurationError: Options contradict each other or are not supported here. The message names what is
            supported.

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
        mixed_precision: PrecisionName | str | Precision | None = None,
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
        strategy: StrategyName | str | Strategy = "auto",
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
        backend, timeout = getattr(group, "backend", None), getattr(group, "timeout", None)
        process = PartialState(cpu, device=device, backend=backend, timeout=timeout, moves=True)
        launched = Launched()
        self.project_configuration = make_project(project_dir, project_config)
        self.rng_types = list(rng_types or ["generator"])
        self.profile_handler = find_handler(handlers, ProfileKwargs)
        if dynamo_backend is not None and dynamo_plugin is not None:
            raise ConfigurationError("Both dynamo_backend and dynamo_plugin are set. Pass only one of them.")
        dynamo_plugin = TorchDynamoPlugin(dynamo_backend) if dynamo_backend is not None else dynamo_plugin
        options = PreparationOptions(
            device_placement,
            make_dataloader_config(split_batches, dataloader_config),
            step_scheduler_with_optimizer,
            step_scheduler_per_process,
            launched.compilation if dynamo_plugin is None else dynamo_plugin.compilation(),
        )
        plugins = Plugins.from_arguments(
            fsdp_plugin, deepspeed_plugin, deepspeed_plugins, parallelism_config, megatron_lm_plugin, torch_tp_plugin
        )
        # The strategy comes first, because its configuration may set the precision.
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
        """Wrap models, optimizers, data loaders and schedulers for distributed training, and return them.

        Args:
            *objects: Modules, optimizers, DataLoaders and learning-rate schedulers. Other objects are returned
                unchanged.
            device_placement: For each object, True to move it to the device. None uses the instance's setting.

        Returns:
            The prepared objects in the given order, as a tuple if there are several. Objects that are already prepared
                are returned unchanged. An object that was prepared before yields the same result again.

        Raises:
            ConfigurationError: `device_placement` and the objects differ in number.
        """
        return self.preparation.objects(objects, device_placement)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Prepare one model for distributed training, and return the module to call in its place.

        Args:
            model: The model.
            device_placement: True to move it to the device. None uses the instance's setting.
            evaluation_mode: True to place the model without wrapping it for training.

        Returns:
            The module to call instead of `model`.
        """
        return self.preparation.model(model, device_placement, evaluation_mode)

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> PreparedOptimizer:
        """Wrap an optimizer for gradient accumulation: `step` does nothing before the last batch of an update."""
        return self.preparation.optimizer(optimizer)

    def prepare_scheduler(self, scheduler: Any, *, steps_per_call: int | None = None) -> PreparedScheduler:
        """Prepare a learning-rate scheduler, so that it steps only with its optimizer.

        Args:
            scheduler: The scheduler.
            steps_per_call: The number of scheduler steps per optimizer step. None follows `step_scheduler_per_process`.
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
        """Prepare a data loader, so that it yields this process's batches on its device.

        Args:
            data_loader: A DataLoader, or any iterable of batches.
            device_placement: True to move batches to the device. None uses the instance's setting.
            tail: The treatment of the last batches if their number is not a multiple of the number of processes. None
                follows `even_batches`.
            place: A function that moves a batch to the device, instead of the default.
            shard: The part of the data for this process. None uses the strategy's choice.
            fill: True to pad a short last batch if the strategy needs batches of one shape. None follows
                `even_batches`.

        Returns:
            The prepared loader, which keeps the order of the original one.
        """
        return self.preparation.loader(data_loader, device_placement, tail, place, shard, fill)

    def forget_loader(self, loader: Any) -> None:
        # Checkpoints then do not include the loader's position.
        self.preparation.forget_loader(loader)

    def default_placement(self) -> Callable[[Any], Any] | None:
        """Return the function that copies a batch to this process's device.

        None on the CPU, which needs no copy.
        """
        return self.preparation.default_placement()

    # step

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        """Return a context manager that lets optimizers step only on every n-th micro-batch.

        Gradients are reduced over processes only on that micro-batch, too.

        Args:
            *models: The prepared models whose gradients accumulate. All models if none is given.
        """
        return self.optimizer_step.accumulate(models)

    def no_sync(self, model: nn.Module | None) -> AbstractContextManager[None]:
        """Return a context manager in which `backward` does not reduce gradients."""
        return self.optimizer_step.without_sync(model)

    def backward(self, loss: torch.Tensor, *, weight: torch.Tensor | float | None = None, **kwargs: Any) -> None:
        """Divide a loss by the number of batches whose gradients are accumulated, then compute its gradients.

        With fp16 mixed precision, the loss is scaled as well. With `weight`, the resulting gradients are those of the
        weighted mean over all accumulated micro-batches and all processes. Pass a weight for every micro-batch or for
        none.

        Args:
            loss: The mean loss of this micro-batch, a scalar tensor. With `weight`, the sum of its losses.
            weight: The weight of the summed loss, such as the number of tokens.
            **kwargs: Arguments of `Tensor.backward`.
        """
        try:
            self.optimizer_step.backward(loss, weight, **kwargs)
        except Exception as error:
            hide_inner_frames(error)
            raise

    def unscale_gradients(self, optimizer: Optimizer | Sequence[Optimizer] | None = None) -> None:
        """Undo the loss scaling of fp16 in the gradients.

        Call it before you read or change gradients.

        Args:
            optimizer: One or several prepared optimizers. None unscales the gradients of all.
        """
        self.optimizer_step.unscale(optimizer)

    def clip_grad_norm_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Clip gradients to a total norm of at most `max_norm`.

        This happens once all accumulated micro-batches have contributed.

        Args:
            parameters: The parameters whose gradients to clip.
            max_norm: The maximum total norm.
            norm_type: The order of the norm, such as 2.0 or `inf`.

        Returns:
            The total norm before clipping. Within a window, the norm of this process's accumulated gradients, which are
                not clipped.
        """
        return self.optimizer_step.clip_norm(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: torch.Tensor | Iterable[torch.Tensor], clip_value: float) -> None:
        """Clamp every gradient element to `[-clip_value, clip_value]`.

        This happens once all accumulated micro-batches have contributed.
        """
        self.optimizer_step.clip_value(parameters, clip_value)

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """Return a context that applies mixed precision to code outside of prepared models, such as a loss.

        Args:
            autocast_handler: Options of this context. `AutocastKwargs(enabled=False)` computes in full precision.
        """
        return autocast_context(self.precision, self.kind, autocast_handler)

    def maybe_context_parallel(
        self,
        buffers: Sequence[torch.Tensor] | None = None,
        buffer_seq_dims: Sequence[int] | None = None,
        no_restore_buffers: Collection[torch.Tensor] | None = None,
    ) -> AbstractContextManager[Any]:
        """Return a context manager that splits `buffers` over processes if the strategy uses context parallelism.

        Otherwise, the context manager has no effect.

        Args:
            buffers: Tensors that hold full sequences, such as tokens, labels and positions.
            buffer_seq_dims: The sequence dimension of each tensor in `buffers`.
            no_restore_buffers: Tensors of `buffers` that need not hold full sequences again afterwards.
        """
        if not isinstance(self.strategy, SplitsSequences):
            return nullcontext()
        return self.strategy.split_sequences(buffers or (), buffer_seq_dims or (), no_restore_buffers or ())

    def init_context(self) -> AbstractContextManager[Any]:
        """Return a context manager in which to create a model. With FSDP, its parameters then use no memory yet."""
        return self.strategy.init_context()

    def join_uneven_inputs(
        self, joinables: Sequence[nn.Module], even_batches: bool | None = None
    ) -> AbstractContextManager[Any]:
        """Return a context manager for a loop in which some processes have more batches than others.

        Args:
            joinables: The prepared models.
            even_batches: Replaces the instance's `even_batches` for loops that start in the context.
        """
        return self.preparation.uneven_inputs(joinables, even_batches)
