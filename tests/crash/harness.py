"""Runs the training of `training.py` with and without crashes, and tells how the two differ."""

from __future__ import annotations

import json
import re
import signal
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drivetrain.runtime.exit_codes import RESUME_EXIT_CODE
from tests.crash.shots import LAST_CHANCE, MOST_BATCHES
from tests.launch.launching import Ended, end, launch, run, started

SCRIPT = Path(__file__).with_name("training.py")
ROOT = Path(__file__).parents[2]
PROCESSES = 2
_BATCHES_AN_EPOCH = 7  # of each process: 50 samples, 4 a batch, 2 processes


@dataclass(frozen=True)
class Run:
    """A training that has ended, and what it left."""

    home: Path
    ended: Ended

    @property
    def shots(self) -> list[dict[str, Any]]:
        """Where it was hit."""
        path = self.home / "shots"
        return list(_json_lines(path)) if path.is_file() else []

    @property
    def table(self) -> Path:
        """Its table of values: the newest, for an attempt that dies before it has saved leaves one behind."""
        versions = (self.home / "logs" / "drivetrain_logs").glob("version_*/metrics.csv")
        return max(versions, key=lambda path: int(path.parent.name.removeprefix("version_")))

    @property
    def restarts(self) -> int:
        """How often the launcher has started all processes again."""
        return len(re.findall(r"Starting all processes again \(restart", self.ended.err))


def epochs_for(kills: int) -> int:
    """How many epochs a run needs so that it is not over before the last kill."""
    # A shot at a batch is drawn up to MOST_BATCHES - 2 and holds MOST_BATCHES longer where it waits for a file.
    return kills * (2 * MOST_BATCHES) // _BATCHES_AN_EPOCH + 2


def train(home: Path, epochs: int, *flags: str, kills: int = 0, timeout: float = 600) -> Run:
    """Train in a directory of its own, through `drivetrain launch`."""
    home.mkdir(parents=True)
    arguments = [str(home), "--epochs", str(epochs), "--kills", str(kills), *flags]
    ended = launch(
        "--cpu",
        "--num_processes",
        str(PROCESSES),
        "--max_restarts",
        str(kills),
        "-m",
        "tests.crash.training",
        *arguments,
        cwd=ROOT,
        timeout=timeout,
    )
    return Run(home, ended)


def train_with_preemptions(home: Path, epochs: int, signals: Iterable[signal.Signals], timeout: float = 120) -> Run:
    """Train, send the launcher one signal after the other, each some batches later, and start it again each time."""
    home.mkdir(parents=True)
    command = ["-m", "drivetrain", "launch", "--cpu", "--num_processes", str(PROCESSES), "-m", "tests.crash.training"]
    trace = home / "trace0"
    for number in signals:
        seen = trace.stat().st_size if trace.exists() else 0
        begin = time.monotonic()
        with started(*command, str(home), "--epochs", str(epochs), cwd=ROOT) as process:
            while not trace.exists() or trace.stat().st_size == seen:
                assert process.poll() is None, process.communicate()
                assert time.monotonic() < begin + timeout, "the training did not begin"
                time.sleep(0.01)
            process.send_signal(number)
            ended = end(process, begin, timeout)
        if ended.code != RESUME_EXIT_CODE:
            return Run(home, ended)
    return Run(home, run(*command, str(home), "--epochs", str(epochs), cwd=ROOT, timeout=timeout))


def differences(crashed: Run, whole: Run) -> list[str]:
    """What tells a crashed run from one that was left alone; empty where nothing does."""
    if crashed.ended.code != 0:
        return [f"the run ended with exit code {crashed.ended.code}: {crashed.ended.err[-3000:]}"]
    found = []
    for rank in range(PROCESSES):
        found += _compare_traces(f"rank {rank}", crashed.home / f"trace{rank}", whole.home / f"trace{rank}")
        found += _compare_ends(rank, crashed.home, whole.home)
    ours, theirs = (run.table.read_text().splitlines() for run in (crashed, whole))
    if len(ours) != len(theirs):
        found.append(f"metrics.csv has {len(ours)} lines, not {len(theirs)}")
    rows = [f"line {n + 1}: {a!r}, not {b!r}" for n, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b]
    found += [f"metrics.csv, {row}" for row in rows[:3]]
    return found


def _compare_traces(who: str, crashed: Path, whole: Path) -> list[str]:
    """Every batch of the whole run was seen in the crashed one, each time with the same samples and results."""
    expected = {tuple(line["batch"]): line for line in _json_lines(whole)}
    found, seen = [], set()
    for line in _json_lines(crashed):
        batch = tuple(line["batch"])
        seen.add(batch)
        if line != expected.get(batch):
            found.append(f"{who}, batch {batch}: {line}, not {expected.get(batch)}")
    found = found[:3]
    if lost := sorted(expected.keys() - seen):
        found.append(f"{who} never saw the batches {lost[:5]} ({len(lost)} in all)")
    return found


def _compare_ends(rank: int, crashed: Path, whole: Path) -> list[str]:
    ours, theirs = (json.loads((home / f"end{rank}.json").read_text()) for home in (crashed, whole))
    return [f"rank {rank}, {key}: {ours[key]}, not {theirs[key]}" for key in theirs if ours[key] != theirs[key]]


def _json_lines(path: Path) -> Iterable[dict[str, Any]]:
    for line in path.read_text().splitlines():
        yield json.loads(line)


def place_of(shot: dict[str, Any]) -> str:
    """Where a shot hit, for people."""
    if shot["where"] == LAST_CHANCE:
        return "after a batch"  # what it had waited for did not come in time
    return {"moment": "after a batch", "save": "in a save", "resume": "in resuming", "start": "in starting"}[
        shot["kind"]
    ]


def report(run: Run, begin: float) -> None:
    """One line on a run, for people."""
    kinds: dict[str, int] = {}
    for kind in map(place_of, run.shots):
        kinds[kind] = kinds.get(kind, 0) + 1
    print(f"{run.home.name}: {run.restarts} restarts in {time.monotonic() - begin:.0f} s, {kinds}", file=sys.stderr)
