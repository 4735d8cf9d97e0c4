"""Runs of both drivers that log to a package's tracker, and to one that keeps what was logged, side by side."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from drivetrain import Accelerator, GeneralTracker, Task, Tracker, Trainer
from tests.pool import device
from tests.trainer.tasks import Shuffled

PLANTED = "planted-key-0123456789"
PICTURE = torch.arange(144.0).reshape(3, 6, 8) / 144
TEXT = "on every process, written once"
HYPER_PARAMETERS = {"api_key": PLANTED, "token": PLANTED, "password": PLANTED, "secret": PLANTED, "width": 4}


class Reference(GeneralTracker):
    """Keeps what the run logs, as numbers by name and step."""

    name = "reference"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[tuple[str, int], float] = {}
        self.epochs: dict[tuple[str, int], int] = {}

    @property
    def tracker(self) -> Any:
        return self

    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        assert step is not None
        for name, value in values.items():
            if name != "epoch":
                self.values[name, step] = value
                self.epochs[name, step] = values.get("epoch", -1)


class Planted(Shuffled):
    """The task of the other tests, with secrets among its hyper-parameters."""

    def __init__(self, width: int = 4, lr: float = 0.05, **secrets: str) -> None:
        super().__init__(width, lr)
        self.save_hyperparameters({"width": width, "lr": lr, "nested": dict(secrets), **secrets})

    def on_train_epoch_end(self) -> None:
        self.log("epoch_value", float(self.current_epoch) + 0.25)


class Failing(Planted):
    def on_train_epoch_end(self) -> None:
        raise ValueError(f"no more of {PLANTED}\nand details")


def secrets() -> dict[str, str]:
    return {name: str(value) for name, value in HYPER_PARAMETERS.items() if name != "width"}


def fit(directory: Path, logger: Tracker, task: Task | None = None, **options: Any) -> tuple[Trainer, Reference]:
    reference = Reference()
    resume = options.pop("resume", None)
    settings = {"max_epochs": 2, "enable_progress_bar": False, "enable_model_summary": False, **options}
    trainer = Trainer(
        accelerator=device(), logger=[logger, reference], log_every_n_steps=1, default_root_dir=directory, **settings
    )
    trainer.fit(Planted(**secrets()) if task is None else task, Shuffled.data(), resume=resume)
    return trainer, reference


def log_media(tracker: Any) -> None:
    tracker.log_images({"picture": PICTURE}, 2)
    tracker.log_table("table", ["a", "b"], [[1, 2], [3, 4]], 2)
    tracker.log_text({"sample": "some text"}, 2)
    tracker.log_histogram({"weights": torch.arange(10.0)}, 2)


def raw_loop(
    directory: Path,
    name: str,
    init_kwargs: Mapping[str, Any],
    resume: str | None = None,
    with_media: bool = False,
) -> dict[tuple[str, int], float]:
    """A loop over the Accelerator, with the state of the run saved in its middle, or resumed from there."""
    reference = Reference()
    accelerator = Accelerator(device=device(), log_with=[name, reference], project_dir=directory)
    model = torch.nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    if resume is not None:
        accelerator.load_state(resume)
    accelerator.init_trackers("raw", config={"lr": 0.1, **secrets()}, init_kwargs={name: init_kwargs})
    steps = range(4) if resume is None else range(2, 6)
    for step in steps:
        loss = model(torch.full((4, 2), float(step), device=accelerator.device)).square().mean()
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        accelerator.log({"train_loss": loss, "rate": 0.1 * step}, step=step)
        if step == 1:
            accelerator.save_state(directory / "state")
    if with_media:
        accelerator.log_images({"picture": PICTURE}, 2)
        accelerator.log_table("table", ["a", "b"], [[1, 2], [3, 4]], 2)
    accelerator.get_tracker(name).log_text({"sample": TEXT}, 3)
    accelerator.end_training()
    return reference.values


def files_with(text: str, *places: Path) -> list[str]:
    """The files below some directories that hold a text, archives by what is in them."""
    import zipfile

    found = []
    for path in (path for place in places for path in place.rglob("*") if path.is_file()):
        parts = {str(path): path.read_bytes()}
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                parts |= {f"{path}:{name}": archive.read(name) for name in archive.namelist()}
        found += [name for name, content in parts.items() if text.encode() in content]
    return found


HERE = Path(__file__)
"""A script that holds a secret."""

SCRIPT = HERE.parents[1] / "trainer" / "tasks.py"
"""One that does not."""


def pretend(script: Path, **environment: str) -> None:
    """Let the process that runs this, which is one of the test's own, be that of a script, with these variables."""
    sys.argv = [str(script)]
    os.environ.update(environment)


def complaint(logger: Any) -> tuple[str, int]:
    """The first message about a tracker that logs three values, and how many of them are lost."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("drivetrain").addHandler(handler)
    logger.load()
    for step in range(3):
        logger.log({"loss": 1.0}, step)
    logger.finish()
    return lines[0], logger.lost
