"""Leave a page in the folder of each run that shows what was run and how it went."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING

from drivetrain.callbacks.base import Callback
from drivetrain.callbacks.stage import Stage
from drivetrain.callbacks.support.run_sampler import Clock, RunSampler
from drivetrain.callbacks.support.warning_log import WarningLog
from drivetrain.runtime.collectives import broadcast_object_list
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.logging import get_logger
from drivetrain.trackers.csv import CSVLogger
from drivetrain.trackers.directory import DirectoryTracker
from drivetrain.trackers.report.lanes import Lane

if TYPE_CHECKING:
    from drivetrain.callbacks.support.report_writer import ReportWriter
    from drivetrain.trainer.task import Task
    from drivetrain.trainer.trainer import Trainer

logger = get_logger(__name__)

_NOTHING_TO_DO = 60.0
"""Seconds until a process without samples or pages to write looks again."""


class RunReport(Callback):
    """Writes `report.html` into the folder of a run: one file that shows in any browser how the run went.

    The page has the curves of everything that was logged, with zoom; learning rate, throughput, memory and the share
    of the time that waits for data, which the callback measures itself; validations, the best checkpoint and how to
    load it; warnings; why the run ended; the configuration, the environment and the commit; and, of several processes,
    what each of them spent its time with.

    A Trainer adds it by itself where there is a tracker, or where checkpoints are saved, see `enable_run_report`. Where
    no tracker writes files it keeps the values itself, as a `CSVLogger` would, in a folder of its own below
    `default_root_dir`. A trial run (`fast_dev_run`, `barebones`) leaves none. It works in a thread of its own,
    in which it also reads `trainer.timing`. A first page, without curves, is written fifteen seconds after training has
    begun; each later one waits until all that the report does is at most a thousandth of the time. The last one is
    written when the run ends, however short it was. Steps are not touched. A run that is killed leaves its last page,
    which is always whole.

    Args:
        seconds: The time between two pages at least.

    Raises:
        ConfigurationError: If `seconds` is not above 0.

    Example:
        ```python
        from drivetrain import RunReport, Trainer

        trainer = Trainer(callbacks=[RunReport(seconds=60)])
        ```
    """

    saves_within_steps = False

    def __init__(self, seconds: float = 10.0) -> None:
        if not seconds > 0:
            raise ConfigurationError(f"RunReport(seconds={seconds}): give a time above 0, such as 10.", code="DT-002")
        self.seconds = seconds
        self._clock: Clock | None = None
        self._sampler: RunSampler | None = None
        self._lane: Lane | None = None
        self._warnings: WarningLog | None = None
        self._writer: ReportWriter | None = None
        self._folder: str | None = None

    def setup(self, trainer: Trainer, task: Task, stage: str) -> None:
        if stage != "fit":
            return
        _record_where_nothing_does(trainer)
        if _tracker_of(trainer) is None:
            return
        self._stop()
        if trainer.is_global_zero:
            group = trainer.tracker_group
            self._warnings = WarningLog(lambda: trainer.global_step, lambda text: group.secrets.in_text(text))
            self._warnings.open()

    def on_sanity_check_start(self, trainer: Trainer, task: Task) -> None:
        self._list_run(trainer, task)

    def on_train_start(self, trainer: Trainer, task: Task) -> None:
        tracker = _tracker_of(trainer)
        if tracker is None:
            return
        folder = os.path.abspath(tracker.run_directory.path) if trainer.is_global_zero else None
        if trainer.world_size > 1:
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
        """List the run and write its record, so that it is known if its processes are killed."""
        tracker, writer = _tracker_of(trainer), self._make_writer(trainer, task)
        if tracker is None or writer is None:
            return
        try:
            tracker.run_directory.create()
            writer.write_beginning()
        except Exception as error:
            _warn(error)

    def _make_writer(self, trainer: Trainer, task: Task) -> ReportWriter | None:
        """Return what writes the pages of this run, on the main process."""
        from drivetrain.callbacks.support.report_writer import ReportWriter

        tracker = _tracker_of(trainer)
        if self._writer is None and trainer.is_global_zero and tracker is not None:
            self._folder = os.path.abspath(tracker.run_directory.path)
            found = [] if self._warnings is None else self._warnings.found
            self._writer = ReportWriter(trainer, task, self._folder, self.seconds, found)
        return self._writer

    def on_exception(self, trainer: Trainer, task: Task, exception: BaseException) -> None:
        if self._writer is None and trainer.task_run.stage is Stage.TRAIN:
            _record_where_nothing_does(trainer)  # it may end before `setup`
            self._make_writer(trainer, task)
        if self._writer is not None:
            self._writer.record_error(exception)

    def teardown(self, trainer: Trainer, task: Task, stage: str) -> None:
        if stage == "fit":
            self._finish(trainer)
            self._stop()
        elif stage == "test" and trainer.is_global_zero and self._folder is not None:
            self._write_again(trainer)

    def _tick(self) -> float:
        """Called on the clock, in its thread. Returns the seconds until there is something to do."""
        sampler, lane, folder, writer = self._sampler, self._lane, self._folder, self._writer
        if sampler is None or lane is None or folder is None:
            return _NOTHING_TO_DO
        try:
            sampler.observe()
            if sampler.due_in <= 0:
                sample = sampler.take()
                if writer is not None and not lane.is_open:
                    Path(folder).mkdir(parents=True, exist_ok=True)
                if lane.is_open or os.path.isdir(folder):  # not on a machine without the disk of the main process
                    lane.write(sample)
            if writer is not None and writer.due_in <= 0:
                writer.write()
        except Exception as error:
            _warn(error)
        return min(sampler.due_in, _NOTHING_TO_DO if writer is None else writer.due_in)

    def _finish(self, trainer: Trainer) -> None:
        """Write the last sample and the last page, on the thread that trains."""
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
                if writer is not None:
                    writer.finish()
        except Exception as error:
            logger.warning(
                f"The report of this run in {self._folder} lacks what came last: {type(error).__name__}: {error}."
            )

    def _write_again(self, trainer: Trainer) -> None:
        """Add the results of a test to the page of the fit before it."""
        from drivetrain.trackers.report.page import write_page
        from drivetrain.trackers.report.record import read_record

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
        if self._warnings is not None:
            self._warnings.close()
        self._clock = self._sampler = self._lane = self._warnings = self._writer = None


def _tracker_of(trainer: Trainer) -> DirectoryTracker | None:
    """The tracker whose folder is the run's: a table, else the first one that writes files."""
    recorder = trainer.tracker_group.recorder
    found = _writing_files(trainer) or ([recorder] if isinstance(recorder, DirectoryTracker) else [])
    return next((each for each in found if isinstance(each, CSVLogger)), found[0] if found else None)


def _writing_files(trainer: Trainer) -> list[DirectoryTracker]:
    """The trackers that were given and write files."""
    return [each for each in trainer.loggers if isinstance(each, DirectoryTracker)]


def _record_where_nothing_does(trainer: Trainer) -> None:
    """Keep a table of the values, where no tracker that was given writes files."""
    group, root = trainer.tracker_group, trainer.default_root_dir
    if _writing_files(trainer) or trainer.fast_dev_run or trainer.barebones or "://" in root:
        group.record_with(None)
    elif group.recorder is None:
        group.record_with(CSVLogger(root))


def _warn(error: Exception) -> None:
    logger.warning_once(f"The run's report could not be written: {type(error).__name__}: {error}. Training continues.")
