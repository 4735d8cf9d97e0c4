"""Which strategy goes with which precision, found by training each pair beside one plain process.

    python -m tests.conformance.pairs                # writes the table of docs/strategies.md
    python -m tests.conformance.pairs --row deepspeed

A row that needs an environment of its own is written by a run in that environment; the others stay as they are.
tests/strategies/test_precision_table.py holds the page to what this finds.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from drivetrain import FSDP, ConfigurationError, DeepSpeed, Parallel
from tests.conformance import language_model, test_megatron
from tests.conformance.harness import Outcome
from tests.conformance.language_model import Run
from tests.conformance.test_parallel import layers_split
from tests.pool import ROOT, run_in_processes
from tests.strategies.xla.running import environment

PAGE = ROOT / "docs" / "strategies.md"
BEGIN, END = "<!-- the pairs: written by `python -m tests.conformance.pairs` -->", "<!-- end of the pairs -->"
TOLERANCES = {"32": 5e-6, "64": 1e-10, "bf16": 3e-3, "bf16-true": 3e-2, "fp16": 3e-3, "fp16-true": 3e-2, "fp8": 5e-3}
WORKS, REFUSED = "yes", "refused"
HARDWARE = ("GPU",)

# What leaves casting to autocast, as in one process.
AUTOCAST = {"bf16": {"gather_dtype": torch.float32}, "fp16": {"gather_dtype": torch.float32}}
STRATEGIES: dict[str, Callable[[str], Any]] = {
    "single": lambda precision: "single",
    "ddp": lambda precision: "ddp",
    "fsdp": lambda precision: FSDP(**AUTOCAST.get(precision, {})),
    "tp": lambda precision: Parallel(tp=2, tp_plan=layers_split()),
    "cp": lambda precision: Parallel(cp=2, **AUTOCAST.get(precision, {})),
    "pp": lambda precision: Parallel(pp=2),
    "deepspeed": lambda precision: DeepSpeed(stage=2),
}


@dataclass(frozen=True)
class Row:
    """How the pairs of one strategy are tried.

    Attributes:
        train: Trains in a precision, in one of the strategy's processes, given what `plain` returned.
        plain: The same in one plain process.
        check: Raises where an outcome, what `plain` returned, the precision and the rank do not agree.
        processes: How many it takes.
        needs: The lane whose environment it needs, `"sharded"` for the usual one.
        env: Variables of the processes.
    """

    train: Callable[[str, Any], Any]
    plain: Callable[[str], Any]
    check: Callable[[Any, Any, str, int], None]
    processes: int = 2
    needs: str = "sharded"
    env: Mapping[str, str | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """What became of a pair: what the table shows, and the message where it was refused."""

    cell: str
    message: str = ""


def plain_steps(parameters: Any) -> torch.optim.Optimizer:
    """Not AdamW, whose squares of gradients are nothing in float16: its steps then hang on the last bit."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def run_of(precision: str) -> Run:
    language_model.make_optimizer = plain_steps
    return Run(precision, 2, layers=2)


def train(strategy: Callable[[str], Any], precision: str, expected: Outcome) -> Outcome:
    return language_model.train_with_trainer(strategy(precision), run_of(precision))


def train_plain(precision: str) -> Outcome:
    return language_model.train_plain(run_of(precision))


def check(outcome: Outcome, expected: Outcome, precision: str, rank: int) -> None:
    language_model.check(outcome, expected, TOLERANCES[precision], rank)


def train_on_xla(precision: str, expected: Outcome) -> Outcome:
    from drivetrain import XLA

    return language_model.train_with_trainer(XLA(), replace(run_of(precision), device="xla"))


def check_on_xla(outcome: Outcome, expected: Outcome, precision: str, rank: int) -> None:
    # XLA computes erf and exp by approximations of its own, which differ from torch's beyond the tenth digit.
    language_model.check(outcome, expected, max(TOLERANCES[precision], 1e-9), rank)


def train_with_megatron(precision: str, expected: Any) -> Any:
    from drivetrain import Megatron
    from tests.strategies.megatron import cpu_shim, models

    cpu_shim.install()
    _, initial = expected
    # A first scale that does not overflow, as for the others.
    outcome = models.fit(
        Megatron(tensor_parallel=2, optimizer={"initial_loss_scale": 1024.0}),
        test_megatron.make_task("plain"),
        test_megatron.make_data("plain"),
        initial,
        precision=precision,
    )
    outcome.trainer = None
    return outcome


def train_megatron_plain(precision: str) -> Any:
    from tests.strategies.megatron import cpu_shim

    cpu_shim.install()
    return test_megatron.train_plain("plain")


def check_megatron(outcome: Any, expected: Any, precision: str, rank: int) -> None:
    test_megatron.check(outcome, expected[0], TOLERANCES[precision], rank)


ROWS: dict[str, Row] = {
    **{
        name: Row(partial(train, strategy), train_plain, check, 1 if name == "single" else 2)
        for name, strategy in STRATEGIES.items()
    },
    "megatron": Row(train_with_megatron, train_megatron_plain, check_megatron, needs="megatron"),
    "xla": Row(train_on_xla, train_plain, check_on_xla, 1, "xla", environment()),
}


def try_each(row: str, expected: Mapping[str, Any]) -> dict[str, Any]:
    """In each process: what each precision came to, or the message that refuses it."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for name, plain in expected.items():
        try:
            found[name] = ROWS[row].train(name, plain)
        except ConfigurationError as refusal:
            # The table is on the page that the message names.
            found[name] = " ".join(refusal.message.split()).removesuffix(" See precision.md in the manual.")
    return found


def plain_each(row: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    return {name: ROWS[row].plain(name) for name in TOLERANCES}


@functools.cache
def plain_outcomes(row: str) -> dict[str, Any]:
    """What one plain process comes to in each precision: once for all rows that train the same."""
    same = next(name for name, other in ROWS.items() if other.plain is ROWS[row].plain)
    if same != row:
        return plain_outcomes(same)
    (outcomes,) = run_in_processes(plain_each, 1, args=(row,), timeout=200)
    return outcomes


def judge(row: str) -> dict[str, Verdict]:
    """Try a strategy in every precision.

    Raises:
        AssertionError: A pair runs and differs from one plain process.
    """
    chosen = ROWS[row]
    expected = plain_outcomes(row)
    verdicts: dict[str, Verdict] = {}
    outcomes = run_in_processes(try_each, chosen.processes, args=(row, expected), timeout=280, env=chosen.env)
    for rank, found in enumerate(outcomes):
        for name, outcome in found.items():
            if isinstance(outcome, str):
                needed = next((each for each in HARDWARE if each in outcome), REFUSED)
                verdicts[name] = Verdict(needed, outcome)
                continue
            try:
                chosen.check(outcome, expected[name], name, rank)
            except AssertionError as error:
                raise AssertionError(f"{row}, {name}: {error}") from error
            verdicts[name] = Verdict(WORKS)
    return verdicts


# The page


def read_table(page: Path = PAGE) -> dict[str, dict[str, Verdict]]:
    """What the page says of each pair, by strategy and precision."""
    block = page.read_text().split(BEGIN)[1].split(END)[0]
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in block.splitlines() if line[:1] == "|"]
    reasons = dict(line[2:].split(": ", 1) for line in block.splitlines() if line[:2] == "- ")
    return {
        row[0]: {
            name: Verdict(cell, reasons.get(f"`{row[0]}`, `{name}`", ""))
            for name, cell in zip(rows[0][1:], row[1:], strict=True)
        }
        for row in rows[2:]
    }


def write_table(verdicts: Mapping[str, Mapping[str, Verdict]], page: Path = PAGE) -> None:
    """Replace the page's table and the reasons under it."""
    names = list(TOLERANCES)
    lines = ["| | " + " | ".join(f"`{name}`" for name in names) + " |", "|---" * (len(names) + 1) + "|"]
    reasons = []
    for row, found in verdicts.items():
        lines.append(f"| `{row}` | " + " | ".join(found[name].cell for name in names) + " |")
        reasons += [f"- `{row}`, `{name}`: {found[name].message}" for name in names if found[name].message]
    before, rest = page.read_text().split(BEGIN)
    table = "\n".join(lines) + "\n\n" + "\n".join(reasons)
    page.write_text(f"{before}{BEGIN}\n\n{table}\n\n{END}{rest.split(END)[1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Try each strategy in each precision, and write the table.")
    parser.add_argument("--row", action="append", choices=list(ROWS), help="Only this one; can be given several times.")
    chosen = parser.parse_args().row or [name for name, row in ROWS.items() if row.needs == "sharded"]
    found = {}
    for name in chosen:
        print(f"trying {name} in {len(TOLERANCES)} precisions", file=sys.stderr)
        with contextlib.redirect_stdout(io.StringIO()):  # what the processes print
            found[name] = judge(name)
    known = read_table()
    write_table({name: found.get(name) or known[name] for name in ROWS if name in found or name in known})


if __name__ == "__main__":
    from tests.conformance import pairs  # under the name by which the processes find its functions

    pairs.main()
