from __future__ import annotations

import logging
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from drivetrain import Callback, ConfigurationError, Task, Trainer
from drivetrain.callbacks import EarlyStopping, ModelCheckpoint
from tests.callbacks.tasks import Scripted, fit, numbers
from tests.conformance.language_model import LanguageTask, Run, Texts
from tests.conformance.strategies import ROWS as KINDS
from tests.conformance.strategies import cases
from tests.pool import run_in_processes
from tests.strategies.quiet import quiet_trainer

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("values", "options", "epochs", "best"),
    [
        ([3, 2, 1, 0.5], {"patience": 1}, 4, 0.5),
        ([3, 2, 2, 1], {"patience": 1}, 3, 2),
        ([3, 2, 4, 4, 4, 1], {"patience": 3}, 5, 2),
        ([3, 2, 4, 1, 4, 4, 4], {"patience": 3}, 7, 1),
        ([1, 2, 2, 3], {"patience": 1, "mode": "max"}, 3, 2),
        ([3, 2.95, 2.9, 2.8], {"patience": 2, "min_delta": 0.5}, 3, 3),
        ([3, 2.5, 2], {"patience": 1, "min_delta": 0.5}, 2, 3),
        ([3, NAN, 1], {"patience": 9}, 2, 3),
        ([3, INF, 1], {"patience": 9}, 2, 3),
        ([3, NAN, 1], {"patience": 9, "check_finite": False}, 3, 1),
        ([3, NAN, NAN, 1], {"patience": 2, "check_finite": False}, 3, 3),
        ([3, 0.1, 1], {"stopping_threshold": 0.2}, 2, 3),
        ([3, 9, 1], {"divergence_threshold": 8}, 2, 3),
        ([3, 1, 9], {"mode": "max", "divergence_threshold": 2}, 2, 3),
        ([3, 4], {"patience": 0}, 2, 3),
    ],
)
def test_training_stops_when_the_metric_no_longer_improves(
    values: list[float], options: dict[str, Any], epochs: int, best: float, tmp_path: Path
) -> None:
    stopping = EarlyStopping("val_loss", **options)
    task = Scripted(values)
    fit(task, tmp_path, len(values), [stopping])
    assert len(task.seen) == epochs
    assert float(stopping.best_score) == pytest.approx(best)
    stopped = epochs < len(values) or stopping.stopping_reason_message is not None
    assert stopping.stopped_epoch == (epochs - 1 if stopped else 0)


def test_the_reason_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stopping = EarlyStopping("val_loss", patience=1, verbose=True)
    with caplog.at_level(logging.INFO, logger="drivetrain"):
        fit(Scripted([2, 1, 1]), tmp_path, 3, [stopping])
    told = [record.getMessage() for record in caplog.records if record.name.endswith("early_stopping")]
    assert told == [
        "val_loss has improved; the best value is 2.",
        "val_loss has improved by 1; the best value is 1.",
        "val_loss did not improve in 1 checks. The best value was 1.",
    ]


def test_a_value_logged_at_the_end_of_the_training_epoch_is_seen_in_the_same_epoch(tmp_path: Path) -> None:
    stopping = EarlyStopping("epoch_loss", patience=1)
    trainer = fit(Scripted([2, 1, 1, 0.5], in_training=True), tmp_path, 4, [stopping], validate=False)
    assert trainer.current_epoch == 3
    assert float(stopping.best_score) == 1


@pytest.mark.parametrize(("interval", "validations"), [(0.5, [0, 0, 1, 1]), (1, [0, 0, 1, 1]), (1.0, [0, 1, 2, 3])])
def test_each_validation_in_an_epoch_is_a_check(interval: float, validations: list[int], tmp_path: Path) -> None:
    task = Scripted([2, 1, 1, 1, 1, 1, 1, 1])
    fit(task, tmp_path, 4, [EarlyStopping("val_loss", patience=2)], val_check_interval=interval)
    assert task.seen == validations


def test_with_validation_every_second_epoch_the_epochs_between_are_no_checks(tmp_path: Path) -> None:
    task = Scripted([2, 1, 1])
    trainer = fit(task, tmp_path, 10, [EarlyStopping("val_loss", patience=1)], check_val_every_n_epoch=2)
    assert task.seen == [1, 3, 5]
    assert trainer.current_epoch == 6


def test_a_missing_metric_is_an_error_that_names_those_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"'val_los'.*Logged so far: .*'val_loss'.*Did you mean 'val_loss'"):
        fit(Scripted([1]), tmp_path, 1, [EarlyStopping("val_los")])


def test_without_strict_checks_without_the_metric_are_left_out(tmp_path: Path) -> None:
    task = Scripted([1, 2, 3, 4, 5])
    fit(task, tmp_path, 5, [EarlyStopping("val_los", strict=False, patience=1)])
    assert len(task.seen) == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [({"mode": "mim"}, "can be 'min'.*Did you mean 'min'"), ({"patience": -1}, "patience must be at least 0 checks")],
)
def test_bad_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        EarlyStopping("val_loss", **options)


def test_its_state_carries_over() -> None:
    first = EarlyStopping("val_loss", patience=5)
    first._evaluate_stopping_criteria(2.0)
    first._evaluate_stopping_criteria(3.0)
    second = EarlyStopping("val_loss", patience=1)
    second.load_state_dict(first.state_dict())
    assert (float(second.best_score), second.wait_count, second.patience) == (2.0, 1, 5)


def stop_on_processes(root: str, unequal: bool) -> tuple[int, float, str | None]:
    from drivetrain import PartialState

    offset = PartialState().process_index if unequal else 0
    stopping = EarlyStopping("val_loss", patience=1)
    trainer = fit(Scripted([3 + offset, 2 - offset, 2.5 - offset, 1, 0]), root, 5, [stopping])
    return trainer.current_epoch, float(stopping.best_score), stopping.stopping_reason_message


@pytest.mark.parametrize("unequal", [False, True])
def test_all_processes_stop_together(unequal: bool, tmp_path: Path) -> None:
    first, second = run_in_processes(stop_on_processes, args=(str(tmp_path), unequal))
    assert first == second
    assert first[0] == 3


@pytest.mark.parametrize(
    ("losses", "options", "reason", "words"),
    [
        ([3, 2, 1], {}, "NOT_STOPPED", None),
        ([3, 3, 3], {"patience": 1}, "PATIENCE_EXHAUSTED", "did not improve"),
        ([3, 1, 1], {"stopping_threshold": 2.0}, "STOPPING_THRESHOLD", "Stopping threshold reached"),
        ([3, 9, 1], {"divergence_threshold": 5.0}, "DIVERGENCE_THRESHOLD", "Divergence threshold"),
        ([3, float("nan"), 1], {}, "NON_FINITE_METRIC", "is not finite"),
    ],
)
def test_why_it_stopped_is_kept_and_saved(
    losses: list[float], options: dict[str, Any], reason: str, words: str | None, tmp_path: Path
) -> None:
    stopping = EarlyStopping("val_loss", **options)
    fit(Scripted(losses), tmp_path, 3, [stopping])
    restored = EarlyStopping("val_loss")
    restored.load_state_dict(stopping.state_dict())
    assert restored.stopping_reason is stopping.stopping_reason
    assert stopping.stopping_reason.name == reason
    message = restored.stopping_reason_message
    assert message is None if words is None else words in str(message)


RECOVERS = [1, 2, 3, 0.9, 0.8, 0.7, 0.6, 0.5]
NEVER_DOES = [1, 2, 3, 4, 5, 6, 7, 8]


class Requests(Callback):
    """Asks for a stop of its own in one epoch."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def on_train_epoch_end(self, trainer: Trainer, task: Task) -> None:
        if trainer.current_epoch == self.epoch and trainer.global_rank == trainer.world_size - 1:
            trainer.request_stop("enough")


@pytest.mark.parametrize(
    ("values", "options", "epochs"),
    [
        (RECOVERS, {"min_epochs": 5}, 8),
        (RECOVERS, {"min_steps": 9}, 8),
        (NEVER_DOES, {"min_epochs": 5}, 5),
        (RECOVERS, {"min_epochs": 3}, 3),
        (RECOVERS, {"min_epochs": 5, "max_epochs": 6}, 6),
    ],
)
def test_a_stop_before_the_least_asked_for_is_forgotten_once_the_metric_improves(
    values: list[float], options: dict[str, Any], epochs: int, tmp_path: Path
) -> None:
    stopping = EarlyStopping("val_loss", patience=2)
    epochs_at_most = options.pop("max_epochs", len(values))
    trainer = fit(Scripted(values), tmp_path, epochs_at_most, [stopping], **options)
    assert trainer.current_epoch == epochs
    stopped = epochs < epochs_at_most
    assert (stopping.stopping_reason.name == "NOT_STOPPED") is not stopped


def declined_on_processes(root: str) -> list[int]:
    """Epochs: with EarlyStopping alone, with a request of the last process besides, and of a resumed run."""
    seen = []
    for extra in ([], [Requests(3)]):
        trainer = fit(Scripted(RECOVERS), root, 8, [EarlyStopping("val_loss", patience=2), *extra], min_epochs=5)
        seen.append(trainer.current_epoch)
    saved = Path(root, "third")
    task = Scripted(RECOVERS[:3])
    fit(task, root, 3, [EarlyStopping("val_loss", patience=2)], min_epochs=5).save_checkpoint(saved)
    resumed = Scripted(RECOVERS)
    resumed.seen = list(range(3))
    options = {"min_epochs": 5, "resume": saved}
    seen.append(fit(resumed, root, 8, [EarlyStopping("val_loss", patience=2)], **options).current_epoch)
    return seen


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_others_asked_for_holds_and_a_resumed_run_forgets_too(world_size: int, tmp_path: Path) -> None:
    assert run_in_processes(declined_on_processes, world_size, [str(tmp_path)]) == [[8, 5, 8]] * world_size


class SaveAt(Callback):
    """Saves in a hook, the second time that it runs, and ends the run there."""

    def __init__(self, path: Path, hook: str) -> None:
        self.path, self.hook, self.calls = path, hook, 0

    def _save(self, trainer: Trainer, hook: str) -> None:
        self.calls += hook == self.hook
        if hook == self.hook and self.calls == 2:
            trainer.save_checkpoint(self.path)
            raise InterruptedError

    def on_validation_start(self, trainer: Trainer, task: Any) -> None:
        self._save(trainer, "start")

    def on_validation_epoch_end(self, trainer: Trainer, task: Any) -> None:
        self._save(trainer, "epoch end")

    def on_validation_end(self, trainer: Trainer, task: Any) -> None:
        self._save(trainer, "end")


@pytest.mark.parametrize("hook", ["start", "epoch end", "end"])
@pytest.mark.parametrize("patience", [1, 2])
def test_a_run_that_was_saved_around_a_check_stops_where_it_would_have(
    hook: str, patience: int, tmp_path: Path
) -> None:
    class Rising(Scripted):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", float(self.trainer.global_step))

    def run(callbacks: list[Any], resume: Any = None) -> int:
        stopping = EarlyStopping("val_loss", patience=patience, check_on_train_epoch_end=False)
        return fit(Rising(), tmp_path, 3, [stopping, *callbacks], resume=resume, val_check_interval=1).global_step

    with pytest.raises(InterruptedError):
        run([SaveAt(tmp_path / "saved", hook)])
    assert run([], tmp_path / "saved") == run([]) == patience + 1


def test_a_stopped_run_stays_stopped_when_it_is_resumed(tmp_path: Path) -> None:
    def run(epochs: int, resume: str | None = None) -> tuple[int, str]:
        saving = ModelCheckpoint(tmp_path, save_last=True)
        callbacks = [EarlyStopping("val_loss", patience=2), saving]
        trainer = fit(Scripted([1.0] * 9), tmp_path, epochs, callbacks, resume=resume)
        return trainer.current_epoch, saving.last_model_path

    epochs, last = run(5)
    assert (epochs, run(9, last)[0]) == (3, 3)


# the best weights


@pytest.mark.parametrize(
    ("values", "options", "best", "epochs"),
    [
        ([3, 1, 2, 2, 2], {"patience": 2}, 1, 4),  # stopped
        ([3, 1, 2, 2], {"patience": 9}, 1, 4),  # not stopped
        ([1, 3, 2, 2.5], {"patience": 9, "start_from_epoch": 1}, 2, 4),
        ([1, 2, 2], {"patience": 1, "start_from_epoch": 2}, 2, 3),
        ([3, NAN, 2], {"patience": 9}, 0, 2),
    ],
)
def test_the_best_weights_are_restored(
    values: list[float], options: dict[str, Any], best: int, epochs: int, tmp_path: Path
) -> None:
    stopping, weights = EarlyStopping("val_loss", restore_best_weights=True, **options), Weights()
    task = Scripted(values)
    fit(task, tmp_path, len(values), [stopping, weights])
    assert len(task.seen) == epochs
    assert len({tuple(each) for each in weights.seen}) == epochs
    assert flat(task) == weights.seen[best]


class Weights(Callback):
    """Notes the weights at each validation."""

    def __init__(self) -> None:
        self.seen: list[list[float]] = []

    def on_validation_end(self, trainer: Trainer, task: Task) -> None:
        if not trainer.sanity_checking:
            self.seen.append(flat(task))


def flat(task: Task) -> list[float]:
    return [value for each in task.parameters() for value in each.detach().flatten().tolist()]


def test_the_best_weights_survive_a_resume_and_another_run_in_the_folder(tmp_path: Path) -> None:
    def run(values: list[float], epochs: int, resume: Any = None) -> tuple[Task, Weights]:
        task, weights = Scripted(values), Weights()
        stopping = EarlyStopping("val_loss", patience=9, restore_best_weights=True)
        saver = ModelCheckpoint(tmp_path / "saved", save_last=True)
        trainer = quiet_trainer(
            "single",
            max_epochs=epochs,
            default_root_dir=tmp_path,
            callbacks=[stopping, weights, saver],
            enable_checkpointing=True,
        )
        trainer.fit(task, numbers(4, 2), numbers(2, 2), resume=resume)
        return task, weights

    _, first = run([3, 1, 2], 3)
    run([0.5, 1], 2)  # another run
    task, second = run([3, 1, 2, 2, 2], 5, tmp_path / "saved" / "epoch=2-step=6.ckpt")
    assert len(first.seen) == 3
    assert len(second.seen) == 2
    assert flat(task) == first.seen[1]


def test_best_weights_that_are_gone_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Removes(Callback):
        def on_train_end(self, trainer: Trainer, task: Task) -> None:
            [found] = tmp_path.rglob("early_stopping_best_*")
            shutil.rmtree(found)

    weights, task = Weights(), Scripted([3, 1, 2])
    fit(task, tmp_path, 3, [EarlyStopping("val_loss", restore_best_weights=True), weights, Removes()])
    assert flat(task) == weights.seen[-1]
    assert "is gone, so the weights of the last step are kept" in caplog.text


def best_of(strategy: str, root: str) -> tuple[list[float], list[list[float]]]:
    """The sums of all weights after a fit, and at each validation, in a run whose second epoch is the best."""

    class Values(LanguageTask):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            super().validation_step(batch, batch_idx)
            self.log("val_loss", [3.0, 1.0, 2.0][self.trainer.current_epoch])

        def on_fit_end(self) -> None:  # after those of callbacks
            noted.seen.append(sums(self.trainer))

    def sums(trainer: Trainer) -> list[float]:
        state = trainer.accelerator.get_state_dict(trainer.model)
        return [float(value.double().sum()) for value in state.values()]

    class Sums(Callback):
        def __init__(self) -> None:
            self.seen: list[list[float]] = []

        def on_validation_end(self, trainer: Trainer, task: Task) -> None:
            if not trainer.sanity_checking:
                self.seen.append(sums(trainer))

    run, noted = Run(layers=2, samples=8), Sums()
    trainer = quiet_trainer(
        KINDS[strategy].make(),
        max_epochs=3,
        callbacks=[EarlyStopping("val_loss", restore_best_weights=True), noted],
        default_root_dir=root,
    )
    rows = run.rows(trainer.strategy.topology.data_shard.count)
    trainer.fit(Values(layers=2), DataLoader(run.data(), batch_size=rows), DataLoader(Texts(4), batch_size=2))
    *seen, last = noted.seen
    return last, seen


@pytest.mark.sharded
@pytest.mark.timeout(300)
@pytest.mark.parametrize("strategy", cases("ddp", "fsdp", "tp", "pp", "zero-1", "zero-3"))
def test_the_best_weights_are_restored_under_each_strategy(strategy: str, tmp_path: Path) -> None:
    found = run_in_processes(best_of, KINDS[strategy].processes, args=(strategy, str(tmp_path)), timeout=200)
    last, seen = found[0]  # the main process has all weights
    assert len(last) > 10
    assert seen[0] != seen[1] != seen[2]
    assert last == seen[1]
