"""What evaluation steps log with `on_step`: written for each batch, against a count of evaluated batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torchmetrics import MeanMetric, SumMetric

from tests.pool import run_in_processes
from tests.trainer.tasks import Kept, Weight, fitted, ones, quiet, rows


class Stepwise(Weight):
    """Logs each batch's mean in every way that has to do with steps."""

    def __init__(self) -> None:
        super().__init__()
        self.on_bar: list[dict[str, float]] = []
        self.in_callbacks: list[dict[str, float]] = []

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        mean = batch[0].mean()
        self.log("both", mean, on_step=True, on_epoch=True, prog_bar=True)
        self.log("alone", mean, on_step=True, on_epoch=False)
        self.log("hidden", mean, on_step=True, on_epoch=True, logger=False)
        self.log("whole", mean)
        if batch_idx == 0:
            self.log("first", mean, on_step=True, on_epoch=True)

    test_step = validation_step

    def on_validation_batch_end(self, *args: Any) -> None:
        numbers = {name: float(value) for name, value in self.trainer.progress_bar_metrics.items()}
        self.on_bar.append(numbers)
        self.in_callbacks.append({name: float(value) for name, value in self.trainer.callback_metrics.items()})


def by_step(tracker: Kept, *names: str) -> list[tuple[int, dict[str, float]]]:
    """The lines that have any of these names, of which only these."""
    lines = [(line["step"], {name: line[name] for name in names if name in line}) for line in tracker.lines]
    return [(step, values) for step, values in lines if values]


def test_each_validation_batch_is_written_against_a_count_that_goes_on() -> None:
    tracker, task = Kept(), Stepwise()
    fitted(task, ones(3), rows([1.0, 4.0]), max_epochs=2, logger=tracker, num_sanity_val_steps=2)
    steps = [(0, 1.0), (1, 4.0), (2, 1.0), (3, 4.0)]
    assert by_step(tracker, "both_step", "alone") == [(n, {"both_step": v, "alone": v}) for n, v in steps]
    assert by_step(tracker, "first_step") == [(0, {"first_step": 1.0}), (2, {"first_step": 1.0})]
    epochs = by_step(tracker, "both_epoch", "whole", "first_epoch")
    assert epochs == [(n, {"both_epoch": 2.5, "whole": 2.5, "first_epoch": 1.0}) for n in (3, 6)]
    written = {name for line in tracker.lines for name in line}
    assert not written & {"hidden_step", "hidden_epoch", "both", "alone_epoch", "whole_step"}


class Both(Weight):
    """Logs each batch's mean for the step and for the epoch, and nothing else."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("both", batch[0].mean(), on_step=True, on_epoch=True)


def test_values_of_steps_are_written_beside_those_of_the_epoch() -> None:
    tracker = Kept()
    fitted(Both(), ones(1), rows([1.0, 4.0]), logger=tracker)
    assert by_step(tracker, "both_step") == [(0, {"both_step": 1.0}), (1, {"both_step": 4.0})]
    assert by_step(tracker, "both_epoch") == [(1, {"both_epoch": 2.5})]


def test_step_values_are_among_the_metrics_of_callbacks_and_the_bar() -> None:
    task = Stepwise()
    trainer = fitted(task, ones(1), rows([1.0, 4.0]))
    assert [values["both_step"] for values in task.on_bar] == [1.0, 4.0]
    assert [(values["both_step"], values["alone"]) for values in task.in_callbacks] == [(1.0, 1.0), (4.0, 4.0)]
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert (metrics["both"], metrics["both_epoch"], metrics["both_step"], metrics["alone"]) == (2.5, 2.5, 4.0, 4.0)
    assert "both_step" not in trainer.progress_bar_metrics


@pytest.mark.parametrize("verb", ["validate", "test"])
def test_evaluations_of_their_own_count_their_own_batches(verb: str) -> None:
    tracker = Kept()
    trainer = quiet(logger=tracker)
    for _ in range(2):
        results = getattr(trainer, verb)(Stepwise(), rows([1.0, 4.0]), verbose=False)
    assert results == [{"both": 2.5, "hidden": 2.5, "whole": 2.5, "first": 1.0}]
    assert by_step(tracker, "alone") == [
        (0, {"alone": 1.0}),
        (1, {"alone": 4.0}),
        (2, {"alone": 1.0}),
        (3, {"alone": 4.0}),
    ]


def test_validations_within_fit_and_those_of_the_verb_are_counted_apart() -> None:
    tracker, task = Kept(), Stepwise()
    trainer = fitted(task, ones(1), rows([1.0, 4.0]), max_epochs=1, logger=tracker)
    trainer.validate(task, rows([7.0]), verbose=False)
    assert by_step(tracker, "alone") == [(0, {"alone": 1.0}), (1, {"alone": 4.0}), (0, {"alone": 7.0})]


@pytest.mark.parametrize(("verb", "word"), [("validate", "validation"), ("predict", "predict")])
@pytest.mark.parametrize("asked", [True, False])
def test_the_hooks_of_an_evaluation_take_no_gradients(verb: str, word: str, asked: bool) -> None:
    seen: dict[str, tuple[bool, bool]] = {}

    def recorded(name: str) -> Any:
        def hook(self: Any) -> None:
            seen[name] = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

        return hook

    modes = {"start": asked, "epoch_start": asked, "epoch_end": False, "end": False}
    expected = {f"on_{word}_{moment}": (False, mode) for moment, mode in modes.items()}
    step = {"predict_step": lambda self, batch, batch_idx: batch[0]}
    task = type("Hooked", (Stepwise,), {**step, **{name: recorded(name) for name in expected}})()
    getattr(quiet(inference_mode=asked), verb)(task, rows([1.0]))
    assert seen == expected


def test_each_loader_has_its_count_and_its_names() -> None:
    tracker = Kept()
    quiet(logger=tracker).validate(Stepwise(), [rows([1.0, 4.0]), rows([7.0])], verbose=False)
    first, second = "both_step/dataloader_idx_0", "both_step/dataloader_idx_1"
    assert by_step(tracker, first, second) == [(0, {first: 1.0}), (1, {first: 4.0}), (0, {second: 7.0})]
    assert by_step(tracker, "both_epoch/dataloader_idx_0") == [(0, {"both_epoch/dataloader_idx_0": 2.5})]


def test_the_count_goes_on_after_a_resume(tmp_path: Path) -> None:
    trainer = fitted(Stepwise(), ones(1), rows([1.0, 4.0]), max_epochs=1)
    trainer.save_checkpoint(tmp_path / "checkpoint")
    tracker = Kept()
    resumed = quiet(max_epochs=2, logger=tracker)
    resumed.fit(Stepwise(), ones(1), rows([1.0, 4.0]), resume=tmp_path / "checkpoint")
    assert by_step(tracker, "alone") == [(2, {"alone": 1.0}), (3, {"alone": 4.0})]


def on_two() -> list[Any]:
    tracker = Kept()
    fitted(Stepwise(), ones(2), rows([1.0, 2.0, 4.0]), logger=tracker)
    return [by_step(tracker, "alone"), by_step(tracker, "both_epoch")]


def test_the_main_process_writes_its_own_steps_and_everyones_epoch() -> None:
    main, other = run_in_processes(on_two, 2)
    assert main == [[(0, {"alone": 1.0}), (1, {"alone": 4.0})], [(1, {"both_epoch": pytest.approx(7 / 3)})]]
    assert other == [[], []]


def test_the_hooks_at_the_end_of_an_epoch_can_compute_its_metrics() -> None:
    class Averages(Weight):
        def __init__(self) -> None:
            super().__init__()
            self.training_mean, self.mean = MeanMetric(), MeanMetric()
            self.computed: list[tuple[str, float]] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.training_mean.update(batch[0].mean())
            self.log("training_mean", self.training_mean, on_step=False, on_epoch=True)
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.mean.update(batch[0].mean())
            self.log("mean", self.mean)

        def on_train_epoch_end(self) -> None:
            self.computed.append(("training", float(self.training_mean.compute())))

        def on_validation_epoch_end(self) -> None:
            self.computed.append(("validation", float(self.mean.compute())))
            self.log("best", self.mean.compute())

    task = Averages()
    trainer = fitted(task, ones(3), rows([1.0, 4.0]), max_epochs=2, num_sanity_val_steps=0)
    assert task.computed == [("validation", 2.5), ("training", 1.0)] * 2
    assert {name: float(trainer.callback_metrics[name]) for name in ("mean", "best")} == {"mean": 2.5, "best": 2.5}
    assert not task.mean.update_called
    assert not task.training_mean.update_called


def test_values_of_the_sanity_check_are_seen_until_training_begins() -> None:
    class Watches(Weight):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[tuple[str, float | None]] = []

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", 3.0, prog_bar=True)

        def _read(self, moment: str) -> None:
            metrics, bar = self.trainer.callback_metrics, self.trainer.progress_bar_metrics
            assert metrics.get("val") == bar.get("val")
            self.seen.append((moment, metrics.get("val")))

        def on_validation_end(self) -> None:
            self._read("checked" if self.trainer.sanity_checking else "validated")

        def on_train_start(self) -> None:
            self._read("train")

    task, tracker = Watches(), Kept()
    fitted(task, ones(1), ones(1), logger=tracker, num_sanity_val_steps=1)
    assert task.seen == [("checked", 3.0), ("train", None), ("validated", 3.0)]
    assert len(by_step(tracker, "val")) == 1


def test_a_task_within_a_task_logs_through_its_trainer() -> None:
    class Inner(Weight):
        def loss_of(self, batch: Any) -> Any:
            self.log("inner", 2.0)
            return super().training_step(batch, 0)

    class Outer(Weight):
        def __init__(self) -> None:
            super().__init__()
            self.parts = torch.nn.ModuleList([Inner()])

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) + self.parts[0].loss_of(batch)  # type: ignore[operator]

    task, tracker = Outer(), Kept()
    fitted(task, ones(2), logger=tracker, log_every_n_steps=1)
    assert [value["inner"] for _, value in by_step(tracker, "inner")] == [2.0, 2.0]


@pytest.mark.parametrize("on_epoch", [True, False])
def test_metrics_that_are_logged_by_step_last_until_the_hooks_of_the_epochs_end(on_epoch: bool) -> None:
    class BySteps(Weight):
        def __init__(self) -> None:
            super().__init__()
            self.trained, self.validated = MeanMetric(), MeanMetric()
            self.by_hand: list[float] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.trained(batch[0].mean())
            self.log("trained", self.trained, on_step=True, on_epoch=on_epoch)
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.validated(batch[0].mean())
            self.log("validated", self.validated, on_step=True, on_epoch=on_epoch)

        def on_train_epoch_end(self) -> None:
            self.by_hand.append(float(self.trained.compute()))
            self.log("train_again", self.trained)

        def on_validation_epoch_end(self) -> None:
            self.by_hand.append(float(self.validated.compute()))
            self.log("validate_again", self.validated)

    task = BySteps()
    trainer = fitted(task, rows([1.0, 3.0]), rows([1.0, 4.0]), max_epochs=2, num_sanity_val_steps=0)
    assert task.by_hand == [2.5, 2.0] * 2
    again = [float(trainer.callback_metrics[name]) for name in ("train_again", "validate_again")]
    assert again == [2.0, 2.5]
    assert not task.trained.update_called


class Odd(SumMetric):
    """Computes whatever it was made with."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def compute(self) -> Any:
        return self.value


@pytest.mark.parametrize(("value", "expected"), [(None, None), (1.5, 1.5), (2, 2.0)])
def test_a_metric_may_compute_a_number_or_nothing(value: Any, expected: float | None) -> None:
    class Logs(Weight):
        def __init__(self) -> None:
            super().__init__()
            self.odd = Odd(value)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.odd.update(1.0)
            self.log("odd", self.odd)

    trainer = fitted(Logs(), ones(1), ones(1), num_sanity_val_steps=0)
    assert trainer.callback_metrics.get("odd") == expected


def test_a_checkpoints_values_are_written_at_its_step(tmp_path: Path) -> None:
    fitted(Stepwise(), ones(3)).save_checkpoint(tmp_path / "saved")
    tracker = Kept()
    quiet(logger=tracker).validate(Stepwise(), rows([1.0]), ckpt_path=tmp_path / "saved")
    assert [step for step, _ in by_step(tracker, "whole")] == [3]


@pytest.mark.parametrize("inference_mode", [True, False])
def test_a_tensor_of_a_validation_within_fit_can_be_trained_with(inference_mode: bool) -> None:
    class Keeps(Weight):
        kept: Any = None

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.kept = batch[0] * 2

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return (super().training_step(batch, batch_idx) * self.kept).mean()

    fitted(Keeps(), ones(2), ones(1), inference_mode=inference_mode, num_sanity_val_steps=1)


@pytest.mark.parametrize("verb", ["predict", "test", "validate"])
def test_after_an_evaluation_the_weights_can_be_saved(verb: str, tmp_path: Path) -> None:
    class All(Stepwise):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return batch[0]

    task, trainer = All(), quiet()
    getattr(trainer, verb)(task, rows([1.0]))
    trainer.save_checkpoint(tmp_path / "saved")
    loaded = All.load_from_checkpoint(tmp_path / "saved")
    assert all(torch.equal(one, other) for one, other in zip(loaded.parameters(), task.parameters(), strict=True))
