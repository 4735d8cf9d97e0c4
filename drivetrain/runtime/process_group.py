"""Starting and ending the group of processes that collectives run over."""

from __future__ import annotations

import gc
import os
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from drivetrain.runtime.devices import DeviceKind
from drivetrain.runtime.environment import ProcessEnvironment
from drivetrain.runtime.errors import LaunchError

DEFAULT_TIMEOUT = timedelta(minutes=30)


def init_process_group(
    environment: ProcessEnvironment,
    kind: DeviceKind,
    *,
    backend: str | None = None,
    timeout: timedelta | None = None,
    device: torch.device | None = None,
) -> tuple[str, Store]:
    """Join the process group that the environment describes.

    Tensors of the kind go through its backend; CPU tensors always have gloo beside it, so that
    gathering Python objects never waits for the device.
    """
    chosen = backend or kind.backend
    spec = chosen if chosen == "gloo" or ":" in chosen or kind.name == "cpu" else f"cpu:gloo,{kind.name}:{chosen}"
    options: dict[str, Any] = {}
    if "nccl" in spec and device is not None and device.type == "cuda":
        options["device_id"] = device
    limit = timeout or DEFAULT_TIMEOUT
    try:
        store = _rendezvous_store(environment, limit)
        dist.init_process_group(
            spec,
            store=store,
            rank=environment.rank,
            world_size=environment.world_size,
            timeout=limit,
            **options,
        )
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        raise LaunchError(
            f"Rank {environment.rank} of {environment.world_size} could not meet its peers at "
            f"{environment.main_address}:{environment.main_port} within {limit}: {error}. "
            "Check that every process was started and that the address and port can be reached."
        ) from error
    return chosen, store


def _rendezvous_store(environment: ProcessEnvironment, timeout: timedelta) -> Store:
    """The store of the elastic agent where there is one, else one that rank 0 serves.

    Each restart of an elastic agent gets its own prefix: keys left by the dead attempt would
    otherwise make the new one connect to processes that are gone.
    """
    agent_serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = TCPStore(
        environment.main_address,
        environment.main_port,
        environment.world_size,
        is_master=environment.rank == 0 and not agent_serves,
        timeout=timeout,
        multi_tenant=True,
    )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"drivetrain/attempt{attempt}", store)


def destroy_process_group() -> None:
    """Leave the process group: wait for the peers, then free it. Nothing happens where there is none.

    Whatever still holds a DDP reducer must be gone by now: destroying the group while a reducer's
    destructor waits for gloo's thread and that thread for the GIL is a deadlock (seen with torch 2.13).
    """
    if not (dist.is_available() and dist.is_initialized()):
        return
    gc.collect()
    barrier()
    dist.destroy_process_group()


def leave_process_group(store: Store, patience: timedelta) -> None:
    """Leave the process group at exit, waiting for the peers a short while only: they may be dead or busy."""
    if not (dist.is_available() and dist.is_initialized()):
        return
    gc.collect()
    rank, ranks = dist.get_rank(), range(dist.get_world_size())
    deadline = time.monotonic() + patience.total_seconds()
    try:
        store.set(leaving_key(rank), "1")
        _wait_for_keys(store, [leaving_key(each) for each in ranks], deadline)
        # Rank 0 may serve the store. A peer that still asks it as it goes would write a stack trace (torch 2.13).
        if rank:
            store.set(f"left/{rank}", "1")
        else:
            _wait_for_keys(store, [f"left/{each}" for each in ranks[1:]], deadline)
    except (dist.DistStoreError, dist.DistNetworkError, RuntimeError):
        pass  # a peer left without us, or is not coming
    dist.destroy_process_group()


def _wait_for_keys(store: Store, keys: list[str], deadline: float) -> None:
    # Asked in small steps: a wait that runs out writes warnings of its own to the terminal (torch 2.13).
    while keys and not store.check(keys) and time.monotonic() < deadline:
        time.sleep(0.01)


def leaving_key(rank: int) -> str:
    """The key under which a rank records in the store that it ends."""
    return f"leaving/{rank}"


def group_timeout() -> timedelta | None:
    """How long a collective of this process may wait; None without a process group, or where torch hides it."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    try:
        group: Any = dist.group.WORLD
        timeout = group._get_backend(torch.device("cpu")).options._timeout
    except (AttributeError, RuntimeError):
        return None
    return timeout if isinstance(timeout, timedelta) else None


def group_store() -> Store:
    """The store of a process group that the script has made itself."""
    return dist.distributed_c10d._get_default_store()


def barrier() -> None:
    """Wait until every process of the group is here; returns at once in a world of one."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()
