"""The manual, built once for all tests of it."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from filelock import FileLock

from tests.pool import ROOT

# Of the extra `docs`; griffe comes with mkdocstrings.
NEEDED = ("mkdocs", "material", "mkdocstrings", "griffe")


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built manual; its build is strict, so that a broken link fails it."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}, which the extra `docs` installs")
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base  # workers have folders of their own below it
    folder = shared / "manual"
    with FileLock(f"{folder}.lock"):
        if not (folder / "llms.txt").is_file():  # which is written last
            command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
            environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
            done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
            assert done.returncode == 0, done.stdout + done.stderr
    return folder
