"""Writing a checkpoint: planned and copied at once, written then or in the background, published by one rename."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
import time
import uuid
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

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
    ALIGNMENT,
    HUGE_PAGE,
    FileDigest,
    huge_memory,
    run_parallel,
    write_file,
)
from drivetrain.checkpoint.shards import FOLDER, LARGEST_LINKED, Earlier, SafetensorsWriter, SnapshotPlanner, files_of
from drivetrain.checkpoint.storage import NO_FILE, LocalStorage, Storage, storage_of
from drivetrain.checkpoint.tree import pack
from drivetrain.runtime.devices import DeviceKind
from drivetrain.runtime.errors import CheckpointError
from drivetrain.runtime.state import PartialState

# Memory copied to memory in several threads, at once or beside something else


Pair = tuple[str, Tensor, Tensor]
"""A name, where to, and what is copied, each in one piece of memory on the CPU."""


class Copying:
    """Copies that are made by whichever threads come to `finish`, each taking the next piece.

    The C library goes past the caches, which the copy would only evict, and releases the GIL; a `copy_` for each
    tensor took three times as long (torch 2.13), since its threads also wait for each other after every tensor.

    Args:
        pairs: What to copy.
        piece: Bytes that a thread takes at a time.
    """

    def __init__(self, pairs: Sequence[Pair], piece: int) -> None:
        self._sources = [(name, source, _version(source)) for name, _, source in pairs]
        self._pieces: list[tuple[int, int, int]] = []
        for _, target, source in reversed(pairs):
            size, to, at = source.numel() * source.itemsize, target.data_ptr(), source.data_ptr()
            for start in range(0, size, piece):
                self._pieces.append((to + start, at + start, min(piece, size - start)))
        self._left = len(self._pieces)
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._changed: list[str] = []
        if not self._pieces:
            self._end()

    def finish(self, threads: int = 0) -> list[str]:
        """Copy what is left, and return when all is copied. Several threads may call it.

        Args:
            threads: How many to start for it. Without, the calling one copies, which must not be the main one where
                others wait too: it could be interrupted with a piece in hand.

        Returns:
            Names of what was changed in place meanwhile, so that its copy is of no use.
        """
        if not self._done.is_set():
            if threads:
                run_parallel([self._work] * max(2, threads), max(2, threads))
            else:
                self._work()
            self._done.wait()
        return self._changed

    def _work(self) -> None:
        while True:
            try:
                piece = self._pieces.pop()
            except IndexError:
                return
            ctypes.memmove(*piece)
            with self._lock:
                self._left -= 1
                is_last = self._left == 0
            if is_last:
                self._end()

    def _end(self) -> None:
        try:  # before those that wait continue, and may change them
            self._changed = [name for name, source, version in self._sources if _version(source) != version]
        finally:
            self._sources.clear()
            self._done.set()


def _version(tensor: Tensor) -> int:
    """How often a tensor was changed in place; always 0 where torch does not count."""
    return 0 if tensor.is_inference() else tensor._version


# Copies of tensors that training continues to change


# Page-locked memory is in small pages, and a device takes only so many pieces at once: `aligned_block`. What begins
# where no page does is gathered into such blocks when it is written.
_OFF_PAGE = 64
_SMALLEST_LATE = 64  # bytes; step counts are less
_TOUCHED_AT_ONCE = 64 << 20
# Into huge pages 23 GB/s, against 21 in pieces of 8 MB and 20 into small pages (glibc 2.36, EPYC, two cores): pieces
# below the size of the second cache are moved by one instruction, which need not read the target first.
_COPIED_AT_ONCE = 512 << 10
# Beside training each piece costs a turn at the interpreter.
_COPIED_LATE_AT_ONCE = 4 << 20


@dataclass
class Staged:
    """Where copies of a state will be.

    Attributes:
        copies: The copies, on the CPU and contiguous.
        late: Has to finish before all of them hold their values.
    """

    copies: dict[MetadataIndex, Tensor]
    late: Copying


class StagingBuffer:
    """One piece of host memory for copies of a state, kept from one save to the next.

    It is page-locked where tensors are on a device that copies faster to such memory. Else it is in huge pages, which
    come faster, and no child gets it: the first copy after a fork would copy each page of it as well.
    """

    def __init__(self) -> None:
        self._memory: Tensor | None = None
        self._used = 0
        self._preparation: _Preparation | None = None

    @property
    def nbytes(self) -> int:
        """How much memory is held, without what was never touched."""
        return self._used

    def prepare(self, likely: int, limit: int, kind: DeviceKind) -> None:
        """Get memory in the background, before the first copy: the system takes its time to hand it out.

        Nothing happens where it would be page-locked, which needs the device that this process works on.

        Args:
            likely: Bytes that will be copied, about; so many are made ready.
            limit: How many it can be at most.
            kind: The kind of device that the tensors will be on.
        """
        if likely > 0 and self._memory is None and self._preparation is None and not _is_pinned(kind):
            with contextlib.suppress(OSError):  # the copy fails if there is too little
                self._preparation = _Preparation(likely, limit)

    def release(self) -> None:
        """Give the memory back; copies stay valid as long as they are referred to."""
        if self._preparation is not None:
            self._preparation.take()
        self._memory = self._preparation = None
        self._used = 0

    def copy(
        self, files: Sequence[Mapping[MetadataIndex, Tensor]], kind: DeviceKind, may_wait: Collection[int] = ()
    ) -> Staged:
        """Copy tensors into the buffer, as files have them: one behind the other, and a file where a page begins.

        They are then written from where they lie, but for memory that is page-locked.

        Args:
            files: What to copy, for each file in its order.
            kind: The kind of device that they are on, or the CPU.
            may_wait: `address_of` of tensors that do not change before `late` of the result has finished.

        Returns:
            The copies, valid until the next call.
        """
        pinned = _is_pinned(kind)
        placed: list[tuple[MetadataIndex, Tensor, int]] = []
        total = 0
        for file in files:
            total = -(-total // ALIGNMENT) * ALIGNMENT + (_OFF_PAGE if pinned else 0)
            for index, tensor in file.items():
                placed.append((index, tensor, total))
                total += tensor.numel() * tensor.itemsize
        memory = self._reserve(total, pinned)
        copies: dict[MetadataIndex, Tensor] = {}
        now: list[Pair] = []
        late: list[Pair] = []
        for index, tensor, start in placed:
            size = tensor.numel() * tensor.itemsize
            copy = memory[start : start + size].view(tensor.dtype).view(tensor.shape)
            if not _is_plain(tensor):
                copy.copy_(tensor, non_blocking=memory.is_pinned())
            elif size >= _SMALLEST_LATE and address_of(tensor) in may_wait:
                late.append((index.fqn, copy, tensor))
            else:
                now.append((index.fqn, copy, tensor))
            copies[index] = copy
        Copying(now, _COPIED_AT_ONCE).finish(torch.get_num_threads())
        if memory.is_pinned():
            kind.synchronize()
        return Staged(copies, Copying(late, _COPIED_LATE_AT_ONCE))

    def _reserve(self, size: int, pinned: bool) -> Tensor:
        if self._preparation is not None:
            self._memory, self._used = self._preparation.take()
            self._preparation = None
        if self._memory is None or self._memory.numel() < size or self._memory.is_pinned() != pinned:
            self._memory, self._used = None, 0  # the old piece goes before the new one comes
            self._memory = _host_memory(size, pinned)
        self._used = max(self._used, size)
        return self._memory


class _Preparation:
    """Memory on its way."""

    def __init__(self, likely: int, limit: int) -> None:
        self._touched = 0
        self._memory = _host_memory(max(likely, limit), pinned=False)
        self._needed = threading.Event()
        # Not a daemon: one that the interpreter's end finds within torch brings the process down.
        self._thread = threading.Thread(target=self._touch, args=(likely,), name="drivetrain-staging")
        self._thread.start()

    def take(self) -> tuple[Tensor, int]:
        """The memory, and how much of it has been touched by now; the rest comes when it is."""
        self._needed.set()
        self._thread.join()
        return self._memory, self._touched

    def _touch(self, size: int) -> None:
        for start in range(0, size, _TOUCHED_AT_ONCE):
            if self._needed.is_set():
                return
            end = min(size, start + _TOUCHED_AT_ONCE)
            self._memory[start : end : mmap.PAGESIZE].zero_()
            self._touched = end


def _is_pinned(kind: DeviceKind) -> bool:
    return kind.pins_memory and kind.name != "cpu"


def _host_memory(size: int, pinned: bool) -> Tensor:
    if pinned or size < HUGE_PAGE:
        return torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
    return torch.frombuffer(huge_memory(size), dtype=torch.uint8)


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor's bytes lie on the CPU in one piece, as they are."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def addresses_of(values: Iterable[Any]) -> set[int]:
    """`address_of` those values that are tensors in memory, or of this process's part of them."""
    local = (value.to_local() if isinstance(value, DTensor) else value for value in values)
    return {address_of(tensor) for tensor in local if type(tensor) is Tensor and has_address(tensor)}


def has_address(tensor: Tensor) -> bool:
    """Whether a tensor lies in memory that has an address: not on the meta device, nor where graphs are compiled."""
    try:
        address_of(tensor)
    except (RuntimeError, NotImplementedError):  # a subclass may have no storage of its own
        return False
    return not tensor.is_meta


def address_of(tensor: Tensor) -> int:
    """Where the memory begins that a tensor lies in; tensors that share memory have the same."""
    return tensor.untyped_storage().data_ptr()


# Who writes which tensor, agreed on once and kept for as long as the state stays of the same shape


_PLAN_AGAIN = "plan again"


@dataclass(frozen=True)
class GlobalPlan:
    """What all processes have agreed on.

    Attributes:
        token: Distinguishes it from others; the same on all processes.
        outline: What it was made for, see `outline_of`.
        local: What this process writes.
        metadata: On rank 0 where every part of every tensor belongs; None elsewhere.
    """

    token: str
    outline: Hashable
    local: SavePlan
    metadata: Metadata | None


def outline_of(tensors: Mapping[str, Tensor], elsewhere: Sequence[str]) -> Hashable:
    """All that a plan depends on; None where that cannot be found out.

    Args:
        tensors: What this process has.
        elsewhere: Keys of the tensors that only peers have.
    """
    outline: list[tuple[Any, ...]] = []
    for key, tensor in tensors.items():
        if type(tensor) is Tensor:
            outline.append((key, tensor.dtype, tensor.shape))
        elif type(tensor) is DTensor:
            outline.append((key, tensor.dtype, tensor.shape, tensor.placements, tensor.device_mesh))
        else:
            return None  # it may shard itself as it likes
    return (tuple(outline), tuple(elsewhere))


def plan_globally(
    peers: Peers, planner: SnapshotPlanner, outline: Hashable | Failure, elsewhere: list[str], known: GlobalPlan | None
) -> tuple[GlobalPlan | Failure, str]:
    """Let rank 0 decide who writes what: a tensor that all have is written once. Call it on all processes.

    Where no process has other tensors than at the time before, that is all they exchange: with thousands of tensors
    making plans and sending them takes longer than copying does.

    Args:
        peers: The processes.
        planner: Has this process's tensors.
        outline: Of them; a failure is reported to all.
        elsewhere: Keys of the tensors that only peers have.
        known: The plan of the time before.

    Returns:
        The plan, or the first failure of any process; and a token for this save.
    """
    proposal: Any = outline
    if not isinstance(outline, Failure):
        if known is not None and outline is not None and known.outline == outline:
            proposal = known.token
        else:
            proposal = peers.attempt(planner.create_local_plan)
    answer, token = _ask(peers, planner, proposal, elsewhere)
    if answer == _PLAN_AGAIN:
        if not isinstance(proposal, SavePlan):
            proposal = peers.attempt(planner.create_local_plan)
        answer, token = _ask(peers, planner, proposal, elsewhere)
    if isinstance(answer, Failure):
        return answer, token
    if answer is None:
        assert known is not None
        return known, token
    metadata = planner.metadata if peers.is_main else None
    return GlobalPlan(token, outline, planner.finish_plan(answer), metadata), token


def _ask(peers: Peers, planner: SnapshotPlanner, proposal: Any, elsewhere: list[str]) -> tuple[Any, str]:
    """Send rank 0 a local plan, a known plan's token or a failure.

    Returns:
        This process's share, None for that of the known plan, `_PLAN_AGAIN` or a failure; and a token for this save.
    """
    proposals = peers.gather(proposal)
    answers: list[Any] | None = None
    if proposals is not None:
        token = uuid.uuid4().hex[:12]
        answers = [(answer, token) for answer in _decide(peers, planner, proposals, elsewhere)]
    answer, token = peers.scatter(answers)
    return answer, token


def _decide(peers: Peers, planner: SnapshotPlanner, proposals: list[Any], elsewhere: list[str]) -> list[Any]:
    """What rank 0 answers to each process."""
    failed = next((one for one in proposals if isinstance(one, Failure)), None)
    if failed is not None:
        return [failed] * peers.size
    if all(isinstance(one, SavePlan) for one in proposals):
        made = peers.attempt(lambda: _shares(planner, proposals, elsewhere))
        return made if isinstance(made, list) else [made] * peers.size
    same = all(one == proposals[0] for one in proposals)
    return [None if same else _PLAN_AGAIN] * peers.size


def _shares(planner: SnapshotPlanner, plans: list[SavePlan], elsewhere: list[str]) -> list[SavePlan]:
    shares, metadata = planner.create_global_plan(plans)
    check_values([key for key in elsewhere if key not in metadata.state_dict_metadata])
    return shares


def check_values(keys: list[str]) -> None:
    """Raise where tensors have no values on any process."""
    if keys:
        raise CheckpointError(
            f"{', '.join(keys[:8])} is on the meta device and has no values yet. Materialise the model first."
        )


SHARED_FILE = "state.json"


def process_file(rank: int) -> str:
    """The file of what is one process's own."""
    return f"process_{rank}.json"


@dataclass
class _Written:
    """What one process has written."""

    files: dict[str, FileDigest]
    results: list[WriteResult]


def _may_change(tensor: Tensor, changing: Set[int]) -> bool:
    is_hidden = type(tensor) is Tensor and not has_address(tensor)
    return is_hidden or bool(addresses_of([tensor]) & changing)


class Save:
    """One checkpoint on its way to storage. Make it, and run it, on all processes.

    Making it takes down what is to be written: the plain values, and which process writes which tensor. After
    `stage` the caller may change its tensors, but for those that wait; without, not before `run` has returned.

    Args:
        directory: The checkpoint's directory or URL; replaced where it exists.
        shared: What is the same on all processes.
        own: What is this process's own.
        state: This process among its peers.
        step: The optimizer step, for the manifest.
        storage: Where to; found from `directory` if None.
        extra: A local directory whose content becomes part of the checkpoint, and which goes; from `extra_place`.
        known: The `plan` of an earlier save, to be used again where the tensors are of the same shapes.
        changing: Addresses of tensors that change from save to save; others may be linked from the checkpoint before.

    Attributes:
        plan: Who writes which tensor.

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
        known: GlobalPlan | None = None,
        changing: Set[int] = frozenset(),
    ) -> None:
        self._state = state
        self._extra = extra
        self._peers = Peers(state)
        self._staging_failure: Failure | None = None
        self._late: Copying | None = None
        self.step = step
        self.planner = SnapshotPlanner()
        self.directory = os.fspath(directory)
        self._held_by_peers: list[str] = []
        outline = self._peers.attempt(lambda: self._prepare(shared, own, storage))
        plan, self._token = plan_globally(self._peers, self.planner, outline, self._held_by_peers, known)
        if isinstance(plan, Failure):
            if self._extra is not None and self._peers.is_main:
                LocalStorage().discard(self._extra)
            self._peers.fail(plan, f"The checkpoint {self.directory} was not written")
        self.plan = plan
        items, resolve = plan.local.items, self.planner.resolve_data
        # Of a plain tensor without an address it cannot be known.
        changed = {item.index for item in items if _may_change(resolve(item), changing)}
        self._earlier = Earlier(self._storage, self.directory, changed)

    def _prepare(self, shared: Any, own: Any, storage: Storage | None) -> Hashable:
        """Take the trees apart and outline which tensors there are here."""
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
        tensors = {key: tensor for key, tensor in tensors.items() if not tensor.is_meta}
        check_values([key for key, tensor in own_tensors.items() if tensor.is_meta])
        tensors |= own_tensors
        self.planner.set_up_planner(tensors, is_coordinator=self._peers.is_main)
        return outline_of(tensors, self._held_by_peers)

    def stage(self, buffer: StagingBuffer, may_wait: Collection[int] = ()) -> Copying | None:
        """Copy what this process writes, so that training may continue. A failure is raised by `run`.

        Args:
            buffer: Memory for the copies.
            may_wait: Addresses of tensors that may be copied later, see `StagingBuffer.copy`.

        Returns:
            What `run` copies first, and the caller must finish before those tensors change; None after a failure.
        """
        others, likely = self._earlier.part(self.plan.local.items)
        files = [
            {item.index: self.planner.resolve_data(item) for item in file}
            for file in files_of(others) + files_of(likely, LARGEST_LINKED)
        ]
        staged = self._peers.attempt(lambda: buffer.copy(files, self._state.kind, may_wait))
        # What the copies stand for may change or go now.
        self.planner.state_dict = {}
        if isinstance(staged, Failure):
            self._staging_failure = staged
            return None
        self.planner.copies, self._late = staged.copies, staged.late
        return staged.late

    def run(self) -> None:
        """Write, and publish once all processes have written.

        Raises:
            CheckpointError: Any process could not write; raised on all, and what was there before is intact.
        """
        place, self._data = self._storage.place_for(self.directory, self._token)
        written = (
            self._peers.attempt(lambda: self._write(place)) if self._staging_failure is None else self._staging_failure
        )
        gathered = self._peers.gather(written)
        published: Failure | None = None
        if gathered is not None:
            published = next((one for one in gathered if isinstance(one, Failure)), None)
            if published is None:
                attempted = self._peers.attempt(lambda: self._publish(place, gathered))
                published = attempted if isinstance(attempted, Failure) else None
        failure: Failure | None = self._peers.scatter([published] * self._peers.size if gathered is not None else None)
        if failure is not None:
            # Only now: as long as not all have ended, another process may be writing there.
            for left in filter(None, (place, self._extra)):
                self._storage.discard(left)
            self._peers.fail(failure, f"The checkpoint {self.directory} could not be written")

    def _write(self, place: str) -> _Written:
        """Write what is this process's to write."""
        if self._late is not None:
            self._finish_copying(self._late)
        files: dict[str, FileDigest] = {}
        self._storage.begin(place, (FOLDER,))
        if self._peers.is_main:
            files[WRITER_FILE] = self._write_json(place, WRITER_FILE, this_writer())
            if isinstance(self._storage, LocalStorage):
                clean_stale(self._storage.parent(self.directory))
            if self._extra is not None:
                self._adopt(self._extra, place)
            files[SHARED_FILE] = self._write_json(place, SHARED_FILE, self._shared)
        name = process_file(self._peers.rank)
        files[name] = self._write_json(place, name, self._own)
        writer = SafetensorsWriter(self._storage, place, self._peers.rank, self._earlier)
        results = writer.write_data(self.plan.local, self.planner).wait()
        self._storage.touch(self._storage.join(place, WRITER_FILE))
        return _Written({**files, **writer.files}, results)

    def _finish_copying(self, late: Copying) -> None:
        changed = late.finish()
        if changed:
            raise CheckpointError(
                f"{', '.join(changed[:8])} was changed in place between the save and the next step of its optimizer, "
                "while it was being copied. Let it change in step() alone, call save_queue.settle() of the Accelerator "
                "before, or save at once: save_state(block=True), ModelCheckpoint(async_save=False)"
            )

    def _publish(self, place: str, written: list[_Written]) -> None:
        assert self.plan.metadata is not None
        writer = SafetensorsWriter(self._storage, place, self._peers.rank)
        writer.finish(self.plan.metadata, [one.results for one in written])
        files = dict(writer.files)
        for one in written:
            files.update(one.files)
        if self._extra is not None:
            files.update(self._extra_files(place, files))
        self._check_all_here(place, files)
        manifest = Manifest(files, self._peers.size, self.step, time.time(), self._data, self._finite_loss)
        self._storage.publish(place, self.directory, self._token, memoryview(manifest.to_bytes()))

    def _adopt(self, extra: str, place: str) -> None:
        """Move what hooks wrote into the checkpoint."""
        for name in os.listdir(extra):
            if name != WRITER_FILE:
                os.rename(os.path.join(extra, name), os.path.join(place, name))
        self._storage.discard(extra)

    def _extra_files(self, place: str, known: dict[str, FileDigest]) -> dict[str, FileDigest]:
        """Make durable, and list, the files that hooks wrote."""
        assert isinstance(self._storage, LocalStorage)
        sizes = self._storage.sizes(place)
        names = [name for name in sizes if name not in known]
        for name in names:
            if sizes[name] == NO_FILE:
                raise CheckpointError(f"A hook wrote {name} as a link or a device; a checkpoint holds files only.")
        return {name: self._storage.settle(os.path.join(place, name)) for name in names}

    def _check_all_here(self, place: str, files: dict[str, FileDigest]) -> None:
        """Find out here, not at the next start, that a machine wrote to a disk of its own."""
        found = self._storage.sizes(place)
        for name, digest in sorted(files.items()):
            if found.get(name) != digest.size:
                raise CheckpointError(
                    f"{self._storage.join(place, name)} was written by another process and is not seen from here; all "
                    "machines must write to one file system"
                )

    def _write_json(self, place: str, name: str, content: Any) -> FileDigest:
        return write_file(self._storage.create(self._storage.join(place, name)), [memoryview(encoded(content))])


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
            write_file(storage.create(storage.join(place, WRITER_FILE)), [memoryview(encoded(this_writer()))])
        except BaseException:
            storage.discard(place)
            raise
        return place

    made = peers.attempt(make) if peers.is_main else None
    answer: str | Failure = peers.scatter([made] * peers.size if peers.is_main else None)
    if isinstance(answer, Failure):
        peers.fail(answer, f"The checkpoint {os.fspath(directory)} could not be written")
    return answer
