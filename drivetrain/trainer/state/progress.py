"""How far a run has come."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass


@dataclass
class Progress:
    """The counters of a run; all of them are part of its state.

    Attributes:
        global_step: optimizer steps taken.
        epoch: epochs finished.
        batches_in_epoch: batches of this process consumed in the epoch under way.
        total_batches: batches of this process consumed in all.
        validations: validation runs finished.
        validated_at: `total_batches` at the last of them.
        epoch_over: whether the schedulers that follow epochs have stepped for this one.
        batches_are_done: whether the epoch has no batch left.
        epoch_is_ending: whether nothing of the epoch is left but its last hooks.
    """

    global_step: int = 0
    epoch: int = 0
    batches_in_epoch: int = 0
    total_batches: int = 0
    validations: int = 0
    validated_at: int = -1
    epoch_over: bool = False
    batches_are_done: bool = False
    epoch_is_ending: bool = False

    def begin_epoch(self, epoch: int) -> None:
        """Stand before an epoch's first batch."""
        self.epoch = epoch
        self.batches_in_epoch = 0
        self.epoch_over = self.batches_are_done = self.epoch_is_ending = False

    def state_dict(self) -> dict[str, int | bool]:
        """The counters."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, int | bool]) -> None:
        """Take the counters back."""
        for name, start in asdict(Progress()).items():
            setattr(self, name, type(start)(state.get(name, start)))
