"""Print what a task is made of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import nn
from torch.nn.parameter import UninitializedParameter

from drivetrain.callbacks.base import Callback
from drivetrain.runtime.errors import ConfigurationError

if TYPE_CHECKING:
    from drivetrain.strategies import Strategy
    from drivetrain.strategies.model_state import ModelState
    from drivetrain.trainer.task import Task
    from drivetrain.trainer.trainer import Trainer

_UNITS = ((10**9, "B"), (10**6, "M"), (10**3, "K"))


class ModelSummary(Callback):
    """Prints a table of the task's modules and their parameters when fit begins, on the main process.

    Args:
        max_depth: How deep to look: 1 for the task's own modules, 2 for those within them, and so on; -1 for
            all, 0 for the totals only.

    Raises:
        ConfigurationError: If `max_depth` is below -1.
    """

    def __init__(self, max_depth: int = 1) -> None:
        if max_depth < -1:
            raise ConfigurationError(f"ModelSummary(max_depth={max_depth}): give 0 or more, or -1 for all modules.")
        self.max_depth = max_depth

    def on_fit_start(self, trainer: Trainer, task: Task) -> None:
        if trainer.is_global_zero and not trainer.fast_dev_run:
            self.show(task, trainer.strategy)

    def show(self, task: nn.Module, strategy: Strategy) -> None:
        """Print the table.

        Args:
            task: The task.
            strategy: What placed it.
        """
        print(summarize(task, self.max_depth, strategy))


def summarize(model: nn.Module, max_depth: int = 1, strategy: Strategy | None = None) -> str:
    """Return a table of a model's modules and their parameters.

    Args:
        model: The model.
        max_depth: How deep to look; -1 for all modules.
        strategy: What shards the model, if anything: all of it counts.
    """
    rows = module_rows(model, max_depth, strategy)
    lines = []
    if rows:
        cells = [("name", "type", "params"), *rows]
        widths = [max(len(row[column]) for row in cells) for column in range(3)]
        for name, kind, count in cells:
            lines.append(f"{name:<{widths[0]}}  {kind:<{widths[1]}}  {count:>{widths[2]}}")
        rule = "-" * len(lines[0])
        lines = [lines[0], rule, *lines[1:], rule]
    return "\n".join([*lines, *total_lines(model, strategy)])


def module_rows(model: nn.Module, max_depth: int, strategy: Strategy | None) -> list[tuple[str, str, str]]:
    """Return name, class and parameters of a model's modules.

    Args:
        model: The model.
        max_depth: How deep to look; -1 for all modules.
        strategy: What shards the model, if anything: all of it counts.
    """
    state = None if strategy is None else strategy.state
    return [
        (
            name,
            (type(module) if state is None else state.original_type(module)).__name__,
            _short(count_parameters(module, state)[0]),
        )
        for name, module in _modules(model, "", max_depth)
    ]


def total_lines(model: nn.Module, strategy: Strategy | None) -> list[str]:
    """Return the lines below the table.

    Args:
        model: The model.
        strategy: What shards the model, if anything: all of it counts.
    """
    total, trainable = count_parameters(model, None if strategy is None else strategy.state)
    lines = [f"{total:,} parameters, {trainable:,} of them trainable"]
    if any(isinstance(parameter, UninitializedParameter) for parameter in model.parameters()):
        lines.append("Lazy modules count from their first forward on.")
    return lines


def _modules(model: nn.Module, prefix: str, depth: int) -> Iterator[tuple[str, nn.Module]]:
    if depth == 0:
        return
    for name, module in model.named_children():
        yield f"{prefix}{name}", module
        yield from _modules(module, f"{prefix}{name}.", depth - 1)


def count_parameters(model: nn.Module, state: ModelState | None = None) -> tuple[int, int]:
    """Elements of all parameters, and of those that are trained.

    Args:
        model: The model.
        state: What shards its parameters, if anything: all of each counts.
    """
    known = (each for each in model.parameters() if not isinstance(each, UninitializedParameter))
    described = [(p.numel(), p.requires_grad) if state is None else state.describe(p) for p in known]
    return sum(elements for elements, _ in described), sum(elements for elements, trained in described if trained)


def _short(count: int) -> str:
    for size, unit in _UNITS:
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return str(count)
