"""Exchange of nested structures between the processes of a run.

Every function here must be called by all processes, takes structures as described in
`drivetrain.runtime.pytrees`, keeps dtypes and devices, and gives every process the same result. In a world of
one nothing is exchanged.

With `DRIVETRAIN_DEBUG=1` the processes first compare what they are about to exchange, and a
`CollectiveError` names the rank that differs, where there would otherwise be a hang or garbage.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Sequence
from pickle import PicklingError
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain.runtime.collective_checks import call_collective, verify_operation
from drivetrain.runtime.errors import CollectiveError, ConfigurationError, DataError, nearest
from drivetrain.runtime.process_group import group_timeout
from drivetrain.runtime.pytrees import recursively_apply
from drivetrain.runtime.state import PartialState

# Torch 2.13 warns at every use of the older name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_REDUCTIONS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "none": None,
}

# What is combined in another dtype than its own: half precision for its range, the others because backends
# do not support them.
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
    """Concatenate the tensors of all processes along their first dimension, in the order of the ranks.

    Args:
        tensor: A nested structure of tensors, of the same shapes on all processes. For tensors whose number
            of rows differs there are `pad_across_processes` and `gather_rows`.

    Returns:
        The structure with tensors of `num_processes` times as many rows. A tensor without dimensions
        becomes one with a row for each process. In a world of one, `tensor` itself.

    Raises:
        DataError: If the structure holds something that is not a tensor.
        CollectiveError: If a peer is gone, or in debug mode if shapes differ.

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
    """Concatenate the first `keep` rows of every process's tensors; `keep` may differ between processes."""
    state = PartialState()
    rows: list[int] = []

    def record_rows(leaf: Tensor) -> None:
        rows.append(leaf.size(0) if leaf.dim() else keep)

    recursively_apply(record_rows, data, error_on_other_type=True)
    if state.use_distributed and state.debug:
        verify_operation("gather_rows", data, state, ignore="rows")
    # A rank that cannot take part informs the others, which would otherwise wait for it.
    count = keep if keep >= 0 and all(size >= keep for size in rows) else -1
    counts = _exchange_integers([count], state)
    if any(each[0] < 0 for each in counts):
        wrong = [rank for rank, each in enumerate(counts) if each[0] < 0]
        raise CollectiveError(
            "gather_rows needs keep >= 0 and at least so many rows in every tensor; not so on rank(s) "
            f"{wrong}. Rank {state.process_index} was asked to keep {keep} of tensors with {rows} rows."
        )
    if not state.use_distributed:
        return recursively_apply(lambda leaf: leaf[:keep] if leaf.dim() and len(leaf) > keep else leaf, data)
    kept = [each[0] for each in counts]
    return recursively_apply(lambda leaf: _gather_rows_of_tensor(leaf, kept, state), data)


def gather_object(object: Any) -> list[Any]:
    """Collect Python objects from all processes, in the order of the ranks.

    Args:
        object: A list or tuple, whose items are collected, or any other object, which counts as a list of
            one. It must be possible to pickle it.

    Returns:
        One flat list of the items of all processes.

    Raises:
        DataError: It cannot be pickled, or its class is not found by the other processes.
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
    except (PicklingError, AttributeError, TypeError) as error:  # pickle raises all of them for what it cannot take
        raise cannot_be_sent("gather_object", state, error) from error
    return [item for each in collected for item in each]


def cannot_be_sent(operation: str, state: PartialState, error: Exception) -> DataError:
    """The error for an object that other processes cannot be given."""
    return DataError(
        f"{operation} on rank {state.process_index}: what it was given cannot be sent to other processes: "
        f"{error}. Give tensors, numbers, strings and containers of them, or objects whose class is defined at "
        "the top of a module."
    )


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """Combine the tensors of all processes, element by element.

    Half precision is added up in single precision. Dtypes are kept, so a reduction whose result would not fit
    the dtype is refused: the mean of integers, and the sum or mean of booleans (`"max"` of them is *any*,
    `"min"` is *all*).

    Args:
        tensor: A nested structure of tensors, of the same shapes on all processes.
        reduction: `"mean"`, `"sum"`, `"max"`, `"min"`, or `"none"`, which leaves each process its
            own.
        scale: What the result is multiplied with.

    Returns:
        The structure with new tensors; the ones given are not changed.

    Raises:
        ConfigurationError: If the reduction has another name.
        DataError: If a tensor's dtype cannot hold the result, or the structure holds something else than
            tensors.
        CollectiveError: If a peer is gone, or in debug mode if shapes differ.
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
    """Give every process the tensors of one of them.

    Args:
        tensor: A nested structure of tensors, of the same shapes and dtypes on all processes. They are
            overwritten.
        from_process: The rank whose tensors all get.

    Returns:
        `tensor`.

    Raises:
        ConfigurationError: If there is no such rank.
        DataError: If the structure holds something that is not a tensor.
        CollectiveError: If a peer is gone, or in debug mode if shapes differ.
    """
    state = PartialState()
    _check_rank(from_process, state)
    if not state.use_distributed:
        return tensor
    if state.debug:
        verify_operation("broadcast", tensor, state)
    return recursively_apply(_broadcast_tensor, tensor, from_process, state, error_on_other_type=True)


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Give every process the Python objects of one of them.

    Args:
        object_list: A list of the same length on all processes. Its items are overwritten; they must be
            possible to pickle.
        from_process: The rank whose objects all get.

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
    """Make the tensors of all processes equally long along one dimension, so that they can be gathered.

    Args:
        tensor: A nested structure of tensors, with as many dimensions on all processes.
        dim: The dimension to pad. A tensor without this dimension stays as it is.
        pad_index: The value to pad with.
        pad_first: Pad at the start instead of the end.

    Returns:
        The structure with tensors as long as the longest of all processes.

    Raises:
        DataError: If the structure holds something that is not a tensor.
        CollectiveError: If a peer is gone, or in debug mode if the structures differ.
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
    """Concatenate one tensor over all processes."""
    tensor = tensor.detach()
    if tensor.dim() == 0:
        tensor = tensor[None]
    # Sent as bytes, since backends lack some dtypes and nothing is computed here.
    source = _on_wire(tensor, state).resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    target = source.new_empty(state.num_processes * source.numel())
    call_collective("gather", state, _all_gather, target, source)
    shape = (state.num_processes * tensor.size(0), *tensor.shape[1:])
    return target.view(tensor.dtype).view(shape).to(tensor.device)


def _gather_rows_of_tensor(tensor: Tensor, counts: Sequence[int], state: PartialState) -> Tensor:
    """Concatenate the first `counts[rank]` rows of one tensor over all processes."""
    if tensor.dim() == 0:
        return _gather_tensor(tensor, state)
    most, mine = max(counts), counts[state.process_index]
    rows = tensor.detach()[:most]
    if rows.size(0) < most:
        padding = rows.new_zeros((most - rows.size(0), *rows.shape[1:]))
        rows = torch.cat([rows[:mine], padding])
    gathered = _gather_tensor(rows, state)
    if all(count == most for count in counts):
        return gathered
    return torch.cat([gathered[rank * most : rank * most + count] for rank, count in enumerate(counts)])


def _reduce_tensor(tensor: Tensor, reduction: str, scale: float, state: PartialState) -> Tensor:
    """Combine one tensor over all processes."""
    _check_dtype(tensor.dtype, reduction, scale)
    operation = _REDUCTIONS[reduction]
    if operation is None or not state.use_distributed:
        return tensor if scale == 1 else tensor * scale
    wire = _on_wire(tensor.detach(), state)
    dtype = _REDUCED_AS.get(tensor.dtype, tensor.dtype)
    total = wire.to(dtype, copy=True, memory_format=torch.contiguous_format)
    call_collective("reduce", state, dist.all_reduce, total, op=operation)
    if reduction == "mean":
        total /= state.num_processes
    if scale != 1:
        total *= scale
    return total.to(tensor.device, tensor.dtype)


def _check_dtype(dtype: torch.dtype, reduction: str, scale: float) -> None:
    """Refuse a reduction whose result this dtype cannot hold, in a world of one as in a larger one."""
    if dtype.is_complex:
        fits = reduction not in ("max", "min")
    elif dtype.is_floating_point:
        fits = True
    else:
        fits = reduction != "mean" and scale == 1 and not (dtype is torch.bool and reduction == "sum")
    if not fits:
        what = f"{reduction} of {dtype}" + (f" times {scale}" if scale != 1 else "")
        raise DataError(
            f"reduce keeps dtypes, and the {what} may not be one of its values. Cast first, with "
            "tensor.float() or tensor.long(), or reduce with 'sum' and divide afterwards."
        )


def _broadcast_tensor(tensor: Tensor, from_process: int, state: PartialState) -> Tensor:
    """Overwrite one tensor with that of `from_process`."""
    target = tensor.detach()
    wire = _on_wire(target, state).contiguous()
    content = wire.view(-1).view(torch.uint8)
    call_collective("broadcast", state, dist.broadcast, content, src=from_process)
    if wire.data_ptr() != target.data_ptr():
        target.copy_(wire)
    return tensor


def _exchange_integers(values: Sequence[int], state: PartialState) -> list[list[int]]:
    """The integers of every process, by rank; each gives as many."""
    if not state.use_distributed:
        return [list(values)]
    # Gloo stands beside the device's backend in the groups made here, and does not wait for the device.
    beside = "cpu" in str(dist.get_backend_config())
    own = torch.tensor(values, dtype=torch.int64, device="cpu" if beside else state.device)
    everyone = own.new_empty(state.num_processes * len(values))
    call_collective("exchange of sizes", state, _all_gather, everyone, own)
    rows: list[list[int]] = everyone.view(state.num_processes, len(values)).tolist()
    return rows


def _on_wire(tensor: Tensor, state: PartialState) -> Tensor:
    """The tensor where the backend can send it: gloo sends from host memory only."""
    return tensor.cpu() if state.backend == "gloo" and tensor.device.type != "cpu" else tensor


def _check_rank(rank: int, state: PartialState) -> None:
    if not 0 <= rank < state.num_processes:
        raise ConfigurationError(
            f"from_process={rank} is no rank of this run, which has ranks 0 to {state.num_processes - 1}.",
        )


# Blocks of results that come to the main process while all processes compute


_OPERATION = "gather of results"
_GROUP, _COUNT, _ABANDONED = "results_group", "results_gathers", "results_abandoned"
_END, _LEFT = -1, -2  # in place of a block's size


class BlockGather:
    """Collects blocks of results on the main process.

    A process sends a block as soon as it has it and waits for no other process before `finish`; how many blocks each
    has may differ. The main process receives them in a thread: in each turn one of every other process, once it has
    one of its own, so that it waits for those that are behind and not for what takes as long everywhere.

    Make it on all processes at once, and end it with `finish` or `abandon`.
    """

    def __init__(self, state: PartialState) -> None:
        self._state = state
        self._blocks: list[Any] = []
        self._sent: list[tuple[Any, Tensor]] = []
        self._turns, self._ending, self._abandoned = threading.Semaphore(0), False, False
        self._error: Exception | None = None
        self._receiver: threading.Thread | None = None
        if not state.use_distributed:
            return
        shared = PartialState.registry()
        self._group = _own_group(state)
        self._tag = shared[_COUNT] = shared.get(_COUNT, 0) + 1  # late messages of one that was abandoned stay apart
        if state.is_main_process:
            self._receiver = threading.Thread(target=self._receive_all, name="gather of results", daemon=True)
            self._receiver.start()

    def add(self, block: Any) -> None:
        """Give a block of this process."""
        if not self._state.use_distributed or self._state.is_main_process:
            self._blocks.append(block)
            self._turns.release()
            return
        try:
            content = pickle.dumps(block, protocol=pickle.HIGHEST_PROTOCOL)
        except (pickle.PicklingError, AttributeError, TypeError) as error:  # pickle raises all of them
            raise cannot_be_sent(_OPERATION, self._state, error) from error
        self._send(torch.tensor([len(content)]))
        self._send(torch.frombuffer(bytearray(content), dtype=torch.uint8))

    def finish(self) -> list[Any]:
        """Wait until all have come."""
        if not self._state.use_distributed:
            return self._blocks
        if self._receiver is None:
            self._send(torch.tensor([_END]))
            for work, _ in self._sent:
                call_collective(_OPERATION, self._state, work.wait)
            return []
        self._ending = True
        self._turns.release()
        self._receiver.join()
        if self._error is not None:
            raise self._error
        return self._blocks

    def abandon(self) -> None:
        """Leave without waiting, after an error; the main process then raises in its `finish`."""
        self._abandoned = True
        if not self._state.use_distributed:
            return
        if self._receiver is None:
            self._send(torch.tensor([_LEFT]))
        else:  # takes what still comes, so that no sender waits
            self._ending = True
            self._turns.release()
        # Gloo reads what is being sent until it is received, or until the group ends.
        PartialState.registry().setdefault(_ABANDONED, []).append(self)

    def _send(self, tensor: Tensor) -> None:
        self._sent.append((dist.isend(tensor, 0, group=self._group, tag=self._tag), tensor))

    def _receive_all(self) -> None:
        """Receive until no process has more."""
        try:
            left = list(range(1, self._state.num_processes))
            while left:
                if not self._ending:
                    self._turns.acquire()
                left = [rank for rank in left if self._receive(rank)]
        except Exception as error:
            self._error = error

    def _receive(self, rank: int) -> bool:
        """Receive one block of a process; returns False where it has no more."""
        size = int(self._received(torch.zeros(1, dtype=torch.int64), rank))
        if size == _END:
            return False
        if size == _LEFT:
            raise CollectiveError(f"{_OPERATION}: rank {rank} has left before its last block; its own error says why.")
        content = self._received(torch.empty(size, dtype=torch.uint8), rank)
        if self._abandoned:
            return True
        buffer: Any = content.numpy()
        try:
            self._blocks.append(pickle.loads(buffer))
        except (pickle.UnpicklingError, AttributeError, TypeError, ImportError) as error:
            raise cannot_be_sent(_OPERATION, self._state, error) from error
        return True

    def _received(self, tensor: Tensor, rank: int) -> Tensor:
        call_collective(_OPERATION, self._state, dist.recv, tensor, rank, group=self._group, tag=self._tag)
        return tensor


def _own_group(state: PartialState) -> Any:
    """A gloo group for results alone, made once: they are sent beside what the processes exchange as they compute."""
    shared = PartialState.registry()
    if _GROUP not in shared:
        shared[_GROUP] = dist.new_group(backend="gloo", timeout=group_timeout())
        state.before_leaving(_forget)
    return shared[_GROUP]


def _forget() -> None:
    for name in (_GROUP, _COUNT, _ABANDONED):
        PartialState.registry().pop(name, None)
