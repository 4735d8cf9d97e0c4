"""A checkpoint that is saved within a step or a validation describes the last finished step."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torchmetrics import SumMetric

from drivetrain import Callback, CheckpointError, EMAWeightAveraging, ModelCheckpoint, Task, Trainer
from drivetrain.checkpoint import Checkpoint
from tests.pool import run_in_processes
from tests.trainer.resume_runs import Broken, Outcome, Traced, run
from tests.trainer.tasks import Weight, ones, quiet
from tests.trainer.test_resume import assert_same


def assert_continues(whole: Outcome, broken: Outcome, resumed: Outcome) -> None:
    """As `assert_same`, but for what a callback itself has counted in the open step: that is the callback's affair."""
    resumed.average = whole.average
    assert_same(whole, broken, resumed)


class SaveWithin(Callback):
    """Saves at a moment within a step or a validation, and ends the run there."""

    def __init__(self, path: str, moment: str, batch: int, epoch: int = 0) -> None:
        self.path, self.moment, self.batch, self.epoch = path, moment, batch, epoch

    def _end(self, trainer: Trainer, moment: str, batch: int) -> None:
        here = (moment, batch, trainer.current_epoch) == (self.moment, self.batch, self.epoch)
        if here and not trainer.sanity_checking:
            trainer.save_checkpoint(self.path)
            raise Broken

    def on_train_batch_start(self, trainer, task, batch, batch_idx):
        self._end(trainer, "start", batch_idx)

    def on_before_optimizer_step(self, trainer, task, optimizer):
        self._end(trainer, "before step", trainer.progress.batches_in_epoch)

    def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx):
        self._end(trainer, "end", batch_idx)

    def on_validation_batch_end(self, trainer, task, outputs, batch, batch_idx, dataloader_idx=0):
        self._end(trainer, "validation", batch_idx)

    def on_validation_epoch_end(self, trainer, task):
        self._end(trainer, "validated", 0)


class Drawing(Traced):
    """Draws random numbers in its validation too."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step((batch[0] + 0.1 * torch.rand_like(batch[0]), batch[1]), batch_idx)


def broken_off(folder: str, callbacks: list[Callback], **case: Any) -> tuple[Outcome, Outcome, Outcome]:
    """The whole run, the one that is broken off, and the one that resumes it."""
    whole = run(os.path.join(folder, "whole"), task=Drawing, **case)
    broken = run(os.path.join(folder, "broken"), task=Drawing, callbacks=callbacks, **case)
    resumed = run(os.path.join(folder, "broken"), task=Drawing, resume="yes", **case)
    return whole, broken, resumed


def saved_within(folder: str, moment: str, batch: int, epoch: int, **case: Any) -> tuple[Outcome, Outcome, Outcome]:
    path = os.path.join(folder, "broken", "broken.ckpt")
    return broken_off(folder, [SaveWithin(path, moment, batch, epoch)], epochs=2, **case)


WINDOWS = [
    ("end", 3, 0, {"accumulate": 3}),  # the first of the second window
    ("end", 4, 1, {"accumulate": 3, "kind": "generator"}),
    ("end", 0, 1, {"accumulate": 3, "kind": "sequential"}),
    ("start", 5, 0, {"accumulate": 3, "kind": "min_size"}),
    ("start", 5, 1, {}),
    ("before step", 5, 0, {}),
]


@pytest.mark.parametrize(("moment", "batch", "epoch", "case"), WINDOWS)
def test_within_an_open_window_nothing_of_it_is_saved(moment, batch, epoch, case, tmp_path):
    """Epoch means, metrics, batch statistics and dropout are those of a run that was never broken off."""
    assert_continues(*saved_within(str(tmp_path), moment, batch, epoch, **case))


@pytest.mark.parametrize("kind", ["shuffled", "generator", "shuffled-workers2", "max_size_cycle"])
@pytest.mark.parametrize("epoch", [0, 1])
def test_before_an_epochs_first_step_ends_its_order_is_kept(epoch, kind, tmp_path):
    assert_same(*saved_within(str(tmp_path), "start", 0, epoch, kind=kind))


@pytest.mark.parametrize("interval", [None, 5])
@pytest.mark.parametrize("moment", ["validation", "validated"])
def test_a_validation_that_was_saved_in_runs_again_from_its_beginning(moment, interval, tmp_path):
    whole, broken, resumed = saved_within(
        str(tmp_path), moment, 1 if moment == "validation" else 0, 0, interval=interval
    )
    assert_same(whole, broken, resumed)
    assert resumed.validated == whole.validated


class SignalWithin(Callback):
    """Sends the last process a signal in the first batch of a validation, and counts the batches from there on."""

    def __init__(self, number: int, epoch: int, sanity: bool) -> None:
        self.number, self.epoch, self.sanity = number, epoch, sanity
        self.batches = 0

    def on_validation_batch_end(self, trainer, task, outputs, batch, batch_idx, dataloader_idx=0):
        if (trainer.current_epoch, trainer.sanity_checking) == (self.epoch, self.sanity):
            self.batches += 1
            if self.batches == 1 and trainer.global_rank == trainer.world_size - 1:
                os.kill(os.getpid(), self.number)


def ended_by_signals(folder: str, cases: list[tuple[int, int, bool, int | None]]) -> list[tuple[Outcome, Any, Any]]:
    """For each case the whole run, the resumed one, and what the signal left: checkpoints, batches after it."""
    outcomes = []
    for place, (number, epoch, sanity, interval) in zip(map(str, range(len(cases))), cases, strict=True):
        broken, same = os.path.join(folder, place), {"task": Drawing, "interval": interval, "epochs": 2}
        whole = run(os.path.join(folder, f"whole-{place}"), callbacks=[EMAWeightAveraging(decay=0.9)], **same)
        within = SignalWithin(number, epoch, sanity)
        saving = ModelCheckpoint(dirpath=broken, every_n_epochs=9)
        with pytest.raises((SystemExit, KeyboardInterrupt)):
            run(broken, callbacks=[within, saving, EMAWeightAveraging(decay=0.9)], **same)
        names = sorted(path.name for path in Path(broken).glob("*.ckpt"))
        path = os.path.join(broken, names[0])
        resumed = run(broken, resume=path, callbacks=[EMAWeightAveraging(decay=0.9)], **same)
        outcomes.append((whole, resumed, (names, within.batches)))
    return outcomes


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_signal_ends_a_validation_after_its_batch_and_the_resumed_run_validates_from_the_beginning(
    world_size, tmp_path
):
    """At an epoch's end, within an epoch and in the sanity check; of two processes one alone has the signal."""
    cases = [
        (signal.SIGTERM, 0, False, None, "preempted", 12 // world_size),
        (signal.SIGINT, 1, False, None, "interrupted", 24 // world_size),
        (signal.SIGUSR1, 0, False, 5, "preempted", 5),
        (signal.SIGINT, 0, True, None, "interrupted", 0),
        (signal.SIGTERM, 0, True, None, "preempted", 0),
    ]
    arguments = (str(tmp_path), [case[:4] for case in cases])
    for outcomes in run_in_processes(ended_by_signals, world_size, arguments, timeout=120):
        for (*_, reason, step), (whole, resumed, left) in zip(cases, outcomes, strict=True):
            assert left == ([f"{reason}-step={step}.ckpt"], 1)
            assert_same(whole, whole, resumed)
            assert resumed.validated == whole.validated - (step == 24 // world_size)


class Failing(Drawing):
    """Raises once, in the forward of a batch in the midst of a window."""

    fails = True

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.fails and (self.current_epoch, batch_idx) == (1, 4):
            raise Broken
        return loss


class Whole(Failing):
    fails = False


@pytest.mark.parametrize("accumulate", [1, 3])
def test_after_an_exception_the_step_is_done_again(accumulate, tmp_path):
    folder = tmp_path / "broken"
    saving = ModelCheckpoint(dirpath=folder, filename="unused-{step}", every_n_epochs=9, save_on_exception=True)
    whole = run(str(tmp_path / "whole"), accumulate=accumulate, epochs=2, task=Whole)
    broken = run(str(folder), accumulate=accumulate, epochs=2, task=Failing, callbacks=[saving])
    [path] = folder.glob("unused-*")
    resumed = run(str(folder), accumulate=accumulate, epochs=2, task=Whole, resume=str(path))
    assert_continues(whole, broken, resumed)


class TakingTurns(Task):
    """Two optimizers, or one that computes its own gradients; saves within its third step."""

    def __init__(self, kind: str, path: str) -> None:
        super().__init__()
        self.kind, self.path, self.batch = kind, path, -1
        self.automatic_optimization = kind != "by hand"
        self.first, self.second = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)

    def configure_optimizers(self) -> Any:
        if self.kind == "closure":
            return torch.optim.LBFGS(self.parameters(), max_iter=3)
        return [torch.optim.SGD(each.parameters(), lr=0.1) for each in (self.first, self.second)]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.batch = batch_idx
        if self.kind != "by hand":
            return self.second(self.first(batch)).square().mean()
        for number, optimizer in enumerate(self.optimizers()):
            optimizer.zero_grad()
            self.manual_backward(self.second(self.first(batch)).square().mean())
            if number:
                self.save()
            optimizer.step()
        return None

    def on_after_backward(self) -> None:
        if self.kind == "closure":
            self.save()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.kind == "hook" and optimizer.param_groups[0]["params"][0] is self.second.weight:
            self.save()

    def save(self) -> None:
        if self.batch == 2:
            self.trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("kind", ["by hand", "hook", "closure"])
def test_a_step_that_has_changed_some_parameters_is_not_saved(kind: str, tmp_path: Path) -> None:
    saving = ModelCheckpoint(dirpath=tmp_path, filename="{step}", every_n_train_steps=1, save_on_exception=True)
    trainer = quiet(callbacks=[saving], enable_checkpointing=True)
    with pytest.raises(CheckpointError, match="while a step is changing parameters"):
        trainer.fit(TakingTurns(kind, str(tmp_path / "torn")), torch.utils.data.DataLoader(torch.ones(4, 1)))  # type: ignore[arg-type]
    assert [each.name for each in tmp_path.iterdir()] == [Path(saving.best_model_path).name]


def test_a_save_at_the_end_of_an_epoch_does_not_count_its_samples_again(tmp_path: Path) -> None:
    class Counts(Weight):
        def __init__(self, saves: bool) -> None:
            super().__init__()
            self.count, self.saves = SumMetric(), saves
            self.by_hand: list[float] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.count.update(1.0)
            self.log("count", self.count, on_step=False, on_epoch=True)
            return super().training_step(batch, batch_idx)

        def on_train_epoch_end(self) -> None:
            self.by_hand.append(float(self.count.compute()))
            if self.saves:
                self.trainer.save_checkpoint(tmp_path / "saved")

    quiet(max_epochs=1).fit(Counts(True), ones(3))
    task, trainer = Counts(False), quiet(max_epochs=2)
    trainer.fit(task, ones(3), resume=tmp_path / "saved")
    assert task.by_hand == [3.0, 3.0]
    assert float(trainer.callback_metrics["count"]) == 3.0


def an_engine_saved_within_a_window(folder: str) -> list[Any]:
    """`accelerator.save_state` in a hook of a Trainer's run."""

    class SaveEngine(SaveWithin):
        def _end(self, trainer: Trainer, moment: str, batch: int) -> None:
            if (moment, batch, trainer.current_epoch) == (self.moment, self.batch, self.epoch):
                trainer.accelerator.save_state(self.path)
                trainer.save_checkpoint(f"{self.path}.ckpt")
                raise Broken

    run(folder, accumulate=3, callbacks=[SaveEngine(f"{folder}/state", "end", 4)])
    engine, _ = Checkpoint(f"{folder}/state").shared()
    task, _ = Checkpoint(f"{folder}/state.ckpt").shared()
    assert [*engine["driver"]] == ["trackers"]
    counts = [len(engine["engine"][kind]) for kind in ("models", "optimizers", "schedulers", "loaders")]
    random = [Checkpoint(f"{folder}/{name}").own(0)["engine"]["random"]["torch"] for name in ("state", "state.ckpt")]
    position = engine["engine"]["loaders"][0]["consumed"], task["engine"]["loaders"][0]["consumed"]
    return [counts, position, torch.equal(*random), engine["engine"]["classes"]]


def test_inside_fit_the_accelerator_saves_all_that_the_engine_has(tmp_path):
    [[counts, position, same, classes]] = run_in_processes(an_engine_saved_within_a_window, 1, args=(str(tmp_path),))
    assert counts == [1, 1, 2, 1]
    assert position == (12, 12)  # samples of the three batches of the last finished step
    assert same
    assert classes["optimizers"] == ["AdamW"]
    assert classes["models"] == ["Traced"]


def test_another_optimizer_class_is_refused_by_both_names(tmp_path: Path) -> None:
    run(str(tmp_path), moment="batch", step=2)
    with pytest.raises(CheckpointError, match=r"state of an AdamW, but optimizer 0 of this run is a SGD"):
        run(str(tmp_path), task=WithSGD, resume="yes")


class WithSGD(Traced):
    def configure_optimizers(self) -> Any:
        _, schedulers = super().configure_optimizers()
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        for config in schedulers:
            config["scheduler"].optimizer = optimizer
        return [optimizer], schedulers
