"""State belongs to the instance, arguments beat the environment, and options that cannot be are refused."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain import (
    DDP,
    Accelerator,
    AutocastKwargs,
    ConfigurationError,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProjectConfiguration,
)
from drivetrain.strategies.precision import BFloat16Mixed, Float16Mixed
from tests.pool import run_in_processes


def test_two_engines_of_different_precision_do_not_disturb_each_other():
    full = Accelerator(cpu=True)
    half = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
    double = Accelerator(cpu=True, mixed_precision="64")
    seen: dict[str, torch.dtype] = {}

    def make(name: str) -> nn.Module:
        layer = nn.Linear(2, 2)
        layer.register_forward_hook(lambda module, given, output: seen.update({name: output.dtype}))
        return nn.Sequential(layer)

    models = {
        "full": full.prepare(make("full")),
        "half": half.prepare(make("half")),
        "double": double.prepare(make("double")),
    }
    for _ in range(2):
        for model in models.values():
            model(torch.ones(1, 2))
        assert seen == {"full": torch.float32, "half": torch.bfloat16, "double": torch.float64}
    assert [each.mixed_precision for each in (full, half, double)] == ["no", "bf16", "64"]
    assert [each.gradient_accumulation_steps for each in (full, half)] == [1, 2]
    with half.accumulate():
        assert not half.sync_gradients
        assert full.sync_gradients


def test_a_model_prepared_by_another_engine_takes_its_precision():
    dtypes = []
    layer = nn.Linear(2, 2)
    layer.register_forward_hook(lambda module, given, output: dtypes.append(output.dtype))
    model = nn.Sequential(layer)
    for precision in ("bf16", "no", "fp16"):
        Accelerator(cpu=True, mixed_precision=precision).prepare(model)(torch.ones(1, 2))
    assert dtypes == [torch.bfloat16, torch.float32, torch.float16]


def test_an_engine_s_even_batches_is_its_own():
    config = DataLoaderConfiguration()
    first, second = (Accelerator(cpu=True, dataloader_config=config) for _ in range(2))
    first.even_batches = False
    assert second.even_batches
    assert config.even_batches


@pytest.mark.parametrize(
    ("given", "expected"), [(None, "bf16"), ("no", "no"), ("fp16", "fp16"), (Float16Mixed(), "fp16")]
)
def test_a_precision_that_is_given_beats_the_environment(monkeypatch, given, expected):
    monkeypatch.setenv("DRIVETRAIN_MIXED_PRECISION", "bf16")
    assert Accelerator(cpu=True, mixed_precision=given).mixed_precision == expected


@pytest.mark.parametrize(("given", "expected"), [(None, 4), (1, 1), (2, 2)])
def test_accumulation_that_is_given_beats_the_environment(monkeypatch, given, expected):
    monkeypatch.setenv("DRIVETRAIN_GRADIENT_ACCUMULATION_STEPS", "4")
    assert Accelerator(cpu=True, gradient_accumulation_steps=given).gradient_accumulation_steps == expected


def test_the_environment_is_checked_too(monkeypatch):
    monkeypatch.setenv("DRIVETRAIN_GRADIENT_ACCUMULATION_STEPS", "many")
    with pytest.raises(ConfigurationError, match="DRIVETRAIN_GRADIENT_ACCUMULATION_STEPS is 'many'"):
        Accelerator(cpu=True)
    monkeypatch.delenv("DRIVETRAIN_GRADIENT_ACCUMULATION_STEPS")
    monkeypatch.setenv("DRIVETRAIN_MIXED_PRECISION", "bf61")
    with pytest.raises(ConfigurationError, match="Did you mean 'bf16'"):
        Accelerator(cpu=True)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"mixed_precision": "bf-16"}, r"Unknown precision 'bf-16'.*Allowed: 32.*Did you mean 'bf16"),
    ({"strategy": "dpp"}, r"Unknown strategy 'dpp'.*single, ddp.*Did you mean 'ddp'"),
    ({"strategy": 3}, "must be a name or a Strategy object, got int"),
    ({"kwargs_handlers": [GradScalerKwargs(), GradScalerKwargs()]}, "two objects of type GradScalerKwargs"),
    ({"kwargs_handlers": [{"init_scale": 1}]}, "object of type dict. Allowed types: DistributedDataParallelKwargs"),
    (
        {"strategy": "single", "kwargs_handlers": [DistributedDataParallelKwargs()]},
        "only supported with strategy='ddp', got strategy='single'",
    ),
    ({"strategy": DDP(), "kwargs_handlers": [DistributedDataParallelKwargs()]}, "only supported with strategy='ddp'"),
    (
        {"mixed_precision": Float16Mixed(), "kwargs_handlers": [GradScalerKwargs()]},
        "GradScalerKwargs cannot be combined",
    ),
    ({"mixed_precision": BFloat16Mixed(), "kwargs_handlers": [AutocastKwargs()]}, "AutocastKwargs cannot be combined"),
    ({"split_batches": True, "dataloader_config": DataLoaderConfiguration()}, "split_batches=True contradicts"),
    ({"project_dir": "a", "project_config": ProjectConfiguration(project_dir="b")}, "project_dir='a' contradicts"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=[message[:30] for _, message in REFUSED])
def test_what_cannot_be_is_refused(options, message):
    with pytest.raises(ConfigurationError, match=message):
        Accelerator(cpu=True, **options)


def test_a_project_directory_completes_the_configuration(tmp_path):
    accelerator = Accelerator(
        cpu=True, project_dir=tmp_path, project_config=ProjectConfiguration(automatic_checkpoint_naming=True)
    )
    assert accelerator.project_dir == accelerator.logging_dir == str(tmp_path)


def test_handlers_reach_what_they_are_for():
    accelerator = Accelerator(
        cpu=True,
        mixed_precision="fp16",
        kwargs_handlers=[
            GradScalerKwargs(init_scale=4.0, growth_factor=3.0, backoff_factor=0.25, growth_interval=7),
            AutocastKwargs(cache_enabled=False),
        ],
    )
    scaler = accelerator.scaler
    assert scaler is not None
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()) == (3.0, 0.25, 7)
    with accelerator.autocast():
        assert not torch.is_autocast_cache_enabled()
    assert Accelerator(cpu=True).scaler is None


def test_a_precision_s_own_options_stay():
    accelerator = Accelerator(cpu=True, mixed_precision=BFloat16Mixed(cache_enabled=False))
    with accelerator.autocast():
        assert not torch.is_autocast_cache_enabled()


def with_group_options() -> list[Any]:
    accelerator = Accelerator(
        cpu=True,
        kwargs_handlers=[
            InitProcessGroupKwargs(timeout=timedelta(seconds=77)),
            DistributedDataParallelKwargs(bucket_cap_mb=3, gradient_as_bucket_view=True, comm_hook="power_sgd"),
        ],
    )
    group = torch.distributed.distributed_c10d._get_default_group()
    model = accelerator.prepare(nn.Linear(2, 2))
    timeout = group._get_backend(torch.device("cpu")).options._timeout
    return [timeout.total_seconds(), model.bucket_bytes_cap / 2**20, model.gradient_as_bucket_view]


def test_handlers_reach_the_group_and_ddp():
    assert run_in_processes(with_group_options, 2) == [[77.0, 3.0, True]] * 2


def test_a_second_engine_cannot_move_the_process_to_another_device():
    Accelerator(cpu=True)
    with pytest.raises(ConfigurationError, match="Unknown device 'quantum'"):
        Accelerator(device="quantum")
