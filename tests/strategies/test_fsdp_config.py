"""The `fsdp_config` of a launcher's YAML, of both versions."""

from __future__ import annotations

import pytest

from drivetrain import FSDP, ConfigurationError

VERSION_1 = {
    "fsdp_activation_checkpointing": True,
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_backward_prefetch": "BACKWARD_PRE",
    "fsdp_cpu_ram_efficient_loading": True,
    "fsdp_forward_prefetch": False,
    "fsdp_offload_params": True,
    "fsdp_sharding_strategy": "SHARD_GRAD_OP",
    "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    "fsdp_sync_module_states": True,
    "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer, Embedding",
    "fsdp_use_orig_params": True,
}
VERSION_2 = {
    "fsdp_version": 2,
    "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP",
    "fsdp_min_num_params": 1e6,
    "fsdp_offload_params": "false",
    "fsdp_reshard_after_forward": True,
    "fsdp_state_dict_type": "FULL_STATE_DICT",
    "fsdp_cpu_ram_efficient_loading": True,
    "fsdp_activation_checkpointing": False,
}


def test_the_first_version():
    options = FSDP.from_config(VERSION_1).options
    assert options.reshard_after_forward is False
    assert options.cpu_offload is options.activation_checkpointing is options.sync_module_states is True
    assert options.wrap == ["LlamaDecoderLayer", "Embedding"]
    assert options.forward_prefetch == 0
    assert options.init == "rank0"


def test_the_second_version():
    options = FSDP.from_config(VERSION_2).options
    assert options.reshard_after_forward is True
    assert options.cpu_offload is options.activation_checkpointing is False
    assert options.wrap == 1_000_000


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"fsdp_sharding_strategy": 1}, {"reshard_after_forward": True}),
        ({"fsdp_sharding_strategy": "FULL_SHARD"}, {"reshard_after_forward": True}),
        ({"fsdp_sharding_strategy": "2"}, {"reshard_after_forward": False}),
        ({"fsdp_reshard_after_forward": "SHARD_GRAD_OP"}, {"reshard_after_forward": False}),
        ({"fsdp_reshard_after_forward": "false"}, {"reshard_after_forward": False}),
        ({"fsdp_reshard_after_forward": 4}, {"reshard_after_forward": 4}),
        ({"fsdp_auto_wrap_policy": "NO_WRAP"}, {"wrap": None}),
        ({"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}, {"wrap": "auto"}),
        ({"auto_wrap_policy": "transformer_based_wrap"}, {"wrap": "auto"}),
        ({"fsdp_forward_prefetch": "true"}, {"forward_prefetch": 1}),
        ({"fsdp_ignored_modules": "head"}, {"ignored_modules": ["head"]}),
        ({"fsdp_offload_params": None}, {}),
    ],
)
def test_each_key_in_our_words(given, expected):
    assert FSDP.from_config(given).options == FSDP(**expected).options


def test_a_hybrid_shards_within_machines_and_copies_over_them(monkeypatch):
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    options = FSDP.from_config({"fsdp_sharding_strategy": "HYBRID_SHARD"}).options
    assert options == FSDP(reshard_after_forward=True, replicate_size=2).options


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"fsdp_ofload_params": True}, "Unknown key 'fsdp_ofload_params' .* Did you mean 'fsdp_offload_params'?"),
        ({"fsdp_sharding_strategy": "FULL"}, "Allowed: FULL_SHARD, SHARD_GRAD_OP"),
        ({"fsdp_sharding_strategy": "NO_SHARD"}, "Use strategy='ddp'"),
        ({"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP"}, "requires fsdp_min_num_params"),
        ({"fsdp_offload_params": "perhaps"}, "Use true or false"),
    ],
)
def test_what_cannot_be_is_refused(given, says):
    with pytest.raises(ConfigurationError, match=says):
        FSDP.from_config(given)


def test_a_key_that_means_nothing_is_said_once(caplog):
    for _ in range(2):
        FSDP.from_config({"fsdp_use_orig_params": True, "fsdp_limit_all_gathers": True})
    said = [record.message for record in caplog.records if "fsdp_limit_all_gathers" in record.message]
    assert said == [
        "fsdp_limit_all_gathers=True has no effect: the number of concurrent all-gathers is always limited."
    ]
