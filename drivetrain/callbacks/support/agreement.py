"""Decisions that all processes must take alike: taken on the main process, sent to the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from drivetrain.runtime.collectives import broadcast_object_list
from drivetrain.runtime.errors import ConfigurationError, DrivetrainError
from drivetrain.runtime.state import PartialState

T = TypeVar("T")


def decide_on_main_process(decide: Callable[[], T]) -> T:
    """Call a function on the main process and return its result on every process.

    What it raises is raised on every process, so that no process waits for one that is gone.

    Args:
        decide: What to call; its result must be possible to pickle.

    Raises:
        DrivetrainError: On the other processes, of the class that the main process raised if it is of this
            family.
    """
    state = PartialState()
    if not state.use_distributed:
        return decide()
    message: list[Any] = [None, None, None, None]
    raised: Exception | None = None
    if state.is_main_process:
        try:
            message[0] = decide()
        except Exception as error:
            raised = error
            message[1] = type(error) if isinstance(error, DrivetrainError) else DrivetrainError
            message[2] = error.message if isinstance(error, DrivetrainError) else f"On the main process: {error!r}"
            message[3] = error.code if isinstance(error, ConfigurationError) else None
    broadcast_object_list(message)
    if raised is not None:
        raise raised
    if message[3] is not None:
        raise message[1](message[2], code=message[3])
    if message[1] is not None:
        raise message[1](message[2])
    result: T = message[0]
    return result
