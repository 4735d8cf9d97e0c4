"""Verdicts of `drivetrain verify` on sound scripts and on scripts with a planted mistake.

    python benchmarks/verification.py
    python benchmarks/verification.py --seeds 20 --first-seed 300

The scripts are those of tests/verification. With --seeds, one sound script after the other is run, each with its own
seed. After the last script comes the first one again. With --write, the table of verdicts goes into docs/verify.md.
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
from dataclasses import asdict, dataclass
from pathlib import Path

import click
from tables import as_table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.pool import ROOT
from tests.verification.cases import MISTAKES, SOUND, Case


@dataclass
class Verdict:
    """What verify says about a script.

    Attributes:
        script: Name of the case, with its seed if it has one.
        cause: The cause that verify names, or `"same"` if there is none.
        step: The first step that differs.
        quantity: The quantity that differs first.
        seconds: Seconds that the comparison took.
        said: The cause in words.
    """

    script: str
    cause: str
    step: int
    quantity: str
    seconds: float
    said: str = ""

    def agrees_with(self, case: Case) -> bool:
        wanted = ("same", 0, "") if case.cause is None else (case.cause, case.step, case.quantity)
        return (self.cause, self.step, self.quantity) == wanted


def judged(case: Case, seed: int | None) -> Verdict:
    """Run verify on a script, with a seed in place of its own if one is given."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)} | ({} if seed is None else {"VERIFY_SEED": str(seed)})
    start = time.perf_counter()
    run = subprocess.run(
        [sys.executable, "-m", "drivetrain", "verify", "--json", *case.command],
        env=environment,
        capture_output=True,
        text=True,
    )
    took, name = round(time.perf_counter() - start, 1), _name(case, seed)
    if run.returncode == 2:
        return Verdict(name, "not compared", 0, "", took, run.stderr.strip().splitlines()[-1])
    finding = json.loads(run.stdout)["finding"]
    if finding is None:
        return Verdict(name, "same", 0, "", took)
    return Verdict(name, finding["cause"], finding["step"], finding["quantity"], took, finding["sentence"])


def _name(case: Case, seed: int | None) -> str:
    return case.name if seed is None else f"{case.name} (seed {seed})"


@click.command()
@click.option("--seeds", default=0, help="Number of runs of sound scripts with other seeds, in place of all cases.")
@click.option("--first-seed", default=1, help="Seed of the first run. Each later run has the next number.")
@click.option("--jobs", default=1, help="Number of scripts at the same time.")
@click.option("--only", default="", help="Only cases whose name contains this.")
@click.option("--results", type=Path, help="File for verdicts. A later call with it runs only what it does not hold.")
@click.option("--write", is_flag=True, help="Write the table of verdicts into docs/verify.md.")
def main(seeds: int, first_seed: int, jobs: int, only: str, results: Path | None, write: bool) -> None:
    cases = [case for case in (*SOUND, *([] if seeds else MISTAKES)) if only in case.name]
    seeded = zip(itertools.cycle(cases), range(first_seed, first_seed + seeds), strict=False)
    pairs = list(seeded) if seeds else [(case, None) for case in cases]
    lines = results.read_text().splitlines() if results is not None and results.exists() else []
    known = {each.script: each for each in (Verdict(**json.loads(line)) for line in lines)}

    def verdict(pair: tuple[Case, int | None]) -> Verdict:
        if (found := known.get(_name(*pair))) is None:
            found = judged(*pair)
            click.echo(f"{found.script}: {found.cause} {found.step} {found.quantity} {found.said}", err=True)
            if results is not None:
                with results.open("a") as file:
                    file.write(json.dumps(asdict(found)) + "\n")
        return found

    with ThreadPoolExecutor(jobs) as pool:
        found = list(pool.map(verdict, pairs))
    rows = [
        (
            each.script,
            case.cause or "same",
            each.cause,
            f"{each.step} {each.quantity}" if each.quantity else "",
            f"{each.seconds:.0f} s",
            "" if each.agrees_with(case) else "wrong",
        )
        for (case, _), each in zip(pairs, found, strict=True)
    ]
    print(as_table(("script", "expected", "found", "first", "time", ""), rows))
    confusion = Counter(row[1:3] for row in rows)
    table = as_table(
        ("expected", "found", "scripts:"), [(*key, str(count)) for key, count in sorted(confusion.items())]
    )
    wrong, seconds = sum(bool(row[-1]) for row in rows), [each.seconds for each in found]
    said = (
        f"{len(rows)} scripts, {wrong} wrong. Half of the comparisons took {statistics.median(seconds):.0f} s or less."
    )
    print(f"{table}\n\n{said}")
    if write:
        _insert(f"{table}\n\n{said}")


def _insert(text: str) -> None:
    begin, end = "<!-- verdicts -->", "<!-- end of verdicts -->"
    page = ROOT / "docs" / "verify.md"
    before, _, rest = page.read_text().partition(begin)
    page.write_text(f"{before}{begin}\n\n{text}\n\n{end}{rest.partition(end)[2]}")


if __name__ == "__main__":
    main()
