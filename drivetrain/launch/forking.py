"""What starting ranks out of a notebook's process needs."""

from __future__ import annotations

import importlib
import multiprocessing
import socket
import threading
from typing import Any

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


def cloudpickle_module() -> Any:
    """What pickles functions by value, where it is installed, by itself or as a part of joblib; else None."""
    for name in ("cloudpickle", "joblib.externals.cloudpickle"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    return None


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def refuse_existing_state() -> None:
    """Raise where this process has taken its place in a run, which a function's processes would inherit.

    Raises:
        LaunchError: It has.
    """
    if PartialState.existing() is not None:
        raise LaunchError(
            "An Accelerator, Trainer or PartialState exists in this process already, so its processes could "
            "not make their own. Restart the kernel, and make it only inside the function given to "
            "notebook_launcher."
        )


def refuse_what_a_fork_would_break(kind: str) -> None:
    """Raise where this process cannot be forked into ranks.

    Args:
        kind: Name of the kind of device that they run on.

    Raises:
        LaunchError: Something is in the way; the message names it.
    """
    if "fork" not in multiprocessing.get_all_start_methods():
        raise LaunchError(
            "This system has no fork, which starting processes from a notebook needs. Save the training as a file and "
            "run `drivetrain launch` on it."
        )
    if get_device_kind(kind).is_started():
        raise LaunchError(
            f"{kind} is in use in this process already, and its state does not survive a fork. Restart the "
            f"kernel, and touch {kind} only in the processes that are started (inside the function given to "
            'notebook_launcher, or the hooks of a task), or start new interpreters: start_method="spawn" of '
            "notebook_launcher, strategy='ddp_spawn' of a Trainer."
        )
    if threading.current_thread() is not threading.main_thread():
        raise LaunchError("Processes must be forked from the main thread, where that is safe.")
