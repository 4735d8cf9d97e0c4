"""How long it takes until work can begin: imports, the first Trainer, a script's first step, a fit of one batch.

    make bench
    python benchmarks/startup.py --rounds 20

Every contender is measured in turn, each right after the plain PyTorch code that it is compared with, each in a fresh
interpreter that does nothing else.
"""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

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

DATA = """
from torch.utils.data import DataLoader, TensorDataset
x = torch.randn(1024, 32)
data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=32, shuffle=True)
def make_model():
    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
"""

PLAIN_LOOP = """
def train():
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    for x, y in data:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        break
"""

FIT = """
import tempfile
from {package} import {task}, Trainer
class Regression({task}):
    def __init__(self):
        super().__init__()
        self.model = make_model()
    def training_step(self, batch, batch_idx):
        x, y = batch
        return torch.nn.functional.mse_loss(self.model(x), y)
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())
    def on_train_batch_end(self, *_):
        global seconds
        seconds = clock() - start
off = dict.fromkeys(("logger", "enable_checkpointing", "enable_model_summary", "enable_progress_bar"), False)
def train(**options):
    Trainer(accelerator="cpu", devices=1, max_steps=1, **options).fit(Regression(), data)
"""

WITH_DEFAULTS = """
with tempfile.TemporaryDirectory() as root:
    train(default_root_dir=root)
"""

# Of a hundred trainings the median, after one that does not count.
AGAIN = """
import statistics
def seconds_of(arguments):
    start = clock()
    train(**arguments)
    return clock() - start
seconds = statistics.median([seconds_of({arguments}) for _ in range(101)][1:])
"""


class Contender(NamedTuple):
    """Some code.

    Attributes:
        module: What must be installed.
        code: What runs. It may set `seconds` to what counts, in place of the time of all of it.
    """

    module: str
    code: str


class Part(NamedTuple):
    """What is compared with one piece of plain PyTorch code.

    Attributes:
        base: The name of the plain code.
        code: That code.
        contenders: What is compared with it, by name.
    """

    base: str
    code: str
    contenders: dict[str, Contender]


OURS, THEIRS = FIT.format(package="drivetrain", task="Task"), FIT.format(package="lightning", task="LightningModule")
PLAIN_SCRIPT = "import torch" + DATA + PLAIN_LOOP

PARTS = (
    Part(
        "`import torch`",
        "import torch",
        {
            "import drivetrain": Contender("drivetrain", "import torch, drivetrain"),
            "drivetrain, first Trainer": Contender(
                "drivetrain", "import torch" + FIRST_TRAINER.format(package="drivetrain", task="Task")
            ),
            "drivetrain, first Accelerator": Contender(
                "drivetrain", "from drivetrain import Accelerator; Accelerator(cpu=True)"
            ),
            "drivetrain, Accelerator and Trainer": Contender(
                "drivetrain", "import torch; from drivetrain import Accelerator, Trainer"
            ),
            "import accelerate": Contender("accelerate", "import accelerate"),
            "accelerate, first Accelerator": Contender(
                "accelerate", "from accelerate import Accelerator; Accelerator(cpu=True)"
            ),
            "import lightning": Contender("lightning", "import lightning"),
            "lightning, first Trainer": Contender(
                "lightning", "import torch" + FIRST_TRAINER.format(package="lightning", task="LightningModule")
            ),
        },
    ),
    Part(
        "a plain script's first step",
        PLAIN_SCRIPT + "train()",
        {
            "drivetrain, first step": Contender("drivetrain", "import torch" + DATA + OURS + "train(**off)"),
            "drivetrain, first step with all defaults": Contender(
                "drivetrain", "import torch" + DATA + OURS + WITH_DEFAULTS
            ),
            "lightning, first step": Contender("lightning", "import torch" + DATA + THEIRS + "train(**off)"),
        },
    ),
    Part(
        "a plain loop over one batch",
        PLAIN_SCRIPT + AGAIN.format(arguments="{}"),
        {
            "drivetrain, fit of one batch": Contender(
                "drivetrain", "import torch" + DATA + OURS + AGAIN.format(arguments="off")
            ),
            "lightning, fit of one batch": Contender(
                "lightning", "import torch" + DATA + THEIRS + AGAIN.format(arguments="off")
            ),
        },
    ),
)

CHILD = """
import json, sys, time
clock = {{"wall": time.perf_counter, "cpu": time.process_time}}[{clock!r}]
start, seconds = clock(), None
{code}
seconds = clock() - start if seconds is None else seconds
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
    figures = []
    for part in PARTS:
        chosen = dict(chosen_of(part, only))
        if not chosen:
            continue
        loaded = {name: run_fresh(each.code, clock)[1] for name, each in chosen.items()}
        run = {name: lambda code=each.code: run_fresh(code, clock)[0] for name, each in chosen.items()}
        results = compare(lambda code=part.code: run_fresh(code, clock)[0], run, rounds)  # type: ignore[misc]
        versions = {name: version_of(each.module) for name, each in chosen.items()}
        print(report(part.base, results, versions, loaded, clock) + "\n")
        figures += [
            {**each.as_dict(), "version": versions[each.name], "unit": "ms", "loaded": loaded[each.name]}
            for each in results
        ]
    if not figures:
        wanted = ", ".join(repr(part) for part in only)
        names = ", ".join(name for part in PARTS for name in part.contenders)
        raise click.ClickException(
            f"Nothing to measure: no contender that is installed has {wanted} in its name. Names: {names}."
        )
    print(f"The heavy packages: {', '.join(HEAVY)}.")
    if json_file is not None:
        json_file.write_text(json.dumps({"clock": clock, "results": figures}, indent=2))


def chosen_of(part: Part, only: tuple[str, ...]) -> Iterator[tuple[str, Contender]]:
    """The contenders of a part that were asked for and are installed."""
    for name, contender in part.contenders.items():
        if only and not any(text.lower() in name.lower() for text in only):
            continue
        if importlib.util.find_spec(contender.module) is None:
            print(f"{name}: left out, {contender.module} is not installed. `make bench` installs what is compared.")
            continue
        yield name, contender


def report(
    base: str, results: list[Comparison], versions: dict[str, str], loaded: dict[str, list[str]], clock: str
) -> str:
    bare = statistics.median(each for result in results for each in result.base)
    conditions = f"{base}: {bare:.1f} ms. {len(results[0].own)} rounds in fresh interpreters, {clock} time."
    columns = ["", "version", "added, ms:", "±:", "times as long:", "imported on the way"]
    rows = [
        [
            each.name,
            versions[each.name],
            f"{each.added:.1f}",
            f"{each.spread:.1f}",
            f"{each.ratio:.3f}",
            ", ".join(loaded[each.name]) or "none of the heavy ones",
        ]
        for each in results
    ]
    return f"{conditions[0].upper()}{conditions[1:]}\n\n{as_table(columns, rows)}"


if __name__ == "__main__":
    main()
