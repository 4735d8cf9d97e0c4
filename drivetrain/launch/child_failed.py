"""The failure of processes under the name by which scripts over torch's elastic agent catch it."""

from __future__ import annotations

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from drivetrain.runtime.errors import LaunchError


class ProcessesFailed(LaunchError, ChildFailedError):
    """A `LaunchError` that is torch's `ChildFailedError` too.

    Args:
        message: What happened.
    """

    def __init__(self, message: str) -> None:
        Exception.__init__(self, message)
        self.name, self.failures = "launch", {}
