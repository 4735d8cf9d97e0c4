"""`Timing`: what a thread spends its time with, from marks that some steps make and the others pass by."""

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
# What spans take is apart from what marks do: it is always measured, so it must not stand for steps without marks.
_SPANS = len(PARTS)
_UNMARKED = 2 * len(PARTS)

_COST = 1e-3
"""The share of the time that marks may take."""
_STRETCHES = 4
"""How many stretches of steps are looked back on, so that a pause in one of them does not count."""
_PER_STEP = 24
"""How many marks a step has, with what begins and ends it."""
_FIRST = 10
"""Batches at the beginning whose steps all have marks; their length decides how many of the following do."""
_MOST = 1000
"""Batches of which at least one has marks, however short steps are."""
_RECHECKED = 16
"""Batches of marked steps after which their length is looked at again."""


class Timing:
    """What the thread that trains spends its time with, so far.

    Every moment of `fit` from the first epoch's beginning counts for one of `PARTS`. Validations, checkpoints, the
    ends of epochs and what is written to trackers are always measured. Within steps, marks separate the parts: in every
    step where steps are so long that marks take less than 0.1 % of them, from about four milliseconds on; of shorter
    ones in as many as that allows, drawn at random. The shares of those then hold for the steps between them.

    It can be read at any time, also from another thread.

    Attributes:
        on: Whether marks count now. What makes one asks this first, so that a step without marks pays only for asking.
        sees_sync: Whether gradients are exchanged in the backward, and its end waits for other processes.
    """

    def __init__(self) -> None:
        self.on = self.sees_sync = False
        self._runs = False
        self._random = Random(0)  # not the one that seeds are set for
        self._reset()

    def _reset(self) -> None:
        self._times = [0.0] * (_UNMARKED + 1)  # of marks, of spans, and of steps without marks
        self._drawn = [0.0] * _SPANS  # of steps that stand for others
        self._at, self._since = IDLE, perf_counter()
        self._marks, self._is_first = True, True
        self._before_marks = self._times[:_SPANS]
        self._steps_before, self._batches_before = 0.0, 0
        self._per_batch: deque[float] = deque(maxlen=_STRETCHES)  # seconds, in the latest stretches
        self._marked_every = 0.0  # seconds of training for which one marked step is enough
        self._left = 0  # batches of a stretch after its marked step

    # reading

    @property
    def seconds(self) -> dict[str, float]:
        """The seconds of each part, by its name."""
        times, drawn = self._read()
        marked = drawn if sum(drawn) > 0 else times[:_SPANS]
        whole = sum(marked)
        rest = times[_UNMARKED]
        found = {}
        for number, name in enumerate(PARTS):
            share = marked[number] / whole if whole > 0 else float(number == IDLE)
            found[name] = times[number] + times[_SPANS + number] + rest * share
        return found

    @property
    def total_seconds(self) -> float:
        """The seconds of all parts together."""
        return sum(self._read()[0])

    @property
    def shares(self) -> dict[str, float]:
        """The share of each part in the time, from 0 to 1, by its name; all are 0 before a run."""
        seconds = self.seconds
        total = sum(seconds.values())
        return {name: value / total if total > 0 else 0.0 for name, value in seconds.items()}

    @property
    def inferred(self) -> float:
        """The share of the time that was in steps without marks, and is split as in those with marks."""
        times, _ = self._read()
        total = sum(times)
        return times[_UNMARKED] / total if total > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """All of it in numbers: `seconds`, `shares`, `total_seconds` and `inferred`."""
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

    # what is measured

    @contextmanager
    def run(self, sees_sync: bool) -> Iterator[None]:
        """Measure the body from the start.

        Args:
            sees_sync: See the attribute.
        """
        self._reset()
        self.sees_sync = sees_sync
        self._marked_every = _PER_STEP * self._seconds_of_a_mark() / _COST
        self._runs = True
        try:
            yield
        finally:
            self.enter(IDLE)
            self.on = self._runs = False

    def enter(self, part: int) -> int:
        """Let the time from now on count for a part. Returns the one before.

        Args:
            part: `FORWARD` or another.
        """
        now = perf_counter()
        before = self._at
        self._times[before] += now - self._since
        self._since = now
        self._at = part
        return before

    def call(self, part: int, function: Callable[..., T], *args: Any) -> T:
        """Call a function, whose time counts for a part. Ask `on` first: a step without marks calls it directly.

        Args:
            part: `FORWARD` or another.
            function: The function.
            *args: Its arguments.

        Returns:
            What the function returned.
        """
        outer = self.enter(part)
        result = function(*args)
        self.enter(outer)
        return result

    @contextmanager
    def span(self, part: int) -> Iterator[None]:
        """Let all of the body count for a part, in steps with and without marks; other spans in it are not its own.

        Args:
            part: `CHECKPOINT` or another.
        """
        if not self._runs:
            yield
            return
        before, on = self.enter(_SPANS + part), self.on
        self.on = False
        try:
            yield
        finally:
            self.enter(before)
            self.on = on

    # which steps have marks

    def begin_steps(self) -> None:
        """Begin with the steps of an epoch."""
        self.on = self._marks
        self.enter(IDLE if self._marks else _UNMARKED)

    def end_steps(self) -> None:
        """End what `begin_steps` began."""
        self.on = False
        self.enter(IDLE)

    def turn(self, batches: int) -> int:
        """Decide between two steps whether the following ones have marks.

        Args:
            batches: How many batches the run has trained on.

        Returns:
            How many there are to be at the next call.
        """
        self.enter(IDLE)
        if not self._marks:
            self._mark(True)
            return batches + 1
        if not self._is_first:
            for number, before in enumerate(self._before_marks):
                self._drawn[number] += self._times[number] - before
        self._is_first = False
        stretch = self._stretch(batches)
        if stretch == 1:
            self._mark(True)
            return batches + _RECHECKED
        # One batch of each stretch, wherever in it: what comes every so many steps must not meet it each time.
        ahead = self._random.randrange(stretch)
        pause, self._left = self._left + ahead, stretch - 1 - ahead
        self._mark(pause == 0)
        return batches + max(pause, 1)

    def first_turn(self, batches: int) -> int:
        """Begin with steps that all have marks.

        Args:
            batches: How many batches the run has trained on, such as before it was resumed.

        Returns:
            How many there are to be when `turn` is called.
        """
        self._batches_before = batches
        return batches + _FIRST

    def _seconds_of_a_mark(self) -> float:
        """How long a mark takes on this machine: the best of some tries, in which nothing else ran."""
        tries = []
        for _ in range(8):
            begun = perf_counter()
            for _ in range(8):
                self.enter(IDLE)
            tries.append((perf_counter() - begun) / 8)
        self._times[IDLE] = 0.0
        return min(tries)

    def _mark(self, marks: bool) -> None:
        self._marks = self.on = marks
        self._before_marks = self._times[:_SPANS]
        self._at = IDLE if marks else _UNMARKED

    def _stretch(self, batches: int) -> int:
        """Of how many batches one has marks, by how long steps have been of late."""
        steps = sum(self._times[:_SPANS]) + self._times[_UNMARKED]
        self._per_batch.append((steps - self._steps_before) / max(1, batches - self._batches_before))
        self._steps_before, self._batches_before = steps, batches
        return min(_MOST, max(1, math.ceil(self._marked_every / max(min(self._per_batch), 1e-9))))

    def mark_end_of_gradients(self, loss: Tensor) -> None:
        """Let what a backward does once its own gradients are computed count as waiting for other processes.

        Args:
            loss: What is differentiated.
        """
        if loss.requires_grad:
            loss.register_hook(self._await_end)  # type: ignore[no-untyped-call]

    def _await_end(self, _: Tensor) -> None:
        # Callbacks run in the order in which they are queued: before those that wait for gradients to be reduced.
        torch.autograd.Variable._execution_engine.queue_callback(self._enter_sync)

    def _enter_sync(self) -> None:
        if self.on and self._at == BACKWARD:
            self.enter(SYNC)

    def _read(self) -> tuple[list[float], list[float]]:
        """The seconds so far, and those of drawn steps."""
        while True:
            since, at = self._since, self._at
            times, drawn = list(self._times), list(self._drawn)
            if since == self._since and at == self._at:  # else a mark was made meanwhile
                break
        if self._runs:
            times[at] += max(0.0, perf_counter() - since)
        return times, drawn


# What took the time of training, in a sentence


NOTICEABLE = 0.2  # the share of the time from which something around the model is worth changing


@dataclass(frozen=True)
class TimeSpent:
    """Where the time of training went, in seconds of one process.

    Attributes:
        total: All of it.
        waiting: Waiting for the training loader.
        model: Forward, backward and the optimizers.
        validating: Validations, with their loaders.
        saving: Saving checkpoints.
        syncing: Waiting for other processes.
        callbacks: The hooks of each callback, or of the task, by its name.
        samples: Samples that this process trained on in that time; None where the loader does not count them.
        workers: The loader's worker processes; None where it has none to set.
        cores: The processor's cores for each process of this machine.
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
        """What a `Timing` has measured."""
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
        """Return what takes the time, in one line; empty if nothing was measured."""
        if self.total <= 0:
            return ""
        name, most = max(self.callbacks.items(), key=lambda item: item[1], default=("", 0.0))
        # Waiting is seen against training alone: a validation has its own loader.
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
                f"{_percent(self.syncing / self.total)} of the time waits for other processes: see which is slow "
                "(StragglerMonitor), or exchange gradients less often (accumulate_grad_batches).",
            ),
            (
                most / self.total,
                f"{_percent(most / self.total)} of the time is in {name}: make it cheaper, or let it act less often.",
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
        advice = "make the dataset cheaper, such as by keeping what it computes"
        training = self.total - self.validating - self.saving
        computing = training - self.waiting
        if not self.samples or self.waiting <= 0 or computing <= 0:
            return f"{first}: {advice}, or give its loader more workers (num_workers)."
        # Workers load while the model computes; without them the two take turns.
        loads_for = training if self.workers else self.waiting
        loader, model = self.samples / loads_for, self.samples / computing
        if self.workers is None:
            return f"{first}: the loader gives {_rate(loader)} samples/s, the model takes {_rate(model)}; {advice}."
        # One more than what would be just enough: handing batches over takes the time of this process, too.
        wanted = math.ceil(max(self.workers, 1) * model / loader) + 1
        sentence = (
            f"{first}: the loader gives {_rate(loader)} samples/s with {self.workers} workers, "
            f"the model takes {_rate(model)}; try num_workers={wanted}"
        )
        if wanted <= self.cores:
            return f"{sentence}."
        return (
            f"{sentence}. This process has {self.cores} core{'s' * (self.cores != 1)}: where loading computes rather "
            f"than waits for files, {advice}."
        )


def _percent(share: float) -> str:
    return f"{min(max(share, 0.0), 1.0) * 100:.0f} %"


def _rate(value: float) -> str:
    """A rate in three digits, such as 2,400."""
    digits = 2 - math.floor(math.log10(value)) if value > 0 else 0
    rounded = round(value, digits)
    return f"{rounded:,.0f}" if digits <= 0 else f"{rounded:,.{digits}f}"
