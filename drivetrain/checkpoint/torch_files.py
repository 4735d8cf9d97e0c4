"""Safe reading of files from `torch.save` and of `torch.distributed.checkpoint` folders (`.metadata`, `*.distcp`).

Torch's own reader unpickles `.metadata`, which can run arbitrary code from the file. This module uses an unpickler that
creates only torch's own record classes, and reads each entry of a `.distcp` file with `weights_only`.
"""

from __future__ import annotations

import collections
import io
import os
import pathlib
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from drivetrain.runtime.errors import CheckpointError, DamagedCheckpointError

# Reading pickles of other tools without executing code from them


def read_pickled(
    path: str | os.PathLike[str],
    allowed: list[Any] | None = None,
    data: BinaryIO | None = None,
    mapped: bool = False,
) -> Any:
    # Only tensors, plain values and the classes in `allowed` are loaded, so no code in the file runs.
    # torch can map only files in its zip format into memory.
    mapped = mapped and data is None and zipfile.is_zipfile(path)
    try:
        with torch.serialization.safe_globals(allowed or []):
            return torch.load(path if data is None else data, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{os.fspath(path)} contains objects that are not tensors or plain values. Loading these could run code: "
            f"{str(error).splitlines()[0]}"
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        raise CheckpointError(f"{os.fspath(path)} cannot be read: {error}") from error


def read_objects(path: str | os.PathLike[str], data: BinaryIO | None = None) -> Any:
    # Runs code in the file, which must be trusted.
    try:
        return torch.load(path if data is None else data, map_location="cpu", weights_only=False)
    except Exception as error:  # constructors of unpickled objects can raise anything
        raise CheckpointError(f"{os.fspath(path)} cannot be read: {type(error).__name__}: {error}") from error


def check_parts(path: str | os.PathLike[str]) -> None:
    # `torch.load` does not compare a file's parts with the checksums that `torch.save` has stored.
    name = os.fspath(path)
    try:
        with zipfile.ZipFile(name) as archive:
            damaged = archive.testzip()
    except (OSError, zipfile.BadZipFile, EOFError) as error:
        raise DamagedCheckpointError(f"{name} is damaged: {error}.") from error
    if damaged is not None:
        raise DamagedCheckpointError(f"{name} is damaged: {damaged} in it does not match its checksum.")


def plain_classes() -> list[Any]:
    # Unpickling these classes runs no code from a file.
    # NumPy 2 has moved these functions, and files may use either name.
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
    """Return the names in a file of `torch.save` that are not safe to unpickle."""
    try:
        with torch.serialization.safe_globals(plain_classes()):
            found = torch.serialization.get_unsafe_globals_in_checkpoint(source)
    except (ValueError, RuntimeError, OSError, EOFError, pickle.UnpicklingError):
        found = []
    # The caller reads the opened file again from its start.
    if not isinstance(source, str | os.PathLike):
        source.seek(0)
    return sorted(found)


METADATA = ".metadata"

_RECORDS = "torch.distributed.checkpoint.metadata"
_ALLOWED = {
    *((_RECORDS, name) for name in ("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex")),
    *((_RECORDS, name) for name in ("StorageMeta", "TensorProperties", "TensorStorageMetadata")),
    (_RECORDS, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
}


_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")


def bare_name(name: str) -> str:
    """Remove the prefixes that wrappers such as FSDP add to a parameter's name."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


class TorchShards:
    """Reader of a checkpoint directory in the format of `torch.distributed.checkpoint`."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        found = _read_metadata(self.directory / METADATA)
        described = found.state_dict_metadata
        self.tensors: dict[str, Any] = {name: one for name, one in described.items() if hasattr(one, "chunks")}
        self._values = [name for name in described if name not in self.tensors]
        self._paths: Mapping[str, tuple[Any, ...]] = found.planner_data or {}
        self._places: dict[str, dict[tuple[int, ...], Any]] = {}
        for index, place in (found.storage_data or {}).items():
            self._places.setdefault(index.fqn, {})[tuple(index.offset or ())] = place

    @staticmethod
    def is_here(directory: str | os.PathLike[str]) -> bool:
        return (Path(directory) / METADATA).is_file()

    def names_below(self, part: str) -> dict[str, str]:
        paths = {name: self._path_of(name) for name in self.tensors}
        return {name: ".".join(map(str, path[1:])) for name, path in paths.items() if path[0] == part}

    def tensor(self, name: str) -> Tensor:
        """Return a whole tensor of the checkpoint, assembled from all its shards."""
        described = self.tensors[name]
        whole = torch.empty(described.size, dtype=described.properties.dtype)
        filled = 0
        for chunk in described.chunks:
            part = self._read(name, tuple(chunk.offsets))
            if not isinstance(part, Tensor) or part.shape != chunk.sizes:
                raise CheckpointError(f"{self.directory} contains no part of {name} of shape {tuple(chunk.sizes)}.")
            ends = [start + size for start, size in zip(chunk.offsets, chunk.sizes, strict=True)]
            whole[tuple(map(slice, chunk.offsets, ends))].copy_(part.detach())
            filled += part.numel()
        # Otherwise missing parts would leave uninitialized memory in the tensor.
        if filled != whole.numel():
            raise CheckpointError(f"{self.directory} has only {filled} of the {whole.numel()} elements of {name}.")
        return whole

    def whole(self) -> dict[str, Any]:
        """Return the whole content of the checkpoint, nested as it was saved."""
        nested: dict[Any, Any] = {}
        for name in self.tensors:
            _put(nested, self._path_of(name), self.tensor(name))
        for name in self._values:
            _put(nested, self._path_of(name), self._read(name, ()))
        return _with_lists(nested)  # type: ignore[no-any-return]

    def _path_of(self, name: str) -> tuple[Any, ...]:
        return tuple(self._paths.get(name, (name,)))

    def _read(self, name: str, offsets: tuple[int, ...]) -> Any:
        place = self._places.get(name, {}).get(offsets)
        if place is None:
            raise CheckpointError(f"The metadata in {self.directory} lists no position of {name}.")
        path = self.directory / str(place.relative_path)
        # A path in the metadata must not lead out of the folder.
        if path.parent != self.directory or getattr(place, "transform_descriptors", None):
            raise CheckpointError(f"{self.directory} stores {name} in an unsupported form.")
        try:
            with path.open("rb") as file:
                file.seek(place.offset)
                stored = file.read(place.length)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from error
        return read_pickled(path, data=io.BytesIO(stored))


class _UnknownRecord(pickle.UnpicklingError): ...


class _Records(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        # dtypes are pickled by name, such as `torch.float32`.
        if (module, name) in _ALLOWED or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise _UnknownRecord(f"{module}.{name}")


def _read_metadata(path: Path) -> Any:
    import torch.distributed.checkpoint.metadata as records

    try:
        with path.open("rb") as file:
            found = _Records(file).load()
    except _UnknownRecord as error:
        raise CheckpointError(
            f"{path} contains objects that do not belong to torch's checkpoint metadata. Loading these could run code: "
            f"{error}"
        ) from error
    except (OSError, EOFError, ValueError, TypeError, LookupError, AttributeError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, records.Metadata):
        raise CheckpointError(f"{path} is not a metadata file of torch.distributed.checkpoint.")
    return found


def _put(nested: dict[Any, Any], path: tuple[Any, ...], value: Any) -> None:
    for part in path[:-1]:
        nested = nested.setdefault(part, {})
    nested[path[-1]] = value


def _with_lists(nested: Any) -> Any:
    if not isinstance(nested, dict):
        return nested
    # Integers in a path are positions in a list.
    if nested and all(isinstance(key, int) for key in nested):
        return [_with_lists(nested[key]) for key in sorted(nested)]
    return {key: _with_lists(value) for key, value in nested.items()}


# States of optimizers in other tools' files, which identify parameters by position


BY_POSITION = "#"
"""Prefix of a parameter's key in an optimizer's state that identifies parameters by position."""


def by_name_or_position(state: Any, source: str | os.PathLike[str]) -> dict[str, Any]:
    # Parameters without names get keys such as `#0`.
    def key(parameter: Any) -> str:
        return bare_name(parameter) if isinstance(parameter, str) else f"{BY_POSITION}{parameter}"

    try:
        return {
            "state": {key(parameter): dict(value) for parameter, value in state.get("state", {}).items()},
            "param_groups": [{**group, "params": list(map(key, group["params"]))} for group in state["param_groups"]],
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{os.fspath(source)} does not contain the state of an optimizer.") from error


def with_positions(state: Mapping[str, Any]) -> dict[str, Any]:
    # torch's optimizers expect positions in place of names.
    positions: dict[str, int] = {}
    groups = []
    for group in state["param_groups"]:
        # torch numbers parameters in the order of the groups.
        numbers = [positions.setdefault(name, len(positions)) for name in group["params"]]
        groups.append({**group, "params": numbers})
    return {
        "state": {positions[name]: dict(value) for name, value in state["state"].items() if name in positions},
        "param_groups": groups,
    }


def named_by_position(saved: Mapping[str, Any], groups: list[list[str]]) -> dict[str, Any]:
    """Return an optimizer's saved state with the parameters' names in place of their positions.

    Args:
        saved: The state, as this module or another checkpoint format provides it. It is not modified.
        groups: The names of the optimizer's parameters, by parameter group.
    """
    if not holds_positions(saved):
        return dict(saved)
    names = [name for group in groups for name in group]
    positions = [position for group in saved["param_groups"] for position in group["params"]]
    if len(names) != len(positions):
        raise CheckpointError(
            f"The optimizer has {len(positions)} parameters in the checkpoint, but {len(names)} here. Build the "
            "optimizer as in the run that wrote the checkpoint."
        )
    named = dict(zip(positions, names, strict=True))
    return {
        "state": {named[position]: value for position, value in saved["state"].items()},
        "param_groups": [
            {**group, "params": [named[position] for position in group["params"]]} for group in saved["param_groups"]
        ],
    }


def holds_positions(saved: Any) -> bool:
    """Return True if an optimizer's saved state identifies parameters by position instead of by name."""
    groups = saved.get("param_groups", ()) if isinstance(saved, Mapping) else ()
    return any(str(name).startswith(BY_POSITION) for group in groups for name in group["params"])
