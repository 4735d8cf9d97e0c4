"""`TrainerCLI`: what options, files and variables make of tasks, data and Trainers, and what runs."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch
import yaml

from drivetrain import Callback, CSVLogger, EarlyStopping, SaveConfigCallback, Trainer, TrainerCLI, set_seed
from drivetrain.trainer.cli import TrainerArgumentParser
from tests.trainer.cli.made import QUIET, Deep, Line, Ones, command

HERE = "tests.trainer.cli.made"


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["train.py"])


def test_options_reach_the_trainer_the_task_and_the_data_module() -> None:
    made = command("fit", "--trainer.max_epochs", "2", "--model.lr", "1e-3", "--data.batch_size=2")
    assert (made.trainer.max_epochs, made.model.lr, made.datamodule.batch_size) == (2, 1e-3, 2)
    assert made.trainer.global_step == 8
    assert made.subcommand == "fit"


def test_later_files_win_and_options_win_over_files() -> None:
    Path("first.yaml").write_text("trainer: {max_epochs: 2, max_steps: 5}\nmodel: {lr: 0.5}")
    Path("second.yaml").write_text("trainer: {max_epochs: 3}")
    made = command("fit", "--config", "first.yaml", "--config", "second.yaml", "--model.lr=0.25")
    assert (made.trainer.max_epochs, made.trainer.max_steps, made.model.lr) == (3, 5, 0.25)


def test_a_file_before_the_subcommand_has_a_part_for_each() -> None:
    Path("all.yaml").write_text("fit: {model: {lr: 0.5}}\ntest: {model: {lr: 0.125}}")
    assert command("--config", "all.yaml", "test").model.lr == 0.125


def test_a_part_of_the_configuration_may_have_a_file_of_its_own() -> None:
    Path("model.yaml").write_text("lr: 0.5")
    assert command("--model", "model.yaml", run=False).model.lr == 0.5


def test_a_printed_configuration_makes_the_same_again(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--model.lr=0.5", "--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=loss"]
    with pytest.raises(SystemExit, match="0"):
        command(*given, "--optimizer=Adam", "--optimizer.lr=0.25", "--print_config", run=False)
    Path("printed.yaml").write_text(capsys.readouterr().out)
    made = command("--config=printed.yaml", run=False)
    assert made.model.lr == 0.5
    assert [each.monitor for each in made.trainer.callbacks if isinstance(each, EarlyStopping)] == ["loss"]
    assert made.model.configure_optimizers().defaults["lr"] == 0.25


@pytest.mark.parametrize("name", ["LearningRateMonitor", "drivetrain.LearningRateMonitor"])
def test_callbacks_are_given_by_name_or_path_and_their_arguments_after_them(name: str) -> None:
    made = command(f"--trainer.callbacks+={name}", "--trainer.callbacks.logging_interval=epoch", run=False)
    assert [getattr(each, "logging_interval", None) for each in made.trainer.callbacks][:1] == ["epoch"]


@pytest.mark.parametrize(
    ("written", "loggers"),
    [("false", 0), ("False", 0), ("true", 1), ("null", 1), ("csv", 1), ("[csv]", 1), ("drivetrain.CSVLogger", 1)],
)
def test_a_switch_for_trackers_is_no_name_of_one(written: str, loggers: int) -> None:
    place = ["--trainer.logger.save_dir=logs"] if written.endswith("CSVLogger") else []
    made = command(f"--trainer.logger={written}", *place, run=False)
    assert [type(each) for each in made.trainer.loggers] == [CSVLogger] * loggers


def test_null_leaves_out_callbacks_and_the_profiler() -> None:
    made = command("--trainer.callbacks=null", "--trainer.profiler=null", "--trainer.max_time=null", run=False)
    assert (made.config.trainer.callbacks, made.config.trainer.profiler, made.trainer.max_time) == (None, None, None)


def test_without_a_class_the_command_line_chooses_one() -> None:
    made = command(f"--model={HERE}.Deep", "--model.depth=2", f"--data={HERE}.Ones", model=None, data=None, run=False)
    assert isinstance(made.model, Deep)
    assert (made.model.depth, made.datamodule.batch_size) == (2, 4)


def test_a_base_class_with_subclass_mode_takes_its_subclasses_by_name() -> None:
    made = command("--model=Deep", "--model.depth=2", subclass_mode_model=True, run=False)
    assert isinstance(made.model, Deep)


def test_functions_that_return_the_classes_do_too() -> None:
    def wide(lr: float, factor: int = 2) -> Line:
        return Line(lr, width=factor)

    def brief(max_steps: int = 1, callbacks: list[Callback] | None = None) -> Trainer:
        return Trainer(**{**QUIET, "max_steps": max_steps, "callbacks": callbacks})

    made = TrainerCLI(wide, Ones, trainer_class=brief, args=["fit", "--model.lr=0.5", "--model.factor=3"])
    assert (made.model.layer.out_features, made.trainer.global_step) == (3, 1)


def test_links_carry_values_before_and_after_objects_are_made() -> None:
    class Linked(TrainerCLI):
        def add_arguments_to_parser(self, parser: TrainerArgumentParser) -> None:
            parser.link_arguments("data.batch_size", "model.lr", compute_fn=float)
            parser.link_arguments("data.width", "model.width", apply_on="instantiate")

    made = command("--data.batch_size=2", kind=Linked, run=False)
    assert (made.model.lr, made.model.layer.out_features) == (2, 3)
    assert made.model.hparams["width"] == 3


def test_callbacks_of_every_run_have_options_of_their_own() -> None:
    class Stopping(TrainerCLI):
        def add_arguments_to_parser(self, parser: TrainerArgumentParser) -> None:
            parser.add_class_args(EarlyStopping, "stopping")
            parser.set_defaults({"stopping.monitor": "loss"})

    made = command("--stopping.patience=7", kind=Stopping, run=False)
    assert [(each.monitor, each.patience) for each in made.trainer.callbacks if isinstance(each, EarlyStopping)] == [
        ("loss", 7)
    ]


def test_hooks_run_around_the_subcommand_and_around_the_making_of_objects() -> None:
    seen: list[str] = []

    class Noting(TrainerCLI):
        def before_instantiate_classes(self) -> None:
            seen.append(f"before, {hasattr(self, 'model')}")

        def after_instantiate_classes(self) -> None:
            seen.append(f"after, {hasattr(self, 'trainer')}")

        def before_validate(self) -> None:
            seen.append("before validate")

        def after_validate(self) -> None:
            seen.append("after validate")

        def before_fit(self) -> None:
            seen.append("fit")

    made = command("validate", "--verbose=false", kind=Noting)
    assert seen == ["before, False", "after, True", "before validate", "after validate"]
    assert "val_loss" in made.trainer.callback_metrics


def test_a_method_of_the_trainer_can_become_a_subcommand() -> None:
    class Counting(Trainer):
        def count(self, model: Line, upto: int, step: int = 1) -> None:
            """Count.

            Args:
                model: The task.
                upto: Where to end.
                step: How far to go at once.
            """
            self.counted = list(range(0, upto, step))

    class CountingCLI(TrainerCLI):
        @staticmethod
        def subcommands() -> dict[str, set[str]]:
            return {**TrainerCLI.subcommands(), "count": {"model"}}

    made = command("count", "--upto=5", "--step=2", kind=CountingCLI, data=None, trainer_class=Counting)
    assert made.trainer.counted == [0, 2, 4]


@pytest.mark.slow
def test_variables_are_read_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINER_FIT__MODEL__LR", "0.5")
    monkeypatch.setenv("TRAINER_FIT__TRAINER__MAX_STEPS", "1")
    made = command("fit", parser_kwargs={"default_env": True})
    assert (made.model.lr, made.trainer.global_step) == (0.5, 1)
    assert command("fit").model.lr == 0.1


def test_values_can_be_given_as_a_dict() -> None:
    made = TrainerCLI(Line, Ones, args={"model": {"lr": 0.5}, "trainer": QUIET}, run=False)
    assert (made.model.lr, made.trainer.max_epochs) == (0.5, 1)


def test_one_seed_makes_one_model() -> None:
    weights = [command(f"--seed_everything={seed}", run=False).model.layer.weight.item() for seed in (1, 1, 2)]
    assert weights[0] == weights[1] != weights[2]


def test_a_seed_that_was_set_is_kept_where_one_is_to_be_chosen_and_written_down() -> None:
    set_seed(123)
    assert command(run=False).config.seed_everything == 123
    assert command(run=False, seed_everything_default=7).config.seed_everything == 7
    assert command("--seed_everything=false", run=False).config.seed_everything is False


def test_a_new_trainer_of_the_same_configuration_takes_other_arguments() -> None:
    made = command("--trainer.max_steps=7", run=False)
    other = made.instantiate_trainer(max_epochs=9)
    assert (other.max_epochs, other.max_steps, made.trainer.max_epochs) == (9, 7, 1)


MISTAKES: dict[str, tuple[list[str], list[str]]] = {
    "unknown option": (["--trainer.max_epoch=3"], ["--trainer.max_epoch", "Did you mean 'trainer.max_epochs'"]),
    "option of a group": (["--lr=3"], ["Did you mean 'model.lr'"]),
    "wrong type": (["--trainer.max_epochs=many"], ["trainer.max_epochs", "int", "many"]),
    "unknown class": (["--trainer.callbacks+=EarlyStoping"], ["EarlyStoping", "Did you mean 'EarlyStopping'"]),
    "unknown optimizer": (["--optimizer=AdamX"], ["AdamX", "Did you mean 'Adam"]),
    "unknown key of a file": (["--config=typo.yaml"], ["lrr", "Did you mean 'model.lr'"]),
    "no such file": (["--config=none.yaml"], ["none.yaml"]),
    "value that the Trainer refuses": (["--trainer.max_epochs=-5"], ["max_epochs=-5", "non-negative integer or -1"]),
    "precision": (["--trainer.precision=b16"], ["b16", "bf16"]),
    "seed": (["--seed_everything=-1"], ["-1", "2**32"]),
    "callback's argument": (
        ["--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=a", "--trainer.callbacks.mode=up"],
        ["mode='up'", "min"],
    ),
}
OF_SUBCOMMANDS: dict[str, tuple[list[str], list[str]]] = {
    "unknown subcommand": (["fut"], ["fut", "fit"]),
    "unknown option of a subcommand": (["fit", "--model.lrr=3"], ["--model.lrr", "Did you mean 'model.lr'"]),
    "no such checkpoint": (["validate", "--ckpt_path=nowhere"], ["nowhere"]),
}


@pytest.mark.parametrize(
    ("given", "expected", "run"),
    [*((*case, False) for case in MISTAKES.values()), *((*case, True) for case in OF_SUBCOMMANDS.values())],
    ids=[*MISTAKES, *OF_SUBCOMMANDS],
)
def test_a_mistake_is_a_message_and_an_exit_code(
    given: list[str], expected: list[str], run: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("typo.yaml").write_text("model: {lrr: 1}")
    with pytest.raises(SystemExit, match="2"):
        command(*given, run=run)
    printed = capsys.readouterr().err
    assert all(words in printed for words in expected), printed
    assert len(printed.splitlines()) < 20


def test_help_has_the_docstrings_in_groups(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        command("fit", "--help")
    printed = " ".join(capsys.readouterr().out.split())
    described = dict(re.findall(r"^    (\w+): (.*)$", inspect.getdoc(Trainer) or "", re.MULTILINE))
    for words in (
        " ".join((inspect.getdoc(Trainer.fit) or "").split("\n\n")[0].split()),
        "A line through the origin: --model",
        "The learning rate. (type: float, default: 0.1)",
        "Batches of ones:",
        described["max_epochs"],
    ):
        assert words in printed


def test_without_jsonargparse_the_message_has_the_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drivetrain.trainer.cli.instantiation.IS_INSTALLED", False)
    with pytest.raises(ValueError, match=r"drivetrain\[cli\]"):
        command("fit")


def test_callbacks_among_the_defaults_belong_to_every_run() -> None:
    stopping = {"class_path": "drivetrain.EarlyStopping", "init_args": {"monitor": "loss"}}
    made = command("--trainer.callbacks+=Timer", run=False, trainer_defaults={"callbacks": [stopping]})
    assert [type(each).__name__ for each in made.trainer.callbacks] == ["Timer", "EarlyStopping"]


@pytest.mark.slow
def test_the_configuration_of_a_run_can_start_it_again() -> None:
    made = command("fit", "--model.lr=0.5", "--optimizer=AdamW", save_config_callback=SaveConfigCallback)
    written = yaml.safe_load(Path("config.yaml").read_text())
    assert written["model"] == {"lr": 0.5, "width": 1}
    again = command("fit", "--config=config.yaml")
    assert torch.equal(again.model.layer.weight, made.model.layer.weight)
