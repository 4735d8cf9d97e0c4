"""The pages with the names of Accelerate and of Lightning: complete, and true of what is there."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from tests.pool import ROOT

FOLDER = ROOT / "docs" / "migration"


def script(name: str) -> ModuleType:
    """A script beside the table, which is in no package."""
    spec = importlib.util.spec_from_file_location(f"migration_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


generate = script("generate")


@pytest.fixture(scope="module", params=sorted(generate.FRAMEWORKS))
def framework(request: pytest.FixtureRequest) -> Any:
    return generate.FRAMEWORKS[request.param]


@pytest.fixture(scope="module")
def recorded(framework: Any) -> dict[str, Any]:
    return json.loads(framework.names.read_text())


@pytest.fixture(scope="module")
def table(framework: Any) -> list[dict[str, Any]]:
    return yaml.safe_load(framework.explanations.read_text())


@pytest.fixture(scope="module")
def entries(framework: Any) -> list[Any]:
    return generate.compare(framework)[0]


def test_every_name_is_there_or_explained(entries: list[Any]) -> None:
    assert len(entries) > 1000
    assert generate.unexplained(entries) == []


def test_the_page_is_what_the_script_writes(entries: list[Any], recorded: dict[str, Any], framework: Any) -> None:
    assert framework.page.read_text() == generate.written(entries, recorded["version"], framework)


def test_every_pattern_of_the_table_is_for_some_name(entries: list[Any], table: list[dict[str, Any]]) -> None:
    explanations = generate.Explanations(table)
    unused = [
        pattern
        for each in explanations.entries
        for pattern in each["names"]
        if not any(generate.fnmatchcase(entry.id, pattern) for entry in entries)
    ]
    # Parts of what is not there have no entries of their own.
    known = {entry.id for entry in entries}
    assert [one for one in unused if one.rpartition(".")[0] in known or "*" not in one] == []


ADDED = {
    "accelerate": ("Accelerator", ["launch"]),
    "lightning": ("Trainer", []),
}


def test_a_name_that_nothing_explains_fails(
    recorded: dict[str, Any], framework: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed, package = copy.deepcopy(recorded), framework.package
    kind, commands = ADDED[package]
    changed["modules"][package][kind]["members"]["levitate"] = []
    changed["modules"][package][kind]["arguments"].append("weightless")
    changed["modules"][package]["gather_dust"] = {"kind": "function", "arguments": []}
    for command in commands:
        changed["commands"][command].append("--to_the_moon")
    (tmp_path / "names.json").write_text(json.dumps(changed))
    changed_framework = dataclasses.replace(framework, names=tmp_path / "names.json")
    monkeypatch.setattr(generate, "FRAMEWORKS", {package: changed_framework})
    monkeypatch.setattr(sys, "argv", ["generate.py", "--check"])
    with pytest.raises(SystemExit) as failed:
        generate.main()
    moon = [f"{command} --to_the_moon" for command in commands]
    for name in (f"{kind}.levitate", f"{kind}(weightless)", f"{package}.gather_dust", *moon):
        assert name in str(failed.value)


def test_a_page_that_is_not_up_to_date_fails(framework: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "page.md").write_text("# Another page\n")
    changed = dataclasses.replace(framework, page=tmp_path / "page.md")
    monkeypatch.setattr(generate, "FRAMEWORKS", {framework.package: changed})
    monkeypatch.setattr(sys, "argv", ["generate.py", "--check"])
    with pytest.raises(SystemExit, match="not up to date"):
        generate.main()


def test_what_is_found_is_there(entries: list[Any]) -> None:
    for entry in entries:
        if entry.verdict in (generate.SAME, generate.BETTER) and entry.ours:
            module, _, name = entry.ours.rpartition(".")
            assert hasattr(generate.module_or_none(module), name), entry.id


def test_the_record_is_that_of_the_installed_version(recorded: dict[str, Any], framework: Any) -> None:
    package = framework.package
    original = pytest.importorskip(package, reason=f"{package} is missing: it is in make bench's environment")
    if original.__name__ != package:
        pytest.skip(f"another test has put drivetrain in the place of {package} in this process")
    if original.__version__ != recorded["version"]:
        pytest.skip(f"{package} {recorded['version']} is recorded, and {original.__version__} is installed")
    assert script("record").record(package) == recorded
