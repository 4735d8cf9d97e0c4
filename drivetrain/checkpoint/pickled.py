"""Pickles that other tools wrote, read without executing anything in them."""

from __future__ import annotations

import collections
import os
import pathlib
import pickle
import zipfile
from typing import Any, BinaryIO

import numpy as np
import torch

from drivetrain.checkpoint.errors import DamagedCheckpointError
from drivetrain.runtime.errors import CheckpointError


def read_pickled(
    path: str | os.PathLike[str],
    allowed: list[Any] | None = None,
    data: BinaryIO | None = None,
    mapped: bool = False,
) -> Any:
    """Read what `torch.save` wrote, of tensors and plain values only; nothing in the file is executed.

    Args:
        path: The file.
        allowed: Further classes and functions that may be in it, as `torch.serialization.safe_globals` takes them.
        data: The part of the file to read; all of it if None.
        mapped: Whether tensors are read only as they are used, where the file's layout allows it.

    Raises:
        CheckpointError: The file cannot be read, or holds anything else.
    """
    mapped = mapped and data is None and zipfile.is_zipfile(path)
    try:
        with torch.serialization.safe_globals(allowed or []):
            return torch.load(path if data is None else data, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{os.fspath(path)} holds more than tensors and plain values, which is not read since that could run code: "
            f"{str(error).splitlines()[0]}"
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        raise CheckpointError(f"{os.fspath(path)} cannot be read: {error}") from error


def read_objects(path: str | os.PathLike[str], data: BinaryIO | None = None) -> Any:
    """Read what `torch.save` wrote, objects too. That runs whatever code the file holds.

    Args:
        path: The file.
        data: The opened file; `path` then only names it.

    Raises:
        CheckpointError: It cannot be read, or a class in it cannot be imported.
    """
    try:
        return torch.load(path if data is None else data, map_location="cpu", weights_only=False)
    except Exception as error:  # whatever a class raises as it is made
        raise CheckpointError(f"{os.fspath(path)} cannot be read: {type(error).__name__}: {error}") from error


def check_parts(path: str | os.PathLike[str]) -> None:
    """Compare every part of a file that `torch.save` wrote with its checksum, which `torch.load` does not.

    Raises:
        CheckpointError: A part is damaged.
    """
    name = os.fspath(path)
    try:
        with zipfile.ZipFile(name) as archive:
            damaged = archive.testzip()
    except (OSError, zipfile.BadZipFile, EOFError) as error:
        raise DamagedCheckpointError(f"{name} is damaged: {error}.") from error
    if damaged is not None:
        raise DamagedCheckpointError(f"{name} is damaged: {damaged} in it does not match its checksum.")


def plain_classes() -> list[Any]:
    """Classes and functions that only make plain values: NumPy's, Python's containers, and paths."""
    reconstruct = np.zeros(0).__reduce__()[0]
    scalar = np.float64(0).__reduce__()[0]
    return [
        *((reconstruct, f"{package}.multiarray._reconstruct") for package in ("numpy._core", "numpy.core")),
        *((scalar, f"{package}.multiarray.scalar") for package in ("numpy._core", "numpy.core")),
        np.ndarray,
        np.dtype,
        *(type(np.dtype(kind)) for kind in (np.uint32, np.float32, np.float64, np.int32, np.int64, np.bool_)),
        collections.Counter,
        collections.defaultdict,
        collections.deque,
        dict,
        pathlib.PosixPath,
        # the name since Python 3.13
        (pathlib.PosixPath, "pathlib._local.PosixPath"),
    ]


def refused_classes(source: str | os.PathLike[str] | BinaryIO) -> list[str]:
    """The classes and functions that a file needs and `read_pickled` with `plain_classes` does not make.

    Args:
        source: The file, opened or not. One that is not in torch's present form has none; `read_pickled` refuses it.
    """
    try:
        with torch.serialization.safe_globals(plain_classes()):
            found = torch.serialization.get_unsafe_globals_in_checkpoint(source)
    except (ValueError, RuntimeError, OSError, EOFError, pickle.UnpicklingError):
        found = []
    if not isinstance(source, str | os.PathLike):
        source.seek(0)
    return sorted(found)
