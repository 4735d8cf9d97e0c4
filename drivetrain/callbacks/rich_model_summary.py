"""Print what a task is made of, with rich."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from drivetrain.callbacks.model_summary import ModelSummary, module_rows, total_lines
from drivetrain.callbacks.support.rich_package import require_rich

if TYPE_CHECKING:
    from drivetrain.strategies import Strategy


class RichModelSummary(ModelSummary):
    """Prints `ModelSummary`'s table with rich, in colours where the terminal has them.

    Args:
        max_depth: How deep to look: 1 for the task's own modules; -1 for all, 0 for the totals only.
        **summarize_kwargs: Arguments of `rich.table.Table`, such as `header_style`.

    Raises:
        ConfigurationError: If rich is not installed, or `max_depth` is below -1.

    Example:
        ```python
        from drivetrain import RichModelSummary, Trainer

        trainer = Trainer(callbacks=[RichModelSummary(max_depth=2)], logger=False)
        ```
    """

    def __init__(self, max_depth: int = 1, **summarize_kwargs: Any) -> None:
        require_rich("RichModelSummary")
        super().__init__(max_depth)
        self._table_options = {"header_style": "bold magenta", **summarize_kwargs}

    def show(self, task: nn.Module, strategy: Strategy) -> None:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        console = Console()
        rows = module_rows(task, self.max_depth, strategy)
        if rows:
            table = Table(**self._table_options)
            table.add_column("", style="dim")
            table.add_column("name", no_wrap=True)
            table.add_column("type")
            table.add_column("params", justify="right", style="cyan")
            for number, row in enumerate(rows):
                table.add_row(str(number), *(Text(cell) for cell in row))
            console.print(table)
        for line in total_lines(task, strategy):
            console.print(Text(line))
