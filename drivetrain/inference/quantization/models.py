"""Quantization of models, while loading or in place, and saving and loading of quantized models."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.checkpoint.export import Weights, open_weights, save_safetensors
from drivetrain.inference import loading
from drivetrain.inference.loading import Checkpoint, load_some
from drivetrain.inference.offloaded import like, named_places
from drivetrain.inference.placement import dispatch_model
from drivetrain.inference.quantization.base import Quantizer, class_of, get_quantizer
from drivetrain.inference.quantization.bitsandbytes import BnbQuantizationConfig, dtype_of
from drivetrain.inference.tensors import find_tied_parameters
from drivetrain.runtime.errors import CheckpointError, ConfigurationError
from drivetrain.runtime.logging import get_logger

logger = get_logger(__name__)

DESCRIPTION = "quantization.json"
Map = Mapping[str, torch.device | str | int]


@dataclass(frozen=True)
class Quantization:
    """Description of a quantized model, stored as `model.quantization`: the quantizer and the layers' names.

    Attributes:
        quantizer: The quantizer.
        layers: Names of the quantized layers.
    """

    quantizer: Quantizer
    layers: tuple[str, ...]


def load_and_quantize_model(
    model: nn.Module,
    bnb_quantization_config: BnbQuantizationConfig | Quantizer | str,
    weights_location: Checkpoint | None = None,
    device_map: Any = None,
    no_split_module_classes: Sequence[str] | None = None,
    max_memory: Mapping[Any, int | str] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    offload_state_dict: bool = False,
) -> nn.Module:
    """Load a checkpoint into a model, and quantize each linear layer when it is read.

    The full unquantized model is never in memory. If the map uses accelerators, layers on the CPU or on disk are not
    quantized. If it uses none, layers on the CPU are.

    Args:
        model: The model to change. It may be on the meta device if `weights_location` is given.
        bnb_quantization_config: A `BnbQuantizationConfig`, a quantizer, or the name of a quantizer.
        weights_location: A checkpoint, as for `load_checkpoint_in_model`. None quantizes the model's own weights.
        device_map: A map, as for `load_checkpoint_and_dispatch`. None keeps the devices of existing weights, and loads
            others onto the first accelerator, or onto the CPU if there is none.
        no_split_module_classes: Class names of modules that stay on one device, for named maps.
        max_memory: Memory limit of each device, for named maps.
        offload_folder: Folder for weights on disk.
        offload_state_dict: Accepted and ignored. Only one unquantized weight is in memory at a time.

    Returns:
        The model.

    Raises:
        ConfigurationError: The quantizer's package is not installed, or the map does not fit the model.
        CheckpointError: The weights do not match the model.
    """
    options: dict[str, Any] = {}
    if isinstance(bnb_quantization_config, BnbQuantizationConfig):
        config = bnb_quantization_config
        quantizer: Quantizer = config.quantizer()
        options = {"dtype": config.torch_dtype, "skip_modules": config.skip_modules}
        options["keep_in_fp32_modules"] = config.keep_in_fp32_modules
    else:
        quantizer = get_quantizer(bnb_quantization_config)
    if device_map is not None:
        device_map = loading.as_dict(model, device_map, max_memory, no_split_module_classes, options.get("dtype"))
    model = quantize_model(model, quantizer, weights_location, device_map, offload_folder=offload_folder, **options)
    for bits in (4, 8):
        is_so = getattr(quantizer, "bits", None) == bits
        model.__dict__[f"is_loaded_in_{bits}bit"] = is_so
    return model


def quantize_model(
    model: nn.Module,
    quantizer: Quantizer | str,
    weights: Checkpoint | None = None,
    device_map: Any = None,
    *,
    dtype: torch.dtype | str | None = None,
    skip_modules: Sequence[str] | None = None,
    keep_in_fp32_modules: Sequence[str] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
) -> nn.Module:
    """Quantize the linear layers of a model in place.

    Args:
        model: The model to change.
        quantizer: The quantizer or its name.
        weights: A checkpoint. None quantizes the model's own weights.
        device_map: A map. None keeps the devices of existing weights, and loads others onto the first accelerator, or
            onto the CPU if there is none.
        dtype: Dtype of all other weights. None keeps theirs.
        skip_modules: Names of modules that are not quantized. None means the output head and tied modules.
        keep_in_fp32_modules: Names of modules that become float32 and are not quantized.
        offload_folder: Folder for weights on disk.

    Returns:
        The model. Its attribute `quantization` describes the quantization.
    """
    chosen = get_quantizer(quantizer)
    chosen.check()
    source = None if weights is None else open_weights(weights)
    if source is None and (empty := [name for name, place in named_places(model).items() if place.tensor.is_meta]):
        raise CheckpointError(f"{empty[0]} is on the meta device and has no values. Pass weights=...")
    given = None if device_map is None else loading.as_dict(model, device_map, dtype=dtype)
    where = _where(model, given)
    skipped = [*(default_skips(model) if skip_modules is None else skip_modules), *(keep_in_fp32_modules or ())]
    layers = [name for name, _ in _linear(model, chosen) if not is_within(name, skipped) and _is_resident(name, where)]
    if not layers:
        raise ConfigurationError(
            f"No layer of {type(model).__name__} can be quantized, because all linear layers are in "
            f"skip_modules={skipped!r}, or are offloaded to the CPU or disk. Check skip_modules and device_map.",
        )
    used: set[str] = set()
    for name in layers:
        used |= _replace(model, name, chosen, source, where[f"{name}.weight"])
    floats = None if dtype is None else dtype_of("dtype", dtype)
    keep = list(keep_in_fp32_modules or ())
    if source is not None:
        rest = [name for name in where if not any(name.startswith(f"{layer}.") for layer in layers)]
        biases = [f"{layer}.bias" for layer in layers if f"{layer}.bias" in where]
        load_some(model, source, [*rest, *biases], used, where, floats, keep, offload_folder)
    else:
        _convert(model, layers, where, floats, keep)
    model.__dict__["quantization"] = Quantization(chosen, tuple(layers))
    if given is not None and len(set(where.values())) > 1:
        dispatch_model(model, given, offload_dir=offload_folder)
    return model


def _where(model: nn.Module, given: Map | None) -> dict[str, Any]:
    if given is not None:
        return dict(loading.locations(model, given))
    first = loading.execution_device(None)
    return {name: first if place.tensor.is_meta else place.tensor.device for name, place in named_places(model).items()}


def _is_resident(name: str, where: Mapping[str, Any]) -> bool:
    at = where[f"{name}.weight"]
    on_accelerators = any(isinstance(each, torch.device) and each.type != "cpu" for each in where.values())
    return isinstance(at, torch.device) and (at.type != "cpu" or not on_accelerators)


def _linear(model: nn.Module, quantizer: Quantizer) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        if name and quantizer.takes(module):
            yield name, module


def default_skips(model: nn.Module) -> list[str]:
    shared = {name.rpartition(".")[0] for group in find_tied_parameters(model) for name in group}
    head = model.get_output_embeddings() if callable(getattr(model, "get_output_embeddings", None)) else None  # type: ignore[operator]
    names = {id(module): name for name, module in model.named_modules()}
    if head is not None and id(head) in names:
        shared.add(names[id(head)])
    elif not hasattr(model, "get_output_embeddings"):
        # Without a declared head, the last child counts as the head.
        last = [name for name, _ in model.named_children()][-1:]
        shared.update(last if len(list(model.children())) > 1 else [])
    return sorted(shared)


def is_within(name: str, modules: Sequence[str]) -> bool:
    return any(f".{module}." in f".{name}." for module in modules)


def _replace(model: nn.Module, name: str, quantizer: Quantizer, source: Weights | None, device: Any) -> set[str]:
    layer: Any = model.get_submodule(name)
    texts: dict[str, str] = {}
    if source is None:
        made = quantizer.quantize(layer, layer.weight.detach(), device)
        used: set[str] = set()
    else:
        found = {each.removeprefix(f"{name}."): each for each in source if each.startswith(f"{name}.")}
        found.pop("bias", None)
        used = set(found.values())
        if quantizer.finds(found):
            made = quantizer.opened(layer, {short: source[each] for short, each in found.items()}, texts, device)
        else:
            made = quantizer.quantize(layer, _weight(name, layer, source), device)
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, made)
    # Names of the checkpoint weights that were used.
    return used


def _weight(name: str, layer: nn.Linear, source: Weights) -> Tensor:
    full = f"{name}.weight"
    full = full if full in source else source.same.get(full, full)
    if full not in source:
        raise CheckpointError(f"{source.where} has no weight {name}.weight. Check the checkpoint's path.")
    entry = source.entries[full]
    if entry.shape != tuple(layer.weight.shape) or not entry.dtype.is_floating_point:
        raise CheckpointError(
            f"{full!r} has shape {tuple(entry.shape)} and dtype {entry.dtype} in {source.where}, but the model needs "
            f"shape {tuple(layer.weight.shape)} and a floating-point dtype. Use a checkpoint of this model."
        )
    return source[full]


def _convert(
    model: nn.Module, layers: Sequence[str], where: Mapping[str, Any], dtype: torch.dtype | None, keep: Sequence[str]
) -> None:
    stored = {f"{layer}.weight" for layer in layers}
    for name, place in named_places(model).items():
        old = place.tensor
        if name in stored or not isinstance(where.get(name), torch.device):
            continue
        wanted = torch.float32 if is_within(name.rpartition(".")[0], keep) else dtype
        wanted = wanted if wanted is not None and old.is_floating_point() and place.is_parameter else old.dtype
        if old.dtype != wanted or old.device != where[name]:
            place.put(like(old, old.detach().to(where[name], wanted)))


# Files


def save_quantized(model: nn.Module, directory: str | os.PathLike[str], max_shard_size: int | str = "5GB") -> list[str]:
    """Save a quantized model as safetensors files, with a description in JSON.

    Args:
        model: A model from `quantize_model`, `load_and_quantize_model` or `load_quantized`.
        directory: Folder for the files.
        max_shard_size: Maximum bytes of one file, as a number or as text such as `"5GB"`.

    Returns:
        The paths of the safetensors files.

    Raises:
        ConfigurationError: The model is not quantized.
    """
    how: Quantization | None = model.__dict__.get("quantization")
    if how is None:
        raise ConfigurationError(
            f"{type(model).__name__} is not quantized. Call quantize_model(model, 'nf4') first, or use save_model.",
        )
    state: dict[str, Tensor] = {}
    texts: dict[str, dict[str, str]] = {}
    for name in how.layers:
        layer = model.get_submodule(name)
        tensors, found = how.quantizer.saved(layer)
        state |= {f"{name}.{short}": value for short, value in tensors.items()}
        if found:
            texts[name] = found
    saved = set(model.state_dict(keep_vars=True))
    for name, place in named_places(model).items():
        inside = any(name.startswith(f"{layer}.") for layer in how.layers)
        if name in saved and (not inside or name.endswith(".bias")):
            # Biases are not part of the quantizer's state.
            state[name] = place.tensor.detach()
    paths = save_safetensors(state, directory, max_shard_size)
    described = {
        "quantizer": how.quantizer.name,
        "options": how.quantizer.as_dict(),
        "layers": list(how.layers),
        "texts": texts,
    }
    Path(directory, DESCRIPTION).write_text(json.dumps(described, indent=2))
    return paths


def load_quantized(model: nn.Module, directory: str | os.PathLike[str], device_map: Any = None) -> nn.Module:
    """Load the files that `save_quantized` has written into a model.

    The original weights are not needed.

    Args:
        model: The unquantized model, usually built under `init_empty_weights`.
        directory: The folder.
        device_map: A map, as for `quantize_model`.

    Returns:
        The model.

    Raises:
        CheckpointError: The folder contains no quantized model, or one that does not match.
    """
    how, texts = _read_description(Path(directory, DESCRIPTION))
    how.quantizer.check()
    source = open_weights(directory)
    given = None if device_map is None else loading.as_dict(model, device_map)
    where = _where(model, given)
    used: set[str] = set()
    known = dict(model.named_modules())
    for name in how.layers:
        layer = known.get(name)
        if layer is None or not how.quantizer.takes(layer):
            raise CheckpointError(
                f"{os.fspath(directory)} has a quantized layer {name!r}, but {type(model).__name__} has "
                f"{'no such layer' if layer is None else 'a ' + type(layer).__name__}. Build the model that was saved."
            )
        found = {each.removeprefix(f"{name}."): each for each in source if each.startswith(f"{name}.")}
        found.pop("bias", None)
        used |= set(found.values())
        device = where[f"{name}.weight"]
        tensors = {short: source[each] for short, each in found.items()}
        parent, _, last = name.rpartition(".")
        made = how.quantizer.opened(layer, tensors, texts.get(name, {}), device)
        setattr(model.get_submodule(parent), last, made)
    rest = [name for name in where if not any(name.startswith(f"{layer}.") for layer in how.layers)]
    biases = [f"{layer}.bias" for layer in how.layers if f"{layer}.bias" in where]
    # Other weights keep the dtypes that they were saved in.
    _cast_to_file_dtypes(model, {*rest, *biases}, source)
    load_some(model, source, [*rest, *biases], used, where, None, (), None)
    model.__dict__["quantization"] = how
    if given is not None and len(set(where.values())) > 1:
        dispatch_model(model, given)
    return model


def _cast_to_file_dtypes(model: nn.Module, names: Collection[str], source: Weights) -> None:
    for name, place in named_places(model).items():
        entry = source.entries.get(name)
        if name in names and entry is not None and place.tensor.dtype != entry.dtype:
            place.put(like(place.tensor, place.tensor.detach().to(entry.dtype)))


def _read_description(path: Path) -> tuple[Quantization, dict[str, dict[str, str]]]:
    if not path.is_file():
        raise CheckpointError(f"{path.parent} has no {path.name}. Use a folder written by save_quantized.")
    try:
        described = json.loads(path.read_text())
        name, options = str(described["quantizer"]), dict(described["options"])
        layers, texts = tuple(str(each) for each in described["layers"]), dict(described["texts"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} does not describe a quantized model: {error}") from error
    kind = class_of(name)
    try:
        return Quantization(kind(**options), layers), texts
    except TypeError as error:
        raise CheckpointError(f"{path} has options that {name} does not accept: {error}") from error
