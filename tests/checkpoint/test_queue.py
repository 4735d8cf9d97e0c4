"""Saving while training goes on."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from drivetrain import (
    Accelerator,
    Callback,
    CheckpointError,
    DrivetrainDeprecationWarning,
    ModelCheckpoint,
    PartialState,
    Task,
    Trainer,
)
from drivetrain.checkpoint import load_run_state, save_queue, save_run_state
from tests.checkpoint.states import (
    CountingStorage,
    alone,
    assert_same,
    leftovers,
    odd_tensors,
    own_state,
    run_state,
    seed_of,
)
from tests.pool import ROOT, device, run_in_processes


class SlowStorage(CountingStorage):
    """Writes nothing until it is let."""

    def __init__(self) -> None:
        super().__init__(before=lambda kind: self.wait())
        self.reached, self.go = threading.Event(), threading.Event()

    def wait(self) -> None:
        self.reached.set()
        assert self.go.wait(60)


def start(directory: str | Path, seed: int = 0, storage: Any = None) -> Any:
    return save_run_state(directory, run_state(seed), own_state(), alone(), block=False, storage=storage)


def test_what_training_changes_during_the_write_is_not_written(tmp_path: Path) -> None:
    tensors = odd_tensors()
    expected = {name: tensor.clone() for name, tensor in tensors.items()}
    expected["tied_again"] = expected["tied"]
    numbers = [1, 2]
    storage = SlowStorage()
    shared = {"tensors": tensors, "numbers": numbers}
    pending = save_run_state(tmp_path / "one", shared, {}, alone(), block=False, storage=storage)
    assert storage.reached.wait(60)
    assert not pending.done()
    with torch.no_grad():
        for tensor in tensors.values():
            if tensor.numel() and not tensor.is_conj() and tensor.stride() != (0, 1):
                tensor.copy_(torch.zeros_like(tensor))
    numbers.append(3)
    tensors.clear()
    storage.go.set()
    pending.wait(60)
    loaded, _ = load_run_state(tmp_path / "one", alone())
    assert_same(loaded, {"tensors": expected, "numbers": [1, 2]})


def test_it_appears_only_once_it_is_complete(tmp_path: Path) -> None:
    storage = SlowStorage()
    pending = start(tmp_path / "one", storage=storage)
    assert storage.reached.wait(60)
    assert not (tmp_path / "one").exists()
    assert save_queue(alone()).pending is pending
    storage.go.set()
    pending.wait(60)
    assert pending.done()
    assert seed_of(tmp_path / "one") == 0
    assert save_queue(alone()).pending is None
    assert leftovers(tmp_path) == []


def test_waiting_may_have_an_end(tmp_path: Path) -> None:
    storage = SlowStorage()
    pending = start(tmp_path / "one", storage=storage)
    with pytest.raises(TimeoutError, match="still being written"):
        pending.wait(0.01)
    storage.go.set()
    pending.wait(60)


@pytest.mark.parametrize("block", [True, False])
def test_there_is_one_at_a_time(block: bool, tmp_path: Path) -> None:
    storage = SlowStorage()
    first = start(tmp_path / "one", 1, storage=storage)
    assert storage.reached.wait(60)
    seen: list[bool] = []

    second_storage = CountingStorage(before=lambda kind: seen.append(first.done()))
    threading.Timer(0.05, storage.go.set).start()
    second = save_run_state(tmp_path / "two", run_state(2), own_state(), alone(), block=block, storage=second_storage)
    second.wait(60)
    assert seen
    assert all(seen)
    assert (seed_of(tmp_path / "one"), seed_of(tmp_path / "two")) == (1, 2)


def failing() -> CountingStorage:
    return CountingStorage(5, errno.ENOSPC)


def fail_in_background(directory: Path) -> Any:
    """A save that has failed by now, its error untold."""
    pending = start(directory, storage=failing())
    pending._finished.wait(60)
    return pending


def test_an_error_is_raised_by_wait(tmp_path: Path) -> None:
    pending = start(tmp_path / "one", storage=failing())
    with pytest.raises(CheckpointError, match="No space left"):
        pending.wait(60)
    assert pending.failed()
    save_queue(alone()).check()  # it was told
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("ask", ["check", "finish", "raise_if_failed", "next save"])
def test_an_error_is_raised_by_whatever_asks_next_and_once(ask: str, tmp_path: Path) -> None:
    pending = fail_in_background(tmp_path / "one")
    queue = save_queue(alone())
    asks = {
        "check": queue.check,
        "finish": queue.finish,
        "raise_if_failed": pending.raise_if_failed,
        "next save": lambda: start(tmp_path / "two"),
    }
    with pytest.raises(CheckpointError, match=r"one could not be written: .*No space left"):
        asks[ask]()
    queue.finish()
    start(tmp_path / "two", 2).wait(60)
    assert seed_of(tmp_path / "two") == 2


def test_while_all_is_well_a_check_is_one_look(tmp_path: Path) -> None:
    queue = save_queue(alone())
    assert queue.failed is None
    queue.check()
    start(tmp_path / "one").wait(60)
    assert queue.failed is None


def test_what_a_queue_did_for_its_copies_has_no_effect_any_more_and_warns(tmp_path: Path) -> None:
    queue = save_queue(alone())
    with pytest.warns(DrivetrainDeprecationWarning, match="SaveQueue.prepare"):
        queue.prepare([torch.ones(3)])
    with pytest.warns(DrivetrainDeprecationWarning, match="SaveQueue.settle"):
        queue.settle()
    with pytest.warns(DrivetrainDeprecationWarning, match="SaveQueue.staging_bytes"):
        assert queue.staging_bytes == 0
    with pytest.warns(DrivetrainDeprecationWarning, match="SaveQueue.release"):
        queue.release()
    with pytest.warns(DrivetrainDeprecationWarning, match="optimizers"):
        save_run_state(tmp_path / "one", run_state(1), own_state(), alone(), optimizers=[])
    assert seed_of(tmp_path / "one") == 1


def test_what_is_to_happen_afterwards_happens_also_after_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[bool] = []
    storage = SlowStorage()
    good = start(tmp_path / "one", storage=storage)
    good.add_done_callback(lambda save: told.append(save.failed()))
    good.add_done_callback(lambda save: 1 / 0)
    assert told == []
    storage.go.set()
    good.wait(60)
    good.add_done_callback(lambda save: told.append(save.failed()))
    bad = fail_in_background(tmp_path / "two")
    bad.add_done_callback(lambda save: told.append(save.failed()))
    with pytest.raises(CheckpointError):
        bad.wait(60)
    assert told == [False, False, True]
    assert "ZeroDivisionError" in caplog.text


def train_and_save(root: str) -> list[float]:
    """Collectives of a training go on while checkpoints are written."""
    state = PartialState()
    value = torch.zeros(1000)
    sums = []
    for step in range(30):
        dist.all_reduce(value.add_(1))
        sums.append(value[0].item())
        if step % 5 == 0:
            shared = {**run_state(step), "value": value}
            save_run_state(f"{root}/{step}", shared, own_state(state.process_index), state, block=False)
    save_queue(state).finish()
    return sums


def test_collectives_of_the_training_do_not_mix_with_those_of_the_save(tmp_path: Path) -> None:
    results = run_in_processes(train_and_save, 2, args=(str(tmp_path),))
    assert results[0] == results[1]
    for step in range(0, 30, 5):
        shared, _ = load_run_state(tmp_path / str(step))
        assert_same(shared, {**run_state(step), "value": torch.full((1000,), results[0][step])})


def fail_on_one(root: str) -> str:
    state = PartialState()
    storage = failing() if state.process_index == 1 else None
    save_run_state(f"{root}/one", run_state(), {}, state, block=False, storage=storage)
    try:
        save_queue(state).finish()
    except CheckpointError as error:
        return str(error)
    return "saved"


def test_an_error_of_one_process_is_raised_on_all(tmp_path: Path) -> None:
    messages = run_in_processes(fail_on_one, 2, args=(str(tmp_path),))
    assert all("rank 1: " in message and "No space left" in message for message in messages)
    assert os.listdir(tmp_path) == []


def save_each_step(root: str) -> dict[str, list[Any]]:
    """Train under DDP, and save after each step in the background and at once."""
    state = PartialState()

    class Both(Callback):
        def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
            trainer.save_checkpoint(f"{root}/background/{trainer.global_step}", block=False)
            if trainer.global_step % 2:
                trainer.save_checkpoint(f"{root}/at_once/{trainer.global_step}")

    class Regression(Task):
        def __init__(self) -> None:
            super().__init__()
            self.model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.model(batch[0]).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.05)

    torch.manual_seed(3)
    data = torch.utils.data.TensorDataset(torch.randn(48, 8))
    keeper = ModelCheckpoint(f"{root}/kept", every_n_train_steps=1, save_top_k=-1, async_save=True)
    trainer = Trainer(
        max_epochs=2,
        callbacks=[keeper, Both()],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        deterministic=True,
    )
    trainer.fit(Regression(), torch.utils.data.DataLoader(data, batch_size=4))
    save_queue(state).finish()
    found: dict[str, list[Any]] = {}
    if state.is_main_process:
        for kind in ("background", "at_once"):
            for step in (1, 3, 5, 7, 9, 11):
                found.setdefault(kind, []).append(load_run_state(f"{root}/{kind}/{step}")[0])
    return found


def test_under_ddp_it_is_what_a_save_at_once_writes(tmp_path: Path) -> None:
    found, _ = run_in_processes(save_each_step, 2, args=(str(tmp_path),))
    for background, at_once in zip(found["background"], found["at_once"], strict=True):
        assert_same(background["engine"], at_once["engine"])
        assert_same(background["driver"]["progress"], at_once["driver"]["progress"])


SCRIPT = """
import sys
import torch
from drivetrain import Accelerator

accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(2000, 500)
model = accelerator.prepare(model)
with torch.no_grad():
    accelerator.unwrap_model(model).weight.fill_(1)
accelerator.save_state(sys.argv[1], block=False)
with torch.no_grad():
    accelerator.unwrap_model(model).weight.fill_(2)
print("over")
"""


def run_script(text: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    (cwd / "script.py").write_text(text)
    return subprocess.run(
        [sys.executable, "script.py", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_script_without_a_main_guard_that_ends_at_once_has_its_save(tmp_path: Path) -> None:
    done = run_script(SCRIPT, "one", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["over"]
    shared, _ = load_run_state(tmp_path / "one")
    assert (shared["engine"]["models"][0]["weight"] == 1).all()
    assert leftovers(tmp_path) == []


def test_an_error_that_nobody_asked_for_is_written_down_at_the_end(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = run_script(SCRIPT, "file/one", cwd=tmp_path)
    assert "A checkpoint was not saved: The checkpoint" in done.stderr
    assert "file/one" in done.stderr


def test_the_accelerator_saves_in_the_background(tmp_path: Path) -> None:
    accelerator = Accelerator(device=device())
    model = accelerator.prepare(torch.nn.Linear(3, 2))
    before = model.weight.detach().clone()
    accelerator.save_state(tmp_path / "one", block=False)
    with torch.no_grad():
        model.weight.zero_()
    accelerator.load_state(tmp_path / "one")  # waits for it
    assert torch.equal(model.weight, before)
