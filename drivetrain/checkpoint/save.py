"""Writing a checkpoint: planned and copied at once, written then or in the background, published by one rename."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Collection, Hashable, Set
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.storage import WriteResult

from drivetrain.checkpoint.copying import Copying
from drivetrain.checkpoint.earlier import Earlier
from drivetrain.checkpoint.file_plan import LARGEST_LINKED, files_of
from drivetrain.checkpoint.global_plan import GlobalPlan, check_values, outline_of, plan_globally
from drivetrain.checkpoint.index import FOLDER
from drivetrain.checkpoint.locations import storage_of
from drivetrain.checkpoint.manifest import WRITER_FILE, Manifest, check_replaceable, encoded
from drivetrain.checkpoint.peers import Failure, Peers
from drivetrain.checkpoint.schema import LOSS_IS_FINITE
from drivetrain.checkpoint.shards import SafetensorsWriter, SnapshotPlanner
from drivetrain.checkpoint.staging import StagingBuffer, addresses_of, has_address
from drivetrain.checkpoint.storage import NO_FILE, LocalStorage, Storage
from drivetrain.checkpoint.tensor_file import FileDigest, write_file
from drivetrain.checkpoint.tree import pack
from drivetrain.checkpoint.writer_record import clean_stale, this_writer
from drivetrain.runtime.errors import CheckpointError
from drivetrain.runtime.state import PartialState

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
