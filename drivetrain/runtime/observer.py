"""Observer of a run: the engine calls its methods for batches, gradients, steps and logged values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any


class Observer:
    """Base class of tools such as `drivetrain verify`, whose methods can watch and change a script's run.

    Each method is called at one place of the engine, and by default changes nothing. Set `current` to an instance
    before the script creates its Accelerator or Trainer. Without an observer, nothing is called.
    """

    leaves_empty: bool = False
    """True to leave models that are built on the meta device there, without values, when they are prepared."""

    def command_line(self, arguments: Sequence[str] | None) -> Sequence[str] | None:
        # None stands for the arguments of this process.
        return arguments

    def strategy(self) -> Any:
        # None keeps the strategy of the script.
        return None

    def precision(self) -> str | None:
        # None keeps the precision of the script.
        return None

    def processes(self, count: int) -> int:
        # This many processes share each step's batches. Prepared schedulers step as often.
        return count

    def loader(self, loader: Any) -> Any:
        # Called before the loader is divided among processes.
        return loader

    # Called after the model has been prepared.
    def model(self, model: Any) -> None: ...

    def batches(self, loader: Any, pairs: Iterator[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
        # Pairs of a batch and its `BatchInfo`.
        return pairs

    def hooks(self, hooks: Any, step: Any, precision: Any, prepared: Any) -> Any:
        # Called with the hooks of the Trainer, or with empty ones. `prepared` is filled later.
        return hooks

    def before_clipping(self) -> None:
        """Inspect the gradients of a step before they are clipped. Subclasses override this hook."""

    def trackers(self, trackers: list[Any]) -> list[Any]:
        return trackers

    def directory(self, path: str) -> str:
        # The directory for the run's output, such as that for its checkpoints.
        return path

    def saved_in(self, path: str) -> str:
        # The real directory of a checkpoint that `directory` has redirected.
        return path


current: Observer | None = None


def observed(trackers: list[Any]) -> list[Any]:
    return trackers if current is None else current.trackers(trackers)


def leaves_empty() -> bool:
    return current is not None and current.leaves_empty
