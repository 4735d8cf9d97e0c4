"""Observer of a run: the engine calls its methods for batches, gradients, steps and logged values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any


class Observer:
    """Base class for tools that record what a training script does, such as `drivetrain verify`.

    Each method is called at one place of the engine, and by default changes nothing. Set `current` to an instance
    before the script creates its Accelerator or Trainer. Without an observer, nothing is called.
    """

    leaves_empty: bool = False
    """True to leave models that are built on the meta device there, without values, when they are prepared."""

    def command_line(self, arguments: Sequence[str] | None) -> Sequence[str] | None:
        """Return the arguments that a script's `TrainerCLI` parses, in place of `arguments`. None are the process's."""
        return arguments

    def strategy(self) -> Any:
        """Return a strategy in place of the one that the script and the launcher choose, or None to keep it."""
        return None

    def precision(self) -> str | None:
        """Return the name of a precision in place of the chosen one, or None to keep it."""
        return None

    def processes(self, count: int) -> int:
        """Return how many processes share each step's batches. Prepared schedulers step this many times."""
        return count

    def loader(self, loader: Any) -> Any:
        """Return the loader to prepare in place of the script's own, before it is divided over processes."""
        return loader

    def model(self, model: Any) -> None:
        """Inspect a model after it was prepared. The default does nothing."""

    def batches(self, loader: Any, pairs: Iterator[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
        """Return an iterator over a prepared loader's batches, each with its `BatchInfo`, in place of `pairs`."""
        return pairs

    def hooks(self, hooks: Any, step: Any, precision: Any, prepared: Any) -> Any:
        """Return the `StepHooks` of all later optimizer steps, in place of `hooks`.

        Args:
            hooks: The hooks of the Trainer, or empty ones.
            step: The `OptimizerStep` that calls them.
            precision: The precision of the run.
            prepared: The prepared models and optimizers. It is filled later.
        """
        return hooks

    def before_clipping(self) -> None:
        """Inspect the complete gradients before the script clips them. The default does nothing."""

    def trackers(self, trackers: list[Any]) -> list[Any]:
        """Return the experiment trackers of a run, in place of those that the script chose."""
        return trackers

    def directory(self, path: str) -> str:
        """Return the directory for the output of a run, such as checkpoints, in place of `path`."""
        return path

    def saved_in(self, path: str) -> str:
        """Return the directory to load a checkpoint from, if `directory` redirected its save."""
        return path


current: Observer | None = None


def observed(trackers: list[Any]) -> list[Any]:
    """Return the experiment trackers of a run, or those that the observer puts in their place."""
    return trackers if current is None else current.trackers(trackers)


def leaves_empty() -> bool:
    """Return True if an observer asks strategies to leave models on the meta device, without values."""
    return current is not None and current.leaves_empty
