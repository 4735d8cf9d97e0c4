"""How far a run has come."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import Any

from drivetrain.runtime.durations import Unit


class Phase(IntEnum):
    """How far an epoch has come; an epoch goes through all of them in this order.

    Attributes:
        BATCHES: Batches are left to train on.
        SCHEDULED: The last batch is trained on, and the schedulers that follow epochs have stepped.
        DRAINED: The loader is at its end; what is left are a validation and the hooks of the epoch's end.
        CLOSING: Nothing is left but the hooks that run last, such as that of `ModelCheckpoint`.
    """

    BATCHES = 0
    SCHEDULED = 1
    DRAINED = 2
    CLOSING = 3


@dataclass
class Progress:
    """The counters of a run; all of them are part of its state.

    Attributes:
        global_step: Optimizer steps taken.
        epoch: Epochs finished.
        batches_in_epoch: Batches of this process consumed in the epoch under way.
        total_batches: Batches of this process consumed in all.
        validations: Validation runs finished.
        validated_at: `total_batches` at the last of them.
        due_at: `total_batches` at the last one that was due by a clock, which cannot be derived when resuming.
        parts: In how many parts each batch is computed, since memory lacks for it as a whole.
        validated_count: What `val_check_interval` counts, at the last validation that it led to.
        samples: Samples trained on, over all processes; counted where anything of the run is measured in samples.
        tokens: The same of tokens.
        phase: How far the epoch under way has come.
    """

    global_step: int = 0
    epoch: int = 0
    batches_in_epoch: int = 0
    total_batches: int = 0
    validations: int = 0
    validated_at: int = -1
    due_at: int = -1
    parts: int = 1
    validated_count: int = 0
    samples: int = 0
    tokens: int = 0
    phase: Phase = field(default=Phase.BATCHES)

    @property
    def batches_are_done(self) -> bool:
        """Whether the epoch has no batch left."""
        return self.phase >= Phase.DRAINED

    def count(self, unit: Unit) -> int:
        """How many steps, epochs, samples or tokens the run has come.

        Args:
            unit: One of these.
        """
        value: int = getattr(self, _COUNTED[unit])
        return value

    def forget(self, unit: Unit) -> None:
        """Count a unit from 0 again.

        Args:
            unit: Samples or tokens.
        """
        setattr(self, _COUNTED[unit], 0)

    def begin_epoch(self, epoch: int) -> None:
        """Stand before an epoch's first batch."""
        self.epoch = epoch
        self.batches_in_epoch = 0
        self.phase = Phase.BATCHES

    def state_dict(self) -> dict[str, Any]:
        """The counters."""
        return {name: getattr(self, name) for name in _COUNTERS} | {"phase": self.phase.name}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the counters back.

        Args:
            state: What `state_dict` returned; that of a version without phases, which had three booleans, too.
        """
        start = Progress()
        for name in _COUNTERS:
            setattr(self, name, int(state.get(name, getattr(start, name))))
        self.phase = Phase[state["phase"]] if "phase" in state else _phase_of_booleans(state)


_COUNTED = {Unit.STEPS: "global_step", Unit.EPOCHS: "epoch", Unit.SAMPLES: "samples", Unit.TOKENS: "tokens"}
_COUNTERS = tuple(each.name for each in fields(Progress) if each.name != "phase")


def _phase_of_booleans(state: Mapping[str, Any]) -> Phase:
    """The phase that a checkpoint of an earlier version has spelled in three booleans."""
    if state.get("epoch_is_ending"):
        return Phase.CLOSING
    if state.get("batches_are_done"):
        return Phase.DRAINED
    return Phase.SCHEDULED if state.get("epoch_over") else Phase.BATCHES
