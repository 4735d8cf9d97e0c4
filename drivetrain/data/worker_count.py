"""How many workers a loader needs, found out by measuring its first batches."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from drivetrain.data.reading import do_nothing
from drivetrain.runtime.logging import get_logger

logger = get_logger(__name__)

BATCHES = 50
"""Batches after which the number is settled."""

_ALONE = 25  # of these, batches that the process reads by itself
_SETTLING = 5  # at the start of each stage, where models are compiled and workers start
_WORTHWHILE = 0.05  # the part of a step that reading must take for workers to be worth it
_MISSED = 0.1  # the part of a step that may pass waiting for workers before more are started

Begin = Callable[[int, Iterator[Any]], Iterator[Any]]


class _Times:
    """What has passed in the batches of a stage, without the first few.

    Attributes:
        count: Batches that have been measured; below 0 before the first of them.
    """

    def __init__(self) -> None:
        self.count = -_SETTLING
        self._read = self._step = 0.0

    def add(self, read: float, step: float) -> None:
        """Add a batch."""
        self.count += 1
        if self.count > 0:
            self._read += read
            self._step += step

    @property
    def read(self) -> float:
        """Seconds to wait for a batch, on average."""
        return self._read / max(1, self.count)

    @property
    def step(self) -> float:
        """Seconds to use one, on average."""
        return self._step / max(1, self.count)


class WorkerCount:
    """Finds how many workers a loader needs: `num_workers="auto"`.

    Half of the first 50 batches are read without workers, and the device is waited for after each, which shows what
    reading and a step take. The other half is read by as many workers as that asks for: more where the loop still waits
    for them, none where the loop is not faster with them. Batches that were measured are trained on as all others. An
    epoch that ends before is continued in the next one.

    Args:
        cores: The most workers there may be: the cores of this process.
        wait: Waits for the device.

    Attributes:
        settled: The number; None until it is found.
    """

    def __init__(self, cores: int, wait: Callable[[], None]) -> None:
        self.settled: int | None = None
        self._cores, self._wait = cores, wait
        self._alone, self._with_workers = _Times(), _Times()
        self._workers = 0

    def settle(self, workers: int, why: str) -> None:
        """Take a number, and note it in the log.

        Args:
            workers: The number.
            why: What it follows from.
        """
        self.settled = workers
        logger.info('num_workers="auto": %d worker%s, since %s.', workers, "s" * (workers != 1), why)

    def batches(self, requests: Iterator[Any], begin: Begin) -> Iterator[Any]:
        """The batches of an epoch, read by as many workers as turn out to be needed.

        Args:
            requests: What is read, in order.
            begin: Begins to read some of it with so many workers.
        """
        left = _ALONE - (self._alone.count + _SETTLING)
        first = begin(0, islice(requests, left)) if left > 0 else iter(())
        return self._stages(first, requests, begin)

    def _stages(self, first: Iterator[Any], requests: Iterator[Any], begin: Begin) -> Iterator[Any]:
        yield from self._measured(first, self._alone, self._wait)
        if self._alone.count + _SETTLING < _ALONE:
            return  # the epoch is over
        if self.settled is None and not self._workers:
            self._choose()
        left = BATCHES - _ALONE - (self._with_workers.count + _SETTLING)
        if self.settled is None and left > 0:
            some = self._begun(begin, self._workers, islice(requests, left))
            if some is not None:
                yield from self._measured(some, self._with_workers, do_nothing)  # they read beside the device
                if self._with_workers.count + _SETTLING < BATCHES - _ALONE:
                    return
                self._correct()
        rest = self._begun(begin, self.settled or 0, requests)
        yield from begin(0, requests) if rest is None else rest

    def _measured(self, batches: Iterator[Any], times: _Times, wait: Callable[[], None]) -> Iterator[Any]:
        """The batches, measured."""
        clock, ended = time.perf_counter, object()
        while True:
            begun = clock()
            batch = next(batches, ended)
            if batch is ended:
                return
            read = clock()
            yield batch
            wait()
            times.add(read - begun, clock() - read)

    def _begun(self, begin: Begin, workers: int, requests: Iterator[Any]) -> Iterator[Any] | None:
        """Begin to read; None where workers cannot be started."""
        try:
            return begin(workers, requests)
        except (AttributeError, TypeError, OSError, RuntimeError) as error:  # what pickling and forking raise
            if not workers:
                raise
            self.settle(0, f"workers cannot be started here ({type(error).__name__}: {error})")
            return None

    def _choose(self) -> None:
        """Find a number to try, from what reading and a step take without workers."""
        read, step = self._alone.read, self._alone.step
        if read < _WORTHWHILE * step:
            self.settle(0, f"{_seconds(read)} to read a batch are little beside {_seconds(step)} for a step")
        else:
            self._workers = min(self._cores, math.ceil(read / max(step, 1e-9)) + 1)

    def _correct(self) -> None:
        """Settle, from what passes with the workers that were tried."""
        alone, tried, workers = self._alone, self._with_workers, self._workers
        before, after = alone.read + alone.step, tried.read + tried.step
        shown = (
            f"{_seconds(alone.read)} to read a batch and {_seconds(alone.step)} for a step come to {_seconds(after)}"
        )
        if after >= before:
            self.settle(0, f"{shown} with {workers} of them")
            return
        if tried.read > _MISSED * after:
            workers = min(self._cores, math.ceil(workers * after / max(tried.step, 1e-9)))
        self.settle(workers, f"{shown} with {self._workers} of them, {_seconds(tried.read)} of it waiting")


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"
