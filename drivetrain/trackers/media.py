"""Images, tables and distributions as the arrays that trackers take, copied so that a run may change its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from drivetrain.runtime.errors import ConfigurationError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_CHANNELS = (1, 3, 4)


def as_images(values: Mapping[str, Any]) -> dict[str, list[NDArray[Any]]]:
    """Return images of every form as lists of byte arrays of shape (H, W, 1), (H, W, 3) or (H, W, 4), by name.

    Raises:
        ConfigurationError: One has another shape.
    """
    return {
        name: [image for each in _several(value) for image in _images(name, each)] for name, value in values.items()
    }


def _several(value: Any) -> Iterable[Any]:
    return value if isinstance(value, (list, tuple)) else [value]


def _images(name: str, value: Any) -> list[NDArray[Any]]:
    import numpy as np

    array = as_array(value)
    if array.ndim == 2:
        array = array[..., None]
        first, last = False, True
    else:
        first, last = array.ndim > 2 and array.shape[-3] in _CHANNELS, array.ndim > 2 and array.shape[-1] in _CHANNELS
    stack = array if array.ndim == 4 else array[None]
    # Where both could be meant, a tensor has its channels first.
    if stack.ndim == 4 and first and (not last or hasattr(value, "detach")):
        stack = stack.transpose(0, 2, 3, 1)
    if stack.ndim != 4 or stack.shape[-1] not in _CHANNELS:
        raise ConfigurationError(
            f"The image {name!r} has the shape {tuple(array.shape)}. Give (H, W), (C, H, W), (H, W, C) with 1, 3 or 4 "
            "channels, or several as (N, C, H, W) or (N, H, W, C).",
            code="DT-018",
        )
    if stack.dtype.kind == "f":
        stack = np.nan_to_num(stack).clip(0, 1) * 255 + 0.5
    elif stack.dtype.kind == "b":
        stack = stack * 255
    return list(stack.clip(0, 255).astype(np.uint8))


def as_array(value: Any) -> NDArray[Any]:
    """Return a tensor, an array, an image or a sequence of numbers as an array of its own."""
    import numpy as np

    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = value.float().numpy() if value.is_floating_point() else value.numpy()
    return np.array(value)


def as_rows(columns: Sequence[str] | None, data: Any) -> tuple[list[str], list[list[Any]]]:
    """Return a table as the names of its columns and its rows.

    Args:
        columns: The names; the first row of `data` if None, or a DataFrame's own.
        data: Rows, or a pandas DataFrame.
    """
    if hasattr(data, "columns") and hasattr(data, "values"):
        names = data.columns if columns is None else columns
        return [str(name) for name in names], [list(row) for row in data.values.tolist()]
    rows = [list(row) for row in data or ()]
    if columns is None:
        columns, rows = (rows[0] if rows else []), rows[1:]
    return [str(name) for name in columns], rows
