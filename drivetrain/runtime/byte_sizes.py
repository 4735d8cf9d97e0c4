"""Numbers of bytes as text, such as `"24GB"` and `1.24 GiB`, and those of this machine's memory."""

from __future__ import annotations

import re
from pathlib import Path

from drivetrain.runtime.errors import ConfigurationError

_DECIMAL = {name: 1000**power for power, name in enumerate(("", "K", "M", "G", "T"))}
_BINARY = {f"{name}I": 1024**power for power, name in enumerate(("", "K", "M", "G", "T")) if name}
_NAMES = ("B", "KiB", "MiB", "GiB", "TiB")


def parse_bytes(size: int | str) -> int:
    """Bytes, from a number or from text such as `"5GB"` or `"5G"` (of 1000 MB) or `"500MiB"` (of 1024 KiB).

    The case of letters has no meaning, but for `"Gb"` and its like: these are bits.

    Raises:
        ConfigurationError: It is no size.
    """
    if isinstance(size, int) and not isinstance(size, bool):
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*([KMGT]?I?)B?\s*", str(size), re.IGNORECASE)
    units = _DECIMAL | _BINARY
    if match is None or match[2].upper() not in units:
        raise ConfigurationError(f"{size!r} is no size; give bytes, or text such as '5GB' or '500MiB'.", code="DT-007")
    bits = re.search(r"[KMGT]i?b\s*$", str(size)) is not None  # as Accelerate reads "5Gb"
    return int(float(match[1]) * units[match[2].upper()]) // (8 if bits else 1)


def as_bytes(count: float) -> str:
    """A number of bytes with three digits or so, such as `1.24 GiB` (of 1024 MiB); `parse_bytes` reads it."""
    for unit in _NAMES[:-1]:
        if abs(count) < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} {_NAMES[-1]}"


_GROUP = Path("/sys/fs/cgroup")


def host_memory() -> tuple[int, int]:
    """Bytes of memory that this process can still take and of all there is: the machine's, or its container's."""
    import psutil

    memory = psutil.virtual_memory()
    free, total = int(memory.available), int(memory.total)
    try:
        limit = int((_GROUP / "memory.max").read_text())
        used = int((_GROUP / "memory.current").read_text())
    except (OSError, ValueError):  # no container, no limit ("max"), or another system
        return free, total
    return min(free, max(0, limit - used)), min(total, limit)
