"""Write and locate checkpoint files in Lightning's format."""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pickle import PicklingError
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
from torch import Tensor

from drivetrain import checkpoint
from drivetrain.callbacks.step_schedule import decide_on_main_process
from drivetrain.checkpoint.formats import CheckpointFormat
from drivetrain.checkpoint.manifest import has_manifest
from drivetrain.checkpoint.storage import LocalStorage, clean_stale, storage_of, writer_token
from drivetrain.checkpoint.torch_files import TorchShards, plain_classes, refused_classes
from drivetrain.checkpoint.tree import pack, packed
from drivetrain.compat.formats.lightning import (
    KEY,
    Extras,
    is_lightning_checkpoint,
    lightning_state,
    read_lightning_state,
)
from drivetrain.runtime.collectives import gather_object
from drivetrain.runtime.errors import CheckpointError, ConfigurationError
from drivetrain.runtime.logging import get_logger

if TYPE_CHECKING:
    from drivetrain.callbacks.model_checkpoint import ModelCheckpoint
    from drivetrain.trainer.trainer import Trainer

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
    """Return the content of a `.ckpt` file, which Lightning can open, from the state of a run."""
    if "progress" not in shared["driver"] or len(shared["engine"].get("models", ())) != 1:
        raise CheckpointError(
            f"{os.fspath(path)} would not be the state of a Trainer with one model, so Lightning could not open it."
        )
    plain = {name: value for name, value in shared["driver"].items() if not (objects and name in _PICKLED)}
    pack({**shared, "driver": plain})  # refuses objects, by their place
    return lightning_state(shared, processes, datamodule, callbacks, epoch_length)


def write_lightning_content(path: str | os.PathLike[str], content: Mapping[str, Any], objects: bool = False) -> None:
    """Write the content of a Lightning checkpoint to a local file, on one process.

    The file appears complete or not at all.
    """
    target = check_lightning_file(path)
    folder, name = os.path.split(target)
    place = os.path.join(folder, f".{name}.{writer_token()}.writing")
    try:
        os.makedirs(folder, exist_ok=True)
        clean_stale(folder)
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
    """Return the local path of a Lightning file to write. Raise `ConfigurationError` for URLs."""
    storage, target = storage_of(path)
    if not isinstance(storage, LocalStorage):
        raise ConfigurationError(f"{os.fspath(path)} is a URL. Write a file of Lightning's locally, and copy it there.")
    if os.path.isdir(target) and not os.path.islink(target):
        what = "a checkpoint of drivetrain" if has_manifest(storage, target) else "a directory"
        raise ConfigurationError(f"{target} is {what}. Name another file for Lightning's format, or remove it.")
    return target


def extras_at(path: str) -> Extras | None:
    """Return this package's entry of a local Lightning file, or None if it has none.

    The weights are not read.
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
    except Exception:  # torch raises various errors for files of other formats
        return None


def _begins_as_zip(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(len(_ZIP)) == _ZIP


def _add_record(file: BinaryIO, entry: Any) -> None:
    """Append this package's entry to a file of `torch.save` as a record that `torch.load` ignores."""
    content = io.BytesIO()
    torch.save(entry, content)
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr(f"{_top(archive)}/{_RECORD}", content.getvalue())


def _record_in(path: str) -> bytes | None:
    """Return the record that `_add_record` appended, or None."""
    with zipfile.ZipFile(path) as archive:
        name = f"{_top(archive)}/{_RECORD}"
        return archive.read(name) if name in archive.NameToInfo else None


def _top(archive: zipfile.ZipFile) -> str:
    """Return the name of the top-level folder in a file of `torch.save`."""
    return archive.infolist()[0].filename.partition("/")[0]


def _warn_of(classes: list[str]) -> None:
    logger.warning_once(
        f"The checkpoint files of this run hold objects of {', '.join(classes)}, pickled as Lightning does it: they "
        "open with weights_only=False only, which runs whatever code a file holds. Leave objects out by "
        "save_hyperparameters(ignore=[...]), let on_save_checkpoint add tensors and plain values, and files open "
        "without it."
    )


class LightningFormat(CheckpointFormat):
    """Checkpoint format that writes one `.ckpt` file per checkpoint, which Lightning can open.

    The main process writes the file. If the state is sharded, all processes first write a temporary checkpoint beside
    it, from which the file is made.
    """

    name = "lightning"

    # existing checkpoints

    def recognises(self, source: Any) -> bool:
        return not isinstance(source, str | os.PathLike) or is_lightning_checkpoint(source)

    def read(
        self,
        source: str | os.PathLike[str] | BinaryIO | Mapping[str, Any],
        rank: int = 0,
        count: int | None = None,
        given: Collection[str] | None = (),
    ) -> tuple[dict[str, Any], dict[str, Any] | None]:
        return read_lightning_state(source, rank, count, given)

    def written(self, path: str) -> Extras | None:
        return extras_at(path)

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
        from drivetrain.checkpoint.export import consolidate_shards, parse_dtype, save_safetensors, weights_below

        if not is_lightning_checkpoint(source):
            return None
        if os.path.isdir(source) and TorchShards(source).names_below("model"):
            return consolidate_shards(
                source, output, max_shard_size, dtype, module=module, overwrite=overwrite, progress=progress
            )
        found = weights_below(_weights_in_file(source, model, parse_dtype(dtype)), module, os.fspath(source))
        return save_safetensors(found, output, max_shard_size, overwrite=overwrite, progress=progress)

    # the checkpoints of a Trainer's run

    def save(
        self, trainer: Trainer, path: str | os.PathLike[str], weights_only: bool, block: bool
    ) -> checkpoint.PendingSave:
        from drivetrain.trainer.state.saved_run import DIRECTORIES

        if not block:
            raise ConfigurationError(
                "save_checkpoint(format='lightning', block=False): it is written at once. Leave block out.",
            )
        target = decide_on_main_process(lambda: self.place_of(path))
        if trainer.strategy.state.held_as == "whole":
            write = partial(self._write_whole, trainer)
            return DIRECTORIES.save(trainer, target, weights_only, write=write, keeps_objects=self.keeps_objects)
        beside = self.place_beside(target, trainer.default_root_dir)
        DIRECTORIES.save(trainer, beside, weights_only)

        def write_of_shards() -> None:
            try:
                shared, _ = checkpoint.load_run_state(beside, verify="size")
                count, own = checkpoint.read_processes(beside)
                self._write_state(trainer, target, shared, [packed(own(rank)) for rank in range(count)])
            finally:
                checkpoint.remove_checkpoint(beside)

        decide_on_main_process(write_of_shards)
        return checkpoint.PendingSave(os.fspath(target), finished=True)

    def may_replace(self, path: str, block: bool) -> bool:
        if os.path.islink(path):
            return super().may_replace(path, block)
        return checkpoint.is_checkpoint(path)  # Lightning's own files are never replaced

    def place_of(self, path: str | os.PathLike[str]) -> str | os.PathLike[str]:
        """Return the path that the main process writes the file to."""
        return check_lightning_file(path)

    def place_beside(self, path: str | os.PathLike[str], root: str) -> str:
        """Return the temporary folder into which all processes write shards, before one file is made of them."""
        folder, name = os.path.split(os.fspath(path))
        return os.path.join(folder, f".{name}.whole")

    def write(self, path: str | os.PathLike[str], content: dict[str, Any]) -> None:
        """Write a file atomically, on the main process."""
        write_lightning_content(path, content, self.keeps_objects)

    def _write_whole(
        self,
        trainer: Trainer,
        target: str | os.PathLike[str],
        shared: Mapping[str, Any],
        process: Mapping[str, Any],
        **others: Any,
    ) -> checkpoint.PendingSave:
        """Write the full state from the main process, together with each rank's own state."""
        trainer.accelerator.save_queue.finish()
        try:
            mine: dict[str, Any] | str = packed(process, f"process/{trainer.global_rank}")
        except CheckpointError as error:
            mine = str(error)
        processes = gather_object([mine])

        def write() -> None:
            for each in processes:
                if isinstance(each, str):
                    raise CheckpointError(f"The checkpoint {target} was not written: {each}")
            self._write_state(trainer, target, shared, processes)

        decide_on_main_process(write)
        return checkpoint.PendingSave(os.fspath(target), finished=True)

    def _write_state(
        self,
        trainer: Trainer,
        target: str | os.PathLike[str],
        shared: Mapping[str, Any],
        processes: list[dict[str, Any]],
    ) -> None:
        data = trainer.datamodule
        states = {}
        if "optimizers" in shared["engine"]:
            states = {each.state_key: self.state_of(each) for each in trainer.checkpoint_callbacks}
        content = lightning_content(
            target,
            shared,
            processes,
            datamodule=None if data is None else type(data).__qualname__,
            callbacks=states,
            epoch_length=trainer.num_training_batches,
            objects=self.keeps_objects,
        )
        self.write(target, content)

    def state_of(self, callback: Any) -> dict[str, Any]:
        """Return a `ModelCheckpoint` callback's state in Lightning's format."""
        own = getattr(callback, "lightning_state", None)
        state: dict[str, Any] = model_checkpoint_state(callback) if own is None else own()
        return state


def _weights_in_file(path: str | os.PathLike[str], model: int | None, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Return the weights of the one model in a file. Tied weights share one tensor."""
    if model:
        raise CheckpointError(f"{os.fspath(path)} holds 1 model, so there is no model {model}. Leave that out.")
    [state] = read_lightning_state(path)[0]["engine"]["models"]
    made: dict[tuple[Any, ...], Tensor] = {}
    found = {}
    for name, value in state.items():
        if isinstance(value, Tensor):
            identity = (value.data_ptr(), value.dtype, value.shape, value.stride())
            converted = value.to(dtype) if dtype is not None and value.is_floating_point() else value
            found[name] = made.setdefault(identity, converted)
    return found


def model_checkpoint_state(callback: ModelCheckpoint) -> dict[str, Any]:
    """Convert a `ModelCheckpoint` callback's state to Lightning's format.

    Checkpoint directories are left out, because Lightning cannot open them.
    """
    # A checkpoint that is still being written does not exist yet.
    files = {
        path: torch.tensor(float(score)) for path, score in callback.kept_scores.items() if not os.path.isdir(path)
    }
    best, kth, last = (
        "" if os.path.isdir(path) else path
        for path in (callback.best_model_path, callback.kth_best_model_path, callback.last_model_path)
    )
    worst = torch.tensor(float("inf" if callback.mode == "min" else "-inf"))
    score = callback.current_score
    return {
        "monitor": callback.monitor,
        "best_model_score": callback.best_model_score if best else None,
        "best_model_path": best,
        "current_score": None if score is None else torch.tensor(float(score)),
        "dirpath": callback.dirpath,
        "best_k_models": files if callback.monitor is not None else {},
        "kth_best_model_path": kth if callback.monitor is not None else "",
        "kth_value": files.get(kth, worst) if callback.monitor is not None else worst,
        "last_model_path": last,
    }
