"""A progress bar that one process per machine shows."""

from __future__ import annotations

from typing import Any

from tqdm.auto import tqdm as _tqdm

from drivetrain.runtime.state import PartialState


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """Return `tqdm.auto.tqdm`, shown only on the first process of each machine."""
    if main_process_only and not PartialState().is_local_main_process:
        kwargs["disable"] = True
    return _tqdm(*args, **kwargs)
