"""Selection of the submodules that FSDP shards, gathers and frees as one unit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import Any

from torch import nn

from drivetrain.runtime.errors import ConfigurationError, nearest
from drivetrain.runtime.logging import get_logger

logger = get_logger(__name__)

_ALLOWED = (
    "'auto', a class or its name, a list of classes, a minimum number of parameters, a function that takes a module, "
    "or None for the whole model as one unit"
)


def units_of(model: nn.Module, wrap: Any, option: str = "wrap") -> list[nn.Module]:
    """Return the submodules that `wrap` selects for FSDP to shard separately, innermost first.

    `option` is the name of the user's argument, for error messages.
    """
    chosen = _chosen(model, wrap, option)
    wanted = {id(module) for module in chosen if any(True for _ in module.parameters())}
    return [module for module in _innermost_first(model) if id(module) in wanted and has_forward(module)]


def _chosen(model: nn.Module, wrap: Any, option: str) -> list[nn.Module]:
    if wrap is None:
        return []
    if isinstance(wrap, str) and wrap == "auto":
        return _automatic(model)
    # Before the test for int, because a bool is an int, too.
    if isinstance(wrap, bool):
        raise ConfigurationError(f"{option}={wrap!r} is not supported. Allowed: {_ALLOWED}.")
    if isinstance(wrap, int):
        return _by_size(model, wrap, option)
    if isinstance(wrap, str | type):
        return _by_class(model, [wrap], option)
    if isinstance(wrap, Iterable):
        return _by_class(model, list(wrap), option)
    if callable(wrap):
        return _by_function(model, wrap, option)
    raise ConfigurationError(f"{option} cannot be a {type(wrap).__name__}. Allowed: {_ALLOWED}.")


def _innermost_first(model: nn.Module) -> list[nn.Module]:
    return [module for module in reversed(list(model.modules())) if module is not model]


def has_forward(module: nn.Module) -> bool:
    """Return True if a module can be called, as a `ModuleList` cannot."""
    return not (isinstance(module, nn.ModuleList | nn.ModuleDict) and type(module).forward is nn.Module.forward)


def _automatic(model: nn.Module) -> list[nn.Module]:
    # Hugging Face models name the classes of their blocks in `_no_split_modules`.
    named = {
        name
        for module in model.modules()
        for name in (getattr(module, "_no_split_modules", None) or ())
        if isinstance(name, str)
    }
    found = [module for module in model.modules() if module is not model and type(module).__name__ in named]
    return found or repeated_blocks(model)


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Find the blocks that a model repeats, such as transformer layers, and return them in order.

    A block is a member of a `ModuleList`, `ModuleDict` or `Sequential` in which its class occurs more than once. It has
    submodules, so a repeated `Linear` does not count. Blocks inside another block, such as experts, are not returned.
    """
    found: list[nn.Module] = []
    inside: set[int] = set()
    for module in model.modules():
        if id(module) in inside or not isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict):
            continue
        members = list(module.values() if isinstance(module, nn.ModuleDict) else module)
        counts = Counter(type(member) for member in members)
        for member in members:
            if counts[type(member)] > 1 and any(True for _ in member.children()) and has_forward(member):
                found.append(member)
                inside.update(id(inner) for inner in member.modules())
    return found


def _by_function(model: nn.Module, function: Callable[[nn.Module], bool], option: str) -> list[nn.Module]:
    found = [module for module in model.modules() if module is not model and function(module)]
    if not found:
        raise ConfigurationError(f"The {option} function returned True for no module. {classes_of(model)}")
    return found


def _by_class(model: nn.Module, classes: list[Any], option: str) -> list[nn.Module]:
    found: list[nn.Module] = []
    for wanted in classes:
        if not isinstance(wanted, str | type):
            raise ConfigurationError(f"{option} takes classes or class names, got {wanted!r}.")
        matching = [
            module
            for module in model.modules()
            if module is not model
            and (type(module).__name__ == wanted if isinstance(wanted, str) else isinstance(module, wanted))
        ]
        if not matching:
            name = wanted if isinstance(wanted, str) else wanted.__name__
            raise ConfigurationError(
                f"{option} names {name!r}, but the model has no module of this class. {classes_of(model)}"
                f"{nearest(name, sorted({type(module).__name__ for module in model.modules()}))}",
            )
        found.extend(matching)
    if not found:
        raise ConfigurationError(f"{option} is empty. Allowed: {_ALLOWED}.")
    return found


def _by_size(model: nn.Module, least: int, option: str) -> list[nn.Module]:
    # `least` counts parameters outside of other returned modules.
    if least < 1:
        raise ConfigurationError(f"{option}={least}: the number of parameters must be at least 1.")
    total = sum(parameter.numel() for parameter in model.parameters())
    if total < least:
        raise ConfigurationError(f"{option}={least} is more than the model's {total} parameters. Use a smaller number.")
    found: list[nn.Module] = []
    # Parameters of inner units do not count for the modules around them.
    taken: set[int] = set()
    for module in _innermost_first(model):
        own = {id(parameter): parameter for parameter in module.parameters() if id(parameter) not in taken}
        if sum(parameter.numel() for parameter in own.values()) >= least and has_forward(module):
            found.append(module)
            taken.update(own)
    return found


def classes_of(model: nn.Module) -> str:
    """List the classes of a model's submodules for an error message."""
    counts = Counter(type(module).__name__ for module in model.modules() if module is not model)
    listed = ", ".join(f"{name} ({count})" for name, count in counts.most_common(20))
    return f"It has: {listed or 'no modules inside'}."


def without_tied_across(model: nn.Module, units: Collection[nn.Module]) -> list[nn.Module]:
    # Only one unit can gather a parameter. A tied parameter therefore belongs to the unit around both of its users.
    left = list(units)
    while True:
        owner = _owners(model, left)
        shared = {id(unit) for units_here in owner.values() if len(units_here) > 1 for unit in units_here}
        # Repeated until nothing changes: without a unit, its parameters belong to an outer unit, which may share them
        # with another one.
        kept = [unit for unit in left if id(unit) not in shared]
        if len(kept) == len(left):
            return kept
        names = sorted({type(unit).__name__ for unit in left if id(unit) in shared})
        logger.warning_once(
            f"Modules of these classes share parameters with other modules: {', '.join(names)}. FSDP does not shard "
            "them as separate units, but together with the module that contains both."
        )
        left = kept


def _owners(model: nn.Module, units: list[nn.Module]) -> dict[int, list[nn.Module]]:
    # A tied parameter may have several innermost units.
    marked = {id(unit) for unit in units}
    owners: dict[int, list[nn.Module]] = {}
    seen: set[tuple[int, int]] = set()

    def visit(module: nn.Module, owner: nn.Module) -> None:
        if id(module) in marked:
            owner = module
        if (id(module), id(owner)) in seen:
            return
        seen.add((id(module), id(owner)))
        for parameter in module._parameters.values():
            if parameter is not None and not any(known is owner for known in owners.setdefault(id(parameter), [])):
                owners[id(parameter)].append(owner)
        for child in module.children():
            visit(child, owner)

    visit(model, model)
    return owners
