"""The `tune` command: time a script's steps under several settings, and show which are faster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click

from drivetrain.runtime.errors import ConfigurationError

STEPS = 20
WARM_UP = 5
"""Number of steps before the timed ones."""
PAYS = 1.1
"""Minimum speed-up of a recommended change. Smaller differences are within the noise of a machine."""


@dataclass(frozen=True)
class Change:
    """Change that `drivetrain tune` tries on a script, such as more loader workers.

    Attributes:
        text: The change as Python code.
        note: Effect on the results.
        options: Arguments of the Trainer.
        loader: Attributes of the training data loaders.
        lays_out: Convert the task to the channels-last memory format.
    """

    text: str = "as it is"
    note: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    loader: dict[str, Any] = field(default_factory=dict)
    lays_out: bool = False


_PASSING_ON = {"ignore_unknown_options": True, "allow_interspersed_args": False, "help_option_names": ["-h", "--help"]}


@click.command(context_settings=_PASSING_ON, options_metavar="[FLAGS]")
@click.argument("given", nargs=-1, required=True, type=click.UNPROCESSED, metavar="SCRIPT [ARGS]...")
def tune(given: tuple[str, ...]) -> int:
    """Time SCRIPT's training steps with different settings, and print how much faster each setting makes them.

    Each trial runs the script in its own process, up to the first steps of `Trainer.fit`, without callbacks, trackers
    and checkpoints. FLAGS are those of `drivetrain launch`, for scripts that need a launcher.

    \b
    drivetrain tune train.py --lr 0.1
    drivetrain tune --num_processes 2 --cpu train.py
    """  # noqa: D301
    command = _timing_command(given)
    with tempfile.TemporaryDirectory(prefix="drivetrain_tune_", ignore_cleanup_errors=True) as folder:
        found = _measure(command, Change(), folder)
        if "problem" in found:
            click.echo(f"Nothing could be tried, because the unchanged script failed: {found['problem']}", err=True)
            return 1
        changes = [Change(**each) for each in found["changes"]]
        results = []
        with click.progressbar([*changes, Change()], label="Trying changes", file=sys.stderr) as bar:
            for change in bar:
                results.append(_measure(command, change, folder))
    again = results.pop()  # a second baseline: other load during the first one would make every change look faster
    base = min(found["seconds"], again.get("seconds", found["seconds"]))
    click.echo(_table(base, list(zip(changes, results, strict=True))))
    return 0


def _timing_command(given: tuple[str, ...]) -> tuple[list[str], list[str]]:
    # The path of the trial's JSON file belongs between the two returned parts.
    from drivetrain.cli.launch import launch
    from drivetrain.launch.options import LaunchOptions

    parsed: dict[str, Any] = launch.make_context("drivetrain tune", list(given)).params
    if parsed["module"] or parsed["no_python"]:
        raise ConfigurationError("drivetrain tune runs a Python file. Pass the path of the file, without -m.")
    LaunchOptions().check_script(parsed["script"])
    flags = given[: len(given) - len(parsed["args"]) - 1]
    launcher = ["-m", "drivetrain", "launch", *flags] if flags else []
    return [sys.executable, *launcher, "-m", "drivetrain.cli.tune_trial"], [parsed["script"], *parsed["args"]]


def _measure(command: tuple[list[str], list[str]], change: Change, folder: str) -> dict[str, Any]:
    from drivetrain.runtime.environment import RESUME_VARIABLE

    before, after = command
    trial, result = Path(folder) / "trial.json", Path(folder) / "result.json"
    trial.write_text(json.dumps({"change": asdict(change), "result": str(result)}))
    result.unlink(missing_ok=True)
    environment = {name: value for name, value in os.environ.items() if name != RESUME_VARIABLE}
    ended = subprocess.run([*before, str(trial), *after], env=environment, capture_output=True, text=True)
    if result.exists():
        found: dict[str, Any] = json.loads(result.read_text())
        return found
    if ended.returncode == 0:
        return {"problem": f"Trainer.fit ran fewer than {WARM_UP + STEPS} steps"}
    lines = [line for line in ended.stderr.splitlines() if line.strip()]
    return {"problem": lines[-1] if lines else f"exit code {ended.returncode}"}


def _table(base: float, tried: list[tuple[Change, dict[str, Any]]]) -> str:
    measured = [(base / result["seconds"], change, result) for change, result in tried if "seconds" in result]
    rows = [("change", "a step", "speed", ""), (Change().text, _time(base), "1.00x", "")]
    for gain, change, result in sorted(measured, key=lambda each: -each[0]):
        rows.append((change.text, _time(result["seconds"]), f"{gain:.2f}x", change.note))
    rows += [(change.text, "failed", "", result["problem"]) for change, result in tried if "problem" in result]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]).rstrip()
        for row in rows
    ]
    best = max(measured, key=lambda each: each[0], default=None)
    if best is None or best[0] < PAYS:
        return "\n".join([*lines, "No change makes steps faster." if tried else "There is nothing to try."])
    return "\n".join([*lines, f"{best[1].text} helps most: steps are {best[0]:.1f} times as fast."])


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
