"""What is deprecated warns until the version that it names, and is gone from there on."""

from __future__ import annotations

import ast
import warnings

import pytest

import drivetrain
from drivetrain import DrivetrainDeprecationWarning
from drivetrain.runtime.errors import deprecated, warn_ignored
from tests.house import PACKAGE

HELPERS = ("deprecated", "warn_ignored")


def marks(source: str) -> list[dict[str, str | None]]:
    """The versions of each deprecation in a file; None for one that is no literal."""
    return [
        {
            keyword.arg: keyword.value.value if isinstance(keyword.value, ast.Constant) else None
            for keyword in node.keywords
            if keyword.arg in ("since", "removed_in")
        }
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in HELPERS
    ]


def numbers(version: str | None) -> tuple[int, ...]:
    """The three numbers of a version, without what marks a pre-release."""
    return tuple(int(part) for part in str(version).split("+")[0].split("-")[0].split("."))


def problems(mark: dict[str, str | None], version: str) -> list[str]:
    """What is wrong with a deprecation at a version of the package."""
    since, removed_in, now = numbers(mark["since"]), numbers(mark["removed_in"]), numbers(version)
    found = []
    if removed_in <= now:
        found.append(f"to be removed in {mark['removed_in']}, and this is {version}")
    if since[0] == 0 and removed_in < (0, since[1] + 2, 0):
        found.append("a deprecation before 1.0 stays for two minor versions")
    if since[0] > 0 and (removed_in <= since or removed_in[1:] != (0, 0)):
        found.append("from 1.0 on, things are removed in major versions")
    return found


def test_what_is_to_be_removed_in_this_version_is_gone() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}: {problem}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for mark in marks(path.read_text())
        for problem in problems(mark, drivetrain.__version__)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("since", "removed_in", "version", "count"),
    [
        ("0.2.0", "0.4.0", "0.3.9", 0),
        ("0.2.0", "0.4.0", "0.4.0", 1),
        ("0.2.0", "0.4.0", "1.0.0", 1),
        ("0.2.0", "0.3.0", "0.2.0", 1),
        ("0.9.0", "1.0.0", "0.9.0", 0),
        ("1.2.0", "2.0.0", "1.9.0", 0),
        ("1.2.0", "1.4.0", "1.3.0", 1),
    ],
)
def test_deprecations_that_are_due_or_too_short_are_found(
    since: str, removed_in: str, version: str, count: int
) -> None:
    source = f"@deprecated(since={since!r}, removed_in={removed_in!r})\ndef old(): ...\n"
    (mark,) = marks(source)
    assert len(problems(mark, version)) == count


@deprecated(since="0.2.0", removed_in="9.0.0", use="new()")
def old(value: int) -> int:
    """Double a value."""
    return 2 * value


@deprecated(since="0.2.0", removed_in="9.0.0")
class Old:
    def __init__(self, value: int) -> None:
        self.value = value


def test_a_deprecated_function_works_and_warns_at_the_line_of_its_caller() -> None:
    with pytest.warns(DrivetrainDeprecationWarning) as caught:
        assert old(3) == 6
    (warning,) = caught
    assert str(warning.message) == ("old is deprecated since drivetrain 0.2.0 and will be removed in 9.0.0. Use new().")
    assert warning.filename == __file__
    assert (old.__name__, old.__doc__) == ("old", "Double a value.")


def test_a_deprecated_class_stays_a_class_and_warns_where_an_object_is_made() -> None:
    class Derived(Old):
        pass

    for kind in (Old, Derived):
        with pytest.warns(DrivetrainDeprecationWarning, match=r"^Old is deprecated .* in 9\.0\.0\.$") as caught:
            made = kind(4)
        assert (isinstance(made, Old), made.value, caught[0].filename) == (True, 4, __file__)


def run(steps: int, quietly: bool | None = None) -> int:
    warn_ignored("run", "quietly", quietly, "Leave it out.", since="0.2.0", removed_in="9.0.0")
    return steps


def test_an_argument_without_effect_warns_at_the_line_of_the_caller_who_gave_it() -> None:
    with pytest.warns(DrivetrainDeprecationWarning) as caught:
        assert run(3, quietly=False) == 3
    (warning,) = caught
    assert str(warning.message) == (
        "run(quietly=False) has no effect since drivetrain 0.2.0 and will be removed in 9.0.0. Leave it out."
    )
    assert warning.filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run(3) == 3
