"""The public names of Accelerate and of Lightning, recorded as data: their interfaces, without their code.

    .venv-bench/bin/python docs/migration/record.py accelerate     # writes accelerate_names.json beside this file
    .venv-bench/bin/python docs/migration/record.py lightning

It runs where they are installed. What is written is what `generate.py` compares with, so that the comparison needs
neither.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import enum
import importlib
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

# The modules whose names are documented, or that scripts import from.
ACCELERATE = (
    "accelerate",
    "accelerate.utils",
    "accelerate.accelerator",
    "accelerate.state",
    "accelerate.data_loader",
    "accelerate.optimizer",
    "accelerate.scheduler",
    "accelerate.tracking",
    "accelerate.logging",
    "accelerate.local_sgd",
    "accelerate.big_modeling",
    "accelerate.hooks",
    "accelerate.inference",
    "accelerate.launchers",
    "accelerate.checkpointing",
    "accelerate.parallelism_config",
    "accelerate.memory_utils",
    "accelerate.utils.modeling",
    "accelerate.utils.offload",
    "accelerate.utils.bnb",
)
LIGHTNING = (
    "lightning",
    "lightning.pytorch",
    "lightning.pytorch.accelerators",
    "lightning.pytorch.callbacks",
    "lightning.pytorch.cli",
    "lightning.pytorch.core.saving",
    "lightning.pytorch.demos.boring_classes",
    "lightning.pytorch.loggers",
    "lightning.pytorch.loggers.logger",
    "lightning.pytorch.plugins",
    "lightning.pytorch.profilers",
    "lightning.pytorch.strategies",
    "lightning.pytorch.trainer.states",
    "lightning.pytorch.tuner",
    "lightning.pytorch.utilities",
    "lightning.pytorch.utilities.exceptions",
    "lightning.pytorch.utilities.memory",
    "lightning.pytorch.utilities.model_helpers",
    "lightning.pytorch.utilities.parsing",
    "lightning.pytorch.utilities.rank_zero",
    "lightning.pytorch.utilities.types",
    "lightning.fabric",
    "lightning.fabric.loggers",
    "lightning.fabric.plugins",
    "lightning.fabric.plugins.environments",
    "lightning.fabric.strategies",
    "lightning.fabric.utilities",
    "lightning.fabric.utilities.seed",
)
MODULES = {"accelerate": ACCELERATE, "lightning": LIGHTNING}
ACCELERATE_COMMANDS = {
    "launch": ("accelerate.commands.launch", "launch_command_parser"),
    "test": ("accelerate.commands.test", "test_command_parser"),
    "env": ("accelerate.commands.env", "env_command_parser"),
    "config": ("accelerate.commands.config.config", "config_command_parser"),
    "estimate-memory": ("accelerate.commands.estimate", "estimate_command_parser"),
    "merge-weights": ("accelerate.commands.merge", "merge_command_parser"),
    "to-fsdp2": ("accelerate.commands.to_fsdp2", "to_fsdp2_command_parser"),
    "tpu-config": ("accelerate.commands.tpu", "tpu_command_parser"),
}


def is_theirs(value: Any) -> bool:
    """Whether a class or function is one of their own."""
    return str(getattr(value, "__module__", "")).split(".")[0] in MODULES


def parameters_of(function: Any) -> list[str]:
    """Names of a callable's parameters, without `self` and those that stand for any."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    kept = (one.name for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD))
    return [name for name in kept if name not in ("self", "cls") and not name.startswith("_")]


def members_of(kind: type) -> dict[str, Any]:
    """The public methods and properties that their own classes define, by name, with their parameters."""
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        if not is_theirs(base):
            continue
        for name, value in vars(base).items():
            if name.startswith("_") or isinstance(value, dataclasses.Field):
                continue
            plain = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
            if inspect.isfunction(plain):
                found[name] = parameters_of(plain)
            elif isinstance(value, property) or hasattr(value, "__get__"):
                found[name] = None
    return found


def describe(value: Any) -> dict[str, Any] | None:
    """What a name is: a class with its arguments and members, a function with its arguments, or a value."""
    if inspect.ismodule(value) or ((inspect.isclass(value) or inspect.isfunction(value)) and not is_theirs(value)):
        return None
    if inspect.isclass(value) and issubclass(value, enum.Enum):
        return {"kind": "enum", "members": dict.fromkeys(value.__members__)}
    if inspect.isclass(value):
        fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
        named = {field.name for field in fields}
        return {
            "kind": "class",
            "arguments": parameters_of(value),
            "members": {name: each for name, each in members_of(value).items() if name not in named},
        }
    if callable(value):
        return {"kind": "function", "arguments": parameters_of(value)}
    return {"kind": "value"} if value is not None and not type(value).__name__.startswith("_") else None


def public_names(module: ModuleType) -> list[str]:
    """What a module offers: of a package all that it re-exports, of a plain module what it defines."""
    names = [name for name in vars(module) if not name.startswith("_")]
    if hasattr(module, "__path__"):
        return names
    return [name for name in names if getattr(vars(module)[name], "__module__", None) == module.__name__]


def conditional_names(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """What a package re-exports only where another package is installed, taken from where it is defined."""
    source = Path(str(module.__file__))
    for node in ast.walk(ast.parse(source.read_text())) if source.name == "__init__.py" else ():
        if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module:
            for alias in node.names:
                if not hasattr(module, alias.name):
                    home = importlib.import_module(f"{module.__name__}.{node.module}")
                    yield alias.asname or alias.name, getattr(home, alias.name, None)


def record(package: str = "accelerate") -> dict[str, Any]:
    """Modules with their names, each described where it first stands; and the flags of each command."""
    modules: dict[str, dict[str, Any]] = {}
    known: dict[int, str] = {}
    for path in MODULES[package]:
        module = importlib.import_module(path)
        modules[path] = {}
        names = {name: vars(module)[name] for name in public_names(module)} | dict(conditional_names(module))
        for name, value in sorted(names.items()):
            described = describe(value)
            if described is None or (described["kind"] == "value" and path == package):
                continue
            if described["kind"] in ("class", "function", "enum"):
                if id(value) in known:
                    modules[path][name] = {"kind": "again", "of": known[id(value)]}
                    continue
                known[id(value)] = f"{path}.{name}"
            modules[path][name] = described
    commands = {}
    for command, (path, factory) in (ACCELERATE_COMMANDS if package == "accelerate" else {}).items():
        parser: argparse.ArgumentParser = getattr(importlib.import_module(path), factory)()
        if factory == "config_command_parser" or not isinstance(parser, argparse.ArgumentParser):
            flags = []
        else:
            flags = [option for action in parser._actions for option in action.option_strings if option[:2] == "--"]
        commands[command] = sorted({"--" + flag[2:].replace("-", "_") for flag in flags} - {"--help"})
    return {"version": importlib.import_module(package).__version__, "modules": modules, "commands": commands}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Record the public names of a framework.")
    parser.add_argument("package", choices=MODULES)
    chosen = parser.parse_args().package
    target = Path(__file__).with_name(f"{chosen}_names.json")
    target.write_text(json.dumps(record(chosen), indent=1, sort_keys=True) + "\n")
    print(f"wrote {target}")
