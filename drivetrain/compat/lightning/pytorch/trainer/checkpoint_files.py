"""Checkpoints that a script's `CheckpointIO` writes, reads and removes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from drivetrain.checkpoint import CheckpointFiles, is_checkpoint
from drivetrain.compat.lightning.checkpoint_io import CheckpointIO, TorchCheckpointIO
from drivetrain.runtime.state import PartialState


class PluginFiles(CheckpointFiles):
    """The checkpoints of a plugin, wherever it keeps them.

    Args:
        plugin: The plugin.
        storage_options: What it gets at each save.
        weights_only: What the verb under way was given.
    """

    def __init__(self, plugin: CheckpointIO, storage_options: Any, weights_only: bool | None) -> None:
        self._plugin, self._storage_options, self._weights_only = plugin, storage_options, weights_only

    def place_of(self, path: str | os.PathLike[str]) -> str | os.PathLike[str]:
        return path

    def place_beside(self, path: str | os.PathLike[str], root: str) -> str:
        return os.path.join(root, f".{os.path.basename(os.fspath(path))}.whole")

    def write(self, path: str | os.PathLike[str], content: dict[str, Any], objects: bool) -> None:
        self._plugin.save_checkpoint(content, path, storage_options=self._storage_options)

    def read(self, path: str) -> Mapping[str, Any] | None:
        if os.path.isdir(path) and is_checkpoint(path):
            return None  # of a run without the plugin
        PartialState().wait_for_everyone()  # the main process may have it in hand
        return self._plugin.load_checkpoint(path, weights_only=self._weights_only)

    def remove(self, path: str) -> None:
        if os.path.islink(path):
            os.unlink(path)
            return
        # A resumed run removes once more what was about to be removed when its checkpoint was written.
        with suppress(FileNotFoundError):
            self._plugin.remove_checkpoint(path)

    def may_replace(self, path: str, as_file: bool) -> bool:
        return True

    def has_second_names(self, directory: str) -> bool:
        return False


def files_of(plugin: CheckpointIO | None, storage_options: Any, weights_only: bool | None) -> CheckpointFiles:
    """How a run keeps its checkpoints.

    Args:
        plugin: What the script gave; None and `TorchCheckpointIO` itself stand for files of this package.
        storage_options: What `save_checkpoint` was given.
        weights_only: What the verb under way was given.
    """
    if storage_options is None and (plugin is None or type(plugin) is TorchCheckpointIO):
        return CheckpointFiles()
    return PluginFiles(plugin or TorchCheckpointIO(), storage_options, weights_only)
