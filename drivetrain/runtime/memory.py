"""Memory: finding a batch size that fits, giving back what objects hold, and what a process takes."""

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
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.host import resident_bytes
from drivetrain.runtime.logging import get_logger
from drivetrain.runtime.pytrees import recursively_apply, send_to_device
from drivetrain.runtime.state import PartialState
from drivetrain.runtime.store_barrier import SharedAttempt

logger = get_logger(__name__)

# Parts of the messages of backends that have no exception of their own.
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
    """Whether an exception is that of a device, or of the host, without memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign.lower() in str(error).lower() for sign in _SIGNS)


class Attempt(NamedTuple):
    """What came of a call that needs memory.

    Attributes:
        enough: Whether memory was enough, on all processes.
        result: What the call returned on this one, where it was.
        failure: That memory lacked on this process, in words; None where it did not.
    """

    enough: bool
    result: Any
    failure: MemoryError | None


def attempt_together(call: Callable[[], Any], what: str, patience: float, releases: bool = True) -> Attempt:
    """Make a call that may lack memory; call it on all processes. Memory that lacks on one has lacked on all."""
    if releases:
        _release()
    shared = SharedAttempt.begin(what, patience)
    result, failure = None, None
    try:
        result = call()
    except Exception as error:
        if not is_out_of_memory(error):
            if shared is not None:
                shared.fail(error)
            raise
        # The exception's frames and arguments hold what the attempt has built.
        failure = MemoryError(f"{type(error).__name__}: {error}")
    enough = failure is None if shared is None else shared.all_had_memory(here=failure is None)
    return Attempt(enough, result if enough else None, failure)


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | Callable[[int], int] | None = None,
    patience: float = 60.0,
) -> Any:
    """Decorate a function whose first argument is the batch size, to try smaller ones as long as memory lacks.

    What it holds is released before each further attempt: build the model and the loaders inside of it. Where an
    Accelerator or a PartialState was made before, every process calls it, and all take the next size where memory lacks
    on one.

    Args:
        function: The function; None where it is used with arguments.
        starting_batch_size: The first batch size.
        reduce_batch_size_fn: Returns the next one, given the last one if it takes an argument; 9/10 of it if None.
        patience: Seconds that a process without memory waits for the others to end the same attempt. They may be in a
            collective that waits for this process, from which nothing calls them back: then it raises.

    Returns:
        The function without its first argument.

    Raises:
        RuntimeError: While it runs: not even a batch of one fits; the last error is its cause.
        CollectiveError: While it runs: another process has failed, or waits for this one, which has no memory.
        ConfigurationError: While it runs: it was given a batch size although it is decorated.

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
            raise ConfigurationError(
                f"{function.__name__} is given its batch size, its first argument, by find_executable_batch_size. Call "
                f"it with the others only: {function.__name__}({', '.join(names[1:])}).",
            )
        size = starting_batch_size
        failure: MemoryError | None = None
        while True:
            if size < 1:
                raise RuntimeError(f"Memory lacks for {function.__name__} with any batch size, even 1.") from failure
            made = attempt_together(functools.partial(function, size, *args, **kwargs), function.__name__, patience)
            if made.enough:
                return made.result
            failure = made.failure or failure
            del made
            smaller = _next(size, reduce_batch_size_fn)
            logger.info("A batch size of %d needs too much memory; trying %d.", size, smaller)
            size = smaller

    return attempt


def _next(size: int, reduce: Callable[..., int] | None) -> int:
    if reduce is None:
        return int(size * 0.9)
    takes = bool(inspect.signature(reduce).parameters)
    smaller = int(reduce(size) if takes else reduce())
    if takes and smaller >= size:
        raise ConfigurationError(f"reduce_batch_size_fn made {smaller} of a batch size of {size}, which is no smaller.")
    return smaller


def release_memory(*objects: Any) -> list[None]:
    """Give back the memory of objects that the caller overwrites with what is returned.

    Args:
        *objects: The caller's references.

    Returns:
        A None for each: `model, optimizer = release_memory(model, optimizer)`.
    """
    count = len(objects)
    del objects
    _release()
    return [None] * count


def _release() -> None:
    gc.collect()
    state = PartialState.existing()
    if state is not None:
        state.kind.empty_cache()


class MemoryUse(NamedTuple):
    """The memory that a process takes, in bytes.

    Attributes:
        current: What its tensors hold on the device; on the CPU its resident memory.
        peak: The most of that, since it was reset; on the CPU since the process began.
        reserved: What the device's allocator holds; 0 where it has none.
        host: The process's resident memory.
    """

    current: int
    peak: int
    reserved: int
    host: int

    @classmethod
    def read(cls, kind: DeviceKind, device: torch.device) -> MemoryUse:
        """Read what this process takes."""
        host = resident_bytes()
        current, peak, reserved = kind.memory_use(device) or (host, max(host, _host_peak()), 0)
        return cls(current, peak, reserved, host)


def _host_peak() -> int:
    """The most resident memory that this process has had."""
    try:
        import resource
    except ImportError:  # Windows
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * unit


class MemoryHistory:
    """The allocations of a device, as torch records them where it can (CUDA), to be written when memory runs out.

    Attributes:
        is_recording: Whether they are being recorded.
    """

    def __init__(self, device: torch.device, max_entries: int) -> None:
        self._functions: Any = getattr(getattr(torch, device.type, None), "memory", None)
        self._max_entries = max_entries
        self.is_recording = False

    def start(self) -> None:
        """Record from here, where it can be."""
        if hasattr(self._functions, "_record_memory_history"):
            self._functions._record_memory_history(max_entries=self._max_entries)
            self.is_recording = True

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write what was recorded; its directory is made."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._functions._dump_snapshot(os.fspath(path))

    def stop(self) -> None:
        """Stop recording."""
        if self.is_recording:
            self.is_recording = False
            self._functions._record_memory_history(enabled=None)


# Results on their way from a device to host memory, several batches at a time


MOST_ITEMS = 32
MOST_BYTES = 64 * 2**20


class HostBlocks:
    """Copies results to host memory as they come, and waits for the device once for each block of them.

    A copy is queued behind what computes its source, so the source may be overwritten afterwards. What is on its way
    is in pinned memory; it is bounded, and what is handed out is not pinned.
    """

    def __init__(self, state: PartialState, most_items: int = MOST_ITEMS, most_bytes: int = MOST_BYTES) -> None:
        self._kind = state.kind
        self._most_items, self._most_bytes = most_items, most_bytes
        self._items: list[tuple[Any, Callable[[Any], Any] | None]] = []
        self._devices: set[torch.device] = set()
        self._bytes = 0

    def add(self, item: Any, cut: Callable[[Any], Any] | None = None) -> list[Any]:
        """Take a nested structure of tensors."""
        own: set[torch.device] = set()

        def measure(leaf: Tensor) -> Tensor:
            self._bytes += leaf.nbytes
            if leaf.device.type != "cpu":
                own.add(leaf.device)
            return leaf

        recursively_apply(measure, item)
        # Of a device of another kind there is nothing to wait with.
        queued = own if all(device.type == self._kind.name for device in own) else set()
        self._items.append((send_to_device(item, torch.device("cpu"), non_blocking=bool(queued)), cut))
        self._devices |= queued
        full = len(self._items) >= self._most_items or self._bytes >= self._most_bytes
        return self.take() if full else []

    def take(self) -> list[Any]:
        """The items that were added since the last block, on the CPU."""
        given, self._items, self._bytes = self._items, [], 0
        for device in self._devices:
            self._kind.synchronize(device)
        items = [item if cut is None else cut(item) for item, cut in given]
        if self._devices:
            self._devices.clear()
            items = [recursively_apply(lambda leaf: leaf.clone() if leaf.is_pinned() else leaf, item) for item in items]
        return items


def parameter_size(layer: torch.nn.Module, name: str, whole: int) -> tuple[int, int]:
    """Elements of a layer's parameter before it was quantised, and the bytes that it takes with its scales."""
    # Not by item, for which ZeRO-3 gathers the parameter if a forward was broken off, though only one process counts.
    parameter: Any = layer._parameters.get(name)
    stored = whole * int(parameter.element_size())
    if name != "weight":
        return whole, stored
    of_4_bits: Any = getattr(layer, "quant_state", None)
    if of_4_bits is not None:  # bitsandbytes' layers, whose parameter is packed
        second = of_4_bits.state2
        scales = [of_4_bits.absmax, *([of_4_bits.offset, second.absmax] if second is not None else [])]
        return math.prod(of_4_bits.shape), stored + _bytes_of(scales)
    if wraps_others(parameter) and not hasattr(parameter, "device_mesh"):  # torchao's, but not a sharded one
        return whole, _bytes_of(stored_pieces(parameter))
    # bitsandbytes' scales of 8 bits are on the weight until the first forward, and then beside it.
    rows: Any = getattr(parameter, "SCB", None)
    rows = getattr(getattr(layer, "state", None), "SCB", None) if rows is None else rows
    return whole, stored + (0 if rows is None else _bytes_of([rows]))


def wraps_others(tensor: Any) -> bool:
    """Whether a tensor holds its values in other tensors: a quantised or a sharded one."""
    return bool(_wraps(tensor))


def stored_pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """What a tensor is stored in: itself, or the tensors within one that wraps others (quantised, sharded)."""
    if not wraps_others(tensor):
        yield tensor
        return
    inner: Any = tensor
    for name in inner.__tensor_flatten__()[0]:
        yield from stored_pieces(getattr(tensor, name))


def _bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
