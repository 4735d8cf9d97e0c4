"""The figures of the house: how wide its interfaces are, how long its files, what crosses its walls.

`python -m tests.house` prints them, `python -m tests.house --all` with the places behind each, and
`python -m tests.house PATH/TO/drivetrain` those of another copy. tests/test_house.py holds their bounds.

A length is in lines without docstrings; blank lines and comments count.
"""

from __future__ import annotations

import argparse
import ast
import io
import tokenize
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

from tests.pool import ROOT

PACKAGE = ROOT / "drivetrain"

# A block that stands in two places, in lines of code.
BLOCK = 8

Definition: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class Module:
    """One file of the package, parsed once.

    Args:
        path: The file.
        package: The folder of the package that it is in.
    """

    def __init__(self, path: Path, package: Path) -> None:
        self.path = path
        relative = path.relative_to(package)
        self.room = relative.parts[0].removesuffix(".py")
        self.place = str(relative)
        parts = [package.name, *relative.with_suffix("").parts]
        self.is_package = parts[-1] == "__init__"
        self.name = ".".join(parts[:-1] if self.is_package else parts)
        self.source = path.read_text()
        self.tree = ast.parse(self.source)

    @cached_property
    def docstring_lines(self) -> set[int]:
        """The numbers of the lines that docstrings take."""
        found: set[int] = set()
        for node in ast.walk(self.tree):
            if isinstance(node, (ast.Module, *DEFINITIONS)) and ast.get_docstring(node, clean=False) is not None:
                text = node.body[0]
                found.update(range(text.lineno, (text.end_lineno or text.lineno) + 1))
        return found

    @cached_property
    def definitions(self) -> list[Definition]:
        """Every class and function, also those within others."""
        return [node for node in ast.walk(self.tree) if isinstance(node, DEFINITIONS)]

    def length(self, node: Definition | None = None) -> int:
        """How many lines a class or a function has, or the file, without docstrings."""
        if node is None:
            lines = range(1, len(self.source.splitlines()) + 1)
        else:
            lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
        return sum(number not in self.docstring_lines for number in lines)


class House:
    """All modules of the package.

    Args:
        package: Its folder.
    """

    def __init__(self, package: Path = PACKAGE) -> None:
        self.package = package
        self.modules = [Module(path, package) for path in sorted(package.rglob("*.py"))]

    def module(self, place: str) -> Module:
        return next(each for each in self.modules if each.place == place)


def dotted(node: ast.expr) -> str:
    """Spell `a.b.c` of an attribute chain; empty for anything else."""
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return node.id if isinstance(node, ast.Name) else ""


def for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and dotted(node.test).endswith("TYPE_CHECKING")


def running_code(node: ast.AST) -> Iterator[ast.AST]:
    """Walk a tree, leaving out what only type checkers see."""
    for child in ast.iter_child_nodes(node):
        if not for_type_checkers(child):
            yield child
            yield from running_code(child)


# Interfaces


def public_members(module: Module, name: str) -> list[str]:
    """What the body of a class defines without an underscore, and what its `__init__` sets on `self`."""
    body = next(node for node in module.tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    found: dict[str, None] = {}
    for node in body.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found[node.name] = None
        if isinstance(node, ast.AnnAssign):
            found[dotted(node.target)] = None
        if isinstance(node, ast.Assign):
            found.update(dict.fromkeys(dotted(target) for target in node.targets))
        if getattr(node, "name", "") == "__init__":
            found.update(dict.fromkeys(f.removeprefix("self.") for f, _ in written(node) if f.startswith("self.")))
    return [member for member in found if not member.startswith("_")]


def written(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """The attributes, as `a.b.c`, that code assigns, deletes or sets by name, each with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, (ast.Store, ast.Del)):
            yield dotted(node), node.lineno
        if isinstance(node, ast.Call) and dotted(node.func) in ("setattr", "delattr", "object.__setattr__"):
            target, name = node.args[:2]
            shown = str(name.value) if isinstance(name, ast.Constant) else "(computed)"
            yield f"{dotted(target)}.{shown}", node.lineno


def settable(module: Module, name: str) -> set[str]:
    """The properties of a class that have a setter: to assign one calls a method."""
    body = next(node for node in module.tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    decorators = (
        dotted(each) for node in body.body if isinstance(node, ast.FunctionDef) for each in node.decorator_list
    )
    return {each.removesuffix(".setter") for each in decorators if each.endswith(".setter")}


def written_from_outside(house: House, owner: str, place: str) -> list[str]:
    """Where other files write attributes of `trainer`, or other rooms those of `accelerator` and of `strategy`."""
    home = house.module(place)
    properties = settable(home, owner.title())
    found = []
    for module in house.modules:
        at_home = module is home if owner == "trainer" else module.room == home.room
        for target, line in [] if at_home else written(module.tree):
            base, _, attribute = target.rpartition(".")
            if base.rpartition(".")[2].lstrip("_") == owner and attribute not in properties:
                found.append(f"{module.place}:{line} {target}")
    return found


# Faces

# What a statement that only forwards to a part does not have.
WORK = (ast.BoolOp, ast.BinOp, ast.Compare, ast.IfExp, ast.Lambda, ast.comprehension, ast.JoinedStr, ast.Await)


def faces_of(house: House, place: str, name: str) -> list[tuple[Module, ast.ClassDef]]:
    """A public class and those of its base classes that are in the same room, each with its module."""
    home = house.module(place)
    classes = {
        node.name: (module, node)
        for module in house.modules
        if module.room == home.room
        for node in module.definitions
        if isinstance(node, ast.ClassDef)
    }
    face = classes[name][1]
    return [classes[name], *(classes[base] for each in face.bases if (base := dotted(each)) in classes)]


def forwards(method: ast.FunctionDef | ast.AsyncFunctionDef, members: set[str]) -> bool:
    """Whether a method is one statement that forwards, beside its docstring, and reads no other member."""
    statements = method.body[ast.get_docstring(method) is not None :]
    if len(statements) != 1 or not isinstance(statements[0], (ast.Return, ast.Expr, ast.Assign)):
        return False
    for node in ast.walk(statements[0]):
        name = dotted(node)
        if isinstance(node, WORK) or (name.startswith("self.") and name.split(".")[1] in members):
            return False
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and name.count(".") < 2:
            return False  # a value of its own
    return True


# Lengths


def file_lengths(house: House) -> list[tuple[int, str]]:
    return sorted(((module.length(), module.place) for module in house.modules), reverse=True)


def lengths(house: House, classes: bool) -> list[tuple[int, str]]:
    found = []
    for module in house.modules:
        for node in module.definitions:
            if isinstance(node, ast.ClassDef) is classes:
                found.append((module.length(node), f"{module.place}:{node.lineno} {node.name}"))
    return sorted(found, reverse=True)


# Walls


def imports_of(module: Module, names: set[str], types: bool = False) -> set[str]:
    """The modules of the package that running code of one imports, also within functions; `types` counts all code."""
    found = set()
    for node in ast.walk(module.tree) if types else running_code(module.tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = module.name.split(".")[: None if module.is_package and node.level == 1 else -node.level]
                base = ".".join([*above, *([base] if base else [])])
            deeper = (f"{base}.{alias.name}" for alias in node.names)
            found.update(each if each in names else base for each in deeper)
    return (found & names) - {module.name}


def circles(house: House, types: bool = False) -> list[list[str]]:
    """Groups of modules that import each other (Tarjan's components); `types` counts imports for types, too."""
    names = {module.name for module in house.modules}
    graph = {module.name: imports_of(module, names, types) for module in house.modules}
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(graph[name]):
            if other not in index:
                visit(other)
            if other in stack:
                low[name] = min(low[name], low[other])
        if low[name] == index[name]:
            cut = stack.index(name)
            component = stack[cut:]
            del stack[cut:]
            if len(component) > 1:
                found.append(sorted(component))

    for name in sorted(graph):
        if name not in index:
            visit(name)
    return found


# Names by which an object of another room is held.
HELD = {
    "trainer": "trainer",
    "task": "trainer",
    "accelerator": "accelerator",
    "strategy": "strategies",
    "precision": "strategies",
    "PartialState": "runtime",
}


# What is public in spite of its underscore, and private names of torch that the house's own happen to equal.
OTHERS = {"_make", "_fields", "_asdict", "_replace", "_scale"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_" and name not in OTHERS


def defined_privately(module: Module) -> Iterator[str]:
    """Private names that a module defines: functions, classes, variables and attributes of `self`."""
    for node in ast.walk(module.tree):
        if isinstance(node, DEFINITIONS) and is_private(node.name):
            yield node.name
        if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            name = node.id if isinstance(node, ast.Name) else node.attr
            if is_private(name) and (isinstance(node, ast.Name) or dotted(node.value) in ("self", "cls")):
                yield name


def foreign_private_names(house: House) -> list[str]:
    """Where a room reads or imports a private name that another room defines."""
    owners: dict[str, set[str]] = defaultdict(set)
    for module in house.modules:
        for name in defined_privately(module):
            owners[name].add(module.room)
    found = []
    for module in house.modules:
        others = imported_packages(module, house.package.name)
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{house.package.name}."):
                room = (node.module or "").split(".")[1]
                foreign = [a.name for a in node.names if is_private(a.name) and room != module.room]
                found += [f"{module.place}:{node.lineno} import {node.module}.{name}" for name in foreign]
            name, base = private_access(node)
            if not name or base.partition(".")[0] in others:
                continue
            held = HELD.get(base.rpartition(".")[2].lstrip("_"))
            rooms = {held} if held and held in owners[name] else owners[name]
            if rooms and module.room not in rooms:
                found.append(f"{module.place}:{node.lineno} {base or '...'}.{name} of {', '.join(sorted(rooms))}")  # type: ignore[attr-defined]
    return found


def imported_packages(module: Module, own: str) -> set[str]:
    """The names under which a module has imported other packages, such as `os`."""
    aliases = [alias for node in ast.walk(module.tree) if isinstance(node, ast.Import) for alias in node.names]
    return {alias.asname or alias.name.partition(".")[0] for alias in aliases if alias.name.partition(".")[0] != own}


def private_access(node: ast.AST) -> tuple[str, str]:
    """The private name that `x._y` or `getattr(x, "_y")` reaches for, and `x`; empty for anything else."""
    if isinstance(node, ast.Attribute) and is_private(node.attr):
        return node.attr, dotted(node.value)
    if isinstance(node, ast.Call) and dotted(node.func) in ("getattr", "hasattr", "setattr") and len(node.args) > 1:
        name = node.args[1]
        if isinstance(name, ast.Constant) and is_private(str(name.value)):
            return str(name.value), dotted(node.args[0])
    return "", ""


# Said twice


def code_lines(module: Module) -> list[tuple[int, str]]:
    """Numbered lines of code, without indentation, comments, docstrings, imports and blank lines.

    A function's signature counts as one line: interfaces that are alike repeat it.
    """
    lines = module.source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(module.source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    left_out = set(module.docstring_lines)
    for node in ast.walk(module.tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            left_out.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    for node in module.definitions:
        if not isinstance(node, ast.ClassDef):
            header = range(node.lineno, max(node.lineno + 1, node.body[0].lineno))
            lines[node.lineno - 1] = " ".join(lines[number - 1].strip() for number in header)
            left_out.update(header[1:])
    kept = ((number, line.strip()) for number, line in enumerate(lines, 1) if number not in left_out)
    return [(number, line) for number, line in kept if line]


def duplicates(house: House, size: int = BLOCK) -> list[str]:
    """Blocks of `size` or more equal lines of code that stand in two places."""
    codes = [(module.place, code_lines(module)) for module in house.modules]
    seen: dict[tuple[str, ...], list[tuple[int, int]]] = defaultdict(list)
    for number, (_, code) in enumerate(codes):
        for start in range(len(code) - size + 1):
            seen[tuple(line for _, line in code[start : start + size])].append((number, start))
    windows = {
        (one, other)
        for places in seen.values()
        for index, one in enumerate(places)
        for other in places[index + 1 :]
        if one[0] != other[0] or other[1] - one[1] >= size
    }
    found = []
    for (file, start), (other, begin) in sorted(windows):
        if ((file, start - 1), (other, begin - 1)) in windows:
            continue  # within a longer block
        extra = 0
        while ((file, start + extra + 1), (other, begin + extra + 1)) in windows:
            extra += 1
        one, twin = codes[file], codes[other]
        found.append(f"{one[0]}:{one[1][start][0]} and {twin[0]}:{twin[1][begin][0]}, {size + extra} lines")
    return found


# The table


@dataclass(frozen=True)
class Figure:
    """One figure of the house.

    Attributes:
        name: What is measured.
        bound: The most that it may be.
        measure: The figure, and the places behind it.
    """

    name: str
    bound: int
    measure: Callable[[House], tuple[int, list[str]]]


def counted(look: Callable[[House], list[str]]) -> Callable[[House], tuple[int, list[str]]]:
    """How many there are."""

    def measure(house: House) -> tuple[int, list[str]]:
        found = look(house)
        return len(found), found

    return measure


def attributes_written(owner: str, place: str) -> Callable[[House], tuple[int, list[str]]]:
    """How many attributes of an object others write, each counted once, and where."""

    def measure(house: House) -> tuple[int, list[str]]:
        found = written_from_outside(house, owner, place)
        return len({each.rpartition(".")[2] for each in found}), found

    return measure


def longest(look: Callable[[House], list[tuple[int, str]]], bound: int) -> Callable[[House], tuple[int, list[str]]]:
    """How long the longest is, and all that are longer than the bound."""

    def measure(house: House) -> tuple[int, list[str]]:
        found = look(house)
        return found[0][0], [f"{length} {place}" for length, place in found if length > bound] or [found[0][1]]

    return measure


def largest_circle(house: House) -> tuple[int, list[str]]:
    """How many modules import each other, be it for types only, and which."""
    found = max(circles(house, types=True), key=len, default=[])
    return len(found), found


def strategy_members(house: House) -> tuple[int, list[str]]:
    """How many members there are to learn for a strategy, and which."""
    base = house.module("strategies/base.py")
    names = ("Strategy", "Gradients", "ModelState")
    found = [f"{name}.{member}" for name in names for member in public_members(base, name)]
    return len(found), found


ROOMS = {
    "accelerator": (12, 3348),
    "callbacks": (33, 7600),
    "checkpoint": (13, 3175),
    "cli": (18, 1580),
    "compat": (193, 12047),
    "data": (14, 3002),
    "inference": (24, 5420),
    "launch": (15, 4228),
    "planning": (13, 2598),
    "runtime": (25, 3701),
    "strategies": (57, 11126),
    "trackers": (18, 2960),
    "trainer": (46, 9732),
    "verification": (10, 1754),
}
"""Files and lines of code of each room. They may only fall; a commit that raises one says why."""


def sizes_of(room: str) -> tuple[int, int]:
    """How many files a room has, and lines without docstrings, comments and blank lines."""
    modules = [Module(path, PACKAGE) for path in (PACKAGE / room).rglob("*.py")]
    return len(modules), sum(lines_of_code(module) for module in modules)


def lines_of_code(module: Module) -> int:
    numbered = enumerate(module.source.splitlines(), 1)
    return sum(
        bool(line.strip()) and not line.lstrip().startswith("#") and number not in module.docstring_lines
        for number, line in numbered
    )


FIGURES = [
    Figure("members of Strategy, Gradients and ModelState", 30, strategy_members),
    Figure("attributes of Trainer that other files write", 0, attributes_written("trainer", "trainer/trainer.py")),
    Figure(
        "attributes of Accelerator that other rooms write",
        0,
        attributes_written("accelerator", "accelerator/accelerator.py"),
    ),
    Figure("attributes of Strategy that other rooms write", 0, attributes_written("strategy", "strategies/base.py")),
    Figure("lines of the longest file", 900, longest(file_lengths, 900)),
    Figure("lines of the longest function", 80, longest(lambda house: lengths(house, classes=False), 80)),
    Figure("lines of the longest class", 600, longest(lambda house: lengths(house, classes=True), 600)),
    Figure("import circles", 0, counted(lambda house: [" <-> ".join(circle) for circle in circles(house)])),
    Figure("largest circle, imports for types counted", 37, largest_circle),
    Figure("private names of another room that are read", 0, counted(foreign_private_names)),
    Figure(f"duplicated blocks of {BLOCK} lines or more", 0, counted(duplicates)),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("package", nargs="?", type=Path, default=PACKAGE, help="the folder of a package")
    parser.add_argument("--all", action="store_true", help="show the places behind each figure")
    options = parser.parse_args()
    house = House(options.package.resolve())
    print("| figure | is | may be |\n|---|---:|---:|")
    places = []
    for figure in FIGURES:
        value, found = figure.measure(house)
        print(f"| {figure.name} | {value} | {figure.bound} |")
        places.append((figure.name, found))
    for name, found in places if options.all else []:
        print(f"\n{name}:", *found, sep="\n  ")


if __name__ == "__main__":
    main()
