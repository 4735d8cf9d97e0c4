"""Pickles that other tools wrote, read without executing anything in them."""

from __future__ import annotations

import os
import pickle
from typing import Any, BinaryIO

import torch

from drivetrain.runtime.errors import CheckpointError


def read_pickled(path: str | os.PathLike[str], allowed: list[Any] | None = None, data: BinaryIO | None = None) -> Any:
    """Read what `torch.save` wrote, of tensors and plain values only; nothing in the file is executed.

    Args:
        path: The file.
        allowed: Further classes and functions that may be in it, as `torch.serialization.safe_globals` takes them.
        data: The part of the file to read; all of it if None.

    Raises:
        CheckpointError: The file cannot be read, or holds anything else.
    """
    try:
        with torch.serialization.safe_globals(allowed or []):
            return torch.load(path if data is None else data, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{os.fspath(path)} holds more than tensors and plain values, which is not read since that could run code: "
            f"{str(error).splitlines()[0]}"
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        raise CheckpointError(f"{os.fspath(path)} cannot be read: {error}") from error
