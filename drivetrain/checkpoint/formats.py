"""The formats of checkpoints that other tools have, by name; each is imported when a path may be in it."""

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

# The module and class of each format, in the order in which they are asked.
_FORMATS = {
    "lightning": "drivetrain.compat.formats.lightning_file:LightningFormat",
    "accelerate": "drivetrain.compat.formats.accelerate:AccelerateFormat",
    "deepspeed": "drivetrain.strategies.deepspeed.zero_state:DeepSpeedFormat",
}


@dataclass(frozen=True)
class WrittenFile:
    """What a run of this package has noted of itself in a file of another tool's format.

    Attributes:
        world_size: How many processes wrote it.
        step: The optimizer step, if known.
        saved_at: When, in seconds since the epoch.
        finite_loss: Whether every loss since the save before was finite.
    """

    world_size: int
    step: int | None
    saved_at: float
    finite_loss: bool

    def own(self, rank: int) -> dict[str, Any]:
        """Return what one process kept of its own."""
        raise NotImplementedError


class CheckpointFormat:
    """A format of checkpoints: how they are recognised and read, and how a Trainer's run keeps them.

    Derive a class and return one from `Trainer.checkpoint_format` to keep a run's checkpoints in another way. `save`
    and `content` are called by all processes, everything else by one.

    Attributes:
        name: The name, as `Trainer.save_checkpoint(format=...)` takes it.
        keeps_objects: Whether hyper-parameters and what hooks add may be objects. Else a run refuses them at its start.
        shown_to_hooks: Makes what `on_save_checkpoint` and `on_load_checkpoint` run in, which gives the checkpoint as
            they see it. What that is in the end is saved or restored.
    """

    name: ClassVar[str] = ""
    keeps_objects: bool = False
    shown_to_hooks: Callable[[dict[str, Any]], AbstractContextManager[dict[str, Any]]] = nullcontext

    # checkpoints that are there

    def recognises(self, source: Any) -> bool:
        """Return whether a local path, an opened file or its content may be a checkpoint in this format.

        Args:
            source: The path, the file or the content.
        """
        return False

    def read(
        self,
        source: str | os.PathLike[str] | BinaryIO | Mapping[str, Any],
        rank: int = 0,
        count: int | None = None,
        given: Collection[str] | None = (),
    ) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """Read a checkpoint; see `read_foreign`."""
        raise NotImplementedError

    def written(self, path: str) -> WrittenFile | None:
        """Return what this package has noted in a file, or None if it has not written it.

        Args:
            path: The local file; no link.
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
        """Write the weights of a checkpoint as `consolidate` does. Returns the files, or None if there are none.

        Args:
            source: A local path.
            output: As for `consolidate`, as are the others.
            max_shard_size: Bytes in a file at most.
            dtype: What floating-point weights are converted to.
            model: Which model.
            module: Which module.
            overwrite: Whether to write into a directory that holds something.
            progress: Whether to show a progress bar.
        """
        return None

    # the checkpoints of a Trainer's run

    def save(self, trainer: Any, path: str | os.PathLike[str], weights_only: bool, block: bool) -> PendingSave:
        """Write a checkpoint of a run.

        Args:
            trainer: The Trainer.
            path: Where to.
            weights_only: Leave out everything but weights and hyper-parameters.
            block: Whether to return only when it is durable.

        Raises:
            CheckpointError: It cannot be written.
            ConfigurationError: Runs are not saved in this format, or not in this way.
        """
        raise ConfigurationError(f"save_checkpoint(format={self.name!r}): it is only read.")

    def content(self, path: str) -> Mapping[str, Any] | None:
        """Return the content of a checkpoint that is not read from its path as any other; else None.

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

    def may_replace(self, path: str, block: bool) -> bool:
        """Return whether one of the run's own paths may be written again.

        Args:
            path: The path.
            block: Whether it is written at once.
        """
        if os.path.islink(path):
            target = os.path.realpath(path)
            return not os.path.isfile(target) or is_checkpoint(target)
        return not os.path.isfile(path)

    def has_second_names(self, directory: str) -> bool:
        """Return whether a checkpoint in a directory can get a second name, rather than be written twice.

        Args:
            directory: The directory or URL.
        """
        return isinstance(storage_of(directory)[0], LocalStorage)


def find_format(name: str) -> CheckpointFormat:
    """Return a format by its name.

    Raises:
        ConfigurationError: There is none of this name, or this installation was made without it.
    """
    if name not in _FORMATS:
        raise ConfigurationError(
            f"save_checkpoint(format={name!r}): give 'drivetrain', {', '.join(map(repr, _FORMATS))}, or leave it out."
        )
    module, _, attribute = _FORMATS[name].partition(":")
    if not _is_there(module):
        raise ConfigurationError(
            f"The checkpoint format {name!r}: {module} is not a part of this installation. Install drivetrain again.",
        )
    made: CheckpointFormat = getattr(import_module(module), attribute)()
    return made


def has_format(name: str) -> bool:
    """Return whether this installation has a format."""
    return _is_there(_FORMATS[name].partition(":")[0])


def formats() -> Iterator[CheckpointFormat]:
    """Yield each format that this installation has; the next one is imported when it is asked for."""
    return (find_format(name) for name in _FORMATS if has_format(name))


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the folder that it is in
        return False


def read_foreign(
    path: str | os.PathLike[str] | BinaryIO | Mapping[str, Any],
    rank: int = 0,
    count: int | None = None,
    given: Collection[str] | None = (),
) -> tuple[dict[str, Any], dict[str, Any] | None] | None:
    """Read a checkpoint in the format of another tool, alone. Nothing in it is executed.

    Args:
        path: A local file or directory; or an opened file, or what one holds.
        rank: Whose random state to read, if there is one.
        count: How many processes read it; as many as wrote it if None.
        given: The hyper-parameters that are not needed; None if none is. Objects among these are left out rather than
            refused.

    Returns:
        The shared state and a process's own, in the schema of `drivetrain.checkpoint.manifest`; None if no format
        recognises the checkpoint, such as a directory of this package. The second is None too if this package
        wrote the file from another number of processes.

    Raises:
        CheckpointError: It cannot be read, or holds what would have to be unpickled.
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
            f"{place or 'The checkpoint'} is no checkpoint of drivetrain, which is a directory "
            f"with a MANIFEST.json. The formats {', '.join(missing)} are not a part of this installation. Install "
            "drivetrain again to read those."
        )
    return None


def written_file(path: str) -> WrittenFile | None:
    """Return what this package has noted in a file of another tool's format, or None if it is no such file.

    The weights are not read.
    """
    if os.path.islink(path) or not os.path.isfile(path):
        return None
    return next((found for each in formats() if (found := each.written(path)) is not None), None)


def is_checkpoint(directory: str | os.PathLike[str]) -> bool:
    """Whether this package has written a checkpoint: only such a one is ever removed.

    A directory has a `MANIFEST.json` of ours then, whole or not, and a file in another tool's format an entry of ours.

    Args:
        directory: The directory, file or URL.
    """
    storage, path = storage_of(directory)
    if isinstance(storage, LocalStorage) and os.path.isfile(path):
        return written_file(path) is not None
    return has_manifest(storage, path)


def remove_checkpoint(directory: str | os.PathLike[str], *, storage: Storage | None = None) -> None:
    """Remove a checkpoint, on one process. Nothing is found under its name from the first moment on.

    Only a directory with a `MANIFEST.json` of ours is removed, a link to one, or a file in another tool's format
    with an entry of ours; never anything else.

    Args:
        directory: The checkpoint's directory, file or URL; nothing happens where there is none.
        storage: Where it is; found from `directory` if None.

    Raises:
        CheckpointError: It could not be removed, or is no checkpoint.
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
        raise CheckpointError(f"{path} could not be removed: {error}.") from error


# The keys of callbacks' states, which other tools spell in another way

_TIME = re.compile(r"datetime\.timedelta\(([\w=, ]*)\)")


def key_here(key: str) -> str:
    """Return `Name{'argument': value}` as `Name(argument=value)`, and any other key as it is."""
    name, brace, rest = key.partition("{")
    try:
        found = ast.literal_eval(_TIME.sub(_seconds, brace + rest)) if brace else None
    except (ValueError, SyntaxError, TypeError):
        return key
    if not isinstance(found, dict):
        return key
    return f"{name}({', '.join(f'{argument}={value!r}' for argument, value in found.items())})"


def _seconds(match: re.Match[str]) -> str:
    parts = dict(part.split("=") for part in match[1].split(", ") if part)
    return str(timedelta(**{name: float(value) for name, value in parts.items()}).total_seconds())
