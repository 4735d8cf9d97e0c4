"""Records every hook of a task, two callbacks and a data module: `lightning_hooks.py RESULT` writes the events."""

from __future__ import annotations

import inspect
import json
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

DEVICE = os.environ.get("DRIVETRAIN_TESTS_DEVICE", "cpu")

STAGES = ("train", "validation", "test", "predict")
AROUND = ("setup", "teardown", "state_dict", "load_state_dict")
OF_ALL = (
    *("on_fit_start", "on_fit_end", "on_sanity_check_start", "on_sanity_check_end", "on_exception"),
    *("on_save_checkpoint", "on_load_checkpoint"),
    *("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step"),
    *(f"on_{stage}_{moment}" for stage in STAGES for moment in ("start", "end", "epoch_start", "epoch_end")),
    *(f"on_{stage}_batch_{moment}" for stage in STAGES for moment in ("start", "end")),
)
OF_DATA = (
    *("prepare_data", "train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader"),
    *("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"),
)
OF_TASKS = (
    *("configure_model", "configure_optimizers", "configure_callbacks", "configure_gradient_clipping"),
    *("training_step", "validation_step", "test_step", "predict_step", "forward", "backward"),
    *("optimizer_step", "optimizer_zero_grad", "lr_scheduler_step"),
    *(f"on_{stage}_model_{mode}" for stage in STAGES for mode in ("eval", "train") if stage != "train"),
    "on_validation_model_zero_grad",
)
NUMBERED = ("batch_start", "batch_end", "_step")


class Events(list):
    """What was called, by whom, with which number of the batch."""

    def add(self, owner: str, name: str, given: tuple) -> None:
        if name.endswith(NUMBERED) and name not in ("optimizer_step", "on_before_optimizer_step", "lr_scheduler_step"):
            batch, *loader = [each for each in given if type(each) is int]
            name += f" {batch}" + (f" of loader {loader[0]}" if any(loader) else "")
        elif name in ("setup", "teardown"):
            name += f" {[str(getattr(each, 'value', each)) for each in given if isinstance(each, str)]}"
        self.append(f"{owner} {name}")


def recording(kind: type, owner: str, names: tuple[str, ...]) -> type:
    """A class whose hooks of these names write that they were called, and do what they do."""

    def hook(name: str):
        method = getattr(kind, name)

        def run(self, *args: Any, **options: Any):
            self.__dict__["events"].add(owner, name, (*args, *options.values()))
            return method(self, *args, **options)

        run.__name__ = name
        run.__signature__ = inspect.signature(method)
        return run

    return type(f"{owner.title()}{kind.__name__}", (kind,), {name: hook(name) for name in names if hasattr(kind, name)})


class Task(L.LightningModule):
    def __init__(self, events: Events, optimizers: int = 1) -> None:
        super().__init__()
        self.__dict__["events"] = events
        self.net = nn.Linear(4, 2)
        self.head = nn.Linear(2, 2)
        self.count = optimizers
        self.automatic_optimization = optimizers == 1

    def forward(self, x):
        return self.head(self.net(x))

    def _loss(self, batch):
        return F.cross_entropy(self(batch[0]), batch[1])

    def training_step(self, batch, batch_idx):
        loss = self._loss(batch)
        if self.automatic_optimization:
            return loss
        for optimizer in self.optimizers():
            loss = self._loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("val", self._loss(batch))

    def test_step(self, batch, batch_idx):
        self.log("test", self._loss(batch))

    def predict_step(self, batch, batch_idx):
        return self(batch[0])

    def configure_optimizers(self):
        if self.count == 2:
            return [torch.optim.SGD(each.parameters(), 0.1) for each in (self.net, self.head)]
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1), "interval": "step"}]


def rows(count: int) -> DataLoader:
    made = torch.Generator().manual_seed(count)
    return DataLoader(TensorDataset(torch.randn(count, 4, generator=made), torch.arange(count) % 2), batch_size=2)


class Data(L.LightningDataModule):
    def __init__(self, events: Events, validations: int = 1) -> None:
        super().__init__()
        self.__dict__["events"] = events
        self.validations = validations

    def train_dataloader(self):
        return rows(8)

    def val_dataloader(self):
        return rows(4) if self.validations == 1 else [rows(4), rows(2)]

    def test_dataloader(self):
        return rows(4)

    def predict_dataloader(self):
        return rows(4)


class Watch(L.Callback):
    def __init__(self, events: Events) -> None:
        self.__dict__["events"] = events


RecordedTask = recording(Task, "task", (*AROUND[:2], *OF_ALL, *OF_DATA, *OF_TASKS))
OF_AUTOMATIC = ("optimizer_step", "optimizer_zero_grad", "lr_scheduler_step", "configure_gradient_clipping")
ManualTask = recording(Task, "task", tuple({*AROUND[:2], *OF_ALL, *OF_DATA, *OF_TASKS} - {*OF_AUTOMATIC}))
RecordedData = recording(Data, "data", (*AROUND, *OF_DATA, "on_exception"))
First, Second = recording(Watch, "first", (*AROUND, *OF_ALL)), recording(Watch, "second", (*AROUND, *OF_ALL))


def trainer(root: str, events: Events, **options: Any) -> L.Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "max_epochs": 2}
    callbacks = [First(events), Second(events), *options.pop("callbacks", [])]
    saves = {"enable_checkpointing": len(callbacks) > 2}
    return L.Trainer(
        default_root_dir=root,
        accelerator=DEVICE,
        devices=1,
        callbacks=callbacks,
        **{**quiet, **saves, **options},
    )


def plain(root: str, events: Events) -> None:
    trainer(root, events).fit(RecordedTask(events), datamodule=RecordedData(events))


def accumulated(root: str, events: Events) -> None:
    run = trainer(root, events, accumulate_grad_batches=3, gradient_clip_val=1.0, max_epochs=1)
    run.fit(RecordedTask(events), datamodule=RecordedData(events))


def two_optimizers(root: str, events: Events) -> None:
    trainer(root, events, max_epochs=1).fit(ManualTask(events, optimizers=2), datamodule=RecordedData(events))


def two_validation_loaders(root: str, events: Events) -> None:
    run = trainer(root, events, val_check_interval=0.5, max_epochs=1)
    run.fit(RecordedTask(events), datamodule=RecordedData(events, validations=2))


def verbs(root: str, events: Events) -> None:
    run, task, data = trainer(root, events), RecordedTask(events), RecordedData(events)
    run.validate(task, datamodule=data, verbose=False)
    run.test(task, datamodule=data, verbose=False)
    run.predict(task, datamodule=data)


def resumed(root: str, events: Events) -> None:
    saves = ModelCheckpoint(Path(root, "saved"), "{epoch}", save_top_k=-1)
    trainer(root, events, max_epochs=1, callbacks=[saves]).fit(RecordedTask(events), datamodule=RecordedData(events))
    events.append("again")
    run = trainer(root, events, max_epochs=2)
    run.fit(RecordedTask(events), datamodule=RecordedData(events), ckpt_path=str(Path(root, "saved", "epoch=0.ckpt")))


def broken(root: str, events: Events) -> None:
    class Broken(RecordedTask):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            raise ZeroDivisionError

    try:
        trainer(root, events).fit(Broken(events), datamodule=RecordedData(events))
    except ZeroDivisionError:
        events.append("raised")


def unrecorded() -> list[str]:
    """The hooks of the framework's base classes that are not recorded, but for the old name of `configure_model`."""
    found = []
    for owner, recorded, bases in (
        ("task", RecordedTask, (ModelHooks, DataHooks, CheckpointHooks)),
        ("data", RecordedData, (DataHooks,)),
        ("callback", First, (L.Callback,)),
    ):
        hooks = {name for base in bases for name, each in vars(base).items() if inspect.isfunction(each)}
        left = {name for name in hooks - {*vars(recorded), "configure_sharded_model"} if not name.startswith("_")}
        found += [f"{owner} {name}" for name in sorted(left)]
    return found


RUNS = (plain, accumulated, two_optimizers, two_validation_loaders, verbs, resumed, broken)


def main() -> None:
    warnings.filterwarnings("ignore")
    report = {"unrecorded": unrecorded()}
    for run in RUNS:
        events = Events()
        L.seed_everything(7, verbose=False)
        with tempfile.TemporaryDirectory() as root:
            try:
                run(root, events)
            except Exception as error:
                events.append(f"{type(error).__name__}: {error}")
        report[run.__name__] = events
    Path(sys.argv[1]).write_text(json.dumps(report))


if __name__ == "__main__":
    main()
