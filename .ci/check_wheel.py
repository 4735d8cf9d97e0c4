"""Check what `make wheel` has built, from a clean environment that the wheel is installed in.

Usage: python check_wheel.py DIST, where DIST holds one wheel and one sdist. Uses the standard library alone.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# The links that lead to the main rooms are for whoever browses the repository.
LINKS = ("trainer", "callbacks", "strategies")


def source_files() -> set[str]:
    """Name every file of the package, relative to the repository."""
    files = (path for path in (ROOT / "drivetrain").rglob("*") if path.is_file())
    return {str(path.relative_to(ROOT)) for path in files if "__pycache__" not in path.parts}


def archive_problems(dist: Path) -> list[str]:
    """Compare what the two archives hold with what the repository holds."""
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = {name for name in archive.namelist() if not name.split("/")[0].endswith(".dist-info")}
    with tarfile.open(sdist) as archive:
        in_sdist = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    wanted = source_files()
    problems = [f"{wheel.name} lacks {name}" for name in sorted(wanted - in_wheel)]
    problems += [f"{wheel.name} holds {name}, which is not in the package" for name in sorted(in_wheel - wanted)]
    problems += [f"{sdist.name} lacks {name}" for name in sorted(wanted - in_sdist)]
    problems += [f"{sdist.name} holds the link {name}" for name in sorted(in_sdist) if name.split("/")[0] in LINKS]
    return problems


def optional_modules() -> set[str]:
    """Top-level modules that only an extra brings, as far as their names follow from the requirement."""
    requirements = metadata.requires("drivetrain") or []
    names = {re.split(r"[^\w.-]", item)[0].lower().replace("-", "_") for item in requirements if "extra ==" in item}
    return {"megatron" if name == "megatron_core" else name for name in names}


def import_problems() -> tuple[int, list[str]]:
    """Import every module of the package; one that needs an extra may say so, and is named."""
    problems: list[str] = []
    optional = optional_modules()
    names = sorted(
        name.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        for name in source_files()
        if name.endswith(".py") and not name.endswith("__main__.py")
    )
    for name in names:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            missing = (error.name or "").split(".")[0]
            if missing not in optional:
                problems.append(f"{name} does not import: {error}")
            else:
                print(f"{name}: not imported, it needs {missing}")
            continue
        except Exception as error:
            problems.append(f"{name} does not import: {type(error).__name__}: {error}")
            continue
        if Path(module.__file__ or "").is_relative_to(ROOT / "drivetrain"):
            problems.append(f"{name} came from the checkout, not from the wheel")
    package = importlib.import_module("drivetrain")
    for public in package.__all__:
        if not hasattr(package, public):
            problems.append(f"drivetrain.{public} is announced and does not exist")
    return len(names), problems


def command_problems() -> list[str]:
    """Ask the installed command for its help."""
    command = Path(sys.executable).parent / "drivetrain"
    answer = subprocess.run([command, "--help"], capture_output=True, text=True, timeout=60, check=False)
    if answer.returncode or "launch" not in answer.stdout:
        return [f"`drivetrain --help` ended with {answer.returncode}:\n{answer.stdout}{answer.stderr}"]
    return []


def main() -> int:
    """Run all checks and print what they found."""
    problems = archive_problems(Path(sys.argv[1]).resolve())
    count, of_imports = import_problems()
    problems += of_imports + command_problems()
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    if not problems:
        print(f"The wheel holds the whole package, and all {count} modules import.")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
