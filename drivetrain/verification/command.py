"""The `verify` command."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.terminal import visible

if TYPE_CHECKING:
    from drivetrain.verification.run import ComparisonError, VerificationResult


@click.command(
    context_settings={
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,
        "help_option_names": ["-h", "--help"],
    },
    options_metavar="[OPTIONS] [FLAGS]",
)
@click.option("--steps", default=8, show_default=True, metavar="N", help="Number of optimizer steps to compare.")
@click.option("--timeout", default=600.0, show_default=True, metavar="SECONDS", help="Time after which a run is ended.")
@click.option("--world-sizes", metavar="N,N", help="Compare runs on each of these numbers of processes.")
@click.option(
    "--strategies",
    metavar="NAME,NAME",
    help="Strategies in place of the script's: ddp, fsdp, pp2, deepspeed:3, fsdp+tp2.",
)
@click.option("--precision", metavar="NAME", help="Precision in place of the script's, such as bf16.")
@click.option("--set", "options", multiple=True, metavar="NAME=VALUE", help="Set an option of the script's TrainerCLI.")
@click.option("--uneven", is_flag=True, help="Cut epochs so that their last batch is not full.")
@click.option("--resume", is_flag=True, help="Compare a run that is stopped and resumed with one that is not.")
@click.option("--against", metavar="FLAGS", help="Compare with a run with these flags, in place of one process.")
@click.option("--record", metavar="FOLDER", help="Record the run in this folder, for --compare.")
@click.option("--compare", metavar="FOLDER", help="Compare with a recorded run, in place of one process.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.option("--output", metavar="FILE", help="Write a page about the comparison to this HTML file.")
@click.argument("given", nargs=-1, required=True, type=click.UNPROCESSED, metavar="SCRIPT [ARGS]...")
def verify(
    given: tuple[str, ...],
    world_sizes: str | None,
    strategies: str | None,
    against: str | None,
    as_json: bool,
    output: str | None,
    **options: Any,
) -> int:
    """Check that SCRIPT trains on several processes as it does on one, and name the cause of a difference.

    The script runs unchanged for a few steps, on the processes that FLAGS of `drivetrain launch` ask for (two by
    default) and on one. OPTIONS go first, then FLAGS, then SCRIPT.

    Exit codes: 0 the same, 1 different, 2 could not be compared.

    \b
    drivetrain verify train.py --lr 0.1
    drivetrain verify --steps 4 --num_processes 2 --cpu --use_fsdp train.py
    drivetrain verify --as accelerate train.py
    drivetrain verify --world-sizes 1,2,4 --strategies ddp,fsdp train.py
    """  # noqa: D301
    from drivetrain.verification.run import ComparisonError, ScriptFailed, launch_options, verify_all
    from drivetrain.verification.run import verify as run

    parsed = launch_options(given)
    arguments, script = list(parsed["args"]), str(parsed["script"])
    options["flags"] = given[: len(given) - len(arguments) - 1]
    options["progress"] = lambda line: click.echo(f"{line} ...", err=True)
    if world_sizes or "," in (strategies or ""):
        single = {"against": against, **{name: options.pop(name) for name in ("record", "compare", "resume")}}
        if wrong := next((name for name, value in single.items() if value), None):
            raise ConfigurationError(f"--{wrong} compares one run. Leave out --world-sizes and further --strategies.")
        sizes = _numbers(world_sizes) if world_sizes else (2,)
        names = strategies.split(",") if strategies else (None,)
        return _tell_all(verify_all(script, arguments, world_sizes=sizes, strategies=names, **options), as_json)
    try:
        others = None if against is None else shlex.split(against)
        result = run(script, arguments, strategy=strategies, against=others, **options)
    except ComparisonError as error:
        trace = error.traceback if isinstance(error, ScriptFailed) else ""
        click.echo(visible(f"{trace}\n\nCould not be compared. {error}".lstrip()), err=True)
        return 2
    click.echo(json.dumps(result.to_dict(), indent=2) if as_json else visible(str(result)))
    if output is not None:
        from drivetrain.verification.page import page

        Path(output).write_bytes(page(result, script))
    return 0 if result.is_same else 1


def _numbers(text: str) -> list[int]:
    try:
        return [int(each) for each in text.split(",")]
    except ValueError:
        raise ConfigurationError(f"--world-sizes {text!r} is not valid. Use numbers such as 1,2,4.") from None


def _tell_all(results: Mapping[tuple[str, int], VerificationResult | ComparisonError], as_json: bool) -> int:
    codes, rows = [], []
    for (strategy, count), result in results.items():
        if isinstance(result, Exception):
            codes.append(2)
            said, row = f"could not be compared: {result}", {"verdict": "not compared", "reason": str(result)}
        else:
            codes.append(0 if result.is_same else 1)
            said, row = result.verdict, result.to_dict()
            if result.finding is not None:
                said = f"{said} from step {result.finding.step} on: {result.finding.sentence}"
        rows.append({"strategy": strategy, "processes": count, **row})
        if not as_json:
            click.echo(visible(f"{strategy:<16} {count:>3} processes  {said}"))
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    return 1 if 1 in codes else max(codes, default=0)
