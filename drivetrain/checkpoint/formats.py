"""Registry of the checkpoint formats of other tools. A format is imported when a path may have it."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar

from drivetrain.checkpoint.manifest import check_is_checkpoint, has_manifest
from drivetrain.checkpoint.storage import LocalStorage, Storage, storage_of
from drivetrain.runtime.errors import CheckpointError, ConfigurationError

if TYPE_CHECKING:
    import torch

    from drivetrain.checkpoint.save import PendingSave

# Module and class of each format, in the order in which they are tried.
_FORMATS = {
    "lightning": "drivetrain.compat.formats.lightning_file:LightningFormat",
    "accelerate": "drivetrain.compat.formats.accelerate:AccelerateFormat",
    "deepspeed": "drivetrain.strategies.deepspeed.zero_state:DeepSpeedFormat",
}


@dataclass(frozen=True)
class WrittenFile:
    """Description of a checkpoint file that a drivetrain run has saved in another tool's format."""

    world_size: int  # processes that wrote the file
    step: int | None
    saved_at: float  # seconds since 1970
    finite_loss: bool  # every loss since the previous save was finite

    def own(self, rank: int) -> dict[str, Any]:
        # The state of one rank alone, such as that of its random generators.
        raise NotImplementedError


class CheckpointFormat:
    """Base class for a checkpoint format of another tool, in which a Trainer can read and save checkpoints.

    To save a Trainer's checkpoints in another format, derive a class and return an instance from
    `Trainer.checkpoint_format`. `save` and `content` are called on all processes, all other methods on one.

    Attributes:
        name: The name that `Trainer.save_checkpoint(format=...)` accepts.
        keeps_objects: True if hyper-parameters and values of hooks may be arbitrary objects. Otherwise a run refuses
            them before training.
        shown_to_hooks: A context manager factory. It yields the checkpoint as `on_save_checkpoint` and
            `on_load_checkpoint` see it. Their changes are saved or restored.
    """

    name: ClassVar[str] = ""
    keeps_objects: bool = False
    shown_to_hooks: Callable[[dict[str, Any]], AbstractContextManager[dict[str, Any]]] = nullcontext

    # existing checkpoints

    def recognises(self, source: Any) -> bool:
        """Return True if a path, a file or its content seems to be a checkpoint in the format of this class.

        Args:
            source: The local path, the opened file or the content.
        """
        return False

    def read(
        self,
        source: str | os.PathLike[str] | BinaryIO | Mapping[str, Any],
        rank: int = 0,
        count: int | None = None,
        given: Collection[str] | None = (),
    ) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """Convert a checkpoint of this format to drivetrain's nested dicts, from which a Trainer restores a run.

        Args:
            source: The checkpoint's path, the opened file or its content.
            rank: The rank whose own state to return.
            count: The number of processes that read the checkpoint. None means as many as wrote it.
            given: Names of hyper-parameters that are not needed, or None if none are. See `read_foreign`.

        Returns:
            The state that all processes share, and the state of `rank` alone or None.
        """
        raise NotImplementedError

    def written(self, path: str) -> WrittenFile | None:
        """Return drivetrain's record in the checkpoint file at `path`, such as the step, or None if there is none.

        Args:
            path: The local file. Links are not allowed.
        """
        return None

    def merge(
        self,
        source: str | os.PathLike[str],
        output: str | os.PathLike[str],
        max_shard_size: int | str,
        dtype: torch.dtype | str | None,
        *,
        model: int | None,
        module: str | None,
        overwrite: bool,
        progress: bool,
    ) -> list[str] | None:
        """Export the weights of a checkpoint as safetensors files.

        Returns the files, or None if the checkpoint has no weights.

        Args:
            source: The local path of the checkpoint.
            output: The directory to write to.
            max_shard_size: The maximum size of a file, in bytes or as text.
            dtype: The dtype to which floating-point weights are converted.
            model: The index of the model to export.
            module: The name of the submodule to export.
            overwrite: True to write into a directory that is not empty.
            progress: True to show a progress bar.
        """
        return None

    # the checkpoints of a Trainer's run

    def save(self, trainer: Any, path: str | os.PathLike[str], weights_only: bool, block: bool) -> PendingSave:
        """Save the current state of a Trainer's run as a checkpoint in the format that this class implements.

        Args:
            trainer: The Trainer.
            path: The path to write to.
            weights_only: True to save only weights and hyper-parameters.
            block: True to return after the checkpoint is written to disk.

        Returns:
            A handle of the save.

        Raises:
            CheckpointError: The checkpoint cannot be written.
            ConfigurationError: The format does not support saving, or not with these options.
        """
        raise ConfigurationError(f"save_checkpoint(format={self.name!r}): this format can only be read, not written.")

    def content(self, path: str) -> Mapping[str, Any] | None:
        """Read the checkpoint from which a Trainer resumes, or return None to let drivetrain read the file.

        Override it for checkpoints that drivetrain cannot read by itself.

        Args:
            path: The checkpoint's path.
        """
        return None

    def remove(self, path: str) -> None:
        """Remove a checkpoint. If the path is a link, only the link is removed.

        Args:
            path: The path.

        Raises:
            CheckpointError: The path could not be removed, or is not a checkpoint.
            OSError: The link could not be removed.
        """
        if os.path.islink(path):
            os.unlink(path)
        else:
            remove_checkpoint(path)

    def may_replace(self, path: str, block: bool) -> bool:
        """Return True if a Trainer may save a checkpoint to `path`, even if this replaces a file that exists there.

        Args:
            path: The path.
            block: True if the save is not in the background.
        """
        if os.path.islink(path):
            target = os.path.realpath(path)
            return not os.path.isfile(target) or is_checkpoint(target)
        return not os.path.isfile(path)

    def has_second_names(self, directory: str) -> bool:
        """Return True if `directory` can hold links to checkpoints, such as `last`, which points to the newest one.

        Args:
            directory: The directory or URL.
        """
        return isinstance(storage_of(directory)[0], LocalStorage)


def find_format(name: str) -> CheckpointFormat:
    """Return the checkpoint format with a given name.

    Raises:
        ConfigurationError: The name is unknown, or the format is not part of this installation.
    """
    if name not in _FORMATS:
        raise ConfigurationError(
            f"save_checkpoint(format={name!r}): use 'drivetrain', {', '.join(map(repr, _FORMATS))}, or omit format."
        )
    module, _, attribute = _FORMATS[name].partition(":")
    if not _is_there(module):
        raise ConfigurationError(
            f"The checkpoint format {name!r} needs {module}, which is not installed. Install drivetrain again.",
        )
    made: CheckpointFormat = getattr(import_module(module), attribute)()
    return made


def has_format(name: str) -> bool:
    """Return True if the checkpoint format of this name is installed."""
    return _is_there(_FORMATS[name].partition(":")[0])


def formats() -> Iterator[CheckpointFormat]:
    """Iterate over the installed checkpoint formats, importing each when it is reached."""
    return (find_format(name) for name in _FORMATS if has_format(name))


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its package is missing too
        return False


def read_foreign(
    path: str | os.PathLike[str] | BinaryIO | Mapping[str, Any],
    rank: int = 0,
    count: int | None = None,
    given: Collection[str] | None = (),
) -> tuple[dict[str, Any], dict[str, Any] | None] | None:
    """Read another tool's checkpoint as the state dicts of a drivetrain run, without running code from the file.

    Args:
        path: A local file or directory, an opened file, or its content.
        rank: The rank whose random state to read, if there is one.
        count: The number of processes that read the checkpoint. None means as many as wrote it.
        given: Names of hyper-parameters that are not needed, or None if none are. Objects among these are left out.
            Other objects are refused.

    Returns:
        The shared state and a process's own state, in the schema of `drivetrain.checkpoint.manifest`. None if no format
            recognizes the checkpoint, for example for a drivetrain checkpoint. The own state is None if drivetrain
            wrote the file with another number of processes.

    Raises:
        CheckpointError: The checkpoint cannot be read, or would have to be unpickled.
    """
    place = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if place is not None and has_manifest(*storage_of(place)):
        return None
    for each in formats():
        if each.recognises(path):
            return each.read(path, rank, count, given)
    missing = [name for name in _FORMATS if not has_format(name)]
    if missing and (place is None or os.path.exists(place)):
        raise CheckpointError(
            f"{place or 'The checkpoint'} is not a drivetrain checkpoint, which is a directory with a MANIFEST.json. "
            f"The formats {', '.join(missing)} are missing from this installation. Install drivetrain again to read "
            "checkpoints in these formats."
        )
    return None


def written_file(path: str) -> WrittenFile | None:
    if os.path.islink(path) or not os.path.isfile(path):
        return None
    return next((found for each in formats() if (found := each.written(path)) is not None), None)


def is_checkpoint(directory: str | os.PathLike[str]) -> bool:
    """Return True if drivetrain wrote the checkpoint at a path.

    Other files are never removed or replaced.

    A directory must have a `MANIFEST.json` of this format, even a damaged one. A file in another tool's format must
    have an entry of drivetrain.

    Args:
        directory: The directory, file or URL.
    """
    storage, path = storage_of(directory)
    if isinstance(storage, LocalStorage) and os.path.isfile(path):
        return written_file(path) is not None
    return has_manifest(storage, path)


def remove_checkpoint(directory: str | os.PathLike[str], *, storage: Storage | None = None) -> None:
    """Remove a drivetrain checkpoint. Call it on one process.

    If it is interrupted, no incomplete checkpoint is left under the old name.

    Only drivetrain checkpoints, and links to them, are removed (see `is_checkpoint`).

    Args:
        directory: The checkpoint's directory, file or URL. Nothing happens if it does not exist.
        storage: The storage of the checkpoint. None selects it from `directory`.

    Raises:
        CheckpointError: The checkpoint could not be removed, or the path is not a checkpoint.
    """
    found, path = storage_of(directory)
    storage = storage or found
    try:
        if not storage.exists(path):
            return
        if isinstance(storage, LocalStorage) and written_file(path) is not None:
            os.unlink(path)
            return
        check_is_checkpoint(storage, path, "is not removed")
        storage.remove(path)
    except OSError as error:
        raise CheckpointError(f"Cannot remove the checkpoint {path}: {error}.") from error


# Keys of callbacks' states, which other tools spell differently

_TIME = re.compile(r"datetime\.timedelta\(([\w=, ]*)\)")


def key_here(key: str) -> str:
    """Convert a callback's key from another tool's notation, `Name{'argument': 1}`, to `Name(argument=1)`.

    Other keys are returned unchanged.
    """
    name, brace, rest = key.partition("{")
    try:
        # literal_eval accepts literals only, so that a key cannot run code.
        found = ast.literal_eval(_TIME.sub(_seconds, brace + rest)) if brace else None
    except (ValueError, SyntaxError, TypeError):
        return key
    if not isinstance(found, dict):
        return key
    return f"{name}({', '.join(f'{argument}={value!r}' for argument, value in found.items())})"


def _seconds(match: re.Match[str]) -> str:
    parts = dict(part.split("=") for part in match[1].split(", ") if part)
    return str(timedelta(**{name: float(value) for name, value in parts.items()}).total_seconds())
