"""Free device memory, and find batch sizes that fit."""

from __future__ import annotations

import gc

from drivetrain.runtime.devices import available_device_kinds
from drivetrain.runtime.memory import find_executable_batch_size, release_memory
from drivetrain.runtime.memory import is_out_of_memory as should_reduce_batch_size

__all__ = ["clear_device_cache", "find_executable_batch_size", "release_memory", "should_reduce_batch_size"]


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Free cached memory on all devices, after garbage collection if requested."""
    if garbage_collection:
        gc.collect()
    for kind in available_device_kinds():
        kind.empty_cache()
