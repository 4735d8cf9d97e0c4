"""Offload folders: weights in files with a JSON index, and their access as memory-mapped tensors."""

from __future__ import annotations

import contextlib
import json
import os
import re
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.checkpoint.export import Weights
from drivetrain.checkpoint.safetensors_file import MappedFile
from drivetrain.checkpoint.tree import Entry, aligned, bytes_of, dtype_name, layout
from drivetrain.runtime.errors import CheckpointError

# Access to a model's tensors


@dataclass(eq=False)
class Place:
    """Reference to one parameter or buffer of a model, through which its tensor can be read and replaced.

    Attributes:
        module: The module.
        name: Name of the attribute.
        is_parameter: True for a parameter, False for a buffer.
    """

    module: nn.Module
    name: str
    is_parameter: bool

    @property
    def tensor(self) -> Tensor:
        held: Any = self._held()[self.name]
        return held  # type: ignore[no-any-return]

    def put(self, tensor: Tensor) -> None:
        self._held()[self.name] = tensor

    def _held(self) -> dict[str, Any]:
        return self.module._parameters if self.is_parameter else self.module._buffers


def places_in(module: nn.Module) -> Iterator[Place]:
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield Place(module, name, True)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            yield Place(module, name, False)


def named_places(model: nn.Module) -> dict[str, Place]:
    # A shared tensor has several names.
    return {
        f"{path}.{place.name}" if path else place.name: place
        for path, module in model.named_modules(remove_duplicate=False)
        for place in places_in(module)
    }


def place_named(model: nn.Module, name: str) -> Place:
    path, _, last = name.rpartition(".")
    module = model.get_submodule(path)
    return Place(module, last, last in module._parameters)


def like(old: Tensor, value: Tensor) -> Tensor:
    if not isinstance(old, nn.Parameter):
        return value
    trainable = old.requires_grad and (value.is_floating_point() or value.is_complex())
    made = nn.Parameter(value, requires_grad=trainable)
    made.__dict__.update(vars(old))
    # The attributes may say that the old tensor is memory-mapped, which the new one need not be.
    forget_mapped(made)
    return made


def set_tensor(model: nn.Module, name: str, value: Tensor) -> None:
    place = place_named(model, name)
    place.put(like(place.tensor, value))


def persistent(model: nn.Module) -> set[str]:
    return set(model.state_dict(keep_vars=True))


INDEX = "index.json"


def offload_weight(
    weight: Tensor, weight_name: str, offload_folder: str | os.PathLike[str], index: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Write a weight to the raw binary file `<name>.dat` in a folder.

    Returns the index with its dtype and shape.

    Args:
        weight: The weight.
        weight_name: Name of the weight.
        offload_folder: The folder.
        index: Index to which the weight's dtype and shape are added. None starts a new one.

    Returns:
        The index.
    """
    found = {} if index is None else index
    _write(_file_within(offload_folder, f"{weight_name}.dat"), [bytes_of(weight)])
    found[weight_name] = {"dtype": dtype_name(weight.dtype), "shape": list(weight.shape)}
    return found


def load_offloaded_weight(weight_file: str | os.PathLike[str], weight_info: Mapping[str, Any]) -> Tensor:
    """Return a memory-mapped tensor of a weight file that was written by `offload_weight`.

    Args:
        weight_file: The file.
        weight_info: Entry of the weight in the index.

    Raises:
        CheckpointError: The file is missing, or shorter than the index requires.
    """
    return _raw_file(weight_file, "weight", weight_info).tensor("weight")


def _file_within(folder: str | os.PathLike[str], name: str, of_links: bool = True) -> Path:
    path = Path(folder, name)
    # The name may contain `..`, and a folder on the way may be a symbolic link.
    leads_out = "\0" in name or os.path.isabs(name) or ".." in re.split(r"[/\\]", name)
    if not leads_out and of_links:
        root, parent = os.path.realpath(folder), os.path.realpath(path.parent)
        leads_out = os.path.commonpath([root, parent]) != root
    if leads_out:
        raise CheckpointError(
            f"{name!r} points outside the folder {os.fspath(folder)}. Rename the weight. Do not load these files "
            "unless you trust their source."
        )
    return path


def _raw_file(path: str | os.PathLike[str], name: str, info: Mapping[str, Any]) -> MappedFile:
    dtype = getattr(torch, str(info["dtype"]), None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"{os.fspath(path)}: the index has the dtype {info['dtype']!r}, which does not exist.")
    return MappedFile(path, Entry(name, dtype, tuple(info["shape"])))


def save_offload_index(index: Mapping[str, Any], offload_folder: str | os.PathLike[str]) -> None:
    """Write or extend the `index.json` of an offload folder.

    Args:
        index: Dict from weight name to dtype and shape, or to the safetensors file. If empty, nothing is written.
        offload_folder: The folder.
    """
    if index:
        known = _read_index(offload_folder) if Path(offload_folder, INDEX).is_file() else {}
        _write(Path(offload_folder, INDEX), [memoryview(json.dumps({**known, **index}, indent=2).encode())])


def _read_index(folder: str | os.PathLike[str]) -> dict[str, Any]:
    path = Path(folder, INDEX)
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} is not a valid index of offloaded weights. Check the path.")
    return found


def _write(path: Path, parts: Iterable[memoryview]) -> None:
    # An existing file may be memory-mapped, so it is replaced and not overwritten.
    written = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(written, "wb") as file:
            for part in parts:
                file.write(part)
        os.replace(written, path)
    except OSError as error:
        raise CheckpointError(f"{path} could not be written: {error.strerror or error}.") from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            written.unlink()


def offload_state_dict(save_dir: str | os.PathLike[str], state_dict: Mapping[str, Tensor]) -> None:
    """Write each tensor of a state dict to its own file in a folder, with an index.

    Args:
        save_dir: The folder.
        state_dict: Dict from name to tensor.
    """
    index: dict[str, Any] = {}
    for name, weight in state_dict.items():
        offload_weight(weight, name, save_dir, index)
    save_offload_index(index, save_dir)


class OffloadedWeightsLoader(Mapping[str, Tensor]):
    """Mapping of weights by name, which are in memory or read from a folder on access.

    Args:
        state_dict: Weights in memory.
        save_folder: Folder in the format of `offload_state_dict`.
        index: Dict from name to dtype and shape, or to a safetensors file and the name in it. None reads the folder's
            index.
        device: Device to copy weights of safetensors files to on access. None returns memory-mapped tensors.

    Raises:
        CheckpointError: The folder has no index.
    """

    def __init__(
        self,
        state_dict: Mapping[str, Tensor] | None = None,
        save_folder: str | os.PathLike[str] | None = None,
        index: Mapping[str, Any] | None = None,
        device: torch.device | str | int | None = None,
    ) -> None:
        self.state_dict = {} if state_dict is None else state_dict
        self.save_folder, self.device = save_folder, device
        if index is None:
            index = {} if save_folder is None else _read_index(save_folder)
        self.index = dict(index)
        self._files: dict[str, MappedFile] = {}

    def __getitem__(self, key: str) -> Tensor:
        if key in self.state_dict:
            return self.state_dict[key]
        file, name = self.place(key)
        weight = file.tensor(name)
        moved = self.device is not None and "safetensors_file" in self.index[key]
        dtype = self.index[key].get("dtype")
        if moved or (dtype is not None and dtype != dtype_name(weight.dtype)):
            return weight.to(device=self.device if moved else None, dtype=getattr(torch, str(dtype), None))
        return weight

    def place(self, key: str) -> tuple[MappedFile, str]:
        info = self.index[key]
        name = str(info.get("weight_name", key))
        if "safetensors_file" in info:
            # Indices of `disk_offload` may refer to the checkpoint's own files by absolute paths.
            path = str(info["safetensors_file"])
            if not os.path.isabs(path):
                path = str(_file_within(self.save_folder or ".", path, of_links=False))
            if path not in self._files:
                self._files[path] = MappedFile(path)
            if name not in self._files[path].placed:
                raise CheckpointError(f"The index refers to {name} in {path} for {key}, but the file has no such name.")
        else:
            path = str(_file_within(self.save_folder or ".", f"{key}.dat"))
            if path not in self._files:
                self._files[path] = _raw_file(path, name, info)
        return self._files[path], name

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys((*self.state_dict, *self.index)))

    def __len__(self) -> int:
        return len(dict.fromkeys((*self.state_dict, *self.index)))


class FolderWeights(Weights):
    def __init__(self, folder: str | os.PathLike[str] | None, index: Mapping[str, Any] | None) -> None:
        self.where = "the index given" if folder is None else os.fspath(folder)
        self._loader = OffloadedWeightsLoader(save_folder=folder, index=index)
        places = {name: self._loader.place(name) for name in self._loader}
        self.entries = {name: file.placed[key].entry for name, (file, key) in places.items()}

    def __getitem__(self, name: str) -> Tensor:
        return self._loader[name]

    def mapped(self, name: str) -> tuple[MappedFile, str] | None:
        # None: the weight is not aligned in the file, so it must be copied.
        file, key = self._loader.place(name)
        return (file, key) if file.is_aligned(key) else None


class PrefixedDataset(Mapping[str, Any]):
    """Read-only view of the items of `dataset` whose keys start with `prefix`, which is removed from the keys.

    Args:
        dataset: The mapping.
        prefix: The prefix.
    """

    def __init__(self, dataset: Mapping[str, Any], prefix: str) -> None:
        self.dataset, self.prefix = dataset, prefix

    def __getitem__(self, key: str) -> Any:
        return self.dataset[f"{self.prefix}{key}"]

    def __iter__(self) -> Iterator[str]:
        return (key[len(self.prefix) :] for key in self.dataset if key.startswith(self.prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def extract_submodules_state_dict(state_dict: Mapping[str, Any], submodule_names: Sequence[str]) -> dict[str, Any]:
    """Return the part of a state dict that belongs to the named submodules or tensors.

    Args:
        state_dict: Dict from name to value.
        submodule_names: Names of the modules or tensors.
    """
    return {
        name: value
        for name, value in state_dict.items()
        if any(name == module or name.startswith(f"{module}.") for module in submodule_names)
    }


def load_offloaded_weights(model: nn.Module, index: Mapping[str, Any], offload_folder: str | os.PathLike[str]) -> None:
    """Copy weights from an offload folder into a model, as CPU tensors.

    Args:
        model: The model.
        index: Index of the weights to load, as `offload_weight` returns it.
        offload_folder: The folder.
    """
    weights = OffloadedWeightsLoader(save_folder=offload_folder, index=index)
    for name in index:
        set_tensor(model, name, weights[name].clone())


def write_offloaded(
    entries: Sequence[Entry], read: Callable[[str], Tensor], folder: str | os.PathLike[str]
) -> MappedFile:
    # `entries` describes the tensors, and `read` returns the tensor of a name.
    # Tensors at aligned offsets can be memory-mapped.
    ordered = [entries[position] for position in aligned(entries)]
    header, _ = layout(ordered, {"format": "pt"})
    # The name depends on the header only, so that other files in the folder, which may be mapped, stay as they are.
    number = zlib.crc32(header)
    path = Path(folder, f"offloaded-{number:08x}.safetensors")
    _write(path, chain([memoryview(header)], (bytes_of(read(entry.name)) for entry in ordered)))
    index = {
        entry.name: {
            "safetensors_file": path.name,
            "weight_name": entry.name,
            "dtype": dtype_name(entry.dtype),
            "shape": list(entry.shape),
        }
        for entry in ordered
    }
    save_offload_index(index, folder)
    return MappedFile(path)


# Tensors whose memory is that of a mapped file


_RANGE = "_drivetrain_mapped"


@dataclass(frozen=True)
class MappedRange:
    """Byte range of a memory-mapped file that serves as the memory of a tensor."""

    file: MappedFile
    start: int
    end: int


def mark_mapped(tensor: Tensor, file: MappedFile, name: str) -> None:
    place = file.placed[name]
    setattr(tensor, _RANGE, MappedRange(file, place.start, place.end))


def forget_mapped(tensor: Tensor) -> None:
    vars(tensor).pop(_RANGE, None)


def mapped_range(tensor: Tensor) -> MappedRange | None:
    found = getattr(tensor, _RANGE, None)
    return found if isinstance(found, MappedRange) else None


_changes = attrgetter("_version")  # torch counts the changes in place


def times_changed(tensor: Tensor) -> int:
    # Inference tensors have no version counter, and reading it would raise an error.
    return 0 if tensor.is_inference() else int(_changes(tensor))


def merged(ranges: Iterator[MappedRange]) -> list[MappedRange]:
    joined: list[MappedRange] = []
    for each in sorted(ranges, key=lambda one: (one.file.path, one.start)):
        last = joined[-1] if joined else None
        if last is not None and last.file is each.file and each.start <= last.end:
            joined[-1] = MappedRange(last.file, last.start, max(last.end, each.end))
        else:
            joined.append(each)
    return joined
