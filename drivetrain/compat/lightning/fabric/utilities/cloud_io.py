"""Access to local and remote file systems."""

from __future__ import annotations

import os
from typing import Any


def get_filesystem(path: str | os.PathLike[str], **kwargs: Any) -> Any:
    """Return the fsspec file system of a path or URL."""
    from fsspec.core import url_to_fs

    return url_to_fs(os.fspath(path), **kwargs)[0]
