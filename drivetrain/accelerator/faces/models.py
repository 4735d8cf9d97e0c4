"""The part of the Accelerator's face that gives models back, and ends with them."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import Any, BinaryIO

import torch
from torch import nn

from drivetrain.accelerator.engine_state import AcceleratorState
from drivetrain.accelerator.handlers import ProfileKwargs, ProjectConfiguration
from drivetrain.accelerator.preparation import Preparation, is_spread
from drivetrain.accelerator.profiling import profiling
from drivetrain.accelerator.saved_objects import save_object
from drivetrain.accelerator.step import OptimizerStep
from drivetrain.accelerator.tracking import RunTracking
from drivetrain.data import SkippingLoader
from drivetrain.data import skip_first_batches as skip_first_batches_of


class ModelHandling:
    """Accelerate's members for models outside of the step."""

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
