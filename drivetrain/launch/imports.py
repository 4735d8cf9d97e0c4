"""Which imports of a script can be done once, before its processes are forked, and which scripts need them all."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass

# Packages that take long to import, start no thread, touch no device, and read nothing of a rank while they are.
PRELOADABLE = frozenset(
    [
        "datasets",
        "diffusers",
        "drivetrain",
        "einops",
        "huggingface_hub",
        "matplotlib",
        "numpy",
        "pandas",
        "peft",
        "PIL",
        "safetensors",
        "scipy",
        "sklearn",
        "timm",
        "tokenizers",
        "torch",
        "torchaudio",
        "torchmetrics",
        "torchvision",
        "tqdm",
        "transformers",
        "trl",
    ]
)

# Variables that are read while such a package, or the interpreter, loads.
READ_ON_IMPORT = ("GOMP_", "KMP_", "LD_", "MKL_", "OMP_", "OPENBLAS_", "PYTHON", "PYTORCH_", "TORCH_", "TORCHINDUCTOR_")
# These begin alike, but the elastic agent sets them for each rank, and they are read when a process group is made.
_READ_LATER = ("TORCH_NCCL_",)


@dataclass(frozen=True)
class ImportedNames:
    """One import: a module, and the names that are taken from it."""

    module: str
    names: tuple[str, ...] = ()


def is_read_on_import(variable: str) -> bool:
    """Whether a change of an environment variable has no effect once the packages are loaded."""
    return variable.startswith(READ_ON_IMPORT) and not variable.startswith(_READ_LATER)


def why_not_preload(script: str) -> str | None:
    """The reason why a script must import everything by itself; None where there is none.

    Args:
        script: Path of a Python file.
    """
    tree = _parse(script)
    if tree is None:
        return f"{script} cannot be read as Python"
    imports = list(_all_imports(tree))
    if all(_package(each) in sys.stdlib_module_names for each in imports):
        return "the script imports nothing but the standard library"
    directory = os.path.dirname(os.path.realpath(script))
    local = {path for each in imports if (path := _local_file(directory, each.module)) is not None}
    for file in [script, *sorted(local)]:
        for name in _variables_set(_parse(file)):
            if is_read_on_import(name):
                return f"{os.path.relpath(file)} sets {name}, which is read while torch is imported"
    return None


def leading_imports(script: str) -> list[ImportedNames]:
    """The imports at the top of a script that can be done before it runs, in its order.

    They end at the first statement that is no import, and at the first import of a package that is not known to be
    safe: what follows may depend on it, such as on a variable that it sets.

    Args:
        script: Path of a Python file.
    """
    tree = _parse(script)
    found: list[ImportedNames] = []
    for statement in tree.body if tree is not None else []:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue  # the docstring
        imports = list(_imports(statement))
        if not imports:
            break
        for each in imports:
            if _package(each) in PRELOADABLE:
                found.append(each)
            elif _package(each) not in sys.stdlib_module_names:
                return found
    return found


def _all_imports(tree: ast.Module) -> Iterator[ImportedNames]:
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt):
            yield from _imports(node)


def _imports(statement: ast.stmt) -> Iterator[ImportedNames]:
    if isinstance(statement, ast.Import):
        for alias in statement.names:
            yield ImportedNames(alias.name)
    elif isinstance(statement, ast.ImportFrom) and statement.module is not None and statement.level == 0:
        yield ImportedNames(statement.module, tuple(alias.name for alias in statement.names if alias.name != "*"))


def _local_file(directory: str, module: str) -> str | None:
    """The file beside the script that a module is, if it is one."""
    place = os.path.join(directory, *module.split("."))
    return next((path for path in (f"{place}.py", os.path.join(place, "__init__.py")) if os.path.isfile(path)), None)


def _package(imported: ImportedNames) -> str:
    return imported.module.partition(".")[0]


def _variables_set(tree: ast.Module | None) -> Iterator[str]:
    """The environment variables that a file sets or deletes by name, wherever it does."""
    for node in ast.walk(tree) if tree is not None else ():
        given: list[ast.expr | None] = []
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load) and _is_environment(node.value):
            given = [node.slice]
        elif isinstance(node, ast.Call) and _changes_environment(node.func):
            given = list(node.args[:1])
            yield from (keyword.arg for keyword in node.keywords if keyword.arg is not None)
        for each in given:
            keys = each.keys if isinstance(each, ast.Dict) else [each]
            yield from (key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str))


def _changes_environment(function: ast.expr) -> bool:
    if not isinstance(function, ast.Attribute):
        return False
    changes = function.attr in ("setdefault", "pop", "update") and _is_environment(function.value)
    return changes or function.attr == "putenv"


def _is_environment(node: ast.expr) -> bool:
    return getattr(node, "attr", getattr(node, "id", None)) == "environ"


def _parse(path: str) -> ast.Module | None:
    try:
        with open(path, "rb") as file:
            return ast.parse(file.read())
    except (OSError, ValueError, SyntaxError, RecursionError):
        return None
