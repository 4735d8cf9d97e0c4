"""Run Accelerate's own tests, as they are, with drivetrain in its place, and count what passes.

    python -m tests.compat.accelerate_suite CHECKOUT [options and tests of pytest]

`CHECKOUT` is a checkout of Accelerate's repository. What a test file imports and the mirror does not have is replaced
by something that fails when it is used, so that the other tests of the file run. The test scripts and the lists of
examples come from the checkout.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest

import drivetrain.compat
from drivetrain.compat.aliases import STAND_INS
from drivetrain.compat.handed_on import absent


def main() -> int:
    checkout, options = Path(sys.argv[1]).resolve(), sys.argv[2:]
    take_place(checkout)
    os.chdir(checkout)
    sys.path.insert(0, str(checkout))
    for name in [each for each in sys.modules if each.split(".")[0] == "tests"]:
        del sys.modules[name]  # theirs has the same name
    tests = [each for each in options if each.startswith("tests/")]
    always = [
        "-q",
        "-p",
        "no:cacheprovider",
        "-o",
        "addopts=",
        "--tb=short",
        "-rA",
        "--continue-on-collection-errors",
    ]
    return int(pytest.main([*always, *options, *([] if tests else ["tests"])]))


def take_place(checkout: Path) -> None:
    """Put drivetrain in Accelerate's place, here and in processes that tests start, and fill in what tests import."""
    drivetrain.compat.install("accelerate")
    paths = [str(STAND_INS / "accelerate"), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(each for each in paths if each)
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    package = checkout / "src" / "accelerate"
    utils: Any = importlib.import_module("accelerate.test_utils")
    utils.__path__.append(str(package / "test_utils"))
    utils.testing.path_in_accelerate_package = lambda *parts: package.joinpath(*parts)
    for name in ("test_script", "test_sync", "test_ops"):
        setattr(utils, name, importlib.import_module(f"accelerate.test_utils.scripts.{name}"))
    for path in sorted((checkout / "tests").glob("**/*.py")):
        fill_in(path)


def fill_in(path: Path) -> None:
    """Add what a file imports from Accelerate and the mirror lacks.

    Args:
        path: A file of tests.
    """
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "accelerate":
                    _module(alias.name)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "accelerate":
            module = _module(str(node.module))
            for alias in node.names:
                if not hasattr(module, alias.name) and not _is_module(f"{node.module}.{alias.name}"):
                    setattr(module, alias.name, absent(alias.name, "The mirror lacks it."))


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # its parent is no package
        return False


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        parent, _, last = name.rpartition(".")
        module = sys.modules[name] = ModuleType(name)
        setattr(_module(parent), last, module)
        return module


if __name__ == "__main__":
    with patch.dict(os.environ):
        sys.exit(main())
