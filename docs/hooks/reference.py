"""Write one page of the reference for each room, from the names that `drivetrain` makes public.

The pages exist only while the documentation is built, so a name that becomes public is documented at once.
"""

from __future__ import annotations

import ast
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

PACKAGE = Path(__file__).resolve().parents[2] / "drivetrain"

# In the order in which a reader wants them; any other room follows.
TITLES = {
    "trainer": "Trainer",
    "callbacks": "Callbacks",
    "accelerator": "Accelerator",
    "strategies": "Strategies and precision",
    "data": "Data",
    "checkpoint": "Checkpoints",
    "trackers": "Trackers",
    "launch": "Launching",
    "inference": "Big models",
    "runtime": "Distributed utilities",
}

# Torch's own classes under their own names: its manual documents them, and nothing here can be read about them.
FROM_TORCH = {"PrepareModuleInput", "PrepareModuleInputOutput", "PrepareModuleOutput", "SequenceParallel"}


# Classes whose members are in several base classes, by topic; those have no entries of their own.
WITH_BASES = {"Accelerator"}


def public_names() -> dict[str, list[str]]:
    """Find the public names of each room, with their paths: what the package imports for type checkers."""
    rooms: dict[str, list[str]] = {room: [] for room in TITLES}
    for module, name in imported_by("drivetrain"):
        room, package = module.split(".")[1], "drivetrain"
        names = [name]
        if name == "*":
            names, package = [each for _, each in imported_by(module)], module
        rooms.setdefault(room, []).extend(f"{package}.{each}" for each in names if each not in FROM_TORCH)
    return {room: names for room, names in rooms.items() if names}


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


def page(room: str, names: list[str]) -> str:
    """Compose the page of a room: what the room is, and its public names."""
    source = PACKAGE / room / "__init__.py"
    source = source if source.exists() else PACKAGE / f"{room}.py"
    introduction = ast.get_docstring(ast.parse(source.read_text())) or ""
    title = TITLES.get(room, room.capitalize())
    return "\n\n".join([f"# {title}", introduction, *map(entry, names), ""])


def entry(name: str) -> str:
    """Compose the directive for a public name."""
    directive = f"::: {name}"
    with_bases = name.rpartition(".")[2] in WITH_BASES
    return f"{directive}\n    options:\n      inherited_members: true" if with_bases else directive


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the pages into the navigation."""
    pages = [{TITLES.get(room, room.capitalize()): f"reference/{room}.md"} for room in public_names()]
    config.nav = [*(config.nav or []), {"Reference": [*pages, {"Error codes": "errors.md"}]}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages to what is built."""
    for room, names in public_names().items():
        files.append(File.generated(config, f"reference/{room}.md", content=page(room, names)))
    return files
