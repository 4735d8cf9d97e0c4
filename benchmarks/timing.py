"""Paired timing: what is compared runs in turn, right after its base line, many times over."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import io
import os
import random
import statistics
import struct
import subprocess
import sys
import termios
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from time import perf_counter
from typing import Any

import torch


class Turns:
    """Lets two loops, each in a thread of its own, run in turn: what slows the machine down slows both down."""

    def __init__(self) -> None:
        self._may_run = (threading.Semaphore(1), threading.Semaphore(0))
        self._has_ended = [False, False]

    def begin(self, number: int) -> None:
        """Wait for the first turn.

        Args:
            number: Which of the two loops, 0 or 1.
        """
        self._may_run[number].acquire()

    def pass_on(self, number: int) -> None:
        """Let the other loop run, and wait until it is this one's turn again.

        Args:
            number: Which of the two loops asks.
        """
        if not self._has_ended[1 - number]:
            self._may_run[1 - number].release()
            self._may_run[number].acquire()

    def end(self, number: int) -> None:
        """Leave the rest to the other loop.

        Args:
            number: Which of the two loops has ended.
        """
        self._has_ended[number] = True
        self._may_run[1 - number].release()


class Clock:
    """Adds up the time of steps that run in turn with those of another loop, some steps at a time.

    The time runs from one forward to another, so the last step needs one more.

    Args:
        turns: What the two loops share.
        number: Which of the two this is.
        warmup: Steps before the first turn that is timed.
        steps: Steps that are timed, in all turns together.
        turn: Steps of a turn that are timed.
        now: The clock, in seconds: `perf_counter`, or `process_time` where other programs run too.
    """

    SETTLING = 5  # steps at the start of a turn that are not timed: what the other loop has left in caches

    def __init__(
        self, turns: Turns, number: int, warmup: int, steps: int, turn: int, now: Callable[[], float] = perf_counter
    ) -> None:
        self._turns, self._number, self._now = turns, number, now
        self._warmup, self._turn = warmup, turn
        self._steps = -(-steps // turn) * turn
        self.total = self.steps_of(warmup, steps, turn)
        self._next = 0
        self._start = self._elapsed = 0.0

    @classmethod
    def steps_of(cls, warmup: int, steps: int, turn: int) -> int:
        """How many steps a loop must run.

        Args:
            warmup: As above.
            steps: As above.
            turn: As above.
        """
        return warmup + -(-steps // turn) * (turn + cls.SETTLING) + 1

    def tick(self) -> None:
        """Called in each forward."""
        count = self._next - self._warmup
        self._next += 1
        if count < 0:
            return
        position = count % (self._turn + self.SETTLING)
        if position == self.SETTLING:
            self._start = self._now()
        elif position == 0:
            if count:
                self._elapsed += self._now() - self._start
            if self._next < self.total:
                self._turns.pass_on(self._number)

    @property
    def microseconds_per_step(self) -> float:
        """The time between two forwards."""
        if self._next < self.total:
            raise RuntimeError(f"only {self._next} of {self.total} steps were run")
        return self._elapsed / self._steps * 1e6


def run_in_turn(turns: Turns, first: Callable[[], None], second: Callable[[], None]) -> None:
    """Run two loops that share `turns`, each in a new thread, so that neither has another memory allocator.

    Args:
        turns: What their clocks share.
        first: Runs the one whose number is 0.
        second: Runs the other, whose number is 1.
    """

    def run(number: int, loop: Callable[[], None]) -> None:
        torch.set_num_threads(1)  # each thread has its own number
        turns.begin(number)
        try:
            loop()
        finally:
            turns.end(number)

    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(run, number, loop) for number, loop in enumerate((first, second))]:
            done.result()


def measure_beside(
    base: Callable[[Clock, Any], None],
    contender: Callable[[Clock, Any], None],
    data: Any,
    lengths: tuple[int, int, int],
    now: Callable[[], float],
) -> Callable[[], tuple[float, float]]:
    """What runs a base line and a contender in turn, and returns the time of a step of each.

    Args:
        base: The base line.
        contender: The contender.
        data: What both run on.
        lengths: Steps of warm-up, timed steps, and timed steps of a turn.
        now: The clock.
    """

    places = random.Random(0)

    def measure() -> tuple[float, float]:
        # Each once in either thread: what the one finds in its memory is worth some microseconds.
        both = [one_after_other(own) for own in (0, 1)]
        return sum(first for first, _ in both) / 2, sum(found for _, found in both) / 2

    def one_after_other(own: int) -> tuple[float, float]:
        turns = Turns()
        clocks = [Clock(turns, number, *lengths, now=now) for number in (0, 1)]
        torch.manual_seed(0)
        elsewhere = [torch.empty(places.randrange(1, 2000)) for _ in range(places.randrange(400))]
        loops = [lambda: base(clocks[1 - own], data)] * 2
        loops[own] = lambda: contender(clocks[own], data)
        with quietly(), warnings.catch_warnings(), without_garbage_collection():
            warnings.simplefilter("ignore")
            run_in_turn(turns, *loops)
        del elsewhere
        return clocks[1 - own].microseconds_per_step, clocks[own].microseconds_per_step

    return measure


@dataclass
class Comparison:
    """Measurements of one contender, each paired with one of the base line taken right before it."""

    name: str
    base: list[float]
    own: list[float]

    @property
    def added(self) -> float:
        """The median of the paired differences."""
        return statistics.median(own - base for own, base in zip(self.own, self.base, strict=True))

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles of the differences: how far to trust their median."""
        if len(self.own) < 2:
            return 0.0
        low, _, high = statistics.quantiles([own - base for own, base in zip(self.own, self.base, strict=True)], n=4)
        return (high - low) / 2

    @property
    def ratio(self) -> float:
        """The median of the paired ratios."""
        return statistics.median(own / base for own, base in zip(self.own, self.base, strict=True))

    def as_dict(self) -> dict[str, float | str]:
        return {
            "name": self.name,
            "median": statistics.median(self.own),
            "added": self.added,
            "spread": self.spread,
            "ratio": self.ratio,
            "rounds": len(self.own),
        }


def compare(
    base: Callable[[], float], contenders: dict[str, Callable[[], float]], rounds: int, warmups: int = 1
) -> list[Comparison]:
    """Measure every contender in turn, in each round, with a measurement of the base line right before it.

    Args:
        base: measures the base line once.
        contenders: what measures each contender once, by name.
        rounds: how often.
        warmups: rounds before them whose results are thrown away.
    """

    def both(measure: Callable[[], float]) -> Callable[[], tuple[float, float]]:
        return lambda: (base(), measure())

    return compare_pairs({name: both(measure) for name, measure in contenders.items()}, rounds, warmups)


def compare_pairs(
    contenders: dict[str, Callable[[], tuple[float, float]]], rounds: int, warmups: int = 1
) -> list[Comparison]:
    """Measure every contender in turn, in each round, together with the base line.

    Args:
        contenders: what measures the base line and each contender once, by the contender's name.
        rounds: how often.
        warmups: rounds before them whose results are thrown away.
    """
    results = [Comparison(name, [], []) for name in contenders]
    for number in range(-warmups, rounds):
        for result, measure in zip(results, contenders.values(), strict=True):
            pair = measure()
            if number >= 0:
                result.base.append(pair[0])
                result.own.append(pair[1])
        print(f"\rround {number + 1} of {rounds} ", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return results


def stay_on_one_core() -> None:
    """Run on one core from now on, where the system lets a program choose: cores differ by what else runs on them."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Collect before, not during: how long a collection takes depends on all that was ever imported."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextlib.contextmanager
def on_terminal() -> Iterator[None]:
    """Let stdout and stderr be a real terminal, which another process reads, so that progress bars are drawn."""
    main, terminal = os.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    reader = subprocess.Popen(["cat"], stdin=main, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    os.close(main)
    try:
        with open(terminal, "w") as screen, contextlib.redirect_stdout(screen), contextlib.redirect_stderr(screen):
            yield
    finally:
        reader.kill()
        reader.wait()


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Keep what is printed off the screen."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def version_of(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "from the checkout"
