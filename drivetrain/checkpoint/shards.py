"""The tensors of a checkpoint: `torch.distributed.checkpoint` over safetensors files, without a pickle.

`SafetensorsWriter` and `SafetensorsReader` are a storage writer and reader as that module has them, so its planners
decide which process writes which part of which tensor, and which parts make up a tensor on other processes.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from drivetrain.checkpoint.direct import ALIGNMENT
from drivetrain.checkpoint.earlier import Earlier
from drivetrain.checkpoint.errors import DamagedCheckpointError
from drivetrain.checkpoint.file_plan import LARGEST_LINKED, files_of, workers
from drivetrain.checkpoint.index import FOLDER, INDEX, Part, Place, TensorIndex, check_header, entry_of
from drivetrain.checkpoint.manifest import Manifest, decoded, encoded, verified_bytes
from drivetrain.checkpoint.storage import Storage
from drivetrain.checkpoint.stream import FileStream
from drivetrain.checkpoint.tensor_file import (
    CACHE_LINE,
    GATHER_FROM,
    FileDigest,
    bytes_of,
    digest_of,
    dtype_name,
    joined_bytes,
    layout,
    run_parallel,
    takes_bytes,
    write_file,
)

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
