"""Which storage a path or URL is on."""

from __future__ import annotations

import os
import re

from drivetrain.checkpoint.storage import LocalStorage, Storage

# pathlib makes one slash of two, so a URL that went through a Path is known by one as well.
_URL = re.compile(r"^([A-Za-z][A-Za-z0-9+.\-]+):/+")


def storage_of(path: str | os.PathLike[str]) -> tuple[Storage, str]:
    """The storage that a path is on, and the path as that storage takes it.

    Args:
        path: A local path, `file://...`, or a URL of a file system of fsspec, such as `s3://bucket/run` or `memory://run`.
    """
    text = os.fspath(path)
    match = _URL.match(text)
    if match is None:
        return LocalStorage(), os.path.abspath(os.path.expanduser(text))
    protocol, rest = match[1], text[match.end() :].rstrip("/")
    if protocol in ("file", "local"):
        return LocalStorage(), "/" + rest
    from drivetrain.checkpoint.remote import FsspecStorage

    url = f"{protocol}://{rest}"
    return FsspecStorage(url), url
