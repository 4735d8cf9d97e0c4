"""The bounds of the house: no interface, file, function or class grows past them, and nothing crosses its walls."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

from tests.house import (
    FIGURES,
    PACKAGE,
    ROOMS,
    Figure,
    House,
    Module,
    circles,
    duplicates,
    foreign_private_names,
    lengths,
    public_members,
    sizes_of,
    written_from_outside,
)


@pytest.fixture(scope="module")
def house() -> House:
    return House()


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.name)
def test_a_figure_of_the_house_is_within_its_bound(house: House, figure: Figure) -> None:
    value, places = figure.measure(house)
    assert value <= figure.bound, "\n".join([f"{figure.name}: {value}, at most {figure.bound}", *places])


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_does_not_grow(room: str) -> None:
    files, lines = sizes_of(room)
    assert (files <= ROOMS[room][0], lines <= ROOMS[room][1]) == (True, True), (files, lines, ROOMS[room])


def test_every_room_has_a_size() -> None:
    assert sorted(ROOMS) == sorted(path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists())


def test_the_core_does_not_name_the_frameworks_whose_scripts_it_runs(house: House) -> None:
    """They are named in compat/, among the names that the engine keeps for Accelerate's users, and in error hints."""
    core = [each for each in house.modules if each.room != "compat" and each.path.name != "accelerate_names.py"]
    prose = [(each.place, text) for each in core for text in (*docstrings(each), *comments(each))]
    assert [each for each in prose if re.search(r"\b(Lightning|Accelerate)\b", each[1])] == []


def docstrings(module: Module) -> list[str]:
    return [ast.get_docstring(node) or "" for node in (module.tree, *module.definitions)]


def comments(module: Module) -> list[str]:
    tokens = tokenize.generate_tokens(io.StringIO(module.source).readline)
    return [token.string for token in tokens if token.type == tokenize.COMMENT]


# The measures see what they should


@pytest.fixture
def built(tmp_path: Path):
    """A package of files, given as `path: source`."""

    def build(files: dict[str, str]) -> House:
        for place, source in files.items():
            path = tmp_path / "drivetrain" / place
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(source)
        return House(tmp_path / "drivetrain")

    return build


def test_members_are_methods_attributes_and_what_the_constructor_sets(built) -> None:
    source = """
class Strategy:
    name: str
    whole = False

    def __init__(self):
        self.device, self._hidden = None, None

    def setup(self): ...

    @property
    def kind(self): ...

    def _own(self): ...
"""
    module = built({"strategies/base.py": source}).modules[0]
    assert public_members(module, "Strategy") == ["name", "whole", "device", "setup", "kind"]


def test_writes_of_anothers_attributes_are_found_unless_a_property_takes_them(built) -> None:
    trainer = """
class Trainer:
    @property
    def should_stop(self): ...
    @should_stop.setter
    def should_stop(self, value): ...
    def fit(self): self.stage = "fit"
"""
    loop = """
def run(trainer, self):
    trainer.should_stop = True
    trainer.batch, trainer.info = 1, 2
    self._trainer.stage += 1
    setattr(self.trainer, "path", 3)
    del trainer.batch
    trainer.progress.steps = 4
"""
    found = written_from_outside(
        built({"trainer/trainer.py": trainer, "trainer/loop.py": loop}), "trainer", "trainer/trainer.py"
    )
    assert sorted(each.partition(" ")[2] for each in found) == [
        "self._trainer.stage",
        "self.trainer.path",
        "trainer.batch",
        "trainer.batch",
        "trainer.info",
    ]


def test_lengths_leave_docstrings_out(built) -> None:
    source = 'def f():\n    """One\n\n    two.\n    """\n\n    # why\n    return 1\n'
    assert lengths(built({"data/a.py": source}), classes=False) == [(4, "data/a.py:1 f")]


@pytest.mark.parametrize(
    ("back", "count"),
    [
        ("from drivetrain.data import a", 1),
        ("def f():\n    from .a import x", 1),
        ("if TYPE_CHECKING:\n    from drivetrain.data import a", 0),
    ],
)
def test_circles_are_found_unless_they_are_for_types_only(built, back: str, count: int) -> None:
    files = {"data/__init__.py": "", "data/a.py": "from drivetrain.data.b import y", "data/b.py": back}
    assert len(circles(built(files))) == count
    assert len(circles(built(files), types=True)) == 1


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("def f(accelerator):\n    accelerator._models", 1),
        ("from drivetrain.accelerator.accelerator import _build", 1),
        ("def f(accelerator):\n    getattr(accelerator, '_models')", 1),
        ("def f(self):\n    self.accelerator._build()", 1),
        ("def f(module):\n    module._parameters", 0),
        ("import os\nos._build()", 0),
        ("class A:\n    def f(self):\n        self._models = 1\n        return self._models", 0),
    ],
)
def test_private_names_of_another_room_are_found(built, source: str, count: int) -> None:
    owner = "def _build(): ...\nclass Accelerator:\n    def __init__(self):\n        self._models = []\n"
    files = {"accelerator/accelerator.py": owner, "trainer/trainer.py": source}
    assert len(foreign_private_names(built(files))) == count


def test_duplicated_blocks_are_found_whatever_is_between_their_lines(built) -> None:
    lines = [f"a{number} = {number}" for number in range(9)]
    spaced = "import os\n" + "  # why\n\n".join(lines)
    found = duplicates(built({"data/one.py": "\n".join(lines), "data/two.py": f"b = 1\n{spaced}"}))
    assert found == ["data/one.py:1 and data/two.py:3, 9 lines"]
    assert duplicates(built({"data/one.py": "\n".join(lines[:7]), "data/two.py": spaced})) == []
