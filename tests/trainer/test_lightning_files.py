"""Files of Lightning's are resumed, evaluated, loaded and written."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from drivetrain import (
    Callback,
    CheckpointError,
    ConfigurationError,
    DataModule,
    EarlyStopping,
    ModelCheckpoint,
)
from tests.commands import drivetrain
from tests.pool import run_in_processes
from tests.trainer.lightning_files import BATCHES, Line, content, data, quiet, train, write

KEY = "ModelCheckpoint{'monitor': 'val_loss', 'mode': 'min', 'every_n_train_steps': 0, 'every_n_epochs': 1, "
KEY += "'train_time_interval': None}"


def rest_after(steps: int, until: int = 3 * BATCHES) -> list[tuple[int, float]]:
    return train(until)[3][steps:]


@pytest.mark.parametrize(("steps", "at_epoch_end"), [(6, True), (12, True), (6, False), (4, False), (9, False)])
def test_a_run_continues_at_the_next_batch(tmp_path: Path, steps: int, at_epoch_end: bool) -> None:
    path = write(tmp_path / "x.ckpt", steps, at_epoch_end)
    trainer, task = quiet(tmp_path), Line()
    trainer.fit(task, data(), ckpt_path=path)
    assert [number for number, _ in task.losses] == [number for number, _ in rest_after(steps)]
    assert [loss for _, loss in task.losses] == pytest.approx([loss for _, loss in rest_after(steps)], rel=1e-6)
    assert (trainer.global_step, trainer.current_epoch) == (3 * BATCHES, 3)


def test_the_line_at_the_start_names_what_the_file_does_not_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "x.ckpt", 6, True)
    quiet(tmp_path, max_epochs=2).fit(Line(), data(), ckpt_path=path)
    assert capsys.readouterr().out.count("no random state") == 1


def test_a_validation_that_the_epoch_s_last_batch_leaves_open_is_run(tmp_path: Path) -> None:
    path = write(tmp_path / "x.ckpt", 6)
    ran = []

    class Validations(Callback):
        def on_validation_end(self, trainer: Any, task: Any) -> None:
            ran.append(trainer.current_epoch)

    quiet(tmp_path, max_epochs=2, callbacks=Validations()).fit(Line(), data(), data(), ckpt_path=path)
    assert ran == [0, 1]


def test_callbacks_take_their_states(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    best = write(kept / "epoch=0.ckpt", 6, True)
    states = {
        "EarlyStopping{'monitor': 'val_loss', 'mode': 'min'}": {
            "wait_count": 2,
            "stopped_epoch": 0,
            "best_score": torch.tensor(1e-9),
            "patience": 3,
            "stopping_reason": 0,
        },
        KEY: {
            "monitor": "val_loss",
            "best_model_score": torch.tensor(1e-9),
            "best_model_path": best,
            "current_score": torch.tensor(1e-9),
            "dirpath": str(kept),
            "best_k_models": {best: torch.tensor(1e-9)},
            "kth_best_model_path": best,
            "kth_value": torch.tensor(1e-9),
            "last_model_path": "",
        },
    }
    stopping, saving = EarlyStopping("val_loss", patience=3), ModelCheckpoint(kept, monitor="val_loss", save_last=True)
    trainer = quiet(tmp_path, callbacks=[stopping, saving], enable_checkpointing=True)
    trainer.fit(Line(), data(), data(), ckpt_path=write(tmp_path / "x.ckpt", 6, True, callbacks=states))
    assert (stopping.wait_count, float(stopping.best_score)) == (3, pytest.approx(1e-9))
    assert trainer.current_epoch == 2
    assert saving.best_model_path == best  # nothing was better
    assert trainer.test(dataloaders=data(), ckpt_path="best", verbose=False)[0]["tested"] == pytest.approx(
        float(train(6)[0].layer.weight.sum())
    )


def test_a_name_that_a_file_has_is_not_replaced(tmp_path: Path) -> None:
    best = write(tmp_path / "best.ckpt", 6, True)
    state = {"dirpath": str(tmp_path), "best_k_models": {best: torch.tensor(9.0)}, "best_model_path": best}
    path = write(tmp_path / "x.ckpt", 6, True, callbacks={KEY: {**state, "kth_value": torch.tensor(9.0)}})
    saving = ModelCheckpoint(tmp_path, "best", monitor="val_loss")
    quiet(tmp_path, max_epochs=2, callbacks=saving, enable_checkpointing=True).fit(
        Line(), data(), data(), ckpt_path=path
    )
    assert saving.best_model_path == str(tmp_path / "best-v1.ckpt")
    assert os.path.isfile(best)


@pytest.mark.parametrize("name", ["/etc/passwd", "../thesis.txt", 7])
def test_a_path_outside_of_the_run_s_directory_is_refused(tmp_path: Path, name: Any) -> None:
    state = {"dirpath": str(tmp_path), "best_k_models": {name: torch.tensor(1.0)}, "kth_value": torch.tensor(1.0)}
    path = write(tmp_path / "x.ckpt", 6, True, callbacks={KEY: state})
    saving = ModelCheckpoint(tmp_path, monitor="val_loss")
    with pytest.raises(CheckpointError, match="which no run writes"):
        quiet(tmp_path, callbacks=saving, enable_checkpointing=True).fit(Line(), data(), data(), ckpt_path=path)


def test_hooks_see_what_they_had_added(tmp_path: Path) -> None:
    class Adds(Line):
        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.found = checkpoint["mine"], checkpoint["pytorch-lightning_version"], "fit_loop" in checkpoint["loops"]
            checkpoint["state_dict"]["layer.bias"] += 1

    path = write(tmp_path / "x.ckpt", 6, True, mine=[1, 2])
    task = Adds.load_from_checkpoint(path)
    assert task.found == ([1, 2], "2.6.6", True)
    assert task.layer.bias.item() == pytest.approx(train(6)[0].layer.bias.item() + 1)
    trainer, fitted = quiet(tmp_path, max_epochs=1), Adds()
    trainer.fit(fitted, data(), ckpt_path=path)
    assert (fitted.found, fitted.losses) == (task.found, [])


class Numbers(DataModule):
    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.seen = 0

    def train_dataloader(self) -> Any:
        return data(self.hparams.size)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen = state_dict["seen"]


def test_a_data_module_takes_its_state_and_its_hyper_parameters(tmp_path: Path) -> None:
    more = {"Numbers": {"seen": 7}, "hyper_parameters": {"size": 8, "lr": 0.1}}
    path = write(tmp_path / "x.ckpt", 6, True, **more)
    loaded = Numbers.load_from_checkpoint(path)
    assert (loaded.seen, loaded.hparams.size) == (7, 8)
    module = Numbers()
    quiet(tmp_path, max_epochs=1).fit(Line(), datamodule=module, ckpt_path=path)
    assert module.seen == 7


def test_an_imported_file_is_resumed_alike(tmp_path: Path) -> None:
    path = write(tmp_path / "x.ckpt", 9)
    result = drivetrain("import-checkpoint", path, tmp_path / "imported")
    assert result.exit_code == 0
    task = Line()
    quiet(tmp_path).fit(task, data(), resume=tmp_path / "imported")
    assert [loss for _, loss in task.losses] == pytest.approx([loss for _, loss in rest_after(9)], rel=1e-6)


def test_a_folder_of_shards_is_resumed(tmp_path: Path) -> None:
    saved = content(9)
    names = {index: name for index, (name, _) in enumerate(Line().named_parameters())}
    [state] = saved.pop("optimizer_states")
    [group] = state["param_groups"]
    optimizer = {
        "state": {names[index]: value for index, value in state["state"].items()},
        "param_groups": [{**group, "params": list(names.values())}],
    }
    folder = tmp_path / "x.ckpt"
    dcp.save({"model": saved.pop("state_dict"), "optimizer_0": optimizer}, checkpoint_id=folder, no_dist=True)
    torch.save(saved, folder / "meta.pt")
    task = Line()
    quiet(tmp_path).fit(task, data(), ckpt_path=folder)
    assert [loss for _, loss in task.losses] == pytest.approx([loss for _, loss in rest_after(9)], rel=1e-6)


# refused


class Unknown:
    """What no reader without this module can make."""


def test_a_file_with_objects_is_refused_by_their_classes(tmp_path: Path) -> None:
    saved = {"made": partial(os.mkdir, tmp_path / "run"), "kind": Unknown()}
    path = write(tmp_path / "x.ckpt", 6, True, hyper_parameters=saved)
    with pytest.raises(CheckpointError, match=r"functools\.partial.*Unknown.*weights_only=False"):
        quiet(tmp_path).fit(Line(), data(), ckpt_path=path)
    with pytest.raises(CheckpointError, match="Unknown"):
        Line.load_from_checkpoint(path)


@pytest.mark.parametrize("found", [{"weight": torch.ones(1)}, [1, 2]])
def test_another_file_is_refused(tmp_path: Path, found: Any) -> None:
    torch.save(found, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match="no checkpoint of Lightning's"):
        Line.load_from_checkpoint(tmp_path / "x.pt")


def test_weights_alone_are_tested_and_not_trained(tmp_path: Path) -> None:
    saved = content(6, True)
    for name in ("optimizer_states", "lr_schedulers", "callbacks"):
        del saved[name]
    torch.save(saved, tmp_path / "x.ckpt")
    expected = float(train(6)[0].layer.weight.sum())
    found = quiet(tmp_path).test(Line(), data(), ckpt_path=tmp_path / "x.ckpt", verbose=False)
    assert found[0]["tested"] == pytest.approx(expected)
    with pytest.raises(CheckpointError, match="weights only"):
        quiet(tmp_path).fit(Line(), data(), ckpt_path=tmp_path / "x.ckpt")


# written


class SavesAt(Callback):
    def __init__(self, path: Path, step: int) -> None:
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer: Any, task: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path, format="lightning")


@pytest.mark.parametrize("step", [4, 9, 18])
def test_what_is_written_is_what_the_plain_loop_has(tmp_path: Path, step: int) -> None:
    path, task = tmp_path / "x.ckpt", Line()
    stopping = EarlyStopping("val_loss")
    quiet(tmp_path, callbacks=[SavesAt(path, step), stopping]).fit(task, data(), data())
    found, expected = torch.load(path, weights_only=True), content(step)
    torch.testing.assert_close(found["state_dict"], expected["state_dict"])
    torch.testing.assert_close(found["optimizer_states"][0]["state"], expected["optimizer_states"][0]["state"])
    assert found["optimizer_states"][0]["param_groups"][0]["params"] == [0, 1]
    assert {name: found[name] for name in ("epoch", "global_step", "hyper_parameters")} == {
        name: expected[name] for name in ("epoch", "global_step", "hyper_parameters")
    }
    loop, wanted = found["loops"]["fit_loop"], expected["loops"]["fit_loop"]
    assert loop["epoch_loop.batch_progress"] == wanted["epoch_loop.batch_progress"]
    assert loop["epoch_progress"]["current"] == wanted["epoch_progress"]["current"]
    assert list(found["callbacks"]) == ["EarlyStopping{'monitor': 'val_loss', 'mode': 'min'}"]
    assert sorted(os.listdir(tmp_path)) == ["x.ckpt"]


def test_a_written_file_is_resumed(tmp_path: Path) -> None:
    quiet(tmp_path, callbacks=SavesAt(tmp_path / "x.ckpt", 9)).fit(Line(), data())
    task = Line()
    quiet(tmp_path).fit(task, data(), ckpt_path=tmp_path / "x.ckpt")
    assert [loss for _, loss in task.losses] == pytest.approx([loss for _, loss in rest_after(9)], rel=1e-6)


def test_a_place_that_cannot_be_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    trainer = quiet(tmp_path, max_epochs=1)
    trainer.fit(Line(), data())
    (tmp_path / "taken").mkdir()
    for path, message in ((tmp_path / "taken", "is a directory"), ("memory://x.ckpt", "is a URL")):
        with pytest.raises(ConfigurationError, match=message):
            trainer.save_checkpoint(path, format="lightning")
    with pytest.raises(ConfigurationError, match="use 'drivetrain', 'lightning'"):
        trainer.save_checkpoint(tmp_path / "x", format="pickle")
    assert os.listdir(tmp_path) == ["taken"]


def sharded(folder: str, strategy: str) -> list[float]:
    root = Path(folder)
    options: dict[str, Any] = {"strategy": strategy, "devices": 2}
    quiet(root, callbacks=SavesAt(root / "x.ckpt", 4), max_epochs=1, **options).fit(Line(), data(2))
    task = Line()
    quiet(root, max_epochs=1, **options).fit(task, data(2), ckpt_path=root / "x.ckpt")
    return [loss for _, loss in task.losses]


@pytest.mark.slow
def test_shards_are_gathered_into_the_file_and_taken_from_it(tmp_path: Path) -> None:
    both = run_in_processes(sharded, 2, args=(str(tmp_path), "fsdp"))
    found, expected = torch.load(tmp_path / "x.ckpt", weights_only=True), content(4)
    torch.testing.assert_close(found["state_dict"], expected["state_dict"], rtol=1e-5, atol=1e-6)
    state = found["optimizer_states"][0]["state"][0]["exp_avg"]
    torch.testing.assert_close(state, expected["optimizer_states"][0]["state"][0]["exp_avg"], rtol=1e-5, atol=1e-6)
    mean = [sum(pair) / 2 for pair in zip(*both, strict=True)]
    assert mean == pytest.approx([loss for _, loss in rest_after(4, BATCHES)], rel=1e-4)
    assert sorted(os.listdir(tmp_path)) == ["x.ckpt"]
