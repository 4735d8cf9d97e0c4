"""A function on a TPU from a notebook: in this process, which drives all devices, or forked into one for each."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from typing import Any

from drivetrain.launch.launcher import LaunchPlan
from drivetrain.launch.options import LaunchOptions
from drivetrain.launch.preloaded import free_port, refuse_what_a_fork_would_break
from drivetrain.runtime import xla
from drivetrain.runtime.devices import detect_device_kind
from drivetrain.runtime.errors import ConfigurationError, LaunchError


def runs_on_xla() -> bool:
    """Whether ranks of this machine run on XLA devices where nothing else is asked for."""
    return detect_device_kind().drives_all and not os.environ.get("DRIVETRAIN_USE_CPU")


def launch_on_xla(
    function: Callable[..., Any],
    args: Sequence[Any],
    num_processes: int | None,
    mixed_precision: str,
    num_nodes: int,
) -> None:
    """Run a function in one process, or in one for each XLA device of this machine.

    The processes are forked by torch_xla, which gives each its device; what is in `args`, such as a model that was made
    before, is shared with them until they change it.

    Args:
        function: What each process runs.
        args: Its arguments.
        num_processes: 1 for this process, which drives all devices; the number of devices for one each. None for one
            each, where a device can have a process of its own.
        mixed_precision: Default number format.
        num_nodes: Machines; 1.

    Raises:
        ConfigurationError: Another number of processes or machines.
        LaunchError: Forking is not possible any more, or a process failed.
    """
    if num_nodes > 1:
        raise ConfigurationError(
            f"num_nodes={num_nodes}: on TPUs notebook_launcher runs on one host. Start the script on each host "
            "instead.",
            code="DT-034",
        )
    devices = xla.device_count()
    apart = xla.has_process_per_device()
    processes = (devices if apart else 1) if num_processes is None else num_processes
    plan = LaunchPlan.make(LaunchOptions(num_processes=1, mixed_precision=mixed_precision))
    if processes == 1:
        with plan.environment():
            function(*args)
        return
    if xla.runs_on_cpu():
        raise ConfigurationError(
            f"num_processes={processes}: XLA on the CPU cannot join several processes; each would train alone and seem "
            "to work. Give num_processes=1; CPU_NUM_DEVICES=4 gives it four devices.",
            code="DT-034",
        )
    if not apart:
        raise ConfigurationError(
            f"num_processes={processes}: on TPUs v2 and v3 a process drives two cores in threads, which share what "
            "drivetrain keeps for each process. Give num_processes=1, which drives all cores.",
            code="DT-030",
        )
    if processes != devices:
        raise ConfigurationError(
            f"num_processes={processes}, but this host has {devices} XLA devices. Allowed: 1, which drives all "
            f"of them, or {devices}, one for each.",
            code="DT-030",
        )
    refuse_what_a_fork_would_break("xla")
    variables = {**plan.variables, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    try:
        xla.import_torch_xla().launch(_run_rank, args=(function, tuple(args), variables), start_method="fork")
    except Exception as error:
        raise LaunchError(f"A process of {devices} failed: {type(error).__name__}: {error}") from error


def _run_rank(index: int, function: Callable[..., Any], args: tuple[Any, ...], variables: dict[str, str]) -> None:
    """What each forked process does; its place comes from XLA's runtime, which starts here."""
    runtime = importlib.import_module("torch_xla.runtime")
    places = {
        "RANK": runtime.global_ordinal(),
        "WORLD_SIZE": runtime.world_size(),
        "LOCAL_RANK": runtime.local_ordinal(),
        "LOCAL_WORLD_SIZE": runtime.local_process_count(),
    }
    os.environ.update(variables)
    os.environ.update({name: str(value) for name, value in places.items()})
    function(*args)
