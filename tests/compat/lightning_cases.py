"""What runs under Lightning and under ours; `python -m tests.compat.lightning_cases` writes it into the page."""

from __future__ import annotations

import ast

from tests.compat.pages import written
from tests.pool import ROOT

PAGE = ROOT / "docs" / "compatibility-lightning.md"
PROGRAM = ROOT / "tests" / "compat" / "programs" / "lightning_tasks.py"
HOOKS = ROOT / "tests" / "compat" / "programs" / "lightning_hooks.py"
TOLERANCE = 1e-6
HOOKS_TEXT = (
    "The test also records every hook of a task, two callbacks and a data module. The runs have accumulation, two\n"
    "optimizers, two validation loaders, all four loops, a resume and an exception. The order is the same, with these\n"
    "exceptions:"
)

_WINDOW = "Under accumulation, `optimizer_step` starts before the first batch of its window."
_ONCE = "`configure_model` is called once per task, not again by `validate`, `test` and `predict`."
_MODES = "`predict` restores the mode of each module, as `fit`, `validate` and `test` do."
_RESUMED = "A resumed run does not repeat the sanity check."
_TORN_DOWN = "After an exception, the task's `on_exception` and every `teardown` are called."

UNLIKE: dict[str, dict[str, str]] = {
    "accumulated": {
        "[-+] task optimizer_step": _WINDOW,
    },
    "verbs": {"- task configure_model": _ONCE, "+ task on_predict_model_train": _MODES},
    "resumed": {
        "- * on_sanity_check_*": _RESUMED,
        "- * on_validation_*": _RESUMED,
        "- data *": _RESUMED,
        "+ data val_dataloader": _RESUMED,
        "- task validation_step *": _RESUMED,
        "- task forward": _RESUMED,
    },
    "broken": {"+ task on_exception": _TORN_DOWN, "+ * teardown *": _TORN_DOWN},
}
"""By run: events that one side alone has there, as patterns after "- " (Lightning's) or "+ " (ours), and why."""


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


def differences() -> str:
    """Why hooks are not called exactly as there, as a list."""
    reasons = dict.fromkeys(reason for patterns in UNLIKE.values() for reason in patterns.values())
    return "\n".join(f"- {reason}" for reason in reasons)


def content() -> str:
    """What the page says of tasks and hooks."""
    return f"{table()}\n\n{HOOKS_TEXT}\n\n{differences()}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(), content()))
