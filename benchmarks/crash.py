"""Kill the ranks of real trainings many times and compare what comes out with a run that nobody touched.

    python benchmarks/crash.py                     # 200 kills, about 15 minutes on two cores
    python benchmarks/crash.py --kills 1000 --seed 7
    python benchmarks/crash.py --num_workers 2     # only with loader workers

Each training runs on two processes under `drivetrain launch --max_restarts`, and is killed with SIGKILL at random
moments: after a batch, at a file operation of a save, while it resumes, while it starts. See tests/crash.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.crash.harness import Run, differences, epochs_for, place_of, report, train

KILLS_A_RUN = 25
VARIANTS = ([], ["--async_save"], ["--num_workers", "2"], ["--async_save", "--num_workers", "2"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="how many in all")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument(
        "--num_workers", type=int, choices=(0, 2), help="only with so many loader workers; both if left"
    )
    arguments = parser.parse_args()
    wanted = arguments.num_workers
    variants = [flags for flags in VARIANTS if wanted is None or ("--num_workers" in flags) == bool(wanted)]
    begin, killed, lost, different = time.monotonic(), 0, 0, 0
    where: dict[str, int] = {}
    with tempfile.TemporaryDirectory(prefix="drivetrain_crash_") as directory:
        epochs = epochs_for(KILLS_A_RUN)
        untouched = train(Path(directory) / "untouched", epochs)
        if untouched.ended.code != 0:
            print(untouched.ended.err)
            return 1
        number = 0
        while killed < arguments.kills:
            kills = min(KILLS_A_RUN, arguments.kills - killed)
            flags = [*variants[number % len(variants)], "--seed", f"{arguments.seed * 1000 + number}"]
            run = train(Path(directory) / f"run{number}", epochs, *flags, kills=kills, timeout=kills * 120)
            report(run, begin)
            found = differences(run, untouched)
            if found:
                print(f"run {number} ({' '.join(flags)}):", *found, sep="\n  ")
            lost += run.ended.code != 0 or run.restarts != kills
            different += bool(found)
            killed += len(run.shots)
            _count(run, where)
            number += 1
    seconds = time.monotonic() - begin
    print(f"{killed} kills in {number} runs and {seconds:.0f} s: {lost} runs lost, {different} different.")
    print(", ".join(f"{count} {kind}" for kind, count in sorted(where.items())))
    return 1 if lost or different else 0


def _count(run: Run, where: dict[str, int]) -> None:
    for shot in run.shots:
        kind = place_of(shot)
        where[kind] = where.get(kind, 0) + 1


if __name__ == "__main__":
    sys.exit(main())
