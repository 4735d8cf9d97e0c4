"""What is copied while training goes on, and what waits for it."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain import Accelerator, Callback, CheckpointError, ModelCheckpoint, Task, Trainer
from drivetrain.checkpoint import SaveQueue, load_run_state, save_queue, save_run_state
from drivetrain.checkpoint.save import Copying
from drivetrain.runtime.state import PartialState
from tests.checkpoint.states import alone, assert_same, leftovers
from tests.pool import run_in_processes

WIDTH = 64


class Held:
    """Keeps the thread that writes from copying, until it is let or steps have waited for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        self.waited: list[int] = []
        finish, settle = Copying.finish, SaveQueue.settle

        def held(copying: Copying, threads: int = 0) -> list[str]:
            if threads == 0:
                assert self.go.wait(60)
            return finish(copying, threads)

        def noted(queue: SaveQueue) -> None:
            if queue._late is not None and not queue._late._done.is_set():
                self.waited.append(len(queue._late._pieces))
            settle(queue)

        monkeypatch.setattr(Copying, "finish", held)
        monkeypatch.setattr(SaveQueue, "settle", noted)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Any:
    one = Held(monkeypatch)
    yield one
    one.go.set()


def trained(kind: type[Optimizer] = torch.optim.AdamW, **options: Any) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
    optimizer = kind(model.parameters(), **{"lr": 0.1, **options})
    for _ in range(2):
        backward(model)
        optimizer.step()
    return model, optimizer


def backward(model: nn.Module) -> Tensor:
    loss = model(torch.randn(8, WIDTH)).square().mean()
    model.zero_grad()
    loss.backward()
    return loss


def state_of(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def save(path: Path, model: nn.Module, optimizer: Optimizer) -> Any:
    return save_run_state(path, state_of(model, optimizer), {}, alone(), block=False, optimizers=[optimizer])


def test_a_step_waits_for_the_copies_of_what_it_changes(held: Held, tmp_path: Path) -> None:
    model, optimizer = trained()
    before = copy.deepcopy(state_of(model, optimizer))
    pending = save(tmp_path / "one", model, optimizer)
    for parameter in model.parameters():
        parameter.data.clamp_(-0.01, 0.01)  # leaves no trace, and need not: parameters were copied at once
    backward(model)
    assert not held.waited
    optimizer.step()
    assert held.waited == [6]  # two moments of all but the last bias, which is as small as a count of steps
    assert not pending.done()
    held.go.set()
    pending.wait(60)
    assert_same(load_run_state(tmp_path / "one", alone())[0], before)
    backward(model)
    optimizer.step()
    assert len(held.waited) == 1  # nothing to wait for any more


def test_steps_of_other_optimizers_wait_for_nothing(held: Held, tmp_path: Path) -> None:
    saved, other = trained(), trained()
    pending = save(tmp_path / "one", *saved)
    backward(other[0])
    other[1].step()
    assert not held.waited
    held.go.set()
    pending.wait(60)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.LBFGS, torch.optim.NAdam])
def test_any_optimizer_of_torch(kind: type[Optimizer], held: Held, tmp_path: Path) -> None:
    model, optimizer = (
        trained(kind, **({"momentum": 0.9} if kind is torch.optim.SGD else {}))
        if kind is not torch.optim.LBFGS
        else trained_by_closure()
    )
    before = copy.deepcopy(state_of(model, optimizer))
    pending = save(tmp_path / "one", model, optimizer)
    for _ in range(2):
        optimizer.step(lambda: backward(model))
    held.go.set()
    pending.wait(60)
    assert_same(load_run_state(tmp_path / "one", alone())[0], before)


def trained_by_closure() -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    optimizer.step(lambda: backward(model))
    return model, optimizer


@pytest.mark.filterwarnings("error:Dynamo does not know")
def test_a_compiled_step_waits_too(tmp_path: Path) -> None:
    model, optimizer = trained()
    step = torch.compile(optimizer.step, backend="eager")
    backward(model)
    step()
    before = copy.deepcopy(state_of(model, optimizer))
    queue = save_queue(alone())
    for number in range(3):
        pending = save(tmp_path / str(number), model, optimizer)
        backward(model)
        assert queue._late is not None
        step()
        assert queue._late is None
        pending.wait(60)
    assert_same(load_run_state(tmp_path / "0", alone())[0], before)


def test_a_change_outside_the_step_is_told(held: Held, tmp_path: Path) -> None:
    model, optimizer = trained()
    save(tmp_path / "zero", model, optimizer)
    held.go.set()
    save_queue(alone()).finish()
    held.go.clear()
    pending = save(tmp_path / "one", model, optimizer)
    optimizer.state[model[2].weight]["exp_avg"].mul_(0.5)
    backward(model)
    optimizer.step()
    held.go.set()
    with pytest.raises(CheckpointError, match=r"optimizer/state/2/exp_avg was changed in place between .*block=True"):
        pending.wait(60)
    assert leftovers(tmp_path) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["zero"]
    save(tmp_path / "two", model, optimizer).wait(60)


def test_an_optimizer_that_cannot_be_watched_is_copied_at_once(held: Held, tmp_path: Path) -> None:
    model, inner = trained()

    class Facade(Optimizer):
        def __init__(self) -> None:  # without that of the base
            self.state, self.param_groups, self.defaults = inner.state, inner.param_groups, inner.defaults

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            inner.step()

    before = copy.deepcopy(inner.state_dict())
    shared = {"optimizer": inner.state_dict()}
    pending = save_run_state(tmp_path / "one", shared, {}, alone(), block=False, optimizers=[Facade()])
    backward(model)
    inner.step()
    assert not held.waited
    held.go.set()
    pending.wait(60)
    assert_same(load_run_state(tmp_path / "one", alone())[0]["optimizer"], before)


def test_a_parameter_is_copied_at_once_also_where_it_is_part_of_the_optimizers_state(
    held: Held, tmp_path: Path
) -> None:
    model, optimizer = trained()
    for parameter in model.parameters():
        optimizer.state[parameter]["iterate"] = parameter.data
    before = copy.deepcopy(state_of(model, optimizer))
    pending = save(tmp_path / "one", model, optimizer)
    for parameter in model.parameters():
        parameter.data.zero_()
    held.go.set()
    pending.wait(60)
    assert_same(load_run_state(tmp_path / "one", alone())[0], before)


def test_loading_while_it_copies(held: Held, tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(*trained())
    accelerator.save_state(tmp_path / "one")
    backward(model)
    optimizer.step()
    before = copy.deepcopy(optimizer.optimizer.state_dict())
    accelerator.save_state(tmp_path / "two", block=False)
    threading.Timer(0.2, held.go.set).start()
    accelerator.load_state(tmp_path / "one")
    accelerator.load_state(tmp_path / "two")
    assert_same(optimizer.optimizer.state_dict()["state"], before["state"])


def test_an_optimizer_gets_one_hook_however_often_it_is_saved(tmp_path: Path) -> None:
    model, optimizer = trained()
    for number in range(3):
        save(tmp_path / str(number), model, optimizer).wait(60)
    assert len(optimizer._optimizer_step_pre_hooks) == 1


def test_many_threads_copy_each_piece_once() -> None:
    sources = [torch.randint(255, (size,), dtype=torch.uint8) for size in (1, 100, 4096, 100_000, 0)]
    targets = [torch.zeros_like(source) for source in sources]
    copying = Copying([(str(n), *pair) for n, pair in enumerate(zip(targets, sources, strict=True))], piece=64)
    threads = [threading.Thread(target=copying.finish, args=(number,)) for number in (0, 0, 3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert copying.finish() == []
    assert all(map(torch.equal, targets, sources))


def test_nothing_to_copy_is_finished() -> None:
    assert Copying([], piece=64).finish() == []


def save_each_step(root: str) -> dict[str, list[Any]]:
    """Train under DDP, and save after each step in the background and at once."""
    state = PartialState()

    class Both(Callback):
        def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
            trainer.save_checkpoint(f"{root}/background/{trainer.global_step}", block=False)
            assert save_queue(state)._late is not None
            if trainer.global_step % 2:
                trainer.save_checkpoint(f"{root}/at_once/{trainer.global_step}")

    class Regression(Task):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 1))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.model(batch[0]).square().mean()

        def configure_optimizers(self) -> Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.05)

    torch.manual_seed(3)
    data = torch.utils.data.TensorDataset(torch.randn(48, WIDTH))
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
