"""Which checkpoints are left: `last`, limits, names of other runs, and a directory that moves."""

from __future__ import annotations

import itertools
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from drivetrain import ConfigurationError, Trainer
from drivetrain.callbacks import Callback, ModelCheckpoint
from drivetrain.checkpoint import Checkpoint, list_checkpoints
from drivetrain.trackers import CSVLogger
from tests.callbacks.tasks import Scripted, fit
from tests.pool import run_in_processes


def saved(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def step_of(path: str | Path) -> int | None:
    checkpoint = Checkpoint(str(path))
    checkpoint.verify()
    return checkpoint.manifest.step


# last


def test_last_as_a_link_is_relative_and_points_to_the_newest(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "ckpt", "{epoch}", monitor="val_loss", save_last="link")
    fit(Scripted([1, 3, 2]), tmp_path, 3, [checkpoint])
    assert saved(tmp_path / "ckpt") == ["epoch=0.ckpt", "epoch=2.ckpt", "last.ckpt"]
    assert os.readlink(tmp_path / "ckpt" / "last.ckpt") == "epoch=2.ckpt"
    assert checkpoint.last_model_path == str(tmp_path / "ckpt" / "last.ckpt")
    shutil.move(tmp_path / "ckpt", tmp_path / "moved")
    assert step_of(tmp_path / "moved" / "last.ckpt") == 6


@pytest.mark.parametrize("save_last", [True, "copy"])
def test_last_as_a_copy_shares_its_files_with_the_newest(save_last: Any, tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "ckpt", "{epoch}", save_last=save_last)
    fit(Scripted([1, 1]), tmp_path, 2, [checkpoint])
    assert saved(tmp_path / "ckpt") == ["epoch=1.ckpt", "last.ckpt"]
    one, other = tmp_path / "ckpt" / "epoch=1.ckpt", tmp_path / "ckpt" / "last.ckpt"
    assert step_of(one) == step_of(other) == 4
    tensors = [path.relative_to(one) for path in one.rglob("*.safetensors")]
    assert tensors
    assert all(os.path.samefile(one / name, other / name) for name in tensors)


def test_last_is_the_newest_also_where_that_is_none_of_the_best(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "ckpt", "{epoch}", monitor="val_loss", save_last=True)
    fit(Scripted([1, 3, 2]), tmp_path, 3, [checkpoint])
    assert saved(tmp_path / "ckpt") == ["epoch=0.ckpt", "last.ckpt"]
    assert step_of(tmp_path / "ckpt" / "last.ckpt") == 6


def test_a_copy_survives_the_checkpoint_that_it_was_made_from(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "ckpt", "{epoch}", monitor="val_loss", save_last=True)
    fit(Scripted([3, 1]), tmp_path, 2, [checkpoint])
    shutil.rmtree(tmp_path / "ckpt" / "epoch=1.ckpt")
    assert step_of(tmp_path / "ckpt" / "last.ckpt") == 4


@pytest.mark.parametrize("first", ["link", "copy"])
def test_one_kind_of_last_takes_the_place_of_the_other_in_a_resumed_run(first: str, tmp_path: Path) -> None:
    second = "copy" if first == "link" else "link"
    before = ModelCheckpoint(tmp_path / "ckpt", "{epoch}", save_last=first)
    fit(Scripted([1]), tmp_path, 1, [before])
    after = ModelCheckpoint(tmp_path / "ckpt", "{epoch}", save_last=second)
    fit(Scripted([1]), tmp_path, 2, [after], resume=before.last_model_path)
    assert saved(tmp_path / "ckpt") == ["epoch=1.ckpt", "last.ckpt"]
    assert os.path.islink(tmp_path / "ckpt" / "last.ckpt") == (second == "link")
    assert step_of(tmp_path / "ckpt" / "last.ckpt") == 4


# limits


def test_the_directory_holds_no_more_than_the_limit(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "ckpt", "{epoch}", save_top_k=-1, total_limit=2)
    fit(Scripted([1] * 4), tmp_path, 4, [checkpoint])
    assert saved(tmp_path / "ckpt") == ["epoch=2.ckpt", "epoch=3.ckpt"]
    assert sorted(map(os.path.basename, checkpoint.best_k_models)) == ["epoch=2.ckpt", "epoch=3.ckpt"]


def test_the_best_and_last_stay_whatever_the_limit(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(
        tmp_path / "ckpt", "{epoch}", monitor="val_loss", save_top_k=2, save_last="link", total_limit=1
    )
    fit(Scripted([1, 2, 3, 4]), tmp_path, 4, [checkpoint])
    assert saved(tmp_path / "ckpt") == ["epoch=0.ckpt", "epoch=1.ckpt", "epoch=3.ckpt", "last.ckpt"]


def test_the_limit_counts_what_earlier_runs_left(tmp_path: Path) -> None:
    fit(Scripted([1] * 3), tmp_path, 3, [ModelCheckpoint(tmp_path / "ckpt", "old-{epoch}", save_top_k=-1)])
    checkpoint = ModelCheckpoint(tmp_path / "ckpt", "new-{epoch}", total_limit=2)
    fit(Scripted([1]), tmp_path, 1, [checkpoint])
    assert saved(tmp_path / "ckpt") == ["new-epoch=0.ckpt", "old-epoch=2.ckpt"]


def test_the_limit_goes_by_step_whatever_the_clock_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(4_000_000_000, -86_400)  # each reading is a day before the last one
    monkeypatch.setattr("drivetrain.checkpoint.save.time.time", lambda: float(next(clock)))
    checkpoint = ModelCheckpoint(tmp_path / "ckpt", "{epoch}", save_top_k=-1, total_limit=2)
    fit(Scripted([1] * 4), tmp_path, 4, [checkpoint])
    assert saved(tmp_path / "ckpt") == ["epoch=2.ckpt", "epoch=3.ckpt"]


def test_what_is_no_checkpoint_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "ckpt" / "notes").mkdir(parents=True)
    (tmp_path / "ckpt" / "notes" / "a.txt").write_text("mine")
    fit(Scripted([1] * 3), tmp_path, 3, [ModelCheckpoint(tmp_path / "ckpt", save_top_k=-1, total_limit=1)])
    assert (tmp_path / "ckpt" / "notes" / "a.txt").read_text() == "mine"


# resume


def resumed(
    root: Path, checkpoint: ModelCheckpoint, path: str, values: list[float], epochs: int, **options: Any
) -> None:
    fit(Scripted(values), root, epochs, [checkpoint], resume=path, **options)


def test_a_resumed_run_whose_directory_was_moved_goes_on_with_its_best(tmp_path: Path) -> None:
    before = ModelCheckpoint(tmp_path / "a" / "ckpt", "{epoch}", monitor="val_loss", save_top_k=2, save_last=True)
    fit(Scripted([1, 3]), tmp_path / "a", 2, [before])
    shutil.move(tmp_path / "a", tmp_path / "b")
    after = ModelCheckpoint(tmp_path / "b" / "ckpt", "{epoch}", monitor="val_loss", save_top_k=2, save_last=True)
    resumed(tmp_path / "b", after, str(tmp_path / "b" / "ckpt" / "last.ckpt"), [2, 4], 4)
    assert saved(tmp_path / "b" / "ckpt") == ["epoch=0.ckpt", "epoch=2.ckpt", "last.ckpt"]
    assert after.best_model_path == str(tmp_path / "b" / "ckpt" / "epoch=0.ckpt")
    assert not (tmp_path / "a").exists()


def test_a_default_directory_that_was_moved_is_found_below_the_new_root(tmp_path: Path) -> None:
    before = ModelCheckpoint(filename="{epoch}", monitor="val_loss")
    fit(Scripted([1]), tmp_path / "a", 1, [before], logger=CSVLogger(tmp_path / "a"))
    inside = os.path.relpath(before.best_model_path, tmp_path / "a")
    shutil.move(tmp_path / "a", tmp_path / "b")
    after = ModelCheckpoint(filename="{epoch}", monitor="val_loss")
    resumed(tmp_path / "b", after, str(tmp_path / "b" / inside), [2], 2, logger=CSVLogger(tmp_path / "b"))
    assert after.best_model_path == str(tmp_path / "b" / inside)
    assert not (tmp_path / "a").exists()


def test_a_run_that_was_not_told_where_to_save_goes_on_where_it_was(tmp_path: Path) -> None:
    def one_run(epochs: int, resume: str | None) -> ModelCheckpoint:
        checkpoint = ModelCheckpoint(filename="{epoch}", save_top_k=-1)
        fit(Scripted([1] * 3), tmp_path, epochs, [checkpoint], logger=CSVLogger(tmp_path), resume=resume)
        return checkpoint

    first = one_run(1, None)
    second = one_run(2, first.best_model_path)
    assert saved(Path(second.best_model_path).parent) == ["epoch=0.ckpt", "epoch=1.ckpt"]
    assert saved(tmp_path / "drivetrain_logs") == [".index.lock", "index", "version_0"]


def test_auto_finds_what_a_run_with_default_directories_saved(tmp_path: Path) -> None:
    for epochs in (1, 2, 3):
        task = Scripted([1] * 3)
        fit(task, tmp_path, epochs, [ModelCheckpoint(save_last=True)], logger=CSVLogger(tmp_path), resume="auto")
        assert task.seen == [epochs - 1]


def test_a_checkpoint_says_what_it_replaces_so_that_a_run_killed_before_that_leaves_nothing(tmp_path: Path) -> None:
    before = ModelCheckpoint(tmp_path / "ckpt", "{epoch}")
    fit(Scripted([1]), tmp_path, 1, [before])
    kept = tmp_path / "kept"
    shutil.copytree(tmp_path / "ckpt" / "epoch=0.ckpt", kept)
    fit(Scripted([1]), tmp_path, 2, [ModelCheckpoint(tmp_path / "ckpt", "{epoch}")], resume=before.best_model_path)
    shutil.move(kept, tmp_path / "ckpt" / "epoch=0.ckpt")  # as if the run had been killed before it removed this one
    fit(Scripted([1]), tmp_path, 3, [ModelCheckpoint(tmp_path / "ckpt", "{epoch}")], resume="auto")
    assert saved(tmp_path / "ckpt") == ["epoch=2.ckpt"]


class Hurry(Callback):
    """Ends the run at a step as a preemption does."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Trainer, task: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            assert trainer.checkpoint_callback is not None
            path = trainer.checkpoint_callback.save_now(trainer)
            assert Path(path).name == f"preempted-step={self.step}.ckpt"
            raise KeyboardInterrupt


def test_the_state_of_a_run_ended_in_a_hurry_is_removed_by_the_next_checkpoint(tmp_path: Path) -> None:
    options: dict[str, Any] = {"dirpath": tmp_path / "ckpt", "filename": "{step}", "every_n_train_steps": 2}
    fit(Scripted([1, 1]), tmp_path, 2, [ModelCheckpoint(**options), Hurry(3)], on_interrupt="return")
    assert saved(tmp_path / "ckpt") == ["preempted-step=3.ckpt", "step=2.ckpt"]
    fit(Scripted([1, 1]), tmp_path, 3, [ModelCheckpoint(**options)], resume="auto")
    assert saved(tmp_path / "ckpt") == ["step=6.ckpt"]


def test_state_saved_in_a_hurry_at_the_end_of_an_epoch_does_not_cost_the_epochs_own_checkpoint(tmp_path: Path) -> None:
    options: dict[str, Any] = {"dirpath": tmp_path / "ckpt", "filename": "{epoch}", "monitor": "val_loss"}
    fit(Scripted([1]), tmp_path, 1, [ModelCheckpoint(**options), Hurry(2)], on_interrupt="return")
    assert saved(tmp_path / "ckpt") == ["preempted-step=2.ckpt"]
    fit(Scripted([1, 2]), tmp_path, 2, [ModelCheckpoint(**options)], resume="auto")
    assert saved(tmp_path / "ckpt") == ["epoch=0.ckpt"]


# elsewhere


def test_a_remote_directory_works_like_a_local_one(tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}/ckpt"
    checkpoint = ModelCheckpoint(url, "{epoch}", monitor="val_loss", save_top_k=2, save_last=True, total_limit=3)
    fit(Scripted([3, 1, 2]), tmp_path, 3, [checkpoint])
    names = sorted(one.path.rsplit("/", 1)[1] for one in list_checkpoints(url))
    assert names == ["epoch=1.ckpt", "epoch=2.ckpt", "last.ckpt"]
    assert checkpoint.best_model_path == f"{url}/epoch=1.ckpt"
    with pytest.raises(ConfigurationError, match="only supported for local file paths, not for memory://"):
        fit(Scripted([1]), tmp_path, 1, [ModelCheckpoint(url, save_last="link")])


def test_a_run_whose_root_is_a_url_is_resumed_from_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    url = f"memory://{tmp_path.name}/root"
    fit(Scripted([1]), url, 1, [ModelCheckpoint(filename="{epoch}")], logger=True)
    assert [one.path for one in list_checkpoints(f"{url}/checkpoints")] == [f"{url}/checkpoints/epoch=0.ckpt"]
    again = Scripted([1, 2])
    fit(again, url, 2, [ModelCheckpoint(filename="{epoch}")], resume="auto", logger=True)
    assert [one.path.rsplit("/", 1)[1] for one in list_checkpoints(f"{url}/checkpoints")] == ["epoch=1.ckpt"]
    assert not list(tmp_path.glob("memory*"))


def link_on_processes(root: str) -> list[str]:
    checkpoint = ModelCheckpoint(
        os.path.join(root, "ckpt"), "{epoch}", monitor="val_loss", save_last="link", total_limit=3
    )
    fit(Scripted([1, 3, 2, 4]), root, 4, [checkpoint])
    return [checkpoint.best_model_path, checkpoint.last_model_path, checkpoint.newest_model_path]


def test_processes_agree_on_what_is_kept(tmp_path: Path) -> None:
    first, second = run_in_processes(link_on_processes, args=(str(tmp_path),))
    assert first == second
    assert saved(tmp_path / "ckpt") == ["epoch=0.ckpt", "epoch=3.ckpt", "last.ckpt"]


def resume_on_processes(root: str) -> list[Any]:
    found: list[Any] = []
    for epochs in (1, 2):
        checkpoint = ModelCheckpoint(filename="{epoch}", monitor="val_loss", save_top_k=2, save_last=True)
        task = Scripted([1, 2])
        fit(task, root, epochs, [checkpoint], logger=CSVLogger(root), resume="auto")
        found += [task.seen, checkpoint.best_model_path, checkpoint.best_k_models]
    return found


def test_processes_go_on_together_in_the_directory_of_the_run_before(tmp_path: Path) -> None:
    first, second = run_in_processes(resume_on_processes, args=(str(tmp_path),))
    assert first == second
    assert first[0] == [0]
    assert first[3] == [1]
    assert first[1] == first[4]
    assert saved(Path(first[1]).parent) == ["epoch=0.ckpt", "epoch=1.ckpt", "last.ckpt"]
    assert saved(tmp_path / "drivetrain_logs") == [".index.lock", "index", "version_0"]


def test_when_validation_follows_a_step_its_value_names_the_checkpoint(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(
        tmp_path / "ckpt", "{step}-{val_loss:.0f}", monitor="val_loss", every_n_train_steps=2, save_top_k=-1
    )
    fit(Scripted([7, 5, 6]), tmp_path, 3, [checkpoint])
    assert saved(tmp_path / "ckpt") == [f"step={2 * n + 2}-val_loss={value}.ckpt" for n, value in enumerate((7, 5, 6))]
    assert Path(checkpoint.best_model_path).name == "step=4-val_loss=5.ckpt"


class TwoMetrics(Scripted):
    """Logs a second metric beside the scripted one."""

    def __init__(self, values: list[float], others: list[float]) -> None:
        super().__init__(values)
        self.others = others

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if not self.trainer.sanity_checking:
            self.log("other", self.others[len(self.seen)])
        super().validation_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("options", "kept", "best"),
    [
        ({}, [2, 4], 2),  # the older one ranks higher
        ({"tie_monitor": "step", "tie_mode": "max"}, [6, 8], 8),
        ({"tie_monitor": "other"}, [4, 8], 4),
        ({"tie_monitor": "other", "tie_mode": "max"}, [2, 6], 6),
    ],
    ids=str,
)
def test_a_second_metric_decides_between_equal_values(
    options: dict[str, Any], kept: list[int], best: int, tmp_path: Path
) -> None:
    task = TwoMetrics([1, 1, 1, 1, 2], [5, 1, 7, 2, 0])
    callback = ModelCheckpoint(tmp_path, monitor="val_loss", save_top_k=2, **options)
    fit(task, tmp_path, 5, [callback])
    assert sorted(step_of(path) or 0 for path in callback.best_k_models) == kept
    assert len(list(tmp_path.glob("*.ckpt"))) == 2
    assert step_of(callback.best_model_path) == best


def test_a_resumed_run_knows_the_second_metric_of_its_checkpoints(tmp_path: Path) -> None:
    def run(values: list[float], others: list[float], resume: str | None) -> ModelCheckpoint:
        callback = ModelCheckpoint(tmp_path, monitor="val_loss", tie_monitor="other")
        task = TwoMetrics(values, others)
        task.seen = [] if resume is None else [0]
        fit(task, tmp_path, len(values), [callback], resume=resume)
        return callback

    first = run([1], [3], None).best_model_path
    assert step_of(run([1, 1], [3, 4], first).best_model_path) == 2
    assert step_of(run([1, 1], [3, 2], first).best_model_path) == 4


def test_a_second_metric_needs_a_first_and_has_to_be_logged(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"tie_monitor='other'\) decides between equal values of monitor"):
        ModelCheckpoint(tie_monitor="other")
    callback = ModelCheckpoint(tmp_path, monitor="val_loss", tie_monitor="others")
    with pytest.raises(ConfigurationError, match=r"monitor='others'\): no metric of this name was logged.*'other'"):
        fit(TwoMetrics([1], [1]), tmp_path, 1, [callback])
