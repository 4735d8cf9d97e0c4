"""How large a model is: its parameters and the units that are gathered at a time, without allocating any of them."""

from __future__ import annotations

import importlib
import json
import math
import re
import struct
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from drivetrain.runtime.errors import ConfigurationError, nearest

_BITS = {"F64": 64, "I64": 64, "F32": 32, "I32": 32, "F16": 16, "BF16": 16, "I16": 16, "F8_E4M3": 8, "F8_E5M2": 8}
# The layer that a parameter is in: everything up to the first number in its name.
_LAYER = re.compile(r"^(.*?\.\d+)\.|^(\d+)\.")
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_MAX_HEADER = 100 * 2**20


@dataclass(frozen=True)
class ModelSize:
    """Counts of a model's parameters.

    Attributes:
        parameters: All of them, tied ones once.
        trainable: Those that take gradients.
        matrices: Those of repeated layers that have two dimensions or more, which tensor parallelism splits.
        largest_unit: Those of the largest unit that FSDP gathers.
        buffers: Bytes of buffers.
        stored: Bytes as they are stored, where a file gives them; None else.
        units: For each unit its parameters, and how many of them `matrices` counts.
    """

    parameters: int
    trainable: int
    matrices: int
    largest_unit: int
    buffers: int = 0
    stored: int | None = None
    units: tuple[tuple[int, int], ...] = ()


def read_model(source: str, kwargs: Mapping[str, Any], trust_remote_code: bool = False) -> nn.Module | ModelSize:
    """A model on the meta device, or the sizes in the headers of safetensors files.

    Args:
        source: `package.module:Class`, a `config.json` of transformers or its folder, or a safetensors file or folder.
        kwargs: Arguments of the class.
        trust_remote_code: Whether a `config.json` may name code of its own.

    Raises:
        ConfigurationError: There is no such thing.
    """
    path = Path(source)
    if ":" in source and not path.exists():
        return _from_class(source, kwargs)
    files = weight_files(source)
    if files and path.exists():
        return size_of_files(files)
    config = path / "config.json" if path.is_dir() else path
    if config.suffix == ".json" and config.is_file():
        return _from_config(config, trust_remote_code)
    raise ConfigurationError(
        f"{source!r} is no model. Give package.module:Class (with --kwargs for its arguments), the config.json of a "
        "transformers model or its folder, or a safetensors file or folder.",
        code="DT-131",
    )


def weight_files(source: str) -> list[Path]:
    """The safetensors file or files that a path names."""
    path = Path(source)
    return [path] if path.suffix == ".safetensors" else sorted(path.glob("*.safetensors"))


def _from_class(source: str, kwargs: Mapping[str, Any]) -> nn.Module:
    module_name, _, path = source.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigurationError(
            f"{source!r}: the module {module_name!r} cannot be imported ({error}). Modules are found from the current "
            "folder and PYTHONPATH.",
            code="DT-131",
        ) from error
    for name in path.split("."):
        if not hasattr(found, name):
            raise ConfigurationError(
                f"{source!r}: there is no {name!r} in it.{nearest(name, dir(found))}", code="DT-131"
            )
        found = getattr(found, name)
    with torch.device("meta"):
        try:
            model = found(**kwargs)
        except TypeError as error:
            raise ConfigurationError(
                f"{source!r} cannot be built from the arguments {dict(kwargs)}: {error}. Give them as JSON, such as "
                "--kwargs '{\"width\": 64}'.",
                code="DT-131",
            ) from error
    if not isinstance(model, nn.Module):
        raise ConfigurationError(
            f"{source!r} gives a {type(model).__name__}, but must give a torch.nn.Module.", code="DT-131"
        )
    if not any(True for _ in model.parameters()):
        raise ConfigurationError(
            f"{source!r} has no parameters once it is built. Name the class of a module that makes them in __init__.",
            code="DT-131",
        )
    return model


def _from_config(config: Path, trust_remote_code: bool) -> nn.Module:
    try:
        import transformers  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise ConfigurationError(
            f"{config} needs transformers, which is not installed: pip install transformers", code="DT-013"
        ) from error
    loaded = transformers.AutoConfig.from_pretrained(str(config), trust_remote_code=trust_remote_code)
    named = (getattr(loaded, "architectures", None) or [None])[0]
    with torch.device("meta"):
        if named and hasattr(transformers, named):
            model: nn.Module = getattr(transformers, named)(loaded)
        else:
            model = transformers.AutoModel.from_config(loaded, trust_remote_code=trust_remote_code)
    model.tie_weights()  # type: ignore[operator]
    return model.float()


def size_of_module(model: nn.Module) -> ModelSize:
    """Count a module's parameters; its units are those that `FSDP(wrap="auto")` makes."""
    from drivetrain.strategies.wrapping import units_of, without_tied_across

    units = without_tied_across(model, units_of(model, "auto"))
    taken: set[int] = set()
    counts = [_newly_counted(unit.parameters(), taken) for unit in units]
    counts.append((_newly_counted(model.parameters(), taken)[0], 0))
    return ModelSize(
        parameters=sum(p.numel() for p in model.parameters()),
        trainable=sum(p.numel() for p in model.parameters() if p.requires_grad),
        matrices=sum(matrices for _, matrices in counts),
        largest_unit=max(count for count, _ in counts),
        buffers=sum(b.numel() * b.element_size() for b in model.buffers()),
        units=tuple(counts),
    )


def _newly_counted(parameters: Iterable[nn.Parameter], taken: set[int]) -> tuple[int, int]:
    """How many values parameters have that were not counted before, and those of matrices among them."""
    found = [parameter for parameter in parameters if id(parameter) not in taken]
    taken.update(map(id, found))
    return sum(p.numel() for p in found), sum(p.numel() for p in found if p.dim() > 1)


def size_of_files(files: Iterable[Path]) -> ModelSize:
    """Count the tensors that the headers of safetensors files list; no weights are read."""
    layers: dict[str, int] = defaultdict(int)
    matrices: dict[str, int] = defaultdict(int)
    total = bits = 0
    for path in files:
        for name, entry in read_header(path).items():
            count = math.prod(entry["shape"])
            found = _LAYER.match(name)
            layer = (found[1] or found[2]) if found else ""
            layers[layer] += count
            matrices[layer] += count if found and len(entry["shape"]) > 1 else 0
            total += count
            bits += count * _BITS.get(entry["dtype"], 8)
    units = tuple((count, matrices[layer]) for layer, count in layers.items())
    largest = max(layers.values(), default=0)
    return ModelSize(total, total, sum(matrices.values()), largest, stored=bits // 8, units=units)


def module_without_memory(source: str, found: nn.Module | ModelSize) -> nn.Module:
    """What `read_model` found as a module; for safetensors files, modules with the names and shapes in their headers.

    Args:
        source: What `read_model` was given.
        found: What it returned.
    """
    return skeleton_of_files(weight_files(source)) if isinstance(found, ModelSize) else found


def matrices_of(model: nn.Module) -> list[str]:
    """Names of the matrices of a model's repeated layers, which are what quantisation stores in fewer bits."""
    from drivetrain.strategies.wrapping import units_of

    inside = {id(p) for unit in units_of(model, "auto") for p in unit.parameters() if p.dim() > 1}
    return [name for name, parameter in model.named_parameters() if id(parameter) in inside]


class Layer(nn.Module):
    """A module that files hold tensors of; layers with a number beside each other repeat."""


def skeleton_of_files(files: Iterable[Path]) -> nn.Module:
    """Modules with the names, shapes and dtypes of the tensors in safetensors files, on the meta device."""
    root = Layer()
    for path in files:
        for name, entry in read_header(path).items():
            *parents, last = name.split(".")
            module: nn.Module = root
            for parent in parents:
                if not hasattr(module, parent):
                    module.add_module(parent, Layer())
                module = module.get_submodule(parent)
            tensor = torch.empty(entry["shape"], dtype=_DTYPES.get(entry["dtype"], torch.int8), device="meta")
            module.register_parameter(last, nn.Parameter(tensor, requires_grad=False))
    return _with_lists(root)


def _with_lists(module: nn.Module) -> nn.Module:
    """The same, with the numbered members of a module in a list, by which repeated blocks are found."""
    children = {name: _with_lists(child) for name, child in module.named_children()}
    numbers = sorted(int(name) for name in children if name.isdecimal())
    if children and numbers == list(range(len(children))) and not list(module.parameters(recurse=False)):
        return nn.ModuleList(children[str(number)] for number in numbers)
    for name, child in children.items():
        setattr(module, name, child)
    return module


def read_header(path: Path) -> dict[str, Any]:
    """The tensors in a safetensors file, by name: dtype, shape and place.

    Raises:
        ConfigurationError: It is no safetensors file.
    """
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        try:
            header = json.loads(file.read(length)) if 0 < length <= _MAX_HEADER else None
        except (ValueError, RecursionError):
            header = None
    if not isinstance(header, dict):
        raise ConfigurationError(f"{path} is no safetensors file: its header cannot be read.", code="DT-011")
    return {name: entry for name, entry in header.items() if name != "__metadata__"}
