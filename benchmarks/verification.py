"""Verdicts of `drivetrain verify` on sound scripts and on scripts with a planted mistake.

    python benchmarks/verification.py
    python benchmarks/verification.py --seeds 20

The scripts are those of tests/verification. With --seeds, one sound script after the other is run with other seeds.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click
from tables import as_table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.pool import ROOT
from tests.verification.cases import MISTAKES, SOUND, Case


def found_in(case: Case, seed: int | None = None) -> tuple[str, int, str, float]:
    """Return the cause that verify names ("same" if there is none), the step, the quantity, and the seconds it took."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)} | ({} if seed is None else {"VERIFY_SEED": str(seed)})
    start = time.perf_counter()
    run = subprocess.run(
        [sys.executable, "-m", "drivetrain", "verify", "--json", *case.command],
        env=environment,
        capture_output=True,
        text=True,
    )
    took = time.perf_counter() - start
    if run.returncode == 2:
        said = run.stderr.strip().splitlines()[-1]
        click.echo(f"{case.name}: {said}", err=True)
        return "not compared", 0, "", took
    finding = json.loads(run.stdout)["finding"]
    click.echo(f"{case.name}: {finding or 'same'}", err=True)
    return ("same", 0, "", took) if finding is None else (finding["cause"], finding["step"], finding["quantity"], took)


@click.command()
@click.option("--seeds", default=0, help="Number of runs of sound scripts with other seeds, in place of all cases.")
@click.option("--jobs", default=1, help="Number of scripts at the same time.")
@click.option("--only", default="", help="Only cases whose name contains this.")
def main(seeds: int, jobs: int, only: str) -> None:
    cases = [case for case in (*SOUND, *([] if seeds else MISTAKES)) if only in case.name]
    runs = (
        list(itertools.islice(zip(itertools.cycle(cases), range(1, seeds + 1), strict=False), seeds)) if seeds else None
    )
    pairs = runs or [(case, None) for case in cases]
    with ThreadPoolExecutor(jobs) as pool:
        found = list(pool.map(lambda pair: found_in(*pair), pairs))
    rows: list[tuple[str, ...]] = []
    confusion: Counter[tuple[str, str]] = Counter()
    for (case, seed), (cause, step, quantity, took) in zip(pairs, found, strict=True):
        expected = case.cause or "same"
        is_right = cause == expected and (case.cause is None or (step, quantity) == (case.step, case.quantity))
        confusion[expected, cause] += 1
        name = case.name if seed is None else f"{case.name} (seed {seed})"
        rows.append(
            (
                name,
                expected,
                cause,
                f"{step} {quantity}" if quantity else "",
                f"{took:.0f} s",
                "" if is_right else "wrong",
            )
        )
    print(as_table(("script", "expected", "found", "first", "time", ""), rows))
    print(as_table(("expected", "found", "scripts"), [(*key, str(count)) for key, count in sorted(confusion.items())]))
    wrong = sum(bool(row[-1]) for row in rows)
    print(f"{len(rows)} scripts, {wrong} wrong, median {statistics.median(each[-1] for each in found):.0f} s.")


if __name__ == "__main__":
    main()
