"""Decide whether checkpoints may unpickle objects, from `weights_only` and torch's environment variables."""

from __future__ import annotations

import inspect
import os
from typing import Any

from drivetrain.compat.formats.lightning import is_lightning_checkpoint, opened


def is_asked_for(weights_only: bool | None) -> bool:
    """Return True if unpickling objects was requested, which executes code from the file."""
    if weights_only is None:
        return _is_set("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")
    return not weights_only and not _is_set("TORCH_FORCE_WEIGHTS_ONLY_LOAD")


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "").lower() in ("1", "y", "yes", "true")


class UnpicklesWhereAsked:
    """Mixin that loads checkpoints with pickled objects if this was requested."""

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:
        load = super().load_from_checkpoint  # type: ignore[misc]
        given = inspect.signature(load).bind(checkpoint_path, *args, **kwargs).arguments
        if is_asked_for(given.get("weights_only")):
            if not isinstance(checkpoint_path, str | os.PathLike) or is_lightning_checkpoint(checkpoint_path):
                checkpoint_path = opened(checkpoint_path, objects=True)
            kwargs["instantiate"] = True
        return load(checkpoint_path, *args, **kwargs)
