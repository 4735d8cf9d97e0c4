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
    "runtime": "Processes and devices",
}

# Torch's own classes under their own names: its manual documents them, and nothing here can be read about them.
FROM_TORCH = {"PrepareModuleInput", "PrepareModuleInputOutput", "PrepareModuleOutput", "SequenceParallel"}


# Classes whose members are in several base classes, by topic; those have no entries of their own.
WITH_BASES = {"Accelerator"}


def public_names() -> dict[str, list[str]]:
    """Find the public names of each room: what the package imports for type checkers."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    rooms: dict[str, list[str]] = {room: [] for room in TITLES}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("drivetrain."):
            room = (node.module or "").split(".")[1]
            names = [alias.asname or alias.name for alias in node.names]
            rooms.setdefault(room, []).extend(name for name in names if name not in FROM_TORCH)
    return {room: names for room, names in rooms.items() if names}


def page(room: str, names: list[str]) -> str:
    """Compose the page of a room: what the room is, and its public names."""
    source = PACKAGE / room / "__init__.py"
    source = source if source.exists() else PACKAGE / f"{room}.py"
    introduction = ast.get_docstring(ast.parse(source.read_text())) or ""
    title = TITLES.get(room, room.capitalize())
    return "\n\n".join([f"# {title}", introduction, *map(entry, names), ""])


def entry(name: str) -> str:
    """Compose the directive for a public name."""
    directive = f"::: drivetrain.{name}"
    return f"{directive}\n    options:\n      inherited_members: true" if name in WITH_BASES else directive


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the pages into the navigation."""
    pages = [{TITLES.get(room, room.capitalize()): f"reference/{room}.md"} for room in public_names()]
    config.nav = [*(config.nav or []), {"Reference": pages}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages to what is built."""
    for room, names in public_names().items():
        files.append(File.generated(config, f"reference/{room}.md", content=page(room, names)))
    return files
