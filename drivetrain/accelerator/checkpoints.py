"""Numbered checkpoints of `save_state()` under a project's directory."""

from __future__ import annotations

import re
from pathlib import Path

from drivetrain import checkpoint
from drivetrain.accelerator.handlers import ProjectConfiguration
from drivetrain.runtime.collectives import broadcast_object_list
from drivetrain.runtime.errors import CheckpointError, ConfigurationError
from drivetrain.runtime.state import PartialState

_NUMBERED = re.compile(r"checkpoint_(\d+)")


class NumberedCheckpoints:
    """The checkpoints `checkpoints/checkpoint_<n>` of a project.

    Args:
        configuration: Where they are, how many to keep, and the number of the next one.
        state: This process among its peers: the main process looks and removes, all get the same answer.
    """

    def __init__(self, configuration: ProjectConfiguration, state: PartialState) -> None:
        self._configuration = configuration
        self._state = state

    @property
    def enabled(self) -> bool:
        """Whether checkpoints without a name get a number."""
        return self._configuration.automatic_checkpoint_naming and self._configuration.project_dir is not None

    def next(self) -> Path:
        """Where the next one goes.

        Raises:
            ConfigurationError: Naming is off, or there is one of that number already.
        """
        number = self._configuration.iteration
        if number in self._from_main_process():
            raise ConfigurationError(
                f"{self._path(number)} exists already, of an earlier run. Continue that run with load_state(), set "
                "ProjectConfiguration(iteration=...) to the number to go on with, or choose another project_dir.",
                code="DT-009",
            )
        return self._path(number)

    def latest(self) -> Path:
        """The one with the highest number.

        Raises:
            CheckpointError: There is none.
            ConfigurationError: Naming is off.
        """
        numbers = self._from_main_process()
        if not numbers:
            raise CheckpointError(f"There is no checkpoint under {self._folder()} yet. Name one: load_state('path').")
        return self._path(numbers[-1])

    def record_written(self, directory: Path, pending: checkpoint.PendingSave) -> None:
        """Count one, and remove the oldest beyond the limit as soon as it is there.

        What has such a name but is no checkpoint stays, and does not count.
        """
        if directory != self._path(self._configuration.iteration):
            return
        self._configuration.iteration += 1
        limit = self._configuration.total_limit
        if limit is not None and self._state.is_main_process:
            pending.add_done_callback(lambda save: None if save.failed() else self._remove_beyond(limit))

    def _remove_beyond(self, limit: int) -> None:
        found = [path for number in self._numbers() if checkpoint.is_checkpoint(path := self._path(number))]
        for path in found[:-limit]:
            checkpoint.remove_checkpoint(path)

    def record_loaded(self, directory: Path) -> None:
        """Continue counting after the one that was loaded."""
        number = _NUMBERED.fullmatch(directory.name)
        if self.enabled and number and directory.resolve() == self._path(int(number[1])).resolve():
            self._configuration.iteration = int(number[1]) + 1

    def _folder(self) -> Path:
        if not self.enabled:
            raise ConfigurationError(
                "save_state() and load_state() without a directory need ProjectConfiguration(project_dir=..., "
                "automatic_checkpoint_naming=True). Name one: save_state('checkpoints/latest').",
                code="DT-005",
            )
        return Path(str(self._configuration.project_dir)) / "checkpoints"

    def _path(self, number: int) -> Path:
        return self._folder() / f"checkpoint_{number}"

    def _numbers(self) -> list[int]:
        folder = self._folder()
        names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
        return sorted(int(found[1]) for name in names if (found := _NUMBERED.fullmatch(name)))

    def _from_main_process(self) -> list[int]:
        self._folder()
        numbers: list[int] = broadcast_object_list([self._numbers() if self._state.is_main_process else None])[0]
        return numbers
