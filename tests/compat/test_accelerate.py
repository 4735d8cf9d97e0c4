"""Private members that programs written for Accelerate read and assign: on the mirror they do what they do there."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import ConfigurationError
from drivetrain.compat.accelerate import Accelerator, skip_first_batches
from drivetrain.compat.accelerate.optimizer import AcceleratedOptimizer
from drivetrain.compat.accelerate.scheduler import AcceleratedScheduler
from drivetrain.compat.accelerate.tracking import GeneralTracker, TensorBoardTracker, register_tracker_class
from drivetrain.compat.accelerate.utils import (
    AutocastKwargs,
    DeepSpeedPlugin,
    DistributedDataParallelKwargs,
    FP8RecipeKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    KwargsHandler,
)
from drivetrain.trackers import CSVLogger, TensorBoardLogger
from tests.pool import run_in_processes


def prepared(accelerator: Accelerator, rows: int = 6) -> tuple[Any, ...]:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    loader = DataLoader(TensorDataset(torch.arange(2.0 * rows).view(rows, 2)), batch_size=1)
    return accelerator.prepare(model, optimizer, scheduler, loader)


def train(accelerator: Accelerator, parts: tuple[Any, ...]) -> list[tuple[int, bool]]:
    """Return the step counter and whether a window ended, for each micro-batch of an epoch."""
    model, optimizer, scheduler, loader = parts
    seen = []
    for (inputs,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(inputs).square().mean() * 1e-3)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        seen.append((accelerator.step, accelerator.sync_gradients))
    return seen


def test_prepared_objects_are_marked_and_name_their_accelerator():
    accelerator = Accelerator(cpu=True)
    model, optimizer, scheduler, loader = prepared(accelerator)
    assert all(each._is_accelerate_prepared for each in (model, optimizer, scheduler, loader))
    assert optimizer.accelerator_state is accelerator.state
    assert all(each.gradient_state is accelerator.gradient_state for each in (optimizer, scheduler, loader))
    assert (optimizer.scaler, optimizer.device_placement, scheduler.step_with_optimizer) == (None, True, True)
    assert accelerator.prepare(loader) is loader


def test_a_loader_shows_its_device_and_its_epoch():
    accelerator = Accelerator(cpu=True)
    loader = prepared(accelerator)[3]
    assert (loader.device, loader.iteration, loader.skip_batches) == (torch.device("cpu"), 0, 0)
    list(loader)
    assert loader.iteration == 1
    loader.iteration = 5
    assert (loader.iteration, loader.epoch) == (5, 5)
    rest = skip_first_batches(loader, 2)
    rest.iteration = 7
    assert (len(list(rest)), loader.epoch) == (4, 7)
    assert accelerator.prepare(DataLoader([1.0]), device_placement=[False]).device is None


def test_a_loader_that_a_script_has_marked_is_left_alone():
    accelerator, own = Accelerator(cpu=True), DataLoader([1, 2, 3])
    own._is_accelerate_prepared = True  # type: ignore[attr-defined]
    assert accelerator.prepare_data_loader(own) is own
    model, loader = accelerator.prepare(nn.Linear(1, 1), own)
    assert loader is own
    assert model._is_accelerate_prepared


def test_the_step_counts_micro_batches_and_moves_the_window():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    parts = prepared(accelerator)
    counted = [(1, False), (2, False), (3, False), (4, True), (5, False), (0, True)]
    assert [train(accelerator, parts), train(accelerator, parts)] == [counted, counted]
    accelerator.step = 2
    assert train(accelerator, parts)[:3] == [(3, False), (4, True), (5, False)]


@pytest.mark.parametrize(
    ("written", "ends"),
    [
        ({"num_steps": 2}, [False, True, False, True, False, True]),
        ({"sync_with_dataloader": False}, [False, False, False, True, False, False]),
    ],
)
def test_what_is_written_into_the_plugins_arguments_holds(written, ends):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    accelerator.gradient_state.plugin_kwargs.update(written)
    assert [end for _, end in train(accelerator, prepared(accelerator))] == ends


def test_an_optimizer_and_a_scheduler_made_by_hand_follow_the_windows():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, bare, _, loader = prepared(accelerator, rows=4)
    optimizer = AcceleratedOptimizer(bare.optimizer)
    scheduler = AcceleratedScheduler(torch.optim.lr_scheduler.StepLR(bare.optimizer, 1), optimizer)
    steps, before = [], model.weight.detach().clone()
    for (inputs,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(inputs).square().mean() * 1e-3)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        steps.append((torch.equal(before, model.weight), scheduler.last_epoch))
    assert steps == [(True, 0), (False, 1), (False, 1), (False, 2)]


def test_a_scheduler_can_be_told_to_step_once():
    assert run_in_processes(rates_with_split_batches, 2) == [[0.1 / 3, 0.1 / 4]] * 2


def rates_with_split_batches() -> list[float]:
    accelerator = Accelerator(cpu=True)
    _, optimizer, scheduler, _ = prepared(accelerator)
    rates = []
    for once in (False, True):
        scheduler.split_batches = once
        optimizer.step()
        scheduler.step()
        rates.append(scheduler.get_last_lr()[0])
    return rates


def test_a_scaler_of_none_scales_no_more_and_another_one_takes_its_place():
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    given = accelerator.scaler
    accelerator.scaler = None
    model, optimizer, _, _ = prepared(accelerator)
    accelerator.backward(model(torch.ones(1, 2)).sum() / 4)
    assert (accelerator.scaler, optimizer.scaler) == (None, None)
    assert model.weight.grad.tolist() == [[0.25, 0.25]]
    optimizer.zero_grad()
    accelerator.scaler = given
    accelerator.backward(model(torch.ones(1, 2)).sum() / 4)
    assert (optimizer.scaler, float(model.weight.grad[0, 0])) == (given, 16384.0)
    with pytest.raises(ConfigurationError, match=r"accelerator\.scaler"):
        optimizer.scaler = torch.amp.GradScaler("cpu")
    full = Accelerator(cpu=True)
    full.scaler = torch.amp.GradScaler("cpu", enabled=False)
    with pytest.raises(ConfigurationError, match="fp16"):
        full.scaler = torch.amp.GradScaler("cpu")


@pytest.mark.parametrize(("amp", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_native_amp_can_be_switched_off_before_prepare(amp, dtype):
    accelerator, found = Accelerator(cpu=True, mixed_precision="bf16"), []
    accelerator.native_amp = amp
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[0].register_forward_hook(lambda module, inputs, output: found.append(output.dtype))
    accelerator.prepare(model)(torch.ones(1, 2))
    with accelerator.autocast():
        found.append((torch.ones(1, 1) @ torch.ones(1, 1)).dtype)
    assert (accelerator.native_amp, found) == (amp, [dtype, dtype])


def test_an_overflow_can_be_marked_by_hand():
    accelerator = Accelerator(cpu=True)
    _, optimizer, scheduler, _ = prepared(accelerator)
    optimizer._is_overflow = True
    scheduler.step()
    assert (accelerator.optimizer_step_was_skipped, scheduler.get_last_lr()) == (True, [0.1])


def test_option_holders_show_what_differs_from_their_defaults():
    holders = (AutocastKwargs(enabled=False), DistributedDataParallelKwargs(static_graph=True), GradScalerKwargs())
    assert all(isinstance(each, KwargsHandler) for each in holders)
    assert [each.to_kwargs() for each in holders] == [{"enabled": False}, {"static_graph": True}, {}]
    assert GradientAccumulationPlugin(num_steps=3).to_dict()["num_steps"] == 3
    accelerator = Accelerator(cpu=True, kwargs_handlers=[holders[0]])
    assert (accelerator.autocast_handler, accelerator.fp8_recipe_handler) == (holders[0], None)
    assert (accelerator.has_fp8_handler, accelerator.torch_device_mesh) == (False, None)
    assert isinstance(copy.copy(FP8RecipeKwargs()), KwargsHandler)


def test_one_value_of_a_deepspeed_configuration_is_filled_in():
    plugin, mismatches = DeepSpeedPlugin(zero_stage=2, gradient_clipping=1.0), []
    plugin.fill_match("train_batch_size", train_batch_size=8)
    plugin.fill_match("gradient_clipping", mismatches, gradient_clipping=0.5)
    assert (plugin.deepspeed_config["train_batch_size"], len(mismatches)) == (8, 1)
    with pytest.raises(ValueError, match="train_micro_batch_size_per_gpu"):
        plugin.fill_match("train_micro_batch_size_per_gpu")


class Kept(GeneralTracker):
    name = "kept"
    requires_logging_directory = True
    made = 0

    def __init__(self, run_name: str, logging_dir: str, **options: Any) -> None:
        super().__init__()
        type(self).made += 1
        self.given, self.values = (run_name, logging_dir, options), []

    @property
    def tracker(self) -> list[Any]:
        return self.values

    def log(self, values: Any, step: int | None = None, **options: Any) -> None:
        self.values.append((step, values))


def test_a_registered_tracker_is_made_once_and_has_its_values_at_once(tmp_path: Path):
    register_tracker_class(Kept)
    with pytest.raises(ValueError, match="project_dir"):
        Accelerator(cpu=True, log_with="kept")
    accelerator = Accelerator(cpu=True, log_with="kept", project_dir=tmp_path)
    accelerator.init_trackers("run", init_kwargs={"kept": {"z": 1}})
    accelerator.log({"loss": 0.5}, step=3)
    tracker = accelerator.get_tracker("kept")
    assert (tracker.given, tracker.tracker) == (("run", str(tmp_path), {"z": 1}), [(3, {"loss": 0.5})])
    assert Kept.made == 1
    accelerator.end_training()


def test_trackers_can_be_assigned(tmp_path: Path):
    accelerator = Accelerator(cpu=True)
    accelerator.trackers = [CSVLogger(tmp_path, name="", version="run")]
    accelerator.log({"loss": 0.5}, step=1)
    accelerator.end_training()
    assert "0.5" in (tmp_path / "run" / "metrics.csv").read_text()


def test_tensorboards_tracker_takes_the_name_of_the_run_first(tmp_path: Path):
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    tracker = TensorBoardTracker("run", tmp_path, flush_secs=1)
    tracker.log({"loss": 0.5}, step=1)
    tracker.finish()
    assert [path.parent for path in tmp_path.rglob("*tfevents*")] == [tmp_path / "run"]
    assert isinstance(TensorBoardLogger(tmp_path), TensorBoardTracker)
