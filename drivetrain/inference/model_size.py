"""How large a model is: its parameters and the units that are gathered at a time, without allocating any of them."""

from __future__ import annotations

import copy
import importlib
import json
import math
import re
import struct
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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
    """A model on the meta device, or the sizes in the headers of safetensors files."""
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
        ) from error
    for name in path.split("."):
        if not hasattr(found, name):
            raise ConfigurationError(f"{source!r}: there is no {name!r} in it.{nearest(name, dir(found))}")
        found = getattr(found, name)
    with torch.device("meta"):
        try:
            model = found(**kwargs)
        except TypeError as error:
            raise ConfigurationError(
                f"{source!r} cannot be built from the arguments {dict(kwargs)}: {error}. Give them as JSON, such as "
                "--kwargs '{\"width\": 64}'.",
            ) from error
    if not isinstance(model, nn.Module):
        raise ConfigurationError(f"{source!r} gives a {type(model).__name__}, but must give a torch.nn.Module.")
    if not any(True for _ in model.parameters()):
        raise ConfigurationError(
            f"{source!r} has no parameters once it is built. Name the class of a module that makes them in __init__.",
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
    """The tensors in a safetensors file, by name: dtype, shape and place."""
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        try:
            header = json.loads(file.read(length)) if 0 < length <= _MAX_HEADER else None
        except (ValueError, RecursionError):
            header = None
    if not isinstance(header, dict):
        raise ConfigurationError(f"{path} is no safetensors file: its header cannot be read.")
    return {name: entry for name, entry in header.items() if name != "__metadata__"}


# What a process holds under each strategy and precision: the formulas of docs/strategies.md


@dataclass(frozen=True)
class PerParameter:
    """Bytes that one parameter takes in a precision.

    Attributes:
        weight: As it is stored.
        gradient: Its gradient.
        moment: One value that the optimizer keeps for it.
        gathered: As FSDP gathers it for its computation.
    """

    weight: float
    gradient: float
    moment: float
    gathered: float


PRECISIONS = {
    "32": PerParameter(4, 4, 4, 4),
    "bf16": PerParameter(4, 4, 4, 2),
    "fp16": PerParameter(4, 4, 4, 2),
    "bf16-true": PerParameter(2, 2, 2, 2),
    "fp16-true": PerParameter(2, 2, 2, 2),
    "64": PerParameter(8, 8, 8, 8),
    "fp8": PerParameter(4, 4, 4, 2),
}
# ZeRO keeps weights and gradients in 16 bits under these, beside a master copy in 32.
_IN_16_BITS = ("bf16", "fp16", "bf16-true", "fp16-true")

OPTIMIZERS = {"adamw": 2, "adam": 2, "adagrad": 1, "rmsprop": 1, "sgd_momentum": 1, "sgd": 0}
"""Values that an optimizer keeps for each parameter."""

INFERENCE = {
    "float32": (4.0, 4.0),
    "bfloat16": (2.0, 2.0),
    "float16": (2.0, 2.0),
    "int8": (1.0, 1.0),
    "int4": (0.5, 0.5),
    "nf4": (0.5 + 4 / 64, 2.0),
    "nf4_double": (0.5 + 1 / 64 + 4 / (64 * 256), 2.0),
}
"""Bytes of a parameter where nothing but the model is held: of the matrices of repeated layers, and of others.

bitsandbytes' 4 bits have a scale for each 64 values, which double quantisation stores in 8 bits; the rest is bfloat16.
"""


@dataclass(frozen=True)
class Use:
    """Bytes that one process holds in training.

    Attributes:
        weights: Parameters and buffers.
        gradients: Gradients, with their buckets.
        optimizer: What the optimizer keeps.
        gathered: Parameters of others, gathered for computation.
        activations: What a forward keeps for its backward.
        temporaries: What the optimizer's step takes for a moment, when activations are no longer there.
    """

    weights: float
    gradients: float
    optimizer: float
    gathered: float = 0.0
    activations: float = 0.0
    temporaries: float = 0.0

    @property
    def total(self) -> float:
        """The most of them that are there at once."""
        kept = self.weights + self.gradients + self.optimizer
        return kept + max(self.gathered + self.activations, self.temporaries)


@dataclass(frozen=True)
class Case:
    """What is to be estimated.

    Attributes:
        size: The model.
        bytes: Of each parameter, in the precision.
        is_16_bit: Whether the precision computes in 16 bits, for engines that then keep weights in 16 bits.
        moments: Values that the optimizer keeps for each parameter.
        processes: How many share the work.
        activations: Bytes of activations of one process's batch.
    """

    size: ModelSize
    bytes: PerParameter
    is_16_bit: bool
    moments: int
    processes: int
    activations: float


def _copies(case: Case) -> Use:
    size, each = case.size, case.bytes
    return Use(
        size.parameters * each.weight + size.buffers,
        size.trainable * each.gradient,
        size.trainable * each.moment * case.moments,
        activations=case.activations,
    )


def _sharded(case: Case) -> Use:
    """FSDP: all is sharded; one unit is in use while the next is prefetched."""
    whole, count = _copies(case), case.processes
    units = min(2 * case.size.largest_unit, case.size.parameters) if count > 1 else 0
    return Use(
        (whole.weights - case.size.buffers) / count + case.size.buffers,
        whole.gradients / count,
        whole.optimizer / count,
        units * case.bytes.gathered,
        case.activations,
    )


def _zero(stage: int) -> Callable[[Case], Use]:
    """DeepSpeed: the optimizer holds a master copy in 32 bits beside its moments, in every precision."""

    def use(case: Case) -> Use:
        size, count = case.size, case.processes
        each = 2 if case.is_16_bit else 4
        optimizer = size.trainable * 4 * (case.moments + 1) / count
        weights, gradients, gathered = float(size.parameters * each), size.trainable * each / count, 0.0
        if stage == 3:
            weights /= count
            gathered = case.size.largest_unit * each if count > 1 else 0
        elif count > 1:
            gradients += size.parameters * each / 32  # the bucket in which gradients are reduced
        return Use(weights + size.buffers, gradients, optimizer, gathered, case.activations)

    return use


def _split_layers(case: Case) -> Use:
    """Tensor parallel: matrices of repeated layers are split, the rest is whole."""
    whole, count = _copies(case), case.processes
    share = 1 - case.size.matrices / max(1, case.size.parameters) * (1 - 1 / count)
    return Use(
        (whole.weights - case.size.buffers) * share + case.size.buffers,
        whole.gradients * share,
        whole.optimizer * share,
        activations=case.activations,
    )


def _stages(case: Case) -> Use:
    """Pipeline: a share of the layers, and activations of as many micro-batches as there are stages."""
    whole, count = _copies(case), case.processes
    return Use(whole.weights / count, whole.gradients / count, whole.optimizer / count, activations=case.activations)


def _split_sequences(case: Case) -> Use:
    """Context parallel: sharded as by FSDP, with a share of every sequence."""
    sharded = _sharded(case)
    return Use(
        sharded.weights, sharded.gradients, sharded.optimizer, sharded.gathered, case.activations / case.processes
    )


STRATEGIES: dict[str, Callable[[Case], Use]] = {
    "single": _copies,
    "ddp": _copies,
    "fsdp": _sharded,
    "deepspeed_stage_1": _zero(1),
    "deepspeed_stage_2": _zero(2),
    "deepspeed_stage_3": _zero(3),
    "tp": _split_layers,
    "cp": _split_sequences,
    "pp": _stages,
}


def estimate_training(
    size: ModelSize,
    strategy: str,
    precision: str = "32",
    processes: int = 1,
    optimizer: str = "adamw",
    activations: float = 0.0,
    temporaries: float = 0.0,
) -> Use:
    """Bytes that one process holds in training."""
    choices: tuple[tuple[str, str, Mapping[str, object]], ...] = (
        ("strategy", strategy, STRATEGIES),
        ("precision", precision, PRECISIONS),
        ("optimizer", optimizer, OPTIMIZERS),
    )
    for what, given, allowed in choices:
        if given not in allowed:
            raise ConfigurationError(
                f"{what} is {given!r}, but must be one of {', '.join(allowed)}.{nearest(given, allowed)}"
            )
    case = Case(
        size,
        PRECISIONS[precision],
        precision in _IN_16_BITS,
        OPTIMIZERS[optimizer],
        processes,
        activations,
    )
    use = STRATEGIES[strategy](case)
    share = use.gradients / max(1.0, _copies(case).gradients)
    return replace(use, temporaries=temporaries * share)


# The memory of a key-value cache, from what a model's config.json gives


# What configurations call the same thing.
_KEYS = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "key_value_heads": ("num_key_value_heads", "n_head_kv", "num_kv_heads", "multi_query_group_num"),
    "width": ("hidden_size", "n_embd", "d_model", "dim"),
    "head_width": ("head_dim", "d_kv", "kv_channels"),
}


def read_config(source: str) -> Mapping[str, Any]:
    """The config.json that a path names, or that is in its folder."""
    path = Path(source)
    config = path / "config.json" if path.is_dir() else path
    if config.suffix != ".json" or not config.is_file():
        raise ConfigurationError(f"--seq needs the config.json of a transformers model or its folder; got {source!r}.")
    try:
        found = json.loads(config.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{config} is no JSON: {error}.") from error
    if not isinstance(found, dict):
        raise ConfigurationError(f"{config} holds no JSON object.")
    return found


def kv_cache_values(config: Mapping[str, Any], batch: int, seq: int) -> int:
    """How many values the cache of a decoder holds: a key and a value for each layer, head, position and sequence.

    Layers with a sliding window keep no more positions than it has; an encoder-decoder keeps those of its encoder too,
    taken as long as the decoder's. Layers that keep a state instead of a cache (Mamba) count like the others.
    """
    text = config.get("text_config")
    config = {**config, **text} if isinstance(text, Mapping) else config
    layers = _given(config, "layers")
    if config.get("is_encoder_decoder"):
        layers = int(config.get("num_decoder_layers") or config.get("decoder_layers") or layers)
        heads = int(config.get("decoder_attention_heads") or _given(config, "heads"))
        width = _given(config, "head_width", required=False) or _given(config, "width") // heads
        return 2 * 2 * layers * heads * width * seq * batch
    if "kv_lora_rank" in config:  # one compressed vector for keys and values, and the part with positions
        return layers * int(config["kv_lora_rank"] + config.get("qk_rope_head_dim", 0)) * seq * batch
    heads = _given(config, "heads")
    shared = 1 if config.get("multi_query") else _given(config, "key_value_heads", required=False) or heads
    width = _given(config, "head_width", required=False) or _given(config, "width") // heads
    return sum(2 * shared * width * positions for positions in _positions(config, layers, seq)) * batch


def _positions(config: Mapping[str, Any], layers: int, seq: int) -> list[int]:
    """How many positions each layer keeps."""
    window = config.get("sliding_window")
    if not window or config.get("use_sliding_window") is False:
        return [seq] * layers
    kinds = config.get("layer_types") or ["sliding_attention"] * layers
    return [min(seq, window) if kind == "sliding_attention" else seq for kind in kinds[:layers]]


def _given(config: Mapping[str, Any], what: str, required: bool = True) -> int:
    for name in _KEYS[what]:
        if config.get(name):
            return int(config[name])
    if required:
        raise ConfigurationError(
            f"The configuration gives none of {', '.join(_KEYS[what])}, so the key-value cache cannot be counted.",
        )
    return 0


# Bytes of the tensors that are alive while code runs, counted also where they have no memory


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all storages that are alive, and their peak."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.current = self.peak = 0
        self._known: set[int] = set()

    def add(self, value: Any) -> None:
        """Count the tensors in nested values, each storage once."""
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
        weakref.finalize(storage, self._remove, key, size)

    def _remove(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.current -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.add(result)
        return result


# The peak memory of a training step, counted while it runs on tensors without memory


_INPUT = re.compile(r"^(?:(?P<name>[A-Za-z_]\w*)=)?(?P<shape>\d+(?:x\d+)*)(?::(?P<dtype>\w+))?$")
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
_TRUE = {"bf16-true": torch.bfloat16, "fp16-true": torch.float16, "64": torch.float64}

Inputs = tuple[list[tuple[tuple[int, ...], torch.dtype]], dict[str, tuple[tuple[int, ...], torch.dtype]]]


def parse_inputs(given: Sequence[str]) -> Inputs:
    """The shapes and dtypes of a batch, from texts such as `8x128:int64` or `input_ids=8x128:int64`."""
    positional, named = [], {}
    for text in given:
        found = _INPUT.match(text)
        dtype = getattr(torch, (found and found["dtype"]) or "float32", None)
        if found is None or not isinstance(dtype, torch.dtype):
            raise ConfigurationError(
                f"--input {text!r} cannot be read. Give [NAME=]SHAPE[:DTYPE], such as 8x128:int64 or "
                "input_ids=8x128:int64.",
            )
        entry = (tuple(map(int, found["shape"].split("x"))), dtype)
        if found["name"]:
            named[found["name"]] = entry
        else:
            positional.append(entry)
    return positional, named


def peak_of_training(
    model: nn.Module,
    inputs: Inputs,
    precision: str = "32",
    make_optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
) -> tuple[int, int]:
    """Peak bytes of the second training step of a model on one process; nothing is allocated."""
    positional, named = inputs
    meta = copy.deepcopy(model)
    with FakeTensorMode(allow_non_fake_inputs=True), LiveBytes() as live:
        copied = _without_memory(meta, _TRUE.get(precision))
        live.add([*copied.parameters(), *copied.buffers()])
        arguments = [_tensor(*entry, precision) for entry in positional]
        keywords = {name: _tensor(*entry, precision) for name, entry in named.items()}
        optimizer = make_optimizer([p for p in copied.parameters() if p.requires_grad])
        for _ in range(2):  # the optimizer makes its state in the first
            live.peak = live.current
            with _forward_context(precision):
                output = copied(*arguments, **keywords)
            loss = _loss_of(output)
            del output
            loss.backward()  # type: ignore[no-untyped-call]
            del loss
            of_backward, live.peak = live.peak, live.current
            optimizer.step()
            optimizer.zero_grad()
    return of_backward, live.peak


def _without_memory(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """Give a model fresh tensors that claim to be on the CPU, under a fake mode; ties stay ties."""
    made: dict[int, Any] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:
                    empty = torch.empty(parameter.shape, dtype=dtype or parameter.dtype)
                    made[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                kind = dtype if dtype is not None and buffer.is_floating_point() else buffer.dtype
                module._buffers[name] = made.setdefault(id(buffer), torch.empty(buffer.shape, dtype=kind))
    return model.train()


def _tensor(shape: tuple[int, ...], dtype: torch.dtype, precision: str) -> torch.Tensor:
    if dtype.is_floating_point:
        return torch.empty(shape, dtype=_TRUE.get(precision, dtype))
    return torch.zeros(shape, dtype=dtype)


def _forward_context(precision: str) -> AbstractContextManager[Any]:
    dtype = _AUTOCAST.get(precision)
    return torch.autocast("cpu", dtype) if dtype is not None else nullcontext()


def _loss_of(output: Any) -> torch.Tensor:
    """The loss that a model returns, else the mean of what it returns."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    floats = [
        leaf
        for leaf in tree_leaves(dict(output) if isinstance(output, Mapping) else output)
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.requires_grad
    ]
    if not floats:
        raise ConfigurationError("The model returns nothing that depends on its parameters, so it cannot be trained.")
    return floats[0].float().mean()
