"""What runs under Lightning and under ours; `python -m tests.compat.lightning_cases` writes it into the page."""

from __future__ import annotations

import ast

from tests.compat.cases import END, START
from tests.pool import ROOT

PAGE = ROOT / "docs" / "compatibility-lightning.md"
PROGRAM = ROOT / "tests" / "compat" / "programs" / "lightning_tasks.py"
HOOKS = ROOT / "tests" / "compat" / "programs" / "lightning_hooks.py"
TOLERANCE = 1e-6

UNLIKE: dict[str, str] = {}
"""Events that one side has and the other one has not, as patterns after "- " (Lightning's) or "+ " (ours), and why."""


def recorded_runs() -> list[str]:
    """The runs whose hooks are recorded, without importing the program."""
    assigned = [each for each in ast.parse(HOOKS.read_text()).body if isinstance(each, ast.Assign)]
    [runs] = [each.value for each in assigned if ast.unparse(each.targets[0]) == "RUNS"]
    assert isinstance(runs, ast.Tuple)
    return [ast.unparse(each) for each in runs.elts]


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
