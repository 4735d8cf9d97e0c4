"""Command that compiles DeepSpeed's operators ahead of time: `python -m drivetrain.strategies.deepspeed.build_ops`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from drivetrain.runtime.devices import cpu_is_requested, detect_device_kind
from drivetrain.strategies.deepspeed.config import import_deepspeed
from drivetrain.strategies.deepspeed.ops import BUILDERS, SHARED_MEMORY, build, build_root, is_built, is_stale


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile DeepSpeed operators, or print with `--status` which are compiled.

    Returns the exit code.
    """
    parser = argparse.ArgumentParser(description="Build DeepSpeed's compiled operators ahead of time.")
    parser.add_argument("names", nargs="*", help=f"of {', '.join(BUILDERS)}; what helps on this machine if none")
    parser.add_argument("--status", action="store_true", help="only say which are built")
    given = parser.parse_args(arguments)
    unknown = [name for name in given.names if name not in BUILDERS]
    if unknown:
        parser.error(f"Unknown operator {unknown[0]!r}. Allowed: {', '.join(BUILDERS)}.")
    kind = "cpu" if cpu_is_requested() else detect_device_kind().name
    for name in BUILDERS if given.status else given.names or ([SHARED_MEMORY] if kind == "cpu" else []):
        if not given.status:
            started = time.monotonic()
            import_deepspeed(kind)
            build(name, kind)
            print(f"{name}: built in {time.monotonic() - started:.0f} s")
        else:
            stale = is_stale(build_root() / name / "lock")
            print(f"{name}: {'stale lock' if stale else 'built' if is_built(name) else 'not built'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
