"""Files on any file system."""

from __future__ import annotations

import os
from typing import Any


def get_filesystem(path: str | os.PathLike[str], **kwargs: Any) -> Any:
    """The file system of fsspec that a path or URL is on."""
    from fsspec.core import url_to_fs

    return url_to_fs(os.fspath(path), **kwargs)[0]
