"""A step that lacks memory is run again in parts, and comes to the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import FSDP, Callback, ConfigurationError, Task, Trainer, set_seed
from tests.pool import run_in_processes

CLOSE = {"rtol": 0.0, "atol": 5e-6}


class Fitting(Task):
    """Memory for so many rows at once.

    Args:
        rows: How many; on the last process where there are several, elsewhere any number.
        weighed: Whether losses are sums with weights.
    """

    def __init__(self, rows: int = 1000, weighed: bool = False) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
        self.rows, self.weighed = rows, weighed
        self.seen: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        if len(x) > self.rows and self.global_rank == self.trainer.world_size - 1:
            self.log("squares", x.square().mean())  # an attempt that failed must not count
            torch.rand(3)
            raise torch.OutOfMemoryError("sim:0 out of memory: tried to allocate 64 bytes")
        self.seen.append(len(x))
        errors = (self.net(x) - y).square().sum(1)
        self.log("squares", errors.mean(), on_step=True, on_epoch=True)
        self.log("rows", float(len(x)), on_step=True, on_epoch=True, reduce_fx="sum")
        self.log("largest", errors.max(), on_step=True, on_epoch=True, reduce_fx="max")
        if self.weighed:
            weights = 1.0 + (x[:, 0] > 0).float()
            return {"loss": (errors * weights).sum(), "weight": weights.sum()}
        return errors.mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.05)


def data(rows: int = 23, batch_size: int = 6) -> DataLoader[Any]:
    fixed = torch.Generator().manual_seed(2)
    x = torch.randn(rows, 3, generator=fixed)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=batch_size)


class Watching(Callback):
    """What hooks see of each batch."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.rows: list[int] = []
        self.steps: list[dict[str, float]] = []

    def on_train_batch_start(self, trainer: Any, task: Any, batch: Any, batch_idx: int) -> None:
        self.rows.append(len(batch[0]))

    def on_train_batch_end(self, trainer: Any, task: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))
        assert len(batch[0]) == self.rows[len(self.losses) - 1]
        self.steps.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def fitted(rows: int, weighed: bool = False, accumulate: int = 1, **options: Any) -> dict[str, Any]:
    """What a fit comes to with memory for so many rows."""
    set_seed(4)
    task, watching = Fitting(rows, weighed), Watching()
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=watching,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=0.5,
        **options,
    )
    trainer.fit(task, data())
    return {
        "weights": {name: value.detach() for name, value in task.state_dict().items()},
        "losses": torch.tensor(watching.losses),
        "rows": watching.rows,
        "steps": watching.steps,
        "epoch": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "step": trainer.global_step,
        "parts": trainer.progress.parts,
        "seen": task.seen,
        "drawn": torch.rand(2),
    }


def assert_alike(one: dict[str, Any], other: dict[str, Any]) -> None:
    torch.testing.assert_close(one["weights"], other["weights"], **CLOSE)
    torch.testing.assert_close(one["losses"], other["losses"], **CLOSE)
    assert one["rows"] == other["rows"]
    assert one["step"] == other["step"]
    assert one["epoch"] == pytest.approx(other["epoch"], abs=5e-6)
    assert [step.keys() for step in one["steps"]] == [step.keys() for step in other["steps"]]
    for step, same in zip(one["steps"], other["steps"], strict=True):
        assert step == pytest.approx(same, abs=5e-6)
    assert torch.equal(one["drawn"], other["drawn"])


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("weighed", [False, True], ids=["means", "weights"])
def test_the_cut_step_comes_to_the_same(weighed: bool, accumulate: int, capsys: pytest.CaptureFixture[str]) -> None:
    whole = fitted(1000, weighed, accumulate)
    capsys.readouterr()
    cut = fitted(2, weighed, accumulate, auto_micro_batch=True)
    assert_alike(cut, whole)
    assert (cut["parts"], max(cut["seen"])) == (4, 2)
    said = capsys.readouterr().out
    assert said.count("out of memory. From now on, each batch is processed in 2 parts") == 1
    assert said.count("out of memory. From now on, each batch is processed in 4 parts") == 1


def test_where_memory_is_enough_nothing_is_cut() -> None:
    kept = fitted(1000, auto_micro_batch=True)
    assert_alike(kept, fitted(1000))
    assert kept["parts"] == 1


def on_two(rows: int, weighed: bool, auto: bool) -> dict[str, Any]:
    return fitted(rows, weighed, strategy="ddp", auto_micro_batch=auto)


@pytest.mark.parametrize("weighed", [False, True], ids=["means", "weights"])
def test_all_processes_cut_where_memory_lacks_on_one(weighed: bool) -> None:
    whole = run_in_processes(on_two, args=[1000, weighed, False])
    cut = run_in_processes(on_two, args=[3, weighed, True])
    for one, other in zip(cut, whole, strict=True):
        assert_alike(one, other)
        assert one["parts"] == 2
    assert max(cut[0]["seen"][1:]) == 3


def test_dropout_draws_again_what_it_drew_before() -> None:
    class Dropping(Fitting):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            drawn.append(torch.rand(1).item())
            return super().training_step(batch, batch_idx)

    drawn: list[float] = []
    set_seed(1)
    options: Any = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(accelerator="cpu", max_steps=1, auto_micro_batch=True, **options)
    trainer.fit(Dropping(rows=3), data())
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_resumed_run_is_cut_from_its_first_step_on(tmp_path: Any) -> None:
    set_seed(1)
    options: Any = {"logger": False, "enable_progress_bar": False, "accelerator": "cpu", "auto_micro_batch": True}
    trainer = Trainer(max_epochs=1, default_root_dir=tmp_path, enable_checkpointing=False, **options)
    trainer.fit(Fitting(rows=3), data())
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    task = Fitting()
    Trainer(max_epochs=2, default_root_dir=tmp_path, enable_checkpointing=False, **options).fit(
        task, data(), resume=tmp_path / "one.ckpt"
    )
    assert max(task.seen) == 3


def test_batch_statistics_are_named_as_what_cannot_be_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    task = Fitting(rows=3)
    task.net.insert(1, nn.BatchNorm1d(5))
    options: Any = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    Trainer(accelerator="cpu", max_steps=1, auto_micro_batch=True, **options).fit(task, data())
    assert "Only the batch statistics of net.1 change" in capsys.readouterr().out
    assert task.net[1].num_batches_tracked == 2  # of the parts; not of the attempt that failed


def test_rows_that_do_not_fit_one_by_one_are_an_error() -> None:
    options: Any = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    with pytest.raises(ConfigurationError, match="even with each row processed by itself"):
        Trainer(accelerator="cpu", max_steps=1, auto_micro_batch=True, **options).fit(Fitting(rows=0), data())


def test_another_error_is_raised_as_it_is() -> None:
    class Broken(Fitting):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            raise RuntimeError("shapes do not fit")

    with pytest.raises(RuntimeError, match="shapes do not fit"):
        fit_once(Broken())


class ByHand(Fitting):
    automatic_optimization = False


def fit_once(task: Task) -> None:
    options: Any = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    Trainer(accelerator="cpu", max_steps=1, auto_micro_batch=True, **options).fit(task, data())


def test_a_task_that_computes_gradients_itself_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="does not support ByHand, because it uses manual optimization"):
        fit_once(ByHand())


def refused_under_sharding() -> str:
    with pytest.raises(ConfigurationError) as caught:
        Trainer(strategy=FSDP(), auto_micro_batch=True, logger=False)
    return str(caught.value)


def test_strategies_whose_forwards_exchange_tensors_are_refused() -> None:
    for message in run_in_processes(refused_under_sharding):
        assert "exchange tensors" in message
        assert "strategy='single', and with 'ddp'" in message
