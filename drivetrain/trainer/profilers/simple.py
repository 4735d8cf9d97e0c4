"""Profiler of the number of calls and the wall-clock time of each action."""

from __future__ import annotations

import math
import os
import re
import time
from array import array
from collections import defaultdict
from collections.abc import MutableSequence, Sequence
from dataclasses import replace

from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.host import cores_of_process
from drivetrain.runtime.timing import TimeSpent, Timing
from drivetrain.trainer.profilers.base import Profiler

_COLUMNS = ("Mean duration (s)", "Num calls", "Total time (s)", "Percentage %")


class SimpleProfiler(Profiler):
    """Profiler that reports the number of calls and the mean and total duration of each action.

    A nested action counts in its own total and in that of the outer one. `own_seconds` excludes nested actions. `fit`
    also prints a sentence at its end about the parts that took most of the time, such as waiting for data.

    Args:
        dirpath: Directory of the report. None uses `trainer.log_dir`.
        filename: Name of the report's file. None prints the report.
        extended: If True, also report the number of calls and the share of the run.

    Attributes:
        recorded_durations: Seconds of each call, by action.
        current_actions: Start time of each running action.
        own_seconds: Seconds of each action without those of nested actions.
        start_time: Start of the measurement, by `time.perf_counter`.

    Example:
        ```python
        from drivetrain import SimpleProfiler, Trainer

        trainer = Trainer(profiler=SimpleProfiler(filename="times"), logger="csv")
        ```
    """

    gives_verdict = True

    def __init__(
        self, dirpath: str | os.PathLike[str] | None = None, filename: str | None = None, extended: bool = True
    ) -> None:
        super().__init__(dirpath, filename)
        self.extended = extended
        self.current_actions: dict[str, float] = {}
        # An array takes 8 bytes per call, a list of floats 32.
        self.recorded_durations: defaultdict[str, MutableSequence[float]] = defaultdict(lambda: array("d"))
        self.own_seconds: dict[str, float] = defaultdict(float)
        self._within: list[float] = []  # per running action, the seconds of its nested actions
        self.start_time = time.perf_counter()

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        super().setup(stage, local_rank, log_dir)
        self.current_actions.clear()
        self.recorded_durations.clear()
        self.own_seconds.clear()
        self._within.clear()
        self.start_time = time.perf_counter()

    def start(self, action_name: str) -> None:
        if action_name in self.current_actions:
            raise ConfigurationError(
                f"Attempted to start {action_name}, which has not stopped yet. Use different names for an action and "
                "the actions within it.",
            )
        self._within.append(0.0)
        self.current_actions[action_name] = time.perf_counter()

    def stop(self, action_name: str) -> None:
        # First, so that the bookkeeping below is not measured.
        now = time.perf_counter()
        if action_name not in self.current_actions:
            raise ConfigurationError(
                f"Attempting to stop recording an action ({action_name}) which was never started. Call start first, "
                "or use `with profiler.profile(...)`.",
            )
        seconds = now - self.current_actions.pop(action_name)
        # The time of nested actions belongs to them.
        self.own_seconds[action_name] += seconds - self._within.pop()
        if self._within:
            self._within[-1] += seconds
        self.recorded_durations[action_name].append(seconds)

    def summary(self) -> str:
        stage = "" if self._stage is None else f"{self._stage.upper()} "
        elapsed = time.perf_counter() - self.start_time
        rows = []
        for name, durations in self.recorded_durations.items():
            total = math.fsum(durations)
            share = 100.0 * total / elapsed if elapsed > 0 else 0.0
            rows.append((total, [name, total / len(durations), len(durations), total, share]))
        rows.sort(key=lambda row: row[0], reverse=True)
        calls = sum(len(durations) for durations in self.recorded_durations.values())
        chosen = (0, 1, 2, 3, 4) if self.extended else (0, 1, 3)
        width = max((len(name) for name in self.recorded_durations), default=0)

        def line(cells: Sequence[object]) -> str:
            texts = [f"{cell:.5}" if isinstance(cell, float) else str(cell) for cell in (cells[i] for i in chosen)]
            padded = [texts[0].ljust(width), *(text.ljust(15) for text in texts[1:])]
            return "|" + "".join(f"  {text}\t|" for text in padded)

        header = line(("Action", *_COLUMNS))
        rule = "-" * (len(header.expandtabs()) + 1)
        lines = [f"{stage}Profiler Report", "", rule, header, rule]
        if self.extended:
            lines += [line(("Total", "-", calls, elapsed, "100 %")), rule]
        lines += [line(cells) for _, cells in rows]
        return os.linesep.join([*lines, rule, ""])


# Parts of the time of a `fit`


_OWNED = re.compile(r"\[(\w+)\](.+)\.(\w+)$")


def time_spent(
    timing: Timing, profiler: SimpleProfiler, samples: int | None, workers: int | None, processes_here: int = 1
) -> TimeSpent:
    named: dict[str, float] = defaultdict(float)
    # Loaders are created before the first epoch, so `timing` does not include this.
    making = profiler.own_seconds.get("setup_train_dataloader", 0.0)
    named["making the training loader"] = making
    for action, seconds in profiler.own_seconds.items():
        owned = _OWNED.match(action)
        kind, owner, name = owned.groups() if owned else ("", "", action)
        if kind == "Callback":
            named[owner] += seconds
        elif kind not in ("", "Strategy"):
            named[f"{owner}.{name}"] += seconds
    spent = TimeSpent.of(timing, samples, workers, cores_of_process(processes_here), dict(named))
    # Some named actions, such as `setup` hooks, run outside of the time that `timing` measures.
    return replace(spent, total=max(spent.total + making, sum(named.values())))
