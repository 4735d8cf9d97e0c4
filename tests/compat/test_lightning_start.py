"""What a Trainer of Lightning's scripts has and refuses before a run, and which checkpoint and end its verbs have."""

from __future__ import annotations

import multiprocessing
import os
import signal
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from drivetrain import ConfigurationError as MisconfigurationException
from drivetrain.callbacks import RichModelSummary
from drivetrain.callbacks.base import Stage
from drivetrain.compat.lightning.fabric.utilities import data, registry
from drivetrain.compat.lightning.fabric.utilities.warnings import PossibleUserWarning
from drivetrain.compat.lightning.pytorch import Trainer
from drivetrain.compat.lightning.pytorch.callbacks import Callback, ModelSummary, RichProgressBar, TQDMProgressBar
from drivetrain.compat.lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from drivetrain.compat.lightning.pytorch.loggers import CSVLogger
from drivetrain.compat.lightning.pytorch.loggers.logger import Logger
from drivetrain.compat.lightning.pytorch.strategies import DDPStrategy
from drivetrain.compat.lightning.pytorch.utilities.rank_zero import rank_zero_only
from drivetrain.compat.lightning.signals import SIGTERMException
from drivetrain.runtime.exit_codes import RESUME_EXIT_CODE
from tests.pool import run_in_processes
from tests.simulated.devices import simulated as simulated
from tests.simulated.devices import start


def quiet(**options: Any) -> Any:
    settings = {"max_steps": 2, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    limits = {"limit_val_batches": 1, "limit_test_batches": 1, "limit_predict_batches": 1}
    return Trainer(**{"accelerator": "cpu", "enable_model_summary": False, **settings, **limits, **options})


# devices and number formats


def numbers_of_devices() -> tuple[list[int], list[str]]:
    start(2)
    trainer = quiet(accelerator="sim", devices="1,")
    return trainer.device_ids, [str(device) for device in trainer.strategy.parallel_devices]


@pytest.mark.usefixtures("simulated")
def test_a_device_that_is_named_is_shown_by_its_number() -> None:
    assert run_in_processes(numbers_of_devices, 1) == [([1], ["sim:1"])]


@pytest.mark.parametrize("devices", [0, "0", []])
def test_a_run_on_no_device_is_refused(devices: Any) -> None:
    with pytest.raises(MisconfigurationException, match=r"value is not a valid input using.*Give a number from 1 on"):
        Trainer(accelerator="cpu", devices=devices)


def test_a_kind_of_device_that_is_unknown_or_not_here_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"invalid accelerator name: `accelerator='invalid'`.*Known: .*cpu"):
        Trainer(accelerator="invalid")
    if not torch.backends.mps.is_available():
        with pytest.raises(MisconfigurationException, match="`MPSAccelerator` can not run on your system"):
            Trainer(accelerator="mps")


def test_a_number_format_that_is_unknown_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"Precision 12 is invalid.*bf16"):
        Trainer(precision=12)


def test_strategies_may_be_spelt_in_capitals() -> None:
    assert isinstance(quiet(strategy="DDP_FIND_UNUSED_PARAMETERS_FALSE").strategy, DDPStrategy)


# callbacks


class Offered(Callback):
    """What a package adds to every Trainer."""


class EntryPoint:
    """An entry point of an installed package."""

    def __init__(self, made: Any) -> None:
        self._made = made

    def load(self) -> Any:
        return lambda: self._made


def test_installed_packages_add_callbacks_by_an_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = Offered(), [Offered(), Offered()]
    points = {"lightning.pytorch.callbacks_factory": [EntryPoint(one), EntryPoint(two)]}
    monkeypatch.setattr(registry, "entry_points", lambda group: points.get(group, []))
    own = Callback()
    assert quiet(callbacks=own).callbacks == [own, one, *two]


@pytest.mark.skipif(find_spec("rich") is None, reason="rich is not installed")
def test_the_bar_and_the_summary_are_richs_where_it_is_installed_unless_others_are_given() -> None:
    kinds = {type(each) for each in Trainer(logger=False).callbacks}
    assert {RichProgressBar, RichModelSummary} <= kinds
    bar, summary = TQDMProgressBar(), ModelSummary()
    given = Trainer(logger=False, enable_checkpointing=False, callbacks=[bar, summary])
    assert given.callbacks == [bar, summary]


# loaders


@pytest.mark.parametrize(("workers", "words"), [(0, "does not have many workers"), (2, None)])
def test_a_loader_of_few_workers_is_warned_of(workers: int, words: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "_num_cpus_available", lambda: 4)
    loader = DataLoader(RandomDataset(32, 2), num_workers=workers)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quiet().adapt_loader(loader, Stage.TRAIN)
    found = [str(each.message) for each in caught]
    assert [words in each and "num_workers=3" in each for each in found] == [True] if words else found == []


def test_workers_that_are_spawned_for_each_epoch_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda allow_none=False: "spawn")
    loader = DataLoader(RandomDataset(32, 2), num_workers=2)
    with pytest.warns(UserWarning, match=r"'val_dataloader'.*Consider setting `persistent_workers=True`"):
        quiet().adapt_loader(loader, Stage.VALIDATE)


def test_a_random_order_of_evaluation_is_warned_of_in_a_run() -> None:
    with pytest.warns(PossibleUserWarning, match=r"'test_dataloader'.*recommended that you turn shuffling off"):
        quiet().test(BoringModel(), DataLoader(RandomDataset(32, 2), shuffle=True), verbose=False)


# the checkpoint, and the end


def test_a_checkpoint_that_is_set_is_taken_by_each_verb_until_another_one_is_passed(tmp_path: Path) -> None:
    trainer, model = quiet(), BoringModel()
    trainer.fit(model)
    first, second = str(tmp_path / "first.ckpt"), str(tmp_path / "second.ckpt")
    trainer.save_checkpoint(first)
    saved = model.layer.weight.detach().clone()
    torch.nn.init.zeros_(model.layer.weight)
    trainer.save_checkpoint(second)
    trainer.ckpt_path = first
    trainer.validate(model, verbose=False)
    assert (trainer.ckpt_path, torch.equal(model.layer.weight, saved)) == (first, True)
    with pytest.warns(UserWarning, match=r"trainer.ckpt_path = .*first.* but then you passed"):
        trainer.test(model, ckpt_path=second, verbose=False)
    assert (trainer.ckpt_path, model.layer.weight.any()) == (second, False)
    trainer.ckpt_path = None
    trainer.test(model, verbose=False)
    assert trainer.ckpt_path is None


def test_a_run_that_a_scheduler_ends_raises_lightnings_exception() -> None:
    class Ends(BoringModel):
        def on_train_batch_end(self, *args: Any) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    trainer = quiet(limit_val_batches=0)
    with pytest.raises(SIGTERMException) as left:
        trainer.fit(Ends())
    assert (left.value.code, trainer.received_sigterm, trainer.global_step) == (RESUME_EXIT_CODE, True, 1)


def test_a_loggers_own_end_gets_a_status_alone(tmp_path: Path) -> None:
    seen: list[str] = []

    class Own(CSVLogger):
        def finalize(self, status: str) -> None:  # type: ignore[override]
            seen.append(status)
            super().finalize(status)

    class Breaks(BoringModel):
        def on_train_start(self) -> None:
            raise ValueError("no")

    quiet(logger=Own(tmp_path)).fit(BoringModel())
    with pytest.raises(ValueError, match="no"):
        quiet(logger=Own(tmp_path)).fit(Breaks())
    assert seen == ["success", "failed"]


class OnEach(Logger):
    """Keeps what it gets, on each process; its end is left to the first."""

    name = version = "each"

    def __init__(self) -> None:
        super().__init__()
        self.got: list[str] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.got += sorted(set(metrics) - {"epoch"})

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None: ...

    @rank_zero_only
    def finalize(self, status: str) -> None:  # type: ignore[override]
        self.got.append(status)


class LogsItsRank(BoringModel):
    def on_train_start(self) -> None:
        self.log(f"rank {self.global_rank}", 1.0)


def logged_on_each() -> list[str]:
    logger = OnEach()
    quiet(logger=logger, strategy="ddp", limit_val_batches=0, max_steps=-1, max_epochs=1, limit_train_batches=1).fit(
        LogsItsRank()
    )
    return logger.got


def test_a_scripts_own_logger_is_called_on_every_process() -> None:
    both = ["rank 0", "rank 1"]
    assert run_in_processes(logged_on_each, 2) == [[*both, "success"], both]
