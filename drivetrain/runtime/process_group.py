"""Start and end of the default process group."""

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
    """Initialize the default process group, and return its backend and store.

    Tensors of the device kind use the kind's backend. CPU tensors always use gloo, so that gathering Python objects
    does not synchronize with the device.
    """
    chosen = backend or kind.backend
    spec = chosen if chosen == "gloo" or ":" in chosen or kind.name == "cpu" else f"cpu:gloo,{kind.name}:{chosen}"
    options: dict[str, Any] = {}
    if "nccl" in spec and device is not None and device.type == "cuda":
        # Without it, NCCL guesses the device from the global rank at the first barrier.
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
            f"Rank {environment.rank} of {environment.world_size} could not connect to the other processes at "
            f"{environment.main_address}:{environment.main_port} within {limit}: {error}. "
            "Check that every process was started and that the address and port can be reached."
        ) from error
    return chosen, store


def _rendezvous_store(environment: ProcessEnvironment, timeout: timedelta) -> Store:
    """Return the key-value store through which the ranks find each other.

    Each restart by an elastic agent gets a key prefix of its own. Keys of the previous attempt would otherwise make
    ranks connect to processes that have exited.
    """
    agent_serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = TCPStore(
        environment.main_address,
        environment.main_port,
        environment.world_size,
        is_master=environment.rank == 0 and not agent_serves,
        timeout=timeout,
        # A second store on the same port in this process shares the server.
        multi_tenant=True,
    )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"drivetrain/attempt{attempt}", store)


def destroy_process_group() -> None:
    """Wait for all processes, and destroy the default process group.

    No DDP reducer may be alive at this point. Its destructor waits for gloo's thread while that thread waits for the
    GIL, which is a deadlock (seen with torch 2.13).
    """
    if not (dist.is_available() and dist.is_initialized()):
        return
    # Reference cycles may keep DDP reducers alive.
    gc.collect()
    barrier()
    dist.destroy_process_group()


def leave_process_group(store: Store, patience: timedelta) -> None:
    """Destroy the process group at exit, after waiting for the other processes."""
    if not (dist.is_available() and dist.is_initialized()):
        return
    gc.collect()
    rank, ranks = dist.get_rank(), range(dist.get_world_size())
    deadline = time.monotonic() + patience.total_seconds()
    try:
        store.set(leaving_key(rank), "1")
        _wait_for_keys(store, [leaving_key(each) for each in ranks], deadline)
        # Rank 0 may serve the store and must exit last: a rank that loses the store prints a stack trace (torch 2.13).
        if rank:
            store.set(f"left/{rank}", "1")
        else:
            _wait_for_keys(store, [f"left/{each}" for each in ranks[1:]], deadline)
    except (dist.DistStoreError, dist.DistNetworkError, RuntimeError):
        pass  # another process has already exited or never started
    dist.destroy_process_group()


def _wait_for_keys(store: Store, keys: list[str], deadline: float) -> None:
    # Poll: a store wait that times out prints warnings to the terminal (torch 2.13).
    while keys and not store.check(keys) and time.monotonic() < deadline:
        time.sleep(0.01)


def leaving_key(rank: int) -> str:
    return f"leaving/{rank}"


def group_timeout() -> timedelta | None:
    """Return the timeout of collectives in the default process group, or None."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    try:
        group: Any = dist.group.WORLD
        # torch has no public access to the timeout of a group.
        timeout = group._get_backend(torch.device("cpu")).options._timeout
    except (AttributeError, RuntimeError):
        return None
    return timeout if isinstance(timeout, timedelta) else None


def group_store() -> Store:
    return dist.distributed_c10d._get_default_store()


def barrier() -> None:
    """Wait until all processes have reached the barrier."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()
