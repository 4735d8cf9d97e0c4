"""What a run is at: its stage, its batch, and how many batches there are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from drivetrain.callbacks.stage import Stage
from drivetrain.data import BatchInfo
from drivetrain.runtime.durations import Unit
from drivetrain.runtime.nested import find_batch_size


class CurrentRun:
    """What a run is at. The loops write it; everything else reads it, through the Trainer's properties.

    Attributes:
        stage: What runs now; None between two runs.
        sanity_checking: Whether this is the validation before training, whose results are dropped.
        batch: The batch under way.
        batch_info: What its loader recorded about it.
        training_batches: Batches of this process in an epoch; infinite where this is not known.
        evaluation_batches: For each stage, the batches of this process in each of its loaders.
        loaders: For each stage, the user's loader or loaders.
        last_epoch: Batches of this process that the last training epoch has begun and finished; both 0 before it.
        ahead: Samples and tokens of the step under way, where anything is measured in them: as far as they are known,
            else those of the step before.
        closes_epoch: Whether the step under way, or the last one, is the last of its epoch; known where anything is
            measured in epochs.
    """

    __slots__ = (
        *("ahead", "batch", "batch_info", "closes_epoch", "evaluation_batches", "last_epoch", "loaders"),
        *("sanity_checking", "stage", "training_batches"),
    )

    def __init__(self) -> None:
        self.stage: Stage | None = None
        self.sanity_checking = False
        self.batch: Any = None
        self.batch_info: BatchInfo | None = None
        self.training_batches: float = 0
        self.evaluation_batches: dict[Stage, list[float]] = {}
        self.loaders: dict[Stage, Any] = {}
        self.last_epoch = 0, 0
        self.ahead: dict[Unit, int] = {}
        self.closes_epoch = False

    def lengths(self) -> tuple[float, dict[Stage, list[float]], tuple[int, int]]:
        """How many batches there are, and were in the last epoch, for another process to adopt."""
        return self.training_batches, self.evaluation_batches, self.last_epoch

    def adopt_lengths(self, lengths: tuple[float, dict[Stage, list[float]], tuple[int, int]]) -> None:
        """Take over how many batches there are where a verb has run in other processes.

        Args:
            lengths: What `lengths` returned there.
        """
        self.training_batches, self.evaluation_batches, self.last_epoch = lengths

    def leave_batch(self) -> None:
        """Record that no batch is under way."""
        self.batch = self.batch_info = None

    def leave_epoch(self, finished: int) -> None:
        """Record that no batch of training is under way, and how many there were.

        Args:
            finished: Batches of the epoch that are trained on.
        """
        self.last_epoch = finished if self.batch_info is None else self.batch_info.index + 1, finished
        self.leave_batch()

    def leave_stage(self) -> None:
        """Record that nothing runs."""
        self.leave_batch()
        self.stage, self.sanity_checking = None, False

    @contextmanager
    def within(self, stage: Stage, sanity_checking: bool = False) -> Iterator[None]:
        """Be in another stage in the body; then in the one before, at the same batch.

        Args:
            stage: The stage.
            sanity_checking: Whether it is the validation before training.
        """
        before = self.stage, self.sanity_checking, self.batch, self.batch_info
        self.stage, self.sanity_checking = stage, sanity_checking
        yield
        self.stage, self.sanity_checking, self.batch, self.batch_info = before

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Be at the same place in the end as now; what the user's loaders are stays known."""
        before = {name: getattr(self, name) for name in self.__slots__ if name != "loaders"}
        before["evaluation_batches"] = dict(self.evaluation_batches)
        try:
            yield
        finally:
            for name, value in before.items():
                setattr(self, name, value)

    def find_batch_size(self) -> int:
        """Real rows of the current batch, from its loader, or else from its tensors."""
        info = self.batch_info
        if info is not None and info.rows is not None:
            return info.rows - info.padding
        return find_batch_size(self.batch)
