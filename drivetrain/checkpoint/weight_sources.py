"""Weights by name, wherever they lie: described without reading, read one at a time, over their file where possible."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Hashable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from drivetrain.checkpoint.export import model_keys
from drivetrain.checkpoint.load import Checkpoint
from drivetrain.checkpoint.mapped_file import MappedFile, Placed, header_length, read_header
from drivetrain.checkpoint.storage import LocalStorage, Reader, Storage
from drivetrain.checkpoint.tensor_file import Entry, bytes_of, run_parallel, takes_bytes
from drivetrain.runtime.errors import CheckpointError

_READERS = 4


class Weights(Mapping[str, Tensor]):
    """Tensors on the CPU by name. One is read when it is asked for.

    Attributes:
        where: What they were opened from, for messages.
        entries: Name, dtype and shape of each, without reading.
        same: Names under which files hold no tensor, and the names of the tensors that they stand for.
    """

    where: str
    entries: Mapping[str, Entry]
    same: Mapping[str, str] = {}

    @abstractmethod
    def __getitem__(self, name: str) -> Tensor: ...

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    def fill(self, targets: Mapping[str, Tensor]) -> None:
        """Read weights into tensors, several at once.

        Args:
            targets: By name; on any device, and of any dtype, to which the weights are cast.
        """
        jobs = [partial(self.read_into, name, target) for name, target in targets.items()]
        run_parallel(jobs, workers=min(_READERS, os.cpu_count() or 1))

    def read_into(self, name: str, target: Tensor) -> None:
        """Read one weight into a tensor, as `fill` does."""
        target.copy_(self[name])

    def mapped(self, name: str) -> tuple[MappedFile, str] | None:
        """The file that a weight can be used from without a copy, and its name there; None where there is none."""
        return None

    def tied(self) -> dict[str, str]:
        """Names, also among the entries, that stand for the tensor of another name, and those names."""
        return dict(self.same)


class HeldWeights(Weights):
    """Weights that are tensors already.

    Args:
        tensors: By name.
        where: What they come from.
    """

    def __init__(self, tensors: Mapping[str, Tensor], where: str) -> None:
        self.where, self._tensors = where, tensors
        self.entries = {name: Entry(name, each.dtype, tuple(each.shape)) for name, each in tensors.items()}

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def tied(self) -> dict[str, str]:
        """As above, by the memory that the tensors are in."""
        return _later_names({n: (t.data_ptr(), t.dtype, t.shape, t.stride()) for n, t in self._tensors.items()})


class FileWeights(Weights):
    """Weights in a safetensors file of this machine.

    Args:
        file: The file.
    """

    def __init__(self, file: MappedFile) -> None:
        self.where, self._file = file.path, file
        self.entries = {name: one.entry for name, one in file.placed.items()}
        self.same = _aliases(file.metadata, self.entries)

    def __getitem__(self, name: str) -> Tensor:
        return self._file.tensor(name)

    def read_into(self, name: str, target: Tensor) -> None:
        """As above; straight into the tensor's memory where the file holds it as it is there."""
        if takes_bytes(target, self.entries[name].dtype):
            self._file.read_into(name, bytes_of(target))
        else:
            target.copy_(self[name])

    def mapped(self, name: str) -> tuple[MappedFile, str] | None:
        """The file, unless the weight lies there at an address that its dtype does not allow."""
        return (self._file, name) if self._file.is_aligned(name) else None


class JoinedWeights(Weights):
    """Weights in several places.

    Args:
        parts: For each name the weights that it is one of.
        where: What they were opened from.
    """

    def __init__(self, parts: Mapping[str, Weights], where: str) -> None:
        self.where, self._parts = where, parts
        self.entries = {name: part.entries[name] for name, part in parts.items()}
        each = {id(part): part for part in parts.values()}
        self.same = {name: target for part in each.values() for name, target in part.same.items() if name not in parts}

    def __getitem__(self, name: str) -> Tensor:
        return self._parts[name][name]

    def read_into(self, name: str, target: Tensor) -> None:
        """As the part does that has it."""
        self._parts[name].read_into(name, target)

    def mapped(self, name: str) -> tuple[MappedFile, str] | None:
        """The file, where the part that has it gives one."""
        return self._parts[name].mapped(name)


class CheckpointWeights(Weights):
    """The weights in a checkpoint of ours, straight from its shards.

    Args:
        directory: The checkpoint's directory or URL.
        model: Which of its models, from 0; it has only one if None.
    """

    def __init__(self, directory: str | os.PathLike[str], model: int | None = None) -> None:
        # Hashes are of whole files, and would be computed again for each tensor that is read alone.
        self._checked, self._quick = Checkpoint(directory), Checkpoint(directory, verify="size")
        self.where = self._checked.directory
        self._keys = model_keys(self._checked, model)
        self._described = self._checked.tensors.tensors()
        self.entries = {
            name: Entry(name, self._described[key].properties.dtype, tuple(self._described[key].size))
            for name, key in self._keys.items()
        }
        self._opened: dict[str, MappedFile] = {}

    def __getitem__(self, name: str) -> Tensor:
        entry = self.entries[name]
        whole = torch.empty(entry.shape, dtype=entry.dtype)
        self._quick.read_tensors({self._keys[name]: whole})
        return whole

    def tied(self) -> dict[str, str]:
        """As above, by the tensors that the checkpoint's names lead to."""
        return _later_names(self._keys)

    def fill(self, targets: Mapping[str, Tensor]) -> None:
        """As above, with the files' hashes checked."""
        aliases: dict[str, list[Tensor]] = {}
        for name, target in targets.items():
            aliases.setdefault(self._keys[name], []).append(target)
        self._checked.read_tensors({key: first for key, (first, *_) in aliases.items()})
        for first, *others in aliases.values():
            for other in others:
                other.copy_(first)

    def mapped(self, name: str) -> tuple[MappedFile, str] | None:
        """The file of a weight that one process has written whole."""
        key, tensors = self._keys[name], self._checked.tensors
        chunks = self._described[key].chunks
        if len(chunks) != 1 or not isinstance(self._checked.storage, LocalStorage):
            return None
        path = tensors.path_of(tensors.place_of(key, chunks[0].offsets).file)
        if path not in self._opened:
            self._opened[path] = MappedFile(path)
        file = self._opened[path]
        # A dtype that the format has no name for is there as bytes.
        as_is = key in file.placed and file.placed[key].entry.dtype == self.entries[name].dtype
        return (file, key) if as_is and file.is_aligned(key) else None


class RemoteWeights(Weights):
    """Weights in a safetensors file on a file system of fsspec, each read as a range of it.

    Args:
        storage: The file system.
        path: The file.
    """

    def __init__(self, storage: Storage, path: str) -> None:
        self.where, self._storage = path, storage
        self._placed, metadata = self._header(path)
        self.entries = {name: one.entry for name, one in self._placed.items()}
        self.same = _aliases(metadata, self.entries)

    def _header(self, path: str) -> tuple[dict[str, Placed], dict[str, str]]:
        sizes = self._storage.sizes(self._storage.parent(path))
        size = sizes.get(self._storage.name(path))
        if size is None:
            raise CheckpointError(f"There is no file {path}.")
        head = self._range(path, 0, min(8, size))
        head += self._range(path, 8, header_length(head, size, path))
        return read_header(head, size, path)

    def _range(self, path: str, start: int, length: int) -> bytes:
        data = bytearray(length)
        self._fill(path, start, memoryview(data))
        return bytes(data)

    def _fill(self, path: str, start: int, target: memoryview) -> None:
        file: Reader | None = None
        try:
            file = self._storage.open(path)
            file.seek(start)
            while len(target):
                count = file.readinto(target)
                if not count:
                    raise CheckpointError(f"{path} ends too early. It was changed while it was read.")
                target = target[count:]
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}.") from error
        finally:
            if file is not None:
                file.close()

    def __getitem__(self, name: str) -> Tensor:
        place = self._placed[name]
        whole = torch.empty(place.entry.shape, dtype=place.entry.dtype)
        self._fill(self.where, place.start, bytes_of(whole))
        return whole


def _later_names(tensors: Mapping[str, Hashable]) -> dict[str, str]:
    """Names whose tensor has been under another one before, and that one."""
    first: dict[Hashable, str] = {}
    found = {name: first.setdefault(tensor, name) for name, tensor in tensors.items()}
    return {name: other for name, other in found.items() if name != other}


def _aliases(metadata: Mapping[str, str], entries: Mapping[str, Entry]) -> dict[str, str]:
    """Names of tied weights, which a file's metadata leads to the one that it holds."""
    return {name: target for name, target in metadata.items() if target in entries and name not in entries}
