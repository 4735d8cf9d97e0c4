"""Changes that `Trainer(advise=True)` tries before a run, and that the run is the same as without."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from drivetrain.accelerator import Accelerator
from drivetrain.runtime.environment import RESUME_VARIABLE
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.seeds import RandomState, set_seed
from drivetrain.strategies import DDP
from drivetrain.trainer.data_module import DataModule
from drivetrain.trainer.task import Task
from drivetrain.trainer.trainer import Trainer
from drivetrain.trainer.tuning import tuner as advice_module
from tests.pool import run_in_processes

QUIET: dict[str, Any] = {
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
    "logger": False,
    "enable_checkpointing": False,
    "accelerator": "cpu",
    "compile": False,
}


class Rows(Dataset[Tensor]):
    """Waits for each row, and draws from all generators."""

    def __init__(self, count: int, seconds: float = 0.0) -> None:
        self.count, self.seconds = count, seconds

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(self.seconds)
        return torch.full((3,), float(index)) + torch.rand(3) + random.random() + float(np.random.rand())


class Stream(IterableDataset[Tensor]):
    """Continues where the last iteration of it ended."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(40):
            self.position += 1
            yield torch.full((3,), float(self.position))


class Net(Task):
    """Records its losses; `loads` makes its loader."""

    def __init__(self, loads: Any = None) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.losses: list[float] = []
        self.loads = loads
        if loads is not None:
            self.train_dataloader = loads  # type: ignore[method-assign]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch / 40).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Rowed(DataModule):
    def setup(self, stage: str) -> None:
        self.order = torch.randperm(24).tolist()

    def train_dataloader(self) -> Any:
        return DataLoader(Rows(24), 4, sampler=self.order)


def shuffled() -> dict[str, Any]:
    return {"train_dataloaders": DataLoader(Rows(24), 4, shuffle=True)}


def drawn_apart() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    return {"train_dataloaders": DataLoader(Rows(24), 4, shuffle=True, generator=generator)}


def several() -> dict[str, Any]:
    return {"train_dataloaders": [DataLoader(Rows(24), 4, shuffle=True), DataLoader(Rows(12), 4, shuffle=True)]}


def streamed() -> dict[str, Any]:
    return {"train_dataloaders": DataLoader(Stream(), 4)}


def of_module() -> dict[str, Any]:
    return {"datamodule": Rowed()}


class OfSeveral(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(torch.cat(list(batch)) if isinstance(batch, list | tuple) else batch, batch_idx)


def what_is_left(task: Net) -> list[Any]:
    state = RandomState.capture()
    weights = [value.tolist() for value in task.state_dict().values()]
    return [task.losses, weights, state.python, state.torch.tolist(), [str(each) for each in state.numpy]]


def trained(advise: bool, data: dict[str, Any], seed: int | None = None, **options: Any) -> list[Any]:
    set_seed(7)
    task = OfSeveral()
    trainer = Trainer(max_epochs=2, advise=advise, seed=seed, **{**QUIET, **options})
    trainer.fit(task, **data)
    return what_is_left(task)


@pytest.mark.parametrize("seed", [None, 11])
@pytest.mark.parametrize("make", [shuffled, drawn_apart, several, streamed, of_module])
def test_the_run_is_bit_for_bit_the_one_without_advice(make: Any, seed: int | None) -> None:
    assert trained(True, make(), seed) == trained(False, make(), seed)


def test_the_task_that_is_given_sees_nothing_of_the_trials() -> None:
    task = Net()
    before = {name: value.clone() for name, value in task.state_dict().items()}
    trainer = Trainer(max_epochs=1, advise=True, limit_train_batches=0, **QUIET)
    trainer.fit(task, **shuffled())
    assert task.losses == []
    assert all(torch.equal(value, before[name]) for name, value in task.state_dict().items())


def test_it_finds_that_the_loader_is_slow_and_what_workers_gain(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = Trainer(max_epochs=1, max_steps=2, advise=True, **QUIET)
    trainer.fit(Net(), DataLoader(Rows(120, seconds=0.01), 4))
    first = trainer.advice[0]
    assert first.change in ("DataLoader(num_workers=2)", "DataLoader(num_workers=4)")
    assert first.gain > 1.3
    shown = capsys.readouterr().out
    assert f"{first.change}: {first.gain:.1f}x" in shown
    assert len(trainer.advice) <= 3


class SlowIn32(Net):
    """Takes longer without autocast."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if not torch.is_autocast_enabled("cpu"):
            time.sleep(0.02)
        return super().training_step(batch, batch_idx)


def test_it_finds_changes_of_the_trainer_and_marks_those_that_change_numbers() -> None:
    trainer = Trainer(max_epochs=1, max_steps=2, advise=True, **QUIET)
    trainer.fit(SlowIn32(), **shuffled())
    found = {each.change: each for each in trainer.advice}
    assert set(found) == {"Trainer(precision='bf16-mixed')"}
    assert all(each.gain > 1.3 for each in found.values())
    assert "changes the numbers" in found["Trainer(precision='bf16-mixed')"].note
    assert trainer.precision == "32"


class SlowByRows(Net):
    """Takes longer where the weights of its convolution are laid out channel by channel."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 2)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if not self.conv.weight.is_contiguous(memory_format=torch.channels_last):
            time.sleep(0.02)
        images = batch[:, :, None, None].expand(-1, -1, 2, 2)
        return super().training_step(batch, batch_idx) + self.conv(images).square().mean()


CHANNELS_LAST = "task.to(memory_format=torch.channels_last)"


def test_it_finds_that_channels_side_by_side_pay_and_leaves_them_to_the_user() -> None:
    trainer = Trainer(max_epochs=1, max_steps=2, advise=True, precision="bf16-mixed", **QUIET)
    task = SlowByRows()
    trainer.fit(task, **shuffled())
    [found] = trainer.advice
    assert (found.change, found.gain > 1.3) == (CHANNELS_LAST, True)
    assert task.conv.weight.is_contiguous()


@pytest.mark.parametrize("make", [lambda: Net(), lambda: SlowByRows().to(memory_format=torch.channels_last)])
def test_they_are_not_tried_without_convolutions_or_where_they_are(
    make: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = Trainer(max_epochs=1, max_steps=2, advise=True, **QUIET)
    trainer.fit(make(), **shuffled())
    assert "Advice" in (shown := capsys.readouterr().out)
    assert CHANNELS_LAST not in shown


def test_that_nothing_pays_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advice_module, "PAYS", 100.0)
    trainer = Trainer(max_epochs=1, max_steps=2, advise=True, **QUIET)
    trainer.fit(Net(), DataLoader(Rows(60, seconds=0.003), 2))
    assert trainer.advice == []
    [line] = [line for line in capsys.readouterr().out.splitlines() if "nothing that was tried pays" in line]
    assert "DataLoader(num_workers=2)" in line


class NeedsLogger(Net):
    def on_train_start(self) -> None:
        if self.trainer.barebones:
            raise AttributeError("there is no experiment")


def test_a_task_that_cannot_be_tried_is_trained_all_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = Trainer(max_epochs=1, advise=True, **QUIET)
    trainer.fit(NeedsLogger(), **shuffled())
    assert trainer.global_step == 6
    assert "nothing could be tried, since the steps as they are raised AttributeError" in capsys.readouterr().out


class OnlyIn32(SlowIn32):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if torch.is_autocast_enabled("cpu"):
            raise RuntimeError("no kernel for bfloat16")
        return super().training_step(batch, batch_idx)


def test_a_change_that_fails_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = Trainer(max_epochs=1, max_steps=2, advise=True, **QUIET)
    trainer.fit(OnlyIn32(), **shuffled())
    assert trainer.advice == []
    shown = capsys.readouterr().out
    assert "Trainer(precision='bf16-mixed') could not be tried: RuntimeError: no kernel for bfloat16" in shown


def test_trials_leave_the_checkpoint_to_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Trainer(max_epochs=1, **QUIET)
    first.fit(Net(), **shuffled())
    first.save_checkpoint(tmp_path / "first")
    monkeypatch.setenv(RESUME_VARIABLE, str(tmp_path / "first"))
    trainer = Trainer(max_epochs=3, advise=True, default_root_dir=tmp_path / "root", **QUIET)
    task = Net()
    trainer.fit(task, **shuffled())
    assert (trainer.global_step, len(task.losses)) == (18, 12)
    assert not (tmp_path / "root").exists()


def test_what_cannot_be_tried_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"barebones=True, advise=True.*Leave one of them out"):
        Trainer(barebones=True, advise=True)
    with pytest.raises(ConfigurationError, match="accelerator=<Accelerator>, advise=True"):
        Trainer(accelerator=Accelerator(cpu=True), advise=True)
    trainer = Trainer(max_epochs=1, advise=True, **QUIET)
    with pytest.raises(ConfigurationError, match="generator can be read only once"):
        trainer.fit(Net(), (torch.ones(4, 3) for _ in range(4)))


def test_fast_dev_run_leaves_it_out() -> None:
    trainer = Trainer(fast_dev_run=True, advise=True, accelerator="cpu")
    with pytest.warns(UserWarning, match="Skipping advice"):
        trainer.fit(Net(), **shuffled())
    assert trainer.advice == []


def on_two(advise: bool, as_object: bool) -> Any:
    torch.set_num_threads(1)
    set_seed(7)
    task = Net()
    strategy: Any = DDP(bucket_cap_mb=1) if as_object else "ddp"
    trainer = Trainer(max_epochs=1, max_steps=6, advise=advise, strategy=strategy, **QUIET)
    trainer.fit(task, DataLoader(Rows(400, seconds=0.02), 4, shuffle=True))
    return what_is_left(task), trainer.advice


@pytest.mark.parametrize("as_object", [False, True], ids=["name", "object"])
def test_processes_try_together_and_agree(as_object: bool) -> None:
    advised = run_in_processes(on_two, 2, (True, as_object))
    plain = run_in_processes(on_two, 2, (False, as_object))
    assert [left for left, _ in advised] == [left for left, _ in plain]
    assert advised[0][1] == advised[1][1]
    assert advised[0][1][0].change.startswith("DataLoader(num_workers=")
