"""What starting ranks out of a notebook's process needs."""

from __future__ import annotations

import importlib
import multiprocessing
import socket
import threading
from collections.abc import Callable

from drivetrain.runtime.devices import get_device_kind
from drivetrain.runtime.errors import LaunchError
from drivetrain.runtime.state import PartialState

_MOST_LINES = 12


class NotebookError(LaunchError):
    """A process failed. A notebook shows the message in 12 lines at most, without the launcher's own frames."""

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in the cell."""
        lines = str(self).splitlines()
        left_out = len(lines) - _MOST_LINES
        if left_out <= 0:
            return lines
        note = f"  ... {left_out + 1} lines are left out: `import sys; print(sys.last_value)` shows all"
        return [*lines[:2], note, *lines[left_out + 3 :]]


def cloudpickle_dumps() -> Callable[[object], bytes] | None:
    """What pickles functions by value, where it is installed, by itself or as a part of joblib."""
    for name in ("cloudpickle", "joblib.externals.cloudpickle"):
        try:
            dumps: Callable[[object], bytes] = importlib.import_module(name).dumps
        except ImportError:
            continue
        return dumps
    return None


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
            f"kernel, and touch {kind} only inside the function given to notebook_launcher, or give "
            'start_method="spawn".'
        )
    if threading.current_thread() is not threading.main_thread():
        raise LaunchError("notebook_launcher must be called from the main thread, where forking is safe.")
