"""The `plan` command."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from drivetrain.runtime.errors import ConfigurationError, nearest
from drivetrain.runtime.host import as_bytes
from drivetrain.runtime.terminal import visible

if TYPE_CHECKING:
    from drivetrain.planning.planner import Plan, Result

_VARIED = ("batch", "seq", "world")


@click.command(
    context_settings={
        "token_normalize_func": lambda token: token.replace("_", "-"),
        "allow_interspersed_args": True,
        "ignore_unknown_options": False,
        "help_option_names": ["-h", "--help"],
        "max_content_width": 110,
    },
)
@click.argument("source")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- ARGUMENTS]...")
@click.option(
    "--hardware", required=True, metavar="DEVICES", help="Such as 8xH100-80GB, 8xH100-80GBx4, this, FILE.yaml."
)
@click.option("--kwargs", metavar="JSON", default="{}", help="Arguments of the class, if SOURCE is a class.")
@click.option("--input", "inputs", multiple=True, metavar="[NAME=]SHAPE[:DTYPE]", help="Inputs, such as 8x128:int64.")
@click.option("--seq", type=int, metavar="N", help="Tokens of a sequence, for a config.json.")
@click.option("--batch", metavar="N,N", help="Rows of a micro-batch in each process. Several are compared.")
@click.option(
    "--strategies",
    metavar="NAME,NAME",
    help="single, ddp, fsdp, fsdp+offload, hsdp, tp, fsdp+tp, cp, pp, deepspeed:1 to 3.",
)
@click.option("--precision", default="bf16", show_default=True, metavar="NAME,NAME", help="Precisions to compare.")
@click.option("--recompute", type=click.Choice(["both", "yes", "no"]), default="both", help="Recompute activations.")
@click.option(
    "--optimizer", default="adamw", show_default=True, help="adamw, adam, adagrad, rmsprop, sgd, sgd_momentum."
)
@click.option("--tp-plan", metavar="JSON", help='Layers to split, such as {"blocks.*.up": "colwise"}.')
@click.option("--headroom", default="10%", show_default=True, metavar="SHARE", help="Memory that stays free.")
@click.option("--vary", multiple=True, metavar="NAME=N,N", help="What if: batch=1,2,4 seq=2048,4096 world=8,64.")
@click.option("--largest", type=click.Choice(["batch", "seq"]), help="Find the largest batch or sequence that fits.")
@click.option("--fewest-devices", is_flag=True, help="Find the smallest number of devices on which it fits.")
@click.option("--epoch", type=float, metavar="N", help="Tokens, or rows, of an epoch, for its time.")
@click.option("--price", type=float, metavar="X", help="Price of a device for an hour.")
@click.option("--mtbf", type=float, metavar="HOURS", help="Mean hours until a device fails, for the save interval.")
@click.option("--full", is_flag=True, help="Run all blocks of the model, in place of extrapolation from a few.")
@click.option("--real-init", is_flag=True, help="Build the model with values, if it cannot be built without.")
@click.option("--sample-inputs", metavar="FILE", help="A batch by torch.save, or `first`: run the step on its values.")
@click.option("--measure", is_flag=True, help="Train ten steps here, and correct predicted times by the difference.")
@click.option("--trust-remote-code", is_flag=True, help="Run code that the config.json names. Only for trusted files.")
@click.option(
    "--jobs", type=click.IntRange(min=1), metavar="N", help="Number of processes. Default: one for each core."
)
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
@click.option("--output", metavar="FILE", help="Write a page about the plan to this HTML file.")
def plan(source: str, arguments: Sequence[str], hardware: str, **options: Any) -> int:
    """Predict which strategies can train a model on given devices, and how fast, without using the devices.

    SOURCE is a script, the config.json of a transformers model or its folder, or package.module:Class. One optimizer
    step of each strategy runs on tensors without memory. Nothing is downloaded, and no weights are allocated.

    \b
    drivetrain plan llama/config.json --seq 8192 --hardware 8xH100-80GB
    drivetrain plan mypackage.models:GPT --input 8x1024:int64 --hardware 8xA100-40GBx2 --batch 1,2,4
    drivetrain plan train.py --hardware 2xL4-24GB -- --layers 12
    """  # noqa: D301
    sys.path.insert(0, "")  # as python -m does
    from drivetrain.inference.model_size import parse_arguments
    from drivetrain.planning.planner import plan as make

    say = sys.stderr.isatty() and not options["as_json"]
    made = make(
        source,
        hardware,
        arguments=arguments,
        kwargs=parse_arguments(options["kwargs"]),
        inputs=options["inputs"],
        seq=options["seq"],
        batch=_numbers("--batch", options["batch"]) if options["batch"] else None,
        strategies=options["strategies"].split(",") if options["strategies"] else _all(),
        precisions=options["precision"].split(","),
        recompute={"both": (False, True), "yes": (True,), "no": (False,)}[options["recompute"]],
        optimizer=options["optimizer"],
        tp_plan=parse_arguments(options["tp_plan"], "--tp-plan") if options["tp_plan"] else None,
        headroom=_share(options["headroom"]),
        full=options["full"],
        real_init=options["real_init"],
        measures=options["measure"],
        sample_inputs=options["sample_inputs"],
        trust_remote_code=options["trust_remote_code"],
        jobs=options["jobs"],
        progress=Bar() if say else None,
    )
    more = _what_if(made, options, Bar() if say else None)
    if options["as_json"]:
        found = {name: [result.to_dict() for result in results] for name, results in more.items()}
        click.echo(json.dumps({**made.to_dict(), "what_if": found}, indent=2))
    else:
        click.echo(visible(as_text(made, more, options)))
    if options["output"]:
        from drivetrain.planning.page import page

        Path(options["output"]).write_bytes(page(made, more))
    return 0 if made.best is not None else 1


class Bar:
    def __init__(self) -> None:
        self._bar: Any = None

    def __call__(self, done: int, count: int) -> None:
        from tqdm import tqdm

        if self._bar is None:  # the first estimate tells the total
            self._bar = tqdm(total=count, desc="candidates", leave=False)
        self._bar.total = count
        self._bar.update(done - self._bar.n)
        if done == count:
            self._bar.close()


def _all() -> Sequence[str]:
    from drivetrain.planning.candidates import DEFAULT

    return DEFAULT


def _numbers(option: str, text: str) -> list[int]:
    try:
        return [int(each) for each in text.split(",")]
    except ValueError:
        raise ConfigurationError(f"{option} {text!r} is not valid. Use numbers such as 1,2,4.") from None


def _share(text: str) -> float:
    try:
        return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        raise ConfigurationError(f"--headroom {text!r} is not valid. Use a share such as 10% or 0.1.") from None


def _what_if(made: Plan, options: dict[str, Any], progress: Any) -> dict[str, list[Result]]:
    from drivetrain.planning.planner import largest, vary

    found: dict[str, list[Result]] = {}
    if options["vary"]:
        given: dict[str, list[int]] = {}
        for text in " ".join(options["vary"]).split():
            name, _, numbers = text.partition("=")
            if name not in _VARIED:
                raise ConfigurationError(
                    f"--vary {text!r} must name {', '.join(_VARIED)}, as in batch=1,2,4.{nearest(name, _VARIED)}"
                )
            given[name] = _numbers("--vary", numbers)
        found["varied"] = vary(
            made, **given, headroom=_share(options["headroom"]), jobs=options["jobs"], progress=progress
        )
    for what in [options["largest"], "world" if options["fewest_devices"] else None]:
        if what is not None:
            result = largest(made, what, _share(options["headroom"]), options["jobs"])
            found["fewest devices" if what == "world" else f"largest {what}"] = [] if result is None else [result]
    return found


# Text


def as_text(made: Plan, more: dict[str, list[Result]], options: dict[str, Any]) -> str:
    from drivetrain.planning.planner import launch_line

    lines = [made.advice, *made.notes, "", *table(made.results, made.unit)]
    lines += [f"  {name}: {reason}." for name, reason in made.refused.items()]
    for name, results in more.items():
        lines += ["", name.capitalize(), *(table(results, made.unit) if results else ["  Nothing fits."])]
    best = made.best
    if best is not None:
        lines += ["", *_epoch(best, made, options), launch_line(best, made.workload), "", best.candidate.python()]
    return "\n".join(lines)


def _epoch(best: Result, made: Plan, options: dict[str, Any]) -> list[str]:
    from drivetrain.planning.planner import epoch_of

    count = options.get("epoch")
    if not count:
        return []
    found = epoch_of(best, count, options.get("price"), options.get("mtbf"))
    lines = [
        f"An epoch of {count:,.0f} {made.unit} takes {found.seconds / 3600:.1f} hours"
        + (f" and costs {found.price:,.2f}" if found.price is not None else "")
        + f". A checkpoint takes {found.checkpoint_seconds:.0f} s."
    ]
    if found.save_every is not None and found.failures is not None:
        lines.append(f"Expect {found.failures:.1f} failures. Save every {found.save_every / 60:.0f} minutes.")
    return [*lines, ""]


def table(results: Sequence[Result], unit: str) -> list[str]:
    rows = [["candidate", "devices", "memory", "of", "", f"{unit}/s", "step", "waits", "peak at"]]
    for result in results:
        first = [result.candidate.label, str(result.cluster.world_size)]
        if result.estimate is None:
            rows.append([*first, "", "", "failed", "", "", "", result.error])
            continue
        phase, module = result.estimate.place
        rows.append(
            [
                *first,
                as_bytes(result.estimate.peak),
                as_bytes(result.memory),
                "fits" if result.fits else "too large",
                f"{result.rate:,.0f}",
                f"{1000 * result.estimate.seconds:,.0f} ms",
                f"{result.estimate.waiting / result.estimate.seconds:.0%}",
                f"{phase} {module}".strip(),
            ]
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    return ["  " + "  ".join([*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[-1]]) for row in rows]
