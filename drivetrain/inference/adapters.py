"""LoRA adapters on frozen, optionally quantized linear layers."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from drivetrain.checkpoint.tree import bytes_of
from drivetrain.inference.loading import Checkpoint
from drivetrain.inference.quantization.base import Quantizer, bind_weight, get_quantizer, weight_parts
from drivetrain.inference.quantization.models import is_within, quantize_model
from drivetrain.runtime.errors import CheckpointError, ConfigurationError, PackageMissingError, nearest
from drivetrain.runtime.memory import parameter_size

_ALIGNED = 16  # the parts of a packed weight start at multiples of this many bytes

Bind = Callable[[nn.Module, Mapping[str, Tensor]], None]


class _Part(NamedTuple):
    start: int
    dtype: torch.dtype
    shape: torch.Size

    @property
    def end(self) -> int:
        return self.start + self.dtype.itemsize * math.prod(self.shape)


class FrozenLinear(nn.Module):
    """Linear layer with frozen weights, quantized or not.

    It moves itself to the device of its inputs. The wrapped layer is not a submodule. State dicts do not contain it,
    and `half()` and the like do not cast it.

    Args:
        base: The layer, with `in_features` and `out_features`.
        quantizer: The quantizer that has quantized the layer, or None.
        sharded: Allow strategies to shard the weight. Its bytes then become the parameter `packed`, which mixed
            precision does not cast. If False, every process holds the full layer.

    Attributes:
        base: The frozen layer.
        packed: The bytes of the weight, shape `(bytes,)`, or None if `sharded` is False.
        frozen_size: Number of elements of the layer's parameters before quantization, and the bytes that they occupy.
    """

    base: nn.Module
    packed: nn.Parameter | None
    frozen_size: tuple[int, int]

    def __init__(self, base: Any, quantizer: Quantizer | None = None, sharded: bool = False) -> None:
        nn.Module.__init__(self)
        # nn.Module.__setattr__ would register the layer as a submodule.
        self.__dict__["base"] = base
        self.in_features, self.out_features = base.in_features, base.out_features
        self._base_device = next(iter(_tensors(base))).device
        sizes = [parameter_size(base, name, held, held.numel()) for name, held in base.named_parameters(recurse=False)]
        self.frozen_size = sum(elements for elements, _ in sizes), sum(nbytes for _, nbytes in sizes)
        self._parts: dict[str, _Part] = {}
        self._bind: Bind = bind_weight if quantizer is None else quantizer.bind
        if quantizer is not None:
            quantizer.settle(base)
        self.register_parameter("packed", None)
        if sharded:
            self._pack(weight_parts(base) if quantizer is None else quantizer.parts(base))

    def forward(self, x: Tensor) -> Tensor:
        if x.device != self._base_device:
            self.base.to(x.device)
            self._base_device = x.device
        if self.packed is None:
            output: Tensor = self.base(x)
            return output
        # FSDP gathers `packed` for this forward and frees it afterwards. Autograd saves views of the same memory,
        # which FSDP fills again before backward.
        self._bind(self.base, {name: _view(self.packed, part) for name, part in self._parts.items()})
        try:
            output = self.base(x)
        finally:
            self._unbind()
        return output

    def train(self, mode: bool = True) -> FrozenLinear:
        self.base.train(mode)
        super().train(mode)
        return self

    def extra_repr(self) -> str:
        return f"{type(self.base).__name__}({self.in_features}, {self.out_features})"

    def _pack(self, parts: Mapping[str, Tensor]) -> None:
        end = 0
        for name, tensor in parts.items():
            self._parts[name] = _Part(end, tensor.dtype, tensor.shape)
            # `view(dtype)` needs offsets that are multiples of the element size.
            end = math.ceil(self._parts[name].end / _ALIGNED) * _ALIGNED
        packed = torch.zeros(end, dtype=torch.uint8, device=self._base_device)
        for name, tensor in parts.items():
            _view(packed, self._parts[name]).copy_(tensor)
        self.packed = nn.Parameter(packed, requires_grad=False)
        self._unbind()

    def _unbind(self) -> None:
        empty = {
            # Expanded tensors have the shape, but only the memory of one element.
            name: torch.empty(1, dtype=part.dtype, device=self._base_device).expand(part.shape)
            for name, part in self._parts.items()
        }
        self._bind(self.base, empty)


def _view(packed: Tensor, part: _Part) -> Tensor:
    return packed.detach()[part.start : part.end].view(part.dtype).view(part.shape)


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


# LoRA layers of peft


_OURS = ("r", "lora_alpha", "lora_dropout", "target_modules")
# Values of `init_lora_weights` that do not read the base layer's weight, which is packed here.
_BEGINNINGS = (True, False, "gaussian")
_NAME = "default"


class FrozenForPeft(FrozenLinear, nn.Linear):
    # An nn.Linear, as peft requires. Its weight is hidden, so that peft cannot change it.

    scaling: Tensor

    def __init__(self, base: Any, quantizer: Quantizer | None = None, sharded: bool = False) -> None:
        super().__init__(base, quantizer, sharded)
        self.register_parameter("bias", None)
        self.register_buffer("scaling", torch.tensor(0.0, device=self._base_device))

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        # Peft creates its adapters on the device of the weight.
        return torch.empty(0, dtype=torch.uint8, device=self.scaling.device)


class PeftLayers:
    def __init__(self, rank: int, alpha: float | None, dropout: float, options: Mapping[str, Any] | None) -> None:
        self._options = dict(options or {})
        ours = [name for name in self._options if name in _OURS]
        if ours:
            raise ConfigurationError(
                f"QLoRA(peft_options=...) cannot set {ours[0]!r}. Use QLoRA's own arguments instead.",
            )
        beginning = self._options.get("init_lora_weights", True)
        reads = "use_dora" if self._options.get("use_dora") else ""
        reads = reads or ("" if beginning in _BEGINNINGS else f"init_lora_weights={beginning!r}")
        if reads:
            raise ConfigurationError(
                f"QLoRA(backend='peft') does not support {reads}, which needs the unquantized weights of the base "
                "layers. Use quantize_model and then peft's get_peft_model instead.",
            )
        self._options |= {"r": rank, "lora_alpha": 2 * rank if alpha is None else alpha, "lora_dropout": dropout}

    def check(self) -> None:
        if find_spec("peft") is None:
            raise PackageMissingError(
                "QLoRA(backend='peft') needs peft, which is not installed: pip install peft. Without it, "
                "backend='drivetrain' trains the same adapters."
            )
        import peft

        known = list(peft.LoraConfig.__dataclass_fields__)
        for name in self._options:
            if name not in known:
                raise ConfigurationError(
                    f"peft.LoraConfig has no option {name!r}.{nearest(name, known)} See QLoRA(peft_options=...).",
                )

    def add(self, model: nn.Module, layers: Sequence[str]) -> None:
        # The training modes of modules stay as they are.
        import peft

        pattern = "|".join(re.escape(name) for name in layers)  # peft matches the names of a list as suffixes
        config = peft.LoraConfig(target_modules=f"(?:{pattern})", **self._options)
        training = {name: module.training for name, module in model.named_modules()}
        with _has_parameter(model, model.get_submodule(layers[0]).scaling.device):
            peft.inject_adapter_in_model(config, model, adapter_name=_NAME)
        for name in layers:
            adapter: Any = model.get_submodule(name)
            frozen: Any = adapter.get_base_layer()
            frozen.scaling.fill_(adapter.scaling[_NAME])  # a checkpoint of peft does not contain the scale
            adapter.train(training[name])


@contextmanager
def _has_parameter(model: nn.Module, device: Any) -> Iterator[None]:
    if any(True for _ in model.parameters()):
        yield
        return
    # Peft reads the device from a parameter.
    name = "peft_reads_the_device"
    model.register_parameter(name, nn.Parameter(torch.empty(0, device=device), requires_grad=False))
    try:
        yield
    finally:
        delattr(model, name)


_BASES, _BACKENDS = ("replicated", "sharded"), ("drivetrain", "peft")
HASH = "base_sha256"
"""Name of the buffer that holds the SHA-256 digest of a model's frozen parameters."""


class LoRALinear(FrozenLinear):
    """Frozen linear layer with a trainable low-rank update of its weight (LoRA).

    Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2021).

    Args:
        base: The layer, with `in_features` and `out_features`.
        rank: Rank of the update. 0 adds no matrices.
        alpha: The update is scaled by `alpha / rank`.
        dropout: Dropout probability on the input of the update, in training.
        quantizer: The quantizer that has quantized the layer, or None.
        sharded: Allow strategies to shard the frozen layer's weight.

    Attributes:
        base: The frozen layer.
    """

    scaling: Tensor

    def __init__(
        self,
        base: Any,
        rank: int,
        alpha: float,
        dropout: float = 0.0,
        quantizer: Quantizer | None = None,
        sharded: bool = False,
    ) -> None:
        super().__init__(base, quantizer, sharded)
        self.rank, device = rank, self._base_device
        self.register_buffer("scaling", torch.tensor(alpha / rank if rank else 0.0, device=device))
        if rank:
            self.lora_A = nn.Parameter(torch.empty(rank, base.in_features, device=device))
            # Zero, so that the first forward equals the frozen layer's.
            self.lora_B = nn.Parameter(torch.zeros(base.out_features, rank, device=device))
            nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Return the frozen layer's output for `x`, plus that of the trained low-rank matrices.

        Args:
            x: Input of shape `(..., in_features)`.
        """
        output = super().forward(x)
        if self.rank:
            low = nn.functional.linear(self.dropout(x).to(self.lora_A.dtype), self.lora_A)
            # Two thin products; `B @ A` first would cost a full weight matrix.
            output = output + (nn.functional.linear(low, self.lora_B) * self.scaling).to(output.dtype)
        return output

    def update(self) -> Tensor:
        """Return the change of the layer's frozen weight by its trained LoRA matrices, which is `scaling * B @ A`.

        Returns a scalar 0 if the rank is 0.
        """
        if not self.rank:
            return torch.zeros((), device=self.scaling.device)
        return self.scaling * (self.lora_B.detach() @ self.lora_A.detach())

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, rank={self.rank}"


class QLoRA:
    """Fine-tuning method that trains small LoRA adapters on a frozen, quantized model.

    Train the model like any other, under a strategy that does not split layers. A checkpoint contains the adapters and
    a SHA-256 digest of the frozen weights. Loading it on other frozen weights raises a `CheckpointError`.

    Source: Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs" (2023).

    Args:
        rank: Rank of each adapter.
        alpha: An adapter's output is scaled by `alpha / rank`. None means `2 * rank`.
        targets: Names of modules whose linear layers get adapters, such as `["q_proj", "v_proj"]`. None selects all
            quantized layers.
        dropout: Dropout probability on the adapters' inputs, in training.
        quantizer: Quantizer of the frozen layers, or its registered name. None leaves the layers unquantized.
        base: `"replicated"` keeps the full frozen layers in every process. With `"sharded"`, FSDP shards their packed
            weights like parameters. Results and checkpoints are identical.
        backend: `"drivetrain"`, or `"peft"` for peft's LoRA layers on the same frozen layers.
        peft_options: Further arguments of `peft.LoraConfig`, such as `{"use_rslora": True}`.

    Raises:
        ConfigurationError: An option is invalid.

    Example:
        ```python
        import torch
        from torch import nn

        from drivetrain import QLoRA

        model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128), nn.Linear(128, 2))
        QLoRA(rank=4, quantizer="int8wo").apply(model)
        optimizer = torch.optim.AdamW(each for each in model.parameters() if each.requires_grad)
        ```
    """

    def __init__(
        self,
        rank: int = 8,
        alpha: float | None = None,
        targets: Sequence[str] | None = None,
        dropout: float = 0.0,
        quantizer: Quantizer | str | None = "nf4",
        *,
        base: str = "replicated",
        backend: str = "drivetrain",
        peft_options: Mapping[str, Any] | None = None,
    ) -> None:
        if rank < 1:
            raise ConfigurationError(f"QLoRA's rank is {rank}, but must be at least 1.")
        if not 0.0 <= dropout < 1.0:
            raise ConfigurationError(f"QLoRA's dropout is {dropout}, but must be at least 0 and less than 1.")
        for name, given, allowed in (("base", base, _BASES), ("backend", backend, _BACKENDS)):
            if given not in allowed:
                raise ConfigurationError(
                    f"{name} cannot be {given!r}. Use {' or '.join(map(repr, allowed))}.{nearest(str(given), allowed)}",
                )
        self.base, self.backend = base, backend
        self._peft = PeftLayers(rank, alpha, dropout, peft_options) if backend == "peft" else None
        if peft_options is not None and self._peft is None:
            raise ConfigurationError("QLoRA(peft_options=...) needs backend='peft'. Set it, or remove peft_options.")
        self.rank, self.alpha = rank, 2.0 * rank if alpha is None else float(alpha)
        self.targets = None if targets is None else tuple(targets)
        self.dropout = dropout
        self.quantizer = None if quantizer is None else get_quantizer(quantizer)

    def apply(
        self,
        model: nn.Module,
        weights: Checkpoint | None = None,
        device_map: Any = None,
        **options: Any,
    ) -> nn.Module:
        """Prepare a model for QLoRA training: load `weights`, quantize and freeze the layers, and add adapters.

        All processes must call this method with the same arguments and the same random seed.

        Args:
            model: The model to change. It may be on the meta device if `weights` are given.
            weights: Checkpoint to load, as for `quantize_model`.
            device_map: Devices of the modules, as for `quantize_model`.
            **options: Further arguments of `quantize_model`.

        Returns:
            The model.

        Raises:
            ConfigurationError: The model has no linear layer, or none with the name of a target.
        """
        if self._peft is not None:
            self._peft.check()
        if self.quantizer is None:
            stored = [name for name, module in model.named_modules() if type(module) is nn.Linear and name]
        else:
            quantize_model(model, self.quantizer, weights, device_map, **options)
            stored = list(model.__dict__.pop("quantization").layers)
        adapted = self._adapted(model, stored)
        if not adapted:
            raise ConfigurationError(
                f"QLoRA finds no linear layer inside {type(model).__name__}. Wrap a single layer in a module, such as "
                "nn.Sequential(layer).",
            )
        model.requires_grad_(False)
        digest = digest_of(model)  # before layers are replaced, since their parameters then have other names
        for name in dict.fromkeys((*stored, *adapted)):
            parent, _, last = name.rpartition(".")
            layer = self._frozen(model.get_submodule(name), self.quantizer if name in stored else None, name in adapted)
            setattr(model.get_submodule(parent), last, layer.train(model.training))
        if self._peft is not None:
            self._peft.add(model, adapted)
        _exclude_frozen_from_state(model, digest)
        return model

    def _frozen(self, layer: nn.Module, quantizer: Quantizer | None, adapted: bool) -> FrozenLinear:
        sharded = self.base == "sharded"
        if self._peft is not None:
            return FrozenForPeft(layer, quantizer, sharded)
        return LoRALinear(layer, self.rank if adapted else 0, self.alpha, self.dropout, quantizer, sharded)

    def _adapted(self, model: nn.Module, stored: Sequence[str]) -> list[str]:
        if self.targets is None:
            return list(stored)
        known = [name for name, module in model.named_modules() if name in stored or type(module) is nn.Linear]
        for target in self.targets:
            if not any(is_within(name, [target]) for name in known):
                parts = {part for name in known for part in name.split(".")}
                raise ConfigurationError(
                    f"QLoRA(targets=...) names {target!r}, but {type(model).__name__} has no linear layer of this name."
                    f"{nearest(target, parts)}",
                )
        return [name for name in known if is_within(name, self.targets)]


def digest_of(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters(remove_duplicate=False)):
        for part in _plain(parameter.detach()):
            digest.update(f"{name} {tuple(part.shape)} {part.dtype}".encode())
            digest.update(bytes_of(part.cpu().contiguous()))
    return digest.hexdigest()


def _plain(tensor: Tensor) -> Iterator[Tensor]:
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield tensor.data if type(tensor) is Tensor else tensor.as_subclass(Tensor)
    else:
        for name in flatten()[0]:
            yield from _plain(getattr(tensor, name))


def _exclude_frozen_from_state(model: nn.Module, digest: str) -> None:
    # With the digest, loading can verify that the frozen parameters are equal.
    model.register_buffer(HASH, torch.tensor(list(bytes.fromhex(digest)), dtype=torch.uint8))
    frozen = [name for name, parameter in model.named_parameters(remove_duplicate=False) if not parameter.requires_grad]
    model.register_state_dict_post_hook(_DropFrozen(frozen))  # type: ignore[no-untyped-call]
    model.register_load_state_dict_pre_hook(_RestoreFrozen(frozen, digest))  # type: ignore[no-untyped-call]


class _DropFrozen:
    def __init__(self, frozen: Sequence[str]) -> None:
        self._frozen = frozen

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        held = dict(module.named_parameters(remove_duplicate=False))
        for name in self._frozen:
            # The user may have unfrozen a parameter since. Its trained values are in no other file.
            if name not in held or not held[name].requires_grad:
                state.pop(prefix + name, None)


class _RestoreFrozen:
    def __init__(self, frozen: Sequence[str], digest: str) -> None:
        self._frozen, self._digest = frozen, digest

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, *_others: Any) -> None:
        found = state.get(prefix + HASH)
        if found is None:
            return
        digest = bytes(found.detach().cpu().tolist()).hex()
        if digest != self._digest:
            raise CheckpointError(
                f"These adapters were trained on other weights (SHA-256 {digest[:12]}…) than {type(module).__name__} "
                f"has ({self._digest[:12]}…). Load the same weights, quantized in the same way, before apply()."
            )
        # The state dict has no frozen parameters, so those of the model are added.
        held = dict(module.named_parameters(remove_duplicate=False))
        for name in self._frozen:
            if name in held:
                state.setdefault(prefix + name, held[name].detach())
