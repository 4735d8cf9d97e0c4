"""Where the time of a `fit` went, out of what a `SimpleProfiler` measured."""

from __future__ import annotations

import re
import time
from collections import defaultdict

from drivetrain.callbacks.support.verdict import TimeSpent
from drivetrain.runtime.cores import cores_of_process
from drivetrain.trainer.profilers.base import EPOCH, SAVE, TRAIN_DATA, VALIDATION
from drivetrain.trainer.profilers.simple import SimpleProfiler

_OWNED = re.compile(r"\[(\w+)\](.+)\.(\w+)$")
_VALIDATING = (VALIDATION, "val_dataloader_next", "validation_step")


def time_spent(
    profiler: SimpleProfiler, samples: int | None, workers: int | None, processes_here: int = 1
) -> TimeSpent:
    """Sum up the actions of a `fit`, each without those in it, so that no second counts twice.

    Args:
        profiler: What measured them.
        samples: Samples that were trained on; None if unknown.
        workers: The worker processes of the training loader; None where it has none to set.
        processes_here: Processes of the run on this machine.
    """
    waiting = model = validating = saving = 0.0
    callbacks: dict[str, float] = defaultdict(float)
    for action, seconds in profiler.own_seconds.items():
        owned = _OWNED.match(action)
        kind, owner, name = owned.groups() if owned else ("", "", action)
        if name == TRAIN_DATA:
            waiting += seconds
        elif name in _VALIDATING:
            validating += seconds
        elif name == SAVE:
            saving += seconds
        elif kind == "Callback":
            callbacks[owner] += seconds
        elif kind not in ("", "Strategy"):
            callbacks[f"{owner}.{name}"] += seconds
        elif name == "setup_train_dataloader":
            callbacks["making the training loader"] += seconds
        elif name != EPOCH:
            model += seconds
    total = time.perf_counter() - profiler.start_time
    cores = cores_of_process(processes_here)
    return TimeSpent(total, waiting, model, validating, saving, dict(callbacks), samples, workers, cores)
