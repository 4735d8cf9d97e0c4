"""Check that each supported Python reads every file of the package: by its own compiler, or by ruff's parser.

Usage: python .ci/check_pythons.py. Interpreters are found on PATH and among pyenv's; one that is missing is named.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("drivetrain", "examples")


def supported() -> list[tuple[int, int]]:
    """The minor versions that pyproject.toml lists."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    return [(int(major), int(minor)) for major, minor in re.findall(r"Python :: (\d)\.(\d+)", text)]


def find_interpreter(version: str) -> str | None:
    """The path of an interpreter of a minor version such as "3.12"; None where there is none."""
    found = shutil.which(f"python{version}")
    if found and subprocess.run([found, "-V"], capture_output=True, check=False).returncode == 0:
        return found
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    return next((str(path) for path in sorted(pyenv.glob(f"{version}.*/bin/python"))), None)


def main() -> int:
    """Check each version, and report how."""
    failed = False
    for major, minor in supported():
        version = f"{major}.{minor}"
        target = f"py{major}{minor}"
        ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--quiet", "--target-version", target]
        parsed = subprocess.run([*ruff, "--select", "E9", *FOLDERS], cwd=ROOT, check=False).returncode == 0
        interpreter = find_interpreter(version)
        compiled = None
        if interpreter is not None:
            with tempfile.TemporaryDirectory() as cache:
                compiled = subprocess.run(
                    [interpreter, "-m", "compileall", "-q", *FOLDERS],
                    cwd=ROOT,
                    env={**os.environ, "PYTHONPYCACHEPREFIX": cache},
                    check=False,
                ).returncode
        by_compiler = {None: "no interpreter here", 0: "compiled by its interpreter"}.get(compiled, "does not compile")
        print(f"Python {version}: {'syntax checked by ruff' if parsed else 'syntax errors'}, {by_compiler}")
        failed = failed or not parsed or bool(compiled)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
