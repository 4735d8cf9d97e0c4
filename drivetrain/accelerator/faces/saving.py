"""The part of the Accelerator's face that saves and loads; `RunState` does the work."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torch import nn

from drivetrain import checkpoint
from drivetrain.accelerator.handlers import ProjectConfiguration
from drivetrain.accelerator.run_state import RunState
from drivetrain.accelerator.state_hooks import HookHandle, LoadHook, SaveHook


class StateSaving:
    """Accelerate's `save_state` and what belongs to it."""

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
        """Write a prepared model's weights as `safetensors`, `transformers` and Accelerate open them.

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

    def register_save_state_pre_hook(self, hook: SaveHook) -> HookHandle:
        """Call a function before `save_state` writes.

        Args:
            hook: Called on every process as `hook(models, weights, output_dir)` with the prepared models and their
                state dicts, and a directory that becomes the checkpoint: what it writes there is part of it. What it
                takes out of `weights` is not saved again.

        Returns:
            A handle whose `remove()` takes it back.
        """
        return self.run_state.hooks.add_save(hook)

    def register_load_state_pre_hook(self, hook: LoadHook) -> HookHandle:
        """Call a function before `load_state` loads.

        Args:
            hook: Called on every process as `hook(models, input_dir)`. What it takes out of `models` is not loaded.

        Returns:
            A handle whose `remove()` takes it back.
        """
        return self.run_state.hooks.add_load(hook)

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

        It may also be one that Accelerate's `save_state` wrote, whose files are read without executing what they hold.
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
