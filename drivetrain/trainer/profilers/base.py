"""The base of all profilers, and the one that measures nothing."""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from drivetrain.runtime.logging import get_logger
from drivetrain.runtime.terminal import print_text

logger = get_logger(__name__)

# Actions that are not named after what owns them.
TRAIN_DATA = "train_dataloader_next"
EPOCH, BATCH, VALIDATION, SAVE = "run_training_epoch", "run_training_batch", "run_validation", "save_checkpoint"

_UNSAFE = re.compile(r'[\\/:*?"<>|\s]')


class Profiler(ABC):
    """Measures actions: parts of a run, each with a name.

    The Trainer gives it the hooks of callbacks and the task, the steps, what the strategy runs, and the waiting for
    data; `trainer.profiler.profile("mine")` adds an action of your own. Where the Trainer has no profiler nothing
    calls one.

    Args:
        dirpath: The directory of its files; `trainer.log_dir` if None.
        filename: The report is written to `<stage>-<filename>.txt` there, of several processes by each to
            `<stage>-<filename>-<local rank>.txt`; printed on the main process if None.

    Attributes:
        dirpath: The directory of its files.
        filename: The name that they share.

    Example:
        ```python
        from collections import Counter

        from drivetrain import Profiler, Trainer

        class ActionCounter(Profiler):
            def __init__(self):
                super().__init__()
                self.counts = Counter()

            def start(self, action_name):
                self.counts[action_name] += 1

            def stop(self, action_name):
                pass

            def summary(self):
                return str(self.counts)

        trainer = Trainer(profiler=ActionCounter(), logger=False)
        ```
    """

    measures: bool = True
    """Whether the Trainer calls it at all."""

    gives_verdict: bool = False
    """Whether the end of `fit` shows in a sentence what takes the time, out of what it has measured."""

    def __init__(self, dirpath: str | os.PathLike[str] | None = None, filename: str | None = None) -> None:
        self.dirpath, self.filename = dirpath, filename
        self._stage: str | None = None
        self._local_rank: int | None = None

    @abstractmethod
    def start(self, action_name: str) -> None:
        """Begin to measure an action.

        Args:
            action_name: Its name.
        """

    @abstractmethod
    def stop(self, action_name: str) -> None:
        """End what `start` began.

        Args:
            action_name: The action's name.
        """

    @contextmanager
    def profile(self, action_name: str) -> Iterator[str]:
        """Measure the body as an action.

        Args:
            action_name: Its name.
        """
        self.start(action_name)
        try:
            yield action_name
        finally:
            self.stop(action_name)

    def summary(self) -> str:
        """Return the report; empty where there is none."""
        return ""

    def describe(self) -> None:
        """Print the report, or write it to its file."""
        report = self.summary()
        if not report:
            return
        if self.filename:
            try:
                self.output_path(".txt").write_text(report, encoding="utf-8")
            except OSError as error:  # the run is over, and has not failed
                logger.warning(f"The profiler's report could not be written: {error}.")
        elif self.local_rank == 0:
            print_text(report)

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        """Called when fit, validate, test or predict begins.

        Args:
            stage: `"fit"`, `"validate"`, `"test"` or `"predict"`.
            local_rank: This process's number on its machine; None where it is the only one.
            log_dir: The directory to write to where the profiler was given none.
        """
        self._stage, self._local_rank = stage, local_rank
        self.dirpath = self.dirpath or log_dir

    def attach(self, model: nn.Module, count_steps: Callable[[str], float]) -> None:
        """Called after `setup`, with what will run.

        Args:
            model: The task.
            count_steps: Returns how many steps of a kind, such as `"training_step"`, an epoch has; infinite where this
                is not known. The loaders are known once the first step begins.
        """

    def teardown(self, stage: str | None) -> None:
        """Called when fit, validate, test or predict is over, after `describe`.

        Args:
            stage: `"fit"`, `"validate"`, `"test"` or `"predict"`.
        """

    @property
    def local_rank(self) -> int:
        """This process's number on its machine."""
        return self._local_rank or 0

    def output_path(self, extension: str, action_name: str | None = None) -> Path:
        """Return where a file is written; its directory is made.

        Args:
            extension: Such as `".txt"`.
            action_name: The action that the file is about, if it is about one.
        """
        folder = Path(self.dirpath or ".")
        folder.mkdir(parents=True, exist_ok=True)
        parts = [self._stage, self.filename, self._local_rank, action_name]
        name = "-".join(str(part) for part in parts if part not in (None, ""))
        return folder / (_UNSAFE.sub("_", name or "profile") + extension)


class PassThroughProfiler(Profiler):
    """Measures nothing: what a Trainer has that was given no profiler.

    Args:
        dirpath: Not used.
        filename: Not used.
    """

    measures = False

    def start(self, action_name: str) -> None:
        pass

    def stop(self, action_name: str) -> None:
        pass


class TaskProfiler:
    """The profiler of the Trainer that runs a task, as its attribute; a task may set one of its own in its place."""

    def __get__(self, task: Any, owner: type) -> Any:
        if task is None:
            return self
        trainer = task.__dict__.get("_trainer")
        return _UNATTACHED if trainer is None else trainer.profiler


_UNATTACHED = PassThroughProfiler()
