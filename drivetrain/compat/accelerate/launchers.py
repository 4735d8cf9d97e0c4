"""Start processes from Python."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from drivetrain.launch.agent import ProcessesFailed
from drivetrain.launch.notebook import notebook_launcher as start_notebook
from drivetrain.runtime.errors import ConfigurationError, LaunchError

__all__ = ["debug_launcher", "notebook_launcher"]


def notebook_launcher(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: str | int = "29500",
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int = 1,
    **options: Any,
) -> Any:
    """Run `drivetrain.notebook_launcher` with Accelerate's arguments."""
    known = {
        "rdzv_backend",
        "rdzv_endpoint",
        "rdzv_conf",
        "rdzv_id",
        "max_restarts",
        "monitor_interval",
        "log_line_prefix_template",
    }
    unknown = set(options) - known
    if unknown:
        raise ConfigurationError(f"notebook_launcher has no {', '.join(sorted(unknown))}; it has {', '.join(known)}.")
    if num_processes is not None and num_processes > 1 and "bitsandbytes" in sys.modules:
        raise LaunchError(
            "bitsandbytes was imported in this process and may have started CUDA, whose state does not survive a fork. "
            "Please keep these imports inside the function given to notebook_launcher, and restart the kernel. "
            "drivetrain.notebook_launcher refuses only where a device is in use."
        )
    port = 0 if num_nodes == 1 and str(use_port) == "29500" else use_port
    for restarts_left in range(options.get("max_restarts", 0), -1, -1):
        try:
            return start_notebook(
                function, args, num_processes, mixed_precision, port, master_addr, node_rank, num_nodes
            )
        except LaunchError as error:
            if not restarts_left:
                raise ProcessesFailed(str(error)) from error
    return None


def debug_launcher(function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int = 2) -> None:
    """Run a function in several CPU processes."""
    start_notebook(function, args, num_processes, cpu=True)
