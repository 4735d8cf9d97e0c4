"""Runs a script on simulated devices: `drivetrain launch tests/simulated/run.py SCRIPT ...`."""

import os
import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).absolute().parent)
    sys.path.append(str(Path(__file__).parents[2]))
    from tests.simulated.devices import start

    start(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    runpy.run_path(sys.argv[0], run_name="__main__")
