from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from drivetrain import ConfigurationError
from drivetrain.callbacks import Callback, LambdaCallback
from tests.callbacks.tasks import Scripted, fit


def test_every_hook_can_be_given() -> None:
    hooks = {name for name, _ in inspect.getmembers(Callback, inspect.isfunction) if name.startswith("on_")}
    assert set(inspect.signature(LambdaCallback).parameters) == hooks | {"setup", "teardown"}


def test_functions_are_called_as_the_hooks_of_their_names(tmp_path: Path) -> None:
    calls: list[Any] = []
    callback = LambdaCallback(
        setup=lambda trainer, task, stage: calls.append(("setup", stage)),
        on_train_batch_end=lambda trainer, task, outputs, batch, index: calls.append(("batch", index)),
        on_train_epoch_end=lambda trainer, task: calls.append(("epoch", trainer.current_epoch)),
        teardown=lambda *given: calls.append(("teardown", given[2])),
    )
    fit(Scripted(), tmp_path, 1, [callback], validate=False)
    assert calls == [("setup", "fit"), ("batch", 0), ("batch", 1), ("epoch", 0), ("teardown", "fit")]


def test_what_is_not_given_is_no_hook_of_the_run(tmp_path: Path) -> None:
    trainer = fit(Scripted(), tmp_path, 1, [LambdaCallback(on_fit_end=lambda *_: None)], validate=False)
    assert not trainer.hooks.find("on_train_batch_end")
    assert len(trainer.hooks.find("on_fit_end")) == 1


def test_an_unknown_hook_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="Did you mean 'on_train_end'"):
        LambdaCallback(on_trian_end=print)  # type: ignore[call-arg]
