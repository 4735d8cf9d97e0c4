"""Print what a task is made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from drivetrain.callbacks.base import Callback
from drivetrain.callbacks.support.module_table import ModuleTable, check_depth, short
from drivetrain.runtime.terminal import print_text

if TYPE_CHECKING:
    from drivetrain.strategies import Strategy
    from drivetrain.trainer.task import Task
    from drivetrain.trainer.trainer import Trainer


class ModelSummary(Callback):
    """Prints a table of the task's modules when fit begins, on the main process.

    Each module has its class, parameters and mode. A task with an `example_input_array` has also the operations of a
    forward with it (FLOPs) and the sizes of each module's input and output, but not where the strategy shards the
    model: its forward needs all processes. Below the table are the parameters and their size in MB. Quantised weights
    count with the elements that they had before, and with the bytes that they take.

    Args:
        max_depth: How deep to look: 1 for the task's own modules, 2 for those within them, and so on; -1 for
            all, 0 for the totals only.
        **summarize_kwargs: Given to `summarize`, for classes that override it.

    Raises:
        ConfigurationError: If `max_depth` is no whole number of at least -1.

    Example:
        ```python
        from drivetrain import ModelSummary, Trainer

        trainer = Trainer(callbacks=[ModelSummary(max_depth=2)], logger=False)
        ```
    """

    def __init__(self, max_depth: int = 1, **summarize_kwargs: Any) -> None:
        check_depth(max_depth)
        self.max_depth = max_depth
        self.summarize_options = summarize_kwargs

    def on_fit_start(self, trainer: Trainer, task: Task) -> None:
        if trainer.is_global_zero and not trainer.fast_dev_run:
            table = ModuleTable(task, self.max_depth, trainer.strategy, trainer.accelerator.precision)
            columns = table.columns()
            totals = (*table.parameters, table.megabytes, table.modes)
            self.summarize(columns, *totals, total_flops=table.total_flops, **self.summarize_options)
            if table.is_lazy:
                print_text("Lazy modules count from their first forward on.")

    @staticmethod
    def summarize(
        summary_data: list[tuple[str, list[str]]],
        total_parameters: int,
        trainable_parameters: int,
        model_size: float,
        total_training_modes: dict[str, int],
        total_flops: int = 0,
        **summarize_kwargs: Any,
    ) -> None:
        """Print the table; override it to show the same in another way.

        Args:
            summary_data: The columns, each a title and its cells.
            total_parameters: Elements of all parameters.
            trainable_parameters: Elements of those that are trained.
            model_size: What the parameters take, in millions of bytes.
            total_training_modes: Modules in each mode, by its name.
            total_flops: Floating-point operations of a forward; 0 where none has run.
            **summarize_kwargs: What the callback was made with.
        """
        totals = total_lines(total_parameters, trainable_parameters, model_size, total_training_modes, total_flops)
        print_text("\n".join([*table_lines(summary_data), *totals]))


def summarize(model: nn.Module, max_depth: int = 1, strategy: Strategy | None = None) -> str:
    """Return a table of a model's modules and their parameters.

    Args:
        model: The model.
        max_depth: How deep to look; -1 for all modules.
        strategy: What shards the model, if anything: all of it counts.
    """
    table = ModuleTable(model, max_depth, strategy)
    lines = table_lines(table.columns())
    return "\n".join([*lines, *total_lines(*table.parameters, table.megabytes, table.modes, table.total_flops)])


def table_lines(columns: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
    """Return the table as lines; none where it has no rows.

    Args:
        columns: Titles and cells.
    """
    if not columns[0][1]:
        return []
    columns = shown_columns(columns)
    widths = [max(map(len, (title, *cells))) for title, cells in columns]
    rows: list[Sequence[str]] = [
        [title.lower() for title, _ in columns],
        *zip(*(cells for _, cells in columns), strict=True),
    ]
    right = [title in ("Params", "FLOPs") for title, _ in columns]
    layout = list(zip(widths, right, strict=True))
    lines = [
        "  ".join(cell.rjust(w) if flush else cell.ljust(w) for cell, (w, flush) in zip(row, layout, strict=True))
        for row in rows
    ]
    rule = "-" * len(lines[0])
    return [lines[0], rule, *(line.rstrip() for line in lines[1:]), rule]


def shown_columns(columns: Sequence[tuple[str, Sequence[str]]]) -> list[tuple[str, Sequence[str]]]:
    """Return the columns that are shown: without numbers, and without operations where none were counted.

    Args:
        columns: Titles and cells.
    """
    has_run = any(title == "In sizes" for title, _ in columns)
    return [column for column in columns if column[0] != " " and (has_run or column[0] != "FLOPs")]


def total_lines(
    parameters: int, trainable: int, megabytes: float, modes: Mapping[str, int], flops: int = 0
) -> list[str]:
    """Return the lines below the table.

    Args:
        parameters: Elements of all parameters.
        trainable: Elements of those that are trained.
        megabytes: What they take.
        modes: Modules in each mode.
        flops: Operations of a forward; 0 where none has run.
    """
    counted = f", {short(flops)} floating-point operations in a forward" if flops else ""
    training, evaluating = modes["train"], modes["eval"]
    switched = f"; {training} modules train, {evaluating} are in evaluation mode" if evaluating else ""
    return [f"{parameters:,} parameters ({megabytes:,.3f} MB), {trainable:,} of them trainable{counted}{switched}"]
