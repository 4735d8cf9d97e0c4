"""Validation and prediction beside a bare loop under `torch.inference_mode`.

    python benchmarks/evaluation.py
    python benchmarks/evaluation.py --model tiny --rounds 20

One process and one thread on the CPU. Every contender evaluates the same model on the same batches, in turn with the
bare loop, some batches at a time; see benchmarks/README.md. The bare loop adds up the loss; with a metric, it updates
torchmetrics' accuracy itself, and for predictions it keeps the outputs.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
import torch.nn.functional as F
from overhead import Batches
from tables import as_table
from timing import Clock, Comparison, compare_pairs, measure_beside, stay_on_one_core, version_of
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

CLASSES = 10
SIZES = {"tiny": (32, 32, 4), "mlp": (784, 512, 128)}


class Model(nn.Module):
    """A perceptron, which ticks the clock at each forward."""

    size = SIZES["mlp"]

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        features, width, _ = self.size
        self.layers = nn.Sequential(
            nn.Linear(features, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, CLASSES)
        )
        self.tick = clock.tick

    def forward(self, x: Tensor) -> Tensor:
        self.tick()
        return self.layers(x)


def accuracy() -> MulticlassAccuracy:
    return MulticlassAccuracy(CLASSES, average="micro")


# The bare loops: what a good engineer writes.


def bare_loss(clock: Clock, batches: Any) -> None:
    model = Model(clock).eval()
    total = torch.zeros(())
    with torch.inference_mode():
        for x, y in batches:
            total += F.cross_entropy(model(x), y) * len(y)


def bare_metric(clock: Clock, batches: Any) -> None:
    model, metric = Model(clock).eval(), accuracy()
    total = torch.zeros(())
    with torch.inference_mode():
        for x, y in batches:
            outputs = model(x)
            total += F.cross_entropy(outputs, y) * len(y)
            metric.update(outputs, y)
        metric.compute()


def bare_outputs(clock: Clock, batches: Any) -> None:
    model = Model(clock).eval()
    with torch.inference_mode():
        outputs = [model(x) for x, _ in batches]
    assert outputs


def evaluated_by(framework: str, verb: str, with_metric: bool = False) -> Callable[[Clock, Any], None]:
    """What evaluates with the Trainer of a framework."""

    def run(clock: Clock, batches: Any) -> None:
        package = importlib.import_module(framework)
        kind: Any = package.Task if framework == "drivetrain" else package.LightningModule

        class Evaluated(kind):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.model = Model(clock)
                self.accuracy = accuracy() if with_metric else None

            def validation_step(self, batch: Any, batch_idx: int) -> None:
                x, y = batch
                outputs = self.model(x)
                self.log("loss", F.cross_entropy(outputs, y))
                if self.accuracy is not None:
                    self.accuracy.update(outputs, y)
                    self.log("accuracy", self.accuracy)

            def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
                return self.model(batch[0])

        off = dict.fromkeys(("logger", "enable_checkpointing", "enable_model_summary", "enable_progress_bar"), False)
        trainer = package.Trainer(accelerator="cpu", **off, **({} if framework == "drivetrain" else {"devices": 1}))
        getattr(trainer, verb)(Evaluated(), batches)

    return run


# what is done -> the bare loop, and what does it with a framework's Trainer
WORK: dict[str, tuple[Callable[[Clock, Any], None], Callable[[str], Callable[[Clock, Any], None]]]] = {
    "validate, a loss": (bare_loss, lambda name: evaluated_by(name, "validate")),
    "validate, a loss and a metric": (bare_metric, lambda name: evaluated_by(name, "validate", with_metric=True)),
    "predict": (bare_outputs, lambda name: evaluated_by(name, "predict")),
}
FRAMEWORKS = {"drivetrain": "drivetrain", "lightning": "lightning"}


@click.command()
@click.option("--model", type=click.Choice(list(SIZES)), default="mlp", show_default=True)
@click.option("--rounds", default=10, show_default=True, help="How often each contender is measured.")
@click.option("--steps", default=300, show_default=True, help="Timed batches of each measurement.")
@click.option("--turn", default=50, show_default=True, help="Batches that a contender and the bare loop run in turn.")
@click.option("--clock", type=click.Choice(["wall", "cpu"]), default="wall", show_default=True)
@click.option("--only", multiple=True, help="A part of a contender's name; can be given several times.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the figures there too.")
def main(
    model: str, rounds: int, steps: int, turn: int, clock: str, only: tuple[str, ...], json_file: Path | None
) -> None:
    torch.set_num_threads(1)
    stay_on_one_core()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    now = {"wall": time.perf_counter, "cpu": time.process_time}[clock]
    Model.size = SIZES[model]
    features, _, rows = Model.size
    count = Clock.steps_of(20, steps, turn)
    generator = torch.Generator().manual_seed(0)
    batches = Batches(
        (torch.randn(rows, features, generator=generator), torch.randint(CLASSES, (rows,), generator=generator))
        for _ in range(count)
    )
    chosen = {}
    for framework, module in FRAMEWORKS.items():
        for work, (bare, contender) in WORK.items():
            name = f"{framework}: {work}"
            if importlib.util.find_spec(module) and (not only or any(part in name for part in only)):
                chosen[name] = measure_beside(bare, contender(framework), batches, (20, steps, turn), now)
    results: list[Comparison] = compare_pairs(chosen, rounds)
    rows_shown = [
        [
            each.name,
            f"{statistics.median(each.base):.0f}",
            f"{each.added:.1f}",
            f"{each.spread:.1f}",
            f"{each.ratio:.3f}",
        ]
        for each in results
    ]
    print(
        f"{model}, batches of {rows}, {clock} time, {rounds} rounds of {steps} batches. torch {torch.__version__}, "
        f"drivetrain {version_of('drivetrain')}.\n"
    )
    print(as_table(["", "bare, µs:", "added, µs:", "±:", "times the bare loop:"], rows_shown))
    if json_file is not None:
        json_file.write_text(json.dumps([each.as_dict() for each in results], indent=2))


if __name__ == "__main__":
    main()
