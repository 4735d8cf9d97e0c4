"""Agreement between processes through the rendezvous store, which does not hang if a process is missing."""

from __future__ import annotations

import time
from datetime import timedelta

from torch.distributed import DistNetworkError, DistStoreError, Store  # type: ignore[attr-defined]

from drivetrain.runtime.errors import CollectiveError
from drivetrain.runtime.logging import get_logger
from drivetrain.runtime.process_group import DEFAULT_TIMEOUT, group_store, group_timeout
from drivetrain.runtime.state import PartialState

_POLL_SECONDS = 0.02


def all_arrive(name: str, patience: timedelta) -> bool:
    """Wait until all processes have called this function with the same `name`. Return False after `patience`.

    No collective is used, so it may be called if other processes have exited or are busy. All callers get the same
    answer, unless the process that serves the store has exited.
    """
    state = PartialState()
    if not state.use_distributed:
        return True
    store = state.store
    if store is None:
        return False
    count, verdict = f"assembly/{name}/count", f"assembly/{name}/verdict"
    deadline = time.monotonic() + patience.total_seconds()
    try:
        arrived = store.add(count, 1)
        while arrived < state.num_processes and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            # Adding 0 reads the counter.
            arrived = store.add(count, 0)
        # One process may time out just as another sees the last one arrive: the first verdict in the store counts.
        mine = "here" if arrived >= state.num_processes else "missing"
        return bool(store.compare_set(verdict, "", mine) == b"here")
    except (DistStoreError, DistNetworkError, RuntimeError):
        return False  # the process that serves the store has exited


def exchange_if_all_arrive(name: str, own: str, patience: timedelta) -> list[str] | None:
    """Send the text `own` to all processes and return all texts, or None if a process does not arrive in time."""
    state = PartialState()
    if not state.use_distributed:
        return [own]
    store = state.store
    if store is None:
        return None
    try:
        store.set(f"assembly/{name}/text/{state.process_index}", own)
        if not all_arrive(name, patience):
            return None
        return [store.get(f"assembly/{name}/text/{rank}").decode() for rank in range(state.num_processes)]
    except (DistStoreError, DistNetworkError, RuntimeError):
        return None


# Calls that succeed or fail on all processes together


logger = get_logger(__name__)

_PREFIX = "drivetrain/attempts"
_STARTED, _DONE, _NO_MEMORY, _FAILED = "started", "done", "memory", "failed: "
_SHORTEST, _INTERVAL = 0.0005, 0.02  # seconds between two readings of the store
_KEPT = 2  # number of latest attempts whose outcomes stay in the store


class SharedAttempt:
    """Function call on all processes, after which each process knows whether the call has failed on another one."""

    def __init__(self, state: PartialState, what: str, patience: float) -> None:
        self._store: Store = state.store or group_store()
        self._rank, self._ranks = state.process_index, range(state.num_processes)
        self._what, self._patience = what, patience
        self._limit = (group_timeout() or DEFAULT_TIMEOUT).total_seconds()
        # Each process counts its own attempts: the numbers match because all processes make the same calls.
        self._number = self._store.add(f"{_PREFIX}/{self._rank}", 1)
        if self._number > _KEPT:  # all processes read that outcome before the last attempt ended
            self._store.delete_key(f"{_PREFIX}/{self._number - _KEPT}/{self._rank}")
        self._write(_STARTED)

    @classmethod
    def begin(cls, what: str, patience: float) -> SharedAttempt | None:
        state = PartialState.existing()
        # `all_had_memory` waits up to `patience` seconds for processes that have not started the call.
        return cls(state, what, patience) if state is not None and state.use_distributed else None

    def fail(self, error: BaseException) -> None:
        # The other processes then raise an error instead of waiting.
        self._write(f"{_FAILED}{type(error).__name__}: {error}")

    def all_had_memory(self, *, here: bool) -> bool:
        # `here`: this process had enough memory.
        self._write(_DONE if here else _NO_MEMORY)
        begin, pause = time.monotonic(), _SHORTEST
        while True:
            outcomes = {rank: self._read(rank) for rank in self._ranks}
            for rank, outcome in outcomes.items():
                if outcome is not None and outcome.startswith(_FAILED):
                    raise CollectiveError(
                        f"Rank {rank} has failed in {self._what}: {outcome.removeprefix(_FAILED)}. All processes "
                        "must call it together."
                    )
            running = [rank for rank, outcome in outcomes.items() if outcome == _STARTED]
            absent = [rank for rank, outcome in outcomes.items() if outcome is None]
            waited = time.monotonic() - begin
            if not running and (not absent or waited >= self._patience):
                break
            # After running out of memory, this rank may be what the others wait for: give up early.
            if running and waited >= (self._limit if here else self._patience):
                raise CollectiveError(self._stuck_message(running, here, waited))
            time.sleep(pause)
            pause = min(2 * pause, _INTERVAL)
        if absent:
            logger.warning("Rank %s has not called %s. The others continue without it.", _listed(absent), self._what)
        return _NO_MEMORY not in outcomes.values()

    def _stuck_message(self, running: list[int], here: bool, waited: float) -> str:
        if here:
            return f"Rank {_listed(running)} has not ended its attempt at {self._what} within {waited:.0f} s."
        return (
            f"Rank {self._rank} ran out of memory in {self._what} with this batch size, and rank {_listed(running)} "
            f"has not ended the same attempt within {waited:.0f} s: it waits for rank {self._rank} in a collective. "
            "Use a smaller starting_batch_size that fits on all processes, or allocate the memory before the first "
            "collective. `patience` sets the time to wait."
        )

    def _write(self, outcome: str) -> None:
        self._store.set(self._key(self._rank), outcome)

    def _read(self, rank: int) -> str | None:
        key = self._key(rank)
        return self._store.get(key).decode() if self._store.check([key]) else None

    def _key(self, rank: int) -> str:
        return f"{_PREFIX}/{self._number}/{rank}"


def _listed(ranks: list[int]) -> str:
    return ", ".join(str(rank) for rank in ranks)
