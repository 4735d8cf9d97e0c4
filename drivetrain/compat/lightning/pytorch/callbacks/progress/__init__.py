"""Progress bars."""

from __future__ import annotations

from typing import Any

from drivetrain.compat.lightning.pytorch.callbacks.progress.progress_bar import ProgressBar
from drivetrain.compat.lightning.pytorch.callbacks.progress.tqdm_progress import TQDMProgressBar

__all__ = ["ProgressBar", "RichProgressBar", "TQDMProgressBar"]


def __getattr__(name: str) -> Any:
    if name != "RichProgressBar":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Imports rich, an optional dependency.
    from drivetrain.compat.lightning.pytorch.callbacks.progress.rich_progress import RichProgressBar

    return RichProgressBar
