"""What DeepSpeed is told: arguments, whole configurations, Accelerate's keys, and contradictions between them."""

from __future__ import annotations

import importlib.util
import json
from importlib.util import find_spec

import pytest
import torch
from torch import nn

from drivetrain import ConfigurationError, DeepSpeed, DummyOptim, DummyScheduler
from drivetrain.strategies.deepspeed import build_ops, ops
from drivetrain.strategies.deepspeed.config import Known, complete, dummy_scheduler_of
from drivetrain.strategies.precision import resolve_precision

pytestmark = pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="deepspeed is missing: pip install 'drivetrain[deepspeed]'"
)


def parameters():
    return nn.Linear(2, 2).parameters()


def completed(config, *, precision="32", optimizer=None, world_size=2, model=None, **arguments):
    known = Known(
        world_size,
        resolve_precision(precision),
        {key: (f"Trainer({key})", value) for key, value in arguments.items()},
        optimizer,
        None if optimizer is None else dummy_scheduler_of(optimizer),
        model,
    )
    return complete(config, known)


# arguments


def test_stage_2_is_the_default():
    assert DeepSpeed().stage == 2


def test_arguments_become_deepspeeds_configuration():
    strategy = DeepSpeed(3, offload_optimizer="cpu", gradient_clipping=0.5, overlap_comm=False)
    assert strategy.config == {
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "overlap_comm": False},
        "gradient_clipping": 0.5,
    }


@pytest.mark.parametrize(
    ("config", "given", "expected"),
    [
        ({"bf16": {"enabled": True}}, None, "bf16-true"),
        ({"bf16": {"enabled": "true"}}, None, "bf16-true"),
        ({"bfloat16": {"enabled": True}}, None, "bf16-true"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": "auto"}}, None, "bf16-true"),
        ({"fp16": {"enabled": True}}, None, "fp16"),
        ({"torch_autocast": {"enabled": True}}, None, "bf16"),
        ({"bf16": {"enabled": True}}, "bf16", "bf16-true"),
        ({"bf16": {"enabled": True}}, "bf16-mixed", "bf16-true"),
        ({"bf16": {"enabled": "auto"}}, "bf16", "bf16"),
        ({"bf16": {"enabled": False}}, None, None),
        ({"bf16": {"enabled": True}}, "fp16", "fp16"),  # refused when the configuration is completed
    ],
)
def test_a_configuration_that_switches_a_precision_on_decides_it(config, given, expected):
    assert DeepSpeed(config=config).choose_precision(given) == expected


@pytest.mark.parametrize("as_text", [False, True])
def test_a_whole_configuration_is_taken_from_a_file_or_as_text(tmp_path, as_text):
    text = json.dumps({"zero_optimization": {"stage": 1}})
    path = tmp_path / "ds.json"
    path.write_text(text)
    assert DeepSpeed(config=text if as_text else path).stage == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stage": 4}, "stage=4 is not a ZeRO stage. Allowed: 0, 1, 2, 3"),
        ({"stage": 2, "offload_param": "cpu"}, "offload_param needs stage=3"),
        ({"stage": 0, "offload_optimizer": "cpu"}, "offload_optimizer needs stage 1, 2 or 3"),
        ({"offload_optimizer": "gpu"}, "unknown device 'gpu'. Allowed: none, cpu, nvme"),
        ({"offload_optimizer": "nvme"}, "needs a folder, such as nvme_path="),
        ({"config": "/nowhere.json"}, "No such file"),
        ({"config": "{"}, "is not valid JSON"),
        ({"config": "[1]"}, "No such file|contains a list"),
        ({"stage": 2, "config": {"zero_optimization": {"stage": 3}}}, "says zero_optimization.stage=3, but stage=2"),
        ({"config": {"zero_optimization": {"stage": "two"}}}, "stage='two' is not a ZeRO stage"),
        ({"config": {"zero_optimization": True}}, "'zero_optimization' is a section, such as"),
        ({"config": {"bf16": True}}, "'bf16' is a section, such as"),
        ({"config": {"optimizer": {"params": {}}}}, "'optimizer' of the DeepSpeed configuration has no \"type\""),
        ({"config": {"train_batch_size": 0}}, "train_batch_size=0. Use a whole number of at least 1"),
        ({"config": {"tensor_parallel": {"autotp_size": 2}}}, r"tensor_parallel.autotp_size=2.*Parallel\(tp="),
        ({"config": {"tensor_parallel": {"tp": {"tp_size": 2}}}}, r"tensor_parallel.tp.tp_size=2.*Parallel\(tp="),
        ({"config": {"sequence_parallel_size": 2}}, r"sequence_parallel_size=2.*Parallel\(cp="),
        ({"config": {"expert_parallel": {"autoep_size": 2}}}, r"expert_parallel.autoep_size=2.*Megatron"),
    ],
)
def test_what_cannot_be_is_refused(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        DeepSpeed(**arguments)


def test_a_missing_package_is_named_with_what_brings_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"pip install 'drivetrain\[deepspeed\]'"):
        DeepSpeed()


# "auto", and contradictions


def test_auto_takes_what_the_loop_was_told():
    config = {"gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "train_batch_size": "auto"}
    done = completed(config, gradient_accumulation_steps=3, gradient_clipping=0.5)
    assert done["gradient_accumulation_steps"] == 3
    assert done["gradient_clipping"] == 0.5
    assert done["train_batch_size"] == 3 * 2  # a micro-batch of one row, three of them, two processes


@pytest.mark.parametrize(
    ("key", "here", "there"), [("gradient_accumulation_steps", 4, 3), ("gradient_clipping", 1.0, 0.5)]
)
def test_a_contradiction_names_both_values(key, here, there):
    with pytest.raises(ConfigurationError, match=rf"says {key}={here}, but Trainer\({key}={there}\)"):
        completed({key: here}, **{key: there})


def test_batch_sizes_must_agree():
    config = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4}
    assert completed(config, gradient_accumulation_steps=2)["train_batch_size"] == 16
    with pytest.raises(ConfigurationError, match=r"size=16, but .*=4 x 3 micro-batches x 2 processes is 24"):
        completed(config, gradient_accumulation_steps=3)


@pytest.mark.parametrize(("precision", "enabled"), [("32", False), ("bf16", False), ("bf16-true", True)])
def test_low_precision_weights_are_what_true_precisions_mean(precision, enabled):
    for config in ({}, {"bf16": {"enabled": "auto"}}):
        assert completed(config, precision=precision)["bf16"]["enabled"] is enabled


def test_a_precision_that_contradicts_is_named():
    with pytest.raises(ConfigurationError, match=r"bf16.enabled=True, but precision='bf16'.*precision='bf16-true'"):
        completed({"bf16": {"enabled": True}}, precision="bf16")
    with pytest.raises(ConfigurationError, match=r"torch_autocast.enabled=true, but precision='32'"):
        completed({"torch_autocast": {"enabled": True}})


def test_autocast_of_deepspeeds_own_follows_the_precision():
    section = completed({"torch_autocast": {"enabled": "auto", "dtype": "auto"}}, precision="bf16")["torch_autocast"]
    assert section == {"enabled": True, "dtype": "bfloat16"}


def test_sizes_are_filled_from_the_width_of_the_model():
    model = nn.Linear(2, 2)
    model.config = type("Config", (), {"hidden_size": 10})()
    zero = {"stage": 3, "reduce_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"}
    done = completed({"zero_optimization": zero}, model=model)["zero_optimization"]
    assert done["reduce_bucket_size"] == 100
    assert done["stage3_param_persistence_threshold"] == 100


def test_a_bucket_is_no_larger_than_the_model():
    done = completed({"zero_optimization": {"stage": 2}}, model=nn.Linear(3, 3))["zero_optimization"]
    assert done["reduce_bucket_size"] == 12


@pytest.mark.parametrize(
    ("stage", "millions", "bucket"),
    [(2, 0.1, 10**5), (2, 1, 2**18), (2, 64, 2 * 10**6), (3, 10, 10**7), (3, 64, 2**24), (3, 640, 2 * 10**7)],
)
def test_a_bucket_is_chosen_by_the_size_of_the_model_and_the_stage(stage, millions, bucket):
    model = nn.Linear(int(millions * 10**6), 1, bias=False, device="meta")
    assert (
        completed({"zero_optimization": {"stage": stage}}, model=model)["zero_optimization"]["reduce_bucket_size"]
        == bucket
    )
    given = {"stage": stage, "reduce_bucket_size": 5000}
    assert completed({"zero_optimization": given}, model=model)["zero_optimization"]["reduce_bucket_size"] == 5000


def test_an_optimizer_of_the_configuration_is_filled_from_its_stand_in():
    section = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "betas": "auto", "eps": 1e-6}}
    optimizer = DummyOptim(parameters(), lr=0.02, weight_decay=0.1)
    done = completed({"optimizer": section}, optimizer=optimizer)
    assert done["optimizer"]["params"] == {"lr": 0.02, "weight_decay": 0.1, "eps": 1e-6}


def test_a_scheduler_of_the_configuration_is_filled_from_its_stand_in():
    params = {"total_num_steps": "auto", "warmup_num_steps": "auto", "warmup_max_lr": "auto", "warmup_min_lr": "auto"}
    optimizer = DummyOptim(parameters(), lr=0.02)
    scheduler = DummyScheduler(optimizer, total_num_steps=100, warmup_num_steps=10)
    config = {"optimizer": {"type": "AdamW"}, "scheduler": {"type": "WarmupDecayLR", "params": params}}
    assert scheduler is dummy_scheduler_of(optimizer)
    assert completed(config, optimizer=optimizer)["scheduler"]["params"] == {
        "total_num_steps": 100,
        "warmup_num_steps": 10,
        "warmup_max_lr": 0.02,
        "warmup_min_lr": 0.0,
    }


def test_a_stand_in_without_what_it_stands_for_is_refused_and_so_is_the_reverse():
    with pytest.raises(ConfigurationError, match=r"DummyOptim is a placeholder for .* has none"):
        completed({}, optimizer=DummyOptim(parameters()))
    with pytest.raises(ConfigurationError, match=r"defines the optimizer 'AdamW', but a SGD was created too"):
        completed({"optimizer": {"type": "AdamW"}}, optimizer=torch.optim.SGD(parameters(), lr=0.1))
    optimizer = torch.optim.SGD(parameters(), lr=0.1)
    DummyScheduler(optimizer)
    with pytest.raises(ConfigurationError, match=r"DummyScheduler is a placeholder for .* has none"):
        completed({}, optimizer=optimizer)


def test_a_section_that_is_switched_off_says_nothing():
    config = {
        "amp": {"enabled": False, "opt_level": "auto"},  # a feature that DeepSpeed removed
        "sparse_gradients": False,
        "wandb": {"enabled": "false", "no_such_option": 1},
        "fp16": {"enabled": "auto", "loss_scale": "auto"},
        "checkpoint": None,
    }
    done = completed(DeepSpeed(config=config).config)
    assert {"amp", "sparse_gradients", "wandb", "checkpoint"}.isdisjoint(done)
    assert done["fp16"] == {"enabled": False}


def test_forcing_deepspeeds_own_adam_leaves_the_users_optimizer_in_place(caplog):
    config = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}, "zero_force_ds_cpu_optimizer": True}
    done = completed(config, optimizer=torch.optim.AdamW(parameters()))
    assert done["zero_force_ds_cpu_optimizer"] is False
    assert "AdamW steps the offloaded state" in caplog.text


def test_an_auto_that_nothing_decides_is_named():
    with pytest.raises(ConfigurationError, match=r"'auto' for zero_optimization.a.b"):
        completed({"zero_optimization": {"a": {"b": "auto"}}})


# Accelerate's keys


def test_accelerates_keys_are_arguments_here(tmp_path):
    strategy = DeepSpeed.from_config(
        {
            "zero_stage": 3,
            "offload_optimizer_device": "cpu",
            "offload_param_device": "none",
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 1.0,
            "zero3_init_flag": "false",
            "zero3_save_16bit_model": True,
            "deepspeed_multinode_launcher": "standard",
            "deepspeed_moe_layer_cls_names": "Mixture, Other",
        }
    )
    assert strategy.stage == 3
    assert strategy.config["zero_optimization"] == {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "stage3_gather_16bit_weights_on_model_save": True,
    }
    assert strategy.config["gradient_clipping"] == 1.0
    assert strategy.config["gradient_accumulation_steps"] == 2
    assert strategy.zero_init is False
    assert strategy.moe_layers == ["Mixture", "Other"]


def test_accelerates_configuration_file_is_read(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 1}}))
    assert DeepSpeed.from_config({"deepspeed_config_file": str(path)}).stage == 1


def test_an_unknown_key_is_refused_with_the_nearest():
    with pytest.raises(ConfigurationError, match=r"Unknown key 'zero_stages'.*Did you mean 'zero_stage'\?"):
        DeepSpeed.from_config({"zero_stages": 2})


# compiled operators


@pytest.fixture
def build_root(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    folder = tmp_path / ops.SHARED_MEMORY
    folder.mkdir()
    return folder


def test_a_lock_that_a_killed_build_left_is_named(build_root):
    lock = build_root / "lock"
    lock.touch()
    with pytest.raises(ConfigurationError, match=f"{lock} was left by an interrupted build .* Delete it"):
        ops.check_locks([ops.SHARED_MEMORY])


def test_a_lock_that_a_build_holds_is_left_alone(build_root):
    with open(build_root / "lock", "w"):
        ops.check_locks([ops.SHARED_MEMORY])


def test_an_operator_is_built_once_its_library_is_there(build_root):
    assert not ops.is_built(ops.SHARED_MEMORY)
    (build_root / f"{ops.SHARED_MEMORY}.so").touch()
    assert ops.is_built(ops.SHARED_MEMORY)


def test_adam_is_torchs_where_deepspeeds_would_be_compiled_first(build_root):
    section = {"type": "AdamW", "params": {}}
    ops.prefer_built_optimizer(section, "cpu", {})
    assert section["params"] == {"torch_adam": True}


def test_the_state_of_operators_is_told(build_root, capsys):
    (build_root / "lock").touch()
    assert build_ops.main(["--status"]) == 0
    told = capsys.readouterr().out
    assert f"{ops.SHARED_MEMORY}: stale lock" in told
    assert "fused_adam: not built" in told
