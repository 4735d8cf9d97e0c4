"""Callbacks that log what a run does and costs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import ConfigurationError, Trainer, measure_flops
from drivetrain.callbacks import DeviceStatsMonitor, GradientNorm, SpeedMonitor, ThroughputMonitor
from drivetrain.callbacks.throughput_monitor import CHIPS, peak_flops
from tests.callbacks.guarded import Regression, rows, train
from tests.pool import run_in_processes
from tests.trackers.test_registry import ListTracker


def logged(root: Any, callback: Any, task: Regression | None = None, **options: Any) -> list[tuple[Any, Any]]:
    """(step, values) of what a callback logs in two epochs of six batches, every second step."""
    tracker = ListTracker()
    settings = {"logger": tracker, "log_every_n_steps": 2, "enable_checkpointing": False, **options}
    train(task or Regression({}), root, [callback], **settings)
    found = [
        (step, {name: value for name, value in row.items() if name != "train_loss" and ("/" in name or "norm" in name)})
        for step, row in tracker.rows
        if step
    ]
    return [(step, row) for step, row in found if row]


class Slow(Regression):
    """Takes a known time for each batch."""

    seconds = 0.02

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        time.sleep(self.seconds)
        return super().training_step(batch, batch_idx)


def test_throughput_is_what_was_done_in_the_time_that_it_took(tmp_path: Path) -> None:
    monitor = ThroughputMonitor(length_fn=lambda batch: batch[0].numel(), available_flops=1e6)
    values = dict(logged(tmp_path, monitor, Slow({})))
    assert sorted(values) == [4, 6, 8, 10, 12]
    last = values[12]
    rate = last["train/device/batches_per_sec"]
    assert 0 < rate < 1 / Slow.seconds
    assert last["train/device/samples_per_sec"] == pytest.approx(4 * rate)
    assert last["train/device/items_per_sec"] == pytest.approx(12 * rate)
    # forward and the weight's gradient: 2 * 4 rows * 3 * 1 each
    assert last["train/device/flops_per_sec"] == pytest.approx(48 * rate)
    assert last["train/device/mfu"] == pytest.approx(48e-6 * rate)
    assert (last["train/batches"], last["train/samples"], last["train/lengths"]) == (12, 48, 144)
    assert last["train/time"] >= 10 * Slow.seconds
    assert "train/samples_per_sec" not in last


def test_a_batch_that_processes_share_counts_once_in_all(tmp_path: Path) -> None:
    monitor = ThroughputMonitor()
    logged(tmp_path, monitor, Slow({}))
    values = monitor.compute(world_size=4, data_shards=2)
    assert values["train/samples_per_sec"] == pytest.approx(2 * values["train/device/samples_per_sec"])
    assert values["train/batches_per_sec"] == pytest.approx(2 * values["train/device/batches_per_sec"])
    assert values["train/flops_per_sec"] == pytest.approx(4 * values["train/device/flops_per_sec"])


def test_a_task_may_know_its_operations(tmp_path: Path) -> None:
    class Known(Regression):
        def flops_per_batch(self) -> int:
            return 1000

    last = dict(logged(tmp_path, ThroughputMonitor(lambda batch: 7), Known({})))[12]
    rate = last["train/device/batches_per_sec"]
    assert last["train/device/flops_per_sec"] == pytest.approx(1000 * rate)
    assert last["train/device/samples_per_sec"] == pytest.approx(7 * rate)


def test_validations_do_not_count(tmp_path: Path) -> None:
    class Validating(Slow):
        def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
            time.sleep(0.8)

    tracker = ListTracker()
    trainer = Trainer(
        max_epochs=2,
        logger=tracker,
        log_every_n_steps=6,
        callbacks=[ThroughputMonitor(), SpeedMonitor()],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(Validating({}), rows(6), rows(1))
    values = {name: value for step, row in tracker.rows if step == 12 for name, value in row.items()}
    assert values["train/time"] < 0.8
    assert values["speed/data_wait"] < 0.5
    assert values["speed/steps_per_sec"] > 7


def test_the_share_of_waiting_for_data_is_measured(tmp_path: Path) -> None:
    class SlowData(TensorDataset):
        def __getitem__(self, index: Any) -> Any:
            time.sleep(0.03)
            return super().__getitem__(index)

    def wait(dataset: Any) -> float:
        tracker = ListTracker()
        trainer = Trainer(
            max_epochs=1,
            logger=tracker,
            log_every_n_steps=4,
            callbacks=[SpeedMonitor()],
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Slow({}), DataLoader(dataset, batch_size=2))
        found = [row for step, row in tracker.rows if step == 4 and "speed/data_wait" in row]
        assert found[0]["speed/samples_per_sec"] == pytest.approx(2 * found[0]["speed/steps_per_sec"])
        return float(found[0]["speed/data_wait"])

    x = torch.randn(16, 3)
    assert 0.5 < wait(SlowData(x, x[:, :1])) < 1.0
    assert wait(TensorDataset(x, x[:, :1])) < 0.5


def test_operations_are_those_of_torchs_counter() -> None:
    with torch.device("meta"):
        model, batch = nn.Linear(32, 2), torch.randn(8, 32)
    assert measure_flops(model, lambda: model(batch)) == 2 * 8 * 32 * 2
    assert measure_flops(model, lambda: model(batch), lambda output: output.sum()) == 2 * 2 * 8 * 32 * 2


def test_chips_are_known_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    assert peak_flops(torch.device("cpu"), "32") is None
    found = {}
    for name in ("NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA L40S", "NVIDIA L4", "Something"):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        found[name] = (peak_flops(torch.device("cuda"), "bf16-mixed"), peak_flops(torch.device("cuda"), "32"))
    assert list(found.values()) == [
        (989e12, 67e12),
        (756e12, 51e12),
        (362e12, 91.6e12),
        (121e12, 30.3e12),
        (None, None),
    ]
    for number, (chip, *_) in enumerate(CHIPS):
        assert not any(earlier in chip for earlier, *_ in CHIPS[:number]), chip


def test_the_norm_of_the_gradients_is_that_before_clipping(tmp_path: Path) -> None:
    norms: list[Tensor] = []

    class Watching(Regression):
        def configure_gradient_clipping(self, optimizer: Any, *given: Any) -> None:
            norms.append(torch.cat([p.grad.reshape(-1) for p in self.parameters() if p.grad is not None]).norm())
            super().configure_gradient_clipping(optimizer, *given)

    values = logged(tmp_path, GradientNorm(by_parameter=True), Watching({}), gradient_clip_val=1e-3)
    assert [step for step, _ in values] == [2, 4, 6, 8, 10, 12]
    for (step, row), norm in zip(values, norms[1::2], strict=True):
        assert row["grad_norm"] == pytest.approx(float(norm)), step
        parts = [row[f"grad_norm/layer.{name}"] for name in ("weight", "bias")]
        assert torch.tensor(parts).norm().item() == pytest.approx(float(norm))


@pytest.mark.cpu("the values of a device come in their place")
def test_the_load_of_the_machine_is_logged_at_both_ends_of_a_batch(tmp_path: Path) -> None:
    values = logged(tmp_path, DeviceStatsMonitor())
    names = {name for _, row in values for name in row}
    parts = ("cpu_percent", "cpu_vm_percent", "cpu_swap_percent")
    hooks = ("on_train_batch_start", "on_train_batch_end")
    assert names == {f"DeviceStatsMonitor.{hook}/{part}" for hook in hooks for part in parts}
    assert {step for step, _ in values} == {2, 4, 6, 8, 10, 12}
    assert not logged(tmp_path, DeviceStatsMonitor(cpu_stats=False))


@pytest.mark.cpu("the values of a device come in their place")
def test_values_of_the_device_can_be_chosen(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    values = logged(tmp_path, DeviceStatsMonitor(filter_keys={"cpu_percent", "unknown"}))
    assert {name.partition("/")[2] for _, row in values for name in row} == {"cpu_percent"}
    assert "filter_keys contains keys not found among the values: unknown" in caplog.text


@pytest.mark.parametrize("make", [DeviceStatsMonitor, GradientNorm, SpeedMonitor, ThroughputMonitor])
def test_without_a_logger_they_say_so(make: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=f"Cannot use `{make.__name__}` callback. The Trainer has no logger"):
        train(Regression({}), tmp_path, [make()], enable_checkpointing=False)


def test_arguments_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="at least 2"):
        ThroughputMonitor(window_size=1)
    with pytest.raises(ConfigurationError, match="a positive number"):
        GradientNorm(norm_type=0)


def norms_over_processes(strategy: str) -> Any:
    torch.set_num_threads(1)
    return logged(".", GradientNorm(), strategy=strategy)


@pytest.mark.sharded
def test_the_norm_is_that_over_all_shards() -> None:
    copied, sharded = (run_in_processes(norms_over_processes, 2, (name,))[0] for name in ("ddp", "fsdp"))
    assert len(copied) == 6
    for (step, one), (_, two) in zip(copied, sharded, strict=True):
        assert one["grad_norm"] == pytest.approx(two["grad_norm"], rel=1e-5), step
