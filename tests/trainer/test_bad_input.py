"""Errors are part of the interface: each says what was given, what is allowed, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from drivetrain import (
    Accelerator,
    Callback,
    CheckpointError,
    ConfigurationError,
    DataError,
    DataModule,
    DeviceNotAvailableError,
    EarlyStopping,
    ModelCheckpoint,
    Task,
)
from tests.pool import ProcessesFailed, run_in_processes
from tests.trainer.tasks import Weight, fitted, ones, quiet, stream

# arguments of the Trainer: name, arguments, words of the message


class Stateful(Callback):
    def state_dict(self) -> dict[str, Any]:
        return {"n": 1}


ARGUMENTS: list[tuple[str, dict[str, Any], list[str]]] = [
    ("strategy", {"strategy": "dpp"}, ["dpp", "ddp", "single", "Did you mean"]),
    ("precision", {"precision": "bf61"}, ["bf61", "bf16", "Did you mean"]),
    ("precision number", {"precision": 17}, ["17", "16"]),
    ("accelerator", {"accelerator": "gpuu"}, ["gpuu", "gpu", "cpu"]),
    ("strategy of another type", {"strategy": 3}, ["int", "ddp"]),
    ("devices", {"devices": "two"}, ["devices='two'", "auto", "number of processes"]),
    ("no devices", {"devices": 0}, ["devices=0"]),
    ("nodes without a launcher", {"num_nodes": 2}, ["num_nodes=2", "drivetrain launch --num_machines 2"]),
    ("limit over 1.0", {"limit_train_batches": 1.5}, ["limit_train_batches=1.5", "whole number", "fraction"]),
    ("negative limit", {"limit_val_batches": -1}, ["limit_val_batches=-1"]),
    ("limit as text", {"limit_test_batches": "all"}, ["limit_test_batches='all'"]),
    ("limit as bool", {"limit_predict_batches": True}, ["limit_predict_batches=True"]),
    ("overfit", {"overfit_batches": 2.5}, ["overfit_batches=2.5"]),
    ("interval of nothing", {"val_check_interval": 0}, ["val_check_interval=0", "0.25"]),
    ("interval over an epoch", {"val_check_interval": 1.5}, ["val_check_interval=1.5", "whole number of batches"]),
    (
        "a fraction of no epoch",
        {"val_check_interval": 0.5, "check_val_every_n_epoch": None},
        ["val_check_interval=0.5", "should be an integer or a time-based duration"],
    ),
    ("interval as words", {"val_check_interval": "often"}, ["val_check_interval='often'", "DD:HH:MM:SS"]),
    ("every 0 epochs", {"check_val_every_n_epoch": 0}, ["check_val_every_n_epoch=0", "at least 1"]),
    ("time", {"max_time": "an hour"}, ["max_time='an hour'", "timedelta", "DD:HH:MM:SS"]),
    ("time of nonsense", {"max_time": {"fortnights": 1}}, ["fortnights", "timedelta"]),
    ("epochs", {"max_epochs": -2}, ["max_epochs=-2", "-1"]),
    ("half an epoch", {"max_epochs": 1.5}, ["max_epochs=1.5", "non-negative integer"]),
    ("steps", {"max_steps": "100"}, ["max_steps='100'"]),
    ("accumulation", {"accumulate_grad_batches": 0}, ["accumulate_grad_batches=0", "at least 1"]),
    ("clipping", {"gradient_clip_val": -1.0}, ["gradient_clip_val=-1.0"]),
    ("clipping by nothing known", {"gradient_clip_algorithm": "nrom"}, ["nrom", "norm, value", "Did you mean 'norm'"]),
    ("deterministic", {"deterministic": "yes"}, ["deterministic='yes'", "warn"]),
    ("a callback's class", {"callbacks": [EarlyStopping]}, ["the class EarlyStopping", "instances"]),
    ("no callback", {"callbacks": [print]}, ["drivetrain.Callback"]),
    ("twins", {"callbacks": [Stateful(), Stateful()]}, ["Stateful", "state_key", "different arguments"]),
    (
        "checkpointing off and on",
        {"callbacks": ModelCheckpoint(), "enable_checkpointing": False},
        ["enable_checkpointing=False", "ModelCheckpoint"],
    ),
    ("logger", {"logger": "tensorbord"}, ["tensorbord", "tensorboard"]),
    ("an engine and a precision", {"accelerator": "ENGINE", "precision": "bf16"}, ["precision", "Accelerator"]),
]


@pytest.mark.parametrize(("arguments", "words"), [case[1:] for case in ARGUMENTS], ids=[case[0] for case in ARGUMENTS])
def test_an_argument_that_cannot_be_is_refused_when_the_trainer_is_built(
    arguments: dict[str, Any], words: list[str]
) -> None:
    if arguments.get("accelerator") == "ENGINE":
        arguments = {**arguments, "accelerator": Accelerator(cpu=True)}
    with pytest.raises((ConfigurationError, DeviceNotAvailableError)) as raised:
        quiet(**arguments)
    for word in words:
        assert word in str(raised.value)


def test_a_device_that_is_not_there_is_named() -> None:
    if torch.cuda.is_available():
        pytest.skip("needs a machine without CUDA, to ask for it in vain")
    with pytest.raises(DeviceNotAvailableError, match="cuda"):
        quiet(accelerator="cuda")


def devices_against_the_launcher() -> list[str]:
    messages = []
    for options in ({"devices": 3}, {"num_nodes": 2}, {"strategy": "single"}):
        with pytest.raises(ConfigurationError) as raised:
            quiet(**options)
        messages.append(str(raised.value))
    return messages


def test_what_contradicts_the_launcher_is_refused_on_every_rank() -> None:
    for devices, nodes, strategy in run_in_processes(devices_against_the_launcher, 2):
        for word, message in (
            ("devices=3", devices),
            ("2 process(es)", devices),
            ("--num_processes 3", devices),
            ("num_nodes=2", nodes),
            ("'single'", strategy),
            ("'ddp'", strategy),
        ):
            assert word in message


# what is given to fit


class NoStep(Task):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=0.1)


class Numbered(NoStep):
    def training_step(self, batch: Any, batch_idx: int, optimizer_idx: int) -> Any:  # type: ignore[override]
        return None


class NoOptimizers(Task):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None


class Empty(Weight):
    """A task whose train_dataloader is not defined."""


FITS: list[tuple[str, Callable[[], Any], list[str]]] = [
    ("an optimizer's number", lambda: quiet().fit(Numbered(), ones(1)), ["Remove the `optimizer_idx` argument"]),
    ("no training_step", lambda: quiet().fit(NoStep(), ones(1)), ["NoStep", "training_step(self, batch, batch_idx)"]),
    ("no optimizers", lambda: quiet().fit(NoOptimizers(), ones(1)), ["NoOptimizers", "configure_optimizers"]),
    ("a class", lambda: quiet().fit(Weight, ones(1)), ["the class Weight", "instance"]),
    ("a module", lambda: quiet().fit(nn.Linear(1, 1), ones(1)), ["Linear", "drivetrain.Task"]),
    ("no data", lambda: quiet().fit(Empty()), ["train_dataloaders", "Empty", "train_dataloader()"]),
    ("an empty dataset", lambda: fitted(Weight(), ones(0)), ["train loader is empty", "0 samples"]),
    (
        "all dropped",
        lambda: fitted(Weight(), torch.utils.data.DataLoader([1.0], batch_size=2, drop_last=True)),
        ["1 samples", "batch_size=2", "drop_last=True", "drop_last=False"],
    ),
    ("an empty stream", lambda: fitted(Weight(), stream([])), ["no batch in a whole epoch"]),
    ("an empty validation", lambda: fitted(Weight(), ones(1), ones(0)), ["val loader is empty"]),
    ("no loader", lambda: fitted(Weight(), 3), ["train data is a int", "DataLoader"]),
    (
        "loaders and a module",
        lambda: quiet().fit(Weight(), ones(1), datamodule=DataModule()),
        ["both loaders and a datamodule"],
    ),
    ("not a module", lambda: quiet().fit(Weight(), datamodule=ones(1)), ["datamodule", "DataLoader"]),
    (
        "a fraction of a stream",
        lambda: fitted(Weight(), stream([1.0]), limit_train_batches=0.5),
        ["limit_train_batches=0.5", "length is not known", "whole number"],
    ),
    (
        "a fraction that leaves nothing",
        lambda: fitted(Weight(), ones(3), limit_train_batches=0.1),
        ["limit_train_batches=0.1 of 3 batches", "0.333"],
    ),
    (
        "an interval beyond the epoch",
        lambda: fitted(Weight(), ones(3), ones(1), val_check_interval=5),
        ["val_check_interval=5", "3 batches", "check_val_every_n_epoch=None"],
    ),
    (
        "a fraction of an endless epoch",
        lambda: fitted(Weight(), stream([1.0]), ones(1), val_check_interval=0.5),
        ["val_check_interval=0.5", "length is not known"],
    ),
    ("no checkpoint", lambda: quiet().fit(Weight(), ones(1), ckpt_path="/nowhere"), ["/nowhere", "ModelCheckpoint"]),
    ("no best one", lambda: quiet().fit(Weight(), ones(1), ckpt_path="best"), ["'best'", "ModelCheckpoint"]),
    ("validate nothing", lambda: quiet().validate(), ["validate()", "fit()"]),
    ("validate without data", lambda: quiet().validate(Weight()), ["validate()", "val_dataloader()"]),
    ("test without a step", lambda: quiet().test(Weight(), ones(1)), ["Weight", "test_step(self, batch, batch_idx)"]),
    ("predict without data", lambda: quiet().predict(Weight()), ["predict()", "predict_dataloader()"]),
]


@pytest.mark.parametrize(("run", "words"), [case[1:] for case in FITS], ids=[case[0] for case in FITS])
def test_what_cannot_be_run_is_refused(run: Callable[[], Any], words: list[str]) -> None:
    with pytest.raises((ConfigurationError, DataError, CheckpointError)) as raised:
        run()
    for word in words:
        assert word in str(raised.value)


# configure_optimizers


def of(make: Callable[[Weight, SGD], Any]) -> Weight:
    """A task whose configure_optimizers returns what `make` makes of it and an optimizer."""

    class Configured(Weight):
        def configure_optimizers(self) -> Any:
            return make(self, SGD(self.parameters(), lr=0.1))

    return Configured()


def plateau(optimizer: SGD, **options: Any) -> dict[str, Any]:
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": ReduceLROnPlateau(optimizer), **options}}


def step(optimizer: SGD, **options: Any) -> dict[str, Any]:
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": StepLR(optimizer, 1), **options}}


CONFIGURED: list[tuple[str, Callable[[Weight, SGD], Any], list[str]]] = [
    ("a number", lambda t, o: 0.1, ["a float", "an optimizer"]),
    ("a class", lambda t, o: SGD, ["a type", "an optimizer"]),
    ("a generator", lambda t, o: t.parameters(), ["a generator"]),
    ("an empty list", lambda t, o: [], ["a list of []"]),
    ("a list with a hole", lambda t, o: [o, None], ["['SGD', 'NoneType']"]),
    ("a mixture", lambda t, o: [o, {"optimizer": o}], ["dict"]),
    ("lists with a wrong one", lambda t, o: ([o, 3], []), ["a int", "an optimizer was expected"]),
    ("three lists", lambda t, o: ([o], [], []), ["a tuple of ['list', 'list', 'list']"]),
    ("a dict without one", lambda t, o: {"lr_scheduler": StepLR(o, 1)}, ["without the key 'optimizer'"]),
    ("a misspelt key", lambda t, o: {"optimiser": o}, ["'optimiser'", "Did you mean 'optimizer'"]),
    ("a plural", lambda t, o: {"optimizer": o, "lr_schedulers": []}, ["'lr_schedulers'", "Did you mean"]),
    ("a scheduler's key", lambda t, o: step(o, intervall="step"), ["'intervall'", "Did you mean 'interval'"]),
    ("an interval", lambda t, o: step(o, interval="batch"), ["'batch'", "'epoch' or 'step'"]),
    ("a frequency", lambda t, o: step(o, frequency=0), ["frequency", "at least 1"]),
    ("no scheduler", lambda t, o: {"optimizer": o, "lr_scheduler": {"interval": "step"}}, ["must have the key"]),
    ("a scheduler of nothing", lambda t, o: [[o], [3]], ["step()", "int"]),
    ("an unwatched plateau", lambda t, o: plateau(o), ["ReduceLROnPlateau", "'monitor'"]),
    ("an unlogged monitor", lambda t, o: plateau(o, monitor="val_lost"), ["'val_lost'", "val_loss", "strict=False"]),
    ("an emptied optimizer", lambda t, o: o.param_groups[0]["params"].clear() or o, ["SGD has no parameters"]),
]


@pytest.mark.parametrize(("make", "words"), [case[1:] for case in CONFIGURED], ids=[case[0] for case in CONFIGURED])
def test_optimizers_that_make_no_sense_are_refused(make: Callable[..., Any], words: list[str]) -> None:
    with pytest.raises(ConfigurationError) as raised:
        fitted(of(make), ones(2), ones(2))
    for word in words:
        assert word in str(raised.value)


def test_torchs_own_complaint_about_an_empty_list_of_parameters_is_explained() -> None:
    with pytest.raises((ConfigurationError, ValueError), match="empty parameter list"):
        fitted(of(lambda task, optimizer: SGD([], lr=0.1)), ones(1))


# what a step does


def doing(training: Callable[[Weight, Any], Any] | None = None, **methods: Callable[..., Any]) -> Weight:
    """A task with another training_step or other methods."""
    if training is not None:
        methods["training_step"] = lambda self, batch, batch_idx: training(self, batch[0])
    kind: type[Weight] = type("Doing", (Weight,), methods)
    return kind()


def log_twice(task: Weight, x: Any) -> Any:
    task.log("loss", x.mean())
    task.log("loss", x.mean(), on_epoch=True)
    return task.w * x.mean()


def logging(*args: Any, **kwargs: Any) -> Callable[[Weight, Any], Any]:
    def training_step(task: Weight, x: Any) -> Any:
        task.log(*args, **kwargs)
        return task.w * x.mean()

    return training_step


def hook(name: str) -> Weight:
    """A task that logs where it must not."""
    return doing(**{name: lambda self, *args: self.log("value", 1.0)})


STEPS: list[tuple[str, Callable[[], Weight], list[str]]] = [
    ("a text", lambda: doing(lambda t, x: "loss"), ["'loss'", "scalar tensor", "None"]),
    ("a number", lambda: doing(lambda t, x: 1.0), ["1.0", "scalar tensor"]),
    ("a dict without loss", lambda: doing(lambda t, x: {"los": t.w}), ["['los']", "'loss'"]),
    ("a dict with a number", lambda: doing(lambda t, x: {"loss": 1.0}), ["'loss'"]),
    ("a vector", lambda: doing(lambda t, x: t.w * x.repeat(2, 1)), ["shape (2, 1)", ".mean()"]),
    ("a detached loss", lambda: doing(lambda t, x: (t.w * x.mean()).detach()), ["detach()", "None"]),
    (
        "two meanings",
        lambda: doing(log_twice),
        ["'loss' is logged with two meanings", "on_epoch=True", "different names"],
    ),
    ("a vector logged", lambda: doing(logging("v", torch.ones(3))), ["'v'", "(3,)", ".mean()"]),
    ("a text logged", lambda: doing(logging("v", "high")), ["'v'", "str"]),
    ("a reduction", lambda: doing(logging("v", 1.0, reduce_fx="median")), ["'median'", "mean, sum, max, min"]),
    ("nothing kept", lambda: doing(logging("v", 1.0, on_step=False, on_epoch=False)), ["keeps no value"]),
    (
        "a step of an epoch",
        lambda: doing(on_train_epoch_end=lambda self: self.log("v", 1.0, on_step=True)),
        ["on_epoch"],
    ),
    ("logging in setup", lambda: hook("setup"), ["'value'", "step or epoch"]),
    ("logging in on_fit_start", lambda: hook("on_fit_start"), ["'value'", "step or epoch"]),
    (
        "logging in a transfer hook",
        lambda: doing(on_after_batch_transfer=lambda self, batch, index: self.log("value", 1.0)),
        ["You can't", "'value'", "moves a batch"],
    ),
    ("logging in on_validation_end", lambda: hook("on_validation_end"), ["on_validation_end"]),
    ("logging in on_train_end", lambda: hook("on_train_end"), ["on_train_end"]),
    ("logging in on_fit_end", lambda: hook("on_fit_end"), ["'value'"]),
    ("manual_backward", lambda: doing(lambda t, x: t.manual_backward(t.w * 1.0)), ["automatic_optimization = False"]),
    (
        "an optimizer_step without its closure",
        lambda: doing(optimizer_step=lambda self, *args: None),
        ["Doing.optimizer_step", "optimizer_closure"],
    ),
]


@pytest.mark.parametrize(("make", "words"), [case[1:] for case in STEPS], ids=[case[0] for case in STEPS])
def test_steps_that_make_no_sense_are_refused_and_a_second_fit_works(
    make: Callable[[], Weight], words: list[str]
) -> None:
    trainer = quiet(max_epochs=2)
    with pytest.raises(ConfigurationError) as raised:
        trainer.fit(make(), ones(2), ones(2))
    for word in words:
        assert word in str(raised.value)
    assert (trainer.stage, trainer.sanity_checking) == (None, False)
    begun = trainer.current_epoch
    task = Weight()
    trainer.fit(task, ones(2), ones(2))
    assert task.batches == [(e, b, 1.0) for e in range(begun, 2) for b in range(2)]


def test_a_value_that_goes_nowhere_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="`self.trainer` reference is not registered"):
        Weight().log("value", 1.0)
    with pytest.warns(UserWarning, match="logger=True.*but have no logger"):
        quiet(max_epochs=1).fit(doing(logging("value", 1.0, logger=True)), ones(1))


class NoRows(Weight):
    """Its batches have no rows that could be counted."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("value", 1.0, on_epoch=True, **self.options)
        return self.w * 1.0


def test_a_batch_whose_size_cannot_be_found_is_no_matter_until_a_mean_needs_it() -> None:
    batches = [{"text": "a"}, {"text": "b"}]
    with pytest.raises(DataError) as raised:
        fitted(NoRows(), batches)
    assert "batch_size=" in str(raised.value)
    assert float(fitted(NoRows(batch_size=2), batches).callback_metrics["value"]) == 1.0
    assert float(fitted(NoRows(reduce_fx="sum"), batches).callback_metrics["value"]) == 2.0


@pytest.mark.filterwarnings("ignore:Error detected in SqrtBackward0")
def test_detect_anomaly_raises_where_a_backward_computes_nan() -> None:
    task = doing(lambda t, x: torch.sqrt(t.w - 1) * 1.0)
    with pytest.raises(RuntimeError, match=r"SqrtBackward0.*nan"):
        fitted(task, ones(1), detect_anomaly=True)
    assert not torch.is_anomaly_enabled()


def test_what_optimizing_by_hand_leaves_to_the_task_is_not_silently_ignored() -> None:
    for option, value in (("accumulate_grad_batches", 2), ("gradient_clip_val", 1.0)):
        with pytest.raises(ConfigurationError) as raised:
            fitted(doing(automatic_optimization=False), ones(1), **{option: value})
        assert f"{option}={value}" in str(raised.value)
        assert "automatic_optimization = False" in str(raised.value)


def test_times_may_be_given_in_three_ways() -> None:
    for given in (timedelta(hours=1), {"hours": 1}, "00:01:00:00"):
        assert quiet(max_time=given).max_time == timedelta(hours=1)


# several processes


def fail_on_one_rank() -> None:
    class Failing(Weight):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.global_rank == 1:
                raise ValueError("only here")
            return super().training_step(batch, batch_idx)

    fitted(Failing(), ones(4))


def test_an_error_on_one_rank_leaves_fit_at_once_without_waiting_for_peers() -> None:
    with pytest.raises(ProcessesFailed) as raised:
        run_in_processes(fail_on_one_rank, 2, timeout=30)
    assert 1 in raised.value.ranks  # its peer may be the first to be seen, by the end of their connection
    assert raised.value.hung == []
    assert "ValueError: only here" in raised.value.tracebacks[1]


def agree_about_an_error() -> list[str]:
    """Errors that every rank finds: all raise, and a second fit over the same processes works."""
    messages = []
    for task, train in ((NoStep(), ones(4)), (doing(log_twice), ones(4)), (Weight(), ones(0))):
        with pytest.raises((ConfigurationError, DataError)) as raised:
            fitted(task, train)
        messages.append(str(raised.value)[:20])
    task = Weight()
    fitted(task, ones(4))
    return [*messages, str(task.gradients)]


def test_after_an_error_on_all_ranks_nothing_hangs() -> None:
    first, second = run_in_processes(agree_about_an_error, 2, timeout=30)
    assert first == second
    assert first[-1] == "[1.0, 1.0]"
