"""Error codes: each configuration error of the package names its cause, and each cause is explained."""

from __future__ import annotations

import ast
import copy
import pickle
import re
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from drivetrain.runtime.error_codes import causes, find_cause
from drivetrain.runtime.errors import (
    ArgumentTypeError,
    CheckpointError,
    ConfigurationError,
    PackageMissingError,
)
from tests.house import PACKAGE
from tests.test_words import PHRASE

TREES = {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def class_codes() -> dict[str, str | None]:
    """The classes of the family in the package, with the code that the class itself gives."""
    found: dict[str, str | None] = {"ConfigurationError": None}
    classes = [node for tree in TREES.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    while True:
        new = [
            node
            for node in classes
            if node.name not in found and any(ast.unparse(base).split(".")[-1] in found for base in node.bases)
        ]
        if not new:
            return found
        for node in new:
            codes = [
                each.value.value
                for each in node.body
                if isinstance(each, ast.Assign)
                and ast.unparse(each.targets[0]) == "code"
                and isinstance(each.value, ast.Constant)
            ]
            inherited = next(found[name] for base in node.bases if (name := ast.unparse(base).split(".")[-1]) in found)
            found[node.name] = codes[0] if codes else inherited


CLASSES = class_codes()


def constructions(tree: ast.AST) -> list[ast.Call]:
    """Where an error of the family is made by the name of its class."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [call for call in calls if ast.unparse(call.func).split(".")[-1] in CLASSES]


def code_of(call: ast.Call) -> str | None:
    """The literal code that a construction gives, or that of its class."""
    for keyword in call.keywords:
        if keyword.arg == "code":
            return keyword.value.value if isinstance(keyword.value, ast.Constant) else None
    return CLASSES[ast.unparse(call.func).split(".")[-1]]


def pattern(node: ast.expr) -> str | None:
    """A pattern for the texts that an expression makes, None for one that is no literal."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.escape(" ".join(node.value.split(" ")))
    if isinstance(node, ast.JoinedStr):
        return "".join(pattern(part) or "" if isinstance(part, ast.Constant) else "(?s:.*)" for part in node.values)
    if isinstance(node, ast.BinOp):
        return (pattern(node.left) or "(?s:.*)") + (pattern(node.right) or "(?s:.*)")
    return None


def templates() -> dict[str, list[str]]:
    """The patterns of the messages under each code; of a whole file where a message is made elsewhere in it."""
    found: dict[str, list[str]] = {}
    for tree in TREES.values():
        texts = [pattern(node) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr | ast.Constant | ast.BinOp)]
        for call in constructions(tree):
            own = pattern(call.args[0]) if call.args else None
            mine = [own] if own else [text for text in texts if text and len(text) > 40]
            found.setdefault(str(code_of(call)), []).extend(mine)
    return found


TEMPLATES = templates()


def test_each_configuration_error_of_the_package_has_a_registered_code() -> None:
    without = [
        f"{path.relative_to(PACKAGE)}:{call.lineno} {code_of(call)}"
        for path, tree in TREES.items()
        for call in constructions(tree)
        if code_of(call) not in causes() or code_of(call) == "DT-000"
    ]
    assert without == []


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("ConfigurationError('x', code='DT-012')", "DT-012"),
        ("errors.ConfigurationError('x')", None),
        ("ConfigurationError('x', code=code)", None),
        ("PackageMissingError('x')", "DT-013"),
        ("PackageMissingError('x', code='DT-014')", "DT-014"),
    ],
)
def test_the_code_of_a_construction_is_read_where_it_is_literal(source: str, code: str | None) -> None:
    (call,) = constructions(ast.parse(source))
    assert code_of(call) == code


@pytest.mark.parametrize("code", [code for code in causes() if code != "DT-000"])
def test_the_example_of_a_code_is_a_message_that_the_package_raises_with_it(code: str) -> None:
    assert any(re.fullmatch(template, causes()[code].example) for template in TEMPLATES.get(code, []))


@pytest.mark.parametrize("code", causes())
def test_the_entry_of_a_code_is_whole_and_plain(code: str) -> None:
    cause = find_cause(code)
    assert re.fullmatch(r"DT-\d{3}", code)
    for text in (cause.raised, cause.cause, cause.mend):
        assert text.endswith(".")
        assert PHRASE.findall(text) == []


def test_codes_are_in_order_and_their_titles_differ() -> None:
    assert list(causes()) == sorted(causes())
    assert len({cause.title for cause in causes().values()}) == len(causes())


@pytest.mark.parametrize("given", ["DT-012", "dt-012", "12", "[DT-012:", "[DT-012]"])
def test_a_code_is_found_as_it_is_copied(given: str) -> None:
    assert find_cause(given).code == "DT-012"


def test_an_unknown_code_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"no error code 'DT-999'\. `drivetrain explain` lists all"):
        find_cause("DT-999")


ERRORS = [
    (ConfigurationError("No.", code="DT-012"), "DT-012"),
    (ArgumentTypeError("No."), "DT-003"),
    (PackageMissingError("No."), "DT-013"),
    (PackageMissingError("No.", code="DT-014"), "DT-014"),
]


@pytest.mark.parametrize(("error", "code"), ERRORS)
def test_the_message_comes_first_and_the_code_last(error: ConfigurationError, code: str) -> None:
    assert str(error) == f"No.\n[{code}: drivetrain explain {code}]"
    assert (error.message, error.code, error.args) == ("No.", code, ("No.",))


@pytest.mark.parametrize(("error", "code"), ERRORS)
@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))])
def test_copies_of_an_error_keep_its_code(error: ConfigurationError, code: str, again) -> None:
    other = again(error)
    assert (type(other), other.code, str(other)) == (type(error), code, str(error))


def refuse() -> None:
    raise PackageMissingError("No.", code="DT-014")


def test_an_error_of_another_process_keeps_its_code() -> None:
    with ProcessPoolExecutor(1, get_context("fork")) as pool, pytest.raises(PackageMissingError) as caught:
        pool.submit(refuse).result()
    assert (caught.value.code, str(caught.value)) == ("DT-014", "No.\n[DT-014: drivetrain explain DT-014]")


def test_an_error_of_another_package_needs_no_code() -> None:
    error = ConfigurationError("MyStrategy cannot run.")
    assert (error.code, str(error)) == ("DT-000", "MyStrategy cannot run.")


def test_errors_without_a_code_have_their_message_alone() -> None:
    assert CheckpointError("Damaged.").message == "Damaged."


def test_the_manual_has_a_section_for_each_code_with_its_anchor() -> None:
    source = (Path(__file__).parents[2] / "docs/hooks/errors.py").read_text()
    names: dict[str, object] = {}
    exec(
        compile(re.sub(r"^from mkdocs.*$", "MkDocsConfig = Files = File = None", source, flags=re.M), "e", "exec"),
        names,
    )
    page = names["page"]()  # type: ignore[operator]
    for code in causes():
        assert f"{{#{code.lower()}}}" in page
