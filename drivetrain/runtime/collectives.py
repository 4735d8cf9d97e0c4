"""Collectives over nested structures of tensors.

Every process must call these functions. They take the structures described in `drivetrain.runtime.pytrees`, keep dtypes
and devices, and return equal results on all processes. With a world size of 1 nothing is communicated.

With `DRIVETRAIN_DEBUG=1` the processes first compare the operation and the shapes. A `CollectiveError` then names the
rank that differs, instead of a hang or wrong values.
"""

from __future__ import annotations

from collections.abc import Sequence
from pickle import PicklingError
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain.runtime.collective_checks import call_collective, verify_operation
from drivetrain.runtime.errors import CollectiveError, ConfigurationError, DataError, nearest
from drivetrain.runtime.pytrees import recursively_apply
from drivetrain.runtime.state import PartialState

# torch 2.13 warns at every use of all_gather_into_tensor.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_REDUCTIONS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "none": None,
}

# Dtypes that are reduced in another dtype: 16- and 8-bit floats would overflow, and backends lack the others.
_REDUCED_AS = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e5m2: torch.float32,
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.bool: torch.uint8,
}


def gather(tensor: Any) -> Any:
    """Concatenate the tensors of all processes along their first dimension, in rank order.

    Args:
        tensor: A nested structure of tensors with equal shapes on all processes. If the number of rows differs, use
            `pad_across_processes` first.

    Returns:
        The structure with `num_processes` times as many rows in each tensor. A 0-dimensional tensor becomes a vector
        with one element per process. With a world size of 1, `tensor` itself.

    Raises:
        DataError: If the structure holds something that is not a tensor.
        CollectiveError: If another process has exited, or in debug mode if shapes differ.

    Example:
        ```python
        losses = gather(loss.detach())
        ```
    """
    state = PartialState()
    if not state.use_distributed:
        return tensor
    if state.debug:
        verify_operation("gather", tensor, state)
    return recursively_apply(_gather_tensor, tensor, state, error_on_other_type=True)


def gather_rows(data: Any, keep: int) -> Any:
    # `keep` counts this process's rows, and may differ between processes.
    state = PartialState()
    rows: list[int] = []

    def record_rows(leaf: Tensor) -> None:
        rows.append(leaf.size(0) if leaf.dim() else keep)

    recursively_apply(record_rows, data, error_on_other_type=True)
    if state.use_distributed and state.debug:
        verify_operation("gather_rows", data, state, ignore="rows")
    # A rank with invalid arguments sends -1, since raising alone would leave the other ranks waiting.
    count = keep if keep >= 0 and all(size >= keep for size in rows) else -1
    counts = _exchange_integers([count], state)
    if any(each[0] < 0 for each in counts):
        wrong = [rank for rank, each in enumerate(counts) if each[0] < 0]
        raise CollectiveError(
            "gather_rows needs keep >= 0 and at least `keep` rows in every tensor, which is not true on rank(s) "
            f"{wrong}. Rank {state.process_index} was given keep={keep} and tensors with {rows} rows."
        )
    if not state.use_distributed:
        return recursively_apply(lambda leaf: leaf[:keep] if leaf.dim() and len(leaf) > keep else leaf, data)
    kept = [each[0] for each in counts]
    return recursively_apply(lambda leaf: _gather_rows_of_tensor(leaf, kept, state), data)


def gather_object(object: Any) -> list[Any]:
    """Collect picklable Python objects from all processes into one list, in rank order.

    Args:
        object: A list or tuple whose items are collected. Any other object counts as a list with one item.

    Returns:
        One flat list with the items of all processes.

    Raises:
        DataError: If an object cannot be pickled, or another process cannot import its class.
    """
    items = list(object) if isinstance(object, (list, tuple)) else [object]
    state = PartialState()
    if not state.use_distributed:
        return items
    if state.debug:
        verify_operation("gather_object", None, state)
    collected: list[Any] = [None] * state.num_processes
    try:
        call_collective("gather_object", state, dist.all_gather_object, collected, items)
    except (PicklingError, AttributeError, TypeError) as error:  # pickle raises any of them for unpicklable objects
        raise cannot_be_sent("gather_object", state, error) from error
    return [item for each in collected for item in each]


def gather_on_main(blocks: Sequence[Any]) -> list[Any]:
    """Collect the Python objects in `blocks` from all processes on the main process. Others get an empty list.

    One object per process is sent at a time, so that the largest of them bounds the memory of the transfer.

    Args:
        blocks: The objects of this process. Their number may differ between processes.

    Raises:
        DataError: If an object cannot be pickled, or the main process cannot import its class.
    """
    state = PartialState()
    if not state.use_distributed:
        return list(blocks)
    collected: list[Any] = []
    for turn in range(max(gather_object(len(blocks)))):
        received: list[Any] | None = [None] * state.num_processes if state.is_main_process else None
        try:
            call_collective("gather_on_main", state, dist.gather_object, blocks[turn : turn + 1], received, dst=0)
        except (PicklingError, AttributeError, TypeError) as error:
            raise cannot_be_sent("gather_on_main", state, error) from error
        collected += [block for each in received or () for block in each]
    return collected


def cannot_be_sent(operation: str, state: PartialState, error: Exception) -> DataError:
    return DataError(
        f"{operation} on rank {state.process_index}: the object cannot be sent to other processes: "
        f"{error}. Use tensors, numbers, strings and containers of them, or objects whose class is defined at "
        "the top level of a module."
    )


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """Combine tensors element-wise across all processes by mean (the default), sum, maximum or minimum.

    Half-precision tensors are summed in float32. Each tensor keeps its dtype, so reductions whose result may not fit
    the dtype are refused: the mean of integers, and the sum or mean of booleans. For booleans, `"max"` is *any* and
    `"min"` is *all*.

    Args:
        tensor: A nested structure of tensors with equal shapes on all processes.
        reduction: `"mean"`, `"sum"`, `"max"`, `"min"`, or `"none"` to skip the communication.
        scale: Factor by which the result is multiplied.

    Returns:
        The structure with new tensors. The input tensors are not changed.

    Raises:
        ConfigurationError: If the reduction has another name.
        DataError: If a tensor's dtype cannot hold the result, or the structure holds something other than tensors.
        CollectiveError: If another process has exited, or in debug mode if shapes differ.
    """
    if reduction not in _REDUCTIONS:
        raise ConfigurationError(
            f"Unknown reduction {reduction!r}. Allowed: {', '.join(_REDUCTIONS)}."
            + nearest(str(reduction), _REDUCTIONS),
        )
    state = PartialState()
    if state.debug and state.use_distributed and reduction != "none":
        verify_operation("reduce", tensor, state)
    return recursively_apply(_reduce_tensor, tensor, reduction, scale, state, error_on_other_type=True)


def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """Overwrite the tensors on all processes with those of the process `from_process`, and return them.

    Args:
        tensor: A nested structure of tensors with equal shapes and dtypes on all processes. The tensors are overwritten
            in place.
        from_process: The rank that sends its tensors.

    Returns:
        `tensor`.

    Raises:
        ConfigurationError: If there is no such rank.
        DataError: If the structure holds something that is not a tensor.
        CollectiveError: If another process has exited, or in debug mode if shapes differ.
    """
    state = PartialState()
    _check_rank(from_process, state)
    if not state.use_distributed:
        return tensor
    if state.debug:
        verify_operation("broadcast", tensor, state)
    return recursively_apply(_broadcast_tensor, tensor, from_process, state, error_on_other_type=True)


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Broadcast a list of Python objects from one process to the lists of all other processes, in place.

    Args:
        object_list: A list of picklable objects with equal length on all processes. Its items are overwritten.
        from_process: The rank that sends its objects.

    Returns:
        `object_list`.

    Raises:
        ConfigurationError: If there is no such rank.
    """
    state = PartialState()
    _check_rank(from_process, state)
    if state.use_distributed:
        if state.debug:
            verify_operation("broadcast_object_list", [None] * len(object_list), state)
        call_collective("broadcast_object_list", state, dist.broadcast_object_list, object_list, src=from_process)
    return object_list


def pad_across_processes(tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
    """Pad tensors to the largest size on any process along one dimension, so that they can be gathered.

    Args:
        tensor: A nested structure of tensors with equal numbers of dimensions on all processes.
        dim: The dimension to pad. A tensor without this dimension is not changed.
        pad_index: The value to pad with.
        pad_first: Pad at the start instead of the end.

    Returns:
        The structure with padded tensors.

    Raises:
        DataError: If the structure holds something that is not a tensor.
        CollectiveError: If another process has exited, or in debug mode if the structures differ.
    """
    state = PartialState()
    if not state.use_distributed:
        return tensor
    if state.debug:
        verify_operation("pad_across_processes", tensor, state, ignore="sizes")
    sizes: list[int] = []

    def record_size(leaf: Tensor) -> None:
        if -leaf.dim() <= dim < leaf.dim():
            sizes.append(leaf.size(dim))

    recursively_apply(record_size, tensor, error_on_other_type=True)
    longest = iter([max(column) for column in zip(*_exchange_integers(sizes, state), strict=True)])

    def pad(leaf: Tensor) -> Tensor:
        if not -leaf.dim() <= dim < leaf.dim():
            return leaf
        missing = next(longest) - leaf.size(dim)
        if missing == 0:
            return leaf
        shape = list(leaf.shape)
        shape[dim] = missing
        padding = leaf.new_full(shape, pad_index)
        return torch.cat([padding, leaf] if pad_first else [leaf, padding], dim=dim)

    return recursively_apply(pad, tensor)


def _gather_tensor(tensor: Tensor, state: PartialState) -> Tensor:
    tensor = tensor.detach()
    if tensor.dim() == 0:
        tensor = tensor[None]
    # Send bytes: some backends lack some dtypes, and an all-gather computes nothing.
    source = _to_backend_device(tensor, state).resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    target = source.new_empty(state.num_processes * source.numel())
    call_collective("gather", state, _all_gather, target, source)
    shape = (state.num_processes * tensor.size(0), *tensor.shape[1:])
    return target.view(tensor.dtype).view(shape).to(tensor.device)


def _gather_rows_of_tensor(tensor: Tensor, counts: Sequence[int], state: PartialState) -> Tensor:
    if tensor.dim() == 0:
        return _gather_tensor(tensor, state)
    most, mine = max(counts), counts[state.process_index]
    rows = tensor.detach()[:most]
    if rows.size(0) < most:
        # All-gather needs equal shapes on all ranks. The padding is cut off again below.
        padding = rows.new_zeros((most - rows.size(0), *rows.shape[1:]))
        rows = torch.cat([rows[:mine], padding])
    gathered = _gather_tensor(rows, state)
    if all(count == most for count in counts):
        return gathered
    return torch.cat([gathered[rank * most : rank * most + count] for rank, count in enumerate(counts)])


def _reduce_tensor(tensor: Tensor, reduction: str, scale: float, state: PartialState) -> Tensor:
    _check_dtype(tensor.dtype, reduction, scale)
    operation = _REDUCTIONS[reduction]
    if operation is None or not state.use_distributed:
        return tensor if scale == 1 else tensor * scale
    wire = _to_backend_device(tensor.detach(), state)
    dtype = _REDUCED_AS.get(tensor.dtype, tensor.dtype)
    total = wire.to(dtype, copy=True, memory_format=torch.contiguous_format)
    call_collective("reduce", state, dist.all_reduce, total, op=operation)
    # Not ReduceOp.AVG, which gloo lacks.
    if reduction == "mean":
        total /= state.num_processes
    if scale != 1:
        total *= scale
    return total.to(tensor.device, tensor.dtype)


def _check_dtype(dtype: torch.dtype, reduction: str, scale: float) -> None:
    if dtype.is_complex:
        fits = reduction not in ("max", "min")
    elif dtype.is_floating_point:
        fits = True
    else:
        fits = reduction != "mean" and scale == 1 and not (dtype is torch.bool and reduction == "sum")
    if not fits:
        what = f"{reduction} of {dtype}" + (f" times {scale}" if scale != 1 else "")
        raise DataError(
            f"reduce keeps the dtype of tensors, but the {what} may not fit into it. Call tensor.float() or "
            "tensor.long() first, or use reduction='sum' and divide the result."
        )


def _broadcast_tensor(tensor: Tensor, from_process: int, state: PartialState) -> Tensor:
    target = tensor.detach()
    wire = _to_backend_device(target, state).contiguous()
    # Send bytes: some backends lack some dtypes.
    content = wire.view(-1).view(torch.uint8)
    call_collective("broadcast", state, dist.broadcast, content, src=from_process)
    # `wire` is a copy if the tensor was moved to the CPU or was not contiguous.
    if wire.data_ptr() != target.data_ptr():
        target.copy_(wire)
    return tensor


def _exchange_integers(values: Sequence[int], state: PartialState) -> list[list[int]]:
    if not state.use_distributed:
        return [list(values)]
    # If the group has gloo for CPU tensors, use it: it does not synchronize with the device.
    beside = "cpu" in str(dist.get_backend_config())
    own = torch.tensor(values, dtype=torch.int64, device="cpu" if beside else state.device)
    everyone = own.new_empty(state.num_processes * len(values))
    call_collective("exchange of sizes", state, _all_gather, everyone, own)
    rows: list[list[int]] = everyone.view(state.num_processes, len(values)).tolist()
    return rows


def _to_backend_device(tensor: Tensor, state: PartialState) -> Tensor:
    # Gloo only sends CPU tensors.
    return tensor.cpu() if state.backend == "gloo" and tensor.device.type != "cpu" else tensor


def _check_rank(rank: int, state: PartialState) -> None:
    if not 0 <= rank < state.num_processes:
        raise ConfigurationError(
            f"from_process={rank} is not a rank of this run, which has ranks 0 to {state.num_processes - 1}.",
        )
