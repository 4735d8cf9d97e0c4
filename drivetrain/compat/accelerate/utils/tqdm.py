"""A progress bar that one process of a machine shows."""

from __future__ import annotations

from typing import Any

from tqdm.auto import tqdm as _tqdm

from drivetrain.runtime.state import PartialState


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """`tqdm.auto.tqdm`, shown by the first process of each machine alone."""
    if main_process_only and not PartialState().is_local_main_process:
        kwargs["disable"] = True
    return _tqdm(*args, **kwargs)
