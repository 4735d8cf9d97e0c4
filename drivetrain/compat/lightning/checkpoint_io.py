"""`CheckpointIO` and `TorchCheckpointIO`: plugins that write, read and remove checkpoint files."""

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
    """Base class of plugins that write, read and remove checkpoints. Subclass it for other storage or formats.

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
        """Write a checkpoint. The main process calls this."""

    @abstractmethod
    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint. All processes call this."""

    @abstractmethod
    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a checkpoint. The main process calls this."""

    def teardown(self) -> None:
        """Clean up after `fit`, `validate`, `test` or `predict`."""


class TorchCheckpointIO(CheckpointIO):
    """Plugin that writes each checkpoint atomically to a local file with `torch.save`."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Write a checkpoint. Raise an error if `storage_options` are given."""
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
        """Read a checkpoint. Raise `FileNotFoundError` if the file does not exist."""
        if not os.path.exists(path):
            raise FileNotFoundError(f"Checkpoint file not found: {os.fspath(path)}")
        with torch.serialization.safe_globals(plain_classes()):
            found: dict[str, Any] = torch.load(path, map_location, weights_only=not is_asked_for(weights_only))
        return found

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a file or directory, if it exists."""
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        elif os.path.lexists(path):
            os.unlink(path)
