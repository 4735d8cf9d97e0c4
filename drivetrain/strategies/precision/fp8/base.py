"""`FP8Backend` base class for packages that compute in float8, and selection of the layers to convert."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import nn
from torch.optim import Optimizer

from drivetrain.runtime.devices import DeviceKind
from drivetrain.runtime.errors import ConfigurationError, nearest


class FP8Backend(ABC):
    """Base class for adapters to packages that compute linear layers in float8.

    Attributes:
        name: Name for `FP8(backend=name)`.
        recipes: Names of the scaling recipes, the default first.
        recipe: The selected recipe.
    """

    name: ClassVar[str]
    recipes: ClassVar[tuple[str, ...]]
    recipe: str

    @abstractmethod
    def setup(self, kind: DeviceKind) -> None:
        # Imports the package, and checks that devices of this kind support float8.
        ...

    @abstractmethod
    def convert(self, model: nn.Module, layers: Sequence[nn.Linear], kept: Sequence[nn.Linear]) -> None:
        # Layers in `kept` must stay as they are.
        ...

    def context(self) -> AbstractContextManager[Any] | None:
        # For forward passes. None if no context is needed.
        return None

    def prepare_optimizer(self, optimizer: Optimizer, models: Iterable[nn.Module]) -> Optimizer:
        # Called before the optimizer's first step.
        return optimizer

    def after_step(self, optimizer: Optimizer) -> None:
        # For example to update float8 scales.
        ...

    def state_dict(self, models: Sequence[nn.Module]) -> dict[str, Any]:
        # Float8 scales and their history, for a checkpoint.
        return {}

    def load_state_dict(self, models: Sequence[nn.Module], state: dict[str, Any]) -> None: ...


def check_choice(option: str, given: Any, allowed: Sequence[str]) -> str:
    names = {name.lower(): name for name in allowed}
    if not isinstance(given, str) or given.lower() not in names:
        raise ConfigurationError(
            f"{option}={given!r} is not supported. Allowed: {', '.join(allowed)}.{nearest(str(given).lower(), names)}"
        )
    return names[given.lower()]


# Selection and replacement of the linear layers that compute in float8


LayerFilter = Callable[[nn.Module, str], bool]

CONVERTED = "_computes_in_float8"
_SHOWN = 12
# The new layer shares these dicts with the old layer, so that hooks added to or removed from either count for both.
_SHARED = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)


@dataclass
class ChosenLayers:
    """Result of `choose_layers`: the linear layers of a model that will compute in float8, and the others.

    Attributes:
        converted: Layers to convert to float8.
        kept: All other layers.
        misfits: Names and sizes of layers whose sizes do not fit.
        before: Number of layers that already compute in float8.
    """

    converted: dict[str, nn.Linear] = field(default_factory=dict)
    kept: dict[str, nn.Linear] = field(default_factory=dict)
    misfits: list[str] = field(default_factory=list)
    before: int = 0


def choose_layers(
    model: nn.Module, multiple_of: int, keep_first_and_last: bool, wanted: LayerFilter | None
) -> ChosenLayers:
    """Divide a model's linear layers, by name, into layers to convert to float8 and layers to keep.

    A layer is converted if its sizes are multiples of `multiple_of` and `wanted` returns True for the layer and its
    name. `keep_first_and_last` leaves the first and the last linear layer unchanged.
    """
    linear = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    # The first and the last layer are the most sensitive to the low precision.
    ends = {id(linear[0][1]), id(linear[-1][1])} if linear and keep_first_and_last else set()
    chosen = ChosenLayers()
    for name, layer in linear:
        name = name.replace("_orig_mod.", "")
        if hasattr(layer, CONVERTED):
            chosen.before += 1
        elif (
            layer is model
            or not _computes_by_itself(layer)
            or id(layer) in ends
            or (wanted is not None and not wanted(layer, name))
        ):
            chosen.kept[name] = layer
        elif layer.in_features % multiple_of or layer.out_features % multiple_of:
            chosen.kept[name] = layer
            chosen.misfits.append(f"{name} ({layer.in_features} to {layer.out_features})")
        else:
            chosen.converted[name] = layer
    return chosen


def _computes_by_itself(layer: nn.Linear) -> bool:
    # `nn.MultiheadAttention` reads the weight of its output layer, of this class, and never calls the layer.
    if isinstance(layer, nn.modules.linear.NonDynamicallyQuantizableLinear) or "forward" in layer.__dict__:
        return False
    return type(layer).forward is nn.Linear.forward


def listed(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def replace_layers(model: nn.Module, replacements: Mapping[nn.Module, nn.Module]) -> None:
    """Replace layers of a model by the given modules, which take over the old layers' parameters and hooks.

    A replacement shares the dicts of parameters and hooks with the old module. Optimizers, sharding and hook handles
    that were created for the old module therefore stay valid.
    """
    for old, new in replacements.items():
        new.__dict__["_parameters"] = old._parameters
        for name in _SHARED:
            if name in old.__dict__:
                old.__dict__[name].update(new.__dict__.get(name, {}))
                new.__dict__[name] = old.__dict__[name]
        for name, value in old.__dict__.items():
            new.__dict__.setdefault(name, value)
        new.train(old.training)
        new.__dict__[CONVERTED] = True
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is not None and child in replacements:
                parent._modules[name] = replacements[child]
