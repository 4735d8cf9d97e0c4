"""A Ray cluster: reaching it, and reserving a worker for each rank. Ray is imported when a run asks for it."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from drivetrain.launch.messages import announce
from drivetrain.launch.options import LaunchOptions
from drivetrain.launch.ray_worker import Place, RayWorker
from drivetrain.runtime.errors import DeviceNotAvailableError, LaunchError

INSTALL = 'pip install "drivetrain[ray]"'
_CONNECT_PATIENCE = 5.0
_NOTICE_AFTER = 10.0  # seconds without the resources after which the user reads what is waited for
_RESERVE_TIMEOUT = 900.0  # seconds; an autoscaler may have to start machines
_CLEAN_UP_PATIENCE = 5.0
_INTERVAL = 0.2


def import_ray() -> Any:
    """Ray itself.

    Raises:
        LaunchError: It is not installed.
    """
    try:
        return import_module("ray")
    except ImportError as error:
        raise LaunchError(f"launcher='ray' needs Ray ({error}). Install it: {INSTALL}.") from None


@contextmanager
def connected(options: LaunchOptions) -> Iterator[Any]:
    """Connect to the cluster, or start one for this run; Ray, for as long as the context lasts.

    Raises:
        LaunchError: Ray is not installed, or the cluster cannot be reached.
    """
    ray = import_ray()
    address = options.ray_address or os.environ.get("RAY_ADDRESS") or "auto"
    settings: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address == "local":
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # it is a run's own, not a cluster to report on
        wanted = (options.num_processes or 1) * cores_of_worker(options)
        settings |= {"num_cpus": max(os.cpu_count() or 1, wanted), "include_dashboard": False}
    elif address != "auto":
        _check_reachable(address)
    try:
        ray.init(address=address, **settings)
    except Exception as error:
        raise LaunchError(_unreachable(address, str(error) or type(error).__name__)) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def _check_reachable(address: str) -> None:
    """Refuse an address where nothing listens: Ray itself tries for minutes, and ends the process then."""
    if "://" in address:
        raise LaunchError(
            f"ray_address is {address!r}, but ranks cannot be started through Ray's client. Run the command on a "
            "machine of the cluster, with HOST:PORT or auto."
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise LaunchError(f"ray_address is {address!r}, but must be HOST:PORT, such as 10.0.0.1:6379, auto or local.")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_PATIENCE):
            pass
    except (OSError, OverflowError) as error:
        raise LaunchError(_unreachable(address, str(error))) from None


def _unreachable(address: str, reason: str) -> str:
    return (
        f"No Ray cluster could be reached at {address!r}: {' '.join(reason.split())}\n"
        "Start one (`ray start --head`), give its address with --ray_address HOST:PORT or RAY_ADDRESS, or let this "
        "launch start one with --ray_address local."
    )


def cores_of_worker(options: LaunchOptions) -> int:
    """Cores that each rank reserves, and threads that it computes with."""
    return options.num_cpu_threads_per_process or 1


def count_of_ranks(ray: Any, options: LaunchOptions) -> tuple[int, bool]:
    """How many ranks there are, and whether each gets a GPU.

    Args:
        ray: Ray, connected.
        options: What was asked for.

    Raises:
        DeviceNotAvailableError: One rank for each GPU was asked for, and the cluster has none.
    """
    devices = int(ray.cluster_resources().get("GPU", 0))
    on_devices = not options.cpu and (devices > 0 or options.multi_gpu)
    if options.num_processes is not None:
        return options.num_processes, on_devices
    if options.multi_gpu and devices == 0:
        raise DeviceNotAvailableError(
            "multi_gpu asks for one process a GPU, but the Ray cluster has none now. Give num_processes to wait for "
            "GPUs that it adds, or leave multi_gpu out to run on the CPU."
        )
    return (devices if on_devices else 1), on_devices


@contextmanager
def reserved(
    ray: Any, options: LaunchOptions, count: int, on_devices: bool, stopped: Callable[[], bool]
) -> Iterator[list[Any]]:
    """Reserve a worker for each rank, all of them at once, and give all back in the end.

    Args:
        ray: Ray, connected.
        options: What was asked for.
        count: How many.
        on_devices: Whether each gets a GPU.
        stopped: Whether to wait no longer.

    Yields:
        Ray's handle of each worker; none where the wait was stopped.

    Raises:
        LaunchError: The resources did not become free in time.
    """
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    needed: dict[str, float] = {"CPU": cores_of_worker(options)}
    if on_devices:
        needed["GPU"] = 1
    group = placement_group([needed] * count, strategy="PACK")
    workers: list[Any] = []
    try:
        if _await_resources(ray, options, group, needed, count, stopped):
            kind = ray.remote(RayWorker)
            for bundle in range(count):
                where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
                chosen = {"num_cpus": needed["CPU"], "num_gpus": needed.get("GPU", 0), "max_restarts": 0}
                workers.append(kind.options(scheduling_strategy=where, **chosen).remote())
        yield workers
    finally:
        if workers:
            ray.wait([each.clean_up.remote() for each in workers], num_returns=count, timeout=_CLEAN_UP_PATIENCE)
        for each in workers:
            ray.kill(each)
        remove_placement_group(group)


def _await_resources(
    ray: Any, options: LaunchOptions, group: Any, needed: dict[str, float], count: int, stopped: Callable[[], bool]
) -> bool:
    """Wait until all are reserved; False where the wait was stopped."""
    begin = time.monotonic()
    limit = float(options.rendezvous_settings.get("timeout", _RESERVE_TIMEOUT))
    noticed = False
    while not group.wait(_INTERVAL):
        waited = time.monotonic() - begin
        if stopped():
            return False
        if waited >= limit:
            raise LaunchError(
                f"Ray did not have {_amount(needed, count)} within {limit:g} s; it has {_has(ray)}. Ask for fewer "
                "(--num_processes, --num_cpu_threads_per_process), add machines, or wait longer with "
                f"--rdzv_conf timeout={limit * 2:g}."
            )
        if waited >= _NOTICE_AFTER and not noticed:
            announce(f"waiting until Ray has {_amount(needed, count)}; it has {_has(ray)}.")
            noticed = True
    return True


def _amount(needed: dict[str, float], count: int) -> str:
    each = " and ".join(f"{amount:g} {name}" for name, amount in needed.items())
    return f"{count} x {each} free"


def _has(ray: Any) -> str:
    total, free = ray.cluster_resources(), ray.available_resources()
    return ", ".join(f"{free.get(name, 0):g} of {total.get(name, 0):g} {name} free" for name in ("CPU", "GPU"))


def in_order(places: list[Place]) -> list[int]:
    """The workers in the order of their ranks: those of a machine follow each other, by their devices.

    Args:
        places: Where each is.

    Returns:
        Indices of the workers, that of rank 0 first.
    """
    nodes = list(dict.fromkeys(place.node for place in places))

    # By number where the ids are numbers: 10 comes after 9.
    def key(worker: int) -> tuple[int, list[tuple[int, str]], int]:
        place = places[worker]
        return nodes.index(place.node), [(len(name), name) for name in place.devices], worker

    return sorted(range(len(places)), key=key)
