from __future__ import annotations

import inspect

import pytest

import drivetrain.callbacks as callbacks
from drivetrain.callbacks import Callback, EarlyStopping, EvaluationGather, ModelCheckpoint
from drivetrain.callbacks.model_summary import summarize

HOOKS = [name for name, _ in inspect.getmembers(Callback, inspect.isfunction) if name.startswith("on_")]
HOOKS += ["setup", "teardown"]


@pytest.mark.parametrize("name", HOOKS)
def test_every_hook_does_nothing_by_itself_and_says_when_it_is_called(name: str) -> None:
    hook = getattr(Callback, name)
    parameters = list(inspect.signature(hook).parameters.values())
    assert [parameter.name for parameter in parameters[:3]] == ["self", "trainer", "task"]
    given = [None for parameter in parameters[1:] if parameter.default is inspect.Parameter.empty]
    assert hook(Callback(), *given) is None
    assert hook.__doc__.startswith("Called ")


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
