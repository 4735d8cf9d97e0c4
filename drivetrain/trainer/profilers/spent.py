"""Where the time of a `fit` went: the parts of its `Timing`, and each callback by its name."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace

from drivetrain.callbacks.support.verdict import TimeSpent
from drivetrain.runtime.cores import cores_of_process
from drivetrain.runtime.timing import Timing
from drivetrain.trainer.profilers.simple import SimpleProfiler

_OWNED = re.compile(r"\[(\w+)\](.+)\.(\w+)$")


def time_spent(
    timing: Timing, profiler: SimpleProfiler, samples: int | None, workers: int | None, processes_here: int = 1
) -> TimeSpent:
    """The parts of a `fit`, with the callbacks and the methods of the task by name.

    Args:
        timing: What measured the parts.
        profiler: What measured the actions, each without those in it.
        samples: Samples that were trained on; None if unknown.
        workers: The worker processes of the training loader; None where it has none to set.
        processes_here: Processes of the run on this machine.
    """
    named: dict[str, float] = defaultdict(float)
    making = profiler.own_seconds.get("setup_train_dataloader", 0.0)  # before the first epoch
    named["making the training loader"] = making
    for action, seconds in profiler.own_seconds.items():
        owned = _OWNED.match(action)
        kind, owner, name = owned.groups() if owned else ("", "", action)
        if kind == "Callback":
            named[owner] += seconds
        elif kind not in ("", "Strategy"):
            named[f"{owner}.{name}"] += seconds
    spent = TimeSpent.of(timing, samples, workers, cores_of_process(processes_here), dict(named))
    return replace(spent, total=max(spent.total + making, sum(named.values())))
