"""The checkpoints of Lightning in this package's schema, and back: one `.ckpt` file, or a folder of shards.

They are read with torch's `weights_only`, so nothing in them is executed.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from drivetrain.checkpoint.lightning_extras import KEY, Extras, extras_of
from drivetrain.checkpoint.lightning_keys import key_here, key_there
from drivetrain.checkpoint.lightning_loops import loops_of, progress_of
from drivetrain.checkpoint.manifest import LOSS_IS_FINITE
from drivetrain.checkpoint.torch_files import (
    TorchShards,
    bare_name,
    by_name_or_position,
    check_parts,
    plain_classes,
    read_objects,
    read_pickled,
    refused_classes,
    with_positions,
)
from drivetrain.runtime.errors import CheckpointError

WRITTEN_AS = "2.6.0"
"""The version of Lightning whose schema is written."""

_VERSION = "pytorch-lightning_version"
_REST = "meta.pt"
_SCALERS = ("MixedPrecision", "MixedPrecisionPlugin", "NativeMixedPrecisionPlugin", "native_amp_scaling_state")
_OLDER_HYPER_PARAMETERS = ("hparams", "module_arguments")
_OF_DATA_MODULE = "datamodule_hyper_parameters"
_NAME_OF_DATA = "datamodule_hparams_name"


def is_lightning_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Whether a local path may be a checkpoint of Lightning's: a file, or a folder of shards with its `meta.pt`.

    A checkpoint of this package is a directory with a `MANIFEST.json`.
    """
    place = Path(path)
    return place.is_file() or ((place / _REST).is_file() and TorchShards.is_here(place))


def read_lightning_state(
    source: str | os.PathLike[str] | BinaryIO | Mapping[str, Any],
    rank: int = 0,
    count: int | None = None,
    objects: bool = False,
    given: Collection[str] | None = (),
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Read a checkpoint of Lightning's, of `Trainer.save_checkpoint` or `ModelCheckpoint`.

    Args:
        source: The local file, opened or not, or the folder that a sharded strategy wrote; or what it holds.
        rank: Whose own state to read.
        count: How many processes read it; as many as wrote it if None.
        objects: Whether objects in it are unpickled, which runs whatever code it holds; else it is refused then.
        given: The hyper-parameters that are not needed; None if none is. Objects among these are left out rather than
            refused.

    Returns:
        The shared state in the schema of `drivetrain.checkpoint.manifest`, and a process's own state. That is empty
        where Lightning wrote the file, which has no random state, and None where another number of processes of
        this package did. Optimizers' states name parameters by their position. What is not Lightning's own in the
        file is among the `hooks`, as `on_load_checkpoint` looks for it.

    Raises:
        CheckpointError: It cannot be read, needs classes that only unpickling makes, or is something else.
    """
    path = os.fspath(source) if isinstance(source, str | os.PathLike) else None
    name = path or "The checkpoint"
    found: Any = source
    if path is not None and os.path.isdir(path):
        found = _sharded(Path(path), objects, given)
    elif not isinstance(source, Mapping):
        found = _read(source, name, objects, given)
    if not isinstance(found, Mapping) or not isinstance(found.get("state_dict"), Mapping):
        what = "a dict of tensors" if _is_weights(found) else type(found).__name__
        raise CheckpointError(
            f"{name} is a file, and no checkpoint of Lightning's: it holds {what}, without a 'state_dict'. Give the "
            "directory of a checkpoint of drivetrain, or load plain weights with "
            "drivetrain.load_checkpoint_in_model(model, path)."
        )
    extras = Extras.of(found, name)
    shared = _from_lightning(found, name)
    if extras is None:
        return shared, {"engine": {"random": None}, "driver": {}}
    if path is not None:
        check_parts(path)
    return extras.added_to(shared, found), None if count not in (None, extras.world_size) else extras.own(rank)


def _from_lightning(found: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The shared state of a run from Lightning's own entries."""
    rest = {key: value for key, value in found.items() if key != KEY}
    # The loops and the version stay among what hooks see.
    engine: dict[str, Any] = {"models": [dict(rest.pop("state_dict"))], "classes": {}}
    scaler: dict[str, Any] = next((rest.pop(key) for key in _SCALERS if key in rest), {})
    if "optimizer_states" in rest:
        engine |= {
            "optimizers": [by_name_or_position(each, name) for each in rest.pop("optimizer_states")],
            "schedulers": list(rest.pop("lr_schedulers", ())),
            "loaders": [],
            "registered": [],
            "precision": scaler,
        }
    hyper_parameters: dict[str, Any] = {}
    for key in (*_OLDER_HYPER_PARAMETERS, "hyper_parameters"):
        hyper_parameters |= rest.pop(key, None) or {}
    of_data_module = rest.pop(_OF_DATA_MODULE, None)
    callbacks = rest.pop("callbacks", None) or {}
    driver = {
        "progress": progress_of(rest),
        "hyper_parameters": hyper_parameters,
        _OF_DATA_MODULE: hyper_parameters if of_data_module is None else of_data_module,
        "hparams_name": (name_of_task := rest.pop("hparams_name", None)),
        _NAME_OF_DATA: rest.pop(_NAME_OF_DATA, name_of_task),
        "callbacks": {spelled: state for key, state in callbacks.items() for spelled in (key, key_here(str(key)))},
        "trackers": [],
        "should_stop": False,
        LOSS_IS_FINITE: True,
        "hooks": {key: value for key, value in rest.items() if key not in ("epoch", "global_step")},
    }
    return {"engine": engine, "driver": driver, "kept": []}


def lightning_state(
    shared: Mapping[str, Any],
    processes: Sequence[Mapping[str, Any]],
    datamodule: str | None = None,
    callbacks: Mapping[str, Any] | None = None,
    epoch_length: float = float("inf"),
) -> dict[str, Any]:
    """What a file in Lightning's format holds, from the state of a Trainer's run.

    Args:
        shared: The shared state, in the schema of `drivetrain.checkpoint.manifest`.
        processes: What each process keeps of its own, packed.
        datamodule: The name of the data module's class, if there is one.
        callbacks: States of callbacks that differ in Lightning, by their keys.
        epoch_length: Batches of a process in an epoch, where it is known.

    Returns:
        The content, of tensors and plain values only.
    """
    engine, driver = shared["engine"], shared["driver"]
    progress = driver["progress"]
    loops = loops_of(progress, epoch_length)
    content: dict[str, Any] = {
        "epoch": progress["epoch"],
        "global_step": progress["global_step"],
        _VERSION: WRITTEN_AS,
        "state_dict": engine["models"][0],
        "loops": loops,
    }
    if "optimizers" in engine:
        states = {**driver.get("callbacks", {}), **(callbacks or {})}
        content |= {
            "callbacks": {key_there(key): _state_there(state) for key, state in states.items()},
            "optimizer_states": [with_positions(each) for each in engine["optimizers"]],
            "lr_schedulers": engine["schedulers"],
        }
        if engine.get("precision"):
            content["MixedPrecision"] = engine["precision"]
    if driver.get("hyper_parameters"):
        content |= {
            "hparams_name": driver.get("hparams_name") or "kwargs",
            "hyper_parameters": driver["hyper_parameters"],
        }
    if driver.get(_OF_DATA_MODULE):
        content |= {_NAME_OF_DATA: driver.get(_NAME_OF_DATA) or "kwargs", _OF_DATA_MODULE: driver[_OF_DATA_MODULE]}
    if driver.get("datamodule"):
        datamodule = datamodule or "datamodule"
        content[datamodule] = driver["datamodule"]
    hooks = {key: value for key, value in driver.get("hooks", {}).items() if key not in content}
    return {**hooks, **content, KEY: extras_of(shared, content, processes, datamodule)}


def _read(source: Any, name: str, objects: bool, given: Collection[str] | None) -> Any:
    data = source if hasattr(source, "read") else None
    if objects:
        return read_objects(name, data)
    classes = refused_classes(source)
    found = _without_objects(name, data, classes, given) if classes and (given is None or given) else None
    if found is not None:
        return found
    if classes:
        raise CheckpointError(
            f"{name} holds objects of {', '.join(classes)}, which only unpickling makes. That could run code, so it is "
            "not read. Where you trust the file, write it without them once, such as with: "
            "c = torch.load(path, weights_only=False); c['hyper_parameters'] = {}; torch.save(c, new_path). Then give "
            "those arguments to load_from_checkpoint(new_path, name=value). A script written for Lightning opens it "
            "with weights_only=False."
        )
    return read_pickled(name, plain_classes(), data)


class _LeftOut:
    """Takes the place of an object in a file, whose class is neither imported nor called."""

    def __new__(cls, *args: Any, **kwargs: Any) -> _LeftOut:
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        pass


def _without_objects(
    name: str, data: BinaryIO | None, classes: list[str], given: Collection[str] | None
) -> dict[str, Any] | None:
    """Read a file without hyper-parameters that are objects, or hold some. Returns None if others are objects."""
    try:
        found = read_pickled(name, [*plain_classes(), *((_LeftOut, each) for each in classes)], data)
    except CheckpointError:
        return None
    for entry in (*_OLDER_HYPER_PARAMETERS, "hyper_parameters", _OF_DATA_MODULE):
        if isinstance(found, dict) and isinstance(found.get(entry), Mapping):
            gone = {key for key, each in found[entry].items() if _has_left_out((key, each))}
            kept = {key: each for key, each in found[entry].items() if key not in gone}
            found[entry] = kept if given is None or gone <= set(given) else found[entry]
    return None if _has_left_out(found) else found


def _has_left_out(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_has_left_out(each) for pair in value.items() for each in pair)
    if isinstance(value, list | tuple | set | frozenset):
        return any(map(_has_left_out, value))
    return value is _LeftOut or isinstance(value, _LeftOut)


def _sharded(folder: Path, objects: bool, given: Collection[str] | None) -> dict[str, Any]:
    """What a sharded strategy wrote: tensors in the shards, and everything else in a file beside them."""
    rest = _read(folder / _REST, os.fspath(folder / _REST), objects, given)
    if not isinstance(rest, Mapping):
        raise CheckpointError(f"{folder / _REST} holds a {type(rest).__name__} rather than the rest of a checkpoint.")
    parts = TorchShards(folder).whole()
    weights = parts.get("model", parts.get("state_dict"))
    if not isinstance(weights, Mapping):
        raise CheckpointError(f"{folder} holds {sorted(map(str, parts))}, and no weights under 'model'.")
    found = {**rest, "state_dict": {bare_name(key): value for key, value in _flat(weights).items()}}
    numbers = sorted(int(key.removeprefix("optimizer_")) for key in parts if str(key).startswith("optimizer_"))
    if numbers:
        found["optimizer_states"] = [parts[f"optimizer_{number}"] for number in numbers]
    return found


def _flat(nested: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Tensors by their whole name."""
    found: dict[str, Any] = {}
    for key, value in nested.items():
        found |= _flat(value, f"{before}{key}.") if isinstance(value, Mapping) else {f"{before}{key}": value}
    return found


def _state_there(state: Any) -> Any:
    """A callback's state for Lightning, whose `EarlyStopping` keeps its best score as a tensor."""
    if isinstance(state, Mapping) and isinstance(state.get("best_score"), float):
        return {**state, "best_score": torch.tensor(state["best_score"])}
    return state


def _is_weights(found: Any) -> bool:
    return isinstance(found, Mapping) and bool(found) and all(isinstance(value, Tensor) for value in found.values())
