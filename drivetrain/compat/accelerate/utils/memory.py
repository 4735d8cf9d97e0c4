"""Giving memory back, and batch sizes that fit."""

from __future__ import annotations

import functools
import gc
import inspect
from collections.abc import Callable
from typing import Any

from drivetrain.runtime.devices import available_device_kinds
from drivetrain.runtime.errors import ConfigurationError

_OUT_OF_MEMORY = ("out of memory", "CUDNN_STATUS_NOT_SUPPORTED", "DefaultCPUAllocator: can't allocate memory")


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Give unused memory back to the devices.

    Args:
        garbage_collection: Collect unreachable objects first.
    """
    if garbage_collection:
        gc.collect()
    for kind in available_device_kinds():
        kind.empty_cache()


def release_memory(*objects: Any) -> list[None]:
    """Release objects and give their memory back.

    Args:
        *objects: The caller's references, to be overwritten with what is returned.

    Returns:
        A None for each: `model, optimizer = release_memory(model, optimizer)`.
    """
    count = len(objects)
    del objects
    clear_device_cache(garbage_collection=True)
    return [None] * count


def should_reduce_batch_size(exception: Exception) -> bool:
    """Whether an exception means that memory was exhausted."""
    return isinstance(exception, RuntimeError) and any(text in str(exception) for text in _OUT_OF_MEMORY)


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Any:
    """Decorate a function so that it runs again with a smaller batch where memory was exhausted.

    Args:
        function: Its first parameter is the batch size, which callers leave out.
        starting_batch_size: The first one.
        reduce_batch_size_fn: Returns the next one; nine tenths of the last if None.

    Raises:
        ConfigurationError: No batch size fits, or the caller gave one.
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    first = next(iter(inspect.signature(function).parameters), None)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if first is None or first in kwargs or len(args) >= len(inspect.signature(function).parameters):
            raise ConfigurationError(
                f"{function.__name__} gets its batch size from find_executable_batch_size; leave its first argument "
                "out."
            )
        size = starting_batch_size
        while size > 0:
            clear_device_cache(garbage_collection=True)
            try:
                return function(size, *args, **kwargs)
            except Exception as error:
                if not should_reduce_batch_size(error):
                    raise
            size = int(size * 0.9) if reduce_batch_size_fn is None else reduce_batch_size_fn()
        raise ConfigurationError(f"No batch size down to 1 fits into memory for {function.__name__}.")

    return run
