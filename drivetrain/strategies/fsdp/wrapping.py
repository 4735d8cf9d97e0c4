"""Which modules are gathered and freed as one: the units that a model is sharded by."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from drivetrain.runtime.errors import ConfigurationError, nearest

WrapPolicy = Callable[[nn.Module], bool]


def units_of(model: nn.Module, wrap: Any) -> list[nn.Module]:
    """The modules inside a model that become units of their own, innermost first.

    Args:
        model: the model; what no unit takes belongs to the model itself.
        wrap: `"auto"` (the model's own `_no_split_modules`, else the blocks that repeat in a `ModuleList`), a class or
            a class's name or several, a number of parameters from which on a module is a unit, a function that says of
            a module whether it is one, or None for the whole model as one.

    Raises:
        ConfigurationError: nothing in the model matches; the classes that it has are listed.
    """
    if wrap is None:
        return []
    if wrap == "auto":
        chosen = _automatic(model)
    elif isinstance(wrap, bool):
        raise ConfigurationError(f"wrap={wrap!r}: give 'auto', classes, a number of parameters, a function or None.")
    elif isinstance(wrap, int):
        chosen = _by_size(model, wrap)
    elif isinstance(wrap, str | type):
        chosen = _by_class(model, [wrap])
    elif isinstance(wrap, Iterable):
        chosen = _by_class(model, list(wrap))
    elif callable(wrap):
        chosen = [module for module in model.modules() if module is not model and wrap(module)]
        if not chosen:
            raise ConfigurationError(f"The wrap function says True for no module. {_classes_of(model)}")
    else:
        raise ConfigurationError(
            f"wrap must be 'auto', a class, a class's name or several, a number of parameters, a function or None; "
            f"got {type(wrap).__name__}."
        )
    wanted = {id(module) for module in chosen if any(True for _ in module.parameters())}
    return [module for module in _innermost_first(model) if id(module) in wanted and _has_forward(module)]


def _innermost_first(model: nn.Module) -> list[nn.Module]:
    return [module for module in reversed(list(model.modules())) if module is not model]


def _has_forward(module: nn.Module) -> bool:
    return not (isinstance(module, nn.ModuleList | nn.ModuleDict) and type(module).forward is nn.Module.forward)


def _automatic(model: nn.Module) -> list[nn.Module]:
    """What the model names itself, else what repeats; nothing in a model without either."""
    named = {
        name
        for module in model.modules()
        for name in (getattr(module, "_no_split_modules", None) or ())
        if isinstance(name, str)
    }
    found = [module for module in model.modules() if module is not model and type(module).__name__ in named]
    return found or repeated_blocks(model)


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks of a model: members of a `ModuleList` or `Sequential` whose class occurs in it more than once.

    A block has modules of its own inside, as a transformer layer has; a repeated `Linear` is none. Blocks within
    blocks, such as the experts of a layer, belong to the outer ones.
    """
    found: list[nn.Module] = []
    inside: set[int] = set()
    for module in model.modules():
        if id(module) in inside or not isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict):
            continue
        members = list(module.values() if isinstance(module, nn.ModuleDict) else module)
        counts = Counter(type(member) for member in members)
        for member in members:
            if counts[type(member)] > 1 and any(True for _ in member.children()) and _has_forward(member):
                found.append(member)
                inside.update(id(inner) for inner in member.modules())
    return found


def _by_class(model: nn.Module, classes: list[Any]) -> list[nn.Module]:
    found: list[nn.Module] = []
    for wanted in classes:
        if not isinstance(wanted, str | type):
            raise ConfigurationError(f"wrap takes classes and their names, got {wanted!r}.")
        matching = [
            module
            for module in model.modules()
            if module is not model
            and (type(module).__name__ == wanted if isinstance(wanted, str) else isinstance(module, wanted))
        ]
        if not matching:
            name = wanted if isinstance(wanted, str) else wanted.__name__
            raise ConfigurationError(
                f"wrap names {name!r}, but the model has no module of this class. {_classes_of(model)}"
                f"{nearest(name, {type(module).__name__ for module in model.modules()})}"
            )
        found.extend(matching)
    return found


def _by_size(model: nn.Module, least: int) -> list[nn.Module]:
    """Modules with at least so many parameters that no unit further in has taken."""
    if least < 1:
        raise ConfigurationError(f"wrap={least}: a unit needs at least 1 parameter.")
    found: list[nn.Module] = []
    taken: set[int] = set()
    for module in _innermost_first(model):
        own = {id(p): p for p in module.parameters() if id(p) not in taken}
        if sum(parameter.numel() for parameter in own.values()) >= least and _has_forward(module):
            found.append(module)
            taken.update(own)
    if not found and sum(parameter.numel() for parameter in model.parameters()) < least:
        total = sum(parameter.numel() for parameter in model.parameters())
        raise ConfigurationError(
            f"wrap={least} asks for units of at least {least} parameters, but the whole model has {total}."
        )
    return found


def _classes_of(model: nn.Module) -> str:
    counts = Counter(type(module).__name__ for module in model.modules() if module is not model)
    listed = ", ".join(f"{name} ({count})" for name, count in counts.most_common(20))
    return f"It has: {listed or 'no modules inside'}."
