"""Convert Lightning checkpoints (a `.ckpt` file, or a folder of shards) to this package's schema and back.

Files are read with `weights_only=True`, so they execute no code. Files of this package have an additional entry
`drivetrain` with all state that Lightning's format lacks: data order, random states, running means and counters of
every rank. A run therefore resumes as exactly as from a checkpoint directory.
"""

from __future__ import annotations

import ast
import os
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from drivetrain.checkpoint.formats import WrittenFile, key_here
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
from drivetrain.checkpoint.tree import packed, unpack
from drivetrain.runtime.errors import CheckpointError, DamagedCheckpointError

# Keys of callback states: Lightning's `EarlyStopping{'mode': 'min'}` is `EarlyStopping(mode='min')` here. Lightning
# writes durations as `datetime.timedelta(...)`, and this package as seconds.

_TIMES = ("train_time_interval",)


def key_there(key: str) -> str:
    """Convert a callback's state key to Lightning's spelling. Other keys are returned unchanged."""
    try:
        call = ast.parse(key, mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return key
        values = {str(one.arg): ast.literal_eval(one.value) for one in call.keywords}
    except (ValueError, SyntaxError):
        return key
    written = ", ".join(f"{argument!r}: {_written(argument, value)}" for argument, value in values.items())
    return f"{key.partition('(')[0]}{{{written}}}"


def _written(argument: str, value: Any) -> str:
    return repr(timedelta(seconds=value)) if argument in _TIMES and value is not None else repr(value)


def completed(state: Any) -> Any:
    """Add the entries that this package needs to the state of Lightning's `ModelCheckpoint`.

    The values are not validated here but when the callback loads them.
    """
    best = state.get("best_k_models") if isinstance(state, Mapping) else None
    if not isinstance(best, Mapping):
        return state
    newest = state.get("best_model_path") or ""
    score = state.get("current_score")
    # Without `monitor`, Lightning stores only the path of its one checkpoint.
    scores = [[path, _number(value)] for path, value in best.items()] or ([[newest, 0.0]] if newest else [])
    return {
        **state,
        **dict.fromkeys(("validations", "judged", "last_step"), 0),
        "best_k_models": scores,
        "newest_of_best": newest,
        "last_model_path": state.get("last_model_path") or "",
        "newest_model_path": next(reversed(best), newest),
        "current_score": None if score is None else _number(score),
        "beside": "",
        "passing": [],
        "doomed": [],
        "waits_for_validation": False,
    }


def _number(value: Any) -> Any:
    """Convert a one-element tensor to a float. Other values are returned unchanged."""
    return float(value) if isinstance(value, Tensor) and value.numel() == 1 else value


# Counters of a run. Lightning counts batches and epochs as ready, started, processed and completed. Here, a batch is
# done once it is processed, because a checkpoint from its end hook has not counted it as completed yet.

_EPOCHS = "epoch_progress"
_BATCHES = "epoch_loop.batch_progress"
_VALIDATION = "epoch_loop.val_loop.batch_progress"
_STEPS = "epoch_loop.automatic_optimization.optim_progress"
_STEPS_BY_HAND = "epoch_loop.manual_optimization.optim_step_progress"


def progress_of(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's counters from a Lightning checkpoint."""
    loops = found.get("loops")
    fit = loops.get("fit_loop") if isinstance(loops, Mapping) else None
    epoch, done, total, phase, is_validated = int(found.get("epoch", 0)), 0, 0, "BATCHES", True
    if isinstance(fit, Mapping) and _EPOCHS in fit and _BATCHES in fit:
        epochs, batches = fit[_EPOCHS]["current"], fit[_BATCHES]
        epoch = int(epochs["processed"])
        total = int(batches.get("total", {}).get("processed", 0))
        if epochs["started"] > epoch:  # within an epoch
            done = int(batches["current"]["processed"])
            phase = "SCHEDULED" if done and batches.get("is_last_batch") else "BATCHES"
            ends_batch = batches["current"]["completed"] < done
            # At an epoch's end the validation runs again: callbacks monitor its values, which the file does not
            # contain.
            is_validated = phase == "BATCHES" and not ends_batch and not _is_within_validation(fit)
    return {
        "global_step": int(found.get("global_step", 0)),
        "epoch": epoch,
        "batches_in_epoch": done,
        "total_batches": total,
        "validations": 0,
        "validated_at": total if is_validated else total - 1,
        "due_at": -1,
        "phase": phase,
    }


def _is_within_validation(fit: Mapping[str, Any]) -> bool:
    validation = fit.get(_VALIDATION)
    if not isinstance(validation, Mapping):
        return False
    current = validation["current"]
    return bool(current["ready"]) and not (current["completed"] == current["ready"] and validation["is_last_batch"])


def loops_of(progress: Mapping[str, Any], epoch_length: float = float("inf")) -> dict[str, Any]:
    """Convert a Trainer's counters to the entry `loops` of a Lightning checkpoint."""
    epoch, steps, total = progress["epoch"], progress["global_step"], progress["total_batches"]
    done, phase = progress["batches_in_epoch"], progress["phase"]
    is_between = phase == "BATCHES" and done == 0
    is_closed = is_between or phase == "CLOSING"
    is_last = phase != "BATCHES" or (is_between and total > 0) or done >= epoch_length
    # Lightning then starts the next epoch. Otherwise end hooks would run without the values of the validation.
    ends_batch = not is_closed and (is_last or progress["validated_at"] != total)
    if is_between:
        epochs = _counts(epoch, epoch, epoch, epoch)
        done = total // epoch if epoch else 0
    else:
        processed = epoch + is_closed
        epochs = _counts(epoch + 1, epoch + 1, processed, epoch)
    fit = {
        "state_dict": {},
        "epoch_loop.state_dict": {"_batches_that_stepped": max(steps - ends_batch, 0)},
        _BATCHES: {
            **_both(_counts(done, done, done, done - ends_batch), _counts(total, total, total, total - ends_batch)),
            "is_last_batch": is_last,
        },
        "epoch_loop.scheduler_progress": _both(_ready(0), _ready(0)),
        "epoch_loop.automatic_optimization.state_dict": {},
        _STEPS: {
            "optimizer": {
                "step": _both(_ready(0), _ready(steps)),
                "zero_grad": _both(_started(0), _started(steps)),
            }
        },
        "epoch_loop.manual_optimization.state_dict": {},
        _STEPS_BY_HAND: _both(_ready(0), _ready(steps)),
        "epoch_loop.val_loop.state_dict": {},
        _VALIDATION: _no_batches(),
        _EPOCHS: {"total": dict(epochs), "current": dict(epochs)},
    }
    evaluation = {"state_dict": {}, "batch_progress": _no_batches()}
    predicting = {"state_dict": {}, "batch_progress": _both(_counts(0, 0, 0, 0), _counts(0, 0, 0, 0))}
    return {
        "fit_loop": fit,
        "validate_loop": evaluation,
        "test_loop": {"state_dict": {}, "batch_progress": _no_batches()},
        "predict_loop": predicting,
    }


def _counts(ready: int, started: int, processed: int, completed: int) -> dict[str, int]:
    return {"ready": ready, "completed": completed, "started": started, "processed": processed}


def _ready(count: int) -> dict[str, int]:
    return {"ready": count, "completed": count}


def _started(count: int) -> dict[str, int]:
    return {"ready": count, "completed": count, "started": count}


def _both(current: dict[str, int], total: dict[str, int]) -> dict[str, Any]:
    return {"total": total, "current": current}


def _no_batches() -> dict[str, Any]:
    return {**_both(_counts(0, 0, 0, 0), _counts(0, 0, 0, 0)), "is_last_batch": False}


# The entry of this package

KEY = "drivetrain"
"""The entry of the file."""

FORMAT = "drivetrain.lightning_file"
VERSION = 1

_ELSEWHERE = ("hyper_parameters", "datamodule_hyper_parameters", "hparams_name", "hooks", "callbacks", "datamodule")


def extras_of(
    shared: Mapping[str, Any],
    content: Mapping[str, Any],
    processes: Sequence[Mapping[str, Any]],
    datamodule: str | None,
) -> dict[str, Any]:
    """Return the entry under `KEY`: the state that Lightning's own entries cannot hold."""
    engine, driver = shared["engine"], shared["driver"]
    there = content.get("callbacks", {})
    rest = {
        "engine": {name: engine[name] for name in ("loaders", "registered", "precision", "classes") if name in engine},
        "driver": {name: value for name, value in driver.items() if name not in _ELSEWHERE},
        # Lightning stores scores as float32 tensors, and less state than this package.
        "callbacks": {
            key: state for key, state in driver.get("callbacks", {}).items() if there.get(key_there(key)) is not state
        },
        "hparams_name": driver.get("hparams_name"),
        "datamodule": datamodule,
        "kept": list(shared.get("kept", ())),
    }
    return {
        "format": FORMAT,
        "version": VERSION,
        "world_size": len(processes),
        "step": driver.get("progress", {}).get("global_step"),
        "saved_at": time.time(),
        "finite_loss": driver.get(LOSS_IS_FINITE) is not False,
        "shared": packed(rest),
        "processes": list(processes),
    }


@dataclass(frozen=True)
class Extras(WrittenFile):
    """Parsed entry under `KEY` of a Lightning checkpoint.

    Attributes:
        name: The file, for messages.
        entry: The whole entry.
    """

    name: str
    entry: Mapping[str, Any]

    @classmethod
    def of(cls, content: Any, name: str) -> Extras | None:
        """Parse the entry of a checkpoint. Return None if this package did not write one."""
        entry = content.get(KEY) if isinstance(content, Mapping) else None
        if not isinstance(entry, Mapping) or entry.get("format") != FORMAT:
            return None
        if entry.get("version") != VERSION:
            raise CheckpointError(
                f"{name} holds version {entry.get('version')!r} of {KEY}'s entry; this drivetrain reads version "
                f"{VERSION}. Install the version of drivetrain that wrote it, or a later one."
            )
        step, saved_at, processes = entry.get("step"), entry.get("saved_at"), entry.get("processes")
        fits = isinstance(step, int | None) and isinstance(saved_at, int | float)
        if not isinstance(processes, list) or not processes or len(processes) != entry.get("world_size") or not fits:
            raise DamagedCheckpointError(f"{name} is damaged: its entry {KEY!r} is not what a run writes.")
        return cls(len(processes), step, float(saved_at or 0), entry.get("finite_loss") is True, name, entry)

    def own(self, rank: int) -> dict[str, Any]:
        """Return the state that belongs to one rank."""
        return self._unpacked(self.entry["processes"][rank])

    def added_to(self, shared: dict[str, Any], content: Mapping[str, Any]) -> dict[str, Any]:
        """Combine the state from Lightning's entries with the state that only this entry holds.

        Lightning's entries take precedence, in case a script has changed the file: weights, optimizers and step count.
        """
        rest = self._unpacked(self.entry.get("shared"))
        engine, driver, callbacks = (self._part(rest, name) for name in ("engine", "driver", "callbacks"))
        if "optimizers" not in shared["engine"]:
            engine = {name: engine[name] for name in ("classes",) if name in engine}
        found = {"engine": {**shared["engine"], **engine}, "driver": {**shared["driver"], **driver}}
        if self._part(driver, "progress").get("global_step") != shared["driver"]["progress"]["global_step"]:
            found["driver"]["progress"] = shared["driver"]["progress"]
        states = found["driver"].get("callbacks", {})
        ours = {**callbacks, **{key_here(key): completed(state) for key, state in callbacks.items()}}
        found["driver"]["callbacks"] = {**states, **ours}
        found["driver"]["hparams_name"] = rest.get("hparams_name")
        found["driver"]["datamodule"] = content.get(str(rest.get("datamodule"))) or {}
        return {**found, "kept": list(rest.get("kept") or ())}

    def _part(self, state: Mapping[str, Any], name: str) -> dict[str, Any]:
        part = state.get(name)
        if not isinstance(part, dict):
            raise self._damaged()
        return part

    def _unpacked(self, state: Any) -> dict[str, Any]:
        tensors = state.get("tensors") if isinstance(state, Mapping) else None
        if not isinstance(tensors, Mapping) or not all(isinstance(each, Tensor) for each in tensors.values()):
            raise self._damaged()
        try:
            found = unpack(state.get("tree"), tensors.__getitem__, self.name)
        except KeyError as error:
            raise self._damaged() from error
        if not isinstance(found, dict):
            raise self._damaged()
        return found

    def _damaged(self) -> DamagedCheckpointError:
        return DamagedCheckpointError(f"{self.name} is damaged: its entry {KEY!r} is not what a run writes.")


# The whole checkpoint

WRITTEN_AS = "2.6.0"
"""The version of Lightning whose schema is written."""

_VERSION = "pytorch-lightning_version"
_REST = "meta.pt"
_SCALERS = ("MixedPrecision", "MixedPrecisionPlugin", "NativeMixedPrecisionPlugin", "native_amp_scaling_state")
_OLDER_HYPER_PARAMETERS = ("hparams", "module_arguments")
_OF_DATA_MODULE = "datamodule_hyper_parameters"
_NAME_OF_DATA = "datamodule_hparams_name"


def is_lightning_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Return True if a local path may be a Lightning checkpoint: a file, or a folder of shards.

    A checkpoint of this package is a directory with a `MANIFEST.json`.
    """
    place = Path(path)
    return place.is_file() or ((place / _REST).is_file() and TorchShards.is_here(place))


class Opened(dict[str, Any]):
    """Content of a Lightning checkpoint. Its string form is the path, for messages."""

    def __init__(self, content: Mapping[str, Any], name: str) -> None:
        super().__init__(content)
        self._name = name

    def __str__(self) -> str:
        return self._name


def opened(
    source: str | os.PathLike[str] | BinaryIO, given: Collection[str] | None = (), objects: bool = False
) -> Opened:
    """Read the content of a Lightning checkpoint."""
    path = os.fspath(source) if isinstance(source, str | os.PathLike) else None
    name = path or "The checkpoint"
    found: Any
    if path is not None and os.path.isdir(path):
        found = _sharded(Path(path), objects, given)
    else:
        found = _read(source, name, objects, given)
    _check(found, name)
    if path is not None and Extras.of(found, name) is not None:
        check_parts(path)
    return Opened(found, name)


def _check(found: Any, name: str) -> None:
    if not isinstance(found, Mapping) or not isinstance(found.get("state_dict"), Mapping):
        what = "a dict of tensors" if _is_weights(found) else type(found).__name__
        raise CheckpointError(
            f"{name} is a file, and no checkpoint of Lightning's: it holds {what}, without a 'state_dict'. Give the "
            "directory of a checkpoint of drivetrain, or load plain weights with "
            "drivetrain.load_checkpoint_in_model(model, path)."
        )


def read_lightning_state(
    source: str | os.PathLike[str] | BinaryIO | Mapping[str, Any],
    rank: int = 0,
    count: int | None = None,
    given: Collection[str] | None = (),
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Read a checkpoint of Lightning's `Trainer.save_checkpoint` or `ModelCheckpoint`."""
    found = source if isinstance(source, Mapping) else opened(source, given)
    name = str(found) if isinstance(found, Opened) else "The checkpoint"
    _check(found, name)
    extras = Extras.of(found, name)
    shared = _from_lightning(found, name)
    if extras is None:
        return shared, {"engine": {"random": None}, "driver": {}}
    return extras.added_to(shared, found), None if count not in (None, extras.world_size) else extras.own(rank)


def _from_lightning(found: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Convert Lightning's entries to the shared state of a run."""
    rest = {key: value for key, value in found.items() if key != KEY}
    # `on_load_checkpoint` hooks see the loops and the version.
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
        # Hooks see the states under Lightning's keys. A callback loads the last one that matches it.
        "callbacks": {**callbacks, **{key_here(str(key)): completed(state) for key, state in callbacks.items()}},
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
    """Convert the state of a Trainer's run to the content of a Lightning checkpoint."""
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
    """Placeholder for an object in a file, whose class is neither imported nor called."""

    def __new__(cls, *args: Any, **kwargs: Any) -> _LeftOut:
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        pass


def _without_objects(
    name: str, data: BinaryIO | None, classes: list[str], given: Collection[str] | None
) -> dict[str, Any] | None:
    """Read a file without hyper-parameters that are objects. Return None if other entries need objects."""
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
    """Read a sharded checkpoint: tensors from the shards, everything else from the file beside them."""
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
    """Flatten a nested dict of tensors to dotted names."""
    found: dict[str, Any] = {}
    for key, value in nested.items():
        found |= _flat(value, f"{before}{key}.") if isinstance(value, Mapping) else {f"{before}{key}": value}
    return found


def _state_there(state: Any) -> Any:
    """Convert a callback's state for Lightning, whose `EarlyStopping` stores its best score as a tensor."""
    if isinstance(state, Mapping) and isinstance(state.get("best_score"), float):
        return {**state, "best_score": torch.tensor(state["best_score"])}
    return state


def _is_weights(found: Any) -> bool:
    return isinstance(found, Mapping) and bool(found) and all(isinstance(value, Tensor) for value in found.values())
