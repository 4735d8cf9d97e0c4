"""Files in Lightning's format that this package has written: how they appear, and how they are known again."""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Mapping, Sequence
from pickle import PicklingError
from typing import Any, BinaryIO

import torch

from drivetrain.checkpoint.lightning_extras import KEY, Extras
from drivetrain.checkpoint.lightning_format import lightning_state
from drivetrain.checkpoint.manifest import clean_stale_files, has_manifest, writer_token
from drivetrain.checkpoint.storage import LocalStorage, storage_of
from drivetrain.checkpoint.torch_files import plain_classes, refused_classes
from drivetrain.checkpoint.tree import pack
from drivetrain.runtime.errors import CheckpointError, ConfigurationError
from drivetrain.runtime.logging import get_logger

logger = get_logger(__name__)

_UNPICKLABLE = (PicklingError, AttributeError, TypeError)
"""What pickling an object may raise."""
_ZIP = b"PK\x03\x04"
_PICKLED = ("hooks", "hyper_parameters", "datamodule_hyper_parameters")
"""The entries that may hold objects: what `on_save_checkpoint` changes."""
_RECORD = "drivetrain.pt"
"""The part of a file with objects that holds our entry once more: the whole file would have to be unpickled for it."""


def lightning_content(
    path: str | os.PathLike[str],
    shared: Mapping[str, Any],
    processes: Sequence[Mapping[str, Any]],
    *,
    datamodule: str | None = None,
    callbacks: Mapping[str, Any] | None = None,
    epoch_length: float = float("inf"),
    objects: bool = False,
) -> dict[str, Any]:
    """What a `.ckpt` file that Lightning opens holds of the state of a Trainer's run.

    Args:
        path: The file, for messages.
        shared: The shared state, whole, in the schema of `drivetrain.checkpoint.manifest`.
        processes: What each process keeps of its own, by rank, packed.
        datamodule: The name of the data module's class, under which Lightning looks for its state.
        callbacks: States of callbacks that differ in Lightning, by their keys.
        epoch_length: Batches of a process in an epoch, where it is known.
        objects: Whether objects among the hyper-parameters and in what hooks have added stay, to be pickled with a
            warning, as Lightning does it; else they are refused.

    Raises:
        CheckpointError: It is not the state of a Trainer, or holds an object.
    """
    if "progress" not in shared["driver"] or len(shared["engine"].get("models", ())) != 1:
        raise CheckpointError(
            f"{os.fspath(path)} would not be the state of a Trainer with one model, so Lightning could not open it."
        )
    plain = {name: value for name, value in shared["driver"].items() if not (objects and name in _PICKLED)}
    pack({**shared, "driver": plain})  # refuses objects, by their place
    return lightning_state(shared, processes, datamodule, callbacks, epoch_length)


def write_lightning_content(path: str | os.PathLike[str], content: Mapping[str, Any], objects: bool = False) -> None:
    """Write what a checkpoint of Lightning's holds to a local file, on one process.

    The file appears complete or not at all.

    Args:
        path: The file, which is replaced where there is one.
        content: The checkpoint.
        objects: Whether it may hold objects, which are pickled with a warning.

    Raises:
        CheckpointError: It cannot be written.
        ConfigurationError: `path` is a URL or a directory.
    """
    target = check_lightning_file(path)
    folder, name = os.path.split(target)
    place = os.path.join(folder, f".{name}.{writer_token()}.writing")
    try:
        os.makedirs(folder, exist_ok=True)
        clean_stale_files(folder)
        with open(place, "w+b") as file:
            torch.save(content, file)
            file.flush()
            if objects and (classes := refused_classes(place)):
                if KEY in content:
                    _add_record(file, content[KEY])
                _warn_of(classes)
            file.flush()
            os.fsync(file.fileno())
        os.replace(place, target)
    except (OSError, RuntimeError, *_UNPICKLABLE) as error:
        if os.path.lexists(place):
            os.unlink(place)
        raise CheckpointError(f"{target} could not be written: {error}.") from error


def check_lightning_file(path: str | os.PathLike[str]) -> str:
    """The local path of a file of Lightning's that is to be written.

    Raises:
        ConfigurationError: It is a URL, or a directory is there.
    """
    storage, target = storage_of(path)
    if not isinstance(storage, LocalStorage):
        raise ConfigurationError(
            f"{os.fspath(path)} is a URL. Write a file of Lightning's locally, and copy it there.", code="DT-003"
        )
    if os.path.isdir(target) and not os.path.islink(target):
        what = "a checkpoint of drivetrain" if has_manifest(storage, target) else "a directory"
        raise ConfigurationError(
            f"{target} is {what}. Name another file for Lightning's format, or remove it.", code="DT-009"
        )
    return target


def extras_at(path: str) -> Extras | None:
    """What a local file holds beside Lightning's entries; None where there is no file that this package has written.

    The weights are not read.

    Args:
        path: The file. A link is none.
    """
    try:
        if os.path.islink(path) or not os.path.isfile(path) or not _begins_as_zip(path):
            return None
        record = _record_in(path)
        with torch.serialization.safe_globals(plain_classes()):
            if record is not None:
                content = {KEY: torch.load(io.BytesIO(record), map_location="cpu", weights_only=True)}
            else:
                content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        return Extras.of(content, path)
    except Exception:  # whatever torch raises of a file that is something else
        return None


def _begins_as_zip(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(len(_ZIP)) == _ZIP


def _add_record(file: BinaryIO, entry: Any) -> None:
    """Put our entry into a file of `torch.save` as a part of its own, which `torch.load` passes over."""
    content = io.BytesIO()
    torch.save(entry, content)
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr(f"{_top(archive)}/{_RECORD}", content.getvalue())


def _record_in(path: str) -> bytes | None:
    """What `_add_record` has put into a file; None where it has not."""
    with zipfile.ZipFile(path) as archive:
        name = f"{_top(archive)}/{_RECORD}"
        return archive.read(name) if name in archive.NameToInfo else None


def _top(archive: zipfile.ZipFile) -> str:
    """The folder that everything in a file of `torch.save` is in."""
    return archive.infolist()[0].filename.partition("/")[0]


def _warn_of(classes: list[str]) -> None:
    logger.warning_once(
        f"The checkpoint files of this run hold objects of {', '.join(classes)}, pickled as Lightning does it: they "
        "open with weights_only=False only, which runs whatever code a file holds. Leave objects out by "
        "save_hyperparameters(ignore=[...]), let on_save_checkpoint add tensors and plain values, and files open "
        "without it."
    )
