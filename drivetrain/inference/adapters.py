"""Low-rank adapters over a frozen model whose weights are quantised: what is trained, saved and merged is small."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.checkpoint.tensor_file import bytes_of
from drivetrain.inference.frozen_layers import FrozenLinear
from drivetrain.inference.loading import Checkpoint
from drivetrain.inference.peft_layers import FrozenForPeft, PeftLayers
from drivetrain.inference.quantization.base import Quantizer
from drivetrain.inference.quantization.models import is_within, quantize_model
from drivetrain.inference.quantization.registry import get_quantizer
from drivetrain.runtime.errors import CheckpointError, ConfigurationError, nearest

_BASES, _BACKENDS = ("replicated", "sharded"), ("drivetrain", "peft")
HASH = "base_sha256"
"""The name, in the state of a model with adapters, of the digest of all that is frozen in it."""


class LoRALinear(FrozenLinear):
    """A frozen layer, and two small matrices whose product is added to what it computes.

    Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2021).

    Args:
        base: The layer, with `in_features` and `out_features`.
        rank: Rows of the first matrix; 0 for none of both.
        alpha: The product is scaled by `alpha / rank`.
        dropout: Share of the inputs that the matrices do not see in training.
        quantizer: What has quantised the layer; None for one that is not quantised.
        sharded: Whether strategies may shard the frozen layer's weight.

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
            self.lora_B = nn.Parameter(torch.zeros(base.out_features, rank, device=device))
            nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Compute the layer, and add the product.

        Args:
            x: Shape `(..., in_features)`.
        """
        output = super().forward(x)
        if self.rank:
            low = nn.functional.linear(self.dropout(x).to(self.lora_A.dtype), self.lora_A)
            output = output + (nn.functional.linear(low, self.lora_B) * self.scaling).to(output.dtype)
        return output

    def update(self) -> Tensor:
        """What the matrices add to the layer's weight; shape `(out_features, in_features)`."""
        if not self.rank:
            return torch.zeros((), device=self.scaling.device)
        return self.scaling * (self.lora_B.detach() @ self.lora_A.detach())

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, rank={self.rank}"


class QLoRA:
    """Adapters over a quantised model. The model is trained as any other, under any strategy that keeps layers whole.

    A checkpoint holds the adapters, and a digest of what they were trained over; it is refused over anything else.

    Source: Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs" (2023).

    Args:
        rank: Rows of the first matrix of each adapter.
        alpha: What an adapter adds is scaled by `alpha / rank`; `2 * rank` if None.
        targets: Names of modules whose layers get adapters, such as `["q_proj", "v_proj"]`; all quantised layers if
            None.
        dropout: Share of the inputs that adapters do not see in training.
        quantizer: How the frozen layers are stored: a quantizer or the name of one; None leaves them as they are.
        base: `"replicated"`, where every process holds the frozen layers whole, or `"sharded"`, where FSDP shards their
            packed weights among the processes as it does parameters. The numbers and the checkpoints are the same.
        backend: `"drivetrain"`, or `"peft"` for peft's LoRA layers over the same frozen ones.
        peft_options: Further arguments of `peft.LoraConfig`, such as `{"use_rslora": True}`.

    Raises:
        ConfigurationError: An option cannot be.

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
            raise ConfigurationError(f"QLoRA(rank={rank}): give 1 or more.", code="DT-002")
        if not 0.0 <= dropout < 1.0:
            raise ConfigurationError(f"QLoRA(dropout={dropout}): give a share from 0 to below 1.", code="DT-002")
        for name, given, allowed in (("base", base, _BASES), ("backend", backend, _BACKENDS)):
            if given not in allowed:
                raise ConfigurationError(
                    f"QLoRA({name}={given!r}): give {' or '.join(map(repr, allowed))}.{nearest(str(given), allowed)}",
                    code="DT-001",
                )
        self.base, self.backend = base, backend
        self._peft = PeftLayers(rank, alpha, dropout, peft_options) if backend == "peft" else None
        if peft_options is not None and self._peft is None:
            raise ConfigurationError(
                "QLoRA(peft_options=...) are those of backend='peft'. Ask for it, or drop them.", code="DT-005"
            )
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
        """Quantise and freeze a model, and give its layers adapters. Call it alike on all processes, with one seed.

        Args:
            model: The model, which is changed; with weights, or built by `init_empty_weights`.
            weights: As for `quantize_model`.
            device_map: As for `quantize_model`.
            **options: Further arguments of `quantize_model`.

        Returns:
            The model.

        Raises:
            ConfigurationError: A target is not in the model, or no layer is.
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
                f"QLoRA finds no linear layer within {type(model).__name__} to give an adapter. Put the layer into a "
                "module, such as nn.Sequential(layer).",
                code="DT-044",
            )
        model.requires_grad_(False)
        digest = digest_of(model)
        for name in dict.fromkeys((*stored, *adapted)):
            parent, _, last = name.rpartition(".")
            layer = self._frozen(model.get_submodule(name), self.quantizer if name in stored else None, name in adapted)
            setattr(model.get_submodule(parent), last, layer.train(model.training))
        if self._peft is not None:
            self._peft.add(model, adapted)
        _save_adapters_alone(model, digest)
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
                    f"QLoRA(targets=...) names {target!r}, and no linear layer of {type(model).__name__} is called so."
                    f"{nearest(target, parts)}",
                    code="DT-043",
                )
        return [name for name in known if is_within(name, self.targets)]


def digest_of(model: nn.Module) -> str:
    """SHA-256 of the values of all parameters of a model, by name, quantised ones as they are stored.

    Args:
        model: The model.
    """
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


def _save_adapters_alone(model: nn.Module, digest: str) -> None:
    """Let a state dict of the model hold what is trained, its buffers, and the digest."""
    model.register_buffer(HASH, torch.tensor(list(bytes.fromhex(digest)), dtype=torch.uint8))
    frozen = [name for name, parameter in model.named_parameters(remove_duplicate=False) if not parameter.requires_grad]
    model.register_state_dict_post_hook(_WithoutFrozen(frozen))  # type: ignore[no-untyped-call]
    model.register_load_state_dict_pre_hook(_WithFrozen(frozen, digest))  # type: ignore[no-untyped-call]


class _WithoutFrozen:
    """Takes frozen parameters out of a state dict, but for those that are trained after all."""

    def __init__(self, frozen: Sequence[str]) -> None:
        self._frozen = frozen

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        held = dict(module.named_parameters(remove_duplicate=False))
        for name in self._frozen:
            if name not in held or not held[name].requires_grad:
                state.pop(prefix + name, None)


class _WithFrozen:
    """Puts the frozen parameters that a module has into a state that it is to load, once it is known to be of them."""

    def __init__(self, frozen: Sequence[str], digest: str) -> None:
        self._frozen, self._digest = frozen, digest

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, *_others: Any) -> None:
        found = state.get(prefix + HASH)
        if found is None:
            return
        digest = bytes(found.detach().cpu().tolist()).hex()
        if digest != self._digest:
            raise CheckpointError(
                f"These adapters were trained over other weights (SHA-256 {digest[:12]}…) than {type(module).__name__} "
                f"has ({self._digest[:12]}…). Load the same weights, quantised in the same way, before apply()."
            )
        held = dict(module.named_parameters(remove_duplicate=False))
        for name in self._frozen:
            if name in held:
                state.setdefault(prefix + name, held[name].detach())
