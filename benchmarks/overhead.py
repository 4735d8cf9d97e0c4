"""What frameworks add to an optimizer step: a model so small that nothing else is left to measure.

    make bench
    python benchmarks/overhead.py --rounds 40 --json overhead.json

Linear(32, 2), batches of 4, SGD, one thread, on the CPU. Every contender trains the same model on the same batches for
the same number of steps, in turn with the bare loop, a hundred steps at a time, so that what slows the machine down
slows both; the time is taken between two forwards, so what comes before and after the loop does not count. See
benchmarks/README.md.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import click
import torch
import torch.nn.functional as F
from tables import as_table
from timing import (
    Clock,
    Comparison,
    compare_pairs,
    measure_beside,
    on_terminal,
    stay_on_one_core,
    version_of,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

FEATURES, CLASSES, BATCH = 32, 2, 4
VALUES = [f"value_{number}" for number in range(5)]
NOTHING: dict[str, Any] = {"logger": False, "enable_checkpointing": False}


class TinyModel(nn.Module):
    """The model of every contender. It tells the clock of each forward."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)
        self.tick = clock.tick

    def forward(self, x: Tensor) -> Tensor:
        self.tick()
        return self.layer(x)


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.01)


class Batches:
    """Ready batches. Not a plain list, which Lightning takes for a list of loaders."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self.batches = list(batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


# Contenders: each trains on `batches`, an iterable of as many (x, y) as the clock wants, once.


def bare_loop(clock: Clock, batches: Any) -> None:
    model = TinyModel(clock)
    optimizer = sgd(model)
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()


def drivetrain_trainer(clock: Clock, batches: Any, log_and_bar: bool = False, **options: Any) -> None:
    from drivetrain import Task, Trainer

    class TinyTask(Task):
        def __init__(self) -> None:
            super().__init__()
            self.model = TinyModel(clock)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            loss = F.mse_loss(self.model(x), y)
            if log_and_bar:
                self.log("loss", loss, prog_bar=True)
            if options:
                for name in VALUES:
                    self.log(name, loss)
            return loss

        def configure_optimizers(self) -> Any:
            return sgd(self.model)

    Trainer(
        accelerator="cpu",
        max_epochs=1,
        enable_model_summary=False,
        enable_progress_bar=log_and_bar,
        **(options or NOTHING),
    ).fit(TinyTask(), batches)


def drivetrain_accelerator(clock: Clock, batches: Any) -> None:
    from drivetrain import Accelerator

    accelerator = Accelerator(cpu=True)
    _prepared_loop(accelerator, clock, batches)


def _prepared_loop(accelerator: Any, clock: Clock, batches: Any) -> None:
    model = TinyModel(clock)
    model, optimizer = accelerator.prepare(model, sgd(model))
    if isinstance(batches, DataLoader):
        batches = accelerator.prepare(batches)
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()


def accelerate(clock: Clock, batches: Any) -> None:
    from accelerate import Accelerator

    _prepared_loop(Accelerator(cpu=True), clock, batches)


def ignite(clock: Clock, batches: Any) -> None:
    from ignite.engine import Engine

    model = TinyModel(clock)
    optimizer = sgd(model)

    def step(engine: Engine, batch: Any) -> Tensor:
        x, y = batch
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    Engine(step).run(batches, max_epochs=1)


def lightning_fabric(clock: Clock, batches: Any) -> None:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    model = TinyModel(clock)
    model, optimizer = fabric.setup(model, sgd(model))
    if isinstance(batches, DataLoader):
        batches = fabric.setup_dataloaders(batches)
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        fabric.backward(loss)
        optimizer.step()


def lightning_trainer(clock: Clock, batches: Any, log_and_bar: bool = False, **options: Any) -> None:
    import lightning

    class TinyModule(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = TinyModel(clock)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            loss = F.mse_loss(self.model(x), y)
            if log_and_bar:
                self.log("loss", loss, prog_bar=True)
            if options:
                for name in VALUES:
                    self.log(name, loss)
            return loss

        def configure_optimizers(self) -> Any:
            return sgd(self.model)

    lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        enable_model_summary=False,
        enable_progress_bar=log_and_bar,
        **(options or NOTHING),
    ).fit(TinyModule(), batches)


def transformers_trainer(clock: Clock, batches: Any) -> None:
    from transformers import Trainer, TrainingArguments

    class LossModel(TinyModel):
        def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
            return {"loss": F.mse_loss(super().forward(x), y)}

    class ListTrainer(Trainer):
        def get_train_dataloader(self) -> Any:
            if isinstance(batches, DataLoader):
                return self.accelerator.prepare(batches)
            return Batches({"x": x, "y": y} for x, y in batches)

    if isinstance(batches, DataLoader):
        batches = DataLoader(batches.dataset, batches.batch_size, collate_fn=_collate_dict)
    model = LossModel(clock)
    optimizer = sgd(model)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            num_train_epochs=1,
            max_steps=clock.total,
            max_grad_norm=0.0,
            use_cpu=True,
            report_to="none",
            logging_strategy="no",
            save_strategy="no",
            disable_tqdm=True,
        )
        constant = torch.optim.lr_scheduler.LambdaLR(optimizer, _one)
        ListTrainer(
            model, arguments, train_dataset=[{}] * (clock.total * BATCH), optimizers=(optimizer, constant)
        ).train()


def _collate_dict(samples: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    return {"x": torch.stack([x for x, _ in samples]), "y": torch.stack([y for _, y in samples])}


def _one(step: int) -> float:
    return 1.0


def with_log_and_bar(contender: Callable[..., None]) -> Callable[[Clock, Any], None]:
    def run(clock: Clock, batches: Any) -> None:
        with on_terminal():
            contender(clock, batches, log_and_bar=True)

    return run


def drivetrain_callbacks(clock: Clock, batches: Any) -> None:
    import drivetrain

    with tempfile.TemporaryDirectory() as root:
        logger = drivetrain.CSVLogger(root)
        drivetrain_trainer(
            clock, batches, default_root_dir=root, logger=logger, callbacks=ten_callbacks(drivetrain, root)
        )


def lightning_callbacks(clock: Clock, batches: Any) -> None:
    from lightning.pytorch import callbacks, loggers

    with tempfile.TemporaryDirectory() as root:
        logger = loggers.CSVLogger(root)
        lightning_trainer(
            clock, batches, default_root_dir=root, logger=logger, callbacks=ten_callbacks(callbacks, root)
        )


def ten_callbacks(kinds: Any, root: str) -> list[Any]:
    """Ten callbacks of a framework: four of its own, and six that do next to nothing after each batch."""

    class Counts(kinds.Callback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.batches = 0

        def on_train_batch_end(self, trainer: Any, task: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.batches += 1

    own = [
        kinds.EarlyStopping("value_0", check_on_train_epoch_end=True),
        kinds.LearningRateMonitor("step"),
        kinds.ModelCheckpoint(root, monitor="value_1"),
        kinds.Timer(),
    ]
    return [*own, *(Counts() for _ in range(6))]


# name -> (what must be installed, what runs)
CONTENDERS: dict[str, tuple[str, Callable[[Clock, Any], None]]] = {
    "drivetrain Trainer": ("drivetrain", drivetrain_trainer),
    "drivetrain Trainer, log and bar": ("drivetrain", with_log_and_bar(drivetrain_trainer)),
    "drivetrain Trainer, ten callbacks, five values": ("drivetrain", drivetrain_callbacks),
    "drivetrain Accelerator": ("drivetrain", drivetrain_accelerator),
    "Ignite": ("ignite", ignite),
    "Lightning Fabric": ("lightning", lightning_fabric),
    "Accelerate": ("accelerate", accelerate),
    "Lightning Trainer": ("lightning", lightning_trainer),
    "Lightning Trainer, log and bar": ("lightning", with_log_and_bar(lightning_trainer)),
    "Lightning Trainer, ten callbacks, five values": ("lightning", lightning_callbacks),
    "Transformers Trainer": ("transformers", transformers_trainer),
}
DISTRIBUTIONS = {"ignite": "pytorch-ignite"}


def make_data(kind: str, steps: int) -> Any:
    """A list of ready batches, or a DataLoader over the same samples."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(steps * BATCH, size, generator=generator) for size in (FEATURES, CLASSES))
    if kind == "loader":
        return DataLoader(TensorDataset(x, y), BATCH)
    return Batches(zip(x.split(BATCH), y.split(BATCH), strict=True))


def report(results: list[Comparison], versions: dict[str, str], data: str, clock: str, steps: int) -> str:
    bare = statistics.median(each for result in results for each in result.base)
    conditions = (
        f"Bare loop: {bare:.0f} µs a step. {len(results[0].own)} rounds of {steps} steps, batches from a {data}, "
        f"{clock} time. torch {torch.__version__}, Python {platform.python_version()}."
    )
    columns = ["", "version", "added to a step, µs:", "±:", "times the bare loop:"]
    rows = [
        [each.name, versions[each.name], f"{each.added:.1f}", f"{each.spread:.1f}", f"{each.ratio:.2f}"]
        for each in results
    ]
    return f"{conditions}\n\n{as_table(columns, rows)}"


@click.command()
@click.option("--rounds", default=20, show_default=True, help="How often each contender is measured.")
@click.option("--steps", default=500, show_default=True, help="Timed steps of each measurement.")
@click.option("--warmup", default=50, show_default=True, help="Steps before them.")
@click.option("--turn", default=100, show_default=True, help="Steps that a contender and the bare loop run in turn.")
@click.option("--data", type=click.Choice(["list", "loader"]), default="list", show_default=True)
@click.option(
    "--clock",
    type=click.Choice(["wall", "cpu"]),
    default="wall",
    show_default=True,
    help="Time gone by, or time computed: the same on a quiet machine, steadier on a busy one.",
)
@click.option("--only", multiple=True, help="A part of a contender's name; can be given several times.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the figures there too.")
def main(
    rounds: int,
    steps: int,
    warmup: int,
    turn: int,
    data: str,
    clock: str,
    only: tuple[str, ...],
    json_file: Path | None,
) -> None:
    torch.set_num_threads(1)
    stay_on_one_core()
    now = {"wall": time.perf_counter, "cpu": time.process_time}[clock]
    for name in ("lightning", "lightning.pytorch", "lightning.fabric", "accelerate", "transformers", "ignite"):
        logging.getLogger(name).setLevel(logging.ERROR)
    batches = make_data(data, Clock.steps_of(warmup, steps, turn))
    chosen, versions = {}, {}
    for name, (module, run) in CONTENDERS.items():
        if only and not any(part.lower() in name.lower() for part in only):
            continue
        if importlib.util.find_spec(module) is None:
            print(f"{name}: left out, {module} is not installed. `make bench` installs what is compared.")
            continue
        versions[name] = version_of(DISTRIBUTIONS.get(module, module))
        chosen[name] = measure_beside(bare_loop, run, batches, (warmup, steps, turn), now)
    results = compare_pairs(chosen, rounds)
    print(report(results, versions, data, clock, steps))
    if json_file is not None:
        figures = [{**each.as_dict(), "version": versions[each.name], "unit": "µs per step"} for each in results]
        conditions = {"torch": torch.__version__, "data": data, "clock": clock}
        json_file.write_text(json.dumps({**conditions, "results": figures}, indent=2))


if __name__ == "__main__":
    main()
