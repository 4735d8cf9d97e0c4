"""Writing a checkpoint: shared out between the processes, written at once or from a copy, published by one rename."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from drivetrain.checkpoint.manifest import (
    LOSS_IS_FINITE,
    WRITER_FILE,
    Manifest,
    check_replaceable,
    clean_stale,
    encoded,
    this_writer,
)
from drivetrain.checkpoint.peers import Failure, Peers
from drivetrain.checkpoint.safetensors_file import (
    WORKERS,
    FileDigest,
    aligned,
    bytes_of,
    dtype_name,
    layout,
    run_parallel,
)
from drivetrain.checkpoint.shards import FOLDER, INDEX, Place, entry_of
from drivetrain.checkpoint.storage import NO_FILE, LocalStorage, Storage, storage_of
from drivetrain.checkpoint.tree import pack
from drivetrain.runtime.errors import CheckpointError
from drivetrain.runtime.state import PartialState

SHARED_FILE = "state.json"

LARGEST_FILE = 2 << 30
"""Bytes that a file has about at most."""

# Several files on one process are hashed on several cores; small ones only cost.
_SMALLEST_SPLIT = 64 << 20


def process_file(rank: int) -> str:
    """The file of what is one process's own."""
    return f"process_{rank}.json"


class Save:
    """One checkpoint on its way to storage. Make it, and run it, on all processes.

    Making it separates plain values from tensors, and agrees on which process writes which tensor. After `copy` the
    caller may change its tensors; without, not before `run` has returned.

    Args:
        directory: The checkpoint's directory or URL; replaced where it exists.
        shared: What is the same on all processes.
        own: What is this process's own.
        state: This process among its peers.
        step: The optimizer step, for the manifest.
        storage: Where to; found from `directory` if None.
        extra: A local directory whose content becomes part of the checkpoint, and which goes; from `extra_place`.

    Raises:
        CheckpointError: On any process the state holds something that cannot be saved; raised on all.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        shared: Any,
        own: Any,
        state: PartialState,
        step: int | None = None,
        storage: Storage | None = None,
        extra: str | None = None,
    ) -> None:
        self.directory = os.fspath(directory)
        self._state, self._step, self._extra = state, step, extra
        self._peers = Peers(state)
        self._planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._held_by_peers: list[str] = []
        self._copies: dict[MetadataIndex, Tensor] = {}
        self._copy_failure: Failure | None = None
        plans = self._peers.gather(self._peers.attempt(lambda: self._prepare(shared, own, storage)))
        answers = None
        if plans is not None:
            token = uuid.uuid4().hex[:12]
            answers = [(share, token) for share in self._share_out(plans)]
        share, self._token = self._peers.scatter(answers)
        if isinstance(share, Failure):
            if extra is not None and self._peers.is_main:
                LocalStorage().discard(extra)
            self._peers.fail(share, f"The checkpoint {self.directory} was not written")
        self._items: list[WriteItem] = self._planner.finish_plan(share).items

    def _prepare(self, shared: Any, own: Any, storage: Storage | None) -> SavePlan:
        """Separate plain values from tensors. Returns this process's plan, which lists its tensors."""
        found, self.directory = storage_of(self.directory)
        self._storage = storage or found
        if self._extra is not None and not isinstance(self._storage, LocalStorage):
            raise CheckpointError(
                f"{self.directory}: hooks that write files of their own need a local checkpoint directory."
            )
        if self._peers.is_main:
            check_replaceable(self._storage, self.directory)
        for what, tree in (("shared", shared), ("own", own)):
            if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
                raise CheckpointError(f"The {what} state to save is no dict with text as keys; give it as one.")
        driver = shared.get("driver")
        entries = (shared, driver if isinstance(driver, dict) else {})
        self._finite_loss = not any(each.get(LOSS_IS_FINITE) is False for each in entries)
        self._shared, tensors = pack(shared)
        self._own, own_tensors = pack(own, f"process/{self._peers.rank}")
        self._held_by_peers = [key for key, tensor in tensors.items() if tensor.is_meta]
        if lacking := [key for key, tensor in own_tensors.items() if tensor.is_meta]:
            raise _without_values(lacking)
        held = {key: tensor for key, tensor in tensors.items() if not tensor.is_meta}
        self._planner.set_up_planner({**held, **own_tensors}, is_coordinator=self._peers.is_main)
        return self._planner.create_local_plan()

    def _share_out(self, plans: list[SavePlan | Failure]) -> list[Any]:
        """Decide on rank 0 what each process writes: a tensor that all have is written once.

        Returns:
            Each process's share; for all of them the first failure if there is any.
        """

        def decide() -> list[SavePlan]:
            shares, metadata = self._planner.create_global_plan(plans)  # type: ignore[arg-type]
            if lacking := [key for key in self._held_by_peers if key not in metadata.state_dict_metadata]:
                raise _without_values(lacking)
            return shares

        failed = next((one for one in plans if isinstance(one, Failure)), None)
        shares = self._peers.attempt(decide) if failed is None else failed
        return [shares] * self._peers.size if isinstance(shares, Failure) else shares

    def copy(self) -> None:
        """Copy what this process writes, so that training may change it. A failure is raised by `run`."""

        def copy() -> None:
            kind = self._state.kind
            pinned = kind.pins_memory and kind.name != "cpu"  # a device copies faster to page-locked memory
            for item in self._items:
                tensor = self._tensor_of(item)
                target = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
                self._copies[item.index] = target.copy_(tensor, non_blocking=pinned)
            if pinned:
                kind.synchronize()

        self._copy_failure = self._peers.attempt(copy)
        self._planner.state_dict = {}  # what was copied may go

    def _tensor_of(self, item: WriteItem) -> Tensor:
        """Return the copy of a tensor, or the tensor or this process's part of it."""
        copy = self._copies.get(item.index)
        return cast(Tensor, self._planner.resolve_data(item)) if copy is None else copy

    def run(self) -> None:
        """Write, and publish once all processes have written.

        Raises:
            CheckpointError: Any process could not write; raised on all, and what was there before is intact.
        """
        peers = self._peers
        place, self._data = self._storage.place_for(self.directory, self._token)
        gathered = peers.gather(self._copy_failure or peers.attempt(lambda: self._write(place)))
        failures = None
        if gathered is not None:
            failed = next((one for one in gathered if isinstance(one, Failure)), None)
            failures = [failed or peers.attempt(lambda: self._publish(place, gathered))] * peers.size
        failure: Failure | None = peers.scatter(failures)
        if failure is not None:
            # Only now: as long as not all have ended, another process may be writing there.
            for left in filter(None, (place, self._extra)):
                self._storage.discard(left)
            peers.fail(failure, f"The checkpoint {self.directory} could not be written")

    def _write(self, place: str) -> tuple[dict[str, FileDigest], dict[MetadataIndex, Place]]:
        """Write this process's files. Returns their sizes and hashes, and where each tensor lies."""
        storage, rank = self._storage, self._peers.rank
        files: dict[str, FileDigest] = {}
        places: dict[MetadataIndex, Place] = {}

        def write_json(name: str, content: Any) -> None:
            files[name] = storage.write(f"{place}/{name}", [memoryview(encoded(content))])

        def write_tensors(name: str, items: Sequence[WriteItem]) -> None:
            entries = [entry_of(item) for item in items]
            header, starts = layout(entries)
            # Tensors on a device come to the CPU one at a time.
            tensors = map(self._tensor_of, items)
            files[name] = storage.write(f"{place}/{name}", chain([memoryview(header)], map(bytes_of, tensors)))
            for item, entry, start in zip(items, entries, starts, strict=True):
                places[item.index] = Place(name, start, entry.nbytes)

        if self._peers.is_main and isinstance(storage, LocalStorage):
            clean_stale(os.path.dirname(self.directory))
        storage.begin(place, (FOLDER,))
        if self._peers.is_main:
            write_json(WRITER_FILE, this_writer())  # first: a place without it may be what a dead run left
            if self._extra is not None:
                for name in os.listdir(self._extra):
                    if name != WRITER_FILE:
                        os.rename(os.path.join(self._extra, name), os.path.join(place, name))
                storage.discard(self._extra)
            write_json(SHARED_FILE, self._shared)
        write_json(process_file(rank), self._own)
        jobs = [
            partial(write_tensors, f"{FOLDER}/rank_{rank}_{number}.safetensors", items)
            for number, items in enumerate(_files_of(self._items))
        ]
        run_parallel(jobs, WORKERS)
        return files, places

    def _publish(self, place: str, written: list[tuple[dict[str, FileDigest], dict[MetadataIndex, Place]]]) -> None:
        """Write the index and the manifest on rank 0, and give the checkpoint its name."""
        storage = self._storage
        files = {name: digest for each, _ in written for name, digest in each.items()}
        places = {index: one for _, each in written for index, one in each.items()}
        index = memoryview(encoded(_index_of(self._planner.metadata, places)))
        files[INDEX] = storage.write(f"{place}/{INDEX}", [index])
        found = storage.sizes(place)
        if self._extra is not None:
            assert isinstance(storage, LocalStorage)
            for name in found.keys() - files:
                if found[name] == NO_FILE:
                    raise CheckpointError(f"A hook wrote {name} as a link or a device; a checkpoint holds files only.")
                files[name] = storage.settle(os.path.join(place, name))
        for name, digest in sorted(files.items()):
            if found.get(name) != digest.size:  # better here than at the next start
                raise CheckpointError(
                    f"{place}/{name} was written by another process and is not seen from here; all "
                    "machines must write to one file system"
                )
        manifest = Manifest(files, self._peers.size, self._step, time.time(), self._data, self._finite_loss)
        storage.publish(place, self.directory, self._token, memoryview(manifest.to_bytes()))


def _without_values(keys: list[str]) -> CheckpointError:
    return CheckpointError(
        f"{', '.join(keys[:8])} is on the meta device and has no values yet. Materialise the model first."
    )


def _files_of(items: Sequence[WriteItem]) -> list[list[WriteItem]]:
    """Spread a process's tensors over files of about the same size, each in the order that the file has them in."""
    sizes = [entry_of(item).nbytes for item in items]
    limit = min(LARGEST_FILE, max(_SMALLEST_SPLIT, -(-sum(sizes) // WORKERS)))
    files: list[list[WriteItem]] = []
    room = 0
    for item, size in zip(items, sizes, strict=True):
        if not files or (size > room and room < limit):
            files.append([])
            room = limit
        files[-1].append(item)
        room -= size
    return [[file[position] for position in aligned(map(entry_of, file))] for file in files]


def _index_of(metadata: Metadata, places: dict[MetadataIndex, Place]) -> dict[str, Any]:
    """Return the index: for each tensor its dtype, its size, and where its parts lie."""
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
    return {"tensors": tensors}


def extra_place(directory: str | os.PathLike[str], state: PartialState) -> str:
    """Make a directory that hooks may write files to, for `extra=` of a save. Call it on all processes.

    Args:
        directory: The checkpoint's directory.
        state: This process among its peers.
    """
    peers = Peers(state)

    def make() -> str:
        storage, path = storage_of(directory)
        if not isinstance(storage, LocalStorage):
            raise CheckpointError(f"{path}: hooks that write files of their own need a local checkpoint directory.")
        place, _ = storage.place_for(path, uuid.uuid4().hex[:12])
        try:
            storage.begin(place, ())
            storage.write(f"{place}/{WRITER_FILE}", [memoryview(encoded(this_writer()))])
        except BaseException:
            storage.discard(place)
            raise
        return place

    made = peers.attempt(make) if peers.is_main else None
    answer: str | Failure = peers.scatter([made] * peers.size if peers.is_main else None)
    if isinstance(answer, Failure):
        peers.fail(answer, f"The checkpoint {os.fspath(directory)} could not be written")
    return answer
