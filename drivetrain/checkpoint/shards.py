"""Reading the tensors of a checkpoint: a `torch.distributed.checkpoint` storage reader for safetensors files."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from drivetrain.checkpoint.manifest import Manifest, check_digest, verified_bytes
from drivetrain.checkpoint.storage import BLOCK, WORKERS, FileDigest, Reader, Storage, blocks_of, run_parallel
from drivetrain.checkpoint.tree import DTYPES, INDEX, Entry, Place, bytes_of, decoded, takes_bytes
from drivetrain.runtime.errors import DamagedCheckpointError

# Index of a checkpoint's tensors, which is checked before any tensor is read


# All dtypes except integers of less than one byte.
_STORED = {name: dtype for name, dtype in DTYPES.items() if not re.fullmatch(r"u?int[1-7]", name)}
_LONGEST = 2**63 - 1


@dataclass(frozen=True)
class Part:
    """Part of a tensor, such as one rank's shard, with its place in a checkpoint's files."""

    entry: Entry
    place: Place


class TensorIndex:
    """Index that gives the file and position of every part of a checkpoint's tensors."""

    def __init__(self, content: Any, manifest: Manifest, path: str) -> None:
        self._manifest, self._path = manifest, path
        self._parts: dict[MetadataIndex, Part] = {}
        tensors = content.get("tensors") if isinstance(content, dict) else None
        if not isinstance(tensors, dict):
            raise DamagedCheckpointError(f"{path} is damaged: it lists no tensors.")
        self.metadata = Metadata({key: self._described(key, one) for key, one in tensors.items()})
        self._check_files()

    def part(self, index: MetadataIndex) -> Part:
        return self._parts[index]

    def files(self) -> dict[str, list[Part]]:
        found: dict[str, list[Part]] = {}
        for part in self._parts.values():
            if part.place.nbytes:
                found.setdefault(part.place.file, []).append(part)
        return found

    def _described(self, key: str, one: Any) -> TensorStorageMetadata:
        if not isinstance(one, dict) or not isinstance(one.get("chunks"), list):
            raise self._damaged(key, "is not described")
        dtype = _STORED.get(one["dtype"]) if isinstance(one.get("dtype"), str) else None
        if dtype is None:
            raise self._damaged(key, f"has the dtype {one.get('dtype')!r}, which is not supported")
        size = self._numbers(key, one.get("size"), "size")
        # A damaged size must not overflow torch's 64-bit sizes.
        if math.prod(max(1, length) for length in size) * dtype.itemsize > _LONGEST:
            raise self._damaged(key, f"has the size {size}, which is too large")
        chunks = [self._chunk(key, dtype, size, chunk) for chunk in one["chunks"]]
        filled = [chunk for chunk in chunks if chunk.sizes.numel()]
        # Parts that do not overlap and together have all values cover the tensor exactly.
        pair = _overlapping(filled)
        if pair is not None:
            raise self._damaged(key, f"has two overlapping parts, at {_at(pair[0])} and {_at(pair[1])}")
        covered = sum(chunk.sizes.numel() for chunk in filled)
        if covered != math.prod(size):
            raise self._damaged(key, f"has {math.prod(size)} values, but its parts contain only {covered}")
        return TensorStorageMetadata(TensorProperties(dtype), torch.Size(size), chunks)

    def _chunk(self, key: str, dtype: torch.dtype, size: list[int], chunk: Any) -> ChunkStorageMetadata:
        if not isinstance(chunk, dict):
            raise self._damaged(key, "has a part without a description")
        offsets = self._numbers(key, chunk.get("offsets"), "offsets")
        sizes = self._numbers(key, chunk.get("sizes"), "sizes")
        file = chunk.get("file")
        start, nbytes = self._numbers(key, [chunk.get("start"), chunk.get("nbytes")], "place")
        inside = len(offsets) == len(sizes) == len(size) and all(
            offset + length <= whole for offset, length, whole in zip(offsets, sizes, size, strict=True)
        )
        if not inside:
            raise self._damaged(key, f"has a part of size {sizes} at {offsets}, which does not fit its size {size}")
        listed = self._manifest.files.get(file) if isinstance(file, str) else None
        if listed is None or start + nbytes > listed.size or math.prod(sizes) * dtype.itemsize != nbytes:
            raise self._damaged(key, f"has an invalid position or length in the file {file}")
        part = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        index = MetadataIndex(key, part.offsets)
        if nbytes or index not in self._parts:  # an empty part may have the offsets of another part
            self._parts[index] = Part(Entry.of_part(key, dtype, size, offsets, sizes), Place(str(file), start, nbytes))
        return part

    def _numbers(self, key: str, values: Any, what: str) -> list[int]:
        fits = isinstance(values, list) and all(type(value) is int and 0 <= value <= _LONGEST for value in values)
        if not fits:
            raise self._damaged(key, f"has the {what} {values!r}, but only non-negative integers are allowed")
        return list(values)

    def _check_files(self) -> None:
        ends: dict[str, tuple[int, str]] = {}
        for part in sorted(self._parts.values(), key=lambda one: (one.place.file, one.place.start)):
            place = part.place
            if not place.nbytes:
                continue
            end, before = ends.get(place.file, (0, ""))
            # If tensors could share bytes, a small file could expand to a huge amount of memory.
            if place.start < end:
                raise self._damaged(part.entry.name, f"overlaps {before} in {place.file}")
            ends[place.file] = (place.start + place.nbytes, part.entry.name)

    def _damaged(self, key: str, what: str) -> DamagedCheckpointError:
        return DamagedCheckpointError(f"{self._path} is damaged: {key} {what}.")


def check_header(header: bytes, length: int, parts: Sequence[Part], path: str) -> None:
    try:
        entries = json.loads(header)
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpointError(f"{path} is damaged: its header is not JSON.") from error
    for part in parts:
        name = part.entry.name
        said = entries.get(name) if isinstance(entries, dict) else None
        if said != part.entry.described(part.place.start - length):
            raise DamagedCheckpointError(
                f"{path} is damaged: its header does not list {name} with the position, dtype and shape that the "
                "index lists."
            )


def _overlapping(chunks: Sequence[ChunkStorageMetadata]) -> tuple[ChunkStorageMetadata, ChunkStorageMetadata] | None:
    if len(chunks) < 2:
        return None
    # Sweep along the dimension with the most distinct offsets, where few parts reach beyond the next start.
    dims = range(len(chunks[0].sizes))
    along = max(dims, key=lambda dim: len({chunk.offsets[dim] for chunk in chunks}), default=None)
    if along is None:
        return chunks[0], chunks[1]  # a scalar cannot have two parts
    reaching: list[ChunkStorageMetadata] = []
    for chunk in sorted(chunks, key=lambda one: one.offsets[along]):
        reaching = [one for one in reaching if one.offsets[along] + one.sizes[along] > chunk.offsets[along]]
        for one in reaching:
            if all(
                one.offsets[dim] < chunk.offsets[dim] + chunk.sizes[dim]
                and chunk.offsets[dim] < one.offsets[dim] + one.sizes[dim]
                for dim in dims
            ):
                return one, chunk
        reaching.append(chunk)
    return None


def _at(chunk: ChunkStorageMetadata) -> str:
    return str(list(chunk.offsets))


# Reading a checkpoint's files in one pass, with their hashes computed on the way


class FileStream:
    def __init__(self, storage: Storage, path: str, listed: FileDigest, hashes: bool) -> None:
        self._path, self._listed = path, listed
        self._position = 0
        try:
            self._file: Reader = storage.open(path)
        except OSError as error:
            raise DamagedCheckpointError(f"{path} cannot be read: {error}.") from error
        self._digest = hashlib.sha256() if hashes else None

    def __enter__(self) -> FileStream:
        return self

    def __exit__(self, kind: type[BaseException] | None, *others: object) -> None:
        try:
            if kind is None and self._digest is not None:
                # The hash covers the whole file, so the rest is read too.
                self._skip_to(self._listed.size)
                check_digest(self._path, FileDigest(self._position, self._digest.hexdigest()), self._listed)
        finally:
            self._file.close()

    def read(self, start: int, target: memoryview) -> None:
        """Read bytes of the file, from offset `start` on, into a buffer.

        Offsets must ascend if the file is hashed.
        """
        self._skip_to(start)
        for block in blocks_of(target):
            self._fill(block)

    def _skip_to(self, position: int) -> None:
        if self._digest is None and position != self._position:
            self._file.seek(position)
            self._position = position
        # With hashing, the bytes in between must be read as well.
        if self._position < position:
            buffer = memoryview(bytearray(min(BLOCK, position - self._position)))
            while self._position < position:
                self._fill(buffer[: position - self._position])

    def _fill(self, block: memoryview) -> None:
        rest = block
        while len(rest):
            try:
                count = self._file.readinto(rest)
            except OSError as error:
                raise DamagedCheckpointError(f"{self._path} cannot be read: {error}.") from error
            if not count:
                raise DamagedCheckpointError(f"{self._path} ends too early: it should have {self._listed.size} bytes.")
            rest = rest[count:]
        self._position += len(block)
        if self._digest is not None:
            self._digest.update(block)


def read_range(storage: Storage, path: str, listed: FileDigest, start: int, length: int) -> Iterator[memoryview]:
    # All blocks use this buffer, so each must be used before the next one is read.
    buffer = memoryview(bytearray(min(BLOCK, length)))
    with FileStream(storage, path, listed, hashes=False) as stream:
        for done in range(0, length, BLOCK):
            block = buffer[: length - done]
            stream.read(start + done, block)
            yield block


def verify_file(storage: Storage, path: str, listed: FileDigest) -> None:
    """Read a whole file, and raise an error if it differs from the manifest."""
    with FileStream(storage, path, listed, hashes=True):
        pass


_HEADER_START = 8  # bytes that hold the length of a file's header


class SafetensorsReader(StorageReader):
    """Reader of safetensors files for `torch.distributed.checkpoint.load`."""

    def __init__(self, storage: Storage, directory: str, manifest: Manifest, hashes: bool = True) -> None:
        self._storage, self._directory, self._manifest, self._hashes = storage, directory, manifest, hashes
        self._found: TensorIndex | None = None
        self._read_files: set[str] = set()

    @property
    def index(self) -> TensorIndex:
        if self._found is None:
            path = self.path_of(INDEX)
            content = decoded(verified_bytes(self._storage, self._directory, self._manifest, INDEX), path)
            self._found = TensorIndex(content, self._manifest, path)
        return self._found

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.index.metadata

    def tensors(self) -> dict[str, TensorStorageMetadata]:
        return {
            key: one
            for key, one in self.read_metadata().state_dict_metadata.items()
            if isinstance(one, TensorStorageMetadata)
        }

    def place_of(self, key: str, offsets: torch.Size) -> Place:
        return self.index.part(MetadataIndex(key, offsets)).place

    def path_of(self, name: str) -> str:
        """Return the path or URL of one of the checkpoint's files."""
        return self._storage.join(self._directory, self._manifest.data, name)

    def unread(self) -> list[str]:
        return [name for name in self._manifest.files if name not in self._read_files]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        wanted: dict[str, dict[Part, list[ReadItem]]] = defaultdict(lambda: defaultdict(list))
        for item in plan.items:
            part = self.index.part(item.storage_index)
            if part.place.nbytes:
                wanted[part.place.file][part].append(item)
        self._read_files.update(wanted)
        jobs = [partial(self._read_file, name, parts, planner) for name, parts in sorted(wanted.items())]
        run_parallel(jobs, WORKERS)
        # The interface requires a future, although everything has been read already.
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def check_headers(self, names: Sequence[str] | None = None) -> None:
        described = self.index.files()
        for name in described if names is None else names:
            path = self.path_of(name)
            with FileStream(self._storage, path, self._manifest.files[name], hashes=False) as stream:
                self._check_header(stream, path, name, described.get(name, []))

    def _check_header(self, stream: FileStream, path: str, name: str, parts: Sequence[Part]) -> None:
        size = self._manifest.files[name].size
        start = bytearray(_HEADER_START)
        if size >= _HEADER_START:
            stream.read(0, memoryview(start))
        length = int.from_bytes(start, "little")
        if not 0 < length <= size - _HEADER_START:
            raise DamagedCheckpointError(f"{path} is damaged: it does not begin with a valid header.")
        header = bytearray(length)
        stream.read(_HEADER_START, memoryview(header))
        check_header(bytes(header), _HEADER_START + length, parts, path)

    def _read_file(self, name: str, wanted: dict[Part, list[ReadItem]], planner: LoadPlanner) -> None:
        path = self.path_of(name)
        # In file order, because the stream reads forwards only.
        parts = sorted(wanted, key=lambda part: part.place.start)
        with FileStream(self._storage, path, self._manifest.files[name], self._hashes) as stream:
            self._check_header(stream, path, name, parts)
            for part in parts:
                self._read_part(stream, part, wanted[part], planner)

    def _read_part(self, stream: FileStream, found: Part, items: list[ReadItem], planner: LoadPlanner) -> None:
        place, dtype, sizes = found.place, found.entry.dtype, torch.Size(found.entry.shape)
        targets = [planner.resolve_tensor(item).detach() for item in items]
        # Read into the destination without a copy if it is exactly this part.
        direct = len(items) == 1 and targets[0].shape == sizes and takes_bytes(targets[0], dtype)
        if direct:
            stream.read(place.start, bytes_of(targets[0]))
        else:
            whole = torch.empty(sizes, dtype=dtype)
            stream.read(place.start, bytes_of(whole))
            for item, target in zip(items, targets, strict=True):
                part = whole
                for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                    part = part.narrow(dim, start, length)
                target.copy_(part)
        for item, target in zip(items, targets, strict=True):
            planner.commit_tensor(item, target)

    # The other methods of the interface have nothing to do.
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True
