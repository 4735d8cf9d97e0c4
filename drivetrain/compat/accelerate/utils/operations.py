"""Collectives and operations on nested structures."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from drivetrain.compat.accelerate.state import PartialState
from drivetrain.compat.accelerate.utils.imports import package_available
from drivetrain.runtime import collectives, pytrees
from drivetrain.runtime.collectives import broadcast_object_list, gather_object
from drivetrain.runtime.errors import CollectiveError as DistributedOperationException
from drivetrain.runtime.errors import DataError
from drivetrain.runtime.pytrees import (
    TensorInformation,
    batch_size_or_none,
    find_batch_size,
    find_device,
    get_data_structure,
    honor_type,
    initialize_tensors,
    is_namedtuple,
    is_tensor_information,
    listify,
    send_to_device,
    slice_tensors,
)

__all__ = [
    "CannotPadNestedTensorWarning",
    "ConvertOutputsToFp32",
    "DistributedOperationException",
    "GatheredParameters",
    "TensorInformation",
    "broadcast",
    "broadcast_object_list",
    "concatenate",
    "convert_outputs_to_fp32",
    "convert_to_fp32",
    "copy_tensor_to_devices",
    "find_batch_size",
    "find_device",
    "gather",
    "gather_object",
    "get_data_structure",
    "get_shape",
    "honor_type",
    "ignorant_find_batch_size",
    "initialize_tensors",
    "is_namedtuple",
    "is_tensor_information",
    "is_torch_tensor",
    "listify",
    "pad_across_processes",
    "pad_input_tensors",
    "recursively_apply",
    "reduce",
    "send_to_device",
    "slice_tensors",
]


class CannotPadNestedTensorWarning(UserWarning):
    """Warning that a nested tensor cannot be padded."""


class UnsupportedTypeError(DataError, TypeError):
    """Raised if a nested structure holds a value of another type. It is a `TypeError`, as in Accelerate."""


def _with_type_error(operation: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(operation)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return operation(*args, **kwargs)
        except DataError as error:
            raise UnsupportedTypeError(str(error)) from error

    return call


broadcast = _with_type_error(collectives.broadcast)
gather = _with_type_error(collectives.gather)
reduce = _with_type_error(collectives.reduce)
recursively_apply = _with_type_error(pytrees.recursively_apply)
_concatenate = _with_type_error(pytrees.concatenate)
_pad = _with_type_error(collectives.pad_across_processes)


def is_torch_tensor(tensor: object) -> bool:
    """Return True if the object is a tensor."""
    return isinstance(tensor, torch.Tensor)


def get_shape(data: Any) -> Any:
    """Return the nested structure with each tensor replaced by its shape, as a list."""
    return recursively_apply(lambda tensor: list(tensor.shape), data)


def concatenate(data: Sequence[Any], dim: int = 0) -> Any:
    """Concatenate nested structures of tensors. A list of one may also hold values that are no tensors."""
    return recursively_apply(torch.clone, data[0]) if len(data) == 1 else _concatenate(data, dim)


def pad_across_processes(tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
    """Pad tensors to the largest size on any process. Warns about nested tensors, which stay as they are."""

    def pad(each: torch.Tensor) -> Any:
        if not each.is_nested:
            return _pad(each, dim, pad_index, pad_first)
        warnings.warn("A nested tensor is not padded across processes.", CannotPadNestedTensorWarning, stacklevel=4)
        return each

    found: list[bool] = []
    recursively_apply(lambda each: found.append(each.is_nested), tensor)
    if any(found):
        return recursively_apply(pad, tensor, error_on_other_type=True)
    return _pad(tensor, dim, pad_index, pad_first)


def ignorant_find_batch_size(data: Any) -> int | None:
    """Return the size of the first tensor's first dimension, or None if there is no tensor."""
    return batch_size_or_none(data)


def convert_to_fp32(tensor: Any) -> Any:
    """Return the nested structure with float16 and bfloat16 tensors converted to float32."""

    def convert(each: torch.Tensor) -> torch.Tensor:
        return each.float() if each.dtype in (torch.float16, torch.bfloat16) else each

    return recursively_apply(convert, tensor)


class ConvertOutputsToFp32:
    """Callable that runs a forward method and converts 16-bit outputs to float32."""

    def __init__(self, model_forward: Callable[..., Any]) -> None:
        self.model_forward = model_forward
        functools.update_wrapper(self, model_forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return convert_to_fp32(self.model_forward(*args, **kwargs))


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a forward method so that 16-bit outputs are converted to float32."""
    converted = ConvertOutputsToFp32(model_forward)

    @functools.wraps(model_forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return converted(*args, **kwargs)

    return forward


def copy_tensor_to_devices(tensor: torch.Tensor | None = None) -> torch.Tensor:
    """Copy a tensor from the one process that has it to all processes."""
    state = PartialState()
    shapes = gather_object([None if tensor is None else (tuple(tensor.shape), tensor.dtype)])
    owner = next(rank for rank, shape in enumerate(shapes) if shape is not None)
    if tensor is None:
        shape, dtype = shapes[owner]
        tensor = torch.empty(shape, dtype=dtype, device=state.device)
    copied: torch.Tensor = broadcast(tensor.to(state.device), from_process=owner)
    return copied


def pad_input_tensors(tensor: Any, batch_size: int, num_processes: int, dim: int = 0) -> Any:
    """Repeat the last row until the batch size is a multiple of the number of processes."""
    missing = -batch_size % num_processes

    def pad(each: torch.Tensor) -> torch.Tensor:
        last = each.narrow(dim, each.shape[dim] - 1, 1)
        return torch.cat([each, *[last] * missing], dim=dim)

    return recursively_apply(pad, tensor) if missing else tensor


@contextmanager
def GatheredParameters(
    params: Sequence[torch.nn.Parameter],
    modifier_rank: int | None = None,
    fwd_module: torch.nn.Module | None = None,
    enabled: bool = True,
) -> Iterator[None]:
    """Gather parameters that ZeRO 3 has sharded, for the `with` body."""
    if not enabled or not package_available("deepspeed"):
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(params, modifier_rank, fwd_module):
        yield
