"""What the lane runs under ours; `python -m tests.compat.cases` writes it into docs/compatibility-accelerate.md."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from tests.pool import ROOT

PAGE = ROOT / "docs" / "compatibility-accelerate.md"
START, END = "<!-- table -->", "<!-- end of table -->"


@dataclass(frozen=True)
class Program:
    """A program over a package, run with the original Accelerate and with ours.

    Attributes:
        name: The program's file in tests/compat/programs.
        what: What of which package it runs.
        processes: How many.
        options: What the program is asked for.
        reference: What the original is asked for, where it is something else.
        tolerance: How far the losses may be apart, relative to those above 1; 0 is equal to the last bit.
        reason: Why the original is asked for something else, or losses differ at all.
    """

    name: str
    what: str
    processes: int
    options: tuple[str, ...] = ()
    reference: tuple[str, ...] | None = None
    tolerance: float = 0.0
    reason: str = ""

    def __str__(self) -> str:
        return "-".join([self.name.removesuffix(".py"), *self.options, str(self.processes)])


@dataclass(frozen=True)
class Script:
    """One of Accelerate's own test scripts.

    Attributes:
        name: Its path below accelerate/test_utils/scripts.
        processes: How many.
        unlike: Checks that do not hold here, each with the reason.
    """

    name: str
    processes: int
    unlike: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{Path(self.name).stem}-{self.processes}"


_TRAINER = "`transformers.Trainer`: train, evaluate, predict, save, resume"

PROGRAMS = (
    Program("transformers_trainer.py", _TRAINER, 1),
    Program("transformers_trainer.py", _TRAINER, 2),
    Program("trl_sft.py", "`trl.SFTTrainer`: train, evaluate, save", 1),
    Program("peft_loop.py", "peft: the loop of its examples", 1),
)

_INSTANCE = "State belongs to the instance: an Accelerator still works after the shared state was reset."
_SHORT = "The gradient of a last, short window is the mean over the micro-batches that it has, not over `num_steps`."
_SAMPLER = "A loader's own samplers are kept and only their output is sharded, so none is wrapped or replaced."

SCRIPTS = (
    Script("test_script.py", 1, {"test_reinstantiated_state": _INSTANCE}),
    Script(
        "test_script.py",
        2,
        {"test_reinstantiated_state": _INSTANCE, "check_seedable_sampler_in_batch_sampler_shard": _SAMPLER},
    ),
    Script("test_sync.py", 1),
    Script("test_sync.py", 2, {"test_gradient_accumulation_with_opt_and_scheduler": _SHORT}),
    Script("test_ops.py", 1),
    Script("test_ops.py", 2),
    Script("external_deps/test_metrics.py", 1),
    Script("external_deps/test_metrics.py", 2),
)


def table() -> str:
    """The two tables of the page."""
    lines = [
        "| program | processes | options | losses | lines changed |",
        "|---|---:|---|---|---:|",
    ]
    for program in PROGRAMS:
        losses = "equal" if not program.tolerance else f"equal to {program.tolerance:g}"
        options = ", ".join(program.options) or "fp32"
        lines.append(f"| {program.what} | {program.processes} | {options} | {losses} | 0 |")
    notes = {program.reason for program in PROGRAMS if program.reason}
    lines += ["", *sorted(notes), ""] if notes else [""]
    lines += ["| script of Accelerate's | processes | checks that hold | lines changed |", "|---|---:|---|---:|"]
    for script in SCRIPTS:
        held = "all" if not script.unlike else "all but " + ", ".join(f"`{name}`" for name in script.unlike)
        lines.append(f"| `{Path(script.name).name}` | {script.processes} | {held} | 0 |")
    reasons = {name: reason for script in SCRIPTS for name, reason in script.unlike.items()}
    lines += ["", "Checks that do not hold, because drivetrain does something else on purpose:", ""]
    lines += [f"- `{name}`: {reason}" for name, reason in reasons.items()]
    return "\n".join(lines)


def written(page: str) -> str:
    """The page with the tables as they are now."""
    before, _, rest = page.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}\n\n{table()}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
