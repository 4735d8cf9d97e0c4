"""Checkpoints that a script's own `CheckpointIO` writes, reads and removes, and those written in the background."""

from __future__ import annotations

import io
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain import ConfigurationError
from drivetrain.compat.lightning.pytorch import Trainer
from drivetrain.compat.lightning.pytorch.callbacks import ModelCheckpoint
from drivetrain.compat.lightning.pytorch.demos.boring_classes import BoringModel
from drivetrain.compat.lightning.pytorch.plugins import AsyncCheckpointIO, CheckpointIO, TorchCheckpointIO
from drivetrain.compat.lightning.pytorch.plugins.environments import LightningEnvironment
from drivetrain.compat.lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from tests.pool import run_in_processes

KEY = 0x5A


class Ciphered(CheckpointIO):
    """Writes files that nothing else opens, and keeps account of what it was asked for."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.given: list[Any] = []

    def _record(self, call: str, path: Any) -> None:
        self.calls.append((call, os.path.basename(path)))

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        self._record("save", path)
        self.given.append(storage_options)
        plain = io.BytesIO()
        torch.save(checkpoint, plain)
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_bytes(bytes(byte ^ KEY for byte in plain.getvalue()))

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        self._record("load", path)
        self.given.append(weights_only)
        plain = io.BytesIO(bytes(byte ^ KEY for byte in Path(path).read_bytes()))
        found: dict[str, Any] = torch.load(plain, weights_only=True)
        return found

    def remove_checkpoint(self, path: Any) -> None:
        self._record("remove", path)
        os.unlink(path)

    def teardown(self) -> None:
        self._record("teardown", "")


def trainer_with(root: Any, *callbacks: Any, **options: Any) -> Any:
    settings = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    settings |= {"limit_train_batches": 2, "limit_val_batches": 0, "max_epochs": 2}
    return Trainer(default_root_dir=root, callbacks=list(callbacks), **{**settings, **options})


def test_a_plugin_writes_removes_and_reads_every_checkpoint(tmp_path: Path) -> None:
    plugin, saving = Ciphered(), ModelCheckpoint(tmp_path, save_last=True)
    trainer = trainer_with(tmp_path, saving, plugins=[plugin])
    trainer.fit(BoringModel())
    assert sorted(os.listdir(tmp_path)) == ["epoch=1-step=4.ckpt", "last.ckpt"]
    first, second = "epoch=0-step=2.ckpt", "epoch=1-step=4.ckpt"
    saved = [("save", first), ("save", "last.ckpt"), ("save", second), ("save", "last.ckpt")]
    assert [call for call in plugin.calls if call[0] == "save"] == saved
    assert [call for call in plugin.calls if call[0] == "remove"] == [("remove", first)]
    assert plugin.calls[-1] == ("teardown", "")
    assert trainer.strategy.checkpoint_io is plugin

    weights = {name: value.clone() for name, value in trainer.lightning_module.state_dict().items()}
    again = trainer_with(tmp_path, ModelCheckpoint(tmp_path), plugins=plugin, max_epochs=3)
    resumed = BoringModel()
    again.validate(resumed, ckpt_path=saving.last_model_path)
    assert all(torch.equal(value, weights[name]) for name, value in resumed.state_dict().items())
    again.fit(resumed, ckpt_path=saving.best_model_path)
    assert (again.current_epoch, again.global_step) == (3, 6)


def test_a_plugin_gets_the_options_of_a_save_and_the_flag_of_a_verb(tmp_path: Path) -> None:
    plugin = Ciphered()
    trainer = trainer_with(tmp_path, enable_checkpointing=False, strategy=SingleDeviceStrategy(checkpoint_io=plugin))
    trainer.fit(BoringModel())
    trainer.save_checkpoint(tmp_path / "a.ckpt", storage_options={"region": "near"})
    trainer.save_checkpoint(tmp_path / "b.ckpt", True)
    trainer.validate(BoringModel(), ckpt_path=tmp_path / "a.ckpt", weights_only=True)
    assert plugin.given == [{"region": "near"}, None, True]


def test_storage_options_need_a_plugin_that_takes_them(tmp_path: Path) -> None:
    trainer = trainer_with(tmp_path, enable_checkpointing=False)
    trainer.fit(BoringModel())
    with pytest.raises(TypeError, match="implement your custom `CheckpointIO`"):
        trainer.save_checkpoint(tmp_path / "a.ckpt", storage_options={"region": "near"})
    assert not (tmp_path / "a.ckpt").exists()


def test_a_derived_plugin_changes_what_torch_writes(tmp_path: Path) -> None:
    class WithNote(TorchCheckpointIO):
        def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
            super().save_checkpoint({**checkpoint, "note": "kept"}, path, storage_options)

    trainer = trainer_with(tmp_path, ModelCheckpoint(tmp_path), plugins=[WithNote()])
    trainer.fit(BoringModel())
    assert TorchCheckpointIO().load_checkpoint(trainer.checkpoint_callback.best_model_path)["note"] == "kept"
    with pytest.raises(FileNotFoundError, match="Checkpoint file not found"):
        TorchCheckpointIO().load_checkpoint(tmp_path / "none.ckpt")


def test_two_plugins_for_one_thing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="Received multiple values for CheckpointIO"):
        Trainer(plugins=[TorchCheckpointIO(), Ciphered()])
    with pytest.raises(ConfigurationError, match="Received multiple values for ClusterEnvironment"):
        Trainer(plugins=[LightningEnvironment(), LightningEnvironment()])
    with pytest.raises(ConfigurationError, match="through both strategy class and plugins"):
        Trainer(plugins=[Ciphered()], strategy=SingleDeviceStrategy(checkpoint_io=Ciphered()))
    with pytest.raises(ConfigurationError, match="writes no checkpoints"):
        DDPStrategy(checkpoint_io="a path")


# in the background


class Held(Ciphered):
    """Waits with each file until it may write."""

    def __init__(self) -> None:
        super().__init__()
        self.may_write = threading.Event()

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        assert self.may_write.wait(60)
        super().save_checkpoint(checkpoint, path, storage_options)


def test_training_continues_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    plugin, weights = Held(), []

    class Watches(BoringModel):
        def on_train_epoch_start(self) -> None:
            weights.append(self.layer.weight.detach().clone())
            if self.current_epoch == 2:
                assert not plugin.calls  # two were asked for
                plugin.may_write.set()

    saving = ModelCheckpoint(tmp_path, save_top_k=1)
    trainer = trainer_with(tmp_path, saving, plugins=[AsyncCheckpointIO(plugin)], max_epochs=3)
    trainer.fit(Watches())
    assert [call for call, _ in plugin.calls] == ["save", "save", "remove", "save", "remove", "teardown"]
    assert os.listdir(tmp_path) == ["epoch=2-step=6.ckpt"]
    found = plugin.load_checkpoint(saving.best_model_path)
    assert torch.equal(found["state_dict"]["layer.weight"], trainer.lightning_module.layer.weight)
    trainer.test(BoringModel(), ckpt_path=saving.best_model_path)


def test_what_is_written_later_is_as_it_was_saved() -> None:
    plugin = Held()
    kept: list[dict[str, Any]] = []
    plugin.save_checkpoint = lambda checkpoint, path: plugin.may_write.wait(60) and kept.append(checkpoint)  # type: ignore
    background = AsyncCheckpointIO(plugin)
    weight = torch.zeros(2)
    background.save_checkpoint({"a": weight, "tied": weight.view(2), "n": [weight[1:]]}, "anywhere")
    weight.add_(1)
    plugin.may_write.set()
    background.teardown()
    [found] = kept
    assert found["a"].tolist() == [0, 0]
    assert found["tied"] is found["a"]
    assert found["n"][0].tolist() == [0]


def test_an_error_in_the_background_ends_the_run_and_removes_nothing(tmp_path: Path) -> None:
    class Full(Ciphered):
        def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
            if self.calls:
                raise OSError("No space left on device")
            super().save_checkpoint(checkpoint, path, storage_options)

    plugin = Full()
    trainer = trainer_with(tmp_path, ModelCheckpoint(tmp_path), plugins=[AsyncCheckpointIO(plugin)])
    with pytest.raises(OSError, match="No space left"):
        trainer.fit(BoringModel())
    assert os.listdir(tmp_path) == ["epoch=0-step=2.ckpt"]
    assert [call for call, _ in plugin.calls] == ["save", "teardown"]


# on several processes


def calls_of_each_process(root: str, strategy: str) -> tuple[list[tuple[str, str]], Any, int]:
    plugin = Ciphered()
    trainer = trainer_with(root, ModelCheckpoint(Path(root) / "kept"), plugins=[plugin], strategy=strategy, devices=2)
    trainer.fit(BoringModel())
    path = trainer.checkpoint_callback.best_model_path
    again = trainer_with(root, plugins=[plugin], strategy=strategy, devices=2, enable_checkpointing=False, max_epochs=3)
    again.fit(BoringModel(), ckpt_path=path)
    found = again.accelerator.get_state_dict(again.model)
    return plugin.calls, found and found["layer.weight"][0].tolist(), again.global_step


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.sharded)])
def test_the_main_process_writes_and_all_read(strategy: str, tmp_path: Path) -> None:
    main, other = run_in_processes(calls_of_each_process, 2, args=[str(tmp_path), strategy], timeout=120)
    assert [call for call, _ in main[0]] == ["save", "save", "remove", "teardown", "load", "teardown"]
    assert [call for call, _ in other[0]] == ["teardown", "load", "teardown"]
    assert len(main[1]) == 32
    assert main[2] == other[2] == 6
