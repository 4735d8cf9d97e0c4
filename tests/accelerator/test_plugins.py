"""Accelerate's plugins say which strategy is meant, and how it is set up."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain import (
    Accelerator,
    ConfigurationError,
    DeepSpeedPlugin,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
)
from tests.pool import run_in_processes


def options(plugin: FullyShardedDataParallelPlugin) -> Any:
    return plugin.strategy().options


def test_fsdp_options_in_accelerates_names():
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=False,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        cpu_offload=True,
        activation_checkpointing=True,
        activation_checkpointing_offload=True,
        mixed_precision_policy={"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
    )
    found = options(plugin)
    assert found.wrap == ["Block"]
    assert found.reshard_after_forward is False
    assert found.cpu_offload
    assert found.activation_checkpointing
    assert found.activation_offload
    assert (found.gather_dtype, found.reduce_dtype) == (torch.bfloat16, torch.float32)


def test_torchs_own_policies_and_enumerations_are_understood():
    from torch.distributed.fsdp import CPUOffload, ShardingStrategy
    from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

    by_class = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.Linear})
    found = options(
        FullyShardedDataParallelPlugin(
            sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
            cpu_offload=CPUOffload(offload_params=False),
            auto_wrap_policy=by_class,
        )
    )
    assert found.wrap == [nn.Linear]
    assert found.reshard_after_forward is False
    assert not found.cpu_offload
    by_size = functools.partial(size_based_auto_wrap_policy, min_num_params=100)
    assert options(FullyShardedDataParallelPlugin(auto_wrap_policy=by_size)).wrap == 100


def test_what_fully_shard_does_not_have_is_refused_with_what_to_do_instead():
    with pytest.raises(ConfigurationError, match="init_context"):
        FullyShardedDataParallelPlugin(param_init_fn=lambda module: None).strategy()
    with pytest.raises(ConfigurationError, match="transformer_cls_names_to_wrap"):
        FullyShardedDataParallelPlugin(auto_wrap_policy=lambda module, recurse, nonwrapped_numel: True).strategy()
    with pytest.raises(ConfigurationError, match="bf16"):
        FullyShardedDataParallelPlugin(mixed_precision_policy="half").strategy()


def train(**arguments: Any) -> tuple[str, torch.Tensor]:
    accelerator = Accelerator(cpu=True, **arguments)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(model(torch.ones(2, 4)).square().sum())
    optimizer.step()
    weight = accelerator.strategy.state.model(model, full=True).get("0.weight", torch.zeros(0))
    return accelerator.strategy.name, weight


def train_with_each() -> list[tuple[str, torch.Tensor]]:
    return [
        train(),
        train(fsdp_plugin=FullyShardedDataParallelPlugin(auto_wrap_policy="no_wrap")),
        train(fsdp_plugin={"fsdp_version": 2, "fsdp_auto_wrap_policy": "NO_WRAP"}),
        train(parallelism_config=ParallelismConfig(dp_shard_size=2), fsdp_plugin={"fsdp_auto_wrap_policy": "NO_WRAP"}),
    ]


def test_a_plugin_trains_as_its_strategy_does():
    found = run_in_processes(train_with_each, 2, timeout=60)[0]
    assert [name for name, _ in found] == ["ddp", "fsdp", "fsdp", "parallel"]
    for _, weight in found[1:]:
        torch.testing.assert_close(weight, found[0][1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"strategy": "ddp", "fsdp_plugin": {}}, "contradicts a plugin"),
        ({"fsdp_plugin": {}, "deepspeed_plugin": {}}, "only one of them"),
        ({"deepspeed_plugin": {}, "parallelism_config": ParallelismConfig(tp_size=2)}, "only one of them"),
        ({"fsdp_plugin": {"fsdp_sharding": "FULL_SHARD"}}, "fsdp_sharding_strategy"),
    ],
)
def test_contradictions_are_refused(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        Accelerator(cpu=True, **arguments)


def test_deepspeed_options_in_accelerates_names():
    strategy = DeepSpeedPlugin(zero_stage=2, offload_optimizer_device="cpu", gradient_clipping=0.5).strategy()
    assert strategy.name == "deepspeed"
    assert "stage=2" in repr(strategy)
