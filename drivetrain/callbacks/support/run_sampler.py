"""What a process spends its time with, seen from another thread, so that no step pays for it."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

from drivetrain import checkpoint
from drivetrain.callbacks.stage import Stage
from drivetrain.runtime.devices import get_device_kind
from drivetrain.runtime.memory import MemoryUse
from drivetrain.trackers.report.lanes import Sample

if TYPE_CHECKING:
    from drivetrain.trainer.trainer import Trainer

_SAVING = os.path.dirname(checkpoint.__file__) + os.sep
_SHORTEST = 0.5
_PER_RUN = 200
"""A sample covers at least this part of the run before it, so that long runs have a few thousand in all."""


class RunSampler:
    """Reads on a clock where a thread is: in a step, at its loader, in a validation or in a checkpoint.

    Args:
        trainer: The trainer.
        thread: The number of the thread that trains.
    """

    def __init__(self, trainer: Trainer, thread: int) -> None:
        self._trainer, self._thread = trainer, thread
        self._frames: Callable[[], dict[int, FrameType]] = getattr(sys, "_current_frames", dict)
        assert trainer.loop is not None
        self._loading: CodeType = type(trainer.loop.batches).windows.__code__
        self._device = trainer.strategy.topology.device
        self._kind = get_device_kind(self._device.type)
        self._begun = self._since = time.monotonic()
        self._seen: Counter[str] = Counter()
        self._rows: int | None = None  # of a batch that was trained on
        self._at = self._counters()

    @property
    def seconds(self) -> float:
        """The seconds since it began."""
        return time.monotonic() - self._begun

    def observe(self) -> None:
        """Count what the thread does now."""
        doing = self._doing()
        self._seen[doing] += 1
        info = self._trainer.batch_info
        if doing == "train" and info is not None:
            self._rows = info.real_rows

    def is_due(self) -> bool:
        """Whether enough time has passed for a sample."""
        now = time.monotonic()
        return now - self._since >= max(_SHORTEST, (now - self._begun) / _PER_RUN)

    def take(self) -> Sample:
        """What the process did since the last sample."""
        now, counters = time.monotonic(), self._counters()
        seconds = max(now - self._since, 1e-9)
        steps, batches = (after - before for before, after in zip(self._at, counters, strict=True))
        total = sum(self._seen.values()) or 1
        shares = {name: count / total for name, count in self._seen.items()}
        if not self._seen:
            shares = {"train": 1.0}
        training = seconds * (shares.get("train", 0.0) + shares.get("data", 0.0))
        is_training = training > 0 and batches > 0
        rows = self._rows
        self._since, self._at = now, counters
        self._seen.clear()
        return Sample(
            time=time.time(),
            seconds=seconds,
            step=counters[0],
            steps_per_sec=steps / training if is_training else math.nan,
            samples_per_sec=batches * rows / training if is_training and rows else math.nan,
            train=shares.get("train", 0.0),
            data=shares.get("data", 0.0),
            validation=shares.get("validation", 0.0),
            saving=shares.get("saving", 0.0),
            memory=float(MemoryUse.read(self._kind, self._device).current),
            lr=self._rate(),
        )

    def _counters(self) -> tuple[int, int]:
        progress = self._trainer.progress
        return progress.global_step, progress.total_batches

    def _doing(self) -> str:
        stage = self._trainer.stage
        frame = self._frames().get(self._thread)
        is_loading = False
        while frame is not None:
            code = frame.f_code
            if code is self._loading:
                is_loading = True
            elif code.co_filename.startswith(_SAVING):
                return "saving"
            frame = frame.f_back
        if stage is Stage.VALIDATE:
            return "validation"
        if is_loading:
            return "data"
        return "train" if stage is Stage.TRAIN else "rest"

    def _rate(self) -> float:
        """The learning rate, unless reading it would wait for the device."""
        optimizers = self._trainer.optimizers
        groups = optimizers[0].param_groups if optimizers else []
        rate: Any = groups[0].get("lr", math.nan) if groups else math.nan
        device = getattr(rate, "device", None)
        return float(rate) if device is None or device.type == "cpu" else math.nan


class Clock:
    """A thread that calls a function every so often until it is stopped.

    Args:
        call: The function; the thread ends where it raises.
        name: The thread's name.
    """

    def __init__(self, call: Callable[[], None], name: str) -> None:
        self._call = call
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._started = time.monotonic()

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
        while not self._ended.wait(0.1 if time.monotonic() - self._started < 60 else 0.5):
            self._call()
