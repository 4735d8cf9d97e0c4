"""Weights in a folder, beside an index of what they are."""

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
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.checkpoint.export import Weights
from drivetrain.checkpoint.safetensors_file import MappedFile, forget_mapped
from drivetrain.checkpoint.tree import Entry, aligned, bytes_of, dtype_name, layout
from drivetrain.runtime.errors import CheckpointError

# Where in a model its parameters and buffers are, and putting others in their place


@dataclass(eq=False)
class Place:
    """A name of a module under which it holds a parameter or a buffer.

    Attributes:
        module: The module.
        name: The name in it.
        is_parameter: Whether it is a parameter.
    """

    module: nn.Module
    name: str
    is_parameter: bool

    @property
    def tensor(self) -> Tensor:
        """What is there now."""
        held: Any = self._held()[self.name]
        return held  # type: ignore[no-any-return]

    def put(self, tensor: Tensor) -> None:
        """Put another tensor there; a parameter where it was one."""
        self._held()[self.name] = tensor

    def _held(self) -> dict[str, Any]:
        return self.module._parameters if self.is_parameter else self.module._buffers


def places_in(module: nn.Module) -> Iterator[Place]:
    """The places of a module itself, without those of modules within it."""
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield Place(module, name, True)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            yield Place(module, name, False)


def named_places(model: nn.Module) -> dict[str, Place]:
    """All places of a model by name; what is shared is under each of its names."""
    return {
        f"{path}.{place.name}" if path else place.name: place
        for path, module in model.named_modules(remove_duplicate=False)
        for place in places_in(module)
    }


def place_named(model: nn.Module, name: str) -> Place:
    """The place of this name."""
    path, _, last = name.rpartition(".")
    module = model.get_submodule(path)
    return Place(module, last, last in module._parameters)


def like(old: Tensor, value: Tensor) -> Tensor:
    """A value as what is to be in the place of another: a parameter in that of a parameter, as trainable as it."""
    if not isinstance(old, nn.Parameter):
        return value
    trainable = old.requires_grad and (value.is_floating_point() or value.is_complex())
    made = nn.Parameter(value, requires_grad=trainable)
    made.__dict__.update(vars(old))
    forget_mapped(made)
    return made


def set_tensor(model: nn.Module, name: str, value: Tensor) -> None:
    """Give a parameter or buffer a value on whatever device that is."""
    place = place_named(model, name)
    place.put(like(place.tensor, value))


def persistent(model: nn.Module) -> set[str]:
    """Names of what a state dict of a model holds."""
    return set(model.state_dict(keep_vars=True))


INDEX = "index.json"


def offload_weight(
    weight: Tensor, weight_name: str, offload_folder: str | os.PathLike[str], index: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Write a weight into a folder, as a file of its bytes named after it.

    Args:
        weight: The weight.
        weight_name: Its name.
        offload_folder: The folder.
        index: What is to be written to the folder's index; the weight's dtype and shape are added.

    Returns:
        The index.
    """
    found = {} if index is None else index
    _write(_file_within(offload_folder, f"{weight_name}.dat"), [bytes_of(weight)])
    found[weight_name] = {"dtype": dtype_name(weight.dtype), "shape": list(weight.shape)}
    return found


def load_offloaded_weight(weight_file: str | os.PathLike[str], weight_info: Mapping[str, Any]) -> Tensor:
    """A weight that `offload_weight` wrote, over its file: it is read as it is used.

    Args:
        weight_file: The file.
        weight_info: Its entry in the index.

    Raises:
        CheckpointError: The file is missing or shorter than in the index.
    """
    return _raw_file(weight_file, "weight", weight_info).tensor("weight")


def _file_within(folder: str | os.PathLike[str], name: str, of_links: bool = True) -> Path:
    """Return the path of a file in a folder. Raises if the name, or a link on the way, leads out of it."""
    path = Path(folder, name)
    leads_out = "\0" in name or os.path.isabs(name) or ".." in re.split(r"[/\\]", name)
    if not leads_out and of_links:
        root, parent = os.path.realpath(folder), os.path.realpath(path.parent)
        leads_out = os.path.commonpath([root, parent]) != root
    if leads_out:
        raise CheckpointError(
            f"{name!r} is no name of a file in {os.fspath(folder)}: it leads out of the folder. Rename the weight; do "
            "not load these weights unless you know who made them."
        )
    return path


def _raw_file(path: str | os.PathLike[str], name: str, info: Mapping[str, Any]) -> MappedFile:
    dtype = getattr(torch, str(info["dtype"]), None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"{os.fspath(path)}: the index says that its dtype is {info['dtype']!r}, which is none.")
    return MappedFile(path, Entry(name, dtype, tuple(info["shape"])))


def save_offload_index(index: Mapping[str, Any], offload_folder: str | os.PathLike[str]) -> None:
    """Write the index of a folder of weights, or add to it.

    Args:
        index: For each weight its dtype and shape, or the safetensors file that it is in. Nothing is written if empty.
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
        raise CheckpointError(f"{path} is no index of weights.")
    return found


def _write(path: Path, parts: Iterable[memoryview]) -> None:
    """Write a file whole or not at all; one that is in use under this name stays as it is for its users."""
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
    """Write weights into a folder, a file each, and their index.

    Args:
        save_dir: The folder.
        state_dict: The weights by name.
    """
    index: dict[str, Any] = {}
    for name, weight in state_dict.items():
        offload_weight(weight, name, save_dir, index)
    save_offload_index(index, save_dir)


class OffloadedWeightsLoader(Mapping[str, Tensor]):
    """Weights in memory and in a folder, by name; those of the folder are read as they are used.

    Args:
        state_dict: Weights in memory.
        save_folder: A folder of weights, as `offload_state_dict` writes it.
        index: For each weight there its dtype and shape, or its safetensors file and its name in it; the folder's
            index if None.
        device: Where weights of safetensors files are put when they are read; they stay over their file if None.

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
        """The file that a weight of the folder is in, and its name there.

        Args:
            key: The weight.
        """
        info = self.index[key]
        name = str(info.get("weight_name", key))
        if "safetensors_file" in info:
            # An absolute path is that of the checkpoint's own file, as indices of `disk_offload` have it.
            path = str(info["safetensors_file"])
            if not os.path.isabs(path):
                path = str(_file_within(self.save_folder or ".", path, of_links=False))
            if path not in self._files:
                self._files[path] = MappedFile(path)
            if name not in self._files[path].placed:
                raise CheckpointError(f"The index says that {key} is {name} in {path}, which does not hold it.")
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
    """Weights in a folder, as `offload_state_dict` and `disk_offload` write it."""

    def __init__(self, folder: str | os.PathLike[str] | None, index: Mapping[str, Any] | None) -> None:
        self.where = "the index given" if folder is None else os.fspath(folder)
        self._loader = OffloadedWeightsLoader(save_folder=folder, index=index)
        places = {name: self._loader.place(name) for name in self._loader}
        self.entries = {name: file.placed[key].entry for name, (file, key) in places.items()}

    def __getitem__(self, name: str) -> Tensor:
        return self._loader[name]

    def mapped(self, name: str) -> tuple[MappedFile, str] | None:
        """Its file there, or the safetensors file that the index names."""
        file, key = self._loader.place(name)
        return (file, key) if file.is_aligned(key) else None


class PrefixedDataset(Mapping[str, Any]):
    """What a mapping has under names that begin with a prefix, by the rest of the names.

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
    """The entries of some modules, or of single tensors.

    Args:
        state_dict: Entries by name.
        submodule_names: The names of the modules.
    """
    return {
        name: value
        for name, value in state_dict.items()
        if any(name == module or name.startswith(f"{module}.") for module in submodule_names)
    }


def load_offloaded_weights(model: nn.Module, index: Mapping[str, Any], offload_folder: str | os.PathLike[str]) -> None:
    """Read weights of a folder into a model, on the CPU.

    Args:
        model: The model.
        index: Which ones, as `offload_weight` returned it.
        offload_folder: The folder.
    """
    weights = OffloadedWeightsLoader(save_folder=offload_folder, index=index)
    for name in index:
        set_tensor(model, name, weights[name].clone())


def write_offloaded(
    entries: Sequence[Entry], read: Callable[[str], Tensor], folder: str | os.PathLike[str]
) -> MappedFile:
    """Write weights as one safetensors file into a folder, and its index."""
    ordered = [entries[position] for position in aligned(entries)]
    header, _ = layout(ordered, {"format": "pt"})
    # The same for the same weights: what else is used from the folder meanwhile stays as it is.
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
