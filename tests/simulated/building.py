"""Builds the simulated device's library once for each version of its source and of torch, outside the tree."""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("device.cpp")
ROOT = SOURCE.parents[2]


class CannotBuild(Exception):
    """What is missing on this machine to build it."""


def library() -> Path:
    """The library, which is built if it is not there yet (a minute or two)."""
    import torch

    key = hashlib.sha256(SOURCE.read_bytes())
    key.update("\0".join((torch.__version__, sys.version, platform.machine())).encode())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "drivetrain-tests"
    folder = cache / f"simulated-{key.hexdigest()[:16]}"
    built = folder / "simulated.so"
    if built.exists():
        return built
    missing = [tool for tool in (os.environ.get("CXX", "c++"), "ninja") if shutil.which(tool) is None]
    if missing:
        raise CannotBuild(f"needs {' and '.join(missing)} to build the simulated device")
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # other sessions may build at the same time
        if not built.exists():
            # In a process of its own, since torch loads what it has built.
            subprocess.run([sys.executable, "-m", "tests.simulated.building", str(folder)], cwd=ROOT, check=True)
    return built


def _build(folder: Path) -> None:
    from torch.utils.cpp_extension import load

    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        load(
            "simulated",
            [str(SOURCE)],
            build_directory=scratch,
            extra_cflags=["-O1", "-w"],
            is_python_module=False,
            verbose=False,
        )
        folder.mkdir(exist_ok=True)
        shutil.copy(Path(scratch) / "simulated.so", folder / "simulated.so.part")
    (folder / "simulated.so.part").rename(folder / "simulated.so")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        _build(Path(sys.argv[1]))
    else:
        print(library())
