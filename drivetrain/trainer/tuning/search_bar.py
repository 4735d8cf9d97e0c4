"""The progress of a search, shown as that of a run is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from drivetrain.callbacks.support.progress_display import Stage as BarStage
from drivetrain.callbacks.support.progress_display import make_display

if TYPE_CHECKING:
    from drivetrain.trainer.trainer import Trainer

REFRESH_SECONDS = 0.1


@contextmanager
def shown(trainer: Trainer, title: str, total: int) -> Iterator[Callable[..., None]]:
    """Show how far a search is, on the main process of a trainer that shows progress.

    Args:
        trainer: The trainer.
        title: What is searched.
        total: How many steps it takes at most.

    Yields:
        A function to call after each step, with the values to show by name.
    """
    if trainer.progress_bar_callback is None or not trainer.is_global_zero:
        yield lambda **values: None
        return
    display, stage = make_display(REFRESH_SECONDS), BarStage(title, [total], passing=True)
    display.open(stage)

    def advance(**values: float) -> None:
        stage.done += 1
        display.draw(stage, values)

    try:
        yield advance
    finally:
        display.close(stage)
