"""Export of plain safetensors weights from checkpoints and models, and reading of weights from files."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import uuid
from abc import abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor
from tqdm.auto import tqdm

from drivetrain.checkpoint.formats import formats, is_checkpoint
from drivetrain.checkpoint.load import Checkpoint
from drivetrain.checkpoint.manifest import has_manifest, in_schema
from drivetrain.checkpoint.safetensors_file import MappedFile
from drivetrain.checkpoint.shards import read_range
from drivetrain.checkpoint.storage import MANIFEST, LocalStorage, Reader, Storage, blocks_of, run_parallel, storage_of
from drivetrain.checkpoint.torch_files import TorchShards, bare_name, read_pickled
from drivetrain.checkpoint.tree import (
    Entry,
    Placed,
    aligned,
    bytes_of,
    encoded,
    header_length,
    layout,
    pack,
    read_header,
    takes_bytes,
)
from drivetrain.runtime.errors import CheckpointError, ConfigurationError, nearest
from drivetrain.runtime.host import parse_bytes

_DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "float16": torch.float16,
    "fp16": torch.float16,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float64": torch.float64,
}

T = TypeVar("T")


Source = tuple[Entry, Callable[[], Iterable[Tensor]]]
"""Description of a tensor to be written, and a function that yields its values in order, in pieces of any size."""


def consolidate(
    checkpoint: str | os.PathLike[str],
    output: str | os.PathLike[str],
    max_shard_size: int | str = "5GB",
    dtype: torch.dtype | str | None = None,
    *,
    model: int | None = None,
    module: str | None = None,
    overwrite: bool = False,
    verify: bool = True,
    progress: bool = False,
) -> list[str]:
    """Export the weights of a checkpoint as plain safetensors files, one tensor at a time to save memory.

    Call it on one process.

    A small model becomes one `model.safetensors`. A larger one becomes files `model-00001-of-0000N.safetensors` with a
    `model.safetensors.index.json`, as on the Hugging Face Hub. Tied weights are written once. Any library that reads
    safetensors, such as transformers, can open the result.

    Args:
        checkpoint: The checkpoint's directory or URL, saved under any strategy and number of processes. Also a
            directory of another tool, in a format of `drivetrain.checkpoint.formats`.
        output: The directory to write to.
        max_shard_size: The maximum size of a file, in bytes or as text such as `"5GB"`. A larger tensor gets its own
            file.
        dtype: The dtype to which floating-point weights are converted, such as `"bfloat16"`. None keeps their dtype.
        model: The index of the model, from 0, if `save_state` saved several models.
        module: The name of a submodule, such as `"net"`. Only its weights are exported, under their names within it.
        overwrite: True to write into a directory that is not empty.
        verify: True to check the checkpoint's files against its manifest first.
        progress: True to show a progress bar.

    Returns:
        The paths of the safetensors files.

    Raises:
        CheckpointError: The checkpoint is missing or incomplete, has no such model or module, or the output cannot be
            written.
        ConfigurationError: `max_shard_size` is not a size.

    Example:
        ```python
        import torch
        from drivetrain import Accelerator, consolidate

        accelerator = Accelerator()
        accelerator.prepare(torch.nn.Linear(4, 1))
        accelerator.save_state("checkpoints/step_7")
        consolidate("checkpoints/step_7", "exported", dtype="bfloat16")
        ```
    """
    if not has_manifest(*storage_of(checkpoint)):
        options: dict[str, Any] = {"model": model, "module": module, "overwrite": overwrite, "progress": progress}
        for each in formats():
            files = each.merge(checkpoint, output, max_shard_size, dtype, **options)
            if files is not None:
                return files
    opened = Checkpoint(checkpoint)
    names = weights_below(model_keys(opened, model), module, opened.directory)
    target = parse_dtype(dtype)
    places = sorted({place.file for key in names.values() for place in _places(opened, key)})
    opened.tensors.check_headers(places)
    if verify:
        opened.verify(places)
    sources: list[Source] = []
    aliases: dict[str, str] = {}
    first: dict[str, str] = {}
    for name, key in names.items():
        # A key that occurs again belongs to a tied weight, which is written once.
        if key in first:
            aliases[name] = first[key]
            continue
        first[key] = name
        sources.append(_stored(opened, name, key, target))
    return write_safetensors(sources, aliases, output, max_shard_size, overwrite=overwrite, progress=progress)


def consolidate_shards(
    directory: str | os.PathLike[str],
    output: str | os.PathLike[str],
    max_shard_size: int | str = "5GB",
    dtype: torch.dtype | str | None = None,
    *,
    module: str | None = None,
    overwrite: bool = False,
    progress: bool = False,
) -> list[str]:
    """Export FSDP shards of `torch.distributed.checkpoint` as plain safetensors files.

    Only one tensor at a time is in memory.

    Args:
        directory: The folder that `torch.distributed.checkpoint` wrote, such as `pytorch_model_fsdp_0`.
        output: The directory to write to.
        max_shard_size: The maximum size of a file, in bytes or as text such as `"5GB"`.
        dtype: The dtype to which floating-point weights are converted. None keeps their dtype.
        module: The name of a submodule whose weights alone are exported.
        overwrite: True to write into a directory that is not empty.
        progress: True to show a progress bar.

    Returns:
        The paths of the safetensors files.

    Raises:
        CheckpointError: The folder has another format, holds no model or no such module, or the output cannot be
            written.
    """
    shards = TorchShards(directory)
    keys = {bare_name(name): key for key, name in shards.names_below("model").items()}
    if not keys:
        raise CheckpointError(f"{shards.directory} contains no model: no tensor name begins with 'model.'.")
    target = parse_dtype(dtype)
    sources: list[Source] = []
    for name, key in weights_below(keys, module, os.fspath(directory)).items():
        described = shards.tensors[key]
        own = described.properties.dtype
        written = target if target is not None and own.is_floating_point else own
        sources.append((Entry(name, written, tuple(described.size)), partial(_shard_of, shards, key, written)))
    return write_safetensors(sources, {}, output, max_shard_size, overwrite=overwrite, progress=progress)


def save_safetensors(
    state_dict: Mapping[str, Tensor],
    output: str | os.PathLike[str],
    max_shard_size: int | str = "5GB",
    *,
    overwrite: bool = True,
    progress: bool = False,
) -> list[str]:
    """Save a state dict as safetensors files of limited size.

    Several files get an index.

    Args:
        state_dict: Full tensors by name. Tensors that share memory are written once.
        output: The directory to write to.
        max_shard_size: The maximum size of a file, in bytes or as text such as `"5GB"`.
        overwrite: True to write into a directory that is not empty.
        progress: True to show a progress bar.

    Returns:
        The paths of the safetensors files.
    """
    packed, tensors = pack(dict(state_dict))
    sources: list[Source] = []
    aliases: dict[str, str] = {}
    first: dict[str, str] = {}
    for name in state_dict:
        key = packed[name]["__tensor__"]
        if key in first:
            aliases[name] = first[key]
            continue
        first[key] = name
        tensor = tensors[key]
        sources.append((Entry(name, tensor.dtype, tuple(tensor.shape)), partial(iter, [tensor])))
    return write_safetensors(sources, aliases, output, max_shard_size, overwrite=overwrite, progress=progress)


def weights_below(weights: Mapping[str, T], module: str | None, source: str) -> dict[str, T]:
    if module is None:
        return dict(weights)
    prefix = f"{module}."
    found = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
    if not found:
        holders = sorted({name.split(".")[0] for name in weights if "." in name})
        raise CheckpointError(
            f"{source} contains no weights of a module {module!r}. Top-level modules: {', '.join(holders) or 'none'}."
            f"{nearest(module, holders)}"
        )
    return found


def model_keys(checkpoint: Checkpoint, model: int | None = None) -> dict[str, str]:
    """Map the names of a model's tensors to their keys in a checkpoint."""
    models = in_schema(checkpoint.packed())["engine"].get("models")
    if not isinstance(models, list):
        raise CheckpointError(f"{checkpoint.directory} contains no model, because it is not the state of a run.")
    if not models or (model is None and len(models) != 1) or (model or 0) >= len(models):
        raise CheckpointError(
            f"{checkpoint.directory} contains {len(models)} models. Choose one by index, as in model=0 or --model 0."
        )
    state = models[model or 0]
    found = {
        name: str(value["__tensor__"])
        for name, value in state.items()
        if isinstance(value, dict) and "__tensor__" in value
    }
    if not found:
        raise CheckpointError(f"{checkpoint.directory} contains a model without weights.")
    return found


def _places(checkpoint: Checkpoint, key: str) -> Iterator[Any]:
    described = checkpoint.tensors.tensors()
    if key not in described:
        raise CheckpointError(f"{checkpoint.directory} is damaged: its index does not list the tensor {key}.")
    for chunk in described[key].chunks:
        yield checkpoint.tensors.place_of(key, chunk.offsets)


def _stored(checkpoint: Checkpoint, name: str, key: str, dtype: torch.dtype | None) -> Source:
    described = checkpoint.tensors.tensors()[key]
    own = described.properties.dtype
    target = dtype if dtype is not None and own.is_floating_point else own
    return Entry(name, target, tuple(described.size)), partial(_read, checkpoint, key, described, target)


def _read(checkpoint: Checkpoint, key: str, described: TensorStorageMetadata, dtype: torch.dtype) -> Iterator[Tensor]:
    own = described.properties.dtype
    chunks = sorted(described.chunks, key=lambda chunk: tuple(chunk.offsets))
    # Only parts that are split along the first dimension can be written one after the other.
    if not all(chunk.sizes[1:] == described.size[1:] for chunk in chunks):
        whole = torch.empty(described.size, dtype=own)
        checkpoint.read_tensors({key: whole})
        yield whole.to(dtype)
        return
    for chunk in chunks:
        place = checkpoint.tensors.place_of(key, chunk.offsets)
        listed, path = checkpoint.manifest.files[place.file], checkpoint.tensors.path_of(place.file)
        # Block by block, so that the whole tensor is never in memory.
        for block in read_range(checkpoint.storage, path, listed, place.start, place.nbytes):
            yield torch.frombuffer(block, dtype=own).to(dtype)


def _shard_of(shards: TorchShards, key: str, dtype: torch.dtype) -> Iterator[Tensor]:
    yield shards.tensor(key).to(dtype)


def write_safetensors(
    sources: Iterable[Source],
    aliases: Mapping[str, str],
    output: str | os.PathLike[str],
    max_shard_size: int | str = "5GB",
    *,
    overwrite: bool = True,
    progress: bool = False,
) -> list[str]:
    # The files get their final names after all of them are complete.
    listed = list(sources)
    limit = shard_limit(max_shard_size)
    directory = os.path.abspath(os.fspath(output))
    if os.path.isdir(directory) and os.listdir(directory) and not overwrite:
        raise CheckpointError(
            f"{directory} is not empty. Name another directory, or set overwrite=True (--overwrite) to write into it."
        )
    shards = named_shards(listed, [entry.nbytes for entry, _ in listed], limit, "model.safetensors")
    total = sum(entry.nbytes for entry, _ in listed)
    token, storage = uuid.uuid4().hex[:12], LocalStorage()
    written: dict[str, str] = {}
    try:
        os.makedirs(directory, exist_ok=True)
        with tqdm(total=total, unit="B", unit_scale=True, desc="Writing", disable=not progress) as bar:
            for name, shard in shards.items():
                # Temporary names, so that an error leaves no incomplete export.
                written[name] = os.path.join(directory, f".{name}.{token}")
                storage.write(written[name], _content_of(shard, {**aliases, "format": "pt"}, bar))
        if len(shards) > 1:  # tied names are listed in the files' metadata only
            index = index_of({entry.name: name for name, shard in shards.items() for entry, _ in shard}, total)
            written[_INDEX] = os.path.join(directory, f".{_INDEX}.{token}")
            storage.write(written[_INDEX], [memoryview(index)])
        for name, path in written.items():
            os.replace(path, os.path.join(directory, name))
        for name in os.listdir(directory):
            if _OURS.match(name) and name not in written:  # from an earlier export; it would be read with the new files
                os.unlink(os.path.join(directory, name))
    except OSError as error:
        raise CheckpointError(f"Cannot write {error.filename or directory}: {error.strerror or error}.") from error
    finally:
        for path in written.values():
            if os.path.exists(path):
                os.unlink(path)
    return [os.path.join(directory, name) for name in shards]


_INDEX = "model.safetensors.index.json"
_OURS = re.compile(r"^model(-\d{5}-of-\d{5})?\.safetensors$|^model\.safetensors\.index\.json$")


def _content_of(shard: Sequence[Source], metadata: dict[str, str], bar: tqdm[Any]) -> Iterator[memoryview]:
    ordered = [shard[position] for position in aligned(entry for entry, _ in shard)]
    yield memoryview(layout([entry for entry, _ in ordered], metadata)[0])
    for _, pieces in ordered:
        for piece in pieces():
            for block in blocks_of(bytes_of(piece)):
                yield block
                bar.update(len(block))


def named_shards(items: Iterable[T], sizes: Iterable[int], limit: int, name: str) -> dict[str, list[T]]:
    shards: list[list[T]] = [[]]
    room = limit
    for item, size in zip(items, sizes, strict=True):
        if shards[-1] and size > room:
            shards.append([])
            room = limit
        shards[-1].append(item)
        room -= size
    if len(shards) == 1:
        return {name: shards[0]}
    stem, suffix = os.path.splitext(name)
    return {f"{stem}-{n:05d}-of-{len(shards):05d}{suffix}": shard for n, shard in enumerate(shards, 1)}


def index_of(files: Mapping[str, str], total: int) -> bytes:
    """Return the JSON index that names the file of each weight."""
    return encoded({"metadata": {"total_size": total}, "weight_map": dict(files)})


def shard_limit(max_shard_size: int | str) -> int:
    """Parse the maximum size of a file, given in bytes or as text such as `"5GB"`."""
    limit = parse_bytes(max_shard_size)
    if limit <= 0:
        raise ConfigurationError(f"max_shard_size={max_shard_size!r}: the size of a file must be positive.")
    return limit


def parse_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Return the floating-point dtype of a name such as `"bf16"`."""
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in _DTYPES:
        raise CheckpointError(
            f"dtype={dtype!r} is not a floating-point type.{nearest(dtype, _DTYPES)} Allowed: {', '.join(_DTYPES)}."
        )
    return _DTYPES[dtype]


# Weights by name from any source, which are described without being read


_READERS = 4


class Weights(Mapping[str, Tensor]):
    """Read-only mapping from the names of a model's weights to tensors, which a subclass may load lazily.

    Attributes:
        where: The source of the weights, for error messages.
        entries: Name, dtype and shape of each tensor, available without reading it.
        same: Names for which the files hold no tensor, mapped to the names of the tensors to use instead.
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
        jobs = [partial(self.read_into, name, target) for name, target in targets.items()]
        run_parallel(jobs, workers=min(_READERS, os.cpu_count() or 1))

    def read_into(self, name: str, target: Tensor) -> None:
        """Copy the weight of this name into an existing tensor."""
        target.copy_(self[name])

    def mapped(self, name: str) -> tuple[MappedFile, str] | None:
        # A subclass returns the memory-mapped file and the weight's name in it. None: the weight must be copied.
        return None

    def tied(self) -> dict[str, str]:
        # Names without a tensor of their own, mapped to the names of the tensors to use instead.
        return dict(self.same)


class HeldWeights(Weights):
    def __init__(self, tensors: Mapping[str, Tensor], where: str) -> None:
        self.where, self._tensors = where, tensors
        self.entries = {name: Entry(name, each.dtype, tuple(each.shape)) for name, each in tensors.items()}

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def tied(self) -> dict[str, str]:
        return _later_names({n: (t.data_ptr(), t.dtype, t.shape, t.stride()) for n, t in self._tensors.items()})


class FileWeights(Weights):
    """Weights in a local safetensors file that is mapped into memory."""

    def __init__(self, file: MappedFile) -> None:
        self.where, self._file = file.path, file
        self.entries = {name: one.entry for name, one in file.placed.items()}
        self.same = _aliases(file.metadata, self.entries)

    def __getitem__(self, name: str) -> Tensor:
        return self._file.tensor(name)

    def read_into(self, name: str, target: Tensor) -> None:
        if takes_bytes(target, self.entries[name].dtype):
            self._file.read_into(name, bytes_of(target))
        else:
            target.copy_(self[name])

    def mapped(self, name: str) -> tuple[MappedFile, str] | None:
        return (self._file, name) if self._file.is_aligned(name) else None


class JoinedWeights(Weights):
    def __init__(self, parts: Mapping[str, Weights], where: str) -> None:
        self.where, self._parts = where, parts
        self.entries = {name: part.entries[name] for name, part in parts.items()}
        each = {id(part): part for part in parts.values()}
        self.same = {name: target for part in each.values() for name, target in part.same.items() if name not in parts}

    def __getitem__(self, name: str) -> Tensor:
        return self._parts[name][name]

    def read_into(self, name: str, target: Tensor) -> None:
        self._parts[name].read_into(name, target)

    def mapped(self, name: str) -> tuple[MappedFile, str] | None:
        return self._parts[name].mapped(name)


class CheckpointWeights(Weights):
    def __init__(self, directory: str | os.PathLike[str], model: int | None = None) -> None:
        # A hash covers a whole file, so it is not checked again for every tensor that is read alone.
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
        return _later_names(self._keys)

    def fill(self, targets: Mapping[str, Tensor]) -> None:
        aliases: dict[str, list[Tensor]] = {}
        for name, target in targets.items():
            aliases.setdefault(self._keys[name], []).append(target)
        self._checked.read_tensors({key: first for key, (first, *_) in aliases.items()})
        for first, *others in aliases.values():
            for other in others:
                other.copy_(first)

    def mapped(self, name: str) -> tuple[MappedFile, str] | None:
        key, tensors = self._keys[name], self._checked.tensors
        chunks = self._described[key].chunks
        # A tensor in several parts is not contiguous in memory, and a remote file cannot be mapped.
        if len(chunks) != 1 or not isinstance(self._checked.storage, LocalStorage):
            return None
        path = tensors.path_of(tensors.place_of(key, chunks[0].offsets).file)
        if path not in self._opened:
            self._opened[path] = MappedFile(path)
        file = self._opened[path]
        # A dtype that safetensors does not define is stored as bytes, which cannot be used directly.
        as_is = key in file.placed and file.placed[key].entry.dtype == self.entries[name].dtype
        return (file, key) if as_is and file.is_aligned(key) else None


class RemoteWeights(Weights):
    """Weights in a remote safetensors file, of which only the needed bytes are read."""

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
    first: dict[Hashable, str] = {}
    found = {name: first.setdefault(tensor, name) for name, tensor in tensors.items()}
    return {name: other for name, other in found.items() if name != other}


def _aliases(metadata: Mapping[str, str], entries: Mapping[str, Entry]) -> dict[str, str]:
    # Tied weights that a file stores only once, mapped to the stored names.
    return {name: target for name, target in metadata.items() if target in entries and name not in entries}


# Weights in files of other tools: safetensors or torch's format, one file or several with an index


SAFE, TORCH = "model.safetensors", "pytorch_model.bin"
_INDEX_NAME = ".index.json"


def open_weights(source: str | os.PathLike[str] | Mapping[str, torch.Tensor], model: int | None = None) -> Weights:
    """Return a mapping of the weights in a file, directory, checkpoint, URL or dict.

    A weight is read when it is accessed.

    No code from a file is executed.

    Args:
        source: A `.safetensors` file, a file of `torch.save`, an index of several files, a directory with one of these,
            a drivetrain checkpoint, an fsspec URL of one of them, or a dict of tensors.
        model: The index of the model in a checkpoint, from 0. None requires a checkpoint with one model.

    Raises:
        CheckpointError: There are no weights, a file is truncated or has another format, or an index lists a missing
            file.
    """
    if isinstance(source, Mapping):
        return source if isinstance(source, Weights) else HeldWeights(source, "the weights given")
    storage, path = storage_of(source)
    is_local = isinstance(storage, LocalStorage)
    try:
        if storage.is_directory(path):
            names = (
                [entry.name for entry in Path(path).iterdir() if entry.is_file()] if is_local else storage.sizes(path)
            )
            found = MANIFEST if is_checkpoint(path) else _choose([name for name in names if "/" not in name], path)
            if found == MANIFEST:
                return CheckpointWeights(path, model)
            path = storage.join(path, found)
        if is_local and not os.path.isfile(path):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                os.stat(path)  # raises other errors, such as a missing permission
            raise CheckpointError(f"There is no file {path}.")
        if not path.endswith(".json"):
            return _open_file(storage, path)
        parts, folder = files_of_index(storage.read(path), path), storage.parent(path)
        opened = {file: _open_file(storage, storage.join(folder, file)) for file in sorted(set(parts.values()))}
    except OSError as error:
        raise CheckpointError(f"{error.filename or path} cannot be read: {error.strerror or error}.") from error
    for name, file in parts.items():
        if name not in opened[file]:
            raise CheckpointError(f"{path} lists {name} in {file}, but this file does not contain {name}.")
    # Weights that the index does not list are included; all others come from the file that it names.
    every = {name: each for each in opened.values() for name in each}
    return JoinedWeights(every | {name: opened[file] for name, file in parts.items()}, path)


def _open_file(storage: Storage, path: str) -> Weights:
    is_local = isinstance(storage, LocalStorage)
    if path.endswith(".safetensors"):
        return FileWeights(MappedFile(path)) if is_local else RemoteWeights(storage, path)
    weights = read_pickled(path, mapped=True) if is_local else read_pickled(path, data=io.BytesIO(storage.read(path)))
    if not isinstance(weights, Mapping) or not all(isinstance(value, torch.Tensor) for value in weights.values()):
        raise CheckpointError(f"{path} contains no weights. Pass a file with a dict of tensors.")
    return HeldWeights(weights, path)


def read_weights(path: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    weights = open_weights(path)
    read = {name: torch.empty(entry.shape, dtype=entry.dtype) for name, entry in weights.entries.items()}
    weights.fill(read)
    return read


def files_of_index(content: bytes, path: str) -> dict[str, str]:
    try:
        found = json.loads(content)
        parts = found.get("weight_map", found)  # or the map alone
    except (ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not an index of weights: it has no weight_map.") from error
    if not isinstance(parts, dict) or not all(isinstance(file, str) for file in parts.values()):
        raise CheckpointError(f"{path} is not an index of weights: its weight_map does not map names to files.")
    for file in parts.values():
        # Plain names only, so that an index cannot make the reader open other files.
        if os.path.basename(file) != file or file in ("", ".", "..") or "\0" in file:
            raise CheckpointError(f"{path} lists {file!r}. It may list only files in its own directory.")
    return parts


def _choose(names: list[str], directory: str) -> str:
    for name in (SAFE, SAFE + _INDEX_NAME, TORCH, TORCH + _INDEX_NAME):
        if name in names:
            return name
    # Under other names, there must be one file or one index only.
    alone = [name for name in names if name.endswith((".safetensors", _INDEX_NAME))]
    if len(alone) == 1:
        return alone[0]
    indices = [name for name in alone if name.endswith(_INDEX_NAME)]
    if len(indices) == 1:
        return indices[0]
    if MANIFEST in names:  # a damaged checkpoint: opening it raises an error
        return MANIFEST
    raise CheckpointError(
        f"There are no weights in {directory}. Expected {SAFE}, {TORCH}, or shards of either with an {_INDEX_NAME[1:]}."
    )


def save_pickled_weights(
    weights: Mapping[str, torch.Tensor], directory: str | os.PathLike[str], max_shard_size: int | str
) -> list[str]:
    """Save weights as `pytorch_model.bin`, or as several files with an index.

    Args:
        weights: Tensors by name.
        directory: The directory to write to.
        max_shard_size: The maximum size of a file, in bytes or as text such as `"5GB"`. A larger tensor gets its own
            file.

    Returns:
        The paths of the files.
    """
    sizes = [tensor.numel() * tensor.element_size() for tensor in weights.values()]
    shards = named_shards(weights, sizes, shard_limit(max_shard_size), TORCH)
    os.makedirs(directory, exist_ok=True)
    for file, names in shards.items():
        # torch.save writes the whole storage of a view, so a copy is saved.
        torch.save({name: weights[name].clone() for name in names}, os.path.join(directory, file))
    if len(shards) > 1:
        index = index_of({name: file for file, names in shards.items() for name in names}, sum(sizes))
        Path(directory, TORCH + _INDEX_NAME).write_bytes(index)
    return [os.path.join(directory, file) for file in shards]


def with_tied(model: nn.Module, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy `weights`, and add the missing names of tied parameters, which a file stores under one name only.

    Args:
        model: The unwrapped model, which defines the ties.
        weights: Tensors by name.
    """
    names: dict[int, list[str]] = {}
    # Without duplicates removed, a tied parameter is listed under each of its names.
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    filled = dict(weights)
    for tied in names.values():
        held = next((name for name in tied if name in weights), None)
        if held is not None:
            filled.update({name: weights[held] for name in tied if name not in weights})
    return filled


# Loading into a sharded model, or with rank 0 as the only process that reads


def is_sharded(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor)


def load_over_processes(
    model: nn.Module,
    source: str | os.PathLike[str] | Mapping[str, Tensor],
    dtype: torch.dtype | None,
    strict: bool,
    full: bool,
    broadcast: bool,
    keep_in_fp32: Collection[str] = (),
) -> None:
    """Load weights from files or a dict into a model, whose parameters may be sharded over processes.

    All processes must call the function.

    Args:
        model: The model. Its parameters have memory and may be sharded.
        source: A source that `open_weights` accepts.
        dtype: The dtype to which floating-point weights are converted. None uses the dtype of the model's parameters.
        strict: True to raise an error for missing and unexpected names.
        full: True if the weights are full tensors that must be sharded like the model's parameters.
        broadcast: True if only rank 0 reads the weights and broadcasts them.
        keep_in_fp32: Parts of names. Matching weights become float32 even if `dtype` is smaller.

    Raises:
        CheckpointError: The weights do not match the model.
        ConfigurationError: `broadcast` is True, but there is no process group.
    """
    if broadcast and not dist.is_initialized():
        raise ConfigurationError(
            "broadcast_from_rank0=True needs a process group. Build an Accelerator first, or omit it.",
        )

    def dtype_of(name: str, old: torch.dtype | None) -> torch.dtype | None:
        if dtype is None:
            return old
        return torch.float32 if dtype.itemsize < 4 and any(part in name for part in keep_in_fp32) else dtype

    weights: dict[str, Any] = {}
    if not broadcast or dist.get_rank() == 0:
        wanted = model.state_dict()
        for name, weight in with_tied(model, open_weights(source)).items():
            to = dtype_of(name, wanted[name].dtype if name in wanted else None)
            weights[name] = weight.to(to) if weight.is_floating_point() else weight
    if dtype is not None:
        # Change the model's dtypes first, because loading copies into the existing tensors.
        held = chain(model.named_parameters(), model.named_buffers())
        targets = {id(tensor): dtype_of(name, None) for name, tensor in held if tensor.is_floating_point()}
        model._apply(lambda tensor: tensor.to(targets[id(tensor)]) if id(tensor) in targets else tensor)  # type: ignore[no-untyped-call]
    options = StateDictOptions(full_state_dict=full, broadcast_from_rank0=broadcast, strict=strict)
    try:
        set_model_state_dict(model, weights, options=options)
    except RuntimeError as error:
        where = "The weights given" if isinstance(source, Mapping) else os.fspath(source)
        raise CheckpointError(f"{where} cannot be loaded into {type(model).__name__}: {error}") from error
