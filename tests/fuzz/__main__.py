"""`python -m tests.fuzz`: run random cases until the time is over; `make fuzz SEED=...` calls it.

Exits with 1 if a case differs from the plain loop or ends in an error that is not drivetrain's own. Each is printed
reduced to the options that matter, as a line that `--case` takes to run it again.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import itertools
import sys
import tempfile
import time

from tqdm import tqdm

from tests import pool
from tests.fuzz import cases
from tests.fuzz.cases import STRATEGIES, Case, draw, reduced
from tests.fuzz.runs import KINDS, Verdict, judge_all

TOGETHER = 20  # cases that share one start of the processes


def verdicts_of(chosen: list[Case], timeout: float = 240) -> list[Verdict]:
    """Run cases of one strategy; those that another strategy resumes go on in its processes."""
    staying, moving = [each for each in chosen if not each.then], [each for each in chosen if each.then]
    with tempfile.TemporaryDirectory() as root:
        verdicts = _run(staying, chosen[0].strategy, "whole", root, timeout)
        begun = _run(moving, chosen[0].strategy, "first", root, timeout)
        for strategy in dict.fromkeys(each.then for each in moving):
            theirs = [v for v in begun if v.case.then == strategy]
            saved = [v.case for v in theirs if v.kind == "saved"]
            verdicts += [v for v in theirs if v.kind != "saved"] + _run(saved, strategy, "second", root, timeout)
    return verdicts


def _run(chosen: list[Case], strategy: str, part: str, root: str, timeout: float) -> list[Verdict]:
    """Run a part of cases; each in processes of its own where one of them hangs or ends the processes."""
    if not chosen:
        return []
    world = STRATEGIES[strategy][0]
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # what the runs print
            return pool.run_in_processes(judge_all, world, args=(chosen, part, root), timeout=timeout)[0]
    except pool.ProcessesFailed as error:
        if len(chosen) == 1:
            return [Verdict(chosen[0], "error", str(error))]
    return [verdict for case in chosen for verdict in _run([case], strategy, part, root, timeout=60)]


def kept_failing(case: Case) -> Case:
    """Reduce a failing case."""
    return reduced(case, lambda simpler: verdicts_of([simpler], timeout=60)[0].fails)


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="number of the first case")
    parser.add_argument("--seconds", type=float, default=3600, help="how long new cases are begun")
    parser.add_argument("--count", type=int, default=sys.maxsize, help="how many cases at most")
    parser.add_argument(
        "--strategy", choices=STRATEGIES, action="append", help="only this one; may be repeated, for a larger share"
    )
    parser.add_argument("--case", help="run one case instead, such as \"Case(model='tied', strategy='ddp')\"")
    parser.add_argument("--keep", action="store_true", help="do not reduce the cases that fail")
    options = parser.parse_args()
    if options.case:
        verdict = verdicts_of([eval(options.case, vars(cases))])[0]
        print(f"{verdict.kind}: {verdict.case}\n{verdict.text}")
        return int(verdict.fails)
    begun = time.monotonic()
    verdicts = _all_verdicts(options.strategy or list(STRATEGIES), options.seed, options.count, options.seconds)
    failing = [verdict for verdict in verdicts if verdict.fails]
    refusals = collections.Counter(each.text.splitlines()[0][:200] for each in verdicts if each.kind == "refused")
    for text, count in refusals.most_common():
        print(f"refused {count} times: {text}")
    for verdict in failing:
        case = verdict.case if options.keep else kept_failing(verdict.case)
        print(f"{verdict.kind}{'' if options.keep else ', reduced'}: {case}\n{verdict.text}")
    print(_table(verdicts))
    minutes = (time.monotonic() - begun) / 60
    print(f"{len(verdicts)} cases from seed {options.seed} in {minutes:.1f} minutes: {len(failing)} fail")
    return int(bool(failing))


def _all_verdicts(strategies: list[str], seed: int, count: int, seconds: float) -> list[Verdict]:
    """Run so many cases of the strategies in turn, or as many as there is time for."""
    verdicts: list[Verdict] = []
    end, failing = time.monotonic() + seconds, 0
    with tqdm(total=None if count == sys.maxsize else count, unit=" cases") as bar:
        for strategy in itertools.cycle(strategies):
            size = min(TOGETHER, count - len(verdicts))
            if not size or time.monotonic() >= end:
                break
            first = seed + sum(each.case.strategy == strategy for each in verdicts)
            for verdict in verdicts_of([draw(first + n, strategy) for n in range(size)]):
                verdicts.append(verdict)
                if verdict.fails:
                    failing += 1
                    bar.write(f"{verdict.kind}: {verdict.case}\n    {verdict.text.strip().splitlines()[-1]}")
            bar.set_postfix_str(f"{failing} fail, {max(0, end - time.monotonic()):.0f} s left", refresh=False)
            bar.update(size)
    return verdicts


def _table(verdicts: list[Verdict]) -> str:
    """Return a line for each strategy: how many cases came to which end."""
    kinds = [kind for kind in KINDS if kind != "saved"]
    lines = ["".join(f"{title:>11}" for title in ("strategy", "cases", *kinds))]
    for strategy in dict.fromkeys(each.case.strategy for each in verdicts):
        theirs = [each.kind for each in verdicts if each.case.strategy == strategy]
        lines.append("".join(f"{each:>11}" for each in (strategy, len(theirs), *map(theirs.count, kinds))))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
