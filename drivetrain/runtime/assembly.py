"""Finding out whether all processes came to the same place, without hanging where some did not."""

from __future__ import annotations

import time
from datetime import timedelta

from torch.distributed import DistNetworkError, DistStoreError

from drivetrain.runtime.state import PartialState

_POLL_SECONDS = 0.02


def all_arrive(name: str, patience: timedelta) -> bool:
    """Whether every process calls this with the same name, within a time of each other.

    No collective is used: it may be called where peers are gone or busy elsewhere. All that call it get the same
    answer, unless the process that holds the store is gone.

    Args:
        name: The place; each may be asked about once.
        patience: How long to wait for the others.
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
            arrived = store.add(count, 0)
        # Who gives up and who sees the last one arrive may be different processes: the first verdict holds for all.
        mine = "here" if arrived >= state.num_processes else "missing"
        return bool(store.compare_set(verdict, "", mine) == b"here")
    except (DistStoreError, DistNetworkError, RuntimeError):
        return False  # the process that holds the store is gone


def exchange_if_all_arrive(name: str, own: str, patience: timedelta) -> list[str] | None:
    """A text of every process, in the order of their ranks; None where not all arrive, as for `all_arrive`.

    Args:
        name: The place; each may be asked about once.
        own: This process's text.
        patience: How long to wait for the others.
    """
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
