"""A run in a few lines, and what starts it again."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drivetrain.runtime.environment import COMMAND_VARIABLE, RESUME_VARIABLE
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.terminal import HIDDEN, shown
from drivetrain.trackers.report.record import NAME, PAGE, RUNNING, read_record, seconds_of
from drivetrain.trackers.report.words import duration, moment, number, plain_text


@dataclass(frozen=True)
class Resumption:
    """What starts a run again.

    Attributes:
        words: The command.
        folder: Where it was started.
        checkpoint: The checkpoint that it resumes.
    """

    words: list[str]
    folder: str
    checkpoint: str

    def environment(self) -> dict[str, str]:
        """The environment variables of the command."""
        kept = {name: value for name, value in os.environ.items() if name != COMMAND_VARIABLE}
        return {**kept, RESUME_VARIABLE: self.checkpoint}


def resumption_of(place: Path) -> Resumption:
    """What starts a run again from its newest checkpoint.

    Args:
        place: The run's folder.

    Raises:
        ConfigurationError: The run runs, has no checkpoint, or its command is not known as a whole.
    """
    record = read_record(place)
    if not record:
        raise ConfigurationError(f"{place} has no {NAME}, so it is not known how the run was started.", code="DT-121")
    if record.get("state") == RUNNING:
        process = record.get("process", {})
        raise ConfigurationError(
            f"The run in {place} is running, as process {process.get('id')} on {process.get('host')}. Stop it first.",
            code="DT-121",
        )
    best = record.get("best", {})
    checkpoint = best.get("newest") or best.get("path")
    if not checkpoint:
        raise ConfigurationError(
            f"The run in {place} has no checkpoint to resume. Start it again: {record.get('command')}", code="DT-121"
        )
    if HIDDEN in str(checkpoint):
        raise ConfigurationError(
            f"The checkpoint of the run in {place} is at an address with credentials, which are not recorded: "
            f"{checkpoint}. Start it again with {RESUME_VARIABLE} set to the whole address: {record.get('command')}",
            code="DT-121",
        )
    if not record.get("argv"):
        raise ConfigurationError(
            f"The command of the run in {place} is not known as a whole: it holds a secret, or another launcher has "
            f"started the run. Start it again with {RESUME_VARIABLE}={checkpoint} in its environment: "
            f"{record.get('command')}",
            code="DT-121",
        )
    return Resumption(list(record["argv"]), str(record.get("cwd", ".")), str(checkpoint))


def summary_of(place: Path, record: Mapping[str, Any]) -> list[str]:
    """Lines that describe a run.

    Args:
        place: Its folder.
        record: Its record.
    """
    if not record:
        return [shown(str(place)), f"There is no {NAME}: the run was recorded by its trackers only."]
    rows: dict[str, str] = {"state": str(record.get("state", "-"))}
    if record.get("reason"):
        rows["state"] += f": {record['reason']}"
    rows["began"] = moment(record.get("started", 0))
    rows["took"] = duration(seconds_of(record))
    progress = record.get("progress", {})
    rows["progress"] = f"{number(progress.get('step'))} steps, {number(progress.get('epoch'))} epochs"
    rows["command"] = str(record.get("command", ""))
    rows["in"] = str(record.get("cwd", ""))
    for part in ("hyper_parameters", "trainer", "model", "data", "environment"):
        rows |= {name: plain_text(value) for name, value in record.get(part, {}).items()}
    rows |= {name: number(value) for name, value in record.get("metrics", {}).items()}
    best = record.get("best", {})
    if best.get("monitor"):
        rows[f"best {best['monitor']}"] = number(best.get("value"))
    for name, key in (("best checkpoint", "path"), ("newest checkpoint", "newest")):
        if best.get(key):
            rows[name] = str(best[key])
    if record.get("warnings"):
        rows["warnings"] = str(len(record["warnings"]))
    if (place / PAGE).is_file():
        rows["page"] = str(place / PAGE)
    if record.get("resume"):
        rows["to resume"] = str(record["resume"])
    width = max(map(len, rows))
    return [shown(line) for line in (str(place), *(f"  {name:<{width}}  {value}" for name, value in rows.items()))]
