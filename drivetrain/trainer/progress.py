"""How far a run has come."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields


@dataclass
class Progress:
    """The counters of a run; all of them are part of its state.

    Attributes:
        global_step: optimizer steps taken.
        epoch: epochs finished.
        batches_in_epoch: batches of this process consumed in the epoch under way.
        total_batches: batches of this process consumed in all.
        validations: validation runs finished.
        epoch_over: 1 once the epoch's schedulers have stepped, so that a run resumed here begins the next epoch.
    """

    global_step: int = 0
    epoch: int = 0
    batches_in_epoch: int = 0
    total_batches: int = 0
    validations: int = 0
    epoch_over: int = 0

    def begin_epoch(self, epoch: int) -> None:
        """Stand before an epoch's first batch."""
        self.epoch = epoch
        self.batches_in_epoch = self.epoch_over = 0

    def state_dict(self) -> dict[str, int]:
        """The counters."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take the counters back."""
        for field in fields(self):
            setattr(self, field.name, int(state.get(field.name, 0)))
