"""The package as a whole: everything imports, the public face is complete, the links lead somewhere."""

from __future__ import annotations

import ast
import importlib
import re
from importlib import metadata
from pathlib import Path

import pytest

import drivetrain
from tests.pool import ROOT

PACKAGE = ROOT / "drivetrain"
LINKS = ("trainer", "callbacks", "strategies")


def module_names() -> list[str]:
    paths = (path.relative_to(ROOT).with_suffix("") for path in PACKAGE.rglob("*.py"))
    return sorted(".".join(path.parts).removesuffix(".__init__") for path in paths)


def folders() -> list[Path]:
    return sorted({path.parent for path in PACKAGE.rglob("*.py")})


def test_every_module_imports() -> None:
    for name in module_names():
        try:
            importlib.import_module(name)
        except drivetrain.ConfigurationError as error:  # of a torch that is too old for it
            if "newer; this is" not in str(error):
                raise


def test_every_folder_is_a_package() -> None:
    assert [folder for folder in folders() if not (folder / "__init__.py").is_file()] == []


def test_every_public_name_resolves() -> None:
    assert set(drivetrain.__all__) <= set(dir(drivetrain))
    assert [name for name in drivetrain.__all__ if getattr(drivetrain, name) is None] == []


def test_public_names_are_announced_once() -> None:
    assert len(drivetrain.__all__) == len(set(drivetrain.__all__))


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="Trainerr"):
        drivetrain.Trainerr  # noqa: B018


def seen_by_editors(package: Path) -> set[str]:
    """The names that a package imports for type checking; those of a room below it where it imports all of them."""
    tree = ast.parse((package / "__init__.py").read_text())
    [block] = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    seen: set[str] = set()
    for node in block.body:
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            seen |= seen_by_editors(PACKAGE.parent / str(node.module).replace(".", "/"))
        elif isinstance(node, ast.ImportFrom):
            seen |= {str(alias.asname) for alias in node.names}
    return seen


def test_editors_see_every_public_name() -> None:
    """Names are resolved on first use, so type checkers know only those imported for type checking alone."""
    assert sorted(set(drivetrain.__all__) - {"__version__"} - seen_by_editors(PACKAGE)) == []


def test_versions_agree() -> None:
    declared = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE)
    assert declared is not None
    assert drivetrain.__version__ == declared[1]


@pytest.mark.parametrize("link", LINKS)
def test_the_links_lead_to_the_main_rooms(link: str) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("needs a checkout: source distributions leave the links out")
    assert (ROOT / link).is_symlink()
    assert (ROOT / link).readlink() == Path("drivetrain") / link
    assert (ROOT / link / "__init__.py").is_file()


def test_every_need_has_an_exact_version_for_development() -> None:
    """One line a package; what is not installed for development (other extras) needs none."""
    pins = re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE)
    pinned = {normal(name) for name in pins}
    needs = [item for item in metadata.requires("drivetrain") or [] if is_for_development(item)]
    assert sorted({normal(re.split(r"[^\w.-]", item)[0]) for item in needs} - pinned) == []


def is_for_development(requirement: str) -> bool:
    extra = re.search(r"extra == ['\"](\w+)['\"]", requirement)
    return extra is None or extra[1] in {"test", "dev", "docs", "examples", "bench"}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
