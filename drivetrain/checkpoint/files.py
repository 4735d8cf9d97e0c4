"""The files that a run's checkpoints in Lightning's format are: how they are written, read, found taken and removed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from drivetrain.checkpoint.lightning_file import check_lightning_file, write_lightning_content
from drivetrain.checkpoint.run_state import is_checkpoint, remove_checkpoint
from drivetrain.checkpoint.storage import LocalStorage, storage_of


class CheckpointFiles:
    """How a run keeps its checkpoints; override all of it to keep their content in another way.

    `read` is called by all processes, everything else by the main process.
    """

    def place_of(self, path: str | os.PathLike[str]) -> str | os.PathLike[str]:
        """Where a file is written that is asked for under a path.

        Args:
            path: The path.

        Raises:
            ConfigurationError: It is a URL, or a directory is there.
        """
        return check_lightning_file(path)

    def place_beside(self, path: str | os.PathLike[str], root: str) -> str:
        """Where all processes write the shards that a file is then made of, for a moment.

        Args:
            path: What `place_of` returned.
            root: The default directory of the run.
        """
        folder, name = os.path.split(os.fspath(path))
        return os.path.join(folder, f".{name}.whole")

    def write(self, path: str | os.PathLike[str], content: dict[str, Any], objects: bool) -> None:
        """Write a file, which appears complete or not at all.

        Args:
            path: What `place_of` returned.
            content: The checkpoint, with Lightning's entries.
            objects: Whether objects in it are pickled.

        Raises:
            CheckpointError: It cannot be written.
        """
        write_lightning_content(path, content, objects)

    def read(self, path: str) -> Mapping[str, Any] | None:
        """The content of a file, or None where it is read as any other.

        Args:
            path: The path.
        """
        return None

    def remove(self, path: str) -> None:
        """Remove a checkpoint, or a link to one.

        Args:
            path: The path.

        Raises:
            CheckpointError: It could not be removed, or is no checkpoint.
            OSError: The same of a link.
        """
        if os.path.islink(path):
            os.unlink(path)
        else:
            remove_checkpoint(path)

    def may_replace(self, path: str, as_file: bool) -> bool:
        """Whether one of the run's own paths may be written again, which Lightning's own files never are.

        Args:
            path: The path.
            as_file: Whether a file is to be written, rather than a directory.
        """
        if os.path.islink(path):
            target = os.path.realpath(path)
            return not os.path.isfile(target) or is_checkpoint(target)
        return is_checkpoint(path) if as_file else not os.path.isfile(path)

    def has_second_names(self, directory: str) -> bool:
        """Whether a checkpoint in a directory can get a second name, rather than be written twice.

        Args:
            directory: The directory or URL.
        """
        return isinstance(storage_of(directory)[0], LocalStorage)
