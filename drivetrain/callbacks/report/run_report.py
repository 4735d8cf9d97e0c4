"""Callback that writes a report page into the folder of each run."""

from __future__ import annotations

import logging
import math
import os
import platform
import shlex
import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain.callbacks.base import Callback, Stage
from drivetrain.callbacks.report.charts import Lane, Sample
from drivetrain.callbacks.report.page import write_page
from drivetrain.callbacks.report.record import (
    FAILED,
    FINISHED,
    INTERRUPTED,
    OUTPUT,
    PREEMPTED,
    RUNNING,
    read_record,
    write_record,
)
from drivetrain.callbacks.report.run_facts import facts_of, generated_name, is_changed, place_of, reason_of
from drivetrain.runtime.collectives import broadcast_object_list
from drivetrain.runtime.devices import get_device_kind
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.host import cpu_times
from drivetrain.runtime.logging import Collector, get_logger
from drivetrain.runtime.memory import MemoryUse
from drivetrain.runtime.terminal import without_credentials
from drivetrain.trackers.directory import DirectoryTracker
from drivetrain.trackers.registry import find_tracker

if TYPE_CHECKING:
    from drivetrain.trainer.task import Task
    from drivetrain.trainer.trainer import Trainer


# Writer of the record and the page


_STATES = {"failed": FAILED, "interrupted": INTERRUPTED, "preempted": PREEMPTED}
_SHARE = 8e-4
"""The maximum fraction of time spent on pages. Samples take another 0.0002."""
_FIRST_SECONDS = 15.0
"""The delay before the first page. The first and the last page cost about 8 ms of processor time in all."""
_MOST_LINES = 60
"""The maximum number of traceback lines, counted from the end."""


class ReportWriter:
    """Writer of a run's report files: `run.json` with facts about the run, and the page `report.html`."""

    def __init__(
        self,
        trainer: Trainer,
        task: Task,
        folder: str,
        seconds: float,
        warnings: Sequence[Sequence[Any]],
        name: str = "",
    ) -> None:
        self._trainer, self._task, self._folder = trainer, task, folder
        self._seconds, self._warnings = seconds, warnings
        self._started = time.time()
        self._begun = time.monotonic()
        self._due = self._begun + _FIRST_SECONDS
        self._spent = 0.0
        self._error = self._traceback = self._place = ""
        self._facts: dict[str, Any] | None = None
        self._has_page = False
        before = read_record(folder)
        self._sessions, self._before = _sessions_before(before), before.get("warnings", [])
        self._name = name or os.path.basename(folder)

    @property
    def due_in(self) -> float:
        return self._due - time.monotonic()

    def write(self) -> None:
        """Write `run.json` and the report page while the run is in progress."""
        is_first, self._has_page = not self._has_page, True
        # Counts only the processor time of this thread, which is what training loses.
        began = time.thread_time()
        self._due = time.monotonic() + self._seconds  # set first, so that a failed attempt is not repeated at once
        record = self._record(RUNNING, "")
        waited = 0.0 if is_first else self._ask_for_changes(record)
        write_record(self._folder, record)
        write_page(self._folder, record, with_values=not is_first)
        cost = time.thread_time() - began + waited
        self._spent += cost
        # Assume that the next page costs as much as this one.
        self._due = max(time.monotonic() + self._seconds, self._begun + (self._spent + cost) / _SHARE)

    def write_beginning(self) -> None:
        # Written now, so that a run that is killed early is listed too.
        write_record(self._folder, self._record(RUNNING, ""))
        self._facts = None  # the validation loaders are created later

    @staticmethod
    def _ask_for_changes(record: dict[str, Any]) -> float:
        commit = record.get("commit")
        if commit is None or commit["changed"] is not None:
            return 0.0
        began = time.monotonic()
        commit["changed"] = is_changed(record["cwd"])
        return time.monotonic() - began

    def record_error(self, error: BaseException) -> None:
        self._error, self._place = reason_of(error), place_of(error)
        lines = "".join(traceback.format_exception(error)).splitlines()
        self._traceback = "\n".join(lines[-_MOST_LINES:])

    def finish(self) -> None:
        reason = self._trainer.stop_reason
        state = FINISHED if reason is None else _STATES.get(str(reason), FINISHED)
        has_failed = state == FAILED and bool(self._error)
        record = self._record(state, self._error if has_failed else self._trainer.control.details)
        if has_failed:
            secrets = self._trainer.tracker_group.secrets
            record["traceback"] = secrets.in_text(self._traceback)
            record["failed_at"] = secrets.in_text(self._place)
        write_record(self._folder, record)
        write_page(self._folder, record)

    def _record(self, state: str, reason: str) -> dict[str, Any]:
        if self._facts is None:
            self._facts = facts_of(self._trainer, self._task)
        trainer, now = self._trainer, time.time()
        secrets = trainer.tracker_group.secrets
        record = {
            "name": secrets.in_text(self._name),
            **self._facts,
            "state": state,
            "reason": secrets.in_text(reason),
            "started": self._started,
            "updated": now,
            "due": now + max(self._seconds, self._due - time.monotonic()),
            "data_shards": trainer.strategy.topology.data_shard.count,
            "progress": {"step": trainer.global_step, "epoch": trainer.current_epoch},
            "best": self._best(),
            "metrics": dict(list(trainer.tracker_log.written.items())[:100]),
            "warnings": [list(each) for each in (*self._before, *self._warnings)],
            "sessions": self._sessions,
        }
        if record["argv"] is not None and record["best"].get("newest"):
            place = os.path.relpath(self._folder, record["cwd"])
            record["resume"] = shlex.join(["drivetrain", "runs", "resume", place])
        return record

    def _best(self) -> dict[str, Any]:
        found: dict[str, Any] = {"task": type(self._task).__name__, "module": type(self._task).__module__}
        for callback in self._trainer.checkpoint_callbacks[:1]:
            score = callback.best_model_score
            found |= {
                "monitor": callback.monitor,
                "mode": callback.mode,
                "value": None if score is None else float(score),
                "path": without_credentials(callback.best_model_path),
                "newest": without_credentials(callback.newest_model_path),
            }
        return found


def _sessions_before(before: dict[str, Any]) -> list[dict[str, Any]]:
    if not before.get("started"):
        return []
    part = {name: before.get(name) for name in ("started", "updated", "state", "reason")}
    # The record about to be replaced becomes one more earlier part.
    return [*before.get("sessions", ()), part]


# Samples of a process


_SOON = 0.1
_SHORTEST = 2.0
"""The minimum length of a sample in seconds. Taking one costs 0.4 ms of processor time."""
_PER_RUN = 200
"""The divisor of the elapsed time that gives the length of a sample. It limits long runs to a few thousand samples."""


class RunSampler:
    """Background sampler of a run's speed, memory use and breakdown of time."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._device = trainer.strategy.topology.device
        self._kind = get_device_kind(self._device.type)
        self._begun = self._since = time.monotonic()
        self._rows: int | None = None  # rows of a training batch
        self._at = self._counters()
        self._cpu = cpu_times()
        self._spent = trainer.timing.seconds

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begun

    def observe(self) -> None:
        info = self._trainer.batch_info
        if self._trainer.stage is Stage.TRAIN and info is not None:
            # This thread may miss batches, so the last known size stands for all of them.
            self._rows = info.real_rows

    @property
    def due_in(self) -> float:
        """The seconds until the next performance sample is due. Negative if it is overdue."""
        now = time.monotonic()
        return self._since + max(_SHORTEST, (now - self._begun) / _PER_RUN) - now

    def take(self) -> Sample:
        now, counters, spent = time.monotonic(), self._counters(), self._trainer.timing.seconds
        seconds = max(now - self._since, 1e-9)
        steps, batches = (after - before for before, after in zip(self._at, counters, strict=True))
        # `timing` estimates the parts of unmeasured steps, so a total may shrink slightly: clip at 0.
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
            epoch=self._epoch(),
            cpu=self._cpu_share(),
            gpu=math.nan if (used := self._kind.utilization(self._device)) is None else used,
        )

    def _epoch(self) -> float:
        progress, batches = self._trainer.progress, self._trainer.num_training_batches
        done = progress.batches_in_epoch / batches if batches and math.isfinite(batches) else 0.0
        return progress.epoch + min(done, 1.0)

    def _cpu_share(self) -> float:
        before, self._cpu = self._cpu, cpu_times()
        busy, whole = (now - then for now, then in zip(self._cpu, before, strict=True))
        return busy / whole if whole > 0 else math.nan

    def _counters(self) -> tuple[int, int]:
        progress = self._trainer.progress
        return progress.global_step, progress.total_batches

    def _rate(self) -> float:
        optimizers = self._trainer.optimizers
        groups = optimizers[0].param_groups if optimizers else []
        # Reading a learning rate that is a tensor on a device would synchronize the device.
        rate: Any = groups[0].get("lr", math.nan) if groups else math.nan
        device = getattr(rate, "device", None)
        return float(rate) if device is None or device.type == "cpu" else math.nan


class Clock:
    """Background thread that calls a function repeatedly, with pauses whose length the function returns."""

    def __init__(self, call: Callable[[], float], name: str) -> None:
        self._call = call
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, seconds: float = 60.0) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(seconds)

    def _run(self) -> None:
        pause = _SOON
        while not self._ended.wait(pause):
            pause = max(_SOON, self._call())


# Warnings


_MOST = 200
_LONGEST = 2000
_LONGEST_LINE = 20_000
_MOST_WAITING = 10_000
"""The number of lines that wait for the run's folder, above which the oldest are dropped."""


class RunLog(Collector):
    """Log handler that collects the warnings, log messages and printed text of a run for its report page.

    The text is what `Trainer.print` and `Task.print` write. Everything still appears where it would without a report.

    Attributes:
        found: A list of time, step, text and count of each warning.
    """

    def __init__(self, step: Callable[[], int], clean: Callable[[str], str]) -> None:
        super().__init__(logging.INFO)
        self._step, self._clean = step, clean
        self._logger = logging.getLogger("drivetrain")
        self._before: Callable[..., Any] | None = None
        self.found: list[list[Any]] = []
        self._known: dict[str, list[Any]] = {}
        self._lines: deque[str] = deque(maxlen=_MOST_WAITING)

    def open(self) -> None:
        self._logger.addHandler(self)
        self._before, warnings.showwarning = warnings.showwarning, self._show

    def close(self) -> None:
        self._logger.removeHandler(self)
        # Other code may have replaced the function since, and must keep it.
        if self._before is not None and warnings.showwarning == self._show:
            warnings.showwarning = self._before
        self._before = None
        super().close()

    def emit(self, record: logging.LogRecord) -> None:
        has_others = self._has_other_handlers(record)
        if record.levelno < logging.WARNING:
            if has_others:  # nobody sees it otherwise
                self.add_line(record.getMessage())
            return
        self._add(record.getMessage())
        # Python shows warnings that have no handler. This handler must not suppress that.
        if not has_others and logging.lastResort is not None:
            logging.lastResort.handle(record)

    def add_line(self, text: str) -> None:
        self._lines.append(f"{time.strftime('%H:%M:%S')}  {self._clean(text[:_LONGEST_LINE])}")

    def write_lines(self, folder: str) -> None:
        if self._lines:
            with open(os.path.join(folder, OUTPUT), "a", encoding="utf-8", errors="replace") as file:
                while self._lines:
                    file.write(self._lines.popleft() + "\n")

    def _has_other_handlers(self, record: logging.LogRecord) -> bool:
        logger: logging.Logger | None = logging.getLogger(record.name)
        while logger is not None:
            if any(handler is not self for handler in logger.handlers):
                return True
            logger = logger.parent if logger.propagate else None
        return False

    def _show(self, message: Warning | str, category: type[Warning], *rest: Any, **options: Any) -> None:
        self._add(f"{category.__name__}: {message}")
        if self._before is not None:
            self._before(message, category, *rest, **options)

    def _add(self, text: str) -> None:
        self.add_line(text)
        known = self._known.get(text)
        if known is not None:
            # A repeated warning is counted instead of listed again.
            known[3] += 1
        elif len(self.found) < _MOST:
            shown = self._clean(text[:_LONGEST])
            self._known[text] = entry = [time.time(), self._step(), shown, 1]
            self.found.append(entry)


logger = get_logger(__name__)

_NOTHING_TO_DO = 60.0
"""The pause in seconds of a process that has no samples or pages to write."""


class RunReport(Callback):
    """Callback that writes `report.html`, a self-contained page with curves and facts, into the folder of each run.

    The page shows:

    - curves of all logged values, with zoom, and of learning rate, throughput, memory and time waiting for data, which
      the callback measures itself
    - validations, the best checkpoint and the code that loads it
    - warnings, and the reason for the end of the run
    - the configuration, the environment and the commit
    - with several processes, where the time of each of them went

    A Trainer with a tracker, or one that saves checkpoints, adds this callback by default, see `enable_run_report`. If
    no tracker writes files, the callback stores the values itself, as `CSVLogger` does, in a new folder below
    `default_root_dir`. Runs with `fast_dev_run` or `barebones` write no report.

    The callback works in a thread of its own and does not touch the training steps. It writes the first page, without
    curves, fifteen seconds after training has begun. It delays later pages so that the report takes at most a
    thousandth of the time. The last page is written when the run ends. If a run is killed, its last page remains, and
    is always complete.

    Args:
        seconds: The minimum time between two pages.
        name: The name of the run, on its page and in `drivetrain runs`. If None, it is made from the name of the logger
            and two random words, such as `digits-brave-otter-3` for `version_3`.

    Raises:
        ConfigurationError: If `seconds` is not above 0.

    Example:
        ```python
        from drivetrain import RunReport, Trainer

        trainer = Trainer(callbacks=[RunReport(seconds=60, name="wide layers")])
        ```
    """

    saves_within_steps = False

    def __init__(self, seconds: float = 10.0, name: str | None = None) -> None:
        if not seconds > 0:
            raise ConfigurationError(f"RunReport(seconds={seconds}): seconds must be positive, such as 10.")
        self.seconds, self.name = seconds, name
        self._clock: Clock | None = None
        self._sampler: RunSampler | None = None
        self._lane: Lane | None = None
        self._log: RunLog | None = None
        self._writer: ReportWriter | None = None
        self._folder: str | None = None

    def setup(self, trainer: Trainer, task: Task, stage: str) -> None:
        if stage != "fit":
            return
        _record_without_tracker(trainer)
        if _tracker_of(trainer) is None:
            return
        self._stop()
        if trainer.is_global_zero:
            group = trainer.tracker_group
            self._log = RunLog(lambda: trainer.global_step, lambda text: group.secrets.in_text(text))
            self._log.open()

    def on_sanity_check_start(self, trainer: Trainer, task: Task) -> None:
        self._list_run(trainer, task)

    def on_train_start(self, trainer: Trainer, task: Task) -> None:
        tracker = _tracker_of(trainer)
        if tracker is None:
            return
        folder = os.path.abspath(tracker.run_directory.path) if trainer.is_global_zero else None
        if trainer.world_size > 1:
            # Only the main process knows the version number of its run directory.
            [folder] = broadcast_object_list([folder])
        assert folder is not None
        self._folder = folder
        about = {"host": platform.node(), "device": str(trainer.strategy.topology.device)}
        self._lane = Lane(folder, trainer.global_rank, about)
        self._sampler = RunSampler(trainer)
        self._list_run(trainer, task)
        self._clock = Clock(self._tick, "drivetrain-report")
        self._clock.start()

    def _list_run(self, trainer: Trainer, task: Task) -> None:
        tracker, writer = _tracker_of(trainer), self._make_writer(trainer, task)
        if tracker is None or writer is None:
            return
        try:
            tracker.run_directory.create()
            writer.write_beginning()
        except Exception as error:
            _warn(error)

    def _make_writer(self, trainer: Trainer, task: Task) -> ReportWriter | None:
        tracker = _tracker_of(trainer)
        if self._writer is None and trainer.is_global_zero and tracker is not None:
            self._folder = os.path.abspath(tracker.run_directory.path)
            found = [] if self._log is None else self._log.found
            before = read_record(self._folder).get("name")
            name = self.name or before or generated_name(tracker.run_directory)
            self._writer = ReportWriter(trainer, task, self._folder, self.seconds, found, name)
        return self._writer

    def on_exception(self, trainer: Trainer, task: Task, exception: BaseException) -> None:
        if self._writer is None and trainer.task_run.stage is Stage.TRAIN:
            _record_without_tracker(trainer)  # the exception may come before `setup`
            self._make_writer(trainer, task)
        if self._writer is not None:
            # The page is written in `teardown`, when the Trainer knows how the run ended.
            self._writer.record_error(exception)

    def teardown(self, trainer: Trainer, task: Task, stage: str) -> None:
        if stage == "fit":
            self._finish(trainer)
            self._stop()
        elif stage == "test" and trainer.is_global_zero and self._folder is not None:
            self._write_again(trainer)

    def _tick(self) -> float:
        sampler, lane, folder, writer = self._sampler, self._lane, self._folder, self._writer
        if sampler is None or lane is None or folder is None:
            return _NOTHING_TO_DO
        try:
            sampler.observe()
            if sampler.due_in <= 0:
                sample = sampler.take()
                if writer is not None and not lane.is_open:
                    Path(folder).mkdir(parents=True, exist_ok=True)
                if lane.is_open or os.path.isdir(folder):  # other machines may not share the disk of the main process
                    lane.write(sample)
            self._write_lines()
            if writer is not None and writer.due_in <= 0:
                writer.write()
        except Exception as error:
            _warn(error)
        # the seconds to wait until the next call
        return min(sampler.due_in, _NOTHING_TO_DO if writer is None else writer.due_in)

    def _finish(self, trainer: Trainer) -> None:
        if self._clock is not None:
            self._clock.stop()
        tracker, sampler, writer = _tracker_of(trainer), self._sampler, self._writer
        if tracker is None or self._folder is None:
            return
        seconds = 0.0 if sampler is None else sampler.seconds
        try:
            if writer is not None:
                tracker.save()
                tracker.run_directory.create()
            if os.path.isdir(self._folder):
                if sampler is not None and self._lane is not None and seconds > 0.2:
                    self._lane.write(sampler.take())
                self._write_lines()
                if writer is not None:
                    writer.finish()
        except Exception as error:
            logger.warning(f"The report in {self._folder} could not be completed: {type(error).__name__}: {error}.")

    def _write_lines(self) -> None:
        if self._log is not None and self._folder is not None and os.path.isdir(self._folder):
            self._log.write_lines(self._folder)

    def _write_again(self, trainer: Trainer) -> None:
        from drivetrain.callbacks.report.page import write_page
        from drivetrain.callbacks.report.record import read_record

        tracker = _tracker_of(trainer)
        try:
            if tracker is not None and self._folder is not None and read_record(self._folder):
                tracker.save()
                write_page(self._folder)
        except Exception as error:
            _warn(error)

    def _stop(self) -> None:
        if self._clock is not None:
            self._clock.stop()
        if self._lane is not None:
            self._lane.close()
        if self._log is not None:
            self._log.close()
        self._clock = self._sampler = self._lane = self._log = self._writer = None


def _tracker_of(trainer: Trainer) -> DirectoryTracker | None:
    recorder = trainer.tracker_group.recorder
    found = _writing_files(trainer) or ([recorder] if isinstance(recorder, DirectoryTracker) else [])
    # The report is written into the folder of this tracker.
    return next((each for each in found if each.name == "csv"), found[0] if found else None)


def _writing_files(trainer: Trainer) -> list[DirectoryTracker]:
    return [each for each in trainer.loggers if isinstance(each, DirectoryTracker)]


def _record_without_tracker(trainer: Trainer) -> None:
    group, root = trainer.tracker_group, trainer.default_root_dir
    if _writing_files(trainer) or trainer.fast_dev_run or trainer.barebones or "://" in root:
        group.record_with(None)
    elif group.recorder is None:
        # No tracker writes files, so the report reads the values from a CSV table.
        group.record_with(find_tracker("csv").for_run(root, None))


def _warn(error: Exception) -> None:
    logger.warning_once(f"The run's report could not be written: {type(error).__name__}: {error}. Training continues.")
