"""Several processes from a notebook: forked, so that a function needs no file and sees all variables, or spawned."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from drivetrain.launch.forking import (
    NotebookError,
    free_port,
    refuse_existing_state,
    refuse_what_a_fork_would_break,
)
from drivetrain.launch.notebook_xla import launch_on_xla, runs_on_xla
from drivetrain.launch.options import LaunchOptions
from drivetrain.launch.plan import LaunchPlan
from drivetrain.launch.processes import Call, PickledCall, Processes, variables_of_processes
from drivetrain.runtime.errors import ConfigurationError

_START_METHODS = ("fork", "spawn")


def notebook_launcher(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: str | int = "0",
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int = 1,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: dict[str, Any] | None = None,
    rdzv_id: str = "none",
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
    *,
    start_method: str = "fork",
) -> Any:
    """Run a function in several processes and wait for them.

    Args:
        function: What each process runs. It makes its own Trainer or Accelerator.
        args: Its arguments.
        num_processes: Processes over all machines; one per accelerator, or one on the CPU, if None. With one
            process altogether, the function runs in this one.
        mixed_precision: Default number format in the processes.
        use_port: Port where they meet; 0 for a free one (on one machine).
        master_addr: Address of machine 0.
        node_rank: Which machine this is, from 0.
        num_nodes: Machines that take part; the same call runs on each.
        rdzv_backend: Accepted for Accelerate's sake: machines meet at `master_addr`, and `node_rank` orders them.
        rdzv_endpoint: That address and port in one, as in `"10.0.0.1:29500"`.
        rdzv_conf: Accepted for Accelerate's sake.
        rdzv_id: Accepted for Accelerate's sake.
        max_restarts: How often all processes are started again after a failure; on one machine.
        monitor_interval: Accepted for Accelerate's sake: a process's end is seen at once.
        log_line_prefix_template: Accepted for Accelerate's sake.
        start_method: `"fork"`, or `"spawn"` for new interpreters, also where a device is in use here
            already. What is spawned gets the function and its arguments by pickle, and sees no other variable.

    Returns:
        What the function returned in the first process of this machine, if it can be pickled.

    Raises:
        LaunchError: A process failed; the message holds the first one's traceback. Or the processes cannot be
            started: an accelerator or an Accelerator is in use here already. A notebook shows it in 12 lines at most.
        ConfigurationError: An argument that cannot be.

    Example:
        ```python
        from drivetrain.launch import notebook_launcher

        def train(epochs: int) -> None:
            print(f"training for {epochs} epochs")

        notebook_launcher(train, args=(3,), num_processes=1)
        ```
    """
    _check_start(start_method, max_restarts, num_nodes)
    if runs_on_xla():
        launch_on_xla(function, args, num_processes, mixed_precision, num_nodes)
        return None
    if rdzv_endpoint:
        master_addr, _, port = rdzv_endpoint.partition(":")
        use_port = port or use_port
    options = LaunchOptions(
        num_processes=num_processes,
        num_machines=num_nodes,
        machine_rank=node_rank,
        main_process_ip=master_addr,
        main_process_port=_port(use_port, num_nodes),
        mixed_precision=mixed_precision,
        max_restarts=max_restarts,
    )
    plan = LaunchPlan.make(options)
    world_size = plan.local_processes * num_nodes
    if world_size == 1:
        with plan.environment():
            return function(*args)
    if start_method == "fork":
        refuse_existing_state()
        refuse_what_a_fork_would_break(plan.kind)
    variables = variables_of_processes(plan, world_size, master_addr)
    call = Call(function, args) if start_method == "fork" else PickledCall(function, args)
    for attempt in range(max_restarts + 1):
        variables["MASTER_PORT"] = str(options.main_process_port or free_port())
        variables["TORCHELASTIC_RESTART_COUNT"] = str(attempt)
        try:
            return Processes(start_method, call, variables, first_rank=node_rank * plan.local_processes).run()
        except NotebookError as error:
            if attempt == max_restarts:
                raise
            print(f"{error}\nStarting all processes again (restart {attempt + 1} of {max_restarts}).", file=sys.stderr)
    return None


def _check_start(method: str, restarts: int, machines: int) -> None:
    if method not in _START_METHODS:
        raise ConfigurationError(
            f"start_method is {method!r}, but must be one of {', '.join(_START_METHODS)}.", code="DT-001"
        )
    if restarts and machines > 1:
        raise ConfigurationError(
            f"max_restarts is {restarts} for {machines} machines, which would start again one by one. Leave it "
            "out, or save the training as a file and run `drivetrain launch --max_restarts` on it.",
            code="DT-033",
        )


def _port(given: str | int, machines: int) -> int | None:
    try:
        port = int(given)
    except ValueError:
        raise ConfigurationError(
            f"use_port is {given!r}, but must be a number; 0 takes a free port.", code="DT-003"
        ) from None
    if port == 0 and machines > 1:
        raise ConfigurationError(
            "use_port is 0, but several machines must agree on one. Give the same port on each.", code="DT-033"
        )
    return port
