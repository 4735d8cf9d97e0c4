"""Queue from which processes take items one by one, so that faster processes take more items.

The queue uses the rendezvous store and no collectives. No process waits for one that has died, and the item of a dead
process is given to another.
"""

from __future__ import annotations

import os
import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

from drivetrain.runtime import heartbeat
from drivetrain.runtime.errors import CollectiveError, ConfigurationError, DataError
from drivetrain.runtime.pytrees import send_to_device

_PREFIX = "drivetrain/work"
_LEASE = 30.0  # seconds without a sign of life after which a process counts as dead
_SHORTEST, _LONGEST = 0.005, 0.1  # seconds between two readings of the store
_MOST_ATTEMPTS = 3
_PIECE = 4 * 2**20  # bytes of a result per store entry; the store accepts at most 8 MiB
_GIVEN_UP = "given up"


class WorkQueue:
    """Queue of inputs shared by all processes, from which each takes its next item when it is free.

    Args:
        inputs: A list, tuple, tensor or other object with a length and indices, or a dict of such objects with equal
            lengths. It must be equal on all processes.
        store: Rendezvous store of the processes.
        rank: Rank of this process.
        world_size: Number of processes.
        beat: Called without arguments to signal progress.
        lease: Seconds without a sign of life after which a process on another machine counts as dead.

    Example:
        ```python
        from drivetrain import PartialState

        with PartialState().split_between_processes(["a", "b", "c"], dynamic=True) as work:
            for prompt in work:
                work.done(prompt.upper())
            assert work.results() == ["A", "B", "C"]
        ```
    """

    def __init__(
        self,
        inputs: Any,
        store: Store,
        rank: int,
        world_size: int,
        beat: Callable[[], None] = lambda: None,
        lease: float = _LEASE,
    ) -> None:
        self._inputs, self._length = inputs, _length(inputs)
        self._store, self._rank, self._world_size = store, rank, world_size
        self._beat, self._lease = beat, lease
        # Each process counts its own queues: the numbers match because all processes make the same calls.
        self._number = store.add(f"{_PREFIX}/{rank}", 1)
        self._unfinished = list(range(self._length))
        self._current: tuple[int, int] | None = None  # the item's index, and the number of earlier attempts
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._has_new, self._is_open = True, False
        self._ended = threading.Event()
        self._signs: threading.Thread | None = None

    def wait_for_all(self) -> None:
        """Wait until every process has created its work queue, so that no process ends before the others have begun.

        Raises:
            CollectiveError: If a process does not create one within the store's timeout.
        """
        keys = [f"{_PREFIX}/{rank}" for rank in range(self._world_size)]
        try:
            self._store.wait(keys)
        except RuntimeError as error:
            missing = [rank for rank, key in enumerate(keys) if not self._call_store(partial(self._store.check, [key]))]
            raise CollectiveError(
                f"Rank {', '.join(map(str, missing))} did not call split_between_processes(dynamic=True). All "
                f"processes must call it. ({error})"
            ) from error

    # items and results

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if not self._is_open:
            raise ConfigurationError("A work queue can be used only within the `with` block that created it.")
        # An item without a call of done() gets the result None, or the queue would never end.
        if self._current is not None:
            self.done(None)
        self._beat()
        taken = self._take()
        if taken is None:
            raise StopIteration
        self._current = taken
        return _item(self._inputs, taken[0])

    def done(self, result: Any) -> None:
        """Store the result of the item that this process took last, so that `results` returns it on all processes.

        Args:
            result: A picklable object. Its tensors are moved to the CPU.

        Raises:
            ConfigurationError: If this process has no item without a result.
        """
        if self._current is None:
            raise ConfigurationError("done() was called without an item. Take one first, as in `for item in work:`.")
        (index, _), self._current = self._current, None
        content = pickle.dumps(send_to_device(result, "cpu"))
        pieces = [content[start : start + _PIECE] for start in range(0, len(content), _PIECE)]
        # Store the pieces first, because the entry `done` makes other processes read them.
        for number, piece in enumerate(pieces):
            self._set(self._result_key(index, self._rank, number), piece)
        if self._exchange(f"done/{index}", "", f"{self._rank}/{len(pieces)}") != f"{self._rank}/{len(pieces)}":
            for number in range(len(pieces)):  # another process got the item too and was faster
                self._delete(self._result_key(index, self._rank, number))

    def map(self, function: Callable[[Any], Any]) -> list[Any]:
        """Apply a function to all items, distributed over the processes. Return the results of all items.

        Args:
            function: Called with one item.

        Returns:
            The results of all items in the order of the inputs.
        """
        for item in self:
            self.done(function(item))
        return self.results()

    def results(self) -> list[Any]:
        """Return the results of all items, which the processes stored with `done`, in the order of the items.

        Call this after the loop over the queue has ended.

        Returns:
            A list with the objects passed to `done`, or None for an item without a call of `done`.

        Raises:
            ConfigurationError: If items are left because the queue was not iterated to its end.
            DataError: If several processes died while working on one item.
        """
        if not self._is_open or self._pending():
            raise ConfigurationError(
                "results() must be called within the `with` block, after the queue has been iterated to its end.",
            )
        holders = [self._get(f"done/{index}") for index in range(self._length)]
        failed = [index for index, holder in enumerate(holders) if holder == _GIVEN_UP]
        if failed:
            raise DataError(
                f"Items {failed} were each assigned to {_MOST_ATTEMPTS} processes, which all exited before they "
                "finished the item. See the errors of these processes for the cause."
            )
        return [self._read(index, str(holder)) for index, holder in enumerate(holders)]

    def _take(self) -> tuple[int, int] | None:
        # First the items that no process has taken, then those whose process has died.
        while self._has_new:
            index = self._add("next") - 1
            if index >= self._length:
                self._has_new = False
            elif self._claim(index, "", 0):
                return index, 0
        pause = _SHORTEST
        # Waits as long as other processes may still die, because their items are then taken again.
        while pending := self._pending():
            for index in pending:
                holder = self._get(f"claim/{index}")
                rank, attempt = map(int, holder.split("/")) if holder else (-1, -1)
                # A process may have finished the item and left the queue since the items were listed.
                if rank >= 0 and (not self._is_gone(rank) or self._holds([f"done/{index}"])):
                    continue
                # An item that kills every process, such as by running out of memory, must not end the whole run.
                if attempt + 1 >= _MOST_ATTEMPTS:
                    self._exchange(f"done/{index}", "", _GIVEN_UP)
                elif self._claim(index, holder, attempt + 1):
                    return index, attempt + 1
            self._beat()
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)
        return None

    def _claim(self, index: int, before: str, attempt: int) -> bool:
        mine = f"{self._rank}/{attempt}"
        return self._exchange(f"claim/{index}", before, mine) == mine

    def _pending(self) -> list[int]:
        if self._unfinished and self._holds([f"done/{index}" for index in self._unfinished]):
            self._unfinished = []
        self._unfinished = [index for index in self._unfinished if not self._holds([f"done/{index}"])]
        return self._unfinished

    def _read(self, index: int, holder: str) -> Any:
        rank, pieces = map(int, holder.split("/"))
        keys = [self._key(self._result_key(index, rank, number)) for number in range(pieces)]
        content = self._call_store(lambda: [self._store.get(key) for key in keys])
        return pickle.loads(b"".join(content))

    # processes

    def __enter__(self) -> WorkQueue:
        self._is_open = True
        self._show_life(0)
        if self._world_size > 1:
            heartbeat.set_expendable(True)
            self._signs = threading.Thread(target=self._send_life_signs, name="work-queue", daemon=True)
            self._signs.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        self._is_open = False
        self._ended.set()
        if error is not None:
            heartbeat.mark_left_queue(error)
        if self._signs is not None:
            self._signs.join()
            heartbeat.set_expendable(False)
        self._set(f"left/{self._rank}", b"1")
        # The last process to leave deletes the queue's entries, since the others may still read them.
        if self._add("left") == self._world_size:
            self._clear()

    def _send_life_signs(self) -> None:
        count = 0
        while not self._ended.wait(self._lease / 10):
            count += 1
            try:
                self._show_life(count)
            except CollectiveError:
                return  # the process that serves the store has exited; the main thread raises this error too

    def _show_life(self, count: int) -> None:
        self._set(f"life/{self._rank}", f"{_machine_id()}/{os.getpid()}/{_start_ticks(os.getpid())}/{count}".encode())

    def _is_gone(self, rank: int) -> bool:
        if rank == self._rank or self._holds([f"left/{rank}"]):
            return True  # this process no longer works on its own earlier claim
        sign = self._get(f"life/{rank}").encode()
        place, pid, started, _ = sign.decode().rsplit("/", 3)
        # A reused PID has another start time, so it does not pass for the dead process.
        if place and place == _machine_id() and _start_ticks(int(pid)) != started:
            return True
        # Clocks of machines differ, so only the time without a new sign counts.
        known, since = self._seen.get(rank, (b"", 0.0))
        if known != sign:
            self._seen[rank] = sign, time.monotonic()
            return False
        return time.monotonic() - since > self._lease

    def _clear(self) -> None:
        for index in range(self._length):
            holder = self._get(f"done/{index}")
            if holder and holder != _GIVEN_UP:
                rank, pieces = map(int, holder.split("/"))
                for number in range(pieces):
                    self._delete(self._result_key(index, rank, number))
            self._delete(f"done/{index}")
            self._delete(f"claim/{index}")
        for rank in range(self._world_size):
            self._delete(f"life/{rank}")
            self._delete(f"left/{rank}")

    # the store

    def _key(self, name: str) -> str:
        return f"{_PREFIX}/{self._number}/{name}"

    def _result_key(self, index: int, rank: int, piece: int) -> str:
        return f"result/{index}/{rank}/{piece}"

    def _holds(self, names: list[str]) -> bool:
        return bool(self._call_store(lambda: self._store.check([self._key(name) for name in names])))

    def _get(self, name: str) -> str:
        return self._call_store(lambda: self._store.get(self._key(name))).decode() if self._holds([name]) else ""

    def _set(self, name: str, value: bytes) -> None:
        content: Any = value  # the store accepts bytes, but its annotation only str
        self._call_store(lambda: self._store.set(self._key(name), content))

    def _delete(self, name: str) -> None:
        self._call_store(lambda: self._store.delete_key(self._key(name)))

    def _add(self, name: str) -> int:
        return int(self._call_store(lambda: self._store.add(self._key(name), 1)))

    def _exchange(self, name: str, before: str, after: str) -> str:
        found: bytes = self._call_store(lambda: self._store.compare_set(self._key(name), before, after))
        return found.decode()

    def _call_store(self, ask: Callable[[], Any]) -> Any:
        try:
            return ask()
        except RuntimeError as error:
            raise CollectiveError(
                f"The work queue cannot reach the rendezvous store ({error}). The process that serves the store has "
                "exited. See the error of that process for the cause."
            ) from error


def _length(inputs: Any) -> int:
    if not isinstance(inputs, dict):
        return len(inputs)
    lengths = {key: len(value) for key, value in inputs.items()}
    if len(set(lengths.values())) > 1:
        raise ConfigurationError(f"The values of a dict must have equal lengths to be split, but have {lengths}.")
    return next(iter(lengths.values()), 0)


def _item(inputs: Any, index: int) -> Any:
    if isinstance(inputs, dict):
        return {key: value[index] for key, value in inputs.items()}
    return inputs[index]


def _machine_id() -> str:
    """Return an ID shared by processes that can see each other's PIDs, or ''."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{socket.gethostname()}/{file.read().strip()}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _start_ticks(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/stat") as file:
            # The command name before the last parenthesis may itself contain spaces and parentheses.
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return ""
    # A zombie counts as gone. The 20th of these fields is the start time.
    return "" if fields[0] in "ZX" else fields[19]
