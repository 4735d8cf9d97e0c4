"""The Trainer as scripts written for Lightning make and read it."""

from __future__ import annotations

import logging
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.spawn import ProcessRaisedException
from torch.utils.data import DataLoader, SequentialSampler

from drivetrain import ConfigurationError as MisconfigurationException
from drivetrain.compat.lightning.fabric.utilities.warnings import PossibleUserWarning
from drivetrain.compat.lightning.pytorch import LightningDataModule, Trainer
from drivetrain.compat.lightning.pytorch.accelerators import CPUAccelerator, CUDAAccelerator
from drivetrain.compat.lightning.pytorch.callbacks import Callback, ModelCheckpoint
from drivetrain.compat.lightning.pytorch.demos.boring_classes import (
    BoringDataModule,
    BoringModel,
    IterableBoringDataModule,
    ManualOptimBoringModel,
    RandomDataset,
    RandomIterableDataset,
)
from drivetrain.compat.lightning.pytorch.loggers.logger import DummyLogger, Logger
from drivetrain.compat.lightning.pytorch.plugins import DoublePrecision, MixedPrecision
from drivetrain.compat.lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from drivetrain.compat.lightning.pytorch.trainer.states import RunningStage, TrainerFn, TrainerStatus
from drivetrain.compat.lightning.pytorch.utilities import CombinedLoader


def quiet(**options: Any) -> Any:
    settings = {"max_epochs": 1, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    limits = {"limit_train_batches": 2, "limit_val_batches": 1, "limit_test_batches": 1, "limit_predict_batches": 1}
    return Trainer(**{"accelerator": "cpu", "enable_model_summary": False, **settings, **limits, **options})


class Logs(BoringModel):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("train", float(batch_idx), on_step=True, on_epoch=True, prog_bar=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val", 3, on_step=True, on_epoch=True)

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("test", 3, on_step=True, on_epoch=True)


class Keeps(Logger):
    name = version = "kept"

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.calls.append((dict(metrics), step))

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        pass


# of what


def test_a_list_is_several_loaders_whatever_it_holds() -> None:
    class Sees(BoringModel):
        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            return batch, batch_idx, dataloader_idx

    trainer = quiet(limit_predict_batches=2)
    expected = [[(0, 0, 0), (1, 1, 0)], [(2, 0, 1), (3, 1, 1)]]
    for loaders in ([[0, 1], [2, 3]], {"a": [0, 1], "b": range(2, 9)}):
        assert trainer.predict(Sees(), loaders) == expected
    assert trainer.predict(Sees(), [0, 1]) == [(0, 0, 0), (1, 1, 0)]


def test_a_combined_loader_gives_scripts_numbers_and_has_the_samplers_of_its_loaders() -> None:
    loaders = {"a": [0, 1, 2], "b": DataLoader(torch.arange(2))}  # type: ignore[arg-type]
    combined = CombinedLoader(loaders, "max_size")
    assert [numbers for _, *numbers in combined] == [[0, 0], [1, 0], [2, 0]]
    sequential = iter(CombinedLoader(loaders, "sequential"))
    assert [numbers for _, *numbers in sequential] == [[0, 0], [1, 0], [2, 0], [0, 1], [1, 1]]
    assert isinstance(combined.sampler["b"], SequentialSampler)
    assert combined.batch_sampler["a"] is None
    combined.flattened = [[5], [6]]
    assert (combined.iterables, list(pickle.loads(pickle.dumps(combined)))) == (
        {"a": [5], "b": [6]},
        [({"a": 5, "b": 6}, 0, 0)],
    )
    with pytest.raises(ValueError, match=r"Mismatch in flattened length \(1\) and existing length \(2\)"):
        combined.flattened = [[5]]
    combined.reset()
    with pytest.raises(RuntimeError, match="iter"):
        next(combined)


# how long


def test_the_limits_of_the_loop_are_those_of_the_trainer() -> None:
    trainer = quiet()
    assert not trainer.fit_loop.done
    trainer.fit(BoringModel())
    assert trainer.fit_loop.done
    trainer.fit_loop.max_epochs = 2
    trainer.fit(BoringModel())
    assert (trainer.current_epoch, trainer.global_step, trainer.max_epochs) == (2, 4, 2)


def test_the_counters_of_the_loop_follow_the_run() -> None:
    seen: list[Any] = []

    class Reads(Callback):
        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            loop = trainer.fit_loop
            seen.append((loop.batch_idx, loop.total_batch_idx, loop.epoch_progress.current.ready))

    trainer = quiet(max_epochs=2, callbacks=Reads())
    trainer.fit(BoringModel())
    assert seen == [(0, 0, 1), (1, 1, 1), (0, 2, 2), (1, 3, 2)]
    assert trainer.fit_loop.epoch_progress.current.completed == 2
    assert (trainer.fit_loop.batch_idx, trainer.fit_loop.total_batch_idx, trainer.is_last_batch) == (1, 3, True)
    assert trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer_steps == 4
    assert trainer.fit_loop.epoch_loop.val_loop.batch_progress.total.completed == 1


def test_the_total_of_validated_batches_is_that_of_the_epoch() -> None:
    totals: list[int] = []

    class Reads(BoringModel):
        def on_train_epoch_end(self) -> None:
            totals.append(self.trainer.fit_loop.epoch_loop.val_loop.batch_progress.total.completed)

    quiet(max_epochs=3, limit_train_batches=4, limit_val_batches=3, val_check_interval=2).fit(Reads())
    assert totals == [6, 6, 6]


def test_an_epoch_that_max_steps_cuts_short_counts() -> None:
    trainer = quiet(max_epochs=-1, max_steps=3)
    trainer.fit(BoringModel())
    assert (trainer.current_epoch, trainer.global_step) == (2, 3)


def test_epochs_are_open_until_fit_and_a_warning_names_the_usual_number() -> None:
    class Stops(BoringModel):
        def on_train_batch_end(self, *args: Any) -> None:
            self.trainer.should_stop = True

    trainer = quiet(max_epochs=None)
    assert trainer.max_epochs is None
    with pytest.warns(PossibleUserWarning, match="`max_epochs` was not set. Setting it to 1000"):
        trainer.fit(Stops())
    assert trainer.max_epochs == 1000


def test_options_that_are_left_open_read_as_numbers() -> None:
    trainer = Trainer(logger=False, num_sanity_val_steps=-1)
    assert (trainer.limit_val_batches, trainer.val_check_interval, trainer.num_sanity_val_steps) == (1, 1, float("inf"))


# arguments


def test_variables_stand_for_arguments_that_are_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_TRAINER_MAX_STEPS", "7")
    monkeypatch.setenv("PL_TRAINER_LOGGER", "False")
    assert (Trainer().max_steps, Trainer().logger, Trainer(max_steps=3).max_steps) == (7, None, 3)


def test_a_barebones_run_keeps_no_values() -> None:
    trainer = Trainer(barebones=True, accelerator="cpu", max_epochs=1)
    with pytest.warns(UserWarning, match=r"'train', but `Trainer\(barebones=True\)` is configured"):
        trainer.fit(Logs())
    assert not trainer.callback_metrics


@pytest.mark.parametrize("name", ["logger", "enable_checkpointing", "enable_progress_bar", "detect_anomaly"])
def test_a_barebones_run_refuses_what_stands_around_the_loop(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name}=True\)` was passed"):
        Trainer(barebones=True, **{name: True})


@pytest.mark.parametrize(("value", "words"), [(1, "1 batch"), (1.0, "100% of the batches")])
def test_one_and_all_are_told_apart_in_a_line(value: float, words: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        Trainer(limit_val_batches=value)
    assert f"`Trainer(limit_val_batches={value})` was configured so {words}" in caplog.text


def test_a_trainer_is_pickled_as_what_it_was_made_with() -> None:
    copy = pickle.loads(pickle.dumps(quiet(max_epochs=3)))
    assert (copy.max_epochs, copy.limit_train_batches, copy.global_step) == (3, 2, 0)


def test_what_names_make_is_an_instance_of_lightnings_classes() -> None:
    trainer = quiet()
    assert isinstance(trainer.strategy, SingleDeviceStrategy)
    assert not isinstance(trainer.strategy, DDPStrategy)
    assert isinstance(trainer.accelerator, CPUAccelerator)
    assert not isinstance(trainer.accelerator, CUDAAccelerator)


@pytest.mark.parametrize(("given", "kind"), [("bf16-mixed", MixedPrecision), ("64-true", DoublePrecision)])
def test_the_number_format_has_lightnings_name(given: str, kind: type) -> None:
    trainer = quiet(precision=given, strategy="single_device")
    assert (trainer.precision, trainer.precision_plugin.precision) == (given, given)
    assert isinstance(trainer.precision_plugin, kind)
    assert quiet().precision == "32-true"


# the verbs


@pytest.mark.parametrize("verb", ["fit", "validate", "test", "predict"])
def test_what_is_no_module_is_a_type_error(verb: str) -> None:
    with pytest.raises(TypeError, match=r"must be a `LightningModule`.*got `Linear`"):
        getattr(quiet(), verb)(torch.nn.Linear(1, 1))


def test_a_verb_without_any_module_is_a_type_error() -> None:
    with pytest.raises(TypeError, match=r"test\(\)` requires a `LightningModule`"):
        quiet().test()


def test_ctrl_c_leaves_the_script_with_a_status() -> None:
    class Interrupts(BoringModel):
        def on_train_batch_start(self, *args: Any) -> None:
            raise KeyboardInterrupt

    trainer = quiet()
    with pytest.raises(SystemExit) as left:
        trainer.fit(Interrupts())
    assert (left.value.code, trainer.interrupted, trainer.state.status) == (1, True, TrainerStatus.INTERRUPTED)


@pytest.mark.parametrize("verb", ["fit", "validate"])
@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_a_strategy_receives_the_exception_that_ends_a_run(verb: str, kind: type[BaseException]) -> None:
    received: list[BaseException] = []

    class Receives(SingleDeviceStrategy):
        def on_exception(self, exception: BaseException) -> None:
            received.append(exception)

    class Raises(BoringModel):
        def setup(self, stage: str) -> None:
            raise kind("in setup")

    with pytest.raises(SystemExit if kind is KeyboardInterrupt else kind):
        getattr(quiet(strategy=Receives()), verb)(Raises())
    assert [type(each) for each in received] == [kind]


@pytest.mark.parametrize("manual", [False, True])
@pytest.mark.parametrize("owner", ["trainer", "strategy"])
def test_optimizers_can_be_replaced_at_the_start_of_an_epoch(owner: str, manual: bool) -> None:
    class Steps(BoringModel):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = not manual

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.layer(batch).square().sum()
            if manual:
                optimizer: Any = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([self.layer.weight], lr=0.001)

    class Switches(Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch == 1:
                new = [torch.optim.Adam(pl_module.parameters(), lr=0.01)]
                owns = trainer if owner == "trainer" else trainer.strategy
                owns.optimizers = new

    torch.manual_seed(0)
    model = Steps()
    plain = torch.nn.Linear(32, 2)
    plain.load_state_dict(model.layer.state_dict())
    data = DataLoader(torch.rand(4, 32), batch_size=2)
    trainer = quiet(max_epochs=2, callbacks=[Switches()])
    trainer.fit(model, data)
    for optimizer in (torch.optim.SGD([plain.weight], lr=0.001), torch.optim.Adam(plain.parameters(), lr=0.01)):
        for batch in data:
            plain.zero_grad()
            plain(batch).square().sum().backward()
            optimizer.step()
    assert [type(each) for each in trainer.optimizers] == [torch.optim.Adam]
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(model.layer.state_dict()[name], value, rtol=0, atol=0)


def test_optimizers_cannot_be_replaced_outside_of_fit_or_by_one_that_needs_a_closure() -> None:
    class Switches(Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            trainer.optimizers = [torch.optim.LBFGS(pl_module.parameters())]

    trainer = quiet(callbacks=[Switches()])
    with pytest.raises(MisconfigurationException, match="can be replaced during fit"):
        trainer.optimizers = []
    with pytest.raises(MisconfigurationException, match="L-BFGS, cannot replace"):
        trainer.fit(BoringModel())


def test_setup_sees_the_verb_and_what_will_run() -> None:
    seen: list[Any] = []

    class Reads(BoringModel):
        def setup(self, stage: Any) -> None:
            seen.append((stage, stage.value, self.trainer.state.status, self.trainer.state.stage))

    trainer = quiet()
    trainer.validate(Reads(), verbose=False)
    assert seen == [(TrainerFn.VALIDATING, "validate", TrainerStatus.RUNNING, RunningStage.VALIDATING)]
    assert trainer.state.finished


def test_last_finds_what_another_trainer_has_saved_and_else_warns(tmp_path: Path) -> None:
    options: dict[str, Any] = {"default_root_dir": tmp_path, "enable_checkpointing": True}
    with pytest.warns(UserWarning, match="No checkpoint will be loaded"):
        quiet(**options, callbacks=ModelCheckpoint(save_last=True)).fit(BoringModel(), ckpt_path="last")
    trainer = quiet(**{**options, "max_epochs": 2})
    trainer.fit(BoringModel(), ckpt_path="last")
    assert trainer.ckpt_path == str(tmp_path / "checkpoints" / "last.ckpt")
    assert trainer.global_step == 4


def test_a_checkpoint_that_is_not_there_is_not_found() -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere\.ckpt"):
        quiet().validate(BoringModel(), ckpt_path="nowhere.ckpt")


def test_nothing_can_be_saved_before_a_verb() -> None:
    with pytest.raises(AttributeError, match="a model is attached"):
        quiet().save_checkpoint("anywhere.ckpt")


def test_predictions_are_returned_unless_refused() -> None:
    assert len(quiet().predict(BoringModel(), return_predictions=None)) == 1
    assert quiet().predict(BoringModel(), return_predictions=False) is None


# values


def test_a_value_by_step_and_epoch_is_the_newest_steps_until_its_epoch_ends() -> None:
    class Reads(Callback):
        def __init__(self) -> None:
            self.seen: list[float] = []

        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            self.seen.append(float(trainer.callback_metrics["loss"]))

        def on_train_end(self, trainer: Any, module: Any) -> None:
            self.seen.append(float(trainer.callback_metrics["loss"]))

    class Counts(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("loss", float(batch_idx), on_step=True, on_epoch=True)
            return super().training_step(batch, batch_idx)

    reads = Reads()
    quiet(max_epochs=2, limit_train_batches=3, callbacks=[reads]).fit(Counts())
    assert reads.seen == [0, 1, 2, 0, 1, 2, 1]


def test_one_name_may_be_logged_by_steps_and_at_the_end_of_the_epoch() -> None:
    class Twice(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("loss", float(batch_idx))
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", 1.0)

        def on_validation_epoch_end(self) -> None:
            self.log("val", 2.0, prog_bar=True)

        def on_train_epoch_end(self) -> None:
            self.log("loss", 7.0)

    logger = Keeps()
    trainer = quiet(logger=logger, log_every_n_steps=1, max_epochs=2)
    trainer.fit(Twice())
    lines = [(values["loss"], step) for values, step in logger.calls if "loss" in values]
    assert lines == [(0, 0), (1, 1), (7, 1), (0, 2), (1, 3), (7, 3)]
    assert (trainer.callback_metrics["val"], trainer.progress_bar_metrics["val"]) == (2, 2)


def test_metrics_are_tensors_for_loggers_and_numbers_for_the_bar() -> None:
    trainer = quiet(logger=Keeps(), log_every_n_steps=1)
    trainer.fit(Logs())
    assert set(trainer.logged_metrics) == {"train_step", "train_epoch", "val_step", "val_epoch"}
    assert set(trainer.callback_metrics) == {"train", "train_step", "train_epoch", "val", "val_epoch"}
    assert trainer.progress_bar_metrics == {"train_step": 1.0, "train_epoch": 0.5}
    assert {value.dtype for value in trainer.logged_metrics.values()} == {torch.float32}


def test_what_is_written_into_callback_metrics_stays() -> None:
    trainer = quiet()
    trainer.callback_metrics["mine"] = 2.0
    assert trainer.callback_metrics["mine"] == 2.0


def test_the_values_of_an_epoch_are_there_in_the_hooks_of_its_end() -> None:
    class Reads(Logs):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[tuple[str, Any, Any]] = []

        def _note(self, name: str) -> None:
            found = (self.trainer.callback_metrics.get(name), self.trainer.logged_metrics.get(name))
            self.seen.append((name, *found))

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("checked", float(batch_idx + 2))

        def on_validation_epoch_start(self) -> None:
            self._note("checked")

        def on_validation_epoch_end(self) -> None:
            self._note("checked")

        def on_train_epoch_end(self) -> None:
            self._note("train_epoch")

    task = Reads()
    quiet(logger=Keeps(), log_every_n_steps=1, num_sanity_val_steps=0, limit_val_batches=3).fit(task)
    assert task.seen == [("checked", None, None), ("checked", 3.0, 3.0), ("train_epoch", 0.5, 0.5)]


def test_loggers_get_keywords_and_count_steps_from_zero() -> None:
    logger = Keeps()
    quiet(logger=logger, log_every_n_steps=1).fit(Logs())
    assert ({"epoch": 0, "train_step": 1.0}, 1) in logger.calls
    assert ({"val_step": 3.0}, 0) in logger.calls
    assert ({"epoch": 0, "train_epoch": 0.5}, 1) in logger.calls


def test_results_of_a_test_are_named_as_loggers_name_them() -> None:
    assert quiet().test(Logs(), verbose=False) == [{"test_epoch": 3.0}]


def test_loggers_can_be_set_and_a_trial_run_has_one_that_does_nothing() -> None:
    trainer = quiet(fast_dev_run=True, logger=True)
    assert isinstance(trainer.logger, DummyLogger)
    trainer.logger = kept = Keeps()
    assert trainer.loggers == [kept]
    trainer.loggers = None
    assert trainer.logger is None


def test_warnings_come_by_the_module_that_scripts_filter() -> None:
    class Unvalidated(BoringModel):
        validation_step = None

    with pytest.warns(PossibleUserWarning, match="have no `validation_step`"):
        quiet().fit(Unvalidated())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".*have no `validation_step`.*|.*does not have many workers.*")
        quiet().fit(Unvalidated())


def test_the_trainers_model_is_in_the_mode_of_what_runs() -> None:
    class Looks(BoringModel):
        def on_train_batch_start(self, *args: Any) -> None:
            modes.append(self.trainer.model.training)  # type: ignore[union-attr]

        def on_validation_start(self) -> None:
            modes.append(self.trainer.model.training)  # type: ignore[union-attr]

    modes: list[bool] = []
    quiet(num_sanity_val_steps=1, limit_train_batches=1).fit(Looks())
    assert modes == [False, True, False]


def test_the_parameters_of_other_optimizers_and_frozen_ones_take_no_gradients_while_one_is_toggled() -> None:
    class Two(ManualOptimBoringModel):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
            self.first.bias.requires_grad_(False)

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(each.parameters(), lr=0.1) for each in (self.first, self.second)]

        def training_step(self, batch: Any, batch_idx: int) -> None:
            with self.toggled_optimizer(self.optimizers()[0]):
                seen.append([each.requires_grad for each in self.parameters()])
            seen.append([each.requires_grad for each in self.parameters()])

    seen: list[Any] = []
    quiet(limit_train_batches=1, limit_val_batches=0).fit(Two())
    assert seen == [[True, True, True, False, False, False], [True, True, True, False, True, True]]


def test_a_module_that_clips_in_another_way_than_its_trainer_is_refused() -> None:
    class Clips(BoringModel):
        def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
            self.clip_gradients(optimizer, gradient_clip_val=0.5)

    quiet().fit(Clips())
    with pytest.raises(MisconfigurationException, match=r"gradient_clip_val=9\.0\)` and have passed `clip_gradients"):
        quiet(gradient_clip_val=9.0).fit(Clips())


# the data


def test_a_data_module_shows_what_it_has() -> None:
    data = BoringDataModule()
    data.setup("fit")
    assert str(data).splitlines()[:3] == [
        "{Train dataloader: size=64}",
        "{Validation dataloader: size=64}",
        "{Test dataloader: None}",
    ]
    several = IterableBoringDataModule()
    several.setup("test")
    assert "{Test dataloader: 1. size=48 ; 2. size=NA}" in str(several)


def test_a_data_module_of_datasets_hands_its_sizes_to_a_constructor_that_takes_them() -> None:
    class Takes(LightningDataModule):
        def __init__(self, batch_size: int, other: int = 0) -> None:
            super().__init__()
            self.batch_size, self.other = batch_size, other

    data = Takes.from_datasets(RandomDataset(2, 8), RandomIterableDataset(2, 8), batch_size=4, other=5)
    assert (data.batch_size, data.other, len(data.train_dataloader())) == (4, 5, 2)
    with pytest.raises(MisconfigurationException, match="`test_dataloader` must be implemented"):
        data.test_dataloader()


# processes of its own


class CountsRanks(BoringModel):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("rank", float(self.global_rank), on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)


@pytest.mark.slow
def test_spawned_processes_train_and_their_outcome_comes_back(tmp_path: Path) -> None:
    task, saved = CountsRanks(), ModelCheckpoint(tmp_path)
    before = task.layer.weight.detach().clone()
    trainer = quiet(strategy="ddp_spawn", devices=2, callbacks=saved, enable_checkpointing=True)
    assert (trainer.world_size, trainer.num_devices) == (2, 2)
    trainer.fit(task)
    assert not torch.equal(task.layer.weight, before)
    assert trainer.callback_metrics["rank"] == 0.5
    assert (trainer.current_epoch, trainer.global_step, trainer.state.finished) == (1, 2, True)
    assert Path(saved.best_model_path).exists()
    with pytest.raises(ProcessRaisedException, match="`return_predictions` should be set to `False`"):
        trainer.predict(task, return_predictions=True)


def test_an_optimizer_step_that_is_never_called_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    class Steps(ManualOptimBoringModel):
        def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            raise AssertionError

    with caplog.at_level(logging.WARNING):
        quiet().fit(Steps())
    assert "it is never called" in caplog.text
