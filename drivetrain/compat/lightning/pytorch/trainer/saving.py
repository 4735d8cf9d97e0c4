"""How the mirror's Trainer writes checkpoints, and opens them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from drivetrain.callbacks.step_schedule import decide_on_main_process
from drivetrain.checkpoint import CheckpointFiles, PendingSave
from drivetrain.compat.lightning.pytorch.trainer.checkpoint_files import PluginFiles, files_of
from drivetrain.compat.lightning.pytorch.trainer.conventions import LightningConventions
from drivetrain.compat.lightning.strategy_members import with_members
from drivetrain.compat.lightning.unpickling import is_asked_for
from drivetrain.runtime.logging import get_logger

logger = get_logger(__name__)


class LightningSaving(LightningConventions):
    """`drivetrain.Trainer` with Lightning's files, or what a script's plugin makes of them."""

    _weights_only: bool | None = None  # what the verb under way was given
    _storage_options: Any = None

    def save_checkpoint(  # type: ignore[override]
        self,
        filepath: str | os.PathLike[str],
        weights_only: bool | None = None,
        storage_options: Any = None,
        **options: Any,
    ) -> PendingSave:
        """Write a checkpoint; call it on all processes.

        Args:
            filepath: The file, or what the plugin that writes it takes.
            weights_only: Leave out everything but weights and hyper-parameters.
            storage_options: For the plugin.
            **options: As for `drivetrain.Trainer.save_checkpoint`.

        Raises:
            AttributeError: There is no module yet.
            TypeError: There are `storage_options`, and no plugin that takes them.
        """
        if self.task is None:
            raise AttributeError(
                "Saving a checkpoint is only possible if a model is attached: call fit or another verb first."
            )
        self._storage_options = storage_options
        try:
            return super().save_checkpoint(filepath, bool(weights_only), **options)
        finally:
            self._storage_options = None

    def format_of_checkpoint(self, filepath: str | os.PathLike[str], block: bool = True) -> str:
        """The format in which `save_checkpoint` writes where none is given.

        `"lightning"`, one file, where each process holds the whole state, or a plugin writes it; `"drivetrain"`, a
        directory, where the state is sharded, is written in the background, or goes to a URL.

        Args:
            filepath: Where to.
            block: Whether it is written at once.
        """
        if isinstance(self.checkpoint_files, PluginFiles):
            return "lightning"
        is_file = block and "://" not in os.fspath(filepath) and self.strategy.state.holds_whole
        return "lightning" if is_file else "drivetrain"

    @property
    def checkpoint_files(self) -> CheckpointFiles:
        """How checkpoints are written, read and removed: by the plugin that the script gave, if it gave one."""
        plugin = with_members(self.strategy, "32").given_checkpoint_io
        return files_of(plugin, self._storage_options, self._weights_only)

    @property
    def pickles(self) -> bool:
        """Whether objects that hooks add to a checkpoint are pickled into the file."""
        return True

    @property
    def unpickles(self) -> bool:
        """Whether the verb under way unpickles the objects in its checkpoint."""
        return is_asked_for(self._weights_only)

    @contextmanager
    def closing_checkpoints(self) -> Iterator[None]:
        """Let the plugin that writes checkpoints end its work after the body.

        What it raises is raised on all processes, unless the body has raised: then it is logged.
        """
        strategy: Any = self.strategy
        try:
            yield
        except BaseException:
            try:
                strategy.checkpoint_io.teardown()
            except Exception as error:
                logger.error(f"The checkpoints of this run may not be whole: {error!r}")
            raise
        decide_on_main_process(lambda: strategy.checkpoint_io.teardown())
        if not self.is_global_zero:
            strategy.checkpoint_io.teardown()
