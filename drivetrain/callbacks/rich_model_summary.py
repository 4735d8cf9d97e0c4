"""Print what a task is made of, with rich."""

from __future__ import annotations

from typing import Any

from drivetrain.callbacks.model_summary import ModelSummary, shown_columns, total_lines
from drivetrain.callbacks.support.rich_package import make_console, require_rich


class RichModelSummary(ModelSummary):
    """Prints `ModelSummary`'s table with rich, in colours where the terminal has them.

    Args:
        max_depth: How deep to look: 1 for the task's own modules; -1 for all, 0 for the totals only.
        **summarize_kwargs: Arguments of `rich.table.Table`, such as `header_style`.

    Raises:
        ConfigurationError: If rich is not installed, or `max_depth` is no whole number of at least -1.

    Example:
        ```python
        from drivetrain import RichModelSummary, Trainer

        trainer = Trainer(callbacks=[RichModelSummary(max_depth=2)], logger=False)
        ```
    """

    def __init__(self, max_depth: int = 1, **summarize_kwargs: Any) -> None:
        require_rich("RichModelSummary")
        super().__init__(max_depth, **summarize_kwargs)

    @staticmethod
    def summarize(
        summary_data: Any,
        total_parameters: Any,
        trainable_parameters: Any,
        model_size: Any,
        total_training_modes: Any,
        total_flops: Any = 0,
        **summarize_kwargs: Any,
    ) -> None:
        from rich.table import Table
        from rich.text import Text

        console = make_console()
        numbers, *_ = summary_data
        if numbers[1]:
            table = Table(**{"header_style": "bold magenta", **summarize_kwargs})
            shown = shown_columns(summary_data)
            table.add_column("", style="dim")
            for title, _ in shown:
                is_count = title in ("Params", "FLOPs")
                style = {"justify": "right", "style": "cyan"} if is_count else {"no_wrap": title == "Name"}
                table.add_column(title.lower(), **style)
            for number, *row in zip(numbers[1], *(cells for _, cells in shown), strict=True):
                table.add_row(number, *(Text(cell) for cell in row))
            console.print(table)
        totals = (total_parameters, trainable_parameters, model_size, total_training_modes, total_flops)
        for line in total_lines(*totals):
            console.print(Text(line))
