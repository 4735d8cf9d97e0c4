"""What glibc's allocator does with the memory that tensors on the host free.

As it comes, it returns the top of its heap to the system after large frees. A training step frees and allocates the
same activations again and again, and the system clears each page of them every time: 3 % of a small language model's
step. Kept in the process, freed memory is used again as it is. Blocks of more than 32 MiB are mapped one by one, as
always: kept in the heap too, they would leave gaps that the next ones do not fit into.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache

# Parameters of mallopt(3), from malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGE = 32 << 20  # bytes: glibc's own largest; a larger block is mapped by itself, and unmapped when it is freed
_KEPT = 1 << 30
_SET_BY_USERS = ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")


@cache
def keep_freed_memory() -> bool:
    """Let this process use freed memory again, rather than return it to the system and ask for it again.

    `return_freed_memory` returns it at once. Nothing changes where the C library is not glibc, or where one of its own
    variables is set: `MALLOC_TRIM_THRESHOLD_=131072` keeps glibc's behaviour.

    Returns:
        Whether it was set.
    """
    if any(name in os.environ for name in _SET_BY_USERS) or not _is_glibc():
        return False
    library = ctypes.CDLL(None)
    return bool(library.mallopt(_MMAP_THRESHOLD, _LARGE) and library.mallopt(_TRIM_THRESHOLD, _KEPT))


def return_freed_memory() -> None:
    """Return freed memory to the system, on glibc."""
    if _is_glibc():
        ctypes.CDLL(None).malloc_trim(0)


@cache
def _is_glibc() -> bool:
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    except (AttributeError, ValueError, OSError):  # a system without the name, or without confstr
        return False
