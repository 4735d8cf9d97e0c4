"""Files of predictions: columns of tensors, with the place of each row in the data."""

from __future__ import annotations

import importlib
import json
import math
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drivetrain.runtime.errors import ConfigurationError, DataError, nearest

FORMATS = ("parquet", "safetensors")
_PATTERNS = ("predictions-*-of-*", "batch-*")


def check_format(name: str | None) -> str:
    """Return the format to write: the one given, or parquet where pyarrow is installed.

    Raises:
        ConfigurationError: If it is unknown, or pyarrow is missing.
    """
    installed = find_spec("pyarrow") is not None
    if name is None:
        return "parquet" if installed else "safetensors"
    if name not in FORMATS:
        raise ConfigurationError(
            f"PredictionWriter(file_format={name!r}): give 'parquet' or 'safetensors'.{nearest(str(name), FORMATS)}",
            code="DT-001",
        )
    if name == "parquet" and not installed:
        raise ConfigurationError(
            "PredictionWriter(file_format='parquet') needs pyarrow: pip install \"drivetrain[parquet]\". Without it "
            "there is 'safetensors'.",
            code="DT-013",
        )
    return name


def remove_old(folder: Path) -> None:
    """Remove the predictions of a run before."""
    for found in _found(folder) + [each for sub in folder.glob("loader-*") for each in _found(sub)]:
        found.unlink()


def write(columns: dict[str, Tensor], path: Path, file_format: str) -> None:
    """Write columns to a file that appears complete.

    Args:
        columns: Tensors on the CPU, of as many rows each.
        path: The file, without its extension; its directory is made.
        file_format: `"parquet"` or `"safetensors"`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    final = path.with_name(f"{path.name}.{file_format}")
    beside = path.with_name(f".{os.getpid()}-{final.name}")
    if file_format == "parquet":
        _write_parquet(columns, beside)
    else:
        from safetensors.torch import save_file

        save_file(columns, beside)
    os.replace(beside, final)


def read(folder: Path) -> dict[str, Tensor]:
    """Return the columns of a directory's files, in the order of the data, each row once.

    Raises:
        DataError: There are none.
    """
    found = _found(folder)
    whole = [each for each in found if each.name.startswith("predictions-")]
    parts = [_read(each) for each in whole or found]
    if not parts:
        raise DataError(f"There are no predictions in {folder}. Give the directory that PredictionWriter wrote.")
    columns = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    order = torch.argsort(columns["index"])
    return {name: value[order] for name, value in columns.items()}


def _found(folder: Path) -> list[Path]:
    return sorted(p for pattern in _PATTERNS for suffix in FORMATS for p in folder.glob(f"{pattern}.{suffix}"))


def _write_parquet(columns: dict[str, Tensor], path: Path) -> None:
    arrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    arrays: list[Any] = []
    shapes: dict[str, list[int]] = {}
    for name, value in columns.items():
        # Arrow has no bfloat16.
        flat = arrow.array((value.float() if value.dtype is torch.bfloat16 else value).reshape(-1).numpy())
        shapes[name] = list(value.shape[1:])
        arrays.append(arrow.FixedSizeListArray.from_arrays(flat, math.prod(shapes[name])) if value.dim() > 1 else flat)
    table = arrow.table(arrays, names=list(columns))
    parquet.write_table(table.replace_schema_metadata({"drivetrain.shapes": json.dumps(shapes)}), path)


def _read(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    table = importlib.import_module("pyarrow.parquet").read_table(path)
    shapes = json.loads(table.schema.metadata[b"drivetrain.shapes"])
    columns = {}
    for name in table.column_names:
        array = table[name].combine_chunks()
        values = array.flatten() if shapes[name] else array
        columns[name] = torch.tensor(values.to_numpy(zero_copy_only=False)).reshape(len(table), *shapes[name])
    return columns
