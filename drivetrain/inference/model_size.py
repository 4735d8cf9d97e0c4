"""Sizes of models and estimates of their memory, without allocating any weights."""

from __future__ import annotations

import importlib
import json
import math
import re
import struct
import weakref
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from drivetrain.runtime.errors import ConfigurationError, nearest

_BITS = {"F64": 64, "I64": 64, "F32": 32, "I32": 32, "F16": 16, "BF16": 16, "I16": 16, "F8_E4M3": 8, "F8_E5M2": 8}
# Prefix of a parameter's name up to its first number, which identifies the layer.
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
    """Size of a model: its number of parameters, the bytes of its buffers, and the bytes of its weight files.

    Attributes:
        parameters: Number of parameters, tied ones counted once.
        trainable: Number of parameters that require gradients.
        matrices: Number of parameters in matrices of repeated layers, which tensor parallelism splits.
        largest_unit: Number of parameters of the largest FSDP unit.
        buffers: Bytes of all buffers.
        stored: Bytes in the files, or None for a module.
        units: For each unit its number of parameters, and how many of them are in matrices.
    """

    parameters: int
    trainable: int
    matrices: int
    largest_unit: int
    buffers: int = 0
    stored: int | None = None
    units: tuple[tuple[int, int], ...] = ()


def read_model(
    source: str, kwargs: Mapping[str, Any], trust_remote_code: bool = False, device: str = "meta"
) -> nn.Module | ModelSize:
    """Build a model on the meta device from the class or config that `source` names, to measure its size.

    For safetensors files, return its size only. Another `device` is for classes that cannot be built without values.
    """
    path = Path(source)
    if ":" in source and not path.exists():
        return _from_class(source, kwargs, device)
    files = weight_files(source)
    if files and path.exists():
        return size_of_files(files)
    config = path / "config.json" if path.is_dir() else path
    if config.suffix == ".json" and config.is_file():
        return _from_config(config, trust_remote_code)
    raise ConfigurationError(
        f"{source!r} is not a model. Pass package.module:Class (with --kwargs for its arguments), the config.json of "
        "a transformers model or its folder, or a safetensors file or folder.",
    )


def weight_files(source: str) -> list[Path]:
    path = Path(source)
    return [path] if path.suffix == ".safetensors" else sorted(path.glob("*.safetensors"))


def _from_class(source: str, kwargs: Mapping[str, Any], device: str) -> nn.Module:
    module_name, _, path = source.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigurationError(
            f"{source!r}: the module {module_name!r} cannot be imported ({error}). Modules are searched in the current "
            "folder and in PYTHONPATH.",
        ) from error
    for name in path.split("."):
        if not hasattr(found, name):
            raise ConfigurationError(f"{source!r}: {name!r} does not exist.{nearest(name, dir(found))}")
        found = getattr(found, name)
    with torch.device(device):
        try:
            model = found(**kwargs)
        except TypeError as error:
            raise ConfigurationError(
                f"{source!r} cannot be built from the arguments {dict(kwargs)}: {error}. Pass the arguments as JSON, "
                "such as --kwargs '{\"width\": 64}'.",
            ) from error
    if not isinstance(model, nn.Module):
        raise ConfigurationError(f"{source!r} creates a {type(model).__name__}, but must create a torch.nn.Module.")
    if not any(True for _ in model.parameters()):
        raise ConfigurationError(
            f"{source!r} has no parameters. Use a module class that creates its parameters in __init__.",
        )
    return model


def _from_config(config: Path, trust_remote_code: bool) -> nn.Module:
    try:
        import transformers  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise ConfigurationError(
            f"{config} needs transformers, which is not installed: pip install transformers"
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
    """Count the parameters of a model: all parameters, those that are trained, and those of each FSDP unit."""
    from drivetrain.strategies.wrapping import units_of, without_tied_across

    units = without_tied_across(model, units_of(model, "auto"))
    taken: set[int] = set()
    counts = [_count_new(unit.parameters(), taken) for unit in units]
    counts.append((_count_new(model.parameters(), taken)[0], 0))
    return ModelSize(
        parameters=sum(p.numel() for p in model.parameters()),
        trainable=sum(p.numel() for p in model.parameters() if p.requires_grad),
        matrices=sum(matrices for _, matrices in counts),
        largest_unit=max(count for count, _ in counts),
        buffers=sum(b.numel() * b.element_size() for b in model.buffers()),
        units=tuple(counts),
    )


def _count_new(parameters: Iterable[nn.Parameter], taken: set[int]) -> tuple[int, int]:
    found = [parameter for parameter in parameters if id(parameter) not in taken]
    taken.update(map(id, found))
    return sum(p.numel() for p in found), sum(p.numel() for p in found if p.dim() > 1)


def size_of_files(files: Iterable[Path]) -> ModelSize:
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
    # For safetensors files, `read_model` returns sizes only.
    return skeleton_of_files(weight_files(source)) if isinstance(found, ModelSize) else found


def matrices_of(model: nn.Module) -> list[str]:
    from drivetrain.strategies.wrapping import units_of

    inside = {id(p) for unit in units_of(model, "auto") for p in unit.parameters() if p.dim() > 1}
    return [name for name, parameter in model.named_parameters() if id(parameter) in inside]


class Layer(nn.Module): ...


def skeleton_of_files(files: Iterable[Path]) -> nn.Module:
    # Reads only the headers of the files.
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
    children = {name: _with_lists(child) for name, child in module.named_children()}
    numbers = sorted(int(name) for name in children if name.isdecimal())
    if children and numbers == list(range(len(children))) and not list(module.parameters(recurse=False)):
        # In a list, repeated blocks are recognized.
        return nn.ModuleList(children[str(number)] for number in numbers)
    for name, child in children.items():
        setattr(module, name, child)
    return module


def read_header(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        try:
            header = json.loads(file.read(length)) if 0 < length <= _MAX_HEADER else None
        except (ValueError, RecursionError):
            header = None
    if not isinstance(header, dict):
        raise ConfigurationError(f"{path} is not a safetensors file, or it is damaged. Check the path.")
    return {name: entry for name, entry in header.items() if name != "__metadata__"}


# Bytes in inference


INFERENCE = {
    "float32": (4.0, 4.0),
    "bfloat16": (2.0, 2.0),
    "float16": (2.0, 2.0),
    "int8": (1.0, 1.0),
    "int4": (0.5, 0.5),
    "nf4": (0.5 + 4 / 64, 2.0),
    "nf4_double": (0.5 + 1 / 64 + 4 / (64 * 256), 2.0),
}
"""Bytes per parameter in inference, by dtype: in matrices of repeated layers, and in all other parameters.

bitsandbytes stores 4-bit weights with one scale per 64 values, and double quantization stores the scales in 8 bits.
Other parameters are bfloat16.
"""


# Memory of a key-value cache


# Names of each quantity in the configurations of different models.
_KEYS = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "key_value_heads": ("num_key_value_heads", "n_head_kv", "num_kv_heads", "multi_query_group_num"),
    "width": ("hidden_size", "n_embd", "d_model", "dim"),
    "head_width": ("head_dim", "d_kv", "kv_channels"),
}


def read_config(source: str) -> Mapping[str, Any]:
    path = Path(source)
    config = path / "config.json" if path.is_dir() else path
    if config.suffix != ".json" or not config.is_file():
        raise ConfigurationError(f"--seq needs a transformers model's config.json or its folder, not {source!r}.")
    try:
        found = json.loads(config.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{config} is not JSON: {error}.") from error
    if not isinstance(found, dict):
        raise ConfigurationError(f"{config} is not a JSON object. Use a config.json of transformers.")
    return found


def kv_cache_values(config: Mapping[str, Any], batch: int, seq: int) -> int:
    """Return the number of elements in the key-value cache of a decoder.

    Layers with a sliding window count at most its length. Encoder-decoders also count the encoder's keys and values,
    with the decoder's sequence length. State-space layers (Mamba) count like attention layers.
    """
    text = config.get("text_config")
    config = {**config, **text} if isinstance(text, Mapping) else config
    layers = _config_value(config, "layers")
    if config.get("is_encoder_decoder"):
        layers = int(config.get("num_decoder_layers") or config.get("decoder_layers") or layers)
        heads = int(config.get("decoder_attention_heads") or _config_value(config, "heads"))
        width = _config_value(config, "head_width", required=False) or _config_value(config, "width") // heads
        # Keys and values, of self-attention and of cross-attention.
        return 2 * 2 * layers * heads * width * seq * batch
    if "kv_lora_rank" in config:  # multi-head latent attention: one compressed vector, and the rotary part
        return layers * int(config["kv_lora_rank"] + config.get("qk_rope_head_dim", 0)) * seq * batch
    heads = _config_value(config, "heads")
    shared = 1 if config.get("multi_query") else _config_value(config, "key_value_heads", required=False) or heads
    width = _config_value(config, "head_width", required=False) or _config_value(config, "width") // heads
    return sum(2 * shared * width * positions for positions in _positions(config, layers, seq)) * batch


def _positions(config: Mapping[str, Any], layers: int, seq: int) -> list[int]:
    window = config.get("sliding_window")
    if not window or config.get("use_sliding_window") is False:
        return [seq] * layers
    kinds = config.get("layer_types") or ["sliding_attention"] * layers
    return [min(seq, window) if kind == "sliding_attention" else seq for kind in kinds[:layers]]


def _config_value(config: Mapping[str, Any], what: str, required: bool = True) -> int:
    for name in _KEYS[what]:
        if config.get(name):
            return int(config[name])
    if required:
        raise ConfigurationError(
            f"The model's config.json has none of {', '.join(_KEYS[what])}, so the key-value cache cannot be computed.",
        )
    return 0


# Memory of live tensors


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that tracks the current and peak bytes of all live tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.current = self.peak = 0
        self._known: set[int] = set()

    def add(self, value: Any) -> None:
        for leaf in tree_leaves(value):
            if isinstance(leaf, torch.Tensor):
                self._add_storage(leaf.untyped_storage())

    def _add_storage(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known or not size:
            return
        self._known.add(key)
        self.current += size
        self.peak = max(self.peak, self.current)
        # A storage lives as long as the last of its views, so count it once and until then.
        weakref.finalize(storage, self._remove, key, size)

    def _remove(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.current -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.add(result)
        return result


# Arguments of the commands


def parse_arguments(text: str, option: str = "--kwargs") -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{option} {text!r} is not JSON: {error}. Pass an object such as '{{}}'.") from error
    if not isinstance(value, dict):
        raise ConfigurationError(f"{option} {text!r} must be a JSON object, such as '{{\"width\": 64}}'.")
    return value


_INPUT = re.compile(r"^(?:(?P<name>[A-Za-z_]\w*)=)?(?P<shape>\d+(?:x\d+)*)(?::(?P<dtype>\w+))?$")

Inputs = tuple[list[tuple[tuple[int, ...], torch.dtype]], dict[str, tuple[tuple[int, ...], torch.dtype]]]


def parse_inputs(given: Sequence[str]) -> Inputs:
    positional, named = [], {}
    for text in given:
        found = _INPUT.match(text)
        dtype = getattr(torch, (found and found["dtype"]) or "float32", None)
        if found is None or not isinstance(dtype, torch.dtype):
            raise ConfigurationError(
                f"--input {text!r} cannot be parsed. Use the form [NAME=]SHAPE[:DTYPE], such as 8x128:int64 or "
                "input_ids=8x128:int64.",
            )
        entry = (tuple(map(int, found["shape"].split("x"))), dtype)
        if found["name"]:
            named[found["name"]] = entry
        else:
            positional.append(entry)
    return positional, named


def loss_of(output: Any) -> torch.Tensor:
    """Return the `loss` in a model's output, or else the mean of the first tensor that has gradients."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    floats = [
        leaf
        for leaf in tree_leaves(dict(output) if isinstance(output, Mapping) else output)
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.requires_grad
    ]
    if not floats:
        raise ConfigurationError("The model cannot be trained, because no output depends on a parameter.")
    return floats[0].float().mean()
