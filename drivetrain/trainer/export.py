"""Loading of tasks from checkpoints, and export of a task's forward to ONNX, TorchScript and `torch.export`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar

import torch
from torch import nn

from drivetrain import checkpoint
from drivetrain.checkpoint.manifest import EVERY_PLACE_OF_MODELS
from drivetrain.runtime.errors import CheckpointError, ConfigurationError
from drivetrain.runtime.logging import get_logger
from drivetrain.trainer.hyper_parameters import HoldsHyperParameters, build, checkpoint_for_hooks

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from typing_extensions import Self

logger = get_logger(__name__)


class TaskFiles(HoldsHyperParameters, nn.Module):
    __jit_unused_properties__: ClassVar[list[str]] = []
    example_input_array: Any = None
    """An example input of `forward`, for exports, model summaries and graphs in trackers."""

    @property
    def strict_loading(self) -> bool:
        """True if loading weights raises an error for missing and unexpected names. If False, it only warns."""
        found = self.__dict__.get("_strict_loading")
        return True if found is None else bool(found)

    @strict_loading.setter
    def strict_loading(self, strict: bool | None) -> None:
        self.__dict__["_strict_loading"] = strict

    @classmethod
    def load_from_checkpoint(
        cls,
        checkpoint_path: str | Path | BinaryIO,
        map_location: Any = None,
        hparams_file: str | Path | None = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        *,
        instantiate: bool = False,
        **kwargs: Any,
    ) -> Self:
        """Create a task from a checkpoint, with the saved hyper-parameters as its constructor arguments.

        Args:
            checkpoint_path: The checkpoint's directory, or a `.ckpt` file.
            map_location: The device for the task. None uses the CPU.
            hparams_file: A YAML or CSV file with hyper-parameters to use instead of the saved ones.
            strict: True to raise an error for missing and unexpected weights. None uses the task's `strict_loading`.
            weights_only: Accepted without effect. Nothing in a checkpoint is unpickled into objects.
            instantiate: True to import and call classes named in the hyper-parameters, as a command line stores them.
                Use it only for trusted files. If False, such a checkpoint is refused.
            **kwargs: Constructor arguments that replace saved ones.

        Returns:
            The task.

        Raises:
            CheckpointError: There is no complete checkpoint, or it does not hold exactly one model.
            ConfigurationError: `strict` contradicts the task's `strict_loading`.
        """
        entries = ("progress", "callbacks", "hyper_parameters", "hparams_name", "hparams_constructor", "hooks")
        parts = (*EVERY_PLACE_OF_MODELS, *(f"driver/{name}" for name in entries), "hyper_parameters", "hparams_name")
        given = kwargs if hparams_file is None else None
        shared = checkpoint.read_shared(checkpoint_path, parts, given)
        engine, driver = shared["engine"], shared["driver"]
        if len(engine.get("models", [])) != 1:
            count = len(engine.get("models", []))
            raise CheckpointError(f"{checkpoint_path} contains {count} models, but a task can load only one.")
        task = build(cls, driver, "hyper_parameters", hparams_file, kwargs, instantiate)
        set_strict = task.__dict__.get("_strict_loading")
        if None not in (strict, set_strict) and strict != set_strict:
            raise ConfigurationError(
                f"load_from_checkpoint(strict={strict}) is in conflict with "
                f"{cls.__name__}.strict_loading={set_strict}. Omit strict, or change strict_loading.",
            )
        # Tasks may create layers here, so it must run before the weights are loaded.
        task.configure_model()
        # The hook may rename or drop weights, which are read from the engine's part afterwards.
        with checkpoint_for_hooks(engine, 0, driver) as state:
            task.on_load_checkpoint(state)
        task._load_weights(engine["models"][0], task.strict_loading if strict is None else strict, checkpoint_path)
        # Other values that torch.load accepts, such as functions, have no effect.
        is_device = isinstance(map_location, str | int | torch.device)
        loaded: Self = task.to(map_location) if is_device else task
        return loaded

    @classmethod
    def saved_hyper_parameters(cls, checkpoint_path: str | Path | BinaryIO) -> dict[str, Any]:
        """Return the hyper-parameters saved in a checkpoint.

        Args:
            checkpoint_path: The checkpoint's directory, or a `.ckpt` file.

        Raises:
            CheckpointError: There is no complete checkpoint.
        """
        parts = ("engine/precision", "driver/hyper_parameters", "hyper_parameters")
        return dict(checkpoint.read_shared(checkpoint_path, parts)["driver"].get("hyper_parameters", {}))

    def _load_weights(self, weights: Mapping[str, Any], strict: bool, source: Any) -> None:
        found = self.load_state_dict(weights, strict=strict)
        if found is not None and (
            found.missing_keys or found.unexpected_keys
        ):  # None if a task overrides load_state_dict
            logger.warning(
                f"The weights in {source} do not match {type(self).__name__}. Missing in the checkpoint: "
                f"{found.missing_keys or 'none'}. Unexpected in the checkpoint: {found.unexpected_keys or 'none'}."
            )
        if not weights:
            logger.warning(f"The state dict in {source} contains no parameters for {type(self).__name__}.")

    # export to other formats

    def to_onnx(self, file_path: Any = None, input_sample: Any = None, **kwargs: Any) -> Any:
        """Export the task's `forward` method to an ONNX model.

        Args:
            file_path: The path or opened file to write to. None writes no file.
            input_sample: The example input. None uses `example_input_array`.
            **kwargs: Arguments of `torch.onnx.export`.

        Returns:
            The result of `torch.onnx.export`.

        Raises:
            ConfigurationError: There is no example input, or `onnx` is not installed (or `onnxscript`, unless
                `dynamo=False`).
        """
        sample = self._sample("to_onnx", "input_sample", input_sample)
        # Only torch's newer exporter (`dynamo=True`) is written with onnxscript.
        needed = ("onnx", "onnxscript") if kwargs.get("dynamo", True) else ("onnx",)
        for name in needed:
            if find_spec(name) is None:
                raise ConfigurationError(
                    f'to_onnx requires the package {name}. Install it with pip install "drivetrain[onnx]".'
                )
        if isinstance(file_path, Path):
            file_path = os.fspath(file_path)
        with Exporting(self):
            args = sample if isinstance(sample, tuple) else (sample,)
            return torch.onnx.export(self, args, file_path, **kwargs)

    @torch.no_grad()
    def to_torchscript(
        self,
        file_path: str | os.PathLike[str] | None = None,
        method: str = "script",
        example_inputs: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Convert the task to TorchScript, by compiling or tracing its `forward` method.

        Args:
            file_path: The path or fsspec URL to write to. None writes no file.
            method: `"script"` to compile the source of `forward`, `"trace"` to record one call.
            example_inputs: The example input for tracing. None uses `example_input_array`.
            **kwargs: Arguments of `torch.jit.script` or `torch.jit.trace`.

        Returns:
            The script module.

        Raises:
            ConfigurationError: The method is unknown, or there is no example input.
        """
        if method not in ("script", "trace"):
            raise ConfigurationError(f"to_torchscript only supports 'script' or 'trace' as method, got {method!r}.")
        inputs = None
        if method == "trace":
            inputs = self._sample("to_torchscript(method='trace')", "example_inputs", example_inputs)
        with Exporting(self):
            if method == "script":
                # The Trainer is detached: TorchScript would try to compile it as an attribute.
                made = torch.jit.script(self, **kwargs)
            else:
                made = torch.jit.trace(self, example_inputs=inputs, **kwargs)  # type: ignore[no-untyped-call]
        if file_path is not None:
            _write_script(made, os.fspath(file_path))
        return made

    @torch.no_grad()
    def to_exported_program(
        self, file_path: str | os.PathLike[str] | None = None, example_inputs: Any = None, **kwargs: Any
    ) -> ExportedProgram:
        """Export the task's `forward` method with `torch.export`.

        Args:
            file_path: The `.pt2` file to write to. None writes no file.
            example_inputs: The example input, or a tuple of several arguments. None uses `example_input_array`.
            **kwargs: Arguments of `torch.export.export`, such as `dynamic_shapes`.

        Returns:
            The exported program. `torch.export.load` reads the file.

        Raises:
            ConfigurationError: There is no example input.

        Example:
            ```text
            program = task.to_exported_program("net.pt2", (torch.randn(8, 32),))
            ```
        """
        inputs = self._sample("to_exported_program", "example_inputs", example_inputs)
        with Exporting(self):
            program = torch.export.export(self, inputs if isinstance(inputs, tuple) else (inputs,), **kwargs)
        if file_path is not None:
            torch.export.save(program, file_path)
        return program

    def _sample(self, method: str, argument: str, given: Any) -> Any:
        sample = self.example_input_array if given is None else given
        if sample is None:
            raise ConfigurationError(
                f"{method} requires either `{argument}` or `model.example_input_array` as an example input for "
                f"{type(self).__name__}. Pass {argument}, or set example_input_array.",
            )
        task: Any = self
        # The example takes the way of a batch, so that it reaches forward as in training.
        prepared = task.on_before_batch_transfer(sample, 0)
        prepared = task.transfer_batch_to_device(prepared, task.device, 0)
        return task.on_after_batch_transfer(prepared, 0)


class Exporting:
    """Context manager that sets a task to evaluation mode and detaches its Trainer during an export.

    Exporters read every attribute and cannot handle a Trainer, so `task.trainer` is replaced by a placeholder.
    """

    def __init__(self, task: Any) -> None:
        self._task = task

    def __enter__(self) -> None:
        task = self._task
        # Each module's own mode, since parts of a task may be frozen in evaluation mode.
        self._modes = {module: module.training for module in task.modules()}
        self._trainer, self._paths = task.__dict__["_trainer"], task.__dict__["_metric_paths"]
        # Batch transfer hooks may still ask for the device through `task.trainer`.
        place = SimpleNamespace(strategy=SimpleNamespace(topology=SimpleNamespace(device=task.device)))
        task.__dict__["_trainer"], task.__dict__["_metric_paths"] = place, {}
        task.eval()

    def __exit__(self, *_: Any) -> None:
        self._task.__dict__["_trainer"], self._task.__dict__["_metric_paths"] = self._trainer, self._paths
        for module, mode in self._modes.items():
            module.training = mode


def _write_script(module: Any, path: str) -> None:
    if "://" not in path:
        module.save(path)
        return
    import fsspec

    with fsspec.open(path, "wb") as file:
        torch.jit.save(module, file)
