"""Whether files that hold objects are opened, as Lightning decides it: by `weights_only`, and torch's variables."""

from __future__ import annotations

import os


def is_asked_for(weights_only: bool | None) -> bool:
    """Whether objects in a file are to be unpickled, which runs whatever code it holds.

    Args:
        weights_only: The argument of a verb or of `load_from_checkpoint`; where it is None, as `torch.load` would be
            called without it: objects are refused, unless `TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD` is set.
    """
    if weights_only is None:
        return _is_set("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")
    return not weights_only and not _is_set("TORCH_FORCE_WEIGHTS_ONLY_LOAD")


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "").lower() in ("1", "y", "yes", "true")


class UnpicklesWhereAsked:
    """What is built from a checkpoint, its objects too where that was asked for."""

    @classmethod
    def unpickles(cls, weights_only: bool | None) -> bool:
        """Whether `load_from_checkpoint` unpickles the objects in a file.

        Args:
            weights_only: What it was given.
        """
        return is_asked_for(weights_only)
