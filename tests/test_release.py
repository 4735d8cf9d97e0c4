"""What `make release` reads: the tag, the versions, the notes; and what it refuses."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from tests.pool import ROOT

CHANGELOG = """# Changelog

## [Unreleased]

- Comes next.

## [0.2.0] - 2026-12-01

### Added

- A strategy.

## [0.1.0] - 2026-11-01

- The first.
"""


@pytest.fixture(scope="module")
def release() -> ModuleType:
    spec = importlib.util.spec_from_file_location("release", ROOT / ".ci/release.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository at version 0.2.0, committed and tagged."""
    (tmp_path / "drivetrain").mkdir()
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "0.2.0"\n')
    (tmp_path / "drivetrain/__init__.py").write_text('__version__ = "0.2.0"\n')
    (tmp_path / "CITATION.cff").write_text("cff-version: 1.2.0\nversion: 0.2.0\n")
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    git(tmp_path, "init", "-q")
    commit(tmp_path)
    git(tmp_path, "tag", "v0.2.0")
    return tmp_path


def git(folder: Path, *arguments: str) -> None:
    person = ["-c", "user.name=Tester", "-c", "user.email=tester@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *person, *arguments], cwd=folder, check=True, capture_output=True)


def commit(folder: Path) -> None:
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "A change")


def test_a_tagged_commit_with_one_version_everywhere_can_be_released(release: ModuleType, repository: Path) -> None:
    assert release.tagged_version(repository) == "0.2.0"
    assert release.problems(repository, "0.2.0") == []


def test_a_commit_without_a_tag_cannot(release: ModuleType, repository: Path) -> None:
    (repository / "more").touch()
    commit(repository)
    assert release.tagged_version(repository) is None
    assert "no tag" in release.problems(repository, None)[0]


def test_tags_that_are_no_versions_do_not_count(release: ModuleType, repository: Path) -> None:
    for tag in ("latest", "v0.3", "v1.0.0-beta"):
        git(repository, "tag", tag)
    assert release.tagged_version(repository) == "0.2.0"


@pytest.mark.parametrize("name", ["pyproject.toml", "drivetrain/__init__.py", "CITATION.cff"])
def test_another_version_in_a_file_is_named(release: ModuleType, repository: Path, name: str) -> None:
    path = repository / name
    path.write_text(path.read_text().replace("0.2.0", "0.1.9"))
    commit(repository)
    assert release.problems(repository, "0.2.0") == [f"{name} has the version 0.1.9, and the tag 0.2.0"]


def test_uncommitted_changes_are_refused(release: ModuleType, repository: Path) -> None:
    (repository / "CHANGELOG.md").write_text(f"{CHANGELOG}\nMore.\n")
    assert release.problems(repository, "0.2.0") == ["there are uncommitted changes"]


def test_a_version_without_notes_is_refused(release: ModuleType, repository: Path) -> None:
    (repository / "CHANGELOG.md").write_text(CHANGELOG.replace("## [0.2.0] - 2026-12-01", "## Soon"))
    commit(repository)
    assert "CHANGELOG.md has no section" in release.problems(repository, "0.2.0")[0]


@pytest.mark.parametrize(
    ("version", "notes"),
    [
        ("Unreleased", "- Comes next.\n"),
        ("0.2.0", "### Added\n\n- A strategy.\n"),
        ("0.1.0", "- The first.\n"),
        ("0.3.0", None),
    ],
)
def test_notes_are_the_section_of_the_version(release: ModuleType, version: str, notes: str | None) -> None:
    assert release.notes_of(CHANGELOG, version) == notes


def test_the_repository_has_one_version_everywhere(release: ModuleType) -> None:
    versions = release.declared_versions(ROOT)
    assert None not in versions.values()
    assert len(set(versions.values())) == 1


def test_the_citation_has_the_keys_that_its_format_requires() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert citation["cff-version"] == "1.2.0"
    assert all("name" in author or "family-names" in author for author in citation["authors"])
    assert citation["license"] == "Apache-2.0"
