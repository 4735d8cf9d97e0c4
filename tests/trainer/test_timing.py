"""What `trainer.timing` says a run spends its time with."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from drivetrain import Task, Timing, Trainer
from drivetrain.callbacks import Callback, ModelCheckpoint
from drivetrain.runtime import timing as timing_module
from drivetrain.runtime.timing import BACKWARD, CALLBACKS, DATA, EVALUATION, FORWARD, IDLE, PARTS
from tests.pool import run_in_processes
from tests.trackers.test_registry import ListTracker

QUIET: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}


class Spent(Counter[str]):
    """The seconds that were really spent in each part: a machine that has more to do makes them longer."""

    def spin(self, part: str, seconds: float) -> None:
        """Compute for so long, without letting go of the interpreter."""
        begun = now = time.perf_counter()
        while now - begun < seconds:
            now = time.perf_counter()
        self[part] += now - begun  # type: ignore[assignment]


SPENT = Spent()
spin = SPENT.spin


@pytest.fixture(autouse=True)
def nothing_spent() -> None:
    SPENT.clear()


class SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        spin("backward", ctx.seconds)
        return gradients[0], None


class SlowSGD(torch.optim.SGD):
    seconds = 0.0

    def step(self, closure: Any = None) -> Any:
        spin("optimizer", self.seconds)
        return super().step(closure)


class SlowData(Dataset[Tensor]):
    def __init__(self, batches: int, seconds: float) -> None:
        self.batches, self.seconds = batches, seconds

    def __len__(self) -> int:
        return self.batches

    def __getitem__(self, index: int) -> Tensor:
        spin("data", self.seconds)
        return torch.ones(3)


class SlowCallback(Callback):
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_train_batch_end(self, trainer: Any, task: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        spin("callbacks", self.seconds)

    def on_save_checkpoint(self, trainer: Any, task: Any, checkpoint: dict[str, Any]) -> None:
        spin("checkpoint", 30 * self.seconds)


class Parts(Task):
    """Spends `parts[name] * unit` seconds in each part of a step."""

    def __init__(self, unit: float, **parts: float) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)
        self.spent = {name: value * unit for name, value in parts.items()}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        spin("forward", self.spent.get("forward", 0.0))
        loss = SlowBackward.apply(self.layer(batch).square().mean(), self.spent.get("backward", 0.0))
        self.log("loss", loss, on_epoch=True, reduce_fx=self.slow_mean)
        return loss  # type: ignore[no-any-return]

    def slow_mean(self, values: Tensor) -> Tensor:
        spin("logging", self.spent.get("logging", 0.0))
        return values.mean()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        spin("evaluation", self.spent.get("evaluation", 0.0))

    def configure_optimizers(self) -> Any:
        optimizer = SlowSGD(self.parameters(), lr=0.1)
        optimizer.seconds = self.spent.get("optimizer", 0.0)
        return optimizer


def timed(root: Path, steps: int, unit: float, **parts: float) -> tuple[Trainer, Timing]:
    trainer = Trainer(
        max_epochs=1,
        logger=ListTracker(),
        log_every_n_steps=1,
        callbacks=[SlowCallback(parts.get("callbacks", 0.0) * unit), ModelCheckpoint(root)],
        accelerator="cpu",
        **QUIET,
    )
    data = DataLoader(SlowData(steps, parts.get("data", 0.0) * unit), batch_size=1)
    validation = DataLoader(TensorDataset(torch.ones(10, 3)), batch_size=1)
    trainer.fit(Parts(unit, **parts), data, validation if "evaluation" in parts else None)
    return trainer, trainer.timing


GIVEN = {"data": 3.0, "forward": 4.0, "backward": 5.0, "optimizer": 2.0, "callbacks": 3.0}


def check(timing: Timing) -> None:
    """Each part has at least what was spent in it. As all add up to the whole, none has what is another's."""
    for name, spent in SPENT.items():
        assert timing.seconds[name] > 0.995 * spent, name
    assert sum(timing.shares.values()) == pytest.approx(1.0)
    assert sum(timing.seconds.values()) == pytest.approx(timing.total_seconds)


def test_shares_are_those_of_parts_that_take_known_times(tmp_path: Path) -> None:
    _, timing = timed(tmp_path, 60, 1e-3, **GIVEN, logging=60.0, evaluation=12.0)
    assert set(SPENT) == {*PARTS} - {"sync", "idle"}
    check(timing)
    assert timing.inferred == 0.0


def test_of_short_steps_some_are_measured_and_stand_for_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Timing, "_seconds_of_a_mark", lambda self: 2e-6)  # or nearly all would be measured
    _, timing = timed(tmp_path, 1500, 1e-4, **GIVEN)
    assert timing.inferred > 0.5
    for name in GIVEN:
        assert timing.seconds[name] > 0.7 * SPENT[name], name
    assert sum(timing.shares.values()) == pytest.approx(1.0)


class FakeClock:
    """A clock that moves when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def simulated(clock: FakeClock, steps: int, seconds: Callable[[int], dict[int, float]]) -> Timing:
    """A run whose steps take known times in each part."""
    timing = Timing()
    with timing.run(sees_sync=False):
        due = timing.first_turn(0)
        timing.begin_steps()
        for number in range(1, steps + 1):
            for part, value in seconds(number).items():
                if timing.on:
                    timing.enter(part)
                clock.now += value
            if timing.on:
                timing.enter(IDLE)
            if number % 1000 == 0:
                with timing.span(EVALUATION):
                    clock.now += 0.05
            if number >= due:
                due = timing.turn(number)
        timing.end_steps()
    return timing


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    clock = FakeClock()
    monkeypatch.setattr(timing_module, "perf_counter", clock)
    monkeypatch.setattr(Timing, "_seconds_of_a_mark", lambda self: 8e-8)
    return clock


def test_drawn_steps_do_not_meet_what_comes_every_so_many_steps(clock: FakeClock) -> None:
    def seconds(number: int) -> dict[int, float]:
        return {DATA: 1e-5, FORWARD: 2e-5, CALLBACKS: 5e-4 if number % 50 == 0 else 0.0}

    timing = simulated(clock, 100_000, seconds)
    total = 100_000 * 3e-5 + 2000 * 5e-4
    assert timing.inferred > 0.4
    assert timing.seconds["evaluation"] == pytest.approx(100 * 0.05)
    assert timing.total_seconds == pytest.approx(total + 5.0)
    for name, known in {"data": 1.0, "forward": 2.0, "callbacks": 1.0}.items():
        assert timing.seconds[name] / total == pytest.approx(known / total, abs=0.03), name


def test_what_is_slow_at_the_beginning_stands_for_nothing_else(clock: FakeClock) -> None:
    timing = simulated(clock, 50_000, lambda number: {FORWARD: 30.0 if number == 1 else 1e-5, BACKWARD: 2e-5})
    assert timing.seconds["forward"] == pytest.approx(30.0 + 0.5, rel=0.01)
    assert timing.seconds["backward"] == pytest.approx(1.0, rel=0.01)


def test_all_steps_are_measured_where_they_are_long_enough(clock: FakeClock) -> None:
    timing = simulated(clock, 500, lambda number: {DATA: 1e-3, FORWARD: 2e-3 if number < 400 else 5e-3})
    assert timing.inferred == 0.0
    assert timing.seconds["data"] == pytest.approx(0.5)
    assert timing.seconds["forward"] == pytest.approx(399 * 2e-3 + 101 * 5e-3)


def test_python_that_never_lets_go_of_the_interpreter_is_seen(tmp_path: Path) -> None:
    """A thread that reads frames sees only the places at which the interpreter is let go of."""
    _, timing = timed(tmp_path, 40, 1e-3, callbacks=4.0, forward=4.0)
    check(timing)


class ByHand(Parts):
    automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class ByClosure(Parts):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)


@pytest.mark.parametrize("kind", [ByHand, ByClosure])
def test_other_kinds_of_steps_have_the_same_parts(kind: type[Parts]) -> None:
    trainer = Trainer(max_epochs=1, logger=False, enable_checkpointing=False, accelerator="cpu", **QUIET)
    trainer.fit(kind(1e-3, **GIVEN), DataLoader(SlowData(30, 3e-3), batch_size=1))
    assert {"data", "forward", "backward", "optimizer"} <= set(SPENT)
    check(trainer.timing)


@pytest.mark.parametrize("options", [{"accumulate_grad_batches": 4}, {"auto_micro_batch": True}], ids=str)
def test_several_batches_of_one_step_all_count(options: dict[str, Any]) -> None:
    trainer = Trainer(max_epochs=1, logger=False, enable_checkpointing=False, accelerator="cpu", **QUIET, **options)
    trainer.fit(Parts(1e-3, **GIVEN), DataLoader(SlowData(30, 3e-3), batch_size=1))
    check(trainer.timing)


def test_it_can_be_read_at_any_time_and_from_another_thread(tmp_path: Path) -> None:
    trainer = Trainer(max_epochs=1, logger=False, enable_checkpointing=False, accelerator="cpu", **QUIET)
    assert str(trainer.timing) == "No training has been measured yet."
    assert set(trainer.timing.shares.values()) == {0.0}
    totals: list[float] = []
    over = threading.Event()

    def read() -> None:
        while not over.is_set():
            totals.append(trainer.timing.total_seconds)
            assert all(value >= 0 for value in trainer.timing.seconds.values())

    reader = threading.Thread(target=read)
    reader.start()
    trainer.fit(Parts(1e-4, **GIVEN), DataLoader(SlowData(300, 1e-4), batch_size=1))
    over.set()
    reader.join()
    assert totals == sorted(totals)
    before = trainer.timing.to_dict()
    spin("", 0.01)
    assert trainer.timing.to_dict() == before  # the run is over
    assert list(before["shares"]) == list(PARTS)
    lines = str(trainer.timing).splitlines()
    assert [line.split()[0] for line in lines[: len(PARTS) + 1]] == [*PARTS, "all"]


def test_the_next_run_begins_with_nothing() -> None:
    trainer = Trainer(max_epochs=1, logger=False, enable_checkpointing=False, accelerator="cpu", **QUIET)
    trainer.fit(Parts(1e-3, forward=10.0), DataLoader(SlowData(20, 0.0), batch_size=1))
    first = trainer.timing.seconds["forward"]
    assert first > 0.2
    trainer = Trainer(max_epochs=1, logger=False, enable_checkpointing=False, accelerator="cpu", **QUIET)
    trainer.fit(Parts(1e-3, forward=0.0), DataLoader(SlowData(20, 0.0), batch_size=1))
    assert trainer.timing.seconds["forward"] < first  # that of both runs would be more


class Unequal(Parts):
    """The second process computes longer in its backward, so that the first one waits for its gradients."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.spent["backward"] = 0.02 if self.trainer.global_rank else 0.0
        return super().training_step(batch, batch_idx)


def seconds_of_rank(strategy: str) -> dict[str, float]:
    torch.set_num_threads(1)
    trainer = Trainer(
        max_epochs=1, logger=False, enable_checkpointing=False, accelerator="cpu", strategy=strategy, **QUIET
    )
    trainer.fit(Unequal(1e-3), DataLoader(SlowData(40, 0.0), batch_size=1))
    return trainer.timing.seconds


def test_waiting_for_the_gradients_of_others_is_sync() -> None:
    fast, slow = run_in_processes(seconds_of_rank, 2, ("ddp",))
    assert fast["sync"] > 0.5 * 20 * 0.02
    assert slow["sync"] < 0.5 * fast["sync"]
    assert slow["backward"] > 0.99 * 20 * 0.02


@pytest.mark.sharded
def test_waiting_for_the_parameters_of_others_counts_to_what_needs_them() -> None:
    fast, slow = run_in_processes(seconds_of_rank, 2, ("fsdp",))
    assert min(fast["backward"], slow["backward"]) > 0.9 * 20 * 0.02
    assert max(fast["sync"], slow["sync"]) < 0.5 * fast["backward"]
