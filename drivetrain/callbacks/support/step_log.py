"""When values about steps are logged: in the rows that the Trainer logs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from drivetrain.runtime.errors import ConfigurationError

if TYPE_CHECKING:
    from drivetrain.trainer.trainer import Trainer


class StepLog:
    """Decides at which optimizer steps a callback logs: every `log_every_n_steps`, each step once.

    Args:
        owner: The callback's name, for errors.
        trainer: The trainer.

    Raises:
        ConfigurationError: The Trainer has no logger.
    """

    def __init__(self, owner: str, trainer: Trainer) -> None:
        if not trainer.loggers:
            raise ConfigurationError(
                f"Cannot use `{owner}` callback. It has nowhere to log to: the Trainer has no logger. Give it one, "
                "such as Trainer(logger='csv'), or take this callback out.",
                code="DT-094",
            )
        self._trainer = trainer
        self.every = trainer.log_every_n_steps
        self._last = trainer.global_step

    def is_due(self, step: int) -> bool:
        """Whether a step is logged that was not; asked once for each.

        Args:
            step: The number of optimizer steps once it is done.
        """
        if not self.every or step == self._last or step % self.every:
            return False
        self._last = step
        return True

    def write(self, values: Mapping[str, float], step: int) -> None:
        """Give values to the trackers."""
        if values:
            self._trainer.log_metrics(values, step)
