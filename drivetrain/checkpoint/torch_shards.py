"""Folders that `torch.distributed.checkpoint` has written (`.metadata`, `*.distcp`), read without executing anything.

Torch's own reader unpickles `.metadata`, which would run whatever code it holds. Here an unpickler reads it that makes
torch's own records only, and each entry of a `.distcp` file is read with `weights_only`.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drivetrain.checkpoint.pickled import read_pickled
from drivetrain.runtime.errors import CheckpointError

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
    """A parameter's name without those of the modules that FSDP, recomputation and compilation put around its own."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


class TorchShards:
    """One such folder.

    Args:
        directory: The local folder.

    Attributes:
        directory: The same.
        tensors: Shapes and dtypes of its tensors by name, as `torch.distributed.checkpoint` describes them.

    Raises:
        CheckpointError: There is none, or it holds anything that is not torch's.
    """

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
        """Whether a local folder is such a one."""
        return (Path(directory) / METADATA).is_file()

    def names_below(self, part: str) -> dict[str, str]:
        """The names of tensors in one part of what was saved, such as `"model"`, and what they are called there."""
        paths = {name: self._path_of(name) for name in self.tensors}
        return {name: ".".join(map(str, path[1:])) for name, path in paths.items() if path[0] == part}

    def tensor(self, name: str) -> Tensor:
        """Read one whole tensor.

        Raises:
            CheckpointError: A part of it is missing or damaged.
        """
        described = self.tensors[name]
        whole = torch.empty(described.size, dtype=described.properties.dtype)
        filled = 0
        for chunk in described.chunks:
            part = self._read(name, tuple(chunk.offsets))
            if not isinstance(part, Tensor) or part.shape != chunk.sizes:
                raise CheckpointError(f"{self.directory} holds no part of {name} of shape {tuple(chunk.sizes)}.")
            ends = [start + size for start, size in zip(chunk.offsets, chunk.sizes, strict=True)]
            whole[tuple(map(slice, chunk.offsets, ends))].copy_(part.detach())
            filled += part.numel()
        if filled != whole.numel():
            raise CheckpointError(f"{self.directory} holds {filled} of the {whole.numel()} elements of {name}.")
        return whole

    def whole(self) -> dict[str, Any]:
        """Read all that was saved, in the nesting that it was saved in."""
        nested: dict[Any, Any] = {}
        for name in self.tensors:
            _put(nested, self._path_of(name), self.tensor(name))
        for name in self._values:
            _put(nested, self._path_of(name), self._read(name, ()))
        return _with_lists(nested)  # type: ignore[no-any-return]

    def _path_of(self, name: str) -> tuple[Any, ...]:
        return tuple(self._paths.get(name, (name,)))

    def _read(self, name: str, offsets: tuple[int, ...]) -> Any:
        """One stored entry: a part of a tensor, or a value."""
        place = self._places.get(name, {}).get(offsets)
        if place is None:
            raise CheckpointError(f"{self.directory} does not say where {name} is.")
        path = self.directory / str(place.relative_path)
        if path.parent != self.directory or getattr(place, "transform_descriptors", None):
            raise CheckpointError(f"{self.directory} keeps {name} in a form that is not read here.")
        try:
            with path.open("rb") as file:
                file.seek(place.offset)
                stored = file.read(place.length)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from error
        return read_pickled(path, data=io.BytesIO(stored))


class _UnknownRecord(pickle.UnpicklingError):
    """A class or function that is not one of torch's records."""


class _Records(pickle.Unpickler):
    """An unpickler of torch's records, which hold no code."""

    def find_class(self, module: str, name: str) -> Any:
        """One of them, or a dtype.

        Raises:
            _UnknownRecord: It is anything else.
        """
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
            f"{path} holds more than torch's description of a checkpoint, which is not read since that could run code: "
            f"{error}"
        ) from error
    except (OSError, EOFError, ValueError, TypeError, LookupError, AttributeError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, records.Metadata):
        raise CheckpointError(f"{path} is no description of a checkpoint by torch.distributed.checkpoint.")
    return found


def _put(nested: dict[Any, Any], path: tuple[Any, ...], value: Any) -> None:
    for part in path[:-1]:
        nested = nested.setdefault(part, {})
    nested[path[-1]] = value


def _with_lists(nested: Any) -> Any:
    """Dicts whose keys are positions as the lists that they were."""
    if not isinstance(nested, dict):
        return nested
    if nested and all(isinstance(key, int) for key in nested):
        return [_with_lists(nested[key]) for key in sorted(nested)]
    return {key: _with_lists(value) for key, value in nested.items()}
