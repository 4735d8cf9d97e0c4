"""Paired timing: what is compared runs in turn, right after its base line, many times over."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import io
import os
import statistics
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from time import perf_counter


class Clock:
    """Notes the time at the first and the last of a number of steps, once the steps before them have warmed up.

    Args:
        warmup: steps that are not timed.
        steps: steps that are.
        now: what tells the time, in seconds: `perf_counter`, or `process_time` where other programs run too.
    """

    def __init__(self, warmup: int, steps: int, now: Callable[[], float] = perf_counter) -> None:
        self._now = now
        self.warmup, self.steps = warmup, steps
        self.total = warmup + steps + 1  # the time runs from one forward to another, so one more is needed
        self._next = 0
        self._start = self._stop = 0.0

    def tick(self) -> None:
        """Called in each forward."""
        count = self._next
        self._next = count + 1
        if count == self.warmup:
            self._start = self._now()
        elif count == self.warmup + self.steps:
            self._stop = self._now()

    @property
    def microseconds_per_step(self) -> float:
        """The time between two forwards."""
        if self._next < self.total:
            raise RuntimeError(f"only {self._next} of {self.total} steps were run")
        return (self._stop - self._start) / self.steps * 1e6


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
    results = [Comparison(name, [], []) for name in contenders]
    for number in range(-warmups, rounds):
        for result, measure in zip(results, contenders.values(), strict=True):
            pair = base(), measure()
            if number >= 0:
                result.base.append(pair[0])
                result.own.append(pair[1])
        print(f"\rround {number + 1} of {rounds} ", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return results


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
