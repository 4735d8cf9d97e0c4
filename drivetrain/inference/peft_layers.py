"""LoRA layers of peft over frozen ones of ours."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.inference.frozen_layers import FrozenLinear
from drivetrain.inference.quantization.base import Quantizer
from drivetrain.runtime.errors import ConfigurationError, PackageMissingError, nearest

_OURS = ("r", "lora_alpha", "lora_dropout", "target_modules")
# What begins without looking at the weight of the layer below.
_BEGINNINGS = (True, False, "gaussian")
_NAME = "default"


class FrozenForPeft(FrozenLinear, nn.Linear):
    """A frozen layer that peft takes for a linear one. It has no weight that peft could change.

    Args:
        base: As for `FrozenLinear`.
        quantizer: As for `FrozenLinear`.
        sharded: As for `FrozenLinear`.

    Attributes:
        scaling: What the product of the adapter's matrices is multiplied by; 0 without an adapter.
    """

    scaling: Tensor

    def __init__(self, base: Any, quantizer: Quantizer | None = None, sharded: bool = False) -> None:
        super().__init__(base, quantizer, sharded)
        self.register_parameter("bias", None)
        self.register_buffer("scaling", torch.tensor(0.0, device=self._base_device))

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """Nothing, on the layer's device: peft places adapters where this is."""
        return torch.empty(0, dtype=torch.uint8, device=self.scaling.device)


class PeftLayers:
    """Puts peft's LoRA layers into models.

    Args:
        rank: Rows of the first matrix of each adapter.
        alpha: What an adapter adds is scaled by `alpha / rank`; `2 * rank` if None.
        dropout: Share of the inputs that adapters do not see in training.
        options: Further arguments of `peft.LoraConfig`.

    Raises:
        ConfigurationError: An option is one of `QLoRA`, or reads the weights below the adapters.
    """

    def __init__(self, rank: int, alpha: float | None, dropout: float, options: Mapping[str, Any] | None) -> None:
        self._options = dict(options or {})
        ours = [name for name in self._options if name in _OURS]
        if ours:
            raise ConfigurationError(
                f"QLoRA(peft_options=...) has {ours[0]!r}. Give QLoRA's rank, alpha, dropout and targets instead.",
                code="DT-004",
            )
        beginning = self._options.get("init_lora_weights", True)
        reads = "use_dora" if self._options.get("use_dora") else ""
        reads = reads or ("" if beginning in _BEGINNINGS else f"init_lora_weights={beginning!r}")
        if reads:
            raise ConfigurationError(
                f"QLoRA(backend='peft'): {reads} reads the weights below the adapters, which are packed. Use peft's "
                "get_peft_model over quantize_model for it.",
                code="DT-004",
            )
        self._options |= {"r": rank, "lora_alpha": 2 * rank if alpha is None else alpha, "lora_dropout": dropout}

    def check(self) -> None:
        """See that peft is installed and has the options.

        Raises:
            ConfigurationError: It is not, or has not.
        """
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
                    code="DT-006",
                )

    def add(self, model: nn.Module, layers: Sequence[str]) -> None:
        """Put an adapter around each of some frozen layers, and leave these alone to be trained.

        Args:
            model: The model, which is changed.
            layers: The names of layers that are `FrozenForPeft`.
        """
        import peft

        pattern = "|".join(re.escape(name) for name in layers)  # peft takes names in a list for ends of others
        config = peft.LoraConfig(target_modules=f"(?:{pattern})", **self._options)
        training = {name: module.training for name, module in model.named_modules()}
        with _has_parameter(model, model.get_submodule(layers[0]).scaling.device):
            peft.inject_adapter_in_model(config, model, adapter_name=_NAME)
        for name in layers:
            adapter: Any = model.get_submodule(name)
            frozen: Any = adapter.get_base_layer()
            frozen.scaling.fill_(adapter.scaling[_NAME])  # which a checkpoint of peft's does not hold
            adapter.train(training[name])


@contextmanager
def _has_parameter(model: nn.Module, device: Any) -> Iterator[None]:
    """Let a model have a parameter: peft reads the device from the first one (0.21), and frozen layers have none."""
    if any(True for _ in model.parameters()):
        yield
        return
    name = "peft_reads_the_device"
    model.register_parameter(name, nn.Parameter(torch.empty(0, device=device), requires_grad=False))
    try:
        yield
    finally:
        delattr(model, name)
