"""The words of the house: names in the code are the field's, and prose is plain, present-day technical English."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house import DEFINITIONS, PACKAGE, Module
from tests.pool import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")])
MODULES = sorted(PACKAGE.rglob("*.py"))

# Words within a name, as a pattern over its snake case, and what the field calls them.
NAMES = {
    r"divid(e|es|ed|ing)|divisions?": "shard, shards, sharded, sharding",
    r"loss_of_nothing": "zero_loss",
    r"whole_window": "schedules_microbatches, or microbatches",
    r"runs_steps": "is_last_stage or computes_loss",
    r"notes?_\w+": "record_* or mark_*",
    r"tells?|told": "inform, report, publish",
    r"says?": "print, report, or the message itself",
    r"lose": "mark_lost, discard",
    r"nobody": "unused, unread, unwatched",
    r"looks?": "poll, check, find",
    r"talk": "resume",
    r"keep_company": "the thing that is awaited",
    r"nothing_counts": "muted_logging",
    r"(go|goes|going)_on": "resume, continue",
    r"anew": "again, rebuild, recompute",
    r"done_the_least": "minimum_reached",
}

# Phrases in prose, and what to write.
PHRASES = {
    r"anew|afresh": "again, from scratch",
    r"(in the )?midst( of)?": "during, within",
    r"(go|goes|going|gone|went) on": "resume, continue",
    r"nobody": "name what is absent: no process, no callback",
    r"whoever": "name who: users, a caller",
    r"tell|tells|telling|told": "report, state, distinguish",
    r"say|says|saying|said": "state, give, specify, report",
    r"know|knows|knew": "hold, have, be known",
    r"looks? at": "read, check, inspect",
    r"all the same": "nevertheless, still",
    r"in vain": "without effect",
    r"lets? go( of)?": "release",
    r"for nothing": "has no effect, weighs 0",
    r"divid(e|es|ed|ing)|divisions?": "shard, split; of numbers: multiple of, divisible by",
}

NAME = re.compile("|".join(f"(?:^|_)(?:{pattern})(?:_|$)" for pattern in NAMES))
PHRASE = re.compile(rf"\b(?:{'|'.join(PHRASES)})\b", re.IGNORECASE)

# They are named in compat/, in the names that the product keeps, and in error hints.
FRAMEWORKS = re.compile(r"\b(Lightning|Accelerate)\b")


def place(path: Path) -> str:
    return str(path.relative_to(ROOT))


def snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def names_given(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The names that code gives: to functions, classes, arguments, variables and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, DEFINITIONS):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def odd_names(source: str) -> list[str]:
    return [f"line {line}: {name}" for line, name in names_given(ast.parse(source)) if NAME.search(snake_case(name))]


def without_code(text: str) -> str:
    """Markdown with its fences, inline code, addresses and comments blanked out, line by line."""

    def blank(match: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", match[0])

    for pattern in (
        r"(?ms)^\s*(```|~~~).*?^\s*\1",
        r"(?s)<!--.*?-->",
        r"``[^`]+``",
        r"`[^`]+`",
        r"\]\([^)]*\)",
        r"https?://\S+",
    ):
        text = re.sub(pattern, blank, text)
    return text


def prose_of(path: Path) -> list[tuple[int, str]]:
    """The numbered lines of a page, or of a module's docstrings and comments, without code."""
    if path.suffix == ".md":
        return list(enumerate(without_code(path.read_text()).splitlines(), 1))
    module = Module(path, PACKAGE)
    lines = without_code(module.source).splitlines()
    found = {number: lines[number - 1] for number in module.docstring_lines}
    for token in tokenize.generate_tokens(io.StringIO(module.source).readline):
        if token.type == tokenize.COMMENT:
            found[token.start[0]] = without_code(token.string)
    return sorted(found.items())


def odd_phrases(lines: list[tuple[int, str]]) -> list[str]:
    text = " ".join(line.strip() for _, line in lines)  # phrases may be broken over two lines
    starts, position = [], 0
    for number, line in lines:
        starts.append((position, number))
        position += len(line.strip()) + 1
    found = []
    for match in PHRASE.finditer(text):
        number = next(number for start, number in reversed(starts) if start <= match.start())
        around = text[max(0, match.start() - 30) : match.end() + 30].strip()
        found.append(f"line {number}: {match[0]!r} in '{around}'")
    return found


def test_names_are_the_fields() -> None:
    found = [place(path) for path in MODULES if NAME.search(snake_case(path.stem))]
    found += [f"{place(path)}, {odd}" for path in MODULES for odd in odd_names(path.read_text())]
    assert not found, "\n".join(found)


def test_prose_is_plain() -> None:
    found = [f"{place(path)}, {odd}" for path in (*PAGES, *MODULES) for odd in odd_phrases(prose_of(path))]
    assert not found, "\n".join(found)


def test_the_core_does_not_name_the_frameworks_whose_scripts_it_runs() -> None:
    core = [path for path in MODULES if "compat" not in path.parts and path.name != "accelerate_names.py"]
    named = [f"{place(path)}:{line}" for path in core for line, text in prose_of(path) if FRAMEWORKS.search(text)]
    assert not named, "\n".join(named)


@pytest.mark.parametrize(
    "name", ["DividedModule", "_tell", "is_time_to_look", "note_change", "go_on_from", "loss_of_nothing"]
)
def test_odd_names_are_found(name: str) -> None:
    assert odd_names(f"{name} = 1")


@pytest.mark.parametrize("name", ["lookup", "denoted", "notes", "footnote", "is_sharded", "saying_table"])
def test_other_names_are_left_alone(name: str) -> None:
    assert not odd_names(f"{name} = 1")


@pytest.mark.parametrize(
    ("line", "count"),
    [
        ("The run goes on.", 1),
        ("The optimizer tells it.", 1),
        ("Stopped in the midst of a step.", 1),
        ("A foregone conclusion: all known names.", 0),
        ("`go on` and [here](tell.md)", 0),
    ],
)
def test_odd_phrases_are_found(line: str, count: int) -> None:
    assert len(odd_phrases(list(enumerate(without_code(line).splitlines(), 1)))) == count


def test_a_phrase_over_two_lines_is_found() -> None:
    assert odd_phrases([(7, "the run goes"), (8, "on after that")]) == [
        "line 7: 'goes on' in 'the run goes on after that'"
    ]
