"""Directories that appear complete or not at all."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def temporary_beside(directory: Path, token: str) -> Path:
    """Where a directory is written before it is published: beside its final name, on the same file system."""
    return directory.parent / f".{directory.name}.{token}.writing"


def new_token() -> str:
    """A name for one write, which no other has."""
    return uuid.uuid4().hex[:12]


def publish(temporary: Path, directory: Path) -> None:
    """Give a finished directory its name, replacing what was there, and make the names durable.

    Args:
        temporary: the finished directory.
        directory: its final name.
    """
    for path in sorted(temporary.rglob("*")):
        if path.is_file():
            _sync(path)
    _sync(temporary)
    if directory.exists():
        old = directory.parent / f".{directory.name}.{new_token()}.replaced"
        os.rename(directory, old)
        os.rename(temporary, directory)
        shutil.rmtree(old, ignore_errors=True)
    else:
        os.rename(temporary, directory)
    _sync(directory.parent)


@contextmanager
def removed_on_error(temporary: Path) -> Iterator[None]:
    """Remove a half-written directory where the body raises."""
    try:
        yield
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
