"""The tensors of a checkpoint: `torch.distributed.checkpoint` over safetensors files, without a pickle.

`SafetensorsWriter` and `SafetensorsReader` are a storage writer and reader as that module has them, so its planners
decide which process writes which part of which tensor, and which parts make up a tensor on other processes.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from drivetrain.checkpoint.manifest import Manifest, check_digest, decoded, encoded, read_manifest, verified_bytes
from drivetrain.checkpoint.safetensors_file import (
    ALIGNMENT,
    BLOCK,
    CACHE_LINE,
    GATHER_FROM,
    Entry,
    FileDigest,
    Hasher,
    MappedRange,
    aligned,
    blocks_of,
    bytes_of,
    digest_of,
    dtype_name,
    joined_bytes,
    layout,
    run_parallel,
    takes_bytes,
    write_file,
)
from drivetrain.checkpoint.storage import MANIFEST, Reader, Storage
from drivetrain.checkpoint.tree import DTYPES
from drivetrain.runtime.errors import CheckpointError, DamagedCheckpointError

# The index of a checkpoint's tensors: where the parts of each lie, checked before anything is read by it


FOLDER = "tensors"
"""The folder of a checkpoint that its tensors and their index are in."""

INDEX = f"{FOLDER}/index.json"

_STORED = {name: dtype for name, dtype in DTYPES.items() if not re.fullmatch(r"u?int[1-7]", name)}
_LONGEST = 2**63 - 1


@dataclass(frozen=True)
class Place:
    """Where one part of a tensor lies."""

    file: str
    start: int
    nbytes: int


@dataclass(frozen=True)
class Part:
    """One part of a tensor.

    Attributes:
        entry: Its name in its file, its dtype and its sizes.
        place: Where it lies.
    """

    entry: Entry
    place: Place


class TensorIndex:
    """Every tensor of a checkpoint, and where its parts lie.

    Args:
        content: What `index.json` holds.
        manifest: Of the checkpoint.
        path: The index's path, for messages.

    Attributes:
        metadata: The tensors as `torch.distributed.checkpoint` describes them.

    Raises:
        DamagedCheckpointError: It cannot be the index of these files; the tensor is named.
    """

    def __init__(self, content: Any, manifest: Manifest, path: str) -> None:
        self._manifest, self._path = manifest, path
        self._parts: dict[MetadataIndex, Part] = {}
        tensors = content.get("tensors") if isinstance(content, dict) else None
        if not isinstance(tensors, dict):
            raise DamagedCheckpointError(f"{path} is damaged: it lists no tensors.")
        self.metadata = Metadata({key: self._described(key, one) for key, one in tensors.items()})
        self._check_files()

    def part(self, index: MetadataIndex) -> Part:
        """A part of a tensor."""
        return self._parts[index]

    def files(self) -> dict[str, list[Part]]:
        """For each file with tensors the parts in it that are not empty."""
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
            raise self._damaged(key, f"has the dtype {one.get('dtype')!r}, which no tensor of a checkpoint has")
        size = self._numbers(key, one.get("size"), "size")
        if math.prod(max(1, length) for length in size) * dtype.itemsize > _LONGEST:
            raise self._damaged(key, f"has the size {size}, which no tensor has")
        chunks = [self._chunk(key, dtype, size, chunk) for chunk in one["chunks"]]
        filled = [chunk for chunk in chunks if chunk.sizes.numel()]
        pair = _overlapping(filled)
        if pair is not None:
            raise self._damaged(key, f"has two parts for one place, at {_at(pair[0])} and {_at(pair[1])}")
        covered = sum(chunk.sizes.numel() for chunk in filled)
        if covered != math.prod(size):
            raise self._damaged(key, f"has {math.prod(size)} values, of which its parts hold only {covered}")
        return TensorStorageMetadata(TensorProperties(dtype), torch.Size(size), chunks)

    def _chunk(self, key: str, dtype: torch.dtype, size: list[int], chunk: Any) -> ChunkStorageMetadata:
        if not isinstance(chunk, dict):
            raise self._damaged(key, "has a part that is not described")
        offsets = self._numbers(key, chunk.get("offsets"), "offsets")
        sizes = self._numbers(key, chunk.get("sizes"), "sizes")
        file = chunk.get("file")
        start, nbytes = self._numbers(key, [chunk.get("start"), chunk.get("nbytes")], "place")
        inside = len(offsets) == len(sizes) == len(size) and all(
            offset + length <= whole for offset, length, whole in zip(offsets, sizes, size, strict=True)
        )
        if not inside:
            raise self._damaged(key, f"has a part of {sizes} at {offsets}, but is {size} in all")
        listed = self._manifest.files.get(file) if isinstance(file, str) else None
        if listed is None or start + nbytes > listed.size or math.prod(sizes) * dtype.itemsize != nbytes:
            raise self._damaged(key, f"cannot lie where it is said to, in {file}")
        part = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        index = MetadataIndex(key, part.offsets)
        if nbytes or index not in self._parts:  # an empty part may begin where another one does
            self._parts[index] = Part(_entry(key, dtype, size, offsets, sizes), Place(str(file), start, nbytes))
        return part

    def _numbers(self, key: str, values: Any, what: str) -> list[int]:
        fits = isinstance(values, list) and all(type(value) is int and 0 <= value <= _LONGEST for value in values)
        if not fits:
            raise self._damaged(key, f"has the {what} {values!r}, which are not numbers of 0 or more")
        return list(values)

    def _check_files(self) -> None:
        """Let no bytes belong to two parts: a small file could stand for more memory than there is."""
        ends: dict[str, tuple[int, str]] = {}
        for part in sorted(self._parts.values(), key=lambda one: (one.place.file, one.place.start)):
            place = part.place
            if not place.nbytes:
                continue
            end, before = ends.get(place.file, (0, ""))
            if place.start < end:
                raise self._damaged(part.entry.name, f"lies where {before} does, in {place.file}")
            ends[place.file] = (place.start + place.nbytes, part.entry.name)

    def _damaged(self, key: str, what: str) -> DamagedCheckpointError:
        return DamagedCheckpointError(f"{self._path} is damaged: {key} {what}.")


def entry_name(key: str, size: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> str:
    """The name that a part of a tensor has in its file."""
    return key if tuple(sizes) == tuple(size) else f"{key}@{','.join(map(str, offsets))}"


def entry_of(item: WriteItem) -> Entry:
    """The part of a tensor that an item of a plan asks to write."""
    data = item.tensor_data
    assert data is not None
    name = entry_name(item.index.fqn, data.size, data.chunk.offsets, data.chunk.sizes)
    return Entry(name, data.properties.dtype, tuple(data.chunk.sizes))


def _entry(key: str, dtype: torch.dtype, size: list[int], offsets: list[int], sizes: list[int]) -> Entry:
    return Entry(entry_name(key, size, offsets, sizes), dtype, tuple(sizes))


def check_header(header: bytes, length: int, parts: Sequence[Part], path: str) -> None:
    """Compare the index's description of a file with the file's own header.

    Args:
        header: The header, JSON.
        length: How many bytes come before the tensors.
        parts: What lies in the file by the index.
        path: The file's path.

    Raises:
        DamagedCheckpointError: They differ; the tensor is named.
    """
    try:
        entries = json.loads(header)
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpointError(f"{path} is damaged: its header is not JSON.") from error
    for part in parts:
        name = part.entry.name
        said = entries.get(name) if isinstance(entries, dict) else None
        if said != part.entry.described(part.place.start - length):
            raise DamagedCheckpointError(
                f"{path} is damaged: its header does not have {name} where it lies by the index, with that "
                "dtype and shape."
            )


def _overlapping(chunks: Sequence[ChunkStorageMetadata]) -> tuple[ChunkStorageMetadata, ChunkStorageMetadata] | None:
    """Two parts, none of them empty, that hold a value in common."""
    if len(chunks) < 2:
        return None
    # Along the dimension that they are spread over most, only few reach beyond the start of the next one.
    dims = range(len(chunks[0].sizes))
    along = max(dims, key=lambda dim: len({chunk.offsets[dim] for chunk in chunks}), default=None)
    if along is None:
        return chunks[0], chunks[1]  # two parts of a number
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


# Which of a process's tensors lie in which file, and in what order


LARGEST_FILE = 2 << 30
"""Bytes that a file has about at most."""

LARGEST_LINKED = 256 << 20
"""The same of files that may be linked, since one tensor that does change has all of its file written."""

# Several files on one process let it hash on several cores; small ones only cost.
_SMALLEST_SPLIT = 64 << 20
_FILES_AT_ONCE = 4


def files_of(items: Sequence[WriteItem], largest: int = LARGEST_FILE) -> list[list[WriteItem]]:
    """Spread a process's items over files of about the same size, each in the order that the file has them in.

    Args:
        items: What the process writes.
        largest: Bytes that a file has about at most.
    """
    sizes = [entry_of(item).nbytes for item in items]
    limit = min(largest, max(_SMALLEST_SPLIT, -(-sum(sizes) // _FILES_AT_ONCE)))
    files: list[list[WriteItem]] = []
    room = 0
    for item, size in zip(items, sizes, strict=True):
        if not files or (size > room and room < limit):
            files.append([])
            room = limit
        files[-1].append(item)
        room -= size
    return [[file[position] for position in aligned(map(entry_of, file))] for file in files]


def workers() -> int:
    """How many files are written or read at once."""
    return min(_FILES_AT_ONCE, os.cpu_count() or 1)


# What of a checkpoint need not be written, since the one before holds it: such files are linked from there


SMALLEST = 1 << 20
"""Bytes from which on a tensor is worth a link; less is written sooner."""

_PROBES = 4
_PROBE_BYTES = 512


class Earlier:
    """The newest checkpoint beside one that is being written, which is also the one that this replaces.

    Args:
        storage: Where both are.
        directory: The checkpoint that is being written.
        changing: What optimizers change, and none needs to compare.
    """

    def __init__(self, storage: Storage, directory: str, changing: Collection[MetadataIndex]) -> None:
        self._storage, self._directory, self._changing = storage, directory, changing
        self._found: str | None = None
        self._manifest: Manifest | None = None
        self._index: TensorIndex | None = None
        self._names: dict[FileDigest, str] = {}

    def part(self, items: Sequence[WriteItem]) -> tuple[list[WriteItem], list[WriteItem]]:
        """Part what is to be written into what is written in any case, and what is likely there already.

        Args:
            items: What is to be written.
        """
        others: list[WriteItem] = []
        likely: list[WriteItem] = []
        for item in items:
            fits = self._storage.has_links and item.index not in self._changing and entry_of(item).nbytes >= SMALLEST
            (likely if fits else others).append(item)
        return others, likely

    def compare(
        self, likely: Sequence[WriteItem], resolve: Callable[[WriteItem], Any]
    ) -> tuple[list[WriteItem], list[WriteItem]]:
        """Find the earlier checkpoint, and part what is likely there into what differs and what seems the same.

        Args:
            likely: From `part`.
            resolve: Gives the tensor of each.
        """
        if likely:
            self._open()
        differing: list[WriteItem] = []
        same: list[WriteItem] = []
        for item in likely:
            (differing if self._differs(item, resolve) else same).append(item)
        return differing, same

    def may_have(self, size: int) -> bool:
        """Whether it is worth hashing a file of this size before it is written."""
        return any(digest.size == size for digest in self._names)

    def link(self, digest: FileDigest, target: str) -> bool:
        """Give the file of this content a second name.

        Args:
            digest: Its size and hash.
            target: The name.

        Returns:
            Whether there is such a file and it could be linked; else it has to be written.
        """
        name = self._names.get(digest)
        if name is None or self._found is None or self._manifest is None:
            return False
        source = self._storage.join(self._found, self._manifest.data, name)
        return self._storage.link(source, target, digest.size, self._storage.join(self._found, MANIFEST))

    def _open(self) -> None:
        """Read what the newest checkpoint beside consists of; nothing where there is none, or it is not whole."""
        parent = self._storage.parent(self._directory)
        names = [name for name in self._storage.children(parent or ".") if not name.startswith(".")]
        paths = [self._storage.join(parent, name) for name in names]
        written = {path: self._storage.modified(self._storage.join(path, MANIFEST)) for path in paths}
        newest = max(paths, key=written.__getitem__, default=None)
        if newest is None or not written[newest]:
            return
        try:
            manifest = read_manifest(self._storage, newest)
            raw = verified_bytes(self._storage, newest, manifest, INDEX)
            self._index = TensorIndex(decoded(raw, INDEX), manifest, INDEX)
        except (CheckpointError, OSError):  # damaged, or removed meanwhile: all is written
            return
        self._found, self._manifest = newest, manifest
        self._names = {digest: name for name, digest in manifest.files.items()}

    def _differs(self, item: WriteItem, resolve: Callable[[WriteItem], Any]) -> bool:
        """Whether a few bytes show that a tensor has changed, such as an average of weights, which no optimizer has."""
        if self._index is None or self._found is None or self._manifest is None:
            return False
        try:
            part = self._index.part(item.index)
        except KeyError:
            return False
        if part.entry != entry_of(item):
            return False
        tensor = resolve(item)
        assert isinstance(tensor, Tensor)
        flat = tensor.detach().reshape(-1)
        count = _PROBE_BYTES // flat.itemsize
        path = self._storage.join(self._found, self._manifest.data, part.place.file)
        there = memoryview(bytearray(count * flat.itemsize))
        try:
            with contextlib.closing(self._storage.open(path)) as file:
                for probe in range(_PROBES):
                    start = (flat.numel() - count) * probe // (_PROBES - 1)
                    file.seek(part.place.start + start * flat.itemsize)
                    file.readinto(there)
                    if there != bytes_of(flat[start : start + count]):
                        return True
        except OSError:
            return True
        return False


# Reading a checkpoint's files in one pass, with their hashes computed on the way


class FileStream:
    """Reads parts of a file in ascending order; hashes all of it on the way, or skips what is not asked for."""

    def __init__(self, storage: Storage, path: str, listed: FileDigest, hashes: bool, once: bool = False) -> None:
        self._path, self._listed = path, listed
        self._position = 0
        try:
            self._file: Reader = storage.open(path, once)
        except OSError as error:
            raise DamagedCheckpointError(f"{path} cannot be read: {error}.") from error
        self._hasher = Hasher() if hashes else None
        self._free: SimpleQueue[memoryview] | None = None

    def __enter__(self) -> FileStream:
        return self

    def __exit__(self, kind: type[BaseException] | None, *others: object) -> None:
        try:
            if kind is None and self._hasher is not None:
                self._skip_to(self._listed.size)
                check_digest(self._path, self._hasher.close(), self._listed)
        finally:
            self._file.close()
            if self._hasher is not None:
                self._hasher.close()

    def read(self, start: int, target: memoryview) -> None:
        """Fill a buffer from a position on."""
        self._skip_to(start)
        for block in blocks_of(target):
            self._fill(block)
            if self._hasher is not None:
                self._hasher.add(block)

    def _skip_to(self, position: int) -> None:
        if position == self._position:
            return
        if self._hasher is None:
            self._file.seek(position)
            self._position = position
            return
        free = self._scratch()
        while self._position < position:
            buffer = free.get()
            block = buffer[: min(len(buffer), position - self._position)]
            self._fill(block)
            self._hasher.add(block, partial(free.put, buffer))

    def _scratch(self) -> SimpleQueue[memoryview]:
        """Buffers for what is only hashed, each back here once it is."""
        if self._free is None:
            self._free = SimpleQueue()
            for _ in range(3):
                self._free.put(memoryview(bytearray(min(BLOCK, self._listed.size))))
        return self._free

    def _fill(self, block: memoryview) -> None:
        size = len(block)
        while len(block):
            try:
                count = self._file.readinto(block)
            except OSError as error:
                raise DamagedCheckpointError(f"{self._path} cannot be read: {error}.") from error
            if not count:
                raise DamagedCheckpointError(f"{self._path} ends too early: it should have {self._listed.size} bytes.")
            block = block[count:]
        self._position += size


def read_ranges(
    storage: Storage,
    path: str,
    listed: FileDigest,
    ranges: Sequence[tuple[int, int]],
    take: Callable[[memoryview], None],
) -> None:
    """Read ranges (start, length) of a file, unhashed, a block at a time through one buffer.

    Args:
        storage: Where the file is.
        path: The file.
        listed: Its size and hash in the manifest.
        ranges: What to read.
        take: Is given each block, which is overwritten by the next.
    """
    buffer = memoryview(bytearray(BLOCK))
    with FileStream(storage, path, listed, hashes=False) as stream:
        for start, length in ranges:
            for done in range(0, length, BLOCK):
                block = buffer[: min(BLOCK, length - done)]
                stream.read(start + done, block)
                take(block)


def verify_file(storage: Storage, path: str, listed: FileDigest, once: bool = False) -> None:
    """Hash a whole file and compare."""
    with FileStream(storage, path, listed, hashes=True, once=once):
        pass


_HEADER_START = 8  # bytes that hold the length of a file's header


class SnapshotPlanner(DefaultSavePlanner):
    """The default planner, which can take the tensors' values from copies made earlier."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.copies: dict[MetadataIndex, Tensor] = {}

    def resolve_data(self, write_item: WriteItem) -> Any:
        copy = self.copies.get(write_item.index)
        return super().resolve_data(write_item) if copy is None else copy


class SafetensorsWriter(StorageWriter):
    """Writes this process's part of a checkpoint's tensors, and on rank 0 the index of all.

    Args:
        storage: Where to.
        place: The directory that the checkpoint is written in.
        rank: This process's rank, which its files are named after.
        earlier: The checkpoint before, from which files are linked that did not change; None to write all.
    """

    def __init__(self, storage: Storage, place: str, rank: int, earlier: Earlier | None = None) -> None:
        self._storage, self._place, self._rank, self._earlier = storage, place, rank, earlier
        self.files: dict[str, FileDigest] = {}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the items of a plan, in several files at once where there is much."""
        results: list[WriteResult] = []
        if self._earlier is None:
            files = [(items, False) for items in files_of(plan.items)]
        else:
            others, likely = self._earlier.part(plan.items)
            differing, same = self._earlier.compare(likely, planner.resolve_data)
            files = [(items, False) for items in files_of(others) + files_of(differing, LARGEST_LINKED)]
            files += [(items, True) for items in files_of(same, LARGEST_LINKED)]
        jobs = [
            partial(self._write_file, f"{FOLDER}/rank_{self._rank}_{number}.safetensors", *file, planner, results)
            for number, file in enumerate(files)
        ]
        run_parallel(jobs, workers=workers())
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _write_file(
        self, name: str, items: Sequence[WriteItem], same: bool, planner: SavePlanner, results: list[WriteResult]
    ) -> None:
        entries = [entry_of(item) for item in items]
        size = sum(entry.nbytes for entry in entries)
        # Staged copies begin at such a multiple too, so they are written from where they are.
        header, starts = layout(entries, multiple=ALIGNMENT if size >= GATHER_FROM else CACHE_LINE)
        path = self._storage.join(self._place, name)

        def parts() -> Iterator[memoryview]:
            yield memoryview(header)
            # The strategy's local shards, or whole tensors; on the CPU by now or one at a time.
            yield from joined_bytes(cast(Tensor, planner.resolve_data(item)) for item in items)

        known: FileDigest | None = None
        if same and self._earlier is not None and self._earlier.may_have(len(header) + size):
            known = digest_of(parts())
        if known is None or self._earlier is None or not self._earlier.link(known, path):
            known = write_file(self._storage.create(path), parts(), size, known)
        self.files[name] = known
        for item, entry, start in zip(items, entries, starts, strict=True):
            results.append(WriteResult(item.index, entry.nbytes, Place(name, start, entry.nbytes)))

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index: for each tensor its dtype, its size, and where its parts lie."""
        places = {result.index: result.storage_data for each in results for result in each}
        tensors = {}
        for key, described in metadata.state_dict_metadata.items():
            assert isinstance(described, TensorStorageMetadata)
            chunks = []
            for chunk in described.chunks:
                place = places[MetadataIndex(key, chunk.offsets)]
                at = {"offsets": list(chunk.offsets), "sizes": list(chunk.sizes)}
                chunks.append({**at, "file": place.file, "start": place.start, "nbytes": place.nbytes})
            dtype = dtype_name(described.properties.dtype)
            tensors[key] = {"dtype": dtype, "size": list(described.size), "chunks": chunks}
        raw = memoryview(encoded({"tensors": tensors}))
        self.files[INDEX] = write_file(self._storage.create(self._storage.join(self._place, INDEX)), [raw])

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self.files = {}

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


class SafetensorsReader(StorageReader):
    """Reads tensors straight into their destinations and checks the files that they come from.

    Args:
        storage: Where from.
        directory: The checkpoint.
        manifest: What it consists of.
        hashes: Whether the SHA-256 of each file that is read from is checked; their sizes are known to be right.
        once: Whether no other process of this machine reads it as well, so that caching it is of no use.
    """

    def __init__(
        self, storage: Storage, directory: str, manifest: Manifest, hashes: bool = True, once: bool = False
    ) -> None:
        self._storage, self._directory, self._manifest = storage, directory, manifest
        self._hashes, self._once = hashes, once
        self._found: TensorIndex | None = None
        self._read_files: set[str] = set()

    @property
    def index(self) -> TensorIndex:
        """The index of all tensors, read and checked when it is first needed."""
        if self._found is None:
            path = self.path_of(INDEX)
            content = decoded(verified_bytes(self._storage, self._directory, self._manifest, INDEX), path)
            self._found = TensorIndex(content, self._manifest, path)
        return self._found

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The tensors as the planners want them described."""
        return self.index.metadata

    def tensors(self) -> dict[str, TensorStorageMetadata]:
        """Every tensor by key, with its dtype, its size and its parts."""
        return {
            key: one
            for key, one in self.read_metadata().state_dict_metadata.items()
            if isinstance(one, TensorStorageMetadata)
        }

    def place_of(self, key: str, offsets: torch.Size) -> Place:
        """Where a part of a tensor lies."""
        return self.index.part(MetadataIndex(key, offsets)).place

    def path_of(self, name: str) -> str:
        """The path of a file that the manifest names."""
        return self._storage.join(self._directory, self._manifest.data, name)

    def unread(self) -> list[str]:
        """The files that no tensor has been read from yet."""
        return [name for name in self._manifest.files if name not in self._read_files]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what a plan asks for, several files at once."""
        wanted: dict[str, dict[Part, list[ReadItem]]] = defaultdict(lambda: defaultdict(list))
        for item in plan.items:
            part = self.index.part(item.storage_index)
            if part.place.nbytes:
                wanted[part.place.file][part].append(item)
        self._read_files.update(wanted)
        jobs = [partial(self._read_file, name, parts, planner) for name, parts in sorted(wanted.items())]
        run_parallel(jobs, workers=workers())
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def check_headers(self, names: Sequence[str] | None = None) -> None:
        """Compare the headers of files with the index; where tensors are read, that is done on the way.

        Args:
            names: Which files; all that the index names if None.
        """
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
            raise DamagedCheckpointError(f"{path} is damaged: it does not begin with a header.")
        header = bytearray(length)
        stream.read(_HEADER_START, memoryview(header))
        check_header(bytes(header), _HEADER_START + length, parts, path)

    def _read_file(self, name: str, wanted: dict[Part, list[ReadItem]], planner: LoadPlanner) -> None:
        path = self.path_of(name)
        parts = sorted(wanted, key=lambda part: part.place.start)
        with FileStream(self._storage, path, self._manifest.files[name], self._hashes, self._once) as stream:
            self._check_header(stream, path, name, parts)
            for part in parts:
                self._read_part(stream, part, wanted[part], planner)

    def _read_part(self, stream: FileStream, found: Part, items: list[ReadItem], planner: LoadPlanner) -> None:
        place, dtype, sizes = found.place, found.entry.dtype, torch.Size(found.entry.shape)
        targets = [planner.resolve_tensor(item).detach() for item in items]
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


# Parts of files that a thread reads into the system's cache, ahead of what uses them through a mapping


_AT_ONCE = 1 << 20  # as much as a pipe holds at most for users without further rights


class ReadAhead:
    """Reads parts of files into the system's cache, one after the other in the order in which they are asked for.

    On Linux nothing is copied: a file's pages go through a pipe to nowhere, and the system reads as far ahead as for
    any file that is read from its beginning on. `madvise` takes ten times as much of a processor's time, and fills the
    cache with small pages, which cost the reader twenty times as many page faults (Linux 6.18). Elsewhere the system is
    asked for the pages, and may read them meanwhile.
    """

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._threads: ThreadPoolExecutor | None = None
        self._process = os.getpid()
        self._parts: dict[int, futures.Future[None] | None] = {}

    def ask(self, number: int, ranges: Sequence[MappedRange]) -> None:
        """Have parts of files read, unless they are on their way.

        Args:
            number: What stands for them.
            ranges: The parts.
        """
        if self._process != os.getpid():  # a fork has none of the threads
            self._begin()
        if number in self._parts:
            return
        if not hasattr(os, "splice"):
            _advise(ranges)
            self._parts[number] = None
            return
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, "drivetrain-read-ahead")
        self._parts[number] = self._threads.submit(_read, ranges)

    def wait(self, number: int) -> None:
        """Wait until what was asked for is in memory.

        Args:
            number: What stands for it.
        """
        found = self._parts.get(number)
        if found is not None and self._process == os.getpid():
            found.result()

    def forget(self, number: int) -> None:
        """Let parts be read again when they are asked for again.

        Args:
            number: What stands for them.
        """
        self._parts.pop(number, None)

    def __reduce__(self) -> tuple[Any, ...]:
        return ReadAhead, ()


def _advise(ranges: Sequence[MappedRange]) -> None:
    for each in ranges:
        each.file.will_need(each.start, each.end)


def _read(ranges: Sequence[MappedRange]) -> None:
    try:
        with _pipe_to_nowhere() as (source, sink, nowhere):
            for each in ranges:
                with open(each.file.path, "rb", buffering=0) as file:
                    position = each.start
                    while position < each.end:
                        count = os.splice(file.fileno(), sink, min(_AT_ONCE, each.end - position), offset_src=position)
                        if not count:
                            break  # it was truncated, which is found where it is used
                        position += count
                        while count:
                            count -= os.splice(source, nowhere, count)
    except OSError:  # a file system without it, or a file that is gone, which is found where it is used
        _advise(ranges)


@contextlib.contextmanager
def _pipe_to_nowhere() -> Iterator[tuple[int, int, int]]:
    import fcntl  # not on every system

    source, sink = os.pipe()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        with contextlib.suppress(OSError):  # a user has so many pages of pipes and no more
            fcntl.fcntl(sink, fcntl.F_SETPIPE_SZ, _AT_ONCE)
        yield source, sink, nowhere
    finally:
        for each in (source, sink, nowhere):
            os.close(each)
