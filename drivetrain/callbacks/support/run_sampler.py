"""How a process is doing, read from another thread."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from drivetrain.callbacks.stage import Stage
from drivetrain.runtime.devices import get_device_kind
from drivetrain.runtime.memory import MemoryUse
from drivetrain.trackers.report.lanes import Sample

if TYPE_CHECKING:
    from drivetrain.trainer.trainer import Trainer

_SOON = 0.1
_SHORTEST = 2.0
"""A sample takes 0.4 ms of the processor: two ten-thousandths of the time."""
_PER_RUN = 200
"""A sample covers at least this part of the run before it, so that long runs have a few thousand in all."""


class RunSampler:
    """Reads on a clock what a trainer's `timing` has measured, and how far the trainer is.

    Args:
        trainer: The trainer.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._device = trainer.strategy.topology.device
        self._kind = get_device_kind(self._device.type)
        self._begun = self._since = time.monotonic()
        self._rows: int | None = None  # of a batch that was trained on
        self._at = self._counters()
        self._spent = trainer.timing.seconds

    @property
    def seconds(self) -> float:
        """The seconds since it began."""
        return time.monotonic() - self._begun

    def observe(self) -> None:
        """See how many rows a batch has."""
        info = self._trainer.batch_info
        if self._trainer.stage is Stage.TRAIN and info is not None:
            self._rows = info.real_rows

    @property
    def due_in(self) -> float:
        """The seconds until it is time for a sample; 0 or less where it is."""
        now = time.monotonic()
        return self._since + max(_SHORTEST, (now - self._begun) / _PER_RUN) - now

    def take(self) -> Sample:
        """What the process did since the last sample."""
        now, counters, spent = time.monotonic(), self._counters(), self._trainer.timing.seconds
        seconds = max(now - self._since, 1e-9)
        steps, batches = (after - before for before, after in zip(self._at, counters, strict=True))
        # What steps without marks are split by changes a little with each that has some.
        own = {name: max(0.0, value - self._spent[name]) for name, value in spent.items()}
        total = sum(own.values())
        shares = {name: value / total if total > 0 else float(name == "idle") for name, value in own.items()}
        training = seconds * (1.0 - shares["evaluation"] - shares["checkpoint"])
        is_training = training > 0 and batches > 0
        rows = self._rows
        self._since, self._at, self._spent = now, counters, spent
        return Sample(
            time=time.time(),
            seconds=seconds,
            step=counters[0],
            steps_per_sec=steps / training if is_training else math.nan,
            samples_per_sec=batches * rows / training if is_training and rows else math.nan,
            **shares,
            memory=float(MemoryUse.read(self._kind, self._device).current),
            lr=self._rate(),
        )

    def _counters(self) -> tuple[int, int]:
        progress = self._trainer.progress
        return progress.global_step, progress.total_batches

    def _rate(self) -> float:
        """The learning rate, unless reading it would wait for the device."""
        optimizers = self._trainer.optimizers
        groups = optimizers[0].param_groups if optimizers else []
        rate: Any = groups[0].get("lr", math.nan) if groups else math.nan
        device = getattr(rate, "device", None)
        return float(rate) if device is None or device.type == "cpu" else math.nan


class Clock:
    """A thread that calls a function whenever it asks for it, until it is stopped.

    Args:
        call: The function, which returns in how many seconds it is to be called again; the thread ends where it raises.
        name: The thread's name.
    """

    def __init__(self, call: Callable[[], float], name: str) -> None:
        self._call = call
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self, seconds: float = 60.0) -> None:
        """End, and wait until a call that is under way has returned.

        Args:
            seconds: How long to wait at most.
        """
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(seconds)

    def _run(self) -> None:
        pause = _SOON
        while not self._ended.wait(pause):
            pause = max(_SOON, self._call())
