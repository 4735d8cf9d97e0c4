"""Base class of all profilers, and the profiler that measures nothing."""

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

# Names of actions without an owner
TRAIN_DATA = "train_dataloader_next"
EPOCH, BATCH, VALIDATION, SAVE = "run_training_epoch", "run_training_batch", "run_validation", "save_checkpoint"

_UNSAFE = re.compile(r'[\\/:*?"<>|\s]')


class Profiler(ABC):
    """Base class of profilers, which measure named actions of a run, such as hooks.

    The Trainer reports hooks of the task and the callbacks, steps, operations of the strategy and the wait for data.
    `trainer.profiler.profile("mine")` measures an action of your own. A Trainer without a profiler reports nothing.

    Args:
        dirpath: Directory of the profiler's files. None uses `trainer.log_dir`.
        filename: Name of the report, written to `<stage>-<filename>.txt`. With several processes each writes
            `<stage>-<filename>-<local rank>.txt`. None prints the report on the main process.

    Attributes:
        dirpath: Directory of the profiler's files.
        filename: Name that all files of the profiler share.

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
    """True if the Trainer reports actions to this profiler."""

    gives_verdict: bool = False
    """True if `fit` prints a sentence at its end about the parts that took most of the time."""

    def __init__(self, dirpath: str | os.PathLike[str] | None = None, filename: str | None = None) -> None:
        self.dirpath, self.filename = dirpath, filename
        self._stage: str | None = None
        self._local_rank: int | None = None

    @abstractmethod
    def start(self, action_name: str) -> None:
        """Begin to measure an action of the Trainer, such as a hook, until `stop` is called with its name.

        Args:
            action_name: Name of the action.
        """

    @abstractmethod
    def stop(self, action_name: str) -> None:
        """Stop measuring an action that was started by `start`.

        Args:
            action_name: Name of the action.
        """

    @contextmanager
    def profile(self, action_name: str) -> Iterator[str]:
        """Return a context manager that measures the `with` block as one action.

        Args:
            action_name: Name of the action.
        """
        self.start(action_name)
        try:
            yield action_name
        finally:
            self.stop(action_name)

    def summary(self) -> str:
        """Return the report as text, or an empty string if the profiler has no report."""
        return ""

    def describe(self) -> None:
        """Print the text of `summary()`, or write it to a file if the profiler has a `filename`."""
        report = self.summary()
        if not report:
            return
        if self.filename:
            try:
                self.output_path(".txt").write_text(report, encoding="utf-8")
            except OSError as error:  # a full disk must not make a finished run fail
                logger.warning(f"The profiler's report could not be written: {error}.")
        elif self.local_rank == 0:
            print_text(report)

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        """Prepare the profiler at the beginning of `fit`, `validate`, `test` or `predict`.

        Args:
            stage: `"fit"`, `"validate"`, `"test"` or `"predict"`.
            local_rank: Rank of this process on its machine, or None if it is the only process.
            log_dir: Directory for the files if the profiler has no `dirpath`.
        """
        self._stage, self._local_rank = stage, local_rank
        # The directory of the first run is kept for later ones.
        self.dirpath = self.dirpath or log_dir

    def attach(self, model: nn.Module, count_steps: Callable[[str], float]) -> None:
        """Prepare the profiler for a run of the task `model`, for example to count the steps of an epoch.

        Override it if a profiler needs the task's modules or its steps per epoch. Called after `setup`.

        Args:
            model: Task that will run.
            count_steps: Function that returns the number of steps per epoch for a name such as `"training_step"`. It
                returns infinity if the number is unknown. Valid from the first step on.
        """

    def teardown(self, stage: str | None) -> None:
        """Release the profiler's resources at the end of `fit`, `validate`, `test` or `predict`.

        Called after `describe`.

        Args:
            stage: `"fit"`, `"validate"`, `"test"` or `"predict"`.
        """

    @property
    def local_rank(self) -> int:
        """Rank of this process on its machine, or 0 if it is the only process."""
        return self._local_rank or 0

    def output_path(self, extension: str, action_name: str | None = None) -> Path:
        """Return the path of an output file, named after stage, rank and action, and create its folder.

        Args:
            extension: File extension, such as `".txt"`.
            action_name: Action that the file describes, or None.
        """
        folder = Path(self.dirpath or ".")
        folder.mkdir(parents=True, exist_ok=True)
        # Rank 0 must stay in the name, so only None and empty strings are left out.
        parts = [self._stage, self.filename, self._local_rank, action_name]
        name = "-".join(str(part) for part in parts if part not in (None, ""))
        return folder / (_UNSAFE.sub("_", name or "profile") + extension)


class PassThroughProfiler(Profiler):
    """Profiler that measures nothing, for a Trainer without a profiler.

    Args:
        dirpath: Ignored.
        filename: Ignored.
    """

    measures = False

    def start(self, action_name: str) -> None:
        pass

    def stop(self, action_name: str) -> None:
        pass


class TaskProfiler:
    def __get__(self, task: Any, owner: type) -> Any:
        # A descriptor without `__set__`, so a task may assign a profiler of its own.
        if task is None:
            return self
        # `task.trainer` would raise an error without a Trainer.
        trainer = task.__dict__.get("_trainer")
        return _UNATTACHED if trainer is None else trainer.profiler


_UNATTACHED = PassThroughProfiler()
