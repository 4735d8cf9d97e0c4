"""A keyword argument that nothing takes is an error that names the nearest one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from drivetrain import (
    DDP,
    Accelerator,
    Callback,
    ConfigurationError,
    EarlyStopping,
    ModelCheckpoint,
    NaNGuard,
    Task,
    Timer,
    TQDMProgressBar,
    Trainer,
)
from tests.trainer.tasks import Weight, fitted, ones, quiet

CASES: list[tuple[str, Callable[[], Any], str]] = [
    ("Trainer", lambda: Trainer(max_epoch=3), "'max_epochs'"),
    ("fit", lambda: quiet().fit(Weight(), ones(1), resum="auto"), "'resume'"),
    ("validate", lambda: quiet().validate(Weight(), dataloader=ones(1)), "'dataloaders'"),
    ("test", lambda: quiet().test(Weight(), verbos=False), "'verbose'"),
    ("predict", lambda: quiet().predict(Weight(), return_prediction=False), "'return_predictions'"),
    ("save_checkpoint", lambda: quiet().save_checkpoint("x", weight_only=True), "'weights_only'"),
    ("change_options", lambda: quiet().change_options(max_step=3), "'max_steps'"),
    ("log", lambda: Weight().log("x", 1.0, on_stp=True), "'on_step'"),
    ("log_dict", lambda: Weight().log_dict({"x": 1.0}, on_epok=True), "'on_epoch'"),
    ("clip_gradients", lambda: Weight().clip_gradients(None, gradient_clip_value=1.0), "'gradient_clip_val'"),
    ("save_hyperparameters", lambda: Weight().save_hyperparameters(ignored="lr"), "'ignore'"),
    ("Accelerator", lambda: Accelerator(mixed_precison="bf16"), "'mixed_precision'"),
    ("ModelCheckpoint", lambda: ModelCheckpoint(moniter="val_loss"), "'monitor'"),
    ("EarlyStopping", lambda: EarlyStopping("val_loss", patients=3), "'patience'"),
    ("NaNGuard", lambda: NaNGuard(actoin="skip"), "'action'"),
    ("Timer", lambda: Timer(duratoin="00:01:00:00"), "'duration'"),
    ("DDP", lambda: DDP(bucket_cap=1), "'bucket_cap_mb'"),
    ("TQDMProgressBar", lambda: TQDMProgressBar(refresh_rat=1), "'refresh_rate'"),
]


@pytest.mark.parametrize(("name", "call", "meant"), CASES, ids=[case[0] for case in CASES])
def test_a_mistyped_argument_is_refused_with_the_nearest_one(name: str, call: Callable[[], Any], meant: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"Did you mean {meant}\?"):
        call()


def test_the_error_is_a_type_error_as_pythons_own_is() -> None:
    with pytest.raises(TypeError) as raised:
        Trainer(max_epoch=3)
    assert isinstance(raised.value, ConfigurationError)


def test_what_is_not_alike_at_all_is_answered_with_what_is_taken() -> None:
    with pytest.raises(ConfigurationError, match=r"takes no argument 'xyzzy'\. It takes duration, interval, verbose\."):
        Timer(xyzzy=1)


def test_a_step_that_logs_with_a_mistyped_argument_ends_fit() -> None:
    class Mistyped(Weight):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss, on_stp=True)
            return loss

    with pytest.raises(ConfigurationError, match="Did you mean 'on_step'"):
        fitted(Mistyped(), ones(1))


def test_a_callback_of_ones_own_may_take_any_keywords() -> None:
    class Free(Callback):
        def __init__(self, **options: Any) -> None:
            self.options = options

    assert Free(anything=1).options == {"anything": 1}


@pytest.mark.parametrize("kind", [Trainer, Accelerator, ModelCheckpoint, DDP])
def test_the_signature_of_a_constructor_stays_what_it_is(kind: type) -> None:
    names = list(inspect.signature(kind).parameters)
    assert names == [name for name in inspect.signature(kind.__init__).parameters if name != "self"]


def test_the_constructors_of_tasks_are_left_to_python() -> None:
    class Own(Task):
        def __init__(self, width: int = 1) -> None:
            super().__init__()
            self.width = width

    with pytest.raises(TypeError, match="unexpected keyword argument 'widht'"):
        Own(widht=2)
