"""What forking ranks out of a process needs."""

from __future__ import annotations

import multiprocessing
import socket
import threading

from drivetrain.runtime.devices import get_device_kind
from drivetrain.runtime.errors import LaunchError
from drivetrain.runtime.state import PartialState


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def refuse_what_a_fork_would_break(kind: str) -> None:
    """Raise where this process cannot be forked into ranks.

    Args:
        kind: Name of the kind of device that they run on.

    Raises:
        LaunchError: Something is in the way; the message names it.
    """
    if "fork" not in multiprocessing.get_all_start_methods():
        raise LaunchError(
            "notebook_launcher needs fork, which this system does not have. Save the training as a file and "
            "run `drivetrain launch` on it."
        )
    if PartialState.existing() is not None:
        raise LaunchError(
            "An Accelerator, Trainer or PartialState exists in this process already, so its processes could "
            "not make their own. Restart the kernel, and make it only inside the function given to "
            "notebook_launcher."
        )
    if get_device_kind(kind).is_started():
        raise LaunchError(
            f"{kind} is in use in this process already, and its state does not survive a fork. Restart the "
            f"kernel, and touch {kind} only inside the function given to notebook_launcher."
        )
    if threading.current_thread() is not threading.main_thread():
        raise LaunchError("notebook_launcher must be called from the main thread, where forking is safe.")
