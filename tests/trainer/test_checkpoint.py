"""A task's way into a checkpoint and back: hyper-parameters, weights, `best` and `last`."""

from __future__ import annotations

import threading
from argparse import Namespace
from collections import UserDict
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pydantic
import pytest
import torch
from torch import nn

from drivetrain import Accelerator, Callback, CheckpointError, DataModule, ModelCheckpoint, Task, Trainer
from tests.pool import run_in_processes
from tests.trainer.tasks import Kept, Shuffled, Weight, ones, quiet, rows

# hyper-parameters


class All(Task):
    def __init__(self, lr: float, width: int = 4, **extra: Any) -> None:
        super().__init__()
        self.save_hyperparameters()


class Named(Task):
    def __init__(self, lr: float, width: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters("lr")


class Ignoring(Task):
    def __init__(self, lr: float, net: Any, width: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["net"])


class FromDict(Task):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.save_hyperparameters(config)


class Child(All):
    """Its base saves; the arguments of both constructors are kept, the outermost's value where both have one."""

    def __init__(self, depth: int, width: int = 8) -> None:
        super().__init__(lr=0.5, width=width)
        self.depth = depth


class ChildThatSavesToo(All):
    def __init__(self, depth: int) -> None:
        super().__init__(lr=0.5)
        self.save_hyperparameters("depth")


@dataclass
class Config:
    lr: float = 0.25
    width: int = 2


FORMS: list[tuple[str, Any, dict[str, Any]]] = [
    ("all", lambda: All(0.1, width=3), {"lr": 0.1, "width": 3}),
    ("with **kwargs", lambda: All(0.1, depth=2), {"lr": 0.1, "width": 4, "depth": 2}),
    ("some by name", lambda: Named(0.1), {"lr": 0.1}),
    ("all but some", lambda: Ignoring(0.1, nn.Linear(1, 1)), {"lr": 0.1, "width": 4}),
    ("a dict", lambda: FromDict({"lr": 0.1}), {"lr": 0.1}),
    ("a namespace", lambda: FromDict(Namespace(lr=0.1)), {"lr": 0.1}),
    ("inherited", lambda: Child(2), {"lr": 0.5, "width": 8, "depth": 2}),
    ("inherited and saved twice", lambda: ChildThatSavesToo(2), {"lr": 0.5, "width": 4, "depth": 2}),
]


@pytest.mark.parametrize(("make", "expected"), [form[1:] for form in FORMS], ids=[form[0] for form in FORMS])
def test_hyper_parameters_are_kept_in_every_form(make: Any, expected: dict[str, Any]) -> None:
    assert dict(make().hparams) == expected


def test_hyper_parameters_are_items_and_attributes() -> None:
    task = All(0.1)
    assert task.hparams.lr == task.hparams["lr"] == 0.1
    task.hparams.lr = 0.2
    assert task.hparams["lr"] == 0.2
    with pytest.raises(AttributeError, match=r"no hyper-parameter 'rate'\. Known hyper-parameters: lr, width"):
        _ = task.hparams.rate


def test_a_name_that_is_no_argument_is_refused() -> None:
    class Wrong(Task):
        def __init__(self, lr: float) -> None:
            super().__init__()
            self.save_hyperparameters("rate")

    with pytest.raises(ValueError, match=r"'rate'.*\['lr'\]"):
        Wrong(0.1)


@pytest.mark.parametrize("logged", [True, False])
def test_trackers_get_hyper_parameters_unless_they_should_not(logged: bool) -> None:
    class Telling(Weight):
        def __init__(self, lr: float) -> None:
            super().__init__(lr)
            self.save_hyperparameters(logger=logged)

    tracker = Kept()
    quiet(logger=tracker).fit(Telling(0.5), ones(1))
    assert tracker.configuration == ({"lr": 0.5} if logged else {})


# saving and loading


def saved(task: Task, loader: Any, path: Path, **options: Any) -> Trainer:
    trainer = quiet(**options)
    trainer.fit(task, loader)
    trainer.save_checkpoint(path)
    return trainer


def test_a_task_comes_back_with_its_weights_and_hyper_parameters(tmp_path: Path) -> None:
    task = Shuffled(width=6, lr=0.01)
    saved(task, Shuffled.data(), tmp_path / "saved")
    loaded = Shuffled.load_from_checkpoint(tmp_path / "saved")
    assert dict(loaded.hparams) == {"width": 6, "lr": 0.01}
    for name, value in task.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)


class Base(Weight):
    """Saves its own arguments, or a dict that completes them."""

    def __init__(self, width: int, depth: int = 2, complete: bool = False, **more: Any) -> None:
        super().__init__()
        self.save_hyperparameters(*([{"rate": 0.1, "width": width, **more}] if complete else []))
        self.built = width, depth, more


class Computes(Base):
    def __init__(self, size: int) -> None:
        super().__init__(width=2 * size, depth=5)


class ComputesAndSaves(Base):
    def __init__(self, size: int = 3, **options: Any) -> None:
        super().__init__(width=2 * size, **options)
        self.save_hyperparameters()


class Doubles(Base):
    """Gives its base another value under the name of its own argument."""

    def __init__(self, width: int, **options: Any) -> None:
        super().__init__(2 * width, **options)


class Ignores(Base):
    def __init__(self, size: int, unsaved: Any = None, **options: Any) -> None:
        super().__init__(size, **options)
        self.save_hyperparameters(ignore=["unsaved"])


class Third(ComputesAndSaves):
    def __init__(self, number: int, *, size: int = 1, **options: Any) -> None:
        super().__init__(size=size + number, **options)


DERIVED: list[Any] = [
    (Computes, {"size": 3}),
    (ComputesAndSaves, {"size": 4, "depth": 7}),
    (ComputesAndSaves, {"size": 4, "complete": True, "seen": "x"}),
    (Doubles, {"width": 3, "depth": 4}),
    (Doubles, {"width": 3, "complete": True, "seen": "x"}),
    (Ignores, {"size": 3, "unsaved": object(), "depth": 9}),
    (Third, {"number": 2, "depth": 4}),
    (Third, {"number": 2, "size": 5, "complete": True}),
]


@pytest.mark.parametrize(("kind", "arguments"), DERIVED)
def test_a_derived_task_comes_back_though_it_gives_its_base_other_arguments(
    kind: type[Base], arguments: dict[str, Any], tmp_path: Path
) -> None:
    task = kind(**arguments)
    saved(task, ones(1), tmp_path / "saved")
    loaded = kind.load_from_checkpoint(tmp_path / "saved")
    assert loaded.built == task.built
    assert dict(loaded.hparams) == dict(task.hparams)


def test_a_derived_tasks_changed_hyper_parameters_and_given_arguments_count(tmp_path: Path) -> None:
    task = ComputesAndSaves(4, depth=7)
    task.hparams.size = 6
    saved(task, ones(1), tmp_path / "saved")
    assert ComputesAndSaves.load_from_checkpoint(tmp_path / "saved").built == (12, 7, {})
    assert ComputesAndSaves.load_from_checkpoint(tmp_path / "saved", size=1, depth=1).built == (2, 1, {})
    assert Base.load_from_checkpoint(tmp_path / "saved").built[:2] == (8, 7)


class Color(Enum):
    RED = 1


class Model(pydantic.BaseModel):
    lr: float = 0.25
    sizes: tuple[int, int] = (1, 2)


class Holding(Weight):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.save_hyperparameters()


KEPT: list[tuple[Any, Any]] = [
    ({0: "cat", (1, 2): "dog"}, {0: "cat", (1, 2): "dog"}),
    ((3, 4), (3, 4)),
    ([{3}, frozenset({4})], [{3}, frozenset({4})]),
    (torch.float16, torch.float16),
    (Color.RED, "RED"),
    ({"colors": [Color.RED]}, {"colors": ["RED"]}),
    (Config(), {"lr": 0.25, "width": 2}),
    (Namespace(config=Config()), {"config": {"lr": 0.25, "width": 2}}),
    (Model(), {"lr": 0.25, "sizes": (1, 2)}),
    (UserDict(rates=[UserDict(lr=0.25)]), {"rates": [{"lr": 0.25}]}),
    (np.float32(0.5), 0.5),
]


@pytest.mark.parametrize(("value", "expected"), KEPT, ids=[repr(value) for value, _ in KEPT])
def test_hyper_parameters_keep_their_types(value: Any, expected: Any, tmp_path: Path) -> None:
    saved(Holding(value), ones(1), tmp_path / "saved")
    found = Holding.load_from_checkpoint(tmp_path / "saved").hparams.value
    assert (type(found), found) == (type(expected), expected)


def test_tensors_are_hyper_parameters_too(tmp_path: Path) -> None:
    saved(Holding({"weights": torch.tensor([1.0, 3.0])}), ones(1), tmp_path / "saved")
    found = Holding.load_from_checkpoint(tmp_path / "saved").hparams.value
    assert torch.equal(found["weights"], torch.tensor([1.0, 3.0]))


@pytest.mark.parametrize("value", [object(), nn.Tanh, torch.relu, {"layers": [nn.Linear(1, 1)]}])
def test_a_hyper_parameter_that_cannot_be_saved_is_found_before_training(value: Any, tmp_path: Path) -> None:
    trainer = quiet(enable_checkpointing=True, default_root_dir=tmp_path)
    with pytest.raises(CheckpointError, match=r"The hyper-parameter 'value.*ignore=\['value'\]"):
        trainer.fit(Holding(value), ones(1))
    assert trainer.global_step == 0
    quiet().fit(Holding(value), ones(1))


def test_arguments_win_over_saved_hyper_parameters(tmp_path: Path) -> None:
    saved(Shuffled(width=6), Shuffled.data(), tmp_path / "saved")
    assert Shuffled.load_from_checkpoint(tmp_path / "saved", lr=0.5).hparams == {"width": 6, "lr": 0.5}


def test_weights_that_do_not_fit_are_refused_unless_they_may_be_left_out(tmp_path: Path) -> None:
    class More(Shuffled):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.more = nn.Linear(1, 1)

    saved(Shuffled(), Shuffled.data(), tmp_path / "saved")
    with pytest.raises(RuntimeError, match=r"more\.weight"):
        More.load_from_checkpoint(tmp_path / "saved")
    assert isinstance(More.load_from_checkpoint(tmp_path / "saved", strict=False), More)


def test_nothing_can_be_saved_before_fit() -> None:
    with pytest.raises(CheckpointError, match="nothing to save yet"):
        quiet().save_checkpoint("anywhere")


def test_weights_only_leaves_out_what_only_training_needs(tmp_path: Path) -> None:
    trainer = quiet()
    trainer.fit(Shuffled(), Shuffled.data())
    trainer.save_checkpoint(tmp_path / "weights", weights_only=True)
    assert isinstance(Shuffled.load_from_checkpoint(tmp_path / "weights"), Shuffled)
    with pytest.raises(CheckpointError, match="weights only"):
        quiet(max_epochs=2).fit(Shuffled(), Shuffled.data(), ckpt_path=tmp_path / "weights")


class Noted(Callback):
    """Adds to a checkpoint, and takes it back."""

    def __init__(self) -> None:
        self.back: list[Any] = []
        self.epochs = 0

    def on_train_epoch_end(self, trainer: Trainer, task: Task) -> None:
        self.epochs += 1

    def on_save_checkpoint(self, trainer: Trainer, task: Task, checkpoint: dict[str, Any]) -> None:
        checkpoint["noted"] = "by the callback"

    def on_load_checkpoint(self, trainer: Trainer, task: Task, checkpoint: dict[str, Any]) -> None:
        self.back.append(checkpoint["noted"])

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": self.epochs}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.epochs = state_dict["epochs"]


class Growing(Weight):
    """Builds a module when it learns from the checkpoint that there was one."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["grown"] = hasattr(self, "extra")

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if checkpoint["grown"]:
            self.extra = nn.Linear(1, 1)


def test_what_hooks_add_comes_back_in_time_to_build_modules_and_optimizers(tmp_path: Path) -> None:
    first = Growing()
    first.extra = nn.Linear(1, 1)
    noted = Noted()
    saved(first, ones(1), tmp_path / "saved", callbacks=noted)
    again, task = Noted(), Growing()
    trainer = quiet(again, max_epochs=3)
    trainer.fit(task, ones(1), ckpt_path=tmp_path / "saved")
    assert (noted.epochs, again.back, again.epochs) == (1, ["by the callback"], 3)
    assert torch.equal(task.extra.weight, first.extra.weight)
    assert any(p is task.extra.weight for group in trainer.optimizers[0].param_groups for p in group["params"])


# best and last


class Scored(Weight):
    """Logs `score` 3, 1, 2 in its three epochs, and is the epoch's number itself."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            self.w.fill_(self.current_epoch)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("score", [3.0, 1.0, 2.0][self.current_epoch])

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("w", self.w.detach())

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.w.detach().clone()


def scored(root: str) -> list[Any]:
    saving = ModelCheckpoint(dirpath=root, monitor="score", save_last=True)
    trainer = quiet(saving, max_epochs=3, enable_checkpointing=True)
    task = Scored()
    trainer.fit(task, ones(2), ones(2))
    now = trainer.test(task, ones(2), verbose=False)
    best = trainer.test(task, ones(2), ckpt_path="best", verbose=False)
    last = trainer.test(task, ones(2), ckpt_path="last", verbose=False)
    predicted = trainer.predict(task, ones(2), ckpt_path=saving.best_model_path)
    other = quiet().test(Scored(), ones(2), ckpt_path=saving.best_model_path, verbose=False)
    return [now, best, last, [float(p) for p in predicted], other]


@pytest.mark.parametrize("processes", [1, 2])
def test_the_best_and_the_last_checkpoint_can_be_tested(processes: int, tmp_path: Path) -> None:
    for now, best, last, predicted, other in run_in_processes(scored, processes, args=(str(tmp_path),)):
        assert (now, best, last, other) == ([{"w": 2.0}], [{"w": 1.0}], [{"w": 2.0}], [{"w": 1.0}])
        assert predicted == [1.0, 1.0]


def test_ckpt_path_last_goes_on_with_the_run(tmp_path: Path) -> None:
    def trainer(epochs: int) -> Trainer:
        saving = ModelCheckpoint(dirpath=tmp_path, save_last=True)
        return quiet(saving, max_epochs=epochs, enable_checkpointing=True)

    first = trainer(1)
    first.fit(Weight(), rows([1.0, 2.0]))
    assert first.checkpoint_callback is not None
    task = Weight()
    second = trainer(2)
    second.fit(task, rows([1.0, 2.0]), ckpt_path=first.checkpoint_callback.last_model_path)
    assert task.batches == [(1, 0, 1.0), (1, 1, 2.0)]
    assert (second.global_step, second.current_epoch) == (4, 2)


class InCode(torch.Tensor):
    """A kind of tensor, as optimizers in 8 bits keep their state in."""

    def __tensor_flatten__(self) -> Any:
        return ["codes"], None


class Coded(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["codes"] = torch.zeros(4).as_subclass(InCode)
        return super().step(closure)


@pytest.mark.parametrize("saves", [True, False])
def test_an_optimizer_whose_state_cannot_be_saved_is_refused_after_the_first_step(saves: bool, tmp_path: Path) -> None:
    class Task8(Weight):
        def configure_optimizers(self) -> Any:
            return Coded(self.parameters(), lr=0.1)

    trainer = quiet(max_epochs=1, enable_checkpointing=saves, default_root_dir=str(tmp_path))
    if saves:
        with pytest.raises(CheckpointError, match="Coded keeps its state in InCode"):
            trainer.fit(Task8(), ones(3))
    else:
        trainer.fit(Task8(), ones(3))
    assert trainer.global_step == (1 if saves else 3)


class Holds:
    """Has a state that no checkpoint can hold, from the start or once a step was taken."""

    def __init__(self, after_a_step: bool = False) -> None:
        self.held: Any = 0 if after_a_step else threading.Lock()

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [1, self.held]}

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError


class HoldingCallback(Holds, Callback):
    def on_train_batch_end(self, *args: Any) -> None:
        self.held = threading.Lock()


class HoldingData(Holds, DataModule):
    def __init__(self) -> None:
        DataModule.__init__(self)
        Holds.__init__(self)

    def train_dataloader(self) -> Any:
        return ones(3)


class HoldingModule(torch.nn.Module):
    def get_extra_state(self) -> Any:
        return {"parts": [1, threading.Lock()]}

    def set_extra_state(self, state: Any) -> None:
        raise AssertionError


class HoldingScheduler(torch.optim.lr_scheduler.ConstantLR):
    def state_dict(self) -> dict[str, Any]:
        return {"parts": [1, threading.Lock()]}


class WithHolder(Weight):
    def __init__(self, owner: str) -> None:
        super().__init__()
        self.owner = owner
        if owner == "HoldingModule":
            self.holder = HoldingModule()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        kind = HoldingScheduler if self.owner == "HoldingScheduler" else torch.optim.lr_scheduler.ConstantLR
        return [optimizer], [kind(optimizer)]


@pytest.mark.parametrize(
    ("owner", "steps"),
    [
        ("HoldingCallback", 0),
        ("HoldingCallback", 1),
        ("HoldingData", 0),
        ("HoldingModule", 0),
        ("HoldingScheduler", 0),
    ],
)
def test_a_state_that_cannot_be_saved_is_refused_before_training(owner: str, steps: int, tmp_path: Path) -> None:
    callbacks: list[Callback] = [ModelCheckpoint(dirpath=tmp_path)]
    if owner == "HoldingCallback":
        callbacks.append(HoldingCallback(after_a_step=steps > 0))
    data: Any = {"datamodule": HoldingData()} if owner == "HoldingData" else {"train_dataloaders": ones(3)}
    trainer = quiet(callbacks, enable_checkpointing=True)
    with pytest.raises(CheckpointError, match=rf"{owner}.*parts/1 is a _thread.lock, which a checkpoint cannot hold"):
        trainer.fit(WithHolder(owner), **data)
    assert trainer.global_step == steps


def test_what_is_not_saved_may_hold_anything(tmp_path: Path) -> None:
    for saving in ([], [ModelCheckpoint(dirpath=tmp_path, save_weights_only=True)]):
        trainer = quiet([*saving, HoldingCallback()], enable_checkpointing=bool(saving))
        trainer.fit(WithHolder("nobody"), ones(3))
        assert trainer.global_step == 3


def test_an_object_that_cannot_be_saved_is_refused_when_it_is_registered() -> None:
    accelerator = Accelerator(cpu=True)
    with pytest.raises(CheckpointError, match=r"Holds.state_dict\(\)/parts/1 is a _thread.lock"):
        accelerator.register_for_checkpointing(Holds())
    accelerator.register_for_checkpointing(Holds(after_a_step=True))
