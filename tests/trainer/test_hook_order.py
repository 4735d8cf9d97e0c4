"""The whole order of hooks, as Lightning 2.6 has it; docs/trainer.md says where ours parts from it, and why.

Hooks that Lightning has not are among them: `on_gradients_ready` and `is_state_sound`.

In the tables below a line names who is called and the hook: D is the data module, C a callback, T the task.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain import Callback, DataModule, ModelCheckpoint, Task, Trainer
from tests.trainer.tasks import quiet, rows

TASK_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
INTERNAL = {"log", "log_dict", "freeze", "unfreeze", "print", "forward", "toggle_optimizer", "untoggle_optimizer"}
SHARED = {
    *("prepare_data", "setup", "teardown", "train_dataloader", "val_dataloader", "test_dataloader"),
    *("predict_dataloader", "on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"),
}

SETUP = """
    T configure_callbacks
    D prepare_data
    D C T setup
"""

TEARDOWN = """
    D C T teardown
"""

TRANSFER = """
    D on_before_batch_transfer
    D transfer_batch_to_device
    D on_after_batch_transfer
"""


def evaluation(stage: str) -> str:
    return f"""
    T on_{stage}_model_eval
    C T on_{stage}_start
    C T on_{stage}_epoch_start
    {TRANSFER}
    C T on_{stage}_batch_start
    T {stage}_step
    C T on_{stage}_batch_end
    C T on_{stage}_epoch_end
    C T on_{stage}_end
    T on_{stage}_model_train
"""


CHECK_OF_STATES = """
    C state_dict
    D state_dict
"""

BEGIN = f"""
    {SETUP}
    T configure_model
    T configure_optimizers
    C T on_fit_start
    C on_sanity_check_start
    D val_dataloader
    {evaluation("validation")}
    C on_sanity_check_end
    D train_dataloader
    {CHECK_OF_STATES}
    C T on_train_start
    C T on_train_epoch_start
"""

FIRST_MICROBATCH = """
    C T on_train_batch_start
    T optimizer_step
    T training_step
    C T on_before_zero_grad
    T optimizer_zero_grad
    C T on_before_backward
    T backward
    C T on_after_backward
"""

LATER_MICROBATCH = """
    C T on_train_batch_start
    T training_step
    C T on_before_backward
    T backward
    C T on_after_backward
"""

END_OF_MICROBATCH = """
    C T on_train_batch_end
"""

END_OF_STEP = """
    C on_gradients_ready
    C T on_before_optimizer_step
    T configure_gradient_clipping
    T lr_scheduler_step
    C T on_train_batch_end
"""

END = f"""
    T on_validation_model_zero_grad
    {evaluation("validation")}
    C T on_train_epoch_end
    C is_state_sound
    C state_dict
    D state_dict
    C T on_save_checkpoint
    C T on_train_end
    C T on_fit_end
    {TEARDOWN}
"""

STEP_OF_TWO = TRANSFER + FIRST_MICROBATCH + END_OF_MICROBATCH + TRANSFER + LATER_MICROBATCH + END_OF_STEP
STEP_OF_ONE = TRANSFER + FIRST_MICROBATCH + END_OF_STEP


def lines(table: str) -> list[str]:
    """One entry for each call."""
    found = []
    for line in table.split("\n"):
        *owners, hook = line.split() or [""]
        found += [f"{owner} {hook}" for owner in owners]
    return found


class Watched:
    """A run in which the data module, a callback and the task write down every hook."""

    def __init__(self, root: Path) -> None:
        self.calls: list[str] = []
        self.root = root
        self.data = self.recording(Numbers, "D", DataModule)()
        self.callback = self.recording(Callback, "C", Callback)()
        self.task = self.recording(Line, "T", Task)()
        self.task.calls = self.calls

    def trainer(self, **options: Any) -> Trainer:
        saving = ModelCheckpoint(dirpath=self.root / "checkpoints")
        return quiet([self.callback, saving], enable_checkpointing=True, num_sanity_val_steps=2, **options)

    def recording(self, kind: Any, letter: str, base: Any) -> Any:
        """A subclass that overrides every hook of the base."""
        hooks = [
            name
            for kind_of_base in base.__mro__
            if kind_of_base.__module__.startswith("drivetrain.")
            for name, method in vars(kind_of_base).items()
            if callable(method) and not name.startswith("_") and name not in INTERNAL | set(TASK_STEPS)
        ]
        if letter == "T":
            hooks = [name for name in hooks if is_hook_of_task(name) and name not in SHARED - {"setup", "teardown"}]
        if letter == "C":
            hooks = [name for name in hooks if name not in ("build_state_key", "load_state_dict")]
        return type(kind.__name__, (kind,), {name: self.noting(name, getattr(kind, name), letter) for name in hooks})

    def noting(self, name: str, inner: Any, letter: str) -> Callable[..., Any]:
        def hook(owner: Any, *args: Any, **kwargs: Any) -> Any:
            self.calls.append(f"{letter} {name}")
            return inner(owner, *args, **kwargs)

        return hook


def is_hook_of_task(name: str) -> bool:
    return name.startswith(("on_", "configure_", "optimizer_", "lr_scheduler_step")) or name in (
        "setup",
        "teardown",
        "backward",
    )


class Numbers(DataModule):
    def train_dataloader(self) -> Any:
        return rows([1.0, 2.0, 3.0])

    def val_dataloader(self) -> Any:
        return rows([1.0])

    test_dataloader = predict_dataloader = val_dataloader


class Line(Task):
    calls: list[str]

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls.append("T training_step")
        return self.layer(batch[0]).sum()

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls.append("T validation_step")

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls.append("T test_step")

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls.append("T predict_step")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


@pytest.fixture
def run(tmp_path: Path) -> Watched:
    return Watched(tmp_path)


def test_fit(run: Watched) -> None:
    run.trainer(accumulate_grad_batches=2, gradient_clip_val=1.0).fit(run.task, datamodule=run.data)
    assert run.calls == lines(BEGIN + STEP_OF_TWO + CHECK_OF_STATES + STEP_OF_ONE + END)


def test_fit_without_accumulation(run: Watched) -> None:
    run.trainer(gradient_clip_val=1.0, limit_train_batches=2).fit(run.task, datamodule=run.data)
    assert run.calls == lines(BEGIN + STEP_OF_ONE + CHECK_OF_STATES + STEP_OF_ONE + END)


def test_schedulers_by_epochs_step_before_the_hooks_of_the_last_batch() -> None:
    rates: list[float] = []

    class Rates(Callback):
        def on_train_batch_end(self, trainer: Trainer, task: Task, *args: Any) -> None:
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    class Halves(Line):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    task = Halves()
    task.calls = []
    quiet(Rates(), max_epochs=2, limit_train_batches=2).fit(task, rows([1.0, 2.0, 3.0]))
    assert rates == [1.0, 0.5, 0.5, 0.25]


def test_validate(run: Watched) -> None:
    run.trainer().validate(run.task, datamodule=run.data, verbose=False)
    expected = SETUP + "T configure_model\n D val_dataloader" + evaluation("validation") + TEARDOWN
    assert run.calls == lines(expected)


def test_test(run: Watched) -> None:
    run.trainer().test(run.task, datamodule=run.data, verbose=False)
    assert run.calls == lines(SETUP + "T configure_model\n D test_dataloader" + evaluation("test") + TEARDOWN)


def test_predict(run: Watched) -> None:
    run.trainer().predict(run.task, datamodule=run.data)
    assert run.calls == lines(SETUP + "T configure_model\n D predict_dataloader" + evaluation("predict") + TEARDOWN)


def test_resuming_shows_the_checkpoint_before_the_optimizers_are_built(run: Watched) -> None:
    trainer = run.trainer()
    trainer.fit(run.task, datamodule=run.data)
    assert trainer.checkpoint_callback is not None
    saved = trainer.checkpoint_callback.best_model_path
    again = Watched(run.root)
    again.trainer(max_epochs=2).fit(again.task, datamodule=again.data, ckpt_path=saved)
    expected = SETUP + "T configure_model\n T on_load_checkpoint\n C on_load_checkpoint\n T configure_optimizers"
    assert again.calls[: len(lines(expected))] == lines(expected)


def test_an_exception_is_told_and_everything_is_torn_down(run: Watched) -> None:
    def fail(batch: Any, batch_idx: int) -> None:
        raise RuntimeError("no")

    run.task.training_step = fail
    with pytest.raises(RuntimeError, match="no"):
        run.trainer().fit(run.task, datamodule=run.data)
    told = """
        T optimizer_step
        C T D on_exception
        D C T teardown
    """
    assert run.calls[-len(lines(told)) :] == lines(told)


def test_callbacks_that_watch_a_value_see_what_the_task_logs_at_the_end_of_the_epoch() -> None:
    seen: list[Any] = []

    class Watching(Callback):
        runs_last_at_epoch_end = True

        def on_train_epoch_end(self, trainer: Trainer, task: Task) -> None:
            seen.append(("watching", float(trainer.callback_metrics["late"])))

    class Other(Callback):
        def on_train_epoch_end(self, trainer: Trainer, task: Task) -> None:
            seen.append(("other", "late" in trainer.callback_metrics))

    class Late(Line):
        def __init__(self) -> None:
            super().__init__()
            self.calls: list[str] = []

        def on_train_epoch_end(self) -> None:
            self.log("late", 3.0)

    quiet([Watching(), Other()]).fit(Late(), rows([1.0]))
    assert seen == [("other", False), ("watching", 3.0)]


def test_a_callback_may_have_an_attribute_monitor_that_means_something_else() -> None:
    class Watchdog(Callback):
        monitor = "a heart-rate monitor"

        def on_train_epoch_end(self, trainer: Trainer, task: Task) -> None:
            task.log("beats", 60.0)

    trainer = quiet(Watchdog())
    task = Line()
    task.calls = []
    trainer.fit(task, rows([1.0]))
    assert float(trainer.callback_metrics["beats"]) == 60.0


def test_a_callback_of_ones_own_that_saves_checkpoints_comes_last_and_replaces_the_default(tmp_path: Path) -> None:
    class Saver(Callback):
        saves_checkpoints = True

    class Other(Callback):
        pass

    trainer = quiet([Saver(), Other()], enable_checkpointing=True, default_root_dir=tmp_path)
    assert [type(callback).__name__ for callback in trainer.callbacks] == ["Other", "RunReport", "Saver"]


def test_a_hook_that_a_callback_does_not_override_is_not_called_at_all() -> None:
    class Lazy(Callback):
        def __getattribute__(self, name: str) -> Any:
            if name.startswith("on_"):
                touched.append(name)
            return super().__getattribute__(name)

        def on_train_start(self, trainer: Trainer, task: Task) -> None:
            pass

    touched: list[str] = []
    task = Line()
    task.calls = []
    quiet(Lazy()).fit(task, rows([1.0, 2.0]), rows([1.0]))
    assert touched == ["on_train_start"]


def test_on_train_batch_start_may_leave_out_the_rest_of_the_epoch() -> None:
    class Short(Line):
        def __init__(self, stop_at: int) -> None:
            super().__init__()
            self.calls: list[str] = []
            self.stop_at = stop_at

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == self.stop_at else None

    for stop_at, steps in ((1, 2), (0, 0)):
        task = Short(stop_at)
        trainer = quiet(max_epochs=2)
        trainer.fit(task, rows([1.0, 2.0, 3.0]))
        assert (trainer.global_step, trainer.current_epoch) == (steps, 2)
