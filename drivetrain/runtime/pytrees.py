"""Operations over pytrees of tensors, nested structures such as batches.

A structure is a tensor, or a mapping, list, tuple, named tuple, dataclass or attrs instance of structures. Every
function returns containers of the types that it was given. Anything that is neither a tensor nor a container (a string,
a number, `None`) is a leaf that is passed through unchanged.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from drivetrain.runtime.errors import DataError


@dataclasses.dataclass(frozen=True)
class TensorInformation:
    """Shape and dtype of a tensor, without its data."""

    shape: torch.Size
    dtype: torch.dtype


def is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def is_tensor_information(value: object) -> bool:
    return isinstance(value, TensorInformation)


def is_leaf(value: object) -> bool:
    """Return True if a value is not a container such as a list or a dict."""
    return _children(value) is None


def is_namedtuple(value: object) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields") and hasattr(value, "_make")


def field_names(data: Any) -> list[str] | None:
    """Return the field names of a dataclass or attrs instance, else None."""
    if isinstance(data, (type, TensorInformation)):
        return None
    if dataclasses.is_dataclass(data):
        return [field.name for field in dataclasses.fields(data)]
    fields = getattr(type(data), "__attrs_attrs__", None)  # what attrs.has checks
    return None if fields is None else [field.name for field in fields]


def with_fields(data: Any, values: Iterable[Any]) -> Any:
    """Return a copy of a dataclass or attrs instance with new field values."""
    # dataclasses.replace would run __post_init__ again, and it refuses fields with init=False.
    clone = copy.copy(data)
    for name, value in zip(field_names(data) or (), values, strict=True):
        object.__setattr__(clone, name, value)
    return clone


def honor_type(obj: Any, generator: Iterable[Any]) -> Any:
    """Build a list, tuple or named tuple of the same type as `obj` from the items of `generator`."""
    if is_namedtuple(obj):
        # Named tuples take their fields as separate arguments.
        return type(obj)(*generator)
    return type(obj)(list(generator))


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = is_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """Apply `func` to each tensor in a nested structure, and return a structure with the results.

    Args:
        func: Called as `func(leaf, *args, **kwargs)`.
        data: The structure.
        *args: Positional arguments for `func`.
        test_type: Predicate that selects the leaves; by default tensors.
        error_on_other_type: Raise an error for leaves that fail `test_type` instead of passing them through.
        **kwargs: Keyword arguments for `func`.

    Returns:
        A structure of equal types with the results in place of the leaves.

    Raises:
        DataError: If `error_on_other_type` is set and a leaf fails `test_type`.

    Example:
        ```python
        halved = recursively_apply(lambda t: t / 2, {"x": torch.ones(2), "name": "a"})
        ```
    """

    def visit(node: Any) -> Any:
        if test_type(node):
            return func(node, *args, **kwargs)
        children = _children(node)
        if children is not None:
            return _with_children(node, [visit(child) for child in children])
        if error_on_other_type:
            raise DataError(
                f"{getattr(func, '__name__', repr(func))} does not accept values of type {type(node).__name__!r}, "
                "only tensors, and mappings, lists, tuples and dataclasses of tensors. Remove the other values, or "
                "send them with gather_object or broadcast_object_list."
            )
        return node

    return visit(data)


def send_to_device(
    tensor: Any,
    device: torch.device | str | int,
    non_blocking: bool = False,
    skip_keys: str | Sequence[str] | None = None,
) -> Any:
    """Move all tensors in a nested structure to a device, and all other objects with a `to` method.

    Args:
        tensor: The structure.
        device: The target device.
        non_blocking: Copy asynchronously if the device supports it and the source is in pinned memory.
        skip_keys: Keys of mappings, at any depth, whose values are not moved.

    Returns:
        The structure with its tensors on `device`.
    """
    if isinstance(tensor, Tensor):
        return tensor.to(device, non_blocking=non_blocking)
    # Plain containers first: most batches consist of them, and checks of abstract types are slow.
    kind = type(tensor)
    if kind is tuple:
        return tuple([send_to_device(item, device, non_blocking, skip_keys) for item in tensor])
    if kind is list:
        return [send_to_device(item, device, non_blocking, skip_keys) for item in tensor]
    if kind is dict and skip_keys is None:
        return {key: send_to_device(value, device, non_blocking) for key, value in tensor.items()}
    is_mapping = isinstance(tensor, Mapping)
    # The `to` of a mapping, such as transformers' BatchEncoding, would move the skipped keys too.
    if hasattr(tensor, "to") and not (is_mapping and skip_keys is not None):
        if non_blocking:
            try:
                return tensor.to(device, non_blocking=True)
            except TypeError:
                pass  # the `to` of another package may lack the argument
        return tensor.to(device)
    children = _children(tensor)
    if children is None:
        return tensor
    skipped = () if skip_keys is None else (skip_keys,) if isinstance(skip_keys, str) else tuple(skip_keys)
    names: Iterable[Any] = tensor if is_mapping else [None] * len(children)
    moved = [
        child if is_mapping and name in skipped else send_to_device(child, device, non_blocking, skip_keys)
        for name, child in zip(names, children, strict=True)
    ]
    return _with_children(tensor, moved)


def find_device(data: Any) -> torch.device | None:
    """Return the device of the first tensor in a nested structure, or None."""
    for leaf in _leaves(data):
        if isinstance(leaf, Tensor):
            return leaf.device
    return None


def batch_size_or_none(data: Any) -> int | None:
    """Return the number of rows in a batch, or None if no element of the batch has rows."""
    if isinstance(data, Tensor):
        return data.size(0) if data.dim() else None
    for leaf in _leaves(data):
        if isinstance(leaf, Tensor):
            if leaf.dim():
                return leaf.size(0)
        elif isinstance(leaf, np.ndarray) and leaf.ndim:
            return len(leaf)
    return None


def find_batch_size(data: Any) -> int:
    """Return the number of rows in a batch, which is the first dimension of its first tensor.

    Args:
        data: A nested structure of tensors or NumPy arrays.

    Returns:
        The number of rows.

    Raises:
        DataError: If the structure holds no tensor with at least one dimension.
    """
    size = batch_size_or_none(data)
    if size is None:
        raise DataError(
            f"Cannot find the size of this batch: {_describe(data)} holds no tensor with at least one "
            "dimension. Pass the size to self.log(..., batch_size=...), or add a tensor to the batch "
            "whose first dimension is the batch dimension."
        )
    return size


def concatenate(data: Sequence[Any], dim: int = 0) -> Any:
    """Concatenate nested structures of tensors that have equal keys and lengths, tensor by tensor.

    Args:
        data: The structures, all with equal keys and lengths.
        dim: The dimension along which tensors are concatenated.

    Returns:
        One structure of the type of `data[0]`.

    Raises:
        DataError: If `data` is empty, the forms differ, or a leaf is not a tensor.
    """
    if not data:
        raise DataError("concatenate was given an empty list. Pass at least one structure of tensors.")
    first = data[0]
    if isinstance(first, Tensor):
        return torch.cat([_expect_tensor(item) for item in data], dim=dim)
    children = _children(first)
    if children is None:
        raise DataError(
            f"concatenate does not accept values of type {type(first).__name__!r}, only tensors, and mappings, lists, "
            "tuples and dataclasses of tensors."
        )
    columns = [_matching_children(first, len(children), item) for item in data]
    return _with_children(first, [concatenate(column, dim) for column in zip(*columns, strict=True)])


def slice_tensors(data: Any, tensor_slice: slice) -> Any:
    """Slice the first dimension of every tensor in a nested structure."""
    return recursively_apply(lambda tensor: tensor[tensor_slice] if tensor.dim() else tensor, data)


def listify(data: Any) -> Any:
    """Convert every tensor of a nested structure to numbers or lists of numbers."""
    return recursively_apply(lambda tensor: tensor.detach().tolist(), data)


def get_data_structure(data: Any) -> Any:
    """Replace every tensor of a nested structure by its shape and dtype."""
    return recursively_apply(lambda tensor: TensorInformation(tensor.shape, tensor.dtype), data)


def initialize_tensors(data_structure: Any, device: torch.device | str | None = None) -> Any:
    """Replace each `TensorInformation` (a shape and a dtype) in a nested structure by an empty tensor."""

    def allocate(info: TensorInformation) -> Tensor:
        return torch.empty(info.shape, dtype=info.dtype, device=device)

    return recursively_apply(allocate, data_structure, test_type=is_tensor_information)


def _children(data: Any) -> list[Any] | None:
    if isinstance(data, (tuple, list)):
        return list(data)
    if isinstance(data, Mapping):
        return list(data.values())
    names = field_names(data)
    return None if names is None else [getattr(data, name) for name in names]


def _with_children(data: Any, children: Sequence[Any]) -> Any:
    kind = type(data)
    if kind is dict:
        return dict(zip(data, children, strict=True))
    if isinstance(data, (tuple, list)):
        return honor_type(data, children)
    if isinstance(data, MutableMapping):
        # Unlike a constructor call, a shallow copy keeps a default factory and extra attributes.
        clone = copy.copy(data)
        for key, child in zip(data, children, strict=True):
            clone[key] = child
        return clone
    if isinstance(data, Mapping):
        return kind(dict(zip(data, children, strict=True)))
    return with_fields(data, children)


def _leaves(data: Any) -> Iterable[Any]:
    children = _children(data)
    if children is None:
        yield data
        return
    for child in children:
        yield from _leaves(child)


def _matching_children(first: Any, count: int, other: Any) -> list[Any]:
    if isinstance(first, Mapping) and isinstance(other, Mapping) and first.keys() == other.keys():
        return [other[key] for key in first]
    # A mapping with other keys does not match, even if the number of values is equal.
    children = None if isinstance(first, Mapping) else _children(other)
    if children is None or len(children) != count:
        raise DataError(
            f"concatenate was given structures of different forms: {_describe(first)} and "
            f"{_describe(other)}. All structures must have the same keys and lengths."
        )
    return children


def _expect_tensor(value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise DataError(f"concatenate needs equal structures, but got a tensor and {_describe(value)}.")
    return value


def _describe(data: Any) -> str:
    if isinstance(data, Tensor):
        return f"a tensor of shape {tuple(data.shape)}"
    name = type(data).__name__
    if isinstance(data, Mapping):
        return f"a {name} with the keys {[str(key) for key in data]}"
    if isinstance(data, (list, tuple)):
        return f"a {name} of {len(data)} ({', '.join(type(item).__name__ for item in data[:4])})"
    return f"an object of type {name!r}"
