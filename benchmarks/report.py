"""What a run's report takes: the processor time of its thread, and of its last page, beside the time of the run.

    python benchmarks/report.py
    python benchmarks/report.py --seconds 6 --seconds 30 --values 20

A short multiplication is a step; two values a step are logged, and the task is validated. Each length of run has a
process of its own, which trains twice: the first run pays for what a process does once. See benchmarks/README.md.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
import warnings
from typing import Any

import click
import torch
from tables import as_table
from timing import quietly
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import RunReport, Task, Trainer
from drivetrain.callbacks.report.run_report import Clock

RUNS = ("first", "second")


class Logged(Task):
    """Logs the same loss under some names.

    Args:
        values: How many.
    """

    def __init__(self, values: int) -> None:
        super().__init__()
        self.values, self.layer, self.work = values, nn.Linear(32, 2), torch.randn(500, 500)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.work @ self.work
        loss = self.layer(batch[0]).square().mean()
        for number in range(self.values):
            self.log(f"loss_{number}", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.layer(batch[0]).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-3)


def measured(seconds: float, values: int) -> list[float]:
    """Seconds of the processor that the reports of two runs of a process take."""
    spent: list[float] = []

    def counted(method: Any) -> Any:
        def call(*arguments: Any) -> None:
            begun = time.thread_time()
            method(*arguments)
            spent.append(time.thread_time() - begun)

        return call

    Clock._run = counted(Clock._run)  # type: ignore[method-assign]
    RunReport._finish = counted(RunReport._finish)  # type: ignore[method-assign]
    torch.set_num_threads(1)
    found = []
    with tempfile.TemporaryDirectory() as folder, quietly(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in RUNS:
            spent.clear()
            off = dict.fromkeys(("enable_model_summary", "enable_progress_bar"), False)
            limits: dict[str, Any] = {"max_epochs": -1, "max_time": f"{seconds} s"}
            loader = DataLoader(TensorDataset(torch.randn(400, 32)), 4)
            Trainer(accelerator="cpu", default_root_dir=folder, **limits, **off).fit(Logged(values), loader, loader)
            found.append(sum(spent))
    return found


@click.command()
@click.option("--seconds", multiple=True, type=float, default=(6.0, 16.0, 30.0), help="How long a run is; several.")
@click.option("--values", default=2, show_default=True, help="How many values a step logs.")
def main(seconds: tuple[float, ...], values: int) -> None:
    rows = []
    for length in seconds:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            found = pool.apply(measured, (length, values))
        rows.append([f"{length:g}", *(f"{1e3 * each:.1f} ({each / length:.3%})" for each in found)])
    print(as_table(["seconds of a run", *(f"ms, {each} run of a process:" for each in RUNS)], rows))


if __name__ == "__main__":
    main()
