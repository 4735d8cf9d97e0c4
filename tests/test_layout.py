"""Where tests are: a folder for each room of the package, and a few for what goes through all of them."""

from __future__ import annotations

import re
from pathlib import Path

import drivetrain
from tests.house import PACKAGE
from tests.pool import ROOT

TESTS = ROOT / "tests"
ROOMS = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
# What these test is not one room.
ACROSS = {
    "conformance": "every strategy against one plain process",
    "crash": "runs that are killed",
    "docs": "docs/, as it is built",
    "examples": "examples/",
    "fuzz": "random runs of the Trainer and the Accelerator",
    "benchmarks": "benchmarks/",
    "simulated": "devices that other tests use",
}

# Rooms whose behaviour shows in what runs on them.
RUN_BY = {"strategies": {"accelerator", "trainer"}, "callbacks": {"trainer"}}

FILES = sorted(path for room in ROOMS for path in (TESTS / room).rglob("test_*.py"))
HELPERS = sorted(path for path in TESTS.rglob("*.py") if not path.name.startswith(("test_", "__init__", "conftest")))


def place(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imported(path: Path) -> set[str]:
    """The modules that a file imports; what comes from `drivetrain` counts as its home's.

    Scripts within it count too, and the command line, which is cli's and launch's.
    """
    source = path.read_text()
    found = set()
    for module, *names in re.findall(r"from ([\w.]+) import (?:\(([^)]*)\)|([\w, ]+))", source):
        for name in re.findall(r"\w+", " ".join(names)):
            found.add(drivetrain._EXPORTS.get(name, "") if module == "drivetrain" else f"{module}.{name}")
    found.update(re.findall(r"^import ([\w.]+)", source, re.MULTILINE))
    if '"-m", "drivetrain"' in source:
        found |= {"drivetrain.cli", "drivetrain.launch"}
    if '"--as"' in source:
        found.add("drivetrain.compat")
    if '"from drivetrain import"' in source:  # takes the place of another package's name
        found.add("drivetrain.accelerator")
    return found


def reached(path: Path, seen: set[Path] | None = None) -> set[str]:
    """What a test imports, itself or through the helpers of tests/."""
    seen = set() if seen is None else seen
    seen.add(path)
    found = imported(path)
    for name in list(found):
        for module in (name, name.rpartition(".")[0]):
            helper = ROOT / f"{module.replace('.', '/')}.py"
            if module.startswith("tests.") and helper.is_file() and helper not in seen:
                found |= reached(helper, seen)
    return found


def test_every_folder_is_a_room_or_goes_through_all_of_them() -> None:
    folders = {path.parent.name for path in TESTS.glob("*/__init__.py")}
    assert folders - ACROSS.keys() == ROOMS


def is_at_home(path: Path) -> bool:
    """It uses its room, or one that stands on it: what a strategy does shows in an Accelerator and a Trainer."""
    room = path.relative_to(TESTS).parts[0]
    fitting = RUN_BY.get(room, set()) | {room}
    return bool({name.split(".")[1] for name in reached(path) if name.startswith("drivetrain.")} & fitting)


def test_a_file_tests_the_room_that_it_is_in() -> None:
    assert [place(path) for path in FILES if not is_at_home(path)] == []


def test_what_is_no_test_helps_one() -> None:
    sources = {path: path.read_text() for path in TESTS.rglob("*.py")}

    def helps(path: Path) -> bool:
        module = place(path).removesuffix(".py").replace("/", ".")
        names = (module, path.name, f"from {module.rpartition('.')[0]} import {path.stem}")
        return any(name in source for other, source in sources.items() if other != path for name in names)

    assert [place(path) for path in HELPERS if not helps(path)] == []
