"""Saving in the background, saving that fails, and saving on the way out."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from drivetrain import CheckpointError, ConfigurationError, Trainer
from drivetrain.callbacks import Callback, ModelCheckpoint
from drivetrain.checkpoint import Checkpoint
from drivetrain.checkpoint.storage import FileDigest, LocalStorage
from tests.callbacks.guarded import Regression, train
from tests.pool import ProcessesFailed, run_in_processes


def saved(directory: str | Path) -> list[str]:
    return sorted(os.listdir(directory)) if os.path.isdir(directory) else []


def by_steps(root: str | Path, every: int = 2, **options: Any) -> ModelCheckpoint:
    return ModelCheckpoint(os.path.join(root, "ckpt"), "{step}", every_n_train_steps=every, **options)


class FullDisk:
    """A disk that is full while certain checkpoints are written.

    Args:
        names: of these checkpoints.
    """

    def __init__(self, *names: str) -> None:
        self.names = names
        self.write = LocalStorage.write

    def __enter__(self) -> None:
        def write(storage: LocalStorage, path: str, parts: Iterable[memoryview]) -> FileDigest:
            if any(f".{name}." in path for name in self.names):
                raise OSError(28, "No space left on device")
            return self.write(storage, path, parts)

        LocalStorage.write = write  # type: ignore[method-assign]

    def __exit__(self, *raised: object) -> None:
        LocalStorage.write = self.write  # type: ignore[method-assign]


class Gate:
    """Holds back the writing of checkpoints until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened, self.reached = threading.Event(), threading.Event()
        publish = LocalStorage.publish

        def wait(storage: LocalStorage, *args: Any) -> None:
            self.reached.set()
            assert self.opened.wait(30)
            publish(storage, *args)

        monkeypatch.setattr(LocalStorage, "publish", wait)


class At(Callback):
    """Calls something after a step."""

    def __init__(self, step: int, call: Any) -> None:
        self.step, self.call = step, call

    def on_train_batch_end(self, trainer: Trainer, task: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            self.call(trainer)


# in the background


def test_background_saves_leave_what_plain_ones_do(tmp_path: Path) -> None:
    left = []
    for name, in_background in (("plain", False), ("background", True)):
        checkpoint = by_steps(tmp_path / name, save_last=True, async_save=in_background, total_limit=3, save_top_k=-1)
        train(Regression({}), tmp_path / name, [checkpoint])
        left.append(saved(tmp_path / name / "ckpt"))
        for each in left[-1]:
            Checkpoint(str(tmp_path / name / "ckpt" / each)).verify()
    assert left[0] == left[1] == ["last.ckpt", "step=10.ckpt", "step=12.ckpt"]


def test_training_goes_on_while_a_checkpoint_is_written_and_the_old_one_stays_until_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = by_steps(tmp_path, every=4, async_save=True)
    gate = Gate(monkeypatch)
    seen: list[list[str]] = []

    def look(trainer: Trainer) -> None:
        assert gate.reached.wait(30)
        seen.append([name for name in saved(tmp_path / "ckpt") if not name.startswith(".")])

    def close(trainer: Trainer) -> None:
        checkpoint.settle()
        gate.opened.clear()
        gate.reached.clear()

    callbacks = [
        At(5, lambda trainer: gate.opened.set()),
        At(7, close),  # step=4 is there
        At(10, look),  # step=8 is being written
        At(11, lambda trainer: gate.opened.set()),
        checkpoint,
    ]
    train(Regression({}), tmp_path, callbacks)
    assert seen == [["step=4.ckpt"]]
    assert saved(tmp_path / "ckpt") == ["step=12.ckpt"]


def test_the_state_in_the_background_is_that_of_its_step(tmp_path: Path) -> None:
    plain, background = by_steps(tmp_path / "a", every=5), by_steps(tmp_path / "b", every=5, async_save=True)
    train(Regression({}), tmp_path / "a", [plain])
    train(Regression({}), tmp_path / "b", [background])
    states = [Checkpoint(each.best_model_path).shared()[0]["engine"]["models"][0] for each in (plain, background)]
    assert all((states[0][name] == states[1][name]).all() for name in states[0])


def test_an_error_in_the_background_ends_the_run_at_a_later_step_and_the_last_good_one_is_intact(
    tmp_path: Path,
) -> None:
    checkpoint = by_steps(tmp_path, async_save=True)
    task = Regression({})
    with FullDisk("step=4.ckpt"), pytest.raises(CheckpointError, match=r"step=4.ckpt.*No space left.*on_save_error="):
        train(task, tmp_path, [checkpoint])
    assert saved(tmp_path / "ckpt") == ["step=2.ckpt"]
    assert checkpoint.best_model_path == str(tmp_path / "ckpt" / "step=2.ckpt")
    Checkpoint(checkpoint.best_model_path).verify()


def test_an_error_of_the_very_last_save_is_not_lost(tmp_path: Path) -> None:
    with FullDisk("step=12.ckpt"), pytest.raises(CheckpointError, match="No space left"):
        train(Regression({}), tmp_path, [by_steps(tmp_path, async_save=True)])


@pytest.mark.parametrize("in_background", [False, True])
def test_with_warn_the_run_goes_on_past_a_full_disk(
    in_background: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = by_steps(tmp_path, async_save=in_background, on_save_error="warn", save_last="link")
    with FullDisk("step=4.ckpt", "step=12.ckpt"):
        trainer = train(Regression({}), tmp_path, [checkpoint])
    assert trainer.global_step == 12
    assert saved(tmp_path / "ckpt") == ["last.ckpt", "step=10.ckpt"]
    assert os.readlink(tmp_path / "ckpt" / "last.ckpt") == "step=10.ckpt"
    assert checkpoint.best_model_path == str(tmp_path / "ckpt" / "step=10.ckpt")
    assert caplog.text.count("No space left on device") == 2
    assert "Earlier checkpoints are intact" in caplog.text


def test_without_warn_a_full_disk_ends_the_run_and_the_last_good_one_is_intact(tmp_path: Path) -> None:
    checkpoint = by_steps(tmp_path)
    message = r"No space left.*ModelCheckpoint\(on_save_error='warn'\)"
    with FullDisk("step=8.ckpt"), pytest.raises(CheckpointError, match=message):
        train(Regression({}), tmp_path, [checkpoint])
    assert saved(tmp_path / "ckpt") == ["step=6.ckpt"]
    resumed = train(Regression({}), tmp_path, [by_steps(tmp_path)], ckpt_path=checkpoint.best_model_path)
    assert resumed.global_step == 12


def test_several_checkpoint_callbacks_each_tell_their_own_errors(tmp_path: Path) -> None:
    fine = by_steps(tmp_path / "fine", every=3, async_save=True)
    full = by_steps(tmp_path / "full", every=2, async_save=True, on_save_error="warn")
    with FullDisk("step=2.ckpt", "step=4.ckpt", "step=8.ckpt"):
        train(Regression({}), tmp_path, [full, fine])
    assert saved(tmp_path / "fine" / "ckpt") == ["step=12.ckpt"]
    assert saved(tmp_path / "full" / "ckpt") == ["step=12.ckpt"]


def fail_on_processes(root: str, rank: int, options: dict[str, Any]) -> tuple[str, int, str]:
    checkpoint = by_steps(root, **options)
    task = Regression({})
    with FullDisk("step=4.ckpt") if int(os.environ["RANK"]) == rank else nullcontext():
        try:
            train(task, root, [checkpoint], epochs=2000 if options.get("on_save_error") != "warn" else 2)
        except CheckpointError as error:
            return "raised", 0, str(error)
    return "went on", len(task.trained), checkpoint.best_model_path


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_all_processes_raise_where_one_could_not_write(in_background: bool, rank: int, tmp_path: Path) -> None:
    first, second = run_in_processes(
        fail_on_processes, args=(str(tmp_path), rank, {"async_save": in_background}), timeout=60
    )
    assert first == second
    assert first[0] == "raised"
    assert f"rank {rank}" in first[2]
    assert saved(tmp_path / "ckpt") == ["step=2.ckpt"]


@pytest.mark.parametrize("in_background", [False, True])
def test_all_processes_go_on_where_one_could_not_write(in_background: bool, tmp_path: Path) -> None:
    options = {"async_save": in_background, "on_save_error": "warn"}
    first, second = run_in_processes(fail_on_processes, args=(str(tmp_path), 1, options), timeout=60)
    assert first == second == ("went on", 12, str(tmp_path / "ckpt" / "step=12.ckpt"))
    assert saved(tmp_path / "ckpt") == ["step=12.ckpt"]


# on the way out


class Failing(Regression):
    """Raises in a batch of the second epoch, on some processes."""

    ranks: tuple[int, ...] = (0,)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.current_epoch == 1 and batch_idx == 2 and self.trainer.global_rank in self.ranks:
            raise ZeroDivisionError("on purpose")
        return super().training_step(batch, batch_idx)


def test_an_exception_leaves_a_checkpoint_to_go_on_from(tmp_path: Path) -> None:
    checkpoint = by_steps(tmp_path, every=100, save_on_exception=True)
    with pytest.raises(ZeroDivisionError):
        train(Failing({}), tmp_path, [checkpoint])
    assert saved(tmp_path / "ckpt") == ["step=8.ckpt"]
    task = Regression({})
    path = str(tmp_path / "ckpt" / "step=8.ckpt")
    assert train(task, tmp_path, [by_steps(tmp_path, every=100)], ckpt_path=path).global_step == 12
    assert task.trained == [(1, 2), (1, 3), (1, 4), (1, 5)]


def test_neither_ctrl_c_nor_a_run_without_the_wish_leaves_one(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        train(Failing({}), tmp_path, [by_steps(tmp_path, every=100)])

    def interrupt(trainer: Trainer) -> None:
        raise KeyboardInterrupt

    callbacks = [by_steps(tmp_path, every=100, save_on_exception=True), At(3, interrupt)]
    train(Regression({}), tmp_path, callbacks, on_interrupt="return")
    assert saved(tmp_path / "ckpt") == []


def raise_on_processes(root: str, ranks: tuple[int, ...]) -> str:
    task = Failing({})
    task.ranks = ranks
    checkpoint = by_steps(root, every=100, save_on_exception=True)
    try:
        train(task, root, [checkpoint])
    except ZeroDivisionError as error:
        return str(error)
    except Exception as error:  # what a peer that is gone leads to
        return type(error).__name__
    return ""


def test_where_all_processes_raise_they_save_together(tmp_path: Path) -> None:
    assert run_in_processes(raise_on_processes, args=(str(tmp_path), (0, 1)), timeout=60) == ["on purpose"] * 2
    assert saved(tmp_path / "ckpt") == ["step=8.ckpt"]
    assert Checkpoint(str(tmp_path / "ckpt" / "step=8.ckpt")).manifest.world_size == 2


def raise_on_one(root: str) -> str:
    task = Failing({})
    checkpoint = by_steps(root, every=100, save_on_exception=True)
    try:
        train(task, root, [checkpoint])
    except ZeroDivisionError:
        os._exit(7)  # as a process that is gone: the other one must not wait for it
    except Exception as error:
        return type(error).__name__
    return ""


def test_where_one_process_raises_nobody_waits_and_nothing_is_saved(tmp_path: Path) -> None:
    with pytest.raises(ProcessesFailed, match="exited with code 7"):
        run_in_processes(raise_on_one, args=(str(tmp_path),), timeout=60)
    assert saved(tmp_path / "ckpt") == []


def test_what_is_saved_in_a_hurry_is_whole_and_stays_until_a_run_can_go_on_from_another(tmp_path: Path) -> None:
    weights_only = ModelCheckpoint(tmp_path / "ckpt", "{step}", every_n_train_steps=2, save_weights_only=True)
    train(Regression({}), tmp_path, [At(1, weights_only.save_now), weights_only], epochs=1)
    assert saved(tmp_path / "ckpt") == ["preempted-step=1.ckpt", "step=6.ckpt"]
    path = str(tmp_path / "ckpt" / "preempted-step=1.ckpt")
    assert train(Regression({}), tmp_path, [by_steps(tmp_path)], ckpt_path=path).global_step == 12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"total_limit": 0}, "must be at least 1"),
        ({"on_save_error": "warning"}, "Did you mean 'warn'"),
        ({"train_time_interval": "soon"}, "is not a duration"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ModelCheckpoint(**options)


def test_a_save_after_a_loss_that_was_not_finite_is_marked_and_resumed_from_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def is_finite(trainer: Trainer) -> bool:
        return trainer.global_step < 10

    monkeypatch.setattr(Trainer, "is_finite", property(is_finite))
    train(Regression({}), tmp_path, [by_steps(tmp_path, every=4, save_top_k=-1)])
    marks = {name: Checkpoint(tmp_path / "ckpt" / name).manifest.finite_loss for name in saved(tmp_path / "ckpt")}
    assert marks == {"step=4.ckpt": True, "step=8.ckpt": True, "step=12.ckpt": False}

    monkeypatch.setattr(Trainer, "is_finite", True)
    again = At(9, lambda trainer: steps.append(trainer.global_step))
    steps: list[int] = []
    train(Regression({}), tmp_path, [by_steps(tmp_path, every=4, save_top_k=-1), again], ckpt_path="auto")
    assert steps == [9]  # so it began with step 8
    assert "step=12.ckpt is skipped, because it was saved after a non-finite loss" in caplog.text
