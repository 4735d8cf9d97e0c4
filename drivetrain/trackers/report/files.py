"""Files that appear complete or not at all."""

from __future__ import annotations

import os
import threading
from pathlib import Path


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write a file beside its name first: a reader, or a killed process, leaves the old one or the new one.

    Args:
        path: The file.
        content: What it holds from then on.
    """
    target = Path(path)
    beside = target.with_name(f".{target.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        beside.write_bytes(content.encode("utf-8", "replace") if isinstance(content, str) else content)
        os.replace(beside, target)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
