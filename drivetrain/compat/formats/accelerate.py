"""Read checkpoints of Hugging Face Accelerate's `save_state`, and convert them to this package's schema.

Files other than safetensors are pickles. They are read with `weights_only=True`, so they execute no code. A sampler is
pickled as an object, so an unpickler that creates only plain values and placeholders reads it.
"""

from __future__ import annotations

import io
import os
import pickle
import re
import zipfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from drivetrain.checkpoint.export import consolidate_shards, read_weights
from drivetrain.checkpoint.formats import CheckpointFormat, find_format, has_format
from drivetrain.checkpoint.torch_files import TorchShards, bare_name, by_name_or_position, plain_classes, read_pickled
from drivetrain.runtime.errors import CheckpointError
from drivetrain.runtime.seeds import RandomState

_NUMBERED = re.compile(r"(?P<stem>\w+?)(?:_(?P<number>\d+))?(?:\.(?P<suffix>safetensors|bin|pkl))?")
_BY_RANK = re.compile(r"pytorch_model_fsdp(_\d+)?_rank\d+\.bin")
_SHARDED_MODEL = "pytorch_model_fsdp"
_AROUND = ("module.", "_orig_mod.")


class AccelerateFormat(CheckpointFormat):
    """Checkpoint format of Accelerate's `save_state`, and of the model shards that its FSDP writes."""

    name = "accelerate"

    def recognises(self, source: Any) -> bool:
        return isinstance(source, str | os.PathLike) and is_accelerate_state(source)

    def read(
        self,
        source: Any,
        rank: int = 0,
        count: int | None = None,
        given: Collection[str] | None = (),
    ) -> tuple[dict[str, Any], dict[str, Any] | None]:
        return read_accelerate_state(source, rank)

    def merge(self, source: str | os.PathLike[str], *arguments: Any, model: int | None, **options: Any) -> Any:
        shards = sharded_model(source, model)
        return None if shards is None else consolidate_shards(shards, *arguments, **options)


def is_accelerate_state(directory: str | os.PathLike[str]) -> bool:
    """Return True if a local directory is a checkpoint of Accelerate's `save_state`."""
    return (Path(directory) / "random_states_0.pkl").is_file()


def read_accelerate_state(
    directory: str | os.PathLike[str], rank: int = 0
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Read a checkpoint of Accelerate's `save_state`. Return the shared and this rank's state."""
    root = Path(directory)
    _refuse_sharded(root)
    files = {kind: _numbered(root, kind) for kind in ("optimizer", "scheduler", "sampler", "custom_checkpoint")}
    scaler = root / "scaler.pt"
    engine = {
        "models": [_bare_names(_weights(path)) for path in _models(root)],
        "optimizers": [by_name_or_position(_optimizer(path), path) for path in files["optimizer"] or _engines(root)],
        "schedulers": [_read(path) for path in files["scheduler"]],
        "loaders": [_position(path) for path in files["sampler"]],
        "registered": [_read(path) for path in files["custom_checkpoint"]],
        "precision": _read(scaler) if scaler.is_file() else {},
        "classes": {},
    }
    states = root / f"random_states_{rank}.pkl"
    own = None
    if states.is_file():
        own = {"engine": {"random": _random_state(_read(states), rank)}, "driver": {}}
    return {"engine": engine, "driver": {}, "kept": []}, own


def sharded_model(directory: str | os.PathLike[str], number: int | None = None) -> Path | None:
    """Return the folder of model shards that Accelerate's FSDP wrote, or None."""
    root = Path(directory)
    if TorchShards.is_here(root):
        return root
    found = _numbered(root, _SHARDED_MODEL, "") if root.is_dir() else []
    if not found:
        return None
    if (number is None and len(found) > 1) or (number or 0) >= len(found):
        raise CheckpointError(
            f"{root} holds {len(found)} model(s), so number {number} is not one of them. Give the number of one: "
            f"--model 0 to {len(found) - 1}."
        )
    return found[number or 0]


def _refuse_sharded(root: Path) -> None:
    for path in sorted(root.iterdir()):
        if _BY_RANK.fullmatch(path.name):
            raise CheckpointError(
                f"{root} holds {path.name}, FSDP's local state dict, which only as many processes with the same "
                "wrapping can read. Let Accelerate save with SHARDED_STATE_DICT or FULL_STATE_DICT."
            )


def _engine_at(folder: Path) -> Any:
    """Return the format that reads a DeepSpeed engine's folder, or None if it is no such folder."""
    found: Any = find_format("deepspeed") if has_format("deepspeed") else None
    return found if found is not None and found.holds_engine(folder) else None


def _engines(root: Path) -> list[Path]:
    """Return the folders of DeepSpeed engines, each with a model and its optimizer."""
    return [path for path in _numbered(root, "pytorch_model", "") if _engine_at(path) is not None]


def _models(root: Path) -> list[Path]:
    kinds = (("model", "safetensors"), ("pytorch_model", "bin"), (_SHARDED_MODEL, "bin"), (_SHARDED_MODEL, ""))
    for stem, suffix in kinds:
        found = _numbered(root, stem, suffix)
        if found:
            return found
    return _engines(root)


def _numbered(root: Path, kind: str, suffix: str | None = None) -> list[Path]:
    """Return the files of one type ordered by number: `kind.bin`, `kind_1.bin`, or `kind_0.pkl` and so on.

    Folders count as files without a suffix.
    """
    found = []
    for path in root.iterdir():
        match = _NUMBERED.fullmatch(path.name)
        if match is None or match["stem"] != kind or suffix not in (None, match["suffix"] or ""):
            continue
        if match["suffix"] or path.is_dir():
            found.append((int(match["number"] or 0), path))
    return [path for _, path in sorted(found)]


def _weights(path: Path) -> dict[str, torch.Tensor]:
    """Read a model's weights from one file or from shards."""
    if not path.is_dir():
        return read_weights(path)
    engine = _engine_at(path)
    if engine is not None:
        weights: dict[str, torch.Tensor] = engine.weights(path)
        return weights
    shards = TorchShards(path)
    return {name: shards.tensor(key) for key, name in shards.names_below("model").items()}


def _optimizer(path: Path) -> Any:
    """Read an optimizer's state from one file or from shards."""
    engine = _engine_at(path)
    if engine is not None:
        return engine.optimizer(path)
    return TorchShards(path).whole().get("optimizer") if path.is_dir() else _read(path)


def _read(path: Path) -> Any:
    return read_pickled(path, plain_classes())


def _bare_names(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Remove the prefixes of wrappers, such as `module.`, from weight names."""
    for wrapper in _AROUND:
        if weights and all(name.startswith(wrapper) for name in weights):
            weights = {name.removeprefix(wrapper): value for name, value in weights.items()}
    return {bare_name(name): value for name, value in weights.items()}


def _random_state(state: Any, rank: int) -> dict[str, Any]:
    devices = {}
    for name, saved in state.items():
        kind = re.fullmatch(r"torch_(\w+)_manual_seed", str(name))
        if kind is not None:  # of all devices that were visible to the process
            devices[kind[1]] = saved[min(rank, len(saved) - 1)] if isinstance(saved, list) else saved
    words, numpy = state["random_state"], state["numpy_random_seed"]
    return RandomState(
        (words[0], tuple(words[1]), words[2]), tuple(numpy), state["torch_manual_seed"], devices
    ).state_dict()


def _position(path: Path) -> dict[str, Any]:
    """Return a loader's position: the epoch of its sampler, which determines its order."""
    with zipfile.ZipFile(path) as archive:
        name = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
        sampler = _Inert(io.BytesIO(archive.read(name))).load()
    epoch = getattr(sampler, "epoch", 0)
    if not isinstance(epoch, int):
        raise CheckpointError(f"{path} holds no sampler that counts epochs.")
    return {"epoch": epoch, "consumed": 0, "batches": 0, "start": None, "generators": []}


class _StandIn:
    """Placeholder for every object in a pickle. It stores attributes and does nothing."""

    def __new__(cls, *args: Any, **kwargs: Any) -> _StandIn:
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)

    def append(self, item: Any) -> None:
        """Ignore the item."""

    def extend(self, items: Any) -> None:
        """Ignore the items."""

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


class _Inert(pickle.Unpickler):
    """Unpickler that imports nothing: every class and function in the file becomes a placeholder."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the placeholder class for every name."""
        return _StandIn

    def persistent_load(self, pid: Any) -> Any:
        """Return a placeholder instead of a tensor."""
        return _StandIn()
