"""`FP8Backend`: which package computes in 8-bit floats, and what it needs around a model."""

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
    """A package that computes in 8-bit floats.

    Attributes:
        name: The name that users write.
        recipes: The names of its ways of scaling, the default first.
        recipe: The one in use.
    """

    name: ClassVar[str]
    recipes: ClassVar[tuple[str, ...]]
    recipe: str

    @abstractmethod
    def setup(self, kind: DeviceKind) -> None:
        """Bind the backend to a kind of device."""

    @abstractmethod
    def convert(self, model: nn.Module, layers: Sequence[nn.Linear], kept: Sequence[nn.Linear]) -> None:
        """Let layers of a model compute in 8-bit floats; their parameters and names stay what they are."""

    def context(self) -> AbstractContextManager[Any] | None:
        """What a forward must run in; None where nothing is needed."""
        return None

    def prepare_optimizer(self, optimizer: Optimizer, models: Iterable[nn.Module]) -> Optimizer:
        """See an optimizer once before its first step."""
        return optimizer

    def after_step(self, optimizer: Optimizer) -> None:
        """Bring up to date what depends on the parameters that an optimizer has just changed."""

    def state_dict(self, models: Sequence[nn.Module]) -> dict[str, Any]:
        """What scaling must remember over a restart, such as the largest values of past steps."""
        return {}

    def load_state_dict(self, models: Sequence[nn.Module], state: dict[str, Any]) -> None:
        """Take back what `state_dict` returned."""


def check_choice(option: str, given: Any, allowed: Sequence[str]) -> str:
    """One of some names, whatever its case."""
    names = {name.lower(): name for name in allowed}
    if not isinstance(given, str) or given.lower() not in names:
        raise ConfigurationError(
            f"{option}={given!r}. Allowed: {', '.join(allowed)}.{nearest(str(given).lower(), names)}"
        )
    return names[given.lower()]


# Which linear layers of a model compute in 8-bit floats, and putting others in their place


LayerFilter = Callable[[nn.Module, str], bool]

CONVERTED = "_computes_in_float8"
_SHOWN = 12
# Shared with the layer that is replaced, so that what is registered or removed there later counts here.
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
    """The linear layers of a model, by name.

    Attributes:
        converted: Those that are to compute in 8-bit floats.
        kept: The others.
        misfits: Those among the others whose sizes do not fit, as the names and sizes to list.
        before: How many compute in 8-bit floats already.
    """

    converted: dict[str, nn.Linear] = field(default_factory=dict)
    kept: dict[str, nn.Linear] = field(default_factory=dict)
    misfits: list[str] = field(default_factory=list)
    before: int = 0


def choose_layers(
    model: nn.Module, multiple_of: int, keep_first_and_last: bool, wanted: LayerFilter | None
) -> ChosenLayers:
    """Choose the layers of a model."""
    linear = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
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
    """Whether a layer's own forward is that of `nn.Linear`, and is what computes.

    A subclass may have a forward of its own; `nn.MultiheadAttention` reads the weight of its layer and never calls it.
    """
    if isinstance(layer, nn.modules.linear.NonDynamicallyQuantizableLinear) or "forward" in layer.__dict__:
        return False
    return type(layer).forward is nn.Linear.forward


def listed(names: list[str]) -> str:
    """Some names, the first of them where there are many."""
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def replace_layers(model: nn.Module, replacements: Mapping[nn.Module, nn.Module]) -> None:
    """Put modules in the place of others, wherever those are registered.

    Parameters and hooks are those of the module before: both share the dicts that hold them. So an optimizer, a
    strategy that puts shards in the place of parameters, and the handle of a hook that is removed later find what they
    expect.
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
