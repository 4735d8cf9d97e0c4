"""Build a release and check it: version from the git tag, sdist and wheel, notes from CHANGELOG.md. Uploads nothing.

Usage: python .ci/release.py [--final]

A dry run, the default, works on any commit and lists what a release would still need. With --final the commit must
have a tag such as v0.2.0, no uncommitted changes, and the same version everywhere.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERSION = r"\d+\.\d+\.\d+(?:(?:a|b|rc)\d+)?"

# Where the version is written, and how.
PLACES = {
    "pyproject.toml": rf'^version = "({VERSION})"$',
    "drivetrain/__init__.py": rf'^__version__ = "({VERSION})"$',
    "CITATION.cff": rf"^version: ({VERSION})$",
}


def git(root: Path, *arguments: str) -> str:
    """What a git command prints, an empty text where it fails."""
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def tagged_version(root: Path) -> str | None:
    """The version of the tag on the commit that is checked out; None without one."""
    tags = git(root, "tag", "--points-at", "HEAD").split()
    versions = [tag.removeprefix("v") for tag in tags if re.fullmatch(rf"v{VERSION}", tag)]
    return versions[0] if len(versions) == 1 else None


def declared_versions(root: Path) -> dict[str, str | None]:
    """The version in each file that has it; None where it is missing."""
    found = {}
    for name, pattern in PLACES.items():
        match = re.search(pattern, (root / name).read_text(encoding="utf-8"), re.MULTILINE)
        found[name] = match[1] if match else None
    return found


def notes_of(changelog: str, version: str) -> str | None:
    """The section of a version in a changelog, without its heading; None where there is none.

    Args:
        changelog: Its text.
        version: The version, or `"Unreleased"`.
    """
    heading = rf"^## \[{re.escape(version)}\](?: - \d{{4}}-\d{{2}}-\d{{2}})?$"
    match = re.search(rf"{heading}\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    return match[1].strip() + "\n" if match else None


def problems(root: Path, version: str | None) -> list[str]:
    """What stands in the way of a release of the commit that is checked out.

    Args:
        root: The repository.
        version: The version of its tag.
    """
    found = [] if version else ["the commit has no tag, or several, such as v0.2.0: git tag v0.2.0"]
    if git(root, "status", "--porcelain"):
        found.append("there are uncommitted changes")
    for name, declared in declared_versions(root).items():
        if version and declared != version:
            found.append(f"{name} has the version {declared}, and the tag {version}")
    changelog = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    if version and not re.search(rf"^## \[{re.escape(version)}\] - \d{{4}}-\d{{2}}-\d{{2}}$", changelog, re.MULTILINE):
        found.append(f"CHANGELOG.md has no section '## [{version}] - YEAR-MONTH-DAY'")
    return found


def build(root: Path, folder: Path) -> list[Path]:
    """Build both archives into an empty folder and check them; returns their paths."""
    shutil.rmtree(folder, ignore_errors=True)
    python = sys.executable
    subprocess.run([python, "-m", "build", "--no-isolation", "--outdir", str(folder), str(root)], check=True)
    archives = sorted([*folder.glob("*.tar.gz"), *folder.glob("*.whl")])
    subprocess.run([python, "-m", "twine", "check", "--strict", *map(str, archives)], check=True)
    subprocess.run([python, "-m", "check_wheel_contents", *map(str, folder.glob("*.whl"))], check=True, cwd=root)
    return archives


def main() -> int:
    """Build, check, and report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--final", action="store_true", help="refuse what is not ready to be released")
    options = parser.parse_args()
    version = tagged_version(ROOT)
    open_points = problems(ROOT, version)
    if options.final and open_points:
        for each in open_points:
            print(f"error: {each}", file=sys.stderr)
        return 1
    version = version or declared_versions(ROOT)["pyproject.toml"] or ""
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    notes = notes_of(changelog, version) or notes_of(changelog, "Unreleased")
    if notes is None:
        print("error: CHANGELOG.md has no section for this version", file=sys.stderr)
        return 1
    folder = ROOT / ("dist" if options.final else "build/release")
    archives = build(ROOT, folder)
    wrong = [archive.name for archive in archives if f"-{version}" not in archive.name]
    if wrong:
        print(f"error: {', '.join(wrong)} have another version than {version}", file=sys.stderr)
        return 1
    (folder / "NOTES.md").write_text(notes, encoding="utf-8")
    print(f"{'' if options.final else 'Dry run. '}drivetrain {version}, nothing was uploaded:")
    for path in [*archives, folder / "NOTES.md"]:
        print(f"  {path.relative_to(ROOT)}  {path.stat().st_size:,} bytes")
    for each in open_points:
        print(f"  before a release: {each}")
    if options.final:
        print(f"Upload with: {Path(sys.executable).name} -m twine upload {folder.name}/*.tar.gz {folder.name}/*.whl")
    return 0


if __name__ == "__main__":
    sys.exit(main())
