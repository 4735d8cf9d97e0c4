"""How long it takes until work can begin: imports and the first Trainer, each in a fresh interpreter.

    make bench
    python benchmarks/startup.py --rounds 20

Every contender is measured in turn, each right after an `import torch` of its own, in processes that do nothing else.
"""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import click
from tables import as_table
from timing import Comparison, compare, version_of

HEAVY = ("torchvision", "transformers", "tensorboard", "torchmetrics", "matplotlib", "pandas", "sklearn", "sympy")

FIRST_TRAINER = """
from {package} import {task}, Trainer
class First({task}):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
First()
Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
"""

# name -> (what must be installed, what runs)
CONTENDERS = {
    "import drivetrain": ("drivetrain", "import torch, drivetrain"),
    "drivetrain, first Trainer": (
        "drivetrain",
        "import torch" + FIRST_TRAINER.format(package="drivetrain", task="Task"),
    ),
    "drivetrain, first Accelerator": ("drivetrain", "from drivetrain import Accelerator; Accelerator(cpu=True)"),
    "drivetrain, Accelerator and Trainer": ("drivetrain", "import torch; from drivetrain import Accelerator, Trainer"),
    "import accelerate": ("accelerate", "import accelerate"),
    "accelerate, first Accelerator": ("accelerate", "from accelerate import Accelerator; Accelerator(cpu=True)"),
    "import lightning": ("lightning", "import lightning"),
    "lightning, first Trainer": (
        "lightning",
        "import torch" + FIRST_TRAINER.format(package="lightning", task="LightningModule"),
    ),
}

CHILD = """
import json, sys, time
clock = {{"wall": time.perf_counter, "cpu": time.process_time}}[{clock!r}]
start = clock()
{code}
seconds = clock() - start
loaded = [name for name in {heavy!r} if name in sys.modules]
print()
print(json.dumps({{"seconds": seconds, "loaded": loaded}}))
"""


def run_fresh(code: str, clock: str) -> tuple[float, list[str]]:
    """Milliseconds that some code takes in a fresh interpreter, and which of the heavy packages it imported."""
    child = CHILD.format(code=code, clock=clock, heavy=HEAVY)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", child],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    if done.returncode != 0:
        raise click.ClickException(f"this failed:\n{code}\n{done.stderr}")
    answer = json.loads(done.stdout.splitlines()[-1])
    return answer["seconds"] * 1e3, answer["loaded"]


@click.command()
@click.option("--rounds", default=10, show_default=True, help="How often each contender is measured.")
@click.option(
    "--clock",
    type=click.Choice(["wall", "cpu"]),
    default="wall",
    show_default=True,
    help="Time gone by, or time computed: the same on a quiet machine, steadier on a busy one.",
)
@click.option("--only", multiple=True, help="A part of a contender's name; can be given several times.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the figures there too.")
def main(rounds: int, clock: str, only: tuple[str, ...], json_file: Path | None) -> None:
    chosen, versions, loaded = {}, {}, {}
    for name, (module, code) in CONTENDERS.items():
        if only and not any(part.lower() in name.lower() for part in only):
            continue
        if importlib.util.find_spec(module) is None:
            print(f"{name}: left out, {module} is not installed. `make bench` installs what is compared.")
            continue
        versions[name] = version_of(module)
        loaded[name] = run_fresh(code, clock)[1]
        chosen[name] = lambda code=code: run_fresh(code, clock)[0]
    if not chosen:
        wanted = ", ".join(repr(part) for part in only)
        names = ", ".join(CONTENDERS)
        raise click.ClickException(
            f"Nothing to measure: no contender that is installed has {wanted} in its name. Names: {names}."
        )
    results = compare(lambda: run_fresh("import torch", clock)[0], chosen, rounds)
    print(report(results, versions, loaded, clock))
    if json_file is not None:
        figures = [
            {**each.as_dict(), "version": versions[each.name], "unit": "ms", "loaded": loaded[each.name]}
            for each in results
        ]
        json_file.write_text(json.dumps({"clock": clock, "results": figures}, indent=2))


def report(results: list[Comparison], versions: dict[str, str], loaded: dict[str, list[str]], clock: str) -> str:
    bare = statistics.median(each for result in results for each in result.base)
    conditions = f"`import torch`: {bare:.0f} ms. {len(results[0].own)} rounds in fresh interpreters, {clock} time."
    columns = ["", "version", "added to `import torch`, ms:", "±:", "times `import torch`:", "imported on the way"]
    rows = [
        [
            each.name,
            versions[each.name],
            f"{each.added:.0f}",
            f"{each.spread:.0f}",
            f"{each.ratio:.2f}",
            ", ".join(loaded[each.name]) or "none of the heavy ones",
        ]
        for each in results
    ]
    return f"{conditions}\n\n{as_table(columns, rows)}\n\nThe heavy ones: {', '.join(HEAVY)}."


if __name__ == "__main__":
    main()
