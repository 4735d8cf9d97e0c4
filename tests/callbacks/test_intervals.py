"""How often callbacks act, and from when on: in steps, and in all other units."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Callback, ConfigurationError, Duration, Task, Tracker, Trainer
from drivetrain.callbacks import (
    BackboneFinetuning,
    DeviceStatsMonitor,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    GradientNorm,
    LearningRateMonitor,
    LossSpikeGuard,
    MemoryMonitor,
    ModelCheckpoint,
    NaNGuard,
    SpeedMonitor,
    StochasticWeightAveraging,
    StragglerMonitor,
    ThroughputMonitor,
    WeightHistograms,
    step_schedule,
)
from tests.pool import device, run_in_processes

# 24 samples in batches of 2: 12 steps an epoch, 24 in two; a batch has 6 tokens.
EVERY_SIX = ("6 steps", "12 samples", "36 tokens", "25%", Duration(12, "samples"))  # type: ignore[arg-type]
EVERY_TWELVE = ("12 steps", "24 samples", "72 tokens", "50%", "1 epoch")
SIX, TWELVE = [6, 12, 18, 24], [12, 24]


class Rows(Tracker):
    """Keeps the steps of the rows that it is given, and of histograms."""

    name = "rows"

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, set[str]]] = []

    def store_init_configuration(self, values: Any) -> None:
        pass

    def log(self, values: Any, step: int | None = None, **options: Any) -> None:
        self.rows.append((step or 0, set(values)))

    def log_histogram(self, values: Any, step: int | None = None, **options: Any) -> None:
        self.rows.append((step or 0, set(values)))

    def steps_of(self, part: str) -> list[int]:
        """The steps of rows that have a name with this part."""
        return [step for step, names in self.rows if any(part in name for name in names)]


class Backed(Task):
    """A head over a backbone; the optimizer has what is trained from the start."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = nn.Linear(1, 1), nn.Linear(1, 1)
        self.rates: list[float] = []

    def num_tokens(self, batch: Any) -> int:
        return 3 * len(batch[0])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.head(self.backbone(batch[0])).square().mean()
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([each for each in self.parameters() if each.requires_grad], lr=0.01)


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(24.0)[:, None] / 24), batch_size=2)


def run(callbacks: Sequence[Callback], tracker: Tracker | None, task: Task | None = None, **options: Any) -> Trainer:
    settings: dict[str, Any] = {"max_epochs": 2, "accelerator": device(), "logger": tracker or False}
    settings |= dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    resume = options.pop("resume", None)
    trainer = Trainer(**{**settings, **options}, callbacks=list(callbacks))
    trainer.fit(task or Backed(), loader(), resume=resume)
    return trainer


LOGGING: dict[str, tuple[Callable[[Any], Callback], str]] = {
    "GradientNorm": (lambda every: GradientNorm(every=every), "grad_norm"),
    "DeviceStatsMonitor.start": (lambda every: DeviceStatsMonitor(True, every=every), "batch_start/cpu_percent"),
    "DeviceStatsMonitor.end": (lambda every: DeviceStatsMonitor(True, every=every), "batch_end/cpu_percent"),
    "MemoryMonitor": (lambda every: MemoryMonitor(every=every), "memory/"),
    "SpeedMonitor": (lambda every: SpeedMonitor(every=every), "speed/"),
    "ThroughputMonitor": (lambda every: ThroughputMonitor(every=every), "train/device"),
    "LearningRateMonitor": (lambda every: LearningRateMonitor(every), "lr-SGD"),
    "WeightHistograms": (lambda every: WeightHistograms(every), "weights/head.weight"),
}


@pytest.mark.parametrize(("number", "written", "steps"), [(6, EVERY_SIX, SIX), (12, EVERY_TWELVE, TWELVE)], ids=str)
@pytest.mark.parametrize("name", LOGGING)
def test_a_callback_logs_at_the_same_steps_in_each_unit(
    name: str, number: int, written: Sequence[Any], steps: list[int]
) -> None:
    make, part = LOGGING[name]
    for every in (number, *written):
        tracker = Rows()
        run([make(every)], tracker, log_every_n_steps=5)
        assert tracker.steps_of(part) == steps, every


@pytest.mark.parametrize(("number", "written", "steps"), [(6, EVERY_SIX, SIX), (12, EVERY_TWELVE, TWELVE)], ids=str)
def test_rows_come_at_the_same_steps_in_each_unit_with_what_callbacks_add(
    number: int, written: Sequence[Any], steps: list[int]
) -> None:
    for every in (number, *written):
        tracker = Rows()
        run([GradientNorm(), LearningRateMonitor("step"), MemoryMonitor()], tracker, log_every_n_steps=every)
        for part in ("train_loss", "grad_norm", "lr-SGD", "memory/"):
            assert tracker.steps_of(part) == steps, (every, part)


class Watched(EMAWeightAveraging):
    """Keeps the steps that are averaged."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.steps: list[int] = []

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        answer = super().should_update(step_idx, epoch_idx)
        if answer and step_idx is not None:
            self.steps.append(step_idx)
        return answer


@pytest.mark.parametrize("every", [6, *EVERY_SIX])
@pytest.mark.parametrize("start", [6, *EVERY_SIX])
def test_averages_are_of_the_same_steps_in_each_unit(every: Any, start: Any) -> None:
    average = Watched(update_every_n_steps=every, update_starting_at_step=start)
    run([average], None)
    assert average.steps == [6, 12, 18]


def test_an_average_under_accumulation_is_of_the_same_steps() -> None:
    found = []
    for every in (3, "12 samples"):
        average = Watched(update_every_n_steps=every)
        run([average], None, accumulate_grad_batches=2)
        found.append(average.steps)
    assert found == [[0, 3, 6, 9]] * 2


def read_steps(make: Callable[[Any], Any], every: Any) -> list[int]:
    """The steps at which a guard has read the losses that it watches."""
    guard = make(every)
    steps: list[int] = []
    judge = guard.judge
    guard.judge = lambda value: steps.append(trainer_of[0].global_step) or judge(value)
    trainer_of: list[Trainer] = []

    class Known(Callback):
        def setup(self, trainer: Trainer, task: Task, stage: str) -> None:
            trainer_of.append(trainer)

    run([Known(), guard], None)
    return sorted(set(steps))


@pytest.mark.parametrize("guard", [NaNGuard, LossSpikeGuard])
def test_guards_read_at_the_same_steps_in_each_unit(guard: Any) -> None:
    for every in (6, *EVERY_SIX):
        assert read_steps(lambda given: guard(action="stop", every_n_steps=given), every) == SIX, every


@pytest.mark.parametrize("written", [6, "6 steps", "25%"])
def test_processes_are_compared_at_the_same_steps(written: Any) -> None:
    assert compared_at(written, 2) == SIX


def compared_at(written: Any, measured_steps: int) -> list[int]:
    steps: list[int] = []

    class Watching(StragglerMonitor):
        def _compare(self, trainer: Trainer, step: int) -> None:
            steps.append(step)
            super()._compare(trainer, step)

    run([Watching(written, measured_steps=measured_steps)], None)
    return steps


def test_processes_are_compared_once_so_many_steps_are_measured_where_no_steps_are_counted() -> None:
    assert compared_at("12 samples", 2) == [8, 14, 20]


SCHEDULES: list[tuple[dict[str, Any], list[int]]] = [
    *(({"frequency": each}, SIX) for each in EVERY_SIX),
    ({"frequency": 6, "interval": "step"}, SIX),
    ({"frequency": "1 epoch", "interval": "step"}, TWELVE),
    ({"frequency": "50%"}, TWELVE),
]


@pytest.mark.parametrize(("options", "steps"), SCHEDULES, ids=str)
def test_schedulers_step_as_often_as_they_are_asked_to(options: dict[str, Any], steps: list[int]) -> None:
    found: list[int] = []

    class Scheduled(Backed):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 100)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, **options}}

        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            found.append(self.trainer.global_step)
            super().lr_scheduler_step(scheduler, metric)

    run([], None, Scheduled())
    assert found == steps


@pytest.mark.parametrize("start", [2, "2 epochs", "24 steps", "48 samples", "144 tokens", "50%"])
def test_a_backbone_is_trained_from_the_same_epoch_on(start: Any) -> None:
    first: list[int] = []

    class Watching(BackboneFinetuning):
        def unfreeze_and_add_param_group(self, *arguments: Any, **options: Any) -> None:  # type: ignore[override]
            first.append(task.trainer.global_step)
            BackboneFinetuning.unfreeze_and_add_param_group(*arguments, **options)

    task = Backed()
    run([Watching(start)], None, task, max_epochs=4)
    assert first == [24]


@pytest.mark.parametrize(
    ("start", "epochs"),
    [(3, 2), ("3 epochs", 2), (0.75, 2), ("75%", 2), ("24 steps", 2), ("48 samples", 2), ("25 samples", 2), (1, 4)],
)
def test_an_average_begins_with_the_same_epoch(start: Any, epochs: int) -> None:
    average = StochasticWeightAveraging(0.1, start, annealing_epochs="2 epochs")
    run([average], None, max_epochs=4)
    assert average.n_averaged == epochs


@pytest.mark.parametrize("key", [2, "2 epochs", "50%"])
def test_accumulation_changes_with_the_same_epoch(key: Any) -> None:
    scheduler = GradientAccumulationScheduler({key: 4})
    trainer = run([scheduler], None, max_epochs=4)
    assert scheduler.scheduling == {0: 1, 2: 4}
    assert trainer.global_step == 2 * 12 + 2 * 3


def test_intervals_of_checkpoints_may_be_written_out(tmp_path: Path) -> None:
    for options in ({"every_n_train_steps": "6 steps"}, {"every": "12 samples"}, {"every": "25%"}):
        folder = tmp_path / str(options)
        saving = ModelCheckpoint(folder, "{step}", save_top_k=-1, **options)  # type: ignore[arg-type]
        run([saving], None, enable_checkpointing=True)
        assert sorted(int(path.stem.removeprefix("step=")) for path in folder.iterdir()) == SIX


# a resumed run


class SaveAt(Callback):
    """Saves after one step."""

    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer: Trainer, task: Task, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("every", [6, *EVERY_SIX])
@pytest.mark.parametrize("step", [5, 6, 7])
def test_a_resumed_run_keeps_the_rhythm(tmp_path: Path, every: Any, step: int) -> None:
    def callbacks() -> list[Callback]:
        return [GradientNorm(every=every), Watched(update_every_n_steps=every, update_starting_at_step=every)]

    whole = callbacks()
    run([*whole, SaveAt(step, tmp_path / "saved")], Rows(), log_every_n_steps=every)
    tracker, again = Rows(), callbacks()
    run(again, tracker, log_every_n_steps=every, resume=tmp_path / "saved")
    assert tracker.steps_of("grad_norm") == [each for each in SIX if each > step]
    assert set(tracker.steps_of("train_loss")) == {each for each in SIX if each > step}
    assert again[1].steps == [each for each in whole[1].steps if each >= step]  # type: ignore[attr-defined]


def test_a_start_is_found_again_after_a_resume(tmp_path: Path) -> None:
    average = StochasticWeightAveraging(0.1, "13 samples")
    run([average, SaveAt(30, tmp_path / "saved")], None, max_epochs=4)
    again = StochasticWeightAveraging(0.1, "13 samples")
    run([again], None, max_epochs=4, resume=tmp_path / "saved")
    assert again.swa_start == average.swa_start == 1
    assert again.n_averaged == average.n_averaged == 3


# times


def due_by_the_clock(seconds_per_step: tuple[float, float]) -> list[int]:
    """The steps of rows on each process, where each has a clock of its own."""
    from drivetrain import PartialState

    clock = [0.0]
    pace = seconds_per_step[PartialState().process_index]
    step_schedule.time.monotonic = lambda: clock[0]  # type: ignore[assignment]

    class Ticking(Backed):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            clock[0] += pace
            return super().training_step(batch, batch_idx)

    steps: list[int] = []

    class Noted(GradientNorm):
        def on_before_optimizer_step(self, trainer: Trainer, task: Task, optimizer: Any) -> None:
            super().on_before_optimizer_step(trainer, task, optimizer)
            if self._logs[0]._last == trainer.global_step + 1:
                steps.append(trainer.global_step + 1)

    run([Noted(every="4 s")], Rows(), Ticking(), max_epochs=4)
    return steps


def test_processes_follow_the_main_ones_clock() -> None:
    first, second = run_in_processes(due_by_the_clock, args=((1.0, 3.0),))
    assert first == second == [4, 8, 12, 16, 20, 24]


# what cannot be

REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: GradientNorm(every="5 stpes"), r"GradientNorm.every='5 stpes'.*Did you mean 'steps'"),
    (lambda: GradientNorm(every=0), r"GradientNorm\(every=0\)"),
    (lambda: SpeedMonitor(every="soon"), r"SpeedMonitor.every='soon' is not a duration"),
    (lambda: MemoryMonitor(every="0 steps"), r"MemoryMonitor.every='0 steps'"),
    (lambda: DeviceStatsMonitor(every="5M"), r"DeviceStatsMonitor.every='5M'"),
    (lambda: ThroughputMonitor(every=1.5), r"ThroughputMonitor.every=1.5"),  # type: ignore[arg-type]
    (lambda: LearningRateMonitor("stepp"), r"logging_interval='stepp'.*Did you mean 'step'"),
    (lambda: WeightHistograms("2 eons"), r"WeightHistograms.every_n_steps='2 eons'"),
    (lambda: StragglerMonitor("2 eons"), r"StragglerMonitor.every_n_steps='2 eons'"),
    (lambda: NaNGuard(every_n_steps="2 eons"), r"NaNGuard.every_n_steps='2 eons'"),
    (lambda: NaNGuard(action="skip", every_n_steps="2 epochs"), r"if every step is checked"),
    (lambda: EMAWeightAveraging(update_every_n_steps="2 eons"), r"update_every_n_steps='2 eons'"),
    (lambda: EMAWeightAveraging(update_starting_at_epoch="2 min"), r"update_starting_at_step takes the other"),
    (lambda: StochasticWeightAveraging(0.1, "2 eons"), r"swa_epoch_start='2 eons'"),
    (lambda: StochasticWeightAveraging(0.1, annealing_epochs="2 min"), r"annealing_epochs='2 min' is not a number of"),
    (lambda: BackboneFinetuning("2 eons"), r"unfreeze_backbone_at_epoch='2 eons'"),
    (lambda: GradientAccumulationScheduler({"2 min": 2}), r"depend on the schedule itself"),
    (lambda: ModelCheckpoint(every_n_epochs="2 steps"), r"every_n_epochs='2 steps'.*every= takes the other"),
    (lambda: Trainer(log_every_n_steps="2 eons"), r"log_every_n_steps='2 eons'"),
    (lambda: Trainer(check_val_every_n_epoch="5 steps"), r"check_val_every_n_epoch='5 steps'.*val_check_interval"),
]


@pytest.mark.parametrize(("make", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_what_is_no_interval_is_refused_by_its_name(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        make()


ENDLESS: list[tuple[Callable[[], Callback], str]] = [
    (lambda: GradientNorm(every="10%"), "GradientNorm.every"),
    (lambda: WeightHistograms("10%"), "WeightHistograms.every_n_steps"),
    (lambda: StragglerMonitor("10%"), "StragglerMonitor.every_n_steps"),
    (lambda: NaNGuard(action="stop", every_n_steps="10%"), "NaNGuard.every_n_steps"),
    (lambda: EMAWeightAveraging(update_starting_at_step="10%"), "EMAWeightAveraging.update_starting_at_step"),
    (lambda: BackboneFinetuning("10%"), "BackboneFinetuning.unfreeze_backbone_at_epoch"),
    (lambda: GradientAccumulationScheduler({"50%": 2}), "GradientAccumulationScheduler"),
    (lambda: StochasticWeightAveraging(0.1, "80%"), "StochasticWeightAveraging"),
]


@pytest.mark.parametrize(("make", "said"), ENDLESS, ids=[said for _, said in ENDLESS])
def test_a_part_of_a_run_without_an_end_is_refused(make: Callable[[], Callback], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        run([make()], Rows(), max_epochs=-1)


def test_a_scheduler_does_not_follow_the_clock() -> None:
    class Scheduled(Backed):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 100)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "frequency": "10 min"}}

    with pytest.raises(ConfigurationError, match="cannot be a time"):
        run([], None, Scheduled())


def test_a_number_of_steps_is_a_remainder_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise AssertionError("a number of steps is counted")

    monkeypatch.setattr(step_schedule.StepInterval, "_decide", refuse)
    tracker = Rows()
    run([GradientNorm(every=6), WeightHistograms("6 steps")], tracker, log_every_n_steps=6)
    assert tracker.steps_of("grad_norm") == SIX
