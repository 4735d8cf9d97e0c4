"""`--optimizer` and `--lr_scheduler`: what stands for a task's `configure_optimizers`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau, StepLR

from drivetrain import Task, TrainerCLI
from drivetrain.trainer.cli import TrainerArgumentParser, instantiate_class
from tests.trainer.cli.made import Line, command


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["train.py"])


def test_what_is_chosen_trains_in_the_place_of_the_tasks_own(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        made = command(
            "fit", "--optimizer=Adam", "--optimizer.lr=0.5", "--lr_scheduler=StepLR", "--lr_scheduler.step_size=1"
        )
    assert [type(each) for each in made.trainer.optimizers] == [torch.optim.Adam]
    assert [type(each.scheduler) for each in made.trainer.lr_scheduler_configs] == [StepLR]
    assert made.trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.05)
    assert "`Line.configure_optimizers` will be overridden by `TrainerCLI.configure_optimizers`" in caplog.text


def test_a_task_needs_no_configure_optimizers_then(caplog: pytest.LogCaptureFixture) -> None:
    class Bare(Task):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layer(batch).sum()

    made = command("fit", "--optimizer=SGD", "--optimizer.lr=0.1", model=Bare)
    assert made.trainer.global_step == 2
    assert "overridden" not in caplog.text


def test_without_a_choice_the_task_decides() -> None:
    made = command("--lr_scheduler=StepLR", "--lr_scheduler.step_size=1", run=False)
    assert isinstance(made.model.configure_optimizers(), torch.optim.SGD)


def test_a_schedule_by_plateaus_watches_a_metric() -> None:
    made = command("--optimizer=Adam", "--lr_scheduler=ReduceLROnPlateau", "--lr_scheduler.monitor=loss", run=False)
    watching = made.model.configure_optimizers()["lr_scheduler"]
    assert isinstance(watching["scheduler"], ReduceLROnPlateau)
    assert watching["monitor"] == "loss"


def test_one_class_has_its_options_without_a_choice() -> None:
    class Fixed(TrainerCLI):
        def add_arguments_to_parser(self, parser: TrainerArgumentParser) -> None:
            parser.add_optimizer_args(torch.optim.Adam)
            parser.add_lr_scheduler_args(ExponentialLR)

    made = command("--optimizer.lr=0.5", "--lr_scheduler.gamma=0.25", kind=Fixed, run=False)
    [optimizer], [schedule] = made.model.configure_optimizers()
    assert (optimizer.defaults["lr"], schedule.gamma) == (0.5, 0.25)


def test_several_go_to_arguments_of_the_task() -> None:
    class Several(TrainerCLI):
        def add_arguments_to_parser(self, parser: TrainerArgumentParser) -> None:
            parser.add_optimizer_args(nested_key="first", link_to="model.first")
            parser.add_optimizer_args(torch.optim.Adam, nested_key="second", link_to="model.second")

    class Two(Line):
        def __init__(self, first: dict[str, Any], second: dict[str, Any]) -> None:
            super().__init__()
            self.made = [instantiate_class(self.parameters(), each) for each in (first, second)]

    made = command("--first=SGD", "--first.lr=0.5", "--second.lr=0.25", kind=Several, model=Two, run=False)
    assert [type(each) for each in made.model.made] == [torch.optim.SGD, torch.optim.Adam]
    assert [each.defaults["lr"] for each in made.model.made] == [0.5, 0.25]


def test_only_one_is_handed_over_by_itself(capsys: pytest.CaptureFixture[str]) -> None:
    class Ambiguous(TrainerCLI):
        def add_arguments_to_parser(self, parser: TrainerArgumentParser) -> None:
            parser.add_optimizer_args(nested_key="first")
            parser.add_optimizer_args(nested_key="second")

    with pytest.raises(SystemExit, match="2"):
        command("--first=Adam", kind=Ambiguous, run=False)
    assert "first, second" in capsys.readouterr().err


@pytest.mark.slow
def test_how_they_are_used_can_be_overridden() -> None:
    class Own(TrainerCLI):
        @staticmethod
        def configure_optimizers(task: Any, optimizer: Any, lr_scheduler: Any = None) -> Any:
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": lr_scheduler, "interval": "step"}}

    made = command("fit", "--optimizer=Adam", "--lr_scheduler=StepLR", "--lr_scheduler.step_size=1", kind=Own)
    assert made.trainer.lr_scheduler_configs[0].interval == "step"
