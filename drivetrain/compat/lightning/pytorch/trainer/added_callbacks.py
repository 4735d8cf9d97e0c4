"""The callbacks that Lightning's Trainer has without being given them."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from drivetrain.callbacks import Callback, ModelSummary, RichModelSummary
from drivetrain.callbacks import ModelCheckpoint as CoreModelCheckpoint
from drivetrain.callbacks import TQDMProgressBar as CoreProgressBar
from drivetrain.callbacks.rich_progress_bar import require_rich
from drivetrain.compat.lightning.fabric.utilities.registry import made_by_entry_points
from drivetrain.compat.lightning.pytorch.callbacks.model_checkpoint import ModelCheckpoint
from drivetrain.compat.lightning.pytorch.callbacks.progress.tqdm_progress import TQDMProgressBar

ENTRY_POINTS = "lightning.pytorch.callbacks_factory"
"""The group of entry points by which packages add callbacks to every Trainer."""


def with_external(given: Any) -> list[Callback]:
    """The callbacks that a script gives, and those of installed packages.

    Args:
        given: One callback, several, or None.
    """
    own = [given] if isinstance(given, Callback) else list(given or [])
    return [*own, *made_by_entry_points(ENTRY_POINTS)]


def as_there(callbacks: Sequence[Callback], given: Sequence[Callback]) -> list[Callback]:
    """The callbacks with Lightning's in the place of those that the core's Trainer has added by itself.

    That is the callback for checkpoints, the progress bar, and where rich is installed the model summary.

    Args:
        callbacks: All of them.
        given: Those that were given.
    """
    has_rich = find_spec("rich") is not None
    return [each if any(each is own for own in given) else _replaced(each, has_rich) for each in callbacks]


def _replaced(added: Callback, has_rich: bool) -> Callback:
    if type(added) is CoreModelCheckpoint:
        return ModelCheckpoint()
    if type(added) is CoreProgressBar and not has_rich:
        return TQDMProgressBar.by_default()
    if type(added) is CoreProgressBar:
        require_rich("RichProgressBar")
        # Imports rich, which is installed on wish.
        from drivetrain.compat.lightning.pytorch.callbacks.progress.rich_progress import RichProgressBar

        return RichProgressBar()
    return RichModelSummary() if has_rich and type(added) is ModelSummary else added
