from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drivetrain import ConfigurationError, DrivetrainError, Trainer
from drivetrain.callbacks import Callback, ModelCheckpoint, NaNGuard
from drivetrain.strategies.precision import Float16Mixed
from tests.callbacks.guarded import Regression, rows, state_of, train
from tests.pool import run_in_processes

NAN, INF = math.nan, math.inf


def plain_run(left_out: set[tuple[int, int]], epochs: int = 2, batches: int = 6) -> list[Tensor]:
    """The weights of a plain loop that leaves some batches out."""
    task = Regression({})
    optimizer = torch.optim.SGD(task.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.9)
    for epoch in range(epochs):
        for index, (x, y) in enumerate(rows(batches)):
            if (epoch, index) in left_out:
                continue
            optimizer.zero_grad()
            nn.functional.mse_loss(task.layer(x), y).backward()
            optimizer.step()
            scheduler.step()
    return [parameter.detach() for parameter in task.parameters()]


def weights(task: Regression) -> list[Tensor]:
    return [parameter.detach().cpu() for parameter in task.parameters()]


class Recorder(Callback):
    """Remembers, before and after each step, all that a step changes."""

    def __init__(self) -> None:
        self.states: list[dict[str, Any]] = []

    def on_train_batch_end(self, trainer: Trainer, task: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.states.append(state_of(trainer))


# stop


@pytest.mark.parametrize("value", [NAN, INF])
def test_stop_names_step_epoch_and_batch_and_leaves_the_weights_as_they_were(value: float, tmp_path: Path) -> None:
    task = Regression({(1, 2): value})
    with pytest.raises(DrivetrainError, match=r"NaNGuard: the loss is not finite \(step 8, epoch 1, batch 2\)"):
        train(task, tmp_path, [NaNGuard()], enable_checkpointing=False)
    torch.testing.assert_close(weights(task), plain_run({(1, index) for index in range(2, 6)}))


def test_stop_names_all_batches_of_an_accumulated_step(tmp_path: Path) -> None:
    task = Regression({(0, 3): NAN})
    with pytest.raises(DrivetrainError, match=r"step 1, epoch 0, batches \[2, 3\]"):
        train(task, tmp_path, [NaNGuard()], enable_checkpointing=False, accumulate_grad_batches=2)


def test_looking_every_few_steps_finds_the_same_step_later(tmp_path: Path) -> None:
    task = Regression({(0, 1): NAN})
    with pytest.raises(DrivetrainError, match=r"step 1, epoch 0, batch 1"):
        train(task, tmp_path, [NaNGuard(every_n_steps=4)], enable_checkpointing=False)
    assert task.trained[-1] == (0, 3)


def test_between_two_looks_nothing_is_read_from_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    for name in ("tolist", "item", "__bool__", "__float__"):
        original = getattr(Tensor, name)
        monkeypatch.setattr(Tensor, name, lambda self, f=original: (reads.append(1), f(self))[1])
    guard = NaNGuard(every_n_steps=100, check_gradients=True)
    train(Regression({}), tmp_path, [guard], batches=50, epochs=1, enable_checkpointing=False)
    guarded = len(reads)
    reads.clear()
    train(Regression({}), tmp_path, [], batches=50, epochs=1)
    assert guarded - len(reads) <= 1  # the look at the end of the epoch


def test_a_logged_value_can_be_watched(tmp_path: Path) -> None:
    with pytest.raises(DrivetrainError, match="train_loss is not finite"):
        train(Regression({(0, 2): NAN}), tmp_path, [NaNGuard("train_loss")], enable_checkpointing=False)
    with pytest.raises(ConfigurationError, match=r"'train_los'.*Did you mean 'train_loss'"):
        train(Regression({}), tmp_path, [NaNGuard("train_los")], enable_checkpointing=False)


class BadGradient(Regression):
    """Its loss is finite in batch 2, its gradient is not."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 2:
            zero = (self.layer.weight * 0).sum()
            loss = loss + zero.sqrt()  # 0, and its derivative is infinite times 0
        return loss


def test_gradients_are_watched_where_asked_for(tmp_path: Path) -> None:
    unseen = BadGradient({})
    with pytest.raises(DrivetrainError, match="batch 3"):
        train(unseen, tmp_path, [NaNGuard()], enable_checkpointing=False)
    seen = BadGradient({})
    with pytest.raises(DrivetrainError, match=r"the loss or a gradient is not finite \(step 2, epoch 0, batch 2\)"):
        train(seen, tmp_path, [NaNGuard(check_gradients=True)], enable_checkpointing=False)
    assert all(torch.isfinite(weight).all() for weight in weights(seen))


def test_a_task_that_steps_by_hand_can_be_stopped(tmp_path: Path) -> None:
    class ByHand(Regression):
        automatic_optimization = False

        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
            loss = super().training_step(batch, batch_idx)
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    with pytest.raises(DrivetrainError, match="epoch 0, batch 3"):
        train(ByHand({(0, 3): NAN}), tmp_path, [NaNGuard()], enable_checkpointing=False)
    with pytest.raises(ConfigurationError, match="steps its optimizers by hand"):
        train(ByHand({}), tmp_path, [NaNGuard(action="skip")], enable_checkpointing=False)


# skip


def test_skip_changes_neither_weights_nor_optimizer_nor_schedule_nor_the_count(tmp_path: Path) -> None:
    recorder, guard = Recorder(), NaNGuard(action="skip")
    train(Regression({(0, 3): NAN}), tmp_path, [guard, recorder], enable_checkpointing=False)
    before, after = recorder.states[2], recorder.states[3]
    assert before["step"] == after["step"] == 3
    assert before["schedule"] == after["schedule"]
    torch.testing.assert_close(before["weights"], after["weights"], rtol=0, atol=0)
    torch.testing.assert_close(before["momentum"], after["momentum"], rtol=0, atol=0)
    assert guard.skipped == [(0, 3)]


def test_a_run_with_skipped_steps_is_that_of_a_plain_loop_without_these_batches(tmp_path: Path) -> None:
    task = Regression({(0, 3): NAN, (1, 0): INF})
    trainer = train(task, tmp_path, [NaNGuard(action="skip")], enable_checkpointing=False)
    assert trainer.global_step == 10
    torch.testing.assert_close(weights(task), plain_run({(0, 3), (1, 0)}))


def test_skipping_without_an_end_is_an_error(tmp_path: Path) -> None:
    task = Regression({(0, index): NAN for index in range(1, 6)})
    with pytest.raises(DrivetrainError, match=r"3 steps in a row have been skipped"):
        train(task, tmp_path, [NaNGuard(action="skip", max_skips=3)], enable_checkpointing=False)
    torch.testing.assert_close(weights(task), plain_run({(0, i) for i in range(1, 6)}, epochs=1))


def test_under_a_scaled_loss_the_scale_survives_a_skipped_step(tmp_path: Path) -> None:
    task = Regression({(0, 1): NAN})
    guard = NaNGuard(action="skip", check_gradients=True)
    precision = Float16Mixed(init_scale=128.0)
    trainer = train(task, tmp_path, [guard], enable_checkpointing=False, precision=precision, epochs=1)
    assert guard.skipped == [(0, 1)]
    assert trainer.global_step == 5
    assert precision.scaler.get_scale() == 128.0
    assert all(torch.isfinite(weight).all() for weight in weights(task))


def test_an_optimizer_that_computes_gradients_itself_is_left_out_too(tmp_path: Path) -> None:
    class Closure(Regression):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), max_iter=2)

    task = Closure({(0, 1): NAN})
    guard = NaNGuard(action="skip")
    trainer = train(task, tmp_path, [guard], epochs=1, enable_checkpointing=False)
    assert guard.skipped == [(0, 1)]
    assert trainer.global_step == 5
    assert all(torch.isfinite(weight).all() for weight in weights(task))


def skip_on_processes(root: str, rank: int) -> dict[str, Any]:
    guard = NaNGuard(action="skip")
    trainer = train(Regression({(0, 2): NAN}, rank=rank), root, [guard], enable_checkpointing=False)
    return {**state_of(trainer), "skipped": guard.skipped}


@pytest.mark.parametrize("rank", [0, 1])
def test_all_processes_skip_where_one_met_it(rank: int, tmp_path: Path) -> None:
    first, second = run_in_processes(skip_on_processes, args=(str(tmp_path), rank))
    assert first["skipped"] == second["skipped"] == [(0, 2)]
    assert first["step"] == second["step"] == 11
    torch.testing.assert_close(first["weights"], second["weights"], rtol=0, atol=0, check_device=False)
    assert all(torch.isfinite(weight).all() for weight in first["weights"])


def stop_on_processes(root: str) -> str:
    try:
        train(Regression({(0, 2): NAN}, rank=1), root, [NaNGuard()], enable_checkpointing=False)
    except DrivetrainError as error:
        return str(error)
    return ""


def test_all_processes_stop_and_say_which_rank_met_it(tmp_path: Path) -> None:
    messages = run_in_processes(stop_on_processes, args=(str(tmp_path),))
    assert messages[0] == messages[1]
    assert "step 2, epoch 0, batch 2" in messages[0]
    assert "1: nan" in messages[0]
    assert "0: nan" not in messages[0]


# roll back


def test_rollback_goes_on_from_the_newest_checkpoint_without_the_batch(tmp_path: Path) -> None:
    task = Regression({(0, 4): NAN})
    guard = NaNGuard(action="rollback")
    checkpoint = ModelCheckpoint(tmp_path / "ckpt", "{step}", every_n_train_steps=3)
    trainer = train(task, tmp_path, [guard, checkpoint])
    assert guard.rollbacks == 1
    assert task.trained[:5] == [(0, index) for index in range(5)]
    assert task.trained[5:] == [(0, 3), (0, 5), *((1, index) for index in range(6))]
    assert trainer.global_step == 11
    torch.testing.assert_close(weights(task), plain_run({(0, 4)}))


def test_rollback_drops_a_whole_accumulated_step(tmp_path: Path) -> None:
    task = Regression({(0, 5): NAN})
    guard = NaNGuard(action="rollback")
    checkpoint = ModelCheckpoint(tmp_path / "ckpt", "{step}", every_n_train_steps=1)
    train(task, tmp_path, [guard, checkpoint], batches=8, epochs=1, accumulate_grad_batches=2)
    assert guard.skipped == [(0, 4), (0, 5)]
    assert task.trained == [(0, index) for index in (0, 1, 2, 3, 4, 5, 6, 7)]


def test_the_last_batches_of_an_epoch_can_be_left_out(tmp_path: Path) -> None:
    task = Regression({(0, 5): NAN})
    checkpoint = ModelCheckpoint(tmp_path / "ckpt", "{step}", every_n_train_steps=2)
    train(task, tmp_path, [NaNGuard(action="rollback"), checkpoint])
    assert task.trained[6:] == [(0, 4), *((1, index) for index in range(6))]
    torch.testing.assert_close(weights(task), plain_run({(0, 5)}))


def test_what_is_found_later_goes_back_behind_the_step_where_it_began(tmp_path: Path) -> None:
    task = Regression({(0, 4): NAN})
    guard = NaNGuard(action="rollback", every_n_steps=10)
    checkpoint = ModelCheckpoint(tmp_path / "ckpt", "{step}", every_n_train_steps=2, save_top_k=-1)
    train(task, tmp_path, [guard, checkpoint])
    assert guard.skipped == [(0, 4)]
    torch.testing.assert_close(weights(task), plain_run({(0, 4)}))


def test_the_number_of_rollbacks_survives_them_and_has_an_end(tmp_path: Path) -> None:
    task = Regression({(0, 3): NAN, (0, 4): NAN, (0, 5): NAN})
    guard = NaNGuard(action="rollback", max_rollbacks=2)
    checkpoint = ModelCheckpoint(tmp_path / "ckpt", "{step}", every_n_train_steps=2)
    with pytest.raises(DrivetrainError, match=r"rolled back 2 times already, and max_rollbacks=2"):
        train(task, tmp_path, [guard, checkpoint])
    assert guard.skipped == [(0, 3), (0, 4)]


class SaveAgain(Callback):
    """Saves when a batch is trained on for the second time."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Trainer, task: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if task.trained.count((0, 4)) == 2 and batch_idx == 4:
            trainer.save_checkpoint(self.path)


def test_a_run_resumed_before_a_batch_to_leave_out_still_leaves_it_out(tmp_path: Path) -> None:
    def callbacks() -> list[Any]:
        checkpoint = ModelCheckpoint(tmp_path / "ckpt", "{step}", every_n_train_steps=3)
        return [NaNGuard(action="rollback"), checkpoint, SaveAgain(tmp_path / "between")]

    train(Regression({(0, 5): NAN}), tmp_path, callbacks(), epochs=1)
    resumed = Regression({(0, 5): NAN})
    train(resumed, tmp_path, callbacks(), ckpt_path=str(tmp_path / "between"))
    assert resumed.trained == [(1, index) for index in range(6)]
    torch.testing.assert_close(weights(resumed), plain_run({(0, 5)}))


def test_a_rollback_needs_checkpoints_to_go_back_to(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="needs a ModelCheckpoint that saves more than weights"):
        train(Regression({}), tmp_path, [NaNGuard(action="rollback")], enable_checkpointing=False)
    checkpoint = ModelCheckpoint(tmp_path / "ckpt", every_n_train_steps=3)
    with pytest.raises(DrivetrainError, match="There is no checkpoint to roll back to yet"):
        train(Regression({(0, 1): NAN}), tmp_path, [NaNGuard(action="rollback"), checkpoint])


def roll_back_on_processes(root: str) -> dict[str, Any]:
    task = Regression({(0, 4): NAN}, rank=1)
    guard = NaNGuard(action="rollback")
    checkpoint = ModelCheckpoint(os.path.join(root, "ckpt"), "{step}", every_n_train_steps=3)
    trainer = train(task, root, [guard, checkpoint])
    return {**state_of(trainer), "trained": task.trained, "rollbacks": guard.rollbacks}


def test_all_processes_go_back_together(tmp_path: Path) -> None:
    first, second = run_in_processes(roll_back_on_processes, args=(str(tmp_path),))
    for key in ("step", "trained", "rollbacks", "schedule"):
        assert first[key] == second[key]
    assert first["rollbacks"] == 1
    assert first["trained"][5:7] == [(0, 3), (0, 5)]
    torch.testing.assert_close(first["weights"], second["weights"], rtol=0, atol=0, check_device=False)


# what is saved


def test_nothing_is_saved_from_a_spoilt_model(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "ckpt", "{step}", every_n_train_steps=1, save_top_k=-1)
    with pytest.raises(DrivetrainError):
        train(BadGradient({}), tmp_path, [NaNGuard(every_n_steps=5), checkpoint])
    assert sorted(path.name for path in (tmp_path / "ckpt").iterdir()) == ["step=1.ckpt", "step=2.ckpt"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"action": "skipp"}, "Did you mean 'skip'"),
        ({"max_rollbacks": -1}, "max_rollbacks must be at least 0"),
        ({"every_n_steps": 0}, "every_n_steps must be at least 1"),
        ({"action": "skip", "every_n_steps": 5}, "steps can only be skipped if every step is checked"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        NaNGuard(**options)
