"""What a command line leaves in checkpoints, and what is made of that again."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain import CheckpointError, ConfigurationError, DataModule, Task
from drivetrain.trainer.cli import OptimizerCallable, instantiate_class, instantiate_module
from tests.trainer.cli.made import Deep, Injected, Line, Ones, command

INJECTED = ["--model.activation=torch.nn.LeakyReLU", "--model.activation.negative_slope=0.5", "--model.optimizer=SGD"]


class Mode(Enum):
    SLOW = 1
    FAST = 2


class Kept(Line):
    """A line with a part that a command line chooses."""

    def __init__(self, head: torch.nn.Module, width: int = 1) -> None:
        super().__init__(width=width)
        self.save_hyperparameters()


CALL = {"class_path": "subprocess.Popen", "init_args": {"args": ["touch", "called"]}}
HOSTILE: dict[str, dict[str, Any]] = {
    "an argument without annotation": {"anything": CALL},
    "within a list": {"anything": [1, CALL]},
    "an annotated argument": {"head": {"class_path": "hostile.Line"}},
    "the task's class": {"_class_path": "hostile.Line"},
    "the name of a function": {"function": "hostile.Line"},
}


class Loose(Line):
    """A line whose arguments take what a hostile file may name."""

    def __init__(
        self,
        lr: float = 0.1,
        width: int = 1,
        anything=None,
        head: torch.nn.Module | None = None,
        function: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__(lr, width)


class Kind(Enum):
    FIRST, SECOND = 1, 2


@dataclass
class Part:
    size: int = 1


class Plain(Line):
    """A line that takes an enum and a dataclass."""

    def __init__(self, kind: Kind = Kind.FIRST, part: Part = Part(1)) -> None:  # noqa: B008
        super().__init__()
        self.save_hyperparameters()
        self.kind, self.part = kind, part


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["train.py"])


def saved(*args: str, **kwargs: Any) -> Any:
    """Fit, and save a checkpoint under `saved`."""
    made = command("fit", *args, **kwargs)
    made.trainer.save_checkpoint("saved")
    return made


def test_a_task_with_parts_is_made_again_without_arguments() -> None:
    saved(*INJECTED, "--model.optimizer.lr=0.25", model=Injected, auto_configure_optimizers=False)
    again = Injected.load_from_checkpoint("saved", instantiate=True)
    assert isinstance(again.activation, torch.nn.LeakyReLU)
    assert again.activation.negative_slope == 0.5
    [optimizer], [schedule] = again.configure_optimizers()
    assert isinstance(optimizer, torch.optim.SGD)
    assert isinstance(schedule, torch.optim.lr_scheduler.ConstantLR)
    assert optimizer.defaults["lr"] == 0.25
    assert again.hparams["activation"]["class_path"] == "torch.nn.LeakyReLU"


def test_a_class_that_was_chosen_is_made_again_through_its_base() -> None:
    saved("--model=Deep", "--model.depth=2", "--data=Ones", "--data.batch_size=2", model=None, data=None)
    again = Task.load_from_checkpoint("saved", lr=0.75)
    assert isinstance(again, Deep)
    assert (again.depth, again.lr) == (2, 0.75)
    data = DataModule.load_from_checkpoint("saved")
    assert isinstance(data, Ones)
    assert data.batch_size == 2


def test_a_task_within_a_task_keeps_its_own_hyper_parameters() -> None:
    class Outer(Line):
        def __init__(self, lr: float = 0.5, inner_lr: float = 0.25) -> None:
            super().__init__(lr)
            self.save_hyperparameters()
            self.inner = Line(inner_lr)

    made = command("--model.inner_lr=0.125", model=Outer, run=False)
    assert made.model.inner.hparams == {"lr": 0.125, "width": 1}
    assert {name: made.model.hparams[name] for name in ("lr", "inner_lr")} == {"lr": 0.5, "inner_lr": 0.125}


def test_without_support_for_checkpoints_the_arguments_themselves_are_kept() -> None:
    made = command("--model.lr=0.5", run=False, load_from_checkpoint_support=False)
    assert made.model.hparams == {"lr": 0.5, "width": 1}


def test_verbs_take_the_hyper_parameters_of_the_checkpoint() -> None:
    first = saved("--model.width=3")
    made = command("test", "--ckpt_path=saved")
    assert torch.equal(made.model.layer.weight, first.model.layer.weight)


@pytest.mark.slow
def test_a_checkpoint_of_another_model_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    saved("--model.depth=2", model=Deep)
    with pytest.raises(SystemExit, match="2"):
        command("test", "--ckpt_path=saved")
    printed = capsys.readouterr().err
    assert "Parsing of ckpt_path hyperparameters failed" in printed
    assert "depth" in printed


def test_only_known_functions_make_tasks_of_what_a_checkpoint_holds() -> None:
    made = command(run=False)
    made.model.hparams["_instantiator"] = "os.system"
    made.trainer.fit(made.model, datamodule=made.datamodule)
    made.trainer.save_checkpoint("saved")
    with pytest.raises(CheckpointError, match=r"os\.system"):
        Line.load_from_checkpoint("saved")


@pytest.mark.parametrize("values", HOSTILE.values(), ids=HOSTILE)
def test_nothing_that_a_checkpoint_names_is_imported_or_called(values: dict[str, Any], monkeypatch: Any) -> None:
    monkeypatch.syspath_prepend(os.getcwd())
    Path("hostile.py").write_text("open('imported', 'w').close()\nclass Line: ...\n")
    made = command(run=False)
    made.model.hparams.update(values)
    made.trainer.fit(made.model, datamodule=made.datamodule)
    made.trainer.save_checkpoint("saved")
    with pytest.raises(CheckpointError, match="is not imported"):
        Loose.load_from_checkpoint("saved")
    if "_class_path" in values:  # a command line whose class is fixed does not look at it
        command("test", "--ckpt_path=saved", model=Loose)
    else:
        with pytest.raises(SystemExit, match="2"):
            command("test", "--ckpt_path=saved", model=Loose)
    with pytest.raises(SystemExit, match="2"):
        command("test", "--ckpt_path=saved", model=Loose, subclass_mode_model=True)
    assert not Path("imported").exists()
    assert not Path("called").exists()


def test_what_is_trusted_makes_only_what_an_argument_is_annotated_with() -> None:
    made = command(run=False)
    made.model.hparams["anything"] = {"class_path": "pathlib.PurePath", "init_args": {}}
    made.trainer.fit(made.model, datamodule=made.datamodule)
    made.trainer.save_checkpoint("saved")
    with pytest.raises(ConfigurationError, match="not annotated with a class"):
        Loose.load_from_checkpoint("saved", instantiate=True)


def test_plain_values_become_what_arguments_are_annotated_with() -> None:
    saved("--model.kind=SECOND", "--model.part.size=3", model=Plain)
    again = Plain.load_from_checkpoint("saved")
    assert again.kind is Kind.SECOND
    assert again.part == Part(3)


EVIL = "tests.trainer.cli.never_imported"
POPEN = {"class_path": "subprocess.Popen", "init_args": {"args": ["touch", "called"]}}
TOUCH: dict[str, Any] = {"class_path": "pathlib.Path.touch", "init_args": {"self": "called"}}
NAMED: dict[str, dict[str, Any]] = {
    "an argument without a type": {"untyped": TOUCH},
    "an argument of any type": {"anything": POPEN},
    "an object": {"thing": {"class_path": "os.mkdir", "init_args": {"path": "called"}}},
    "a text that is YAML": {"untyped": "{class_path: subprocess.Popen, init_args: {args: [touch, called]}}"},
    "within a list": {"listed": [TOUCH]},
    "within a dict": {"by_name": {"x": {"y": [TOUCH]}}},
    "a class of another type": {"head": {"class_path": f"{EVIL}.X"}},
    "the name of a class": {"head": f"{EVIL}.X"},
    "the name of a function": {"function": f"{EVIL}.x"},
    "a type": {"kind": f"{EVIL}.X"},
    "an argument of an argument": {"head": {"class_path": "torch.nn.Sequential", "init_args": {"args": [TOUCH]}}},
    "a part without a type": {"head": {"class_path": f"{__name__}.Wrapped", "init_args": {"inner": TOUCH}}},
    "a maker of another class": {"optimizer": POPEN},
    "the task's class": {"_class_path": f"{EVIL}.X"},
}


class Wrapped(torch.nn.Module):
    def __init__(self, inner: Any = None) -> None:
        super().__init__()
        self.inner = inner


class Open(Line):
    """A task whose constructor takes all kinds of arguments."""

    def __init__(
        self,
        lr: float = 0.1,
        width: int = 1,
        mode: Mode = Mode.SLOW,
        untyped=None,  # type: ignore[no-untyped-def]
        anything: Any = None,
        thing: object = None,
        listed: list[Any] | None = None,
        by_name: dict[str, Any] | None = None,
        head: torch.nn.Module | None = None,
        function: Callable[[int], int] | None = None,
        kind: type[torch.nn.Module] | None = None,
        optimizer: OptimizerCallable | None = None,
    ) -> None:
        super().__init__(width=width)
        self.mode, self.untyped, self.head = mode, untyped, head


def hostile(values: dict[str, Any]) -> None:
    """Write a checkpoint under `saved` whose hyper-parameters are these, as a command line leaves them."""
    made = command("fit", model=Open)
    made.model.hparams.clear()
    made.model.hparams.update(values, _instantiator="drivetrain.trainer.cli.instantiate_module")
    made.trainer.save_checkpoint("saved")


def is_untouched() -> bool:
    return EVIL not in sys.modules and not Path("called").exists()


@pytest.mark.parametrize("instantiate", [False, True])
@pytest.mark.parametrize("values", NAMED.values(), ids=NAMED.keys())
def test_nothing_that_a_checkpoint_names_is_called_unless_it_fits_the_annotation(
    values: dict[str, Any], instantiate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    hostile(values)
    calls: list[Any] = []
    monkeypatch.setattr(subprocess, "Popen", type("Popen", (), {"__init__": lambda self, *a, **k: calls.append(a)}))
    monkeypatch.setattr(Path, "touch", lambda *args: calls.append(args))
    if isinstance(values.get("untyped"), str):
        assert Open.load_from_checkpoint("saved", instantiate=instantiate).untyped == values["untyped"]
    else:
        with pytest.raises((CheckpointError, ConfigurationError), match=r"(?i)pass|consent"):
            Open.load_from_checkpoint("saved", instantiate=instantiate)
    assert calls == []
    assert is_untouched()


@pytest.mark.parametrize("values", NAMED.values(), ids=NAMED.keys())
def test_a_checkpoint_on_the_command_line_names_no_classes(
    values: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    hostile(values)
    with pytest.raises(SystemExit, match="2"):
        command("test", "--ckpt_path=saved", model=Open, subclass_mode_model="_class_path" in values)
    assert is_untouched()


def test_plain_hyper_parameters_of_a_command_line_are_read_by_their_types() -> None:
    hostile({"width": 1, "mode": "FAST", "untyped": "a: b", "by_name": {"x": [1]}})
    loaded = Open.load_from_checkpoint("saved", head=torch.nn.ReLU())
    assert loaded.mode is Mode.FAST
    assert (loaded.untyped, loaded.hparams["by_name"]) == ("a: b", {"x": [1]})
    assert isinstance(loaded.head, torch.nn.ReLU)


def test_a_class_that_fits_the_annotation_is_made_where_that_is_asked_for() -> None:
    hostile({"head": {"class_path": f"{__name__}.Wrapped", "init_args": {"inner": "{class_path: x.Y}"}}})
    loaded = Open.load_from_checkpoint("saved", instantiate=True)
    assert isinstance(loaded.head, Wrapped)
    assert loaded.head.inner == "{class_path: x.Y}"


def test_the_command_line_may_name_again_what_the_checkpoint_names() -> None:
    args = ["--model.head=torch.nn.ReLU", "--model.width=3"]
    saved(*args, model=Kept)
    assert command("test", "--ckpt_path=saved", args[0], model=Kept).model.layer.out_features == 3


def test_hyper_parameters_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match="depth"):
        instantiate_module(Line, {"depth": 3})


def test_an_optimizer_is_made_of_its_configuration() -> None:
    layer = torch.nn.Linear(1, 1)
    init = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.5}, "dict_kwargs": {"momentum": 0.25}}
    made = instantiate_class(layer.parameters(), init)
    assert (made.defaults["lr"], made.defaults["momentum"]) == (0.5, 0.25)
