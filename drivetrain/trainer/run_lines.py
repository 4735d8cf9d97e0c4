"""The line with which a run begins, what it runs on; and that with which it ends: why, where, and how to resume it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain.callbacks.support.parameter_counts import count_parameters
from drivetrain.runtime.terminal import shown
from drivetrain.trainer.loops.run_control import StopReason

if TYPE_CHECKING:
    from drivetrain.trainer.task import Task
    from drivetrain.trainer.trainer import Trainer

_DONE = "Done: the run ended after {taken}"
_FIRST_WORDS = {
    StopReason.PREEMPTED: "Preempted: the run can be resumed after {taken}",
    StopReason.INTERRUPTED: "Interrupted: the run ended after {taken}",
    StopReason.FAILED: "Failed: the run ended after {taken}",
    StopReason.NOTHING_TO_DO: "Nothing to do: the run has taken {taken} already",
    StopReason.NO_BATCHES: "Nothing to do: the run has taken {taken}",
}


def print_first_line(trainer: Trainer, task: Task) -> None:
    """Print what a `fit` trains and on what, on the main process, unless the run is to be bare.

    Args:
        trainer: The trainer.
        task: The task, placed.
    """
    if trainer.is_global_zero and not trainer.barebones:
        trainer.print(first_line(trainer, task))


def first_line(trainer: Trainer, task: Task) -> str:
    """Describe in one line what a `fit` trains and on what.

    Args:
        trainer: The trainer.
        task: The task, placed.
    """
    count = trainer.world_size
    device = trainer.strategy.topology.device.type
    processes = f"{count} process{'es' * (count != 1)} on {device}"
    total = count_parameters(task, trainer.strategy.state).elements
    parameters = f"{total:,} parameter{'s' * (total != 1)}"
    formats = f"({trainer.strategy.name}), precision {trainer.precision}"
    line = f"Training {type(task).__name__}: {processes} {formats}, {parameters}."
    if trainer.loggers and trainer.log_dir is not None:
        line += f" Folder: {trainer.log_dir}."
    return shown(line)


def last_line(trainer: Trainer) -> str:
    """Describe in one line how a `fit` ended; on the main process.

    Args:
        trainer: The trainer.
    """
    control = trainer.control
    steps, epochs = trainer.global_step, trainer.current_epoch
    taken = f"{steps} step{'s' * (steps != 1)} ({epochs} epoch{'s' * (epochs != 1)})"
    first = _DONE if control.reason is None else _FIRST_WORDS.get(control.reason, _DONE)
    parts = [f"{first.format(taken=taken)}: {control.details}."]
    if control.reason is StopReason.NOTHING_TO_DO:
        if control.stops_for_good:
            return f"{parts[0]} Start a new run from its weights to train more."
        return f"{parts[0]} Raise that limit to train more."
    saved = newest_checkpoint(trainer)
    if trainer.loggers and trainer.log_dir is not None:
        parts.append(f"Logs: {trainer.log_dir}.")
    if saved:
        parts.append(f"Checkpoint: {saved}. To resume: fit(..., resume={saved!r}), or resume='auto'.")
    elif not trainer.options.is_quiet:
        parts.append("No checkpoint was written.")
    return shown(" ".join(parts))


def newest_checkpoint(trainer: Trainer) -> str:
    """The path of the newest checkpoint that the run has written through its callbacks, or an empty text."""
    return next((each.newest_model_path for each in trainer.checkpoint_callbacks if each.newest_model_path), "")
