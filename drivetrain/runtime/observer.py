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
        """Replace the command-line arguments of a script that uses `TrainerCLI`.

        None stands for the arguments of this process.
        """
        return arguments

    def strategy(self) -> Any:
        """Choose the strategy of the observed run, or return None to keep the script's choice."""
        return None

    def precision(self) -> str | None:
        """Choose the precision of the observed run by name, or return None to keep the script's choice."""
        return None

    def processes(self, count: int) -> int:
        """Return the number of processes that share each step's batches, by default `count`.

        Prepared schedulers step this many times.
        """
        return count

    def loader(self, loader: Any) -> Any:
        """Replace a loader of the observed script, before it is divided among processes."""
        return loader

    def model(self, model: Any) -> None:
        """Inspect a model of the observed script after it has been prepared. Does nothing by default."""

    def batches(self, loader: Any, pairs: Iterator[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
        """Replace the iterator over a prepared loader's batches, given as (batch, `BatchInfo`) pairs."""
        return pairs

    def hooks(self, hooks: Any, step: Any, precision: Any, prepared: Any) -> Any:
        """Replace the `StepHooks` that are called in every optimizer step of the run.

        Args:
            hooks: The hooks of the Trainer, or empty ones.
            step: The `OptimizerStep` that calls them.
            precision: The precision of the run.
            prepared: The prepared models and optimizers. It is filled later.
        """
        return hooks

    def before_clipping(self) -> None:
        """Inspect the gradients of a step before they are clipped. Does nothing by default."""

    def trackers(self, trackers: list[Any]) -> list[Any]:
        """Replace the experiment trackers that the observed script has chosen."""
        return trackers

    def directory(self, path: str) -> str:
        """Replace the directory for the run's output, such as that for its checkpoints."""
        return path

    def saved_in(self, path: str) -> str:
        """Return the real directory of a checkpoint whose save `directory` has redirected."""
        return path


current: Observer | None = None


def observed(trackers: list[Any]) -> list[Any]:
    return trackers if current is None else current.trackers(trackers)


def leaves_empty() -> bool:
    return current is not None and current.leaves_empty
