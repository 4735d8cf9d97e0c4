"""What of the package is public, read from its source without importing it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import griffe
import yaml

HOOKS = Path(__file__).resolve().parent
PACKAGE = HOOKS.parents[1] / "drivetrain"
INTERNAL: dict[str, list[str]] = yaml.safe_load((HOOKS / "internal_members.yaml").read_text())

# Torch's own classes under their own names: its manual documents them, and nothing here can be read about them.
FROM_TORCH = {"PrepareModuleInput", "PrepareModuleInputOutput", "PrepareModuleOutput", "SequenceParallel"}


def public_names() -> dict[str, str]:
    """The public names, each with the room that it is from: what the package imports for type checkers."""
    return {f"{package}.{name}": room for room, package, name in _imports() if name not in FROM_TORCH}


def _imports() -> Iterator[tuple[str, str, str]]:
    for module, name in imported_by("drivetrain"):
        room = module.split(".")[1]
        if name == "*":
            yield from ((room, module, each) for _, each in imported_by(module))
        else:
            yield room, "drivetrain", name


def imported_by(package: str) -> list[tuple[str, str]]:
    """The modules of drivetrain that a package imports from, and what."""
    tree = ast.parse(Path(PACKAGE.parent, *package.split("."), "__init__.py").read_text())
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    return [
        (str(node.module), alias.asname or alias.name)
        for node in nodes
        if str(node.module).startswith("drivetrain.") and node.module != "drivetrain.runtime.exports"
        for alias in node.names
    ]


@cache
def package() -> griffe.Module:
    """The package as griffe reads it, without importing it."""
    found = griffe.load("drivetrain", search_paths=[str(PACKAGE.parent)])
    assert isinstance(found, griffe.Module)
    return found


@cache
def definitions() -> dict[str, str]:
    """Where each public name is defined, and the path that it is public by."""
    return {package()[path.removeprefix("drivetrain.")].canonical_path: path for path in public_names()}


def inherited(path: str) -> list[str]:
    """The public members that a class has from bases without entries of their own."""
    target = package()[path.removeprefix("drivetrain.")]
    target = target.final_target if isinstance(target, griffe.Alias) else target
    if not isinstance(target, griffe.Class):
        return []
    left_out = {*INTERNAL.get(target.name, ()), *target.members}
    bases = [base for base in target.mro() if base.canonical_path not in definitions()]
    names = dict.fromkeys(
        name for base in bases for name, member in base.members.items() if member.docstring and not name.startswith("_")
    )
    return [name for name in names if name not in left_out]
