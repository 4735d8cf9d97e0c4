"""Writing single objects once for all processes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, BinaryIO

import torch

from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.state import PartialState


def save_object(
    obj: Any,
    f: str | os.PathLike[str] | BinaryIO,
    save_on_each_node: bool = False,
    safe_serialization: bool = False,
) -> None:
    """Write an object once for all processes.

    Args:
        obj: What to write; with `safe_serialization` a dict of tensors, of which those that share their memory are
            written once.
        f: The file, or its path.
        save_on_each_node: Write on the first process of each machine, rather than on the main process alone.
        safe_serialization: Write safetensors rather than what `torch.load` reads.

    Raises:
        ConfigurationError: Safetensors are asked for, but not for a dict of tensors, or not by a path.
    """
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
            code="DT-003",
        )
    if not isinstance(path, str | os.PathLike):
        raise ConfigurationError(
            f"safe_serialization=True writes to a path, but got a {type(path).__name__}.", code="DT-003"
        )
    first: dict[tuple[Any, ...], str] = {}
    for name, tensor in tensors.items():
        memory = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride()) if tensor.numel() else (name,)
        first.setdefault(memory, name)
    kept = {name: tensors[name].detach().clone(memory_format=torch.contiguous_format) for name in first.values()}
    save_file(kept, os.fspath(path), metadata={"format": "pt"})
