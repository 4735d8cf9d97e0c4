"""What a way of quantising weights has to provide."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn


class Quantizer(ABC):
    """A way of storing the weights of linear layers in fewer bits. Each is a file; `register_quantizer` adds one.

    Attributes:
        name: The name that files and users give it.
        dtype: What the rest of a model is converted to where nothing else is asked for; None to leave it.
    """

    name: ClassVar[str]
    dtype: torch.dtype | None = None

    @abstractmethod
    def check(self) -> None:
        """See that its package is there and can do this on this machine.

        Raises:
            ConfigurationError: It is not; names what to install.
        """

    def takes(self, module: nn.Module) -> bool:
        """Whether it can store the weight of a module.

        Args:
            module: The module.
        """
        return type(module) is nn.Linear

    @abstractmethod
    def quantize(self, layer: nn.Linear, weight: Tensor, device: torch.device) -> nn.Module:
        """Make the layer that is to be in the place of one.

        Args:
            layer: The layer; its bias, if it has one, is given to the new one as it is.
            weight: Its weight, on the CPU or the device.
            device: Where the new layer is to be.
        """

    @abstractmethod
    def made(self, module: nn.Module) -> bool:
        """Whether a module is one that `quantize` has made.

        Args:
            module: The module.
        """

    @abstractmethod
    def saved(self, layer: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
        """What of a quantised layer files hold, without its bias.

        Args:
            layer: The layer.

        Returns:
            Plain tensors by names within the layer, and texts that describe them.
        """

    @abstractmethod
    def opened(
        self, layer: nn.Linear, tensors: Mapping[str, Tensor], texts: Mapping[str, str], device: torch.device
    ) -> nn.Module:
        """Make a quantised layer of what `saved` returned.

        Args:
            layer: The layer that it is to take the place of.
            tensors: The tensors.
            texts: The texts.
            device: Where the new layer is to be.
        """

    def finds(self, names: Collection[str]) -> bool:
        """Whether the names within a layer that files hold are those of one that is quantised already.

        Args:
            names: The names, without that of the bias.
        """
        return False

    @abstractmethod
    def as_dict(self) -> dict[str, Any]:
        """Its options as plain values: `type(self)(**options)` is the same quantizer."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.as_dict().items())})"


def linear_like(layer: nn.Linear, kind: type[nn.Linear], **options: Any) -> Any:
    """A layer of another class with the sizes of one, and its bias.

    Args:
        layer: The layer.
        kind: The class.
        **options: Further arguments of it.
    """
    with torch.device("meta"):
        made = kind(layer.in_features, layer.out_features, bias=False, **options)
    made.bias = layer.bias
    made.train(layer.training)
    return made
