"""Docstrings of the package have one dialect: Google's sections, whole sentences, code in single backticks."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.house import DEFINITIONS, PACKAGE, Definition, dotted
from tests.pool import ROOT

MODULES = sorted(PACKAGE.rglob("*.py"))

NAMED = ("Args", "Attributes", "Raises")
UNNAMED = ("Returns", "Yields")
SECTION = re.compile(rf"^({'|'.join((*NAMED, *UNNAMED, 'Example', 'Examples', 'Note'))}):$")
ENTRY = re.compile(r"^(\*{0,2}\w[\w.]*|`[^`]+`(?:, `[^`]+`)*|\*{0,2}\w+(?:, \*{0,2}\w+)+)(?: \([^)]*\))?: (.*)$")


@dataclass
class Entry:
    """What a section holds about one name, or about what is returned.

    Attributes:
        section: `"Args"` and the like.
        name: The name; empty in `Returns:` and `Yields:`.
        line: The number of its first line in the file.
        text: Its text, in one line.
        last_line: The number of its last line.
    """

    section: str
    name: str
    line: int
    text: str
    last_line: int


def place(path: Path) -> str:
    return str(path.relative_to(ROOT))


def documented(tree: ast.Module) -> Iterator[tuple[ast.Module | Definition, ast.Constant]]:
    """Everything that has a docstring, with it."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, *DEFINITIONS)) and ast.get_docstring(node) is not None:
            text = node.body[0]
            assert isinstance(text, ast.Expr)
            assert isinstance(text.value, ast.Constant)
            yield node, text.value


def entries(docstring: ast.Constant, source: list[str]) -> list[Entry]:
    """The entries of a docstring's sections."""
    first, last = docstring.lineno, docstring.end_lineno or docstring.lineno
    found: list[Entry] = []
    section, margin = "", docstring.col_offset
    for number in range(first + 1, last + 1):
        line = source[number - 1].rstrip().removesuffix('"""').rstrip()
        text = line.strip()
        indent = len(line) - len(line.lstrip())
        if text and indent == margin:
            match = SECTION.match(text)
            section = match[1] if match else ""
        elif section in NAMED and indent == margin + 4 and (named := ENTRY.match(text)):
            found.append(Entry(section, named[1], number, named[2], number))
        elif section in UNNAMED and text and (not found or found[-1].section != section):
            found.append(Entry(section, "", number, text, number))
        elif section in (*NAMED, *UNNAMED) and text and found:
            found[-1].text += f" {text}"
            found[-1].last_line = number
        elif not text and section in UNNAMED:
            section = ""
    return found


def is_sentence(text: str) -> bool:
    """Whether a text begins as a sentence does, or with code, and ends as one does."""
    begins = text[0].isupper() or not text[0].isalpha() or is_code(text.split()[0])
    return begins and text.rstrip("`*)\"'").endswith((".", "?", "!", ":", "…"))


def is_code(word: str) -> bool:
    """Whether a word is a name of code, such as float16 or torch.compile, that keeps its small letter."""
    return bool(re.search(r"[\d_.=(]", word.rstrip(".,;:")))


def parameters_of(node: Definition) -> list[str] | None:
    """The names that `Args:` is to have: a function's, or those of a class's constructor; None where that is open."""
    if isinstance(node, ast.ClassDef):
        own = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
        if own:
            return parameters_of(own[0])
        if any("dataclass" in ast.unparse(each) for each in node.decorator_list):
            fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
            return [dotted(each.target) for each in fields if "ClassVar" not in ast.unparse(each.annotation)]
        return None
    given = node.args
    names = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    names += [f"*{given.vararg.arg}"] if given.vararg else []
    names += [f"**{given.kwarg.arg}"] if given.kwarg else []
    return [name for name in names if name not in ("self", "cls", "mcs")]


def problems(source: str) -> list[str]:
    """What is wrong in the docstrings of a source."""
    lines = source.splitlines()
    found = []
    for node, docstring in documented(ast.parse(source)):
        where = f"line {docstring.lineno}"
        text = str(docstring.value)
        summary = text.strip().split("\n\n")[0].strip()
        if not is_sentence(" ".join(summary.split())):
            found.append(f"{where}: the summary is no sentence: {summary!r}")
        if "``" in re.sub(r"```.*?```", "", text, flags=re.DOTALL):
            found.append(f"{where}: double backticks")
        given = entries(docstring, lines)
        for entry in given:
            if not is_sentence(entry.text):
                found.append(f"line {entry.line}: no sentence: {entry.text!r}")
        if isinstance(node, ast.Module):
            continue
        named = [name.strip("*` ") for e in given if e.section == "Args" for name in e.name.split(",")]
        wanted = parameters_of(node)
        if named and wanted is not None:
            bare = {name.strip("*") for name in wanted}
            if unknown := [name for name in named if name not in bare]:
                found.append(f"{where}: Args of {node.name} has {unknown}, which are no parameters")
            public = {name.strip("*") for name in wanted if not name.strip("*").startswith("_")}
            if missing := sorted(public - set(named)):
                found.append(f"{where}: Args of {node.name} lacks {missing}")
    return found


def test_docstrings_have_one_dialect() -> None:
    found = [f"{place(path)}, {problem}" for path in MODULES for problem in problems(path.read_text())]
    assert not found, "\n".join(found)


GOOD = '''
def f(size, *rest, _hidden=None):
    """Count what is there.

    Args:
        size: The number of rows, such
            as 8.
        rest: `float16` or another.

    Returns:
        The count.

    Raises:
        ValueError: There is nothing.
    """
'''


def test_a_good_docstring_passes() -> None:
    assert problems(GOOD) == []


@pytest.mark.parametrize(
    ("good", "bad", "problem"),
    [
        ("Count what is there.", "count what is there.", "the summary is no sentence"),
        ("Count what is there.", "Count what is there", "the summary is no sentence"),
        ("size: The", "size: the", "no sentence: 'the number of rows, such as 8.'"),
        ("as 8.", "as 8", "no sentence: 'The number of rows, such as 8'"),
        ("The count.", "the count.", "no sentence: 'the count.'"),
        ("There is nothing.", "there is nothing.", "no sentence"),
        ("`float16`", "``float16``", "double backticks"),
        ("        rest: `float16` or another.\n", "", "lacks ['rest']"),
        ("size: The", "count: The", "has ['count'], which are no parameters"),
    ],
)
def test_a_bad_docstring_is_found(good: str, bad: str, problem: str) -> None:
    assert any(problem in each for each in problems(GOOD.replace(good, bad)))
