"""Items that processes take one after the other, so that a fast process takes more of them.

All goes through the store that the processes met at, and no collective is needed: no process waits for one that has
died, and the item that it had is given to another.
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
_LEASE = 30.0  # seconds without a sign of life after which a process counts as gone
_SHORTEST, _LONGEST = 0.005, 0.1  # seconds between two readings of the store
_MOST_ATTEMPTS = 3
_PIECE = 4 * 2**20  # bytes of a result in one entry of the store, which takes 8 MiB at most
_GIVEN_UP = "given up"


class WorkQueue:
    """Items for all processes of a run; each takes the next one when it is done with the one before.

    Args:
        inputs: A list, tuple, tensor or anything else with a length and indices, or a dict of equally long ones; the
            same on all processes.
        store: What the processes meet at.
        rank: This process.
        world_size: How many processes there are.
        beat: Called to show that this process gets something done.
        lease: Seconds without a sign of life after which a process on another machine counts as gone.

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
        # Each process counts its own queues: as many on all, where all make the same calls.
        self._number = store.add(f"{_PREFIX}/{rank}", 1)
        self._unfinished = list(range(self._length))
        self._current: tuple[int, int] | None = None  # the item, and how many had it before
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._has_new, self._is_open = True, False
        self._ended = threading.Event()
        self._signs: threading.Thread | None = None

    def wait_for_all(self) -> None:
        """Return once every process has a queue, so that none dies within it while others still connect to it.

        Raises:
            CollectiveError: A process did not ask for one in the store's time.
        """
        keys = [f"{_PREFIX}/{rank}" for rank in range(self._world_size)]
        try:
            self._store.wait(keys)
        except RuntimeError as error:
            missing = [rank for rank, key in enumerate(keys) if not self._asked(partial(self._store.check, [key]))]
            raise CollectiveError(
                f"split_between_processes(dynamic=True): rank {', '.join(map(str, missing))} did not come to it. All "
                f"processes must call it. ({error})"
            ) from error

    # taking items

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if not self._is_open:
            raise ConfigurationError("A work queue is used within the `with` block that makes it.")
        if self._current is not None:
            self.done(None)
        self._beat()
        taken = self._take()
        if taken is None:
            raise StopIteration
        self._current = taken
        return _item(self._inputs, taken[0])

    def done(self, result: Any) -> None:
        """Give the result of the item that was taken last.

        Args:
            result: Anything that pickles; its tensors are moved to the CPU.

        Raises:
            ConfigurationError: No item is open.
        """
        if self._current is None:
            raise ConfigurationError("There is no item to be done with: take one first, `for item in work:`.")
        (index, _), self._current = self._current, None
        content = pickle.dumps(send_to_device(result, "cpu"))
        pieces = [content[start : start + _PIECE] for start in range(0, len(content), _PIECE)]
        for number, piece in enumerate(pieces):
            self._set(self._result_key(index, self._rank, number), piece)
        if self._exchange(f"done/{index}", "", f"{self._rank}/{len(pieces)}") != f"{self._rank}/{len(pieces)}":
            for number in range(len(pieces)):  # another process was given the item, and was faster
                self._delete(self._result_key(index, self._rank, number))

    def map(self, function: Callable[[Any], Any]) -> list[Any]:
        """Call a function with the items, and return all results.

        Args:
            function: Called with one item.

        Returns:
            What `results` returns.
        """
        for item in self:
            self.done(function(item))
        return self.results()

    def results(self) -> list[Any]:
        """The results of all items in the order of the inputs, on every process that calls it.

        Returns:
            A list with what `done` was called with; None for an item that it was not called for.

        Raises:
            ConfigurationError: Items are left: the queue has not been iterated to its end.
            DataError: An item was given to several processes, none of which came to its end.
        """
        if not self._is_open or self._pending():
            raise ConfigurationError(
                "results() is called within the `with` block, after the queue has been iterated to its end.",
            )
        holders = [self._get(f"done/{index}") for index in range(self._length)]
        failed = [index for index, holder in enumerate(holders) if holder == _GIVEN_UP]
        if failed:
            raise DataError(
                f"Items {failed} were each given to {_MOST_ATTEMPTS} processes, which all ended before they were done "
                "with it. Their own errors say why."
            )
        return [self._read(index, str(holder)) for index, holder in enumerate(holders)]

    def _take(self) -> tuple[int, int] | None:
        """The next item, or one whose process is gone; waits while others may still lose theirs. None at the end."""
        while self._has_new:
            index = self._add("next") - 1
            if index >= self._length:
                self._has_new = False
            elif self._claim(index, "", 0):
                return index, 0
        pause = _SHORTEST
        while pending := self._pending():
            for index in pending:
                holder = self._get(f"claim/{index}")
                rank, attempt = map(int, holder.split("/")) if holder else (-1, -1)
                if rank >= 0 and not self._is_gone(rank):
                    continue
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
        """Items without a result."""
        if self._unfinished and self._holds([f"done/{index}" for index in self._unfinished]):
            self._unfinished = []
        self._unfinished = [index for index in self._unfinished if not self._holds([f"done/{index}"])]
        return self._unfinished

    def _read(self, index: int, holder: str) -> Any:
        rank, pieces = map(int, holder.split("/"))
        keys = [self._key(self._result_key(index, rank, number)) for number in range(pieces)]
        content = self._asked(lambda: [self._store.get(key) for key in keys])
        return pickle.loads(b"".join(content))

    # who is there

    def __enter__(self) -> WorkQueue:
        self._is_open = True
        self._show_life(0)
        if self._world_size > 1:
            heartbeat.set_expendable(True)
            self._signs = threading.Thread(target=self._live, name="work-queue", daemon=True)
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
        if self._add("left") == self._world_size:
            self._clear()

    def _live(self) -> None:
        count = 0
        while not self._ended.wait(self._lease / 10):
            count += 1
            try:
                self._show_life(count)
            except CollectiveError:
                return  # the process that holds the store is gone, which the main thread finds out too

    def _show_life(self, count: int) -> None:
        self._set(f"life/{self._rank}", f"{_place()}/{os.getpid()}/{_started(os.getpid())}/{count}".encode())

    def _is_gone(self, rank: int) -> bool:
        """Whether a process has left, has ended, or gives no sign of life."""
        if rank == self._rank or self._holds([f"left/{rank}"]):
            return True  # what this process had itself is open no longer
        sign = self._get(f"life/{rank}").encode()
        place, pid, started, _ = sign.decode().rsplit("/", 3)
        if place and place == _place() and _started(int(pid)) != started:
            return True
        known, since = self._seen.get(rank, (b"", 0.0))
        if known != sign:
            self._seen[rank] = sign, time.monotonic()
            return False
        return time.monotonic() - since > self._lease

    def _clear(self) -> None:
        """Remove all entries, once everybody has left."""
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
        return bool(self._asked(lambda: self._store.check([self._key(name) for name in names])))

    def _get(self, name: str) -> str:
        return self._asked(lambda: self._store.get(self._key(name))).decode() if self._holds([name]) else ""

    def _set(self, name: str, value: bytes) -> None:
        content: Any = value  # the store takes bytes, though its annotation has text alone
        self._asked(lambda: self._store.set(self._key(name), content))

    def _delete(self, name: str) -> None:
        self._asked(lambda: self._store.delete_key(self._key(name)))

    def _add(self, name: str) -> int:
        return int(self._asked(lambda: self._store.add(self._key(name), 1)))

    def _exchange(self, name: str, before: str, after: str) -> str:
        found: bytes = self._asked(lambda: self._store.compare_set(self._key(name), before, after))
        return found.decode()

    def _asked(self, ask: Callable[[], Any]) -> Any:
        try:
            return ask()
        except RuntimeError as error:
            raise CollectiveError(
                f"The work queue cannot reach the store that the processes met at ({error}). The process that serves "
                "it is gone; its own error says why."
            ) from error


def _length(inputs: Any) -> int:
    if not isinstance(inputs, dict):
        return len(inputs)
    lengths = {key: len(value) for key, value in inputs.items()}
    if len(set(lengths.values())) > 1:
        raise ConfigurationError(f"split_between_processes needs values of one length in a dict, got {lengths}.")
    return next(iter(lengths.values()), 0)


def _item(inputs: Any, index: int) -> Any:
    if isinstance(inputs, dict):
        return {key: value[index] for key, value in inputs.items()}
    return inputs[index]


def _place() -> str:
    """What processes have in common that see each other's numbers; empty where that is not known."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{socket.gethostname()}/{file.read().strip()}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _started(pid: int) -> str:
    """When a process was started, in the system's ticks; empty if it has ended."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
