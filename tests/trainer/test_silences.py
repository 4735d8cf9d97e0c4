"""A run that trains nothing, or towards nothing, is not silent about it; and each run's last line says how it ended."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain import (
    Callback,
    ConfigurationError,
    CSVLogger,
    DataModule,
    EarlyStopping,
    ModelCheckpoint,
    NaNGuard,
    Task,
    Trainer,
)
from drivetrain.checkpoint import Checkpoint
from tests.pool import run_in_processes
from tests.trainer.tasks import Weight, fitted, ones, quiet, rows


@pytest.fixture
def warnings_of(caplog: pytest.LogCaptureFixture) -> Any:
    """The warnings of a fit, each with its message."""

    def run(task: Task, train: Any, val: Any = None, **options: Any) -> list[str]:
        caplog.clear()
        fitted(task, train, val, **options)
        return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]

    return run


class Unvalidated(Weight):
    """A `Weight` without a validation step."""

    validation_step = Task.validation_step


# nothing is trained


class LeavesOut(Unvalidated):
    def __init__(self, epochs: set[int]) -> None:
        super().__init__()
        self.epochs = epochs

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if self.current_epoch in self.epochs else super().training_step(batch, batch_idx)


@pytest.mark.parametrize(("epochs", "first"), [({0, 1}, 0), ({1}, 1), (set(), None)], ids=str)
def test_an_epoch_whose_steps_all_returned_none_is_warned_of_once(
    warnings_of: Any, epochs: set[int], first: int | None
) -> None:
    expected = f"Epoch {first} took no optimizer step: LeavesOut.training_step returned None for every batch."
    assert warnings_of(LeavesOut(epochs), ones(3), max_epochs=2) == ([] if first is None else [expected])


def test_a_fit_that_had_nothing_left_to_do_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options: dict[str, Any] = {"enable_checkpointing": True, "default_root_dir": tmp_path, "max_epochs": 2}
    fitted(Weight(), ones(2), **options)
    capsys.readouterr()
    trainer = quiet(**options)
    trainer.fit(Weight(), ones(2), resume="auto")
    assert trainer.stop_reason == "nothing_to_do"
    assert capsys.readouterr().out.splitlines()[-1] == (
        "Nothing to do: the run has taken 4 steps (2 epochs) already: max_epochs=2 is reached. "
        "Raise that limit to train more."
    )


def test_a_run_resumed_with_more_steps_trains_on(tmp_path: Path) -> None:
    saved = fitted(
        Weight(), ones(10), callbacks=ModelCheckpoint(tmp_path), enable_checkpointing=True, max_epochs=-1, max_steps=5
    )
    trainer = quiet(max_epochs=-1, max_steps=8)
    assert saved.checkpoint_callback is not None
    trainer.fit(Weight(), ones(10), resume=saved.checkpoint_callback.best_model_path)
    assert (trainer.global_step, trainer.stop_reason) == (8, "max_steps")


# what is not finite


class Diverging(Unvalidated):
    """Its loss is infinite from the batch of so many ones on.

    Args:
        at: the global step.
        logs: whether it logs the loss.
    """

    def __init__(self, at: int = 1, logs: bool = False) -> None:
        super().__init__(lr=0.1)
        self.at, self.logs = at, logs

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        loss = loss * torch.inf if self.global_step == self.at else loss
        if self.logs:
            self.log("loss", loss)
        return loss


def test_weights_that_are_not_finite_are_named_once(warnings_of: Any) -> None:
    [warning] = warnings_of(Diverging(), ones(3), max_epochs=3)
    assert warning.startswith("The weight 'w' is not finite after epoch 0: it contains NaN or infinity.")
    assert "NaNGuard" in warning


def test_a_logged_value_that_is_not_finite_is_named_where_it_is_written(warnings_of: Any, tmp_path: Path) -> None:
    options = {"logger": CSVLogger(tmp_path), "log_every_n_steps": 1, "max_epochs": 2}
    [warning] = warnings_of(Diverging(logs=True), ones(3), **options)
    assert warning.startswith("The logged value 'loss' is -inf at step 2.")


@pytest.mark.parametrize(("at", "finite"), [(1, False), (99, True)])
def test_whether_all_is_finite_can_be_asked_before_a_checkpoint_is_saved(at: int, finite: bool) -> None:
    seen: list[bool] = []

    class Saving(Callback):
        runs_last_at_epoch_end = True

        def on_train_epoch_end(self, trainer: Trainer, task: Task) -> None:
            seen.append(trainer.is_finite)

    fitted(Diverging(at), ones(3), callbacks=Saving())
    assert seen == [finite]


@pytest.mark.parametrize(("at", "finite"), [(1, False), (99, True)])
def test_the_default_checkpoint_marks_it(at: int, finite: bool, tmp_path: Path) -> None:
    trainer = fitted(Diverging(at), ones(3), enable_checkpointing=True, default_root_dir=tmp_path)
    assert trainer.checkpoint_callback is not None
    assert Checkpoint(trainer.checkpoint_callback.best_model_path).manifest.finite_loss is finite


def test_a_guard_is_warning_enough(warnings_of: Any) -> None:
    assert not any("not finite after" in each for each in warnings_of(Diverging(99), ones(3), callbacks=NaNGuard()))


def finite_on_two_ranks() -> bool:
    class OnOneRank(Diverging):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx)

    return fitted(OnOneRank(), ones(6), max_epochs=2).is_finite


def test_all_processes_agree_on_it() -> None:
    assert run_in_processes(finite_on_two_ranks, 2) == [False, False]


# what nothing calls


def test_validation_data_without_a_validation_step_is_warned_of(warnings_of: Any) -> None:
    [warning] = warnings_of(Unvalidated(), ones(1), ones(1))
    assert (
        warning
        == "You passed in a `val_dataloader` but have no `validation_step` in Unvalidated, so nothing is validated."
    )


def test_a_validation_step_without_data_is_warned_of_unless_that_was_asked_for(warnings_of: Any) -> None:
    [warning] = warnings_of(Weight(), ones(1))
    assert warning.startswith("You defined a `validation_step` but have no `val_dataloader`")
    assert warnings_of(Weight(), ones(1), limit_val_batches=0) == []


def test_a_method_that_is_nearly_a_hook_is_warned_of_with_the_hook(warnings_of: Any) -> None:
    class Mistyped(Unvalidated):
        def validaton_step(self, batch: Any, batch_idx: int) -> None: ...

        def on_train_epoch_ends(self) -> None: ...

        def training_steps(self) -> None:
            """A helper: the hook that it is like is there."""

        def on_click(self) -> None:
            """Like no hook at all."""

    class Watching(Callback):
        def on_train_batch_ended(self, trainer: Trainer, task: Task, outputs: Any, batch: Any, index: int) -> None: ...

    assert warnings_of(Mistyped(), ones(1), callbacks=Watching()) == [
        "Mistyped.validaton_step is not a hook and never runs. Did you mean 'validation_step'?",
        "Mistyped.on_train_epoch_ends is not a hook and never runs. Did you mean 'on_train_epoch_end'?",
        "Watching.on_train_batch_ended is not a hook and never runs. Did you mean 'on_train_batch_end'?",
    ]


@pytest.mark.parametrize(
    ("base", "hook", "replacement"),
    [
        (Weight, "training_epoch_end", "on_train_epoch_end"),
        (Weight, "validation_epoch_end", "on_validation_epoch_end"),
        (Weight, "training_step_end", "training_step"),
        (Weight, "on_epoch_start", "on_train_epoch_start"),
        (Weight, "configure_sharded_model", "configure_model"),
        (Callback, "on_batch_end", "on_train_batch_end"),
        (Callback, "on_keyboard_interrupt", "on_exception"),
        (DataModule, "on_train_dataloader", "train_dataloader"),
    ],
)
def test_a_hook_of_lightning_1_is_refused_with_what_replaces_it(base: type, hook: str, replacement: str) -> None:
    owner = type("Old", (base,), {hook: lambda self, *args: None, "__module__": __name__})()
    task = owner if isinstance(owner, Task) else Weight()
    trainer = quiet(owner if isinstance(owner, Callback) else None)
    data = owner if isinstance(owner, DataModule) else None
    with pytest.raises(ConfigurationError, match=rf"Old\.{hook} is a hook of Lightning 1\.x.*Use {replacement}"):
        trainer.fit(task, *([] if data else [ones(1)]), datamodule=data)


def test_a_method_that_the_task_calls_with_arguments_is_no_hook_of_lightning_1() -> None:
    class Collects(Weight):
        def on_epoch_end(self, outputs: list[float]) -> None:
            raise AssertionError

    quiet().fit(Collects(), ones(1))


def test_an_optimizer_step_that_a_task_by_hand_never_reaches_is_warned_of(warnings_of: Any) -> None:
    class ByHand(Unvalidated):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.manual_backward(super().training_step(batch, batch_idx))
            self.optimizers().step()  # type: ignore[union-attr]

        def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            raise AssertionError

    [warning] = warnings_of(ByHand(), ones(1))
    assert warning.startswith("ByHand overrides optimizer_step but has automatic_optimization = False")


def test_a_run_too_short_for_any_value_of_a_step_is_warned_of(warnings_of: Any, tmp_path: Path) -> None:
    [warning] = warnings_of(Unvalidated(), ones(3), max_epochs=4, logger=CSVLogger(tmp_path))
    assert warning.startswith("The run takes 12 optimizer steps, fewer than log_every_n_steps=50")
    assert warnings_of(Unvalidated(), ones(3), max_epochs=20, logger=CSVLogger(tmp_path)) == []
    assert warnings_of(Unvalidated(), ones(3), max_epochs=4) == []


# the last line


class Stops(Callback):
    def on_train_batch_end(self, trainer: Trainer, task: Task, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer.should_stop = True


@pytest.mark.parametrize(
    ("options", "reason", "line"),
    [
        ({"max_epochs": 2}, "max_epochs", "Done: the run ended after 6 steps (2 epochs): max_epochs=2 is reached."),
        ({"max_steps": 1}, "max_steps", "Done: the run ended after 1 step (0 epochs): max_steps=1 is reached."),
        ({"max_time": {"seconds": 0}}, "max_time", "(0 epochs): max_time=0:00:00 is over."),
        ({"callbacks": Stops()}, "requested", ": trainer.should_stop was set in Stops.on_train_batch_end."),
        (
            {"callbacks": EarlyStopping("val_loss", patience=1), "max_epochs": 9},
            "requested",
            ": EarlyStopping: val_loss did not improve in 1 checks. The best value was 1.",
        ),
        ({"limit_train_batches": 0}, "no_batches", "there are no batches to train on (limit_train_batches=0)."),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_run_ends_with_why(
    options: dict[str, Any], reason: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = fitted(Weight(), ones(3), ones(1), **options)
    assert trainer.stop_reason == reason
    first, last, *_ = capsys.readouterr().out.splitlines()
    assert first == "Training Weight: 1 process on cpu (single), precision 32, 1 parameter."
    assert line in last


@pytest.mark.parametrize(("monitor", "word", "score"), [(None, "Last", ""), ("val_loss", "Best", " (val_loss 1)")])
def test_it_ends_with_its_checkpoint_and_its_report(
    monitor: str | None, word: str, score: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"enable_checkpointing": True, "callbacks": ModelCheckpoint(monitor=monitor)}
    trainer = fitted(Weight(), ones(3), ones(1), logger=CSVLogger(tmp_path), **options)
    assert trainer.checkpoint_callback is not None
    saved = trainer.checkpoint_callback.newest_model_path
    first, *_, why, best, report = capsys.readouterr().out.splitlines()
    assert first.endswith(f"1 parameter. Folder: {trainer.log_dir}.")
    assert why.startswith("Done: ")
    assert best == f"{word} checkpoint: {saved}{score}"
    assert report == f"Report: {trainer.log_dir}/report.html"
    quiet(max_epochs=2).fit(Weight(), ones(3), resume=saved)


@pytest.mark.parametrize("is_saved", [True, False])
def test_resume_auto_says_what_it_found(is_saved: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options: dict[str, Any] = {"enable_checkpointing": True, "default_root_dir": tmp_path}
    if is_saved:
        fitted(Weight(), ones(2), **options)
        capsys.readouterr()
    quiet(max_epochs=2, **options).fit(Weight(), ones(2), resume="auto")
    first = capsys.readouterr().out.splitlines()[0]
    if is_saved:
        assert re.fullmatch(r"Resuming from .*epoch=0-step=2.ckpt", first)
    else:
        folder = tmp_path / "checkpoints"
        assert first == f"resume='auto' found no checkpoint in {folder}. Training starts from the beginning."


def test_a_run_that_fails_says_so_and_names_its_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Failing(Weight):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.current_epoch == 1:
                raise ZeroDivisionError("no")
            return super().training_step(batch, batch_idx)

    trainer = quiet(enable_checkpointing=True, default_root_dir=tmp_path, max_epochs=3)
    with pytest.raises(ZeroDivisionError):
        trainer.fit(Failing(), ones(2))
    why, checkpoint = capsys.readouterr().out.splitlines()[-2:]
    assert why == "Failed: the run ended after 2 steps (1 epoch): ZeroDivisionError was raised."
    assert re.fullmatch(r"Checkpoint: .*epoch=0-step=2.ckpt. To resume: fit\(.*", checkpoint)
    assert trainer.stop_reason == "failed"


def test_a_barebones_run_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    Trainer(accelerator="cpu", barebones=True, max_epochs=1).fit(Weight(), rows([1.0]))
    assert capsys.readouterr().out == ""
