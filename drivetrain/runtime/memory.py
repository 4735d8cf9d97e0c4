"""Memory of devices and host: finding a batch size that fits, releasing memory, and measuring it."""

from __future__ import annotations

import functools
import gc
import inspect
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as _wraps

from drivetrain.runtime.devices import DeviceKind
from drivetrain.runtime.errors import ArgumentTypeError, ConfigurationError
from drivetrain.runtime.host import resident_bytes
from drivetrain.runtime.logging import get_logger
from drivetrain.runtime.pytrees import recursively_apply, send_to_device
from drivetrain.runtime.state import PartialState
from drivetrain.runtime.store_barrier import SharedAttempt

logger = get_logger(__name__)

# Message parts of backends without an out-of-memory exception class.
_SIGNS = (
    "out of memory",
    "CUDNN_STATUS_NOT_SUPPORTED",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "can't allocate memory",
    "unable to allocate",
    "NPU out of memory",
    "Not enough memory",
)


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign.lower() in str(error).lower() for sign in _SIGNS)


class Attempt(NamedTuple):
    """Result of a function that all processes have called, and whether any of them ran out of memory.

    Attributes:
        enough: True if memory was sufficient on all processes.
        result: The call's return value on this process, or None if memory was insufficient anywhere.
        failure: The out-of-memory error of this process, without its traceback, or None.
    """

    enough: bool
    result: Any
    failure: MemoryError | None


def attempt_together(call: Callable[[], Any], what: str, patience: float, releases: bool = True) -> Attempt:
    if releases:
        _release()
    # `what` names the call in errors. `patience`: seconds to wait for processes that have not started the call, and,
    # after this one ran out of memory, for those that have not ended it.
    shared = SharedAttempt.begin(what, patience)
    result, failure = None, None
    try:
        result = call()
    except Exception as error:
        if not is_out_of_memory(error):
            if shared is not None:
                shared.fail(error)
            raise
        # Keep only the text: the exception's frames would keep the attempt's tensors alive.
        failure = MemoryError(f"{type(error).__name__}: {error}")
    enough = failure is None if shared is None else shared.all_had_memory(here=failure is None)
    return Attempt(enough, result if enough else None, failure)


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | Callable[[int], int] | None = None,
    patience: float = 60.0,
) -> Any:
    """Decorate a function so that it is retried with smaller batch sizes after running out of memory.

    The function's first argument is the batch size. Memory is released between attempts, so build the model and the
    loaders inside the function. In a distributed run all processes must call it, and they move on to the next size
    together if any of them runs out of memory.

    Args:
        function: The function, or None if the decorator is used with arguments.
        starting_batch_size: The first batch size to try.
        reduce_batch_size_fn: Returns the next batch size. It is called with the last one if it takes an argument. By
            default the size is multiplied by 0.9.
        patience: Seconds that a process which ran out of memory waits for the others to end their attempt. They may be
            blocked in a collective that waits for this process. An error is raised after that time.

    Returns:
        The function without its first argument.

    Raises:
        RuntimeError: When called, if even a batch size of 1 does not fit. The last error is its cause.
        CollectiveError: When called, if another process failed or is blocked in a collective.
        ArgumentTypeError: When called with a batch size, which the decorator supplies.

    Example:
        ```python
        from drivetrain import find_executable_batch_size

        @find_executable_batch_size(starting_batch_size=64)
        def train(batch_size):
            if batch_size > 60:
                raise MemoryError
            return batch_size

        assert train() == 57
        ```
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
            patience=patience,
        )
    names = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def attempt(*args: Any, **kwargs: Any) -> Any:
        if not names or len(args) > len(names) - 1 or names[0] in kwargs:
            raise ArgumentTypeError(
                f"find_executable_batch_size passes the batch size to {function.__name__} as its first argument. Call "
                f"it with the other arguments only: {function.__name__}({', '.join(names[1:])}).",
            )
        size = starting_batch_size
        failure: MemoryError | None = None
        while True:
            if size < 1:
                raise RuntimeError(f"{function.__name__} runs out of memory even with batch size 1.") from failure
            made = attempt_together(functools.partial(function, size, *args, **kwargs), function.__name__, patience)
            if made.enough:
                return made.result
            failure = made.failure or failure
            del made
            smaller = _smaller_batch_size(size, reduce_batch_size_fn)
            logger.info("Out of memory with a batch size of %d. Trying a batch size of %d.", size, smaller)
            size = smaller

    return attempt


def _smaller_batch_size(size: int, reduce: Callable[..., int] | None) -> int:
    if reduce is None:
        return int(size * 0.9)
    takes = bool(inspect.signature(reduce).parameters)
    smaller = int(reduce(size) if takes else reduce())
    if takes and smaller >= size:
        raise ConfigurationError(f"reduce_batch_size_fn returned {smaller} for batch size {size}: it must be smaller.")
    return smaller


def release_memory(*objects: Any) -> list[None]:
    """Free the memory of `objects` and empty the device's cache. Return a None to assign to each variable.

    Args:
        *objects: The objects to release.

    Returns:
        A list of as many Nones: `model, optimizer = release_memory(model, optimizer)`.
    """
    count = len(objects)
    # Otherwise this frame would keep the objects alive during the collection.
    del objects
    _release()
    return [None] * count


def _release() -> None:
    gc.collect()
    state = PartialState.existing()
    if state is not None:
        state.kind.empty_cache()


class MemoryUse(NamedTuple):
    """Memory in bytes that one process uses on its device and on the host.

    Attributes:
        current: Memory allocated by tensors on the device, or the resident memory if the device is the CPU.
        peak: Peak of `current` since the last reset, or since the process started if the device is the CPU.
        reserved: Memory held by the device's caching allocator; 0 if there is none.
        host: Resident memory of the process.
    """

    current: int
    peak: int
    reserved: int
    host: int

    @classmethod
    def read(cls, kind: DeviceKind, device: torch.device) -> MemoryUse:
        host = resident_bytes()
        current, peak, reserved = kind.memory_use(device) or (host, max(host, _host_peak()), 0)
        return cls(current, peak, reserved, host)


def _host_peak() -> int:
    try:
        import resource
    except ImportError:  # Windows
        return 0
    # ru_maxrss is in bytes on macOS and in KiB on Linux.
    unit = 1 if sys.platform == "darwin" else 1024
    return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * unit


class MemoryHistory:
    """Recorder of a device's allocations, for a PyTorch memory snapshot."""

    def __init__(self, device: torch.device, max_entries: int) -> None:
        self._functions: Any = getattr(getattr(torch, device.type, None), "memory", None)
        self._max_entries = max_entries
        self.is_recording = False

    def start(self) -> None:
        if hasattr(self._functions, "_record_memory_history"):
            self._functions._record_memory_history(max_entries=self._max_entries)
            self.is_recording = True

    def write(self, path: str | os.PathLike[str]) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._functions._dump_snapshot(os.fspath(path))

    def stop(self) -> None:
        if self.is_recording:
            self.is_recording = False
            self._functions._record_memory_history(enabled=None)


# Copies of results from a device to the host


MOST_ITEMS = 32
MOST_BYTES = 64 * 2**20


class HostBlocks:
    """Buffer that copies results to the CPU asynchronously, and waits for the device once per block of results.

    Each copy is queued on the stream that computes its source, so the source may be overwritten afterwards. Pending
    copies are in pinned memory of bounded size. Returned tensors are not pinned.
    """

    def __init__(self, state: PartialState, most_items: int = MOST_ITEMS, most_bytes: int = MOST_BYTES) -> None:
        self._kind = state.kind
        self._most_items, self._most_bytes = most_items, most_bytes
        self._items: list[tuple[Any, Callable[[Any], Any] | None]] = []
        self._devices: set[torch.device] = set()
        self._bytes = 0

    def add(self, item: Any, cut: Callable[[Any], Any] | None = None) -> list[Any]:
        own: set[torch.device] = set()

        def measure(leaf: Tensor) -> Tensor:
            self._bytes += leaf.nbytes
            if leaf.device.type != "cpu":
                own.add(leaf.device)
            return leaf

        recursively_apply(measure, item)
        # Only devices of this kind can be synchronized; copies from others must block.
        queued = own if all(device.type == self._kind.name for device in own) else set()
        self._items.append((send_to_device(item, torch.device("cpu"), non_blocking=bool(queued)), cut))
        self._devices |= queued
        full = len(self._items) >= self._most_items or self._bytes >= self._most_bytes
        # The results of a full block, otherwise none.
        return self.take() if full else []

    def take(self) -> list[Any]:
        given, self._items, self._bytes = self._items, [], 0
        for device in self._devices:
            self._kind.synchronize(device)
        items = [item if cut is None else cut(item) for item, cut in given]
        if self._devices:
            self._devices.clear()
            # Pinned memory is scarce, so long-lived results must not keep it.
            items = [recursively_apply(lambda leaf: leaf.clone() if leaf.is_pinned() else leaf, item) for item in items]
        return items


def parameter_size(layer: torch.nn.Module, name: str, parameter: Any, whole: int) -> tuple[int, int]:
    stored = whole * int(parameter.element_size())
    if name != "weight":
        return whole, stored
    of_4_bits: Any = getattr(layer, "quant_state", None)
    if of_4_bits is not None:  # bitsandbytes packs 4-bit parameters
        second = of_4_bits.state2
        scales = [of_4_bits.absmax, *([of_4_bits.offset, second.absmax] if second is not None else [])]
        return math.prod(of_4_bits.shape), stored + _bytes_of(scales)
    if wraps_others(parameter) and not hasattr(parameter, "device_mesh"):  # torchao, but not DTensor
        return whole, _bytes_of(stored_pieces(parameter))
    # bitsandbytes moves its 8-bit scales from the weight to the layer's state in the first forward.
    rows: Any = getattr(parameter, "SCB", None)
    rows = getattr(getattr(layer, "state", None), "SCB", None) if rows is None else rows
    return whole, stored + (0 if rows is None else _bytes_of([rows]))


def wraps_others(tensor: Any) -> bool:
    return bool(_wraps(tensor))


def stored_pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    if not wraps_others(tensor):
        yield tensor
        return
    inner: Any = tensor
    for name in inner.__tensor_flatten__()[0]:
        yield from stored_pieces(getattr(tensor, name))


def _bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
