"""`Timing`: how a training thread spends its time, measured with marks in some or all steps."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

PARTS = (
    "data",
    "forward",
    "backward",
    "optimizer",
    "sync",
    "logging",
    "callbacks",
    "checkpoint",
    "evaluation",
    "idle",
)
DATA, FORWARD, BACKWARD, OPTIMIZER, SYNC, LOGGING, CALLBACKS, CHECKPOINT, EVALUATION, IDLE = range(len(PARTS))
# Times of spans are kept apart from those of marks: spans are always measured, so they do not extrapolate.
_SPANS = len(PARTS)
_UNMARKED = 2 * len(PARTS)

_COST = 1e-3
"""Largest fraction of the time that marks may take."""
_STRETCHES = 4
"""Number of latest stretches of steps of which the fastest counts, so that a pause in one has no effect."""
_PER_STEP = 24
"""Number of marks in a step, including its begin and end."""
_FIRST = 10
"""Number of batches at the beginning that are all marked, to measure how long a batch takes."""
_MOST = 1000
"""Largest number of batches of which one is marked, however short steps are."""
_RECHECKED = 16
"""Number of marked batches after which the length of a batch is measured again."""


class Timing:
    """Timer that measures how long a run spends in each part, such as data loading or the backward pass.

    All time of `fit` from the beginning of the first epoch counts for one of the `PARTS`. Validation, checkpoints, ends
    of epochs and tracker writes are always measured. Within steps, marks separate the parts. If marks take less than
    0.1 % of a step (from about 4 ms on), every step is marked. Otherwise random steps are marked, and their shares are
    applied to the steps between them.

    The properties may be read at any time and from any thread.

    Attributes:
        on: True if marks count now. Code checks it before it marks, so that unmarked steps cost only the check.
        sees_sync: True if the backward exchanges gradients, so that its end waits for other processes.
    """

    def __init__(self) -> None:
        self.on = self.sees_sync = False
        self._runs = False
        self._random = Random(0)  # the global generator must not change
        self._reset()

    def _reset(self) -> None:
        self._times = [0.0] * (_UNMARKED + 1)  # marks, spans, and unmarked steps
        self._drawn = [0.0] * _SPANS  # randomly marked steps, whose shares apply to the unmarked ones
        self._at, self._since = IDLE, perf_counter()
        self._marks, self._is_first = True, True
        self._before_marks = self._times[:_SPANS]
        self._steps_before, self._batches_before = 0.0, 0
        self._per_batch: deque[float] = deque(maxlen=_STRETCHES)  # seconds per batch in the latest stretches
        self._marked_every = 0.0  # seconds of training per marked step
        self._left = 0  # batches of a stretch after its marked step

    # results

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds spent in each part of the run, as a dict from part name such as `"backward"` to seconds."""
        times, drawn = self._read()
        marked = drawn if sum(drawn) > 0 else times[:_SPANS]
        whole = sum(marked)
        # Steps without marks are split in the proportions of the randomly marked ones.
        rest = times[_UNMARKED]
        found = {}
        for number, name in enumerate(PARTS):
            share = marked[number] / whole if whole > 0 else float(number == IDLE)
            found[name] = times[number] + times[_SPANS + number] + rest * share
        return found

    @property
    def total_seconds(self) -> float:
        """Total of the measured seconds over all parts of the run, such as data loading and backward."""
        return sum(self._read()[0])

    @property
    def shares(self) -> dict[str, float]:
        """Fraction of the total time spent in each part of the run, such as `{"forward": 0.3, ...}`."""
        seconds = self.seconds
        total = sum(seconds.values())
        return {name: value / total if total > 0 else 0.0 for name, value in seconds.items()}

    @property
    def inferred(self) -> float:
        """Fraction of the run's time whose division into parts was estimated from other steps, not measured."""
        times, _ = self._read()
        total = sum(times)
        return times[_UNMARKED] / total if total > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the measured times as a dict with the total, and the seconds and the share of each part."""
        return {
            "total_seconds": self.total_seconds,
            "inferred": self.inferred,
            "seconds": self.seconds,
            "shares": self.shares,
        }

    def __str__(self) -> str:
        seconds, shares = self.seconds, self.shares
        total = sum(seconds.values())
        if total <= 0:
            return "No training has been measured yet."
        rows = [f"{name:<12}{shares[name]:>8.1%}{value:>12.3f} s" for name, value in seconds.items()]
        lines = [*rows, f"{'all':<12}{1:>8.1%}{total:>12.3f} s"]
        if self.inferred >= 0.005:
            lines.append(f"{self.inferred:.0%} is of steps without marks, split as in those with marks.")
        return "\n".join(lines)

    # measurement

    @contextmanager
    def run(self, sees_sync: bool) -> Iterator[None]:
        """Measure how long each part of a training run takes, within a `with` block.

        Earlier measurements are discarded.

        Args:
            sees_sync: True if the backward exchanges gradients, so that its end waits for other processes.
        """
        self._reset()
        self.sees_sync = sees_sync
        # One marked step per so many seconds keeps the cost of marks below the limit.
        self._marked_every = _PER_STEP * self._seconds_of_a_mark() / _COST
        self._runs = True
        try:
            yield
        finally:
            self.enter(IDLE)
            self.on = self._runs = False

    def enter(self, part: int) -> int:
        """Switch the clock to another part of the training run, and return the previous part.

        Args:
            part: One of the part numbers, such as `FORWARD`.
        """
        now = perf_counter()
        before = self._at
        self._times[before] += now - self._since
        self._since = now
        self._at = part
        return before

    def call(self, part: int, function: Callable[..., T], *args: Any) -> T:
        # Callers check `on` first, and call the function directly in an unmarked step.
        outer = self.enter(part)
        result = function(*args)
        self.enter(outer)
        return result

    @contextmanager
    def span(self, part: int) -> Iterator[None]:
        """Context manager that attributes the time of its body to a part of the run, such as a checkpoint.

        Args:
            part: One of the part numbers, such as `CHECKPOINT`.
        """
        if not self._runs:
            yield
            return
        # The span counts as a whole, so code inside of it must not mark.
        before, on = self.enter(_SPANS + part), self.on
        self.on = False
        try:
            yield
        finally:
            self.enter(before)
            self.on = on

    # selection of marked steps

    def begin_steps(self) -> None:
        self.on = self._marks
        self.enter(IDLE if self._marks else _UNMARKED)

    def end_steps(self) -> None:
        self.on = False
        self.enter(IDLE)

    def turn(self, batches: int) -> int:
        # Returns the number of batches at which to call this again.
        self.enter(IDLE)
        if not self._marks:
            # The pause before the chosen batch is over.
            self._mark(True)
            return batches + 1
        if not self._is_first:
            for number, before in enumerate(self._before_marks):
                # The steps that have just ended were chosen at random, so they represent the unmarked ones.
                self._drawn[number] += self._times[number] - before
        self._is_first = False
        stretch = self._stretch_length(batches)
        if stretch == 1:
            self._mark(True)
            return batches + _RECHECKED
        # Mark a random batch of each stretch: at a fixed distance, periodic work would be marked always or never.
        ahead = self._random.randrange(stretch)
        # First the `_left` batches that remain of the previous stretch, then `ahead` batches of the new one.
        pause, self._left = self._left + ahead, stretch - 1 - ahead
        self._mark(pause == 0)
        return batches + max(pause, 1)

    def first_turn(self, batches: int) -> int:
        # `batches` counts those before the run was resumed too. Returns the number at which to call `turn` first.
        self._batches_before = batches
        return batches + _FIRST

    def _seconds_of_a_mark(self) -> float:
        tries = []
        for _ in range(8):
            begun = perf_counter()
            for _ in range(8):
                self.enter(IDLE)
            tries.append((perf_counter() - begun) / 8)
        # The tries have counted as idle time.
        self._times[IDLE] = 0.0
        # The fastest try is the one that was least disturbed.
        return min(tries)

    def _mark(self, marks: bool) -> None:
        self._marks = self.on = marks
        self._before_marks = self._times[:_SPANS]
        self._at = IDLE if marks else _UNMARKED

    def _stretch_length(self, batches: int) -> int:
        steps = sum(self._times[:_SPANS]) + self._times[_UNMARKED]
        self._per_batch.append((steps - self._steps_before) / max(1, batches - self._batches_before))
        self._steps_before, self._batches_before = steps, batches
        # Timing one of so many batches costs at most 0.1 % of the training time.
        return min(_MOST, max(1, math.ceil(self._marked_every / max(min(self._per_batch), 1e-9))))

    def mark_end_of_gradients(self, loss: Tensor) -> None:
        # After the gradients are computed, the rest of the backward counts as waiting for other processes.
        if loss.requires_grad:
            loss.register_hook(self._await_end)  # type: ignore[no-untyped-call]

    def _await_end(self, _: Tensor) -> None:
        # Callbacks run in queue order: this one is queued before those that wait for reduced gradients.
        torch.autograd.Variable._execution_engine.queue_callback(self._enter_sync)

    def _enter_sync(self) -> None:
        if self.on and self._at == BACKWARD:
            self.enter(SYNC)

    def _read(self) -> tuple[list[float], list[float]]:
        while True:
            since, at = self._since, self._at
            times, drawn = list(self._times), list(self._drawn)
            if since == self._since and at == self._at:  # otherwise another thread has marked during the copy
                break
        if self._runs:
            times[at] += max(0.0, perf_counter() - since)
        return times, drawn


# Summary of the training time


NOTICEABLE = 0.2  # fraction of the time from which a part other than the model is reported


@dataclass(frozen=True)
class TimeSpent:
    """Summary of how one process spent its training time, in seconds per activity.

    Attributes:
        total: All of the time.
        waiting: Waiting for the training loader.
        model: Forward, backward and optimizer steps.
        validating: Validation, including its loaders.
        saving: Saving checkpoints.
        syncing: Waiting for other processes.
        callbacks: Hooks of each callback, or of the task, by name.
        samples: Number of samples that this process trained on, or None if the loader does not count them.
        workers: Number of the loader's worker processes, or None if it cannot have any.
        cores: CPU cores per process on this machine.
    """

    total: float
    waiting: float = 0.0
    model: float = 0.0
    validating: float = 0.0
    saving: float = 0.0
    syncing: float = 0.0
    callbacks: Mapping[str, float] = field(default_factory=dict)
    samples: int | None = None
    workers: int | None = None
    cores: int = 1

    @classmethod
    def of(
        cls,
        timing: Timing,
        samples: int | None,
        workers: int | None,
        cores: int,
        callbacks: Mapping[str, float] | None = None,
    ) -> TimeSpent:
        seconds = timing.seconds
        named = {"callbacks, which profiler='simple' names": seconds["callbacks"]} if callbacks is None else callbacks
        return cls(
            timing.total_seconds,
            waiting=seconds["data"],
            model=seconds["forward"] + seconds["backward"] + seconds["optimizer"],
            validating=seconds["evaluation"],
            saving=seconds["checkpoint"],
            syncing=seconds["sync"],
            callbacks=named,
            samples=samples,
            workers=workers,
            cores=cores,
        )

    def sentence(self) -> str:
        if self.total <= 0:
            return ""
        name, most = max(self.callbacks.items(), key=lambda item: item[1], default=("", 0.0))
        # The training loader's waiting time is relative to training: validation has a loader of its own.
        training = max(self.total - self.validating - self.saving, 1e-12)
        found = [
            (self.waiting / self.total, self._about_data(self.waiting / training)),
            (
                self.validating / self.total,
                f"{_percent(self.validating / self.total)} of the time is validation: validate less often "
                "(check_val_every_n_epoch, val_check_interval), on fewer batches (limit_val_batches) or larger ones.",
            ),
            (
                self.saving / self.total,
                f"{_percent(self.saving / self.total)} of the time is saving checkpoints: save less often "
                "(ModelCheckpoint(every_n_train_steps=...)), or beside training (async_save=True).",
            ),
            (
                self.syncing / self.total,
                f"{_percent(self.syncing / self.total)} of the time is waiting for other processes: find the slow one "
                "(StragglerMonitor), or exchange gradients less often (accumulate_grad_batches).",
            ),
            (
                most / self.total,
                f"{_percent(most / self.total)} of the time is in {name}: make it cheaper, or run it less often.",
            ),
        ]
        share, sentence = max(found, key=lambda item: item[0])
        if share >= NOTICEABLE:
            return sentence
        if self.model <= 0:
            return (
                f"{_percent(self.waiting / training)} of the step waits for data: the loader keeps up with the model."
            )
        return (
            f"{_percent(self.model / self.total)} of the time is the model's own (forward, backward, optimizer), "
            f"{_percent(self.waiting / self.total)} waits for data: to be faster, the model must be."
        )

    def _about_data(self, share: float) -> str:
        first = f"{_percent(share)} of the step waits for data"
        advice = "make the dataset cheaper, for example by caching what it computes"
        training = self.total - self.validating - self.saving
        computing = training - self.waiting
        if not self.samples or self.waiting <= 0 or computing <= 0:
            return f"{first}: {advice}, or give its loader more workers (num_workers)."
        # Workers load while the model computes; without workers, loading and computing alternate.
        loads_for = training if self.workers else self.waiting
        loader, model = self.samples / loads_for, self.samples / computing
        if self.workers is None:
            return f"{first}: the loader gives {_rate(loader)} samples/s, the model takes {_rate(model)}; {advice}."
        # One worker more than strictly needed, because receiving batches also takes this process's time.
        wanted = math.ceil(max(self.workers, 1) * model / loader) + 1
        sentence = (
            f"{first}: the loader gives {_rate(loader)} samples/s with {self.workers} workers, "
            f"the model takes {_rate(model)}; try num_workers={wanted}"
        )
        if wanted <= self.cores:
            return f"{sentence}."
        return (
            f"{sentence}. This process has {self.cores} core{'s' * (self.cores != 1)}: if loading is limited by "
            f"computing and not by files, {advice}."
        )


def _percent(share: float) -> str:
    return f"{min(max(share, 0.0), 1.0) * 100:.0f} %"


def _rate(value: float) -> str:
    """Format a number with three significant digits, such as `2,400` or `0.125`."""
    digits = 2 - math.floor(math.log10(value)) if value > 0 else 0
    rounded = round(value, digits)
    return f"{rounded:,.0f}" if digits <= 0 else f"{rounded:,.{digits}f}"
