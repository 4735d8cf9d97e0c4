"""Where the script does not choose, the strategy, its options, the precision and compilation are the launcher's."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain import (
    DDP,
    Accelerator,
    ConfigurationError,
    DeepSpeedPlugin,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    Trainer,
)
from drivetrain.accelerator.accelerate_names import Launched
from drivetrain.accelerator.compilation import Compilation
from tests.pool import run_in_processes

FSDP = {"DRIVETRAIN_USE_FSDP": "1", "DRIVETRAIN_FSDP_TRANSFORMER_LAYER_CLS_TO_WRAP": "Linear"}
# What Accelerate's launcher would set.
THEIRS = {
    "ACCELERATE_USE_FSDP": "true",
    "ACCELERATE_MIXED_PRECISION": "bf16",
    "FSDP_VERSION": "2",
    "FSDP_SHARDING_STRATEGY": "FULL_SHARD",
    "FSDP_RESHARD_AFTER_FORWARD": "false",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "Linear",
    "FSDP_ACTIVATION_CHECKPOINTING": "true",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Any:
    def with_variables(**variables: str) -> Launched:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return Launched()

    return with_variables


def test_nothing_is_asked_for_without_a_launcher(launched: Any) -> None:
    assert launched().strategy() is None
    assert launched().compilation is None


def test_the_options_of_fsdp_are_the_launchers(launched: Any) -> None:
    strategy = launched(**THEIRS).strategy()
    assert strategy.name == "fsdp"
    assert strategy.options.wrap == ["Linear"]
    assert strategy.options.reshard_after_forward is False
    assert strategy.options.activation_checkpointing


def test_fsdp_that_shards_nothing_is_ddp(launched: Any) -> None:
    assert launched(DRIVETRAIN_USE_FSDP="1", DRIVETRAIN_FSDP_SHARDING_STRATEGY="NO_SHARD").strategy() is None


def strategies_of_engines() -> list[str]:
    os.environ.update(THEIRS)
    options: list[dict[str, Any]] = [{}, {"kwargs_handlers": [DistributedDataParallelKwargs()]}, {"strategy": "single"}]
    return [Accelerator(cpu=True, **each).strategy.name for each in options]


def test_an_engine_that_names_no_strategy_takes_the_launchers() -> None:
    assert run_in_processes(strategies_of_engines, 1) == [["fsdp", "fsdp", "single"]]


def test_units_by_size_have_a_size(launched: Any) -> None:
    launched(DRIVETRAIN_USE_FSDP="1", DRIVETRAIN_FSDP_AUTO_WRAP_POLICY="SIZE_BASED_WRAP")
    assert Launched().strategy().options.wrap == 100_000_000


def test_a_grid_is_the_launchers(launched: Any) -> None:
    strategy = launched(
        **FSDP,
        DRIVETRAIN_USE_PARALLELISM_CONFIG="1",
        DRIVETRAIN_PARALLELISM_CONFIG_CP_SIZE="2",
        DRIVETRAIN_PARALLELISM_CONFIG_DP_SHARD_SIZE="2",
        DRIVETRAIN_PARALLELISM_CONFIG_CP_COMM_STRATEGY="alltoall",
    ).strategy()
    assert (strategy.name, strategy.sizes.cp, strategy.sizes.dp_shard) == ("parallel", 2, 2)
    assert strategy.options.wrap == ["Linear"]
    assert strategy.cp_attention == "ring"


def test_what_a_plugin_leaves_open_is_the_launchers(launched: Any) -> None:
    plugin = FullyShardedDataParallelPlugin(reshard_after_forward=True)
    strategy = launched(**THEIRS).strategy_with(plugin, None, None, None)
    assert strategy.options.reshard_after_forward is True
    assert strategy.options.wrap == ["Linear"]


@pytest.mark.sharded
def test_a_plugin_of_a_subclass_takes_the_launchers_options_too(launched: Any) -> None:
    pytest.importorskip("deepspeed", reason="needs deepspeed")

    @dataclass
    class OwnPlugin(DeepSpeedPlugin):
        own_option: str | None = None  # which no launcher sets

    asked = launched(ACCELERATE_USE_DEEPSPEED="true", ACCELERATE_GRADIENT_CLIPPING="0.5")
    strategy = asked.strategy_with(None, OwnPlugin(zero_stage=1), None, None)
    assert (strategy.stage, strategy.config["gradient_clipping"]) == (1, 0.5)


@pytest.mark.sharded
def test_the_options_of_deepspeed_are_the_launchers(launched: Any) -> None:
    pytest.importorskip("deepspeed", reason="needs deepspeed")
    strategy = launched(
        ACCELERATE_USE_DEEPSPEED="true",
        ACCELERATE_DEEPSPEED_ZERO_STAGE="1",
        ACCELERATE_GRADIENT_CLIPPING="0.5",
        ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE="none",
        ACCELERATE_DEEPSPEED_ZERO3_INIT="false",
    ).strategy()
    assert (strategy.name, strategy.stage) == ("deepspeed", 1)
    assert strategy.config["gradient_clipping"] == 0.5


def test_the_options_of_megatron_are_the_launchers(launched: Any) -> None:
    plugin = launched(
        DRIVETRAIN_USE_MEGATRON_LM="1",
        DRIVETRAIN_MEGATRON_LM_TP_DEGREE="2",
        DRIVETRAIN_MEGATRON_LM_RECOMPUTE_ACTIVATIONS="true",
    ).megatron
    assert (plugin.tp_degree, plugin.recompute_activations) == (2, True)


def test_the_recipe_for_fp8_is_the_launchers(launched: Any) -> None:
    pytest.importorskip("torchao", reason="needs torchao")
    launched(DRIVETRAIN_MIXED_PRECISION="fp8", DRIVETRAIN_FP8_BACKEND="ao", DRIVETRAIN_FP8_PAD_INNER_DIM="true")
    precision = Accelerator(cpu=True).precision
    assert precision.name == "fp8"
    assert precision.backend.name == "torchao"
    assert precision.backend.config().pad_inner_dim is True


def test_prepared_models_are_compiled_in_place(launched: Any) -> None:
    launched(DRIVETRAIN_DYNAMO_BACKEND="eager", DRIVETRAIN_DYNAMO_USE_REGIONAL_COMPILATION="1")
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    names = list(model.state_dict())
    prepared = Accelerator(cpu=True).prepare(model)
    assert [each._compiled_call_impl is not None for each in model] == [True, False, True]
    assert list(model.state_dict()) == names
    torch.testing.assert_close(prepared(torch.ones(1, 2)), model.forward(torch.ones(1, 2)))


def test_a_backend_that_torch_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"dynamo_backend is 'ofi'.*Available backends: .*inductor"):
        Compilation("ofi")


def chosen(kind: str) -> tuple[str, Any, str]:
    """The strategy, its units and the precision of a script that chooses in some way."""
    if kind == "Trainer":
        engine = Trainer(logger=False, enable_checkpointing=False).accelerator
    elif kind == "a strategy":
        engine = Accelerator(strategy=DDP())
    elif kind == "options of DDP":
        engine = Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(static_graph=True)])
    else:
        engine = Accelerator()
    model = engine.prepare(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    options = getattr(engine.strategy, "options", None)
    engine.backward(model(torch.ones(1, 2)).sum())
    assert os.environ["ACCELERATE_USE_FSDP"] == "true"
    return engine.strategy.name, getattr(options, "wrap", None), engine.mixed_precision


def all_chosen() -> list[tuple[str, Any, str]]:
    return [chosen(kind) for kind in ("Accelerator", "Trainer", "options of DDP", "a strategy")]


@pytest.mark.sharded
def test_a_script_that_does_not_choose_gets_the_launchers_strategy() -> None:
    found = run_in_processes(all_chosen, env=THEIRS)
    assert found == [[("fsdp", ["Linear"], "bf16")] * 3 + [("ddp", None, "bf16")]] * 2
