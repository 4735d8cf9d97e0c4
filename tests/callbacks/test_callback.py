from __future__ import annotations

import copy
import inspect
import pickle
from pathlib import Path
from typing import Any

import pytest

import drivetrain.callbacks as callbacks
from drivetrain import ConfigurationError, DrivetrainDeprecationWarning, Duration, Trainer
from drivetrain.callbacks import Callback, EarlyStopping, EvaluationGather, LossSpikeGuard, ModelCheckpoint, Timer
from drivetrain.callbacks.model_summary import summarize
from tests.callbacks.tasks import Scripted, fit, numbers
from tests.pool import device
from tests.trainer.tasks import Weight, fitted, ones

HOOKS = [name for name, _ in inspect.getmembers(Callback, inspect.isfunction) if name.startswith("on_")]
HOOKS += ["setup", "teardown"]


@pytest.mark.parametrize("name", HOOKS)
def test_every_hook_does_nothing_by_itself_and_says_when_it_is_called(name: str) -> None:
    hook = getattr(Callback, name)
    parameters = list(inspect.signature(hook).parameters.values())
    assert [parameter.name for parameter in parameters[:3]] == ["self", "trainer", "task"]
    given = [None for parameter in parameters[1:] if parameter.default is inspect.Parameter.empty]
    assert hook(Callback(), *given) is None
    assert hook.__doc__.startswith("Run code ")


def test_the_hooks_are_those_of_lightning_and_one_more() -> None:
    starts_and_ends = ["fit", "sanity_check", "train", "train_epoch", "train_batch"]
    for kind in ("validation", "test", "predict"):
        starts_and_ends += [kind, f"{kind}_epoch", f"{kind}_batch"]
    expected = {f"on_{name}_{side}" for name in starts_and_ends for side in ("start", "end")}
    expected |= {"on_exception", "on_save_checkpoint", "on_load_checkpoint", "on_before_zero_grad"}
    expected |= {"on_before_backward", "on_after_backward", "on_before_optimizer_step", "setup", "teardown"}
    expected |= {"on_gradients_ready"}
    assert set(HOOKS) == expected


@pytest.mark.parametrize("name", [name for name in callbacks.__all__ if name != "Callback"])
def test_an_overridden_hook_has_the_arguments_of_the_base(name: str) -> None:
    for hook in HOOKS:
        assert inspect.signature(getattr(getattr(callbacks, name), hook)) == inspect.signature(getattr(Callback, hook))


def test_state_keys_tell_callbacks_of_one_class_apart() -> None:
    keys = [
        callback.state_key
        for callback in (
            ModelCheckpoint(monitor="val_loss"),
            ModelCheckpoint(monitor="val_acc", mode="max"),
            ModelCheckpoint(every_n_train_steps=10),
            EarlyStopping("val_loss"),
            EarlyStopping("val_acc", mode="max"),
            EvaluationGather(path="a.pt"),
        )
    ]
    assert len(set(keys)) == len(keys)
    assert keys[3] == "EarlyStopping{'monitor': 'val_loss', 'mode': 'min'}"
    assert Callback().state_key == "Callback"


def test_the_summary_counts_every_parameter_once() -> None:
    from torch import nn

    shared = nn.Linear(10, 10)
    model = nn.ModuleDict({"first": nn.Sequential(nn.Linear(100, 20), nn.ReLU()), "a": shared, "b": shared})
    shared.bias.requires_grad = False
    lines = summarize(model, max_depth=2).splitlines()
    assert [line.split() for line in lines[2:-2]] == [
        ["first", "Sequential", "2.0", "K", "train"],
        ["first.0", "Linear", "2.0", "K", "train"],
        ["first.1", "ReLU", "0", "train"],
        ["a", "Linear", "110", "train"],
    ]
    assert lines[-1] == "2,130 parameters (0.009 MB), 2,120 of them trainable"
    assert summarize(model, max_depth=0).splitlines() == [lines[-1]]


FIRST_FOLD, SECOND_FOLD = [1.0, 0.1, 0.5, 0.6, 0.7, 0.8], [1.0, 0.9, 0.8, 0.7, 0.6, 0.5]


def stateful(root: Any) -> list[Callback]:
    return [
        EarlyStopping("val_loss", patience=2),
        ModelCheckpoint(root, monitor="val_loss", filename="{epoch}-{val_loss:.1f}"),
        Timer(duration={"hours": 1}),
        LossSpikeGuard(),
    ]


@pytest.mark.parametrize("passed_on", [list, copy.deepcopy, lambda given: pickle.loads(pickle.dumps(given))])
def test_callbacks_given_to_another_trainer_begin_as_new_ones(passed_on: Any, tmp_path: Path) -> None:
    """What a run leaves in them, such as a best value and a checkpoint, is no other run's."""
    used = stateful(tmp_path)
    assert fit(Scripted(FIRST_FOLD), tmp_path, 6, used).current_epoch == 4
    used[3].skipped.append((1, 1))
    given = passed_on(used)
    given[2].load_state_dict({"time_elapsed": {"train": 7200.0}})  # as if the first run had taken all of its time
    trainer = fit(Scripted(SECOND_FOLD), tmp_path, 6, given)
    stopping, saving, timer, guard = given
    assert (trainer.current_epoch, stopping.wait_count, stopping.stopping_reason_message) == (6, 0, None)
    assert Path(saving.best_model_path).name == "epoch=5-val_loss=0.5.ckpt"
    assert len(saving.best_k_models) == 1
    assert guard.skipped == []
    assert timer.time_elapsed() < 7200.0


def test_a_second_fit_of_one_trainer_goes_on_with_their_state(tmp_path: Path) -> None:
    stopping, saving = stateful(tmp_path)[:2]
    task = Scripted(FIRST_FOLD)
    trainer = fit(task, tmp_path, 2, [stopping, saving])
    trainer.max_epochs = 6
    trainer.fit(task, numbers(8, 4), numbers(4, 4))
    assert (trainer.current_epoch, float(stopping.best_score)) == (4, pytest.approx(0.1))
    assert Path(saving.best_model_path).name == "epoch=1-val_loss=0.1.ckpt"


def test_the_best_checkpoint_of_another_trainers_run_is_refused(tmp_path: Path) -> None:
    """A Trainer that has trained takes none of a callback that has served another one since."""
    saving = stateful(tmp_path)[1]
    first = fit(Scripted(FIRST_FOLD), tmp_path, 2, [saving])
    fit(Scripted(SECOND_FOLD), tmp_path, 2, [saving])
    with pytest.raises(ConfigurationError, match="another Trainer has since used the ModelCheckpoint"):
        first.validate(dataloaders=numbers(4, 4), ckpt_path="best")
    only_tests = Trainer(callbacks=saving, logger=False, enable_progress_bar=False, accelerator=device())
    task = Scripted(SECOND_FOLD)
    assert only_tests.validate(task, numbers(4, 4), ckpt_path="best", verbose=False) == [{"val_loss": 1.0}]


def test_the_old_name_of_a_schedule_is_taken_and_deprecated(tmp_path: Path) -> None:
    every = Duration.of("4 samples", "schedule")

    class Old(Callback):
        rhythm = every

        def on_train_end(self, trainer: Trainer, task: Any) -> None:
            self.samples = trainer.progress.count(every.unit)

    callback = Callback()
    with pytest.warns(DrivetrainDeprecationWarning, match=r"rhythm is deprecated.*Use schedule"):
        callback.rhythm = every
    with pytest.warns(DrivetrainDeprecationWarning, match=r"rhythm is deprecated.*Use schedule"):
        assert callback.rhythm is callback.schedule is every
    old = Old()
    with pytest.warns(DrivetrainDeprecationWarning, match=r"Old\.rhythm is deprecated.*Use schedule"):
        fitted(Weight(), ones(2), callbacks=old, default_root_dir=tmp_path)
    assert old.samples > 0
