"""Save checkpoints: distribute the writing over processes, copy for background saves, and publish by one rename."""

from __future__ import annotations

import atexit
import os
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain.checkpoint.manifest import LOSS_IS_FINITE, Manifest, check_replaceable
from drivetrain.checkpoint.storage import (
    NO_FILE,
    WORKERS,
    WRITER_FILE,
    FileDigest,
    LocalStorage,
    Storage,
    clean_stale,
    run_parallel,
    storage_of,
    writer_of,
)
from drivetrain.checkpoint.tree import FOLDER, INDEX, Entry, Place, aligned, bytes_of, dtype_name, encoded, layout, pack
from drivetrain.runtime.errors import CheckpointError, DamagedCheckpointError, deprecated, warn_ignored
from drivetrain.runtime.logging import get_logger
from drivetrain.runtime.state import PartialState

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
    from torch.distributed.checkpoint.planner import SavePlan, WriteItem

    # Files that one process has written, and the position of each part of a tensor.
    Written = tuple[dict[str, FileDigest], dict[MetadataIndex, Place]]

SHARED_FILE = "state.json"

PROCESS_FILE = "process_{}.json"
"""Name of the file with one process's own state, by rank."""

LARGEST_FILE = 2 << 30
"""Approximate maximum size of a file, in bytes."""

Result = TypeVar("Result")
_GROUP = "checkpoint_group"
_QUEUE = "save_queue"

logger = get_logger(__name__)

# Large tensors are split over files so that several cores hash them. Smaller files are not worth it.
_SMALLEST_SPLIT = 64 << 20


class Save:
    """One checkpoint that is being saved, to which each process writes its part of the tensors.

    The constructor separates plain values from tensors and decides which process writes which tensor. After `copy`, the
    caller may change the tensors. Without `copy`, it must leave them unchanged until `run` has returned.
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
        from torch.distributed.checkpoint.default_planner import DefaultSavePlanner  # most of a second to import

        self.directory = os.fspath(directory)
        self._state, self._step, self._extra = state, step, extra
        self._peers = Peers(state)
        self._planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._held_by_peers: list[str] = []
        self._tensor_of = cast("Callable[[WriteItem], Tensor]", self._planner.resolve_data)
        self._copy_error: BaseException | None = None
        answer = self._peers.combine(lambda: self._prepare(shared, own, storage), self._share_out)
        if isinstance(answer, Failure):
            if extra is not None and self._peers.is_main:
                LocalStorage().discard(extra)
            self._peers.fail(answer, f"The checkpoint {self.directory} was not written")
        share, self._token = answer
        self._items: list[WriteItem] = self._planner.finish_plan(share).items

    def _prepare(self, shared: Any, own: Any, storage: Storage | None) -> SavePlan:
        found, self.directory = storage_of(self.directory)
        self._storage = storage or found
        if self._extra is not None and not isinstance(self._storage, LocalStorage):
            raise CheckpointError(
                f"Hooks that write their own files need a local checkpoint directory, not {self.directory}."
            )
        if self._peers.is_main:
            check_replaceable(self._storage, self.directory)
        for what, tree in (("shared", shared), ("own", own)):
            if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
                raise CheckpointError(f"The {what} state to save must be a dict with strings as keys.")
        driver = shared.get("driver")
        entries = (shared, driver if isinstance(driver, dict) else {})
        self._finite_loss = not any(each.get(LOSS_IS_FINITE) is False for each in entries)
        self._shared, tensors = pack(shared)
        self._own, own_tensors = pack(own, f"process/{self._peers.rank}")
        # Tensors on the meta device have no values here, so another process must write them.
        self._held_by_peers = [key for key, tensor in tensors.items() if tensor.is_meta]
        if lacking := [key for key, tensor in own_tensors.items() if tensor.is_meta]:
            raise _without_values(lacking)
        held = {key: tensor for key, tensor in tensors.items() if not tensor.is_meta}
        self._planner.set_up_planner({**held, **own_tensors}, is_coordinator=self._peers.is_main)
        return self._planner.create_local_plan()

    def _share_out(self, plans: list[SavePlan]) -> list[tuple[SavePlan, str]]:
        # A tensor that several processes hold is written by one of them.
        shares, metadata = self._planner.create_global_plan(plans)
        if lacking := [key for key in self._held_by_peers if key not in metadata.state_dict_metadata]:
            raise _without_values(lacking)
        token = uuid.uuid4().hex[:12]
        return [(share, token) for share in shares]

    def copy(self) -> None:
        # Copy the tensors, so that training may change them before `run` writes them.
        kind = self._state.kind
        pinned = kind.pins_memory and kind.name != "cpu"  # a device copies faster to page-locked memory
        copies: dict[MetadataIndex, Tensor] = {}
        try:
            for item in self._items:
                tensor = self._tensor_of(item)
                target = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
                copies[item.index] = target.copy_(tensor, non_blocking=pinned)
            # Copies to pinned memory are asynchronous: wait until all have arrived.
            if pinned:
                kind.synchronize()
        except BaseException as error:
            # Raised in `run`, where all processes learn of it.
            self._copy_error = error
        self._tensor_of = lambda item: copies[item.index]
        self._planner.state_dict = {}  # drop the references to the original tensors

    def run(self) -> None:
        # All processes must call it: the checkpoint is published when each has written its files.
        place, self._data = self._storage.place_for(self.directory, self._token)
        failure = self._peers.combine(lambda: self._write(place), lambda written: self._publish(place, written))
        if failure is not None:
            # Not earlier: until all processes have ended, one of them may still be writing there.
            for left in filter(None, (place, self._extra)):
                self._storage.discard(left)
            self._peers.fail(failure, f"The checkpoint {self.directory} could not be written")

    def _write(self, place: str) -> Written:
        if self._copy_error is not None:
            raise self._copy_error
        storage, peers = self._storage, self._peers
        if peers.is_main and isinstance(storage, LocalStorage):
            clean_stale(os.path.dirname(self.directory))
        storage.begin(place, (FOLDER,))
        files: dict[str, FileDigest] = {}
        places: dict[MetadataIndex, Place] = {}

        def write_tensors(number: int, file: Sequence[tuple[WriteItem, Entry]]) -> None:
            name = f"{FOLDER}/rank_{peers.rank}_{number}.safetensors"
            header, starts = layout([entry for _, entry in file])
            # Tensors on a device come to the CPU one at a time.
            content = (bytes_of(self._tensor_of(item)) for item, _ in file)
            files[name] = storage.write(f"{place}/{name}", chain([header], content))
            for (item, entry), start in zip(file, starts, strict=True):
                places[item.index] = Place(name, start, entry.nbytes)

        if peers.is_main:
            # Written first, because a directory without this file looks like the remains of an ended run.
            files[WRITER_FILE] = storage.write(f"{place}/{WRITER_FILE}", [encoded(writer_of(os.getpid()))])
            if self._extra is not None:
                # Both directories are next to the checkpoint, so the files can be renamed.
                for name in os.listdir(self._extra):
                    if name != WRITER_FILE:
                        os.rename(os.path.join(self._extra, name), os.path.join(place, name))
                storage.discard(self._extra)
            files[SHARED_FILE] = storage.write(f"{place}/{SHARED_FILE}", [encoded(self._shared)])
        own_file = PROCESS_FILE.format(peers.rank)
        files[own_file] = storage.write(f"{place}/{own_file}", [encoded(self._own)])
        run_parallel([partial(write_tensors, *one) for one in enumerate(_files_of(self._items))], WORKERS)
        return files, places

    def _publish(
        self, place: str, written: list[tuple[dict[str, FileDigest], dict[MetadataIndex, Place]]]
    ) -> list[None]:
        storage = self._storage
        files = {name: digest for each, _ in written for name, digest in each.items()}
        places = {index: one for _, each in written for index, one in each.items()}
        files[INDEX] = storage.write(f"{place}/{INDEX}", [encoded(_index_of(self._planner.metadata, places))])
        found = storage.sizes(place)
        if self._extra is not None:
            assert isinstance(storage, LocalStorage)
            # Files of hooks are not in `files` yet.
            for name in found.keys() - files:
                if found[name] == NO_FILE:
                    raise CheckpointError(f"A hook wrote {name} as a link or a device. Write a regular file instead.")
                files[name] = storage.settle(os.path.join(place, name))
        for name, digest in sorted(files.items()):
            if found.get(name) != digest.size:  # better here than at the next start
                raise CheckpointError(
                    f"{place}/{name} was written by another process, but is not visible here. All "
                    "machines must write to one shared file system."
                )
        manifest = Manifest(files, self._peers.size, self._step, time.time(), self._data, self._finite_loss)
        storage.publish(place, self.directory, self._token, manifest.to_bytes())
        # One item for each process, as `Peers.combine` expects.
        return [None] * self._peers.size


def _without_values(keys: list[str]) -> CheckpointError:
    return CheckpointError(
        f"{', '.join(keys[:8])} is on the meta device and has no values yet. Materialise the model first."
    )


def _files_of(items: Sequence[WriteItem]) -> list[list[tuple[WriteItem, Entry]]]:
    entries = []
    for item in items:
        data = item.tensor_data
        assert data is not None
        chunk = data.chunk
        entries.append(Entry.of_part(item.index.fqn, data.properties.dtype, data.size, chunk.offsets, chunk.sizes))
    # Files of similar size can be written in parallel.
    # -(-a // b) divides and rounds up.
    limit = min(LARGEST_FILE, max(_SMALLEST_SPLIT, -(-sum(entry.nbytes for entry in entries) // WORKERS)))
    files: list[list[tuple[WriteItem, Entry]]] = []
    room = 0
    for item, entry in zip(items, entries, strict=True):
        if not files or (entry.nbytes > room and room < limit):
            files.append([])
            room = limit
        files[-1].append((item, entry))
        room -= entry.nbytes
    return [[file[position] for position in aligned(entry for _, entry in file)] for file in files]


def _index_of(metadata: Metadata, places: dict[MetadataIndex, Place]) -> dict[str, Any]:
    places_of: dict[tuple[str, torch.Size], Place] = {}
    for index, place in places.items():
        assert index.offset is not None
        places_of[index.fqn, index.offset] = place
    tensors = {}
    for key, each in metadata.state_dict_metadata.items():
        described = cast("TensorStorageMetadata", each)
        chunks = []
        for chunk in described.chunks:
            place = places_of[key, chunk.offsets]
            at = {"offsets": list(chunk.offsets), "sizes": list(chunk.sizes)}
            chunks.append({**at, "file": place.file, "start": place.start, "nbytes": place.nbytes})
        dtype = dtype_name(described.properties.dtype)
        tensors[key] = {"dtype": dtype, "size": list(described.size), "chunks": chunks}
    return {"tensors": tensors}


def extra_place(directory: str | os.PathLike[str], state: PartialState) -> str:
    """Create a temporary directory for a Trainer's hooks, whose files become part of the next checkpoint.

    Call it on all processes.

    Args:
        directory: The checkpoint's directory.
        state: The process state of the run.

    Returns:
        The path to pass as `extra=` to a save.
    """
    peers = Peers(state)

    def make() -> str:
        storage, path = storage_of(directory)
        if not isinstance(storage, LocalStorage):
            raise CheckpointError(f"Hooks that write their own files need a local checkpoint directory, not {path}.")
        place, _ = storage.place_for(path, uuid.uuid4().hex[:12])
        try:
            storage.begin(place, ())
            storage.write(f"{place}/{WRITER_FILE}", [encoded(writer_of(os.getpid()))])
        except BaseException:
            storage.discard(place)
            raise
        return place

    answer: str | Failure = peers.scatter([peers.attempt(make)] * peers.size if peers.is_main else None)
    if isinstance(answer, Failure):
        peers.fail(answer, f"The checkpoint {os.fspath(directory)} could not be written")
    return answer


# Saves in the background: at most one at a time, and no error lost


class PendingSave:
    """Handle of a checkpoint save that may still be running.

    Args:
        directory: The checkpoint's directory.
        finished: True if the checkpoint is already written.

    Attributes:
        directory: The checkpoint's directory. It exists after the save has finished without an error.
    """

    def __init__(self, directory: str, finished: bool = False) -> None:
        self.directory = directory
        self._finished = threading.Event()
        if finished:
            self._finished.set()
        self._error: BaseException | None = None
        self._reported = False
        self._callbacks: list[Callable[[PendingSave], None]] = []
        self._lock = threading.Lock()

    def done(self) -> bool:
        """Return True if this save of a checkpoint has ended, with or without an error."""
        return self._finished.is_set()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the checkpoint is on disk, and raise the error of a failed save.

        Args:
            timeout: The longest time to wait, in seconds. None waits without a limit.

        Raises:
            CheckpointError: The checkpoint could not be written. All processes raise this error.
            TimeoutError: The save is still running after `timeout` seconds.
        """
        if not self._finished.wait(timeout):
            raise TimeoutError(f"{self.directory} is still being written after {timeout} s. Use a longer timeout.")
        self.raise_if_failed()

    def raise_if_failed(self) -> None:
        """Raise the error of the save if it has failed, without waiting."""
        if self._error is not None:
            self._reported = True
            raise self._error

    def claim(self) -> None:
        # The caller gets the error from `wait`: `SaveQueue.check` and `SaveQueue.finish` do not raise it then.
        self._reported = True

    def add_done_callback(self, callback: Callable[[PendingSave], None]) -> None:
        """Register a function that is called with this `PendingSave` when the save has succeeded or failed.

        The callback runs in the writing thread, and `wait()` also waits for it. It must not call collectives or
        `wait()`. Exceptions that it raises are logged.
        """
        with self._lock:
            if not self._finished.is_set():
                self._callbacks.append(callback)
                return
        self._call(callback)

    def failed(self) -> bool:
        """Return True if this save of a checkpoint has ended with an error."""
        return self._error is not None

    def _finish(self, error: BaseException | None) -> None:
        self._error = error
        while True:
            with self._lock:
                # A callback may add another one, so repeat until none is left.
                callbacks, self._callbacks = self._callbacks, []
                if not callbacks:
                    self._finished.set()
                    return
            for callback in callbacks:
                self._call(callback)

    def _call(self, callback: Callable[[PendingSave], None]) -> None:
        # An error in a callback must not count as an error of the save.
        try:
            callback(self)
        except Exception:
            logger.exception(f"{self.directory}: what was to happen after the save failed.")


class SaveQueue:
    """Queue that writes one checkpoint at a time.

    Attributes:
        failed: The failed save whose error has not been raised yet, or None.

    Args:
        state: The process state of the run.
    """

    def __init__(self, state: PartialState) -> None:
        self._state = state
        self._running: PendingSave | None = None
        self.failed: PendingSave | None = None
        self._waits_at_end = False

    @property
    def pending(self) -> PendingSave | None:
        """Handle of the save that is running in the background, or None."""
        running = self._running
        return running if running is not None and not running.done() else None

    def save(
        self,
        directory: str | os.PathLike[str],
        shared: Any,
        own: Any,
        *,
        step: int | None = None,
        block: bool = True,
        storage: Storage | None = None,
        extra: str | None = None,
        optimizers: object = None,
    ) -> PendingSave:
        """Save a checkpoint of `shared`, which is equal on all processes, and `own`, which belongs to this process.

        The save starts once the previous one has ended. All processes must call the method.

        See `save_run_state`.
        """
        if optimizers is not None:
            warn_ignored("save", "optimizers", optimizers, "Leave it out.", since="0.1.0", removed_in="0.3.0")
        # One save at a time, because the collectives of two saves would mix.
        self.finish()
        save = Save(directory, shared, own, self._state, step, storage, extra)
        if block:
            save.run()
            return PendingSave(save.directory, finished=True)
        save.copy()
        if not self._waits_at_end:
            self._waits_at_end = True
            # A running save uses a process group, which must not be destroyed before it has ended.
            self._state.before_leaving(self._wait_quietly)
            atexit.register(_report, weakref.ref(self))
        self._running = pending = PendingSave(save.directory)
        # Not a daemon thread: the interpreter must wait for it. A spawned process would import the script again.
        threading.Thread(target=self._work, args=(save, pending), name="drivetrain-save").start()
        return pending

    @deprecated(since="0.1.0", removed_in="0.3.0")
    def prepare(self, tensors: Iterable[Tensor]) -> None:
        """Do nothing. Deprecated: background saves need no preparation."""

    @deprecated(since="0.1.0", removed_in="0.3.0")
    def settle(self) -> None:
        """Do nothing. Deprecated: tensors may be changed as soon as `save` has returned, without waiting."""

    @property
    @deprecated(since="0.1.0", removed_in="0.3.0")
    def staging_bytes(self) -> int:
        """Always 0. Deprecated: a `SaveQueue` keeps no memory for copies of tensors between two saves."""
        return 0

    @deprecated(since="0.1.0", removed_in="0.3.0", use="finish")
    def release(self) -> None:
        """Wait for the running background save, but do not raise its error. Deprecated: use `finish`."""
        self._wait_quietly()

    @property
    def has_lost(self) -> bool:
        """True if the latest background save has failed and nothing has raised or handled its error yet."""
        failed = self.failed
        return failed is not None and not failed._reported

    def check(self) -> None:
        """Raise the error of the latest background save if it has failed, but do not wait for a running save."""
        if self.failed is not None:
            failed, self.failed = self.failed, None
            if not failed._reported:  # otherwise `wait` has raised the error, or will raise it
                failed.raise_if_failed()

    def finish(self) -> None:
        """Wait for the running save, and raise the error of a failed one."""
        if self._running is not None:
            self._running._finished.wait()
            self._running = None
        if self.failed is not None:
            self.check()

    def _work(self, save: Save, pending: PendingSave) -> None:
        error: BaseException | None = None
        try:
            save.run()
        except BaseException as raised:
            # Set before the save counts as done, so that no thread sees it done without its error.
            pending._error = error = raised
            self.failed = pending
        del save
        pending._finish(error)

    def _wait_quietly(self) -> None:
        if self._running is not None:
            self._running._finished.wait()

    def report(self) -> None:
        # Called when the interpreter exits.
        self._wait_quietly()
        if self.failed is not None and not self.failed._reported:
            logger.error(f"A checkpoint was not saved: {self.failed._error}", main_process_only=False)


def _report(reference: weakref.ref[SaveQueue]) -> None:
    queue = reference()
    if queue is not None:
        queue.report()


def save_queue(state: PartialState) -> SaveQueue:
    """Return the queue that saves all of this process's checkpoints, and create it on the first call."""
    shared = PartialState.registry()
    if _QUEUE not in shared:
        shared[_QUEUE] = SaveQueue(state)
    queue: SaveQueue = shared[_QUEUE]
    return queue


# Communication between the processes that write or read a checkpoint together


@dataclass(frozen=True)
class Failure:
    rank: int
    reason: str
    is_damage: bool = False


class Peers:
    """Communication between all processes of a run while they save or load a checkpoint together.

    Construct it on all processes at the same time.
    """

    def __init__(self, state: PartialState | None) -> None:
        self.rank, self.size, self._group = 0, 1, None
        if state is not None and state.environment.world_size > 1:
            self.rank, self.size = state.environment.rank, state.environment.world_size
            self._group = _own_group(state)
        self.is_main = self.rank == 0
        self._cause: BaseException | None = None

    def gather(self, item: Any) -> list[Any] | None:
        if self._group is None:
            return [item]
        items: list[Any] | None = [None] * self.size if self.is_main else None
        _exchange(dist.gather_object, item, items, dst=0, group=self._group)
        return items

    def scatter(self, items: list[Any] | None) -> Any:
        # Rank 0 passes one item per process, and all other ranks pass None.
        if self._group is None:
            assert items is not None
            return items[0]
        received: list[Any] = [None]
        _exchange(dist.scatter_object_list, received, items, src=0, group=self._group)
        return received[0]

    def agree(self, failure: Failure | None) -> Failure | None:
        if self._group is None:
            return failure
        failures: list[Any] = [None] * self.size
        _exchange(dist.all_gather_object, failures, failure, group=self._group)
        # All processes return the failure of the lowest rank that has failed.
        return next((one for one in failures if one is not None), None)

    def combine(self, work: Callable[[], Result], decide: Callable[[list[Result]], Sequence[Any]]) -> Any | Failure:
        if self._group is None:
            return self.attempt(lambda: decide([work()])[0])
        results = self.gather(self.attempt(work))
        decided: Any = None
        if results is not None:
            decided = next((one for one in results if isinstance(one, Failure)), None)
            # Every rank must reach `scatter`, even if `decide` fails, or the other ranks would wait forever.
            decided = decided or self.attempt(lambda: decide(results))
            if isinstance(decided, Failure):
                decided = [decided] * self.size
        # Each process gets its own item of the list from `decide`, or all get the first failure.
        return self.scatter(decided)

    def attempt(self, work: Callable[[], Result]) -> Result | Failure:
        """Return the result of `work()`, or a `Failure` if it raises an error."""
        try:
            return work()
        except BaseException as error:
            self._cause = error
            return Failure(self.rank, reason_of(error), isinstance(error, DamagedCheckpointError))

    def fail(self, failure: Failure, what: str, advice: str = "") -> NoReturn:
        # All processes must call it, with the failure of the process that has failed.
        if self._cause is not None and not isinstance(self._cause, Exception):
            raise self._cause  # such as a KeyboardInterrupt
        where = f"rank {failure.rank}: " if self.size > 1 else ""
        kind = DamagedCheckpointError if failure.is_damage else CheckpointError
        raise kind(f"{what}: {where}{failure.reason}{advice}") from self._cause


def reason_of(error: BaseException) -> str:
    """Describe an exception in one line, to quote it in another error message."""
    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror} (errno {error.errno})"
    return f"{type(error).__name__}: {error}"


def _exchange(collective: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    try:
        collective(*args, **kwargs)
    except (RuntimeError, ValueError) as error:
        # torch has no exception of its own for a lost process.
        raise CheckpointError(f"Another process was lost while a checkpoint was written or read: {error}") from error


def _own_group(state: PartialState) -> Any:
    shared = PartialState.registry()
    if _GROUP not in shared:
        # Only for checkpoints: their collectives must not interleave with those of the training.
        shared[_GROUP] = dist.new_group(backend="gloo")
        state.before_leaving(lambda: shared.pop(_GROUP, None))
    return shared[_GROUP]
