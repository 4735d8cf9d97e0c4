"""Where in a model its parameters and buffers are, and putting others in their place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from drivetrain.checkpoint.mapped_file import forget_mapped


@dataclass(eq=False)
class Place:
    """A name of a module under which it holds a parameter or a buffer.

    Attributes:
        module: The module.
        name: The name in it.
        is_parameter: Whether it is a parameter.
    """

    module: nn.Module
    name: str
    is_parameter: bool

    @property
    def tensor(self) -> Tensor:
        """What is there now."""
        held: Any = self._held()[self.name]
        return held  # type: ignore[no-any-return]

    def put(self, tensor: Tensor) -> None:
        """Put another tensor there; a parameter where it was one."""
        self._held()[self.name] = tensor

    def _held(self) -> dict[str, Any]:
        return self.module._parameters if self.is_parameter else self.module._buffers


def places_in(module: nn.Module) -> Iterator[Place]:
    """The places of a module itself, without those of modules within it."""
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield Place(module, name, True)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            yield Place(module, name, False)


def named_places(model: nn.Module) -> dict[str, Place]:
    """All places of a model by name; what is shared is under each of its names."""
    return {
        f"{path}.{place.name}" if path else place.name: place
        for path, module in model.named_modules(remove_duplicate=False)
        for place in places_in(module)
    }


def place_named(model: nn.Module, name: str) -> Place:
    """The place of this name."""
    path, _, last = name.rpartition(".")
    module = model.get_submodule(path)
    return Place(module, last, last in module._parameters)


def like(old: Tensor, value: Tensor) -> Tensor:
    """A value as what is to be in the place of another: a parameter in that of a parameter, as trainable as it."""
    if not isinstance(old, nn.Parameter):
        return value
    trainable = old.requires_grad and (value.is_floating_point() or value.is_complex())
    made = nn.Parameter(value, requires_grad=trainable)
    made.__dict__.update(vars(old))
    forget_mapped(made)
    return made


def set_tensor(model: nn.Module, name: str, value: Tensor) -> None:
    """Give a parameter or buffer a value on whatever device that is.

    Args:
        model: The model.
        name: Its name.
        value: The value.
    """
    place = place_named(model, name)
    place.put(like(place.tensor, value))


def persistent(model: nn.Module) -> set[str]:
    """Names of what a state dict of a model holds."""
    return set(model.state_dict(keep_vars=True))
