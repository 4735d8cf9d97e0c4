"""The most memory that a run takes at any moment, beside that of the bare loop.

    python benchmarks/peak.py
    python benchmarks/peak.py --only drivetrain --width 2048 --json peak.json

Counted are all tensors that torch allocates during the run, by its own events, so that the figures are the same in each
run. Beside them: what a process takes in all, in a fresh interpreter. See benchmarks/README.md.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from tables import as_table
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, TensorDataset

ALLOWED = 1.01  # times the bare loop's
ALLOWED_OWN = 20.0  # MB of a process
BARE = "bare loop"
STEPS = 6


def make_model(width: int, layers: int = 8) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(each for _ in range(layers) for each in (nn.Linear(width, width), nn.Tanh())))


def make_loader(width: int, rows: int, batches: int = STEPS) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.zeros(batches * rows, width)), rows)


def bare(width: int, rows: int) -> Callable[[], None]:
    model = make_model(width)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    loader = make_loader(width, rows)

    def run() -> None:
        for (batch,) in loader:
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()

    return run


def with_trainer(width: int, rows: int, validates: bool = False, **options: Any) -> Callable[[], None]:
    from drivetrain import Task, Trainer

    class Peak(Task):
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model(width)

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            return self.model(batch[0]).square().mean()

        def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
            self.log("loss", self.model(batch[0]).square().mean())

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), fused=True)

    trainer = Trainer(accelerator="cpu", devices=1, max_epochs=1, barebones=True, **options)
    task, loader = Peak(), make_loader(width, rows)
    validation = make_loader(width, rows, 2) if validates else None
    return lambda: trainer.fit(task, loader, validation)


def with_accelerator(width: int, rows: int) -> Callable[[], None]:
    from drivetrain import Accelerator

    accelerator, plain = Accelerator(cpu=True), make_model(width)
    model, optimizer, loader = accelerator.prepare(
        plain, torch.optim.AdamW(plain.parameters(), fused=True), make_loader(width, rows)
    )

    def run() -> None:
        for (batch,) in loader:
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            accelerator.backward(loss)
            optimizer.step()

    return run


CONTENDERS: dict[str, Callable[[int, int], Callable[[], None]]] = {
    BARE: bare,
    "drivetrain Trainer": with_trainer,
    "drivetrain Trainer, validation in each epoch": lambda *size: with_trainer(*size, validates=True),
    "drivetrain Trainer, validation every 3 steps": lambda *size: with_trainer(
        *size, validates=True, val_check_interval=3
    ),
    "drivetrain Accelerator": with_accelerator,
}


def peak_of(run: Callable[[], None]) -> float:
    """The most MB of tensors that are there at once beyond those from before, while something runs."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    now = most = 0
    for event in profiled.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most / 1e6


def measure(name: str, width: int, rows: int) -> float:
    """The peak of one contender, in MB; its model and its data are there before."""
    torch.set_num_threads(1)
    return peak_of(CONTENDERS[name](width, rows))


def measure_process(name: str) -> float:
    """MB of anonymous memory that a fresh process takes in all, once it has run a contender with a tiny model."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, "--process", name],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    if done.returncode != 0:
        raise click.ClickException(f"{name} failed:\n{done.stderr}")
    return float(done.stdout.splitlines()[-1])


def anonymous_memory() -> float:
    """MB of this process's memory that no file backs, which Linux shows."""
    lines = Path("/proc/self/status").read_text().splitlines()
    [found] = [line for line in lines if line.startswith("RssAnon:")]
    return int(found.split()[1]) * 1024 / 1e6


@click.command()
@click.option("--only", multiple=True, help="A part of a contender's name; can be given several times.")
@click.option("--width", default=1024, show_default=True, help="Of the layers: gradients grow with its square.")
@click.option("--rows", default=128, show_default=True, help="Of a batch: activations grow with it.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the figures there too.")
@click.option("--process", "alone", hidden=True, help="Run this one here, and print what the process takes.")
def main(only: tuple[str, ...], width: int, rows: int, json_file: Path | None, alone: str | None) -> None:
    if alone is not None:
        torch.set_num_threads(1)
        CONTENDERS[alone](8, 2)()
        print(f"\n{anonymous_memory()}")
        return
    chosen = [name for name in CONTENDERS if not only or any(part.lower() in name.lower() for part in only)]
    shows_processes = Path("/proc/self/status").exists()
    results = []
    for name in dict.fromkeys([BARE, *chosen]):
        result: dict[str, Any] = {"name": name, "peak": measure(name, width, rows)}
        if shows_processes:
            result["process"] = measure_process(name)
        first = results[0] if results else result
        result["ratio"] = result["peak"] / first["peak"]
        result["own"] = result["process"] - first["process"] if shows_processes else None
        results.append(result)
    gradients = sum(each.numel() * each.element_size() for each in make_model(width).parameters()) / 1e6
    print(f"Gradients in 32 bits: {gradients:.1f} MB. {STEPS} steps with AdamW. torch {torch.__version__}.\n")
    columns = ["", "peak, MB:", "of the bare loop's:", "process's own, MB:"]
    print(as_table(columns, (cells_of(each) for each in results)))
    if json_file is not None:
        json_file.write_text(json.dumps({"torch": torch.__version__, "results": results}, indent=2))
    missed = [f"{each['name']}: {each['ratio']:.3f}" for each in results if each["ratio"] > ALLOWED]
    missed += [f"{each['name']}: {each['own']:.1f} MB" for each in results if (each["own"] or 0) > ALLOWED_OWN]
    if missed:
        raise click.ClickException(f"more than {ALLOWED} times the bare loop or {ALLOWED_OWN} MB: {'; '.join(missed)}")


def cells_of(result: dict[str, Any]) -> list[str]:
    own = "" if result["own"] is None else f"{result['own']:+.1f}"
    return [result["name"], f"{result['peak']:.1f}", f"{result['ratio']:.3f}", own]


if __name__ == "__main__":
    main()
