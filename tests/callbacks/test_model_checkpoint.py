from __future__ import annotations

import math
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from drivetrain import ConfigurationError, Trainer
from drivetrain.callbacks import Callback, EarlyStopping, ModelCheckpoint
from drivetrain.trackers import CSVLogger
from tests.callbacks.tasks import Scripted, fit, numbers
from tests.pool import run_in_processes

NAN = math.nan


def saved(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir()) if directory.exists() else []


@pytest.mark.parametrize(
    ("values", "options", "names", "best"),
    [
        ([3, 1, 2], {"monitor": "val_loss"}, ["epoch=1.ckpt"], "epoch=1.ckpt"),
        ([3, 1, 2], {"monitor": "val_loss", "mode": "max"}, ["epoch=0.ckpt"], "epoch=0.ckpt"),
        ([3, 1, 2], {"monitor": "val_loss", "save_top_k": 2}, ["epoch=1.ckpt", "epoch=2.ckpt"], "epoch=1.ckpt"),
        ([1, 2, 3], {"monitor": "val_loss", "save_last": True}, ["epoch=0.ckpt", "last.ckpt"], "epoch=0.ckpt"),
        ([3, 1], {"monitor": "val_loss", "save_top_k": -1}, ["epoch=0.ckpt", "epoch=1.ckpt"], "epoch=1.ckpt"),
        ([NAN, 5, NAN], {"monitor": "val_loss"}, ["epoch=1.ckpt"], "epoch=1.ckpt"),
        ([3, 1, 2], {}, ["epoch=2.ckpt"], "epoch=2.ckpt"),
        ([3, 1, 2], {"save_top_k": -1}, ["epoch=0.ckpt", "epoch=1.ckpt", "epoch=2.ckpt"], "epoch=2.ckpt"),
        ([3, 1, 2], {"save_top_k": 0, "save_last": True}, ["last.ckpt"], ""),
        ([1, 1, 1, 1], {"save_top_k": -1, "every_n_epochs": 2}, ["epoch=1.ckpt", "epoch=3.ckpt"], "epoch=3.ckpt"),
    ],
)
def test_the_right_checkpoints_are_left(
    values: list[float], options: dict[str, Any], names: list[str], best: str, tmp_path: Path
) -> None:
    checkpoint = ModelCheckpoint(dirpath=tmp_path / "ckpt", filename="{epoch}", **options)
    fit(Scripted(values), tmp_path, len(values), [checkpoint])
    assert saved(tmp_path / "ckpt") == names
    assert Path(checkpoint.best_model_path).name == best


def test_the_attributes_tell_what_there_is(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(
        tmp_path, "{epoch:02d}-{val_loss:.2f}", monitor="val_loss", save_top_k=2, save_last=True
    )
    fit(Scripted([3, 1, 2]), tmp_path, 3, [checkpoint])
    assert checkpoint.best_model_path == str(tmp_path / "epoch=01-val_loss=1.00.ckpt")
    assert float(checkpoint.best_model_score) == 1.0  # type: ignore[arg-type]
    assert checkpoint.last_model_path == str(tmp_path / "last.ckpt")
    assert checkpoint.kth_best_model_path == str(tmp_path / "epoch=02-val_loss=2.00.ckpt")
    assert list(checkpoint.best_k_models.values()) == [1.0, 2.0]
    assert checkpoint.current_score == 2.0


def test_by_default_it_saves_beside_the_logs(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint()
    trainer = fit(Scripted([1]), tmp_path, 1, [checkpoint], logger=CSVLogger(tmp_path))
    assert trainer.log_dir is not None
    assert saved(Path(trainer.log_dir, "checkpoints")) == ["epoch=0-step=2.ckpt"]
    checkpoint = ModelCheckpoint()
    fit(Scripted([1]), tmp_path / "plain", 1, [checkpoint])
    assert saved(tmp_path / "plain" / "checkpoints") == ["epoch=0-step=2.ckpt"]


def test_the_checkpoint_holds_the_model_that_was_validated(tmp_path: Path) -> None:
    class Weight(Callback):
        def __init__(self) -> None:
            self.after_validation: list[float] = []

        def on_validation_end(self, trainer: Trainer, task: Any) -> None:
            self.after_validation.append(task.layer.weight.item())

    seen = Weight()
    checkpoint = ModelCheckpoint(tmp_path, monitor="val_loss")
    fit(Scripted([3, 1, 2]), tmp_path, 3, [checkpoint, seen])
    task = Scripted([0])
    trainer = Trainer(logger=False, enable_progress_bar=False, default_root_dir=str(tmp_path))
    trainer.validate(task, numbers(4, 4), ckpt_path=checkpoint.best_model_path)
    assert task.layer.weight.item() == seen.after_validation[1]


def test_a_value_logged_at_the_end_of_the_training_epoch_is_that_of_the_same_epoch(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "ckpt", "{epoch}", monitor="epoch_loss")
    fit(Scripted([3, 1, 2], in_training=True), tmp_path, 3, [checkpoint])
    assert saved(tmp_path / "ckpt") == ["epoch=1.ckpt"]


def test_an_epoch_without_validation_is_not_judged_by_an_older_value(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "ckpt", "{epoch}", monitor="val_loss", save_top_k=-1)
    fit(Scripted([1, 2]), tmp_path, 5, [checkpoint], check_val_every_n_epoch=2)
    assert saved(tmp_path / "ckpt") == ["epoch=1.ckpt", "epoch=3.ckpt"]


@pytest.mark.parametrize("interval", [0.5, 1])
def test_with_several_validations_in_an_epoch_it_saves_after_each(interval: float, tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "ckpt", "{step}", monitor="val_loss", save_top_k=-1)
    fit(Scripted([1, 2, 3, 4]), tmp_path, 2, [checkpoint], val_check_interval=interval)
    assert saved(tmp_path / "ckpt") == ["step=1.ckpt", "step=2.ckpt", "step=3.ckpt", "step=4.ckpt"]


def test_the_sanity_check_saves_nothing(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "ckpt", "{epoch}", save_top_k=-1)
    fit(Scripted([1]), tmp_path, 1, [checkpoint], num_sanity_val_steps=1)
    assert saved(tmp_path / "ckpt") == ["epoch=0.ckpt"]


def test_steps_can_be_the_measure(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "ckpt", "{step}", every_n_train_steps=3, save_top_k=-1)
    fit(Scripted([1] * 4), tmp_path, 4, [checkpoint])
    assert saved(tmp_path / "ckpt") == ["step=3.ckpt", "step=6.ckpt"]


def test_with_accumulation_each_step_is_saved_once(tmp_path: Path) -> None:
    calls: list[int] = []

    class Counting(ModelCheckpoint):
        def on_save_checkpoint(self, trainer: Trainer, task: Any, checkpoint: dict[str, Any]) -> None:
            calls.append(trainer.global_step)

    checkpoint = Counting(tmp_path / "ckpt", "{step}", every_n_train_steps=1, save_top_k=-1)
    fit(Scripted([1] * 2), tmp_path, 2, [checkpoint], accumulate_grad_batches=2)
    assert calls == [1, 2]


def test_time_can_be_the_measure(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(
        tmp_path / "ckpt", "{step}", train_time_interval=timedelta(microseconds=1), save_top_k=-1
    )
    fit(Scripted([1, 1]), tmp_path, 2, [checkpoint])
    assert len(saved(tmp_path / "ckpt")) >= 2
    never = ModelCheckpoint(tmp_path / "never", train_time_interval=timedelta(hours=1))
    fit(Scripted([1, 1]), tmp_path, 2, [never])
    assert saved(tmp_path / "never") == []


def test_a_name_taken_by_another_run_gets_a_version(tmp_path: Path) -> None:
    for _ in range(2):
        fit(Scripted([2, 1]), tmp_path, 2, [ModelCheckpoint(tmp_path / "ckpt", "best", monitor="val_loss")])
    assert saved(tmp_path / "ckpt") == ["best-v1.ckpt", "best.ckpt"]
    checkpoint = ModelCheckpoint(tmp_path / "ckpt", "best", monitor="val_loss", enable_version_counter=False)
    fit(Scripted([2, 1]), tmp_path, 2, [checkpoint])
    assert saved(tmp_path / "ckpt") == ["best-v1.ckpt", "best.ckpt"]


def test_a_missing_metric_is_an_error_that_names_those_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"'val_los'.*Logged so far: .*Did you mean 'val_loss'"):
        fit(Scripted([1]), tmp_path, 1, [ModelCheckpoint(tmp_path, monitor="val_los")])


def test_a_fast_dev_run_saves_nothing(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "ckpt")
    fit(Scripted([1]), tmp_path, 1, [checkpoint], fast_dev_run=True)
    assert saved(tmp_path / "ckpt") == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "low"}, "can be 'min'"),
        ({"save_top_k": 3}, "not a valid configuration: without monitor="),
        ({"save_top_k": -2}, "to keep all checkpoints"),
        ({"every_n_epochs": 1, "every_n_train_steps": 5}, "Combination of parameters every_n_train_steps"),
        ({"every_n_train_steps": -1}, "Must be >= 0"),
        ({"save_last": "both"}, "use True, False, 'link' or 'copy'"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ModelCheckpoint(**options)


def test_a_resumed_run_goes_on_with_the_best_so_far(tmp_path: Path) -> None:
    def checkpoint() -> ModelCheckpoint:
        return ModelCheckpoint(tmp_path / "ckpt", "{epoch}", monitor="val_loss", save_top_k=2, save_last=True)

    fit(Scripted([3, 1]), tmp_path, 2, [checkpoint()])
    resumed = checkpoint()
    trainer = Trainer(
        max_epochs=4,
        logger=False,
        callbacks=[resumed],
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=str(tmp_path),
    )
    task = Scripted([2, 4])
    trainer.fit(task, numbers(8, 4), numbers(4, 4), ckpt_path=str(tmp_path / "ckpt" / "last.ckpt"))
    assert task.seen == [2, 3]
    assert saved(tmp_path / "ckpt") == ["epoch=1.ckpt", "epoch=2.ckpt", "last.ckpt"]
    assert Path(resumed.best_model_path).name == "epoch=1.ckpt"


def test_a_run_that_saves_elsewhere_leaves_the_old_checkpoints_alone(tmp_path: Path) -> None:
    first = ModelCheckpoint(tmp_path / "a", monitor="val_loss")
    first.dirpath = str(tmp_path / "a")
    first._writer.kept.add(str(tmp_path / "a" / "x.ckpt"), 1.0, among_best=True)
    second = ModelCheckpoint(tmp_path / "b", monitor="val_loss")
    second.load_state_dict(first.state_dict())
    assert second.best_k_models == {}
    assert second.best_model_path == ""  # a checkpoint's state names no path
    assert second.best_model_score is None


def test_the_checkpoint_knows_what_early_stopping_decided_in_its_epoch(tmp_path: Path) -> None:
    stopping, checkpoint = EarlyStopping("val_loss", patience=9), ModelCheckpoint(tmp_path / "ckpt", save_last=True)
    fit(Scripted([1, 2]), tmp_path, 2, [checkpoint, stopping])
    resumed = EarlyStopping("val_loss", patience=9)
    trainer = Trainer(
        max_epochs=3,
        logger=False,
        callbacks=[resumed],
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        num_sanity_val_steps=0,
        default_root_dir=str(tmp_path),
    )
    trainer.fit(Scripted([3]), numbers(8, 4), numbers(4, 4), ckpt_path=checkpoint.last_model_path)
    assert resumed.wait_count == 2


def save_on_processes(root: str) -> tuple[str, str, list[float]]:
    checkpoint = ModelCheckpoint(filename="{epoch}-{val_loss:.1f}", monitor="val_loss", save_top_k=2, save_last=True)
    fit(Scripted([3, 1, 2]), root, 3, [checkpoint], logger=CSVLogger(root))
    return checkpoint.best_model_path, checkpoint.last_model_path, list(checkpoint.best_k_models.values())


def test_all_processes_agree_on_paths_and_the_main_process_removes(tmp_path: Path) -> None:
    first, second = run_in_processes(save_on_processes, args=(str(tmp_path),))
    assert first == second
    directory = Path(first[0]).parent
    assert saved(directory) == ["epoch=1-val_loss=1.0.ckpt", "epoch=2-val_loss=2.0.ckpt", "last.ckpt"]
    assert first[2] == [1.0, 2.0]


def test_the_best_can_be_listed_in_a_file_and_by_the_epoch(tmp_path: Path) -> None:
    newest = ModelCheckpoint(tmp_path / "ckpt", "{epoch}", monitor="epoch", mode="max", save_top_k=2)
    fit(Scripted([3, 2, 1]), tmp_path, 3, [newest])
    newest.to_yaml()
    listed = (tmp_path / "ckpt" / "best_k_models.yaml").read_text()
    assert listed.splitlines() == [f"{tmp_path}/ckpt/epoch={epoch}.ckpt: {epoch}.0" for epoch in (1, 2)]


def test_a_name_can_be_asked_for(tmp_path: Path) -> None:
    named = ModelCheckpoint(tmp_path, "{epoch}-{acc:.2f}")
    metrics = {"epoch": 3, "step": 7, "acc": 0.5}
    assert named.format_checkpoint_name(metrics) == str(tmp_path / "epoch=3-acc=0.50.ckpt")
    assert named.format_checkpoint_name(metrics, "{step}", ver=2) == str(tmp_path / "step=7-v2.ckpt")
    assert ModelCheckpoint("~/runs").dirpath == str(Path.home() / "runs")
