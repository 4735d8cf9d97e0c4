"""A checkpoint of one driver is opened by the other, and one that an earlier version wrote by both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import (
    Accelerator,
    Callback,
    CheckpointError,
    CombinedLoader,
    DataLoaderConfiguration,
    Task,
    Trainer,
    consolidate,
)
from drivetrain.checkpoint import Checkpoint, save_run_state
from tests.pool import device
from tests.trainer.tasks import quiet

STEPS = 8


class Net(Task):
    """Adam with a schedule, and the samples of each step."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        self.net = torch.nn.Linear(width, 1)
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen += batch[0][:, 0].tolist()
        return self.net(batch[0]).square().mean() * (1 + torch.rand(()))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3), "interval": "step"}]


class Counting(Callback):
    """Counts steps in its state, and adds to the checkpoint by its hook."""

    def __init__(self) -> None:
        self.steps = 0

    def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx):
        self.steps += 1

    def on_save_checkpoint(self, trainer, task, checkpoint):
        checkpoint["added"] = {"epoch": checkpoint["epoch"], "optimizers": len(checkpoint["optimizer_states"])}

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state_dict):
        self.steps = state_dict["steps"]


def loader() -> DataLoader[Any]:
    x = torch.arange(STEPS * 2.0)[:, None].expand(-1, 3) / 10
    return DataLoader(TensorDataset(x), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(1))


def fit(task: Task, resume: Any = None, steps: int = -1, save: Any = None, **options: Any) -> Trainer:
    trainer = quiet(max_epochs=2, max_steps=steps, **options)
    trainer.fit(task, loader(), resume=resume)
    if save is not None:
        trainer.save_checkpoint(save)
    return trainer


def raw_loop(load: Any, steps: int, save: Any = None, task: Net | None = None) -> Net:
    """The same steps in a loop of the user's own."""
    task = task or Net()
    [optimizer], [config] = task.configure_optimizers()
    accelerator = Accelerator(device=device(), dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True))
    _, optimizer, schedule, data = accelerator.prepare(task, optimizer, config["scheduler"], loader())
    if load is not None:
        accelerator.load_state(load)
    for batch in data:
        optimizer.zero_grad()
        accelerator.backward(task.training_step(batch, 0))
        optimizer.step()
        schedule.step()
        steps -= 1
        if not steps:
            break
    if save is not None:
        accelerator.save_state(save)
    return task


def draw() -> float:
    """A number that tells where the global generator stands."""
    return float(torch.rand(()))


def assert_same_weights(one: Task, other: Task) -> None:
    assert [p.tolist() for p in one.parameters()] == [p.tolist() for p in other.parameters()]


def test_a_run_leaves_fit_continues_in_a_raw_loop_and_comes_back(tmp_path: Path) -> None:
    torch.manual_seed(5)
    whole = Net()
    fit(whole, steps=STEPS)
    expected = draw()
    torch.manual_seed(5)
    first, last = Net(), Net()
    counting = Counting()
    fit(first, steps=3, save=tmp_path / "one", callbacks=counting)
    second = raw_loop(tmp_path / "one", 2, tmp_path / "two")
    again = Counting()
    trainer = fit(last, resume=tmp_path / "two", steps=3 + 3, callbacks=again)
    assert first.seen + second.seen + last.seen == whole.seen
    assert_same_weights(last, whole)
    assert draw() == expected
    # What the raw loop does not know it has kept: steps are counted on from where fit was left.
    assert (trainer.global_step, trainer.current_epoch, again.steps) == (6, 1, 3 + 3)
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == STEPS


def test_a_run_begins_in_a_raw_loop(tmp_path: Path) -> None:
    torch.manual_seed(5)
    whole = Net()
    fit(whole)
    torch.manual_seed(5)
    first = raw_loop(None, 3, tmp_path / "raw")
    last = Net()
    trainer = fit(last, resume=tmp_path / "raw")
    assert first.seen + last.seen == whole.seen
    assert_same_weights(last, whole)
    assert (trainer.global_step, trainer.current_epoch) == (2 * STEPS - 3, 2)


def test_a_raw_checkpoint_at_the_end_of_an_epoch_begins_the_next(tmp_path: Path) -> None:
    raw_loop(None, STEPS, tmp_path / "raw")
    task = Net()
    trainer = fit(task, resume=tmp_path / "raw")
    assert (len(task.seen), trainer.global_step) == (2 * STEPS, STEPS)


def test_what_hooks_and_callbacks_add_is_kept_by_a_raw_loop(tmp_path: Path) -> None:
    fit(Net(), steps=2, save=tmp_path / "one", callbacks=Counting())
    raw_loop(tmp_path / "one", 1, tmp_path / "two")
    shared, _ = Checkpoint(tmp_path / "two").shared()
    assert set(shared) == {"engine", "driver", "kept"}
    assert shared["driver"]["hooks"] == {"added": {"epoch": 0, "optimizers": 1}}
    assert shared["driver"]["callbacks"]["Counting"] == {"steps": 2}
    assert "callbacks" in shared["kept"]
    assert Net.load_from_checkpoint(tmp_path / "two").hparams == {"width": 3}


def test_entries_of_another_driver_are_kept_by_a_trainer(tmp_path: Path) -> None:
    accelerator = Accelerator(device=device())
    task = Net()
    [optimizer], [config] = task.configure_optimizers()
    accelerator.prepare(task, optimizer, config["scheduler"], loader())
    run = accelerator.run_state
    run.write(tmp_path / "theirs", run.engine(), {"their notes": [1, 2]}, {"their rank": 0})
    fit(Net(), resume=tmp_path / "theirs", steps=1, save=tmp_path / "ours")
    shared, _ = Checkpoint(tmp_path / "ours").shared()
    assert shared["driver"]["their notes"] == [1, 2]
    assert shared["kept"] == ["their notes"]


def test_other_numbers_of_objects_are_refused_with_what_the_checkpoint_holds(tmp_path: Path) -> None:
    class Two(Net):
        def configure_optimizers(self) -> Any:
            return [torch.optim.Adam([p], lr=0.1) for p in self.parameters()]

    fit(Net(), steps=1, save=tmp_path / "one")
    with pytest.raises(
        CheckpointError, match=r"contains 1 optimizers, but this run has 2. The checkpoint has: Adam. Let configure"
    ):
        fit(Two(), resume=tmp_path / "one")
    accelerator = Accelerator(device=device())
    accelerator.prepare(Net(), Net())
    with pytest.raises(
        CheckpointError, match=r"contains 1 models, but this run has 2. The checkpoint has: Net. Prepare"
    ):
        accelerator.load_state(tmp_path / "one")


def test_the_accelerator_refuses_another_optimizer_class_by_both_names(tmp_path: Path) -> None:
    raw_loop(None, 1, tmp_path / "raw")
    accelerator, task = Accelerator(device=device()), Net()
    optimizer = torch.optim.SGD(task.parameters(), lr=0.1)
    accelerator.prepare(task, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3))
    with pytest.raises(CheckpointError, match="state of an Adam, but optimizer 0 of this run is a SGD"):
        accelerator.load_state(tmp_path / "raw")


def test_the_weights_of_either_checkpoint_are_exported(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    task = Net()
    fit(task, steps=1, save=tmp_path / "fit")
    raw_loop(tmp_path / "fit", 1, tmp_path / "raw")
    for name in ("fit", "raw"):
        consolidate(tmp_path / name, tmp_path / f"{name} export", module="net")
        assert set(load_file(tmp_path / f"{name} export" / "model.safetensors")) == {"weight", "bias"}


def test_combined_loaders_leave_fit_and_come_back(tmp_path: Path) -> None:
    class Pairs(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return super().training_step(batch["a"], batch_idx)

    def pairs() -> CombinedLoader:
        return CombinedLoader({"a": loader(), "b": loader()})

    task = Pairs()
    trainer = quiet(max_epochs=1, max_steps=3)
    trainer.fit(task, pairs())
    trainer.save_checkpoint(tmp_path / "one")
    shared, _ = Checkpoint(tmp_path / "one").shared()
    assert [each["consumed"] for each in shared["engine"]["loaders"]] == [6, 6]
    rest = Pairs()
    quiet(max_epochs=1).fit(rest, pairs(), resume=tmp_path / "one")
    assert len(task.seen) + len(rest.seen) == 2 * STEPS
    assert not set(task.seen) & set(rest.seen)


# what an earlier version wrote


def old_layouts(root: Path) -> tuple[Net, dict[str, Any], dict[str, Any]]:
    """Write what the version before would have written after three steps, as a Trainer and as an Accelerator."""
    task = Net()
    trainer = fit(task, steps=3, save=root / "now")
    shared, _ = Checkpoint(root / "now").shared()
    own = Checkpoint(root / "now").own(0)
    engine, driver = shared["engine"], shared["driver"]
    state = trainer.accelerator.state
    random = {"random": own["engine"]["random"]}
    of_a_trainer = {
        "epoch": 0,
        "global_step": 3,
        "state_dict": engine["models"][0],
        "hyper_parameters": driver["hyper_parameters"],
        "optimizer_states": engine["optimizers"],
        "lr_schedulers": engine["schedulers"],
        "precision": engine["precision"],
        "progress": driver["progress"],
        "loader": engine["loaders"][0],
        "callbacks": {},
        "trackers": [],
        "registered": [],
        "should_stop": False,
        "datamodule": {},
        "added": "by a hook",
    }
    of_an_accelerator = {
        name: engine[name] for name in ("models", "optimizers", "schedulers", "loaders", "registered", "precision")
    }
    save_run_state(root / "trainer", of_a_trainer, {**random, **own["driver"]}, state)
    save_run_state(root / "accelerator", of_an_accelerator, random, state)
    return task, of_a_trainer, of_an_accelerator


@pytest.mark.parametrize("name", ["trainer", "accelerator"])
def test_a_checkpoint_of_the_version_before_is_opened_by_both_drivers(name: str, tmp_path: Path) -> None:
    torch.manual_seed(5)
    whole = Net()
    fit(whole, steps=STEPS)
    torch.manual_seed(5)
    first, _, _ = old_layouts(tmp_path)
    seen: dict[str, Any] = {}

    class Looking(Callback):
        def on_load_checkpoint(self, trainer, task, checkpoint):
            seen.update(checkpoint)

    resumed = Net()
    trainer = fit(resumed, resume=tmp_path / name, steps=STEPS if name == "trainer" else STEPS - 3, callbacks=Looking())
    assert first.seen + resumed.seen == whole.seen
    assert_same_weights(resumed, whole)
    assert seen.get("added") == ("by a hook" if name == "trainer" else None)
    assert trainer.global_step == (STEPS if name == "trainer" else STEPS - 3)
    raw = raw_loop(tmp_path / name, STEPS - 3)
    assert raw.seen == resumed.seen
    assert_same_weights(raw, whole)
    quiet().validate(Validated(), loader(), ckpt_path=tmp_path / name, verbose=False)
    assert isinstance(Net.load_from_checkpoint(tmp_path / name), Net)
    assert len(consolidate(tmp_path / name, tmp_path / "export")) == 1


class Validated(Net):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass
