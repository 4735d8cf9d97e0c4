"""What writes the checkpoints of a run as files, reads and removes them: `CheckpointIO`, and torch's files."""

from __future__ import annotations

import os
import shutil
from abc import ABC, abstractmethod
from typing import Any

import torch

from drivetrain.checkpoint.torch_files import plain_classes
from drivetrain.compat.formats.lightning_file import write_lightning_content
from drivetrain.compat.lightning.unpickling import is_asked_for
from drivetrain.runtime.errors import ArgumentTypeError


class CheckpointIO(ABC):
    """Writes, reads and removes checkpoints; derive a class to keep them in another place or another form.

    Example:
        ```python
        import os

        import torch

        from drivetrain.compat.lightning.pytorch import Trainer
        from drivetrain.compat.lightning.pytorch.plugins import CheckpointIO

        class Plain(CheckpointIO):
            def save_checkpoint(self, checkpoint, path, storage_options=None):
                os.makedirs(os.path.dirname(path), exist_ok=True)
                torch.save(checkpoint, path)

            def load_checkpoint(self, path, map_location=None, weights_only=None):
                return torch.load(path, map_location=map_location)

            def remove_checkpoint(self, path):
                os.remove(path)

        trainer = Trainer(plugins=[Plain()])
        ```
    """

    @abstractmethod
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Write a checkpoint; called by the main process."""

    @abstractmethod
    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint; called by all processes."""

    @abstractmethod
    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a checkpoint; called by the main process."""

    def teardown(self) -> None:
        """Called when a verb of the Trainer is over."""


class TorchCheckpointIO(CheckpointIO):
    """Writes a checkpoint as a local file, which appears complete or not at all."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Write a checkpoint."""
        if storage_options is not None:
            raise ArgumentTypeError(
                "`Trainer.save_checkpoint(..., storage_options=...)` with `storage_options` arg is not supported for "
                f"`{type(self).__name__}`. Please implement your custom `CheckpointIO` to define how you'd like to use "
                "`storage_options`.",
            )
        write_lightning_content(path, checkpoint, objects=True)

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint."""
        if not os.path.exists(path):
            raise FileNotFoundError(f"Checkpoint file not found: {os.fspath(path)}")
        with torch.serialization.safe_globals(plain_classes()):
            found: dict[str, Any] = torch.load(path, map_location, weights_only=not is_asked_for(weights_only))
        return found

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a file, or a directory; nothing happens where there is none."""
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        elif os.path.lexists(path):
            os.unlink(path)
