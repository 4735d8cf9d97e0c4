"""A flag wins over the environment, and that over a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from drivetrain import ConfigurationError
from drivetrain.launch import LaunchOptions
from drivetrain.launch.options import SETTINGS, variables_of
from drivetrain.launch.settings.sources import collect, settings_in_environment


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "config.yaml"
    path.write_text("distributed_type: FSDP\nnum_processes: 8\nmixed_precision: fp16\nuse_cpu: true\nfsdp_config: {}")
    return str(path)


@pytest.mark.parametrize(
    ("flags", "environ", "expected"),
    [
        ({}, {}, (8, "fp16")),
        ({}, {"DRIVETRAIN_NUM_PROCESSES": "4", "DRIVETRAIN_MIXED_PRECISION": "bf16"}, (4, "bf16")),
        ({"num_processes": 2}, {"DRIVETRAIN_NUM_PROCESSES": "4", "DRIVETRAIN_MIXED_PRECISION": "bf16"}, (2, "bf16")),
    ],
)
def test_the_strongest_source_counts(
    file: str, flags: dict[str, Any], environ: dict[str, str], expected: tuple[int, str]
) -> None:
    options = LaunchOptions.from_given(collect(flags, environ, file))
    assert (options.num_processes, options.mixed_precision) == expected
    assert options.use_fsdp


def test_a_deepspeed_file_is_looked_up_beside_the_file_that_names_it(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: ds/zero.json")
    assert collect({}, {}, str(file))["deepspeed_config_file"].value == "ds/zero.json"  # which the error names
    (tmp_path / "ds").mkdir()
    (tmp_path / "ds" / "zero.json").write_text("{}")
    assert collect({}, {}, str(file))["deepspeed_config_file"].value == str(tmp_path / "ds" / "zero.json")


def test_a_strategy_of_a_flag_takes_the_place_of_the_files(file: str) -> None:
    options = LaunchOptions.from_given(collect({"use_deepspeed": True, "zero_stage": "1"}, {}, file))
    assert (options.use_fsdp, options.use_deepspeed, options.cpu) == (False, True, True)
    assert not any("FSDP" in variable for variable in options.variables)


def test_accelerators_of_a_flag_take_the_place_of_the_files_cpu(file: str) -> None:
    options = LaunchOptions.from_given(collect({"multi_gpu": True}, {}, file))
    assert (options.cpu, options.multi_gpu) == (False, True)


def test_what_the_environment_asks_for_otherwise_does_not_reach_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRIVETRAIN_USE_FSDP", "1")
    options = LaunchOptions.from_given(collect({"use_deepspeed": True}, {"DRIVETRAIN_USE_FSDP": "1"}))
    assert options.variables["DRIVETRAIN_USE_FSDP"] == "false"


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"zero_stage": "2"}, ["--zero_stage", "--use_deepspeed"]),
        ({"fsdp_version": "2"}, ["--fsdp_version", "--use_fsdp"]),
        ({"use_fsdp": True, "use_deepspeed": True}, ["use_fsdp and use_deepspeed contradict"]),
        ({"use_deepspeed": True, "use_parallelism_config": True}, ["use_parallelism_config and use_deepspeed"]),
        ({"aws_secret_access_key": "hunter2"}, ["--aws_secret_access_key", "SageMaker"]),
        ({"ray_address": "local"}, ["--ray_address", "--launcher ray"]),
        ({"rdzv_endpoint": "host:port"}, ["rdzv_endpoint", "10.0.0.1:29500"]),
        ({"rdzv_endpoint": "a:1", "main_process_ip": "b"}, ["rdzv_endpoint", "--main_process_ip"]),
        ({"fsdp_offload_params": "maybe", "use_fsdp": True}, ["--fsdp_offload_params", "true or false"]),
        ({"use_parallelism_config": True, "parallelism_config_sp_size": 2}, ["parallelism_config_sp_size", "cp_size"]),
    ],
)
def test_a_flag_without_effect_is_refused(flags: dict[str, Any], named: list[str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        LaunchOptions.from_given(collect(flags, {}))
    for part in named:
        assert part in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_an_endpoint_is_an_address_and_a_port() -> None:
    given = collect({"rdzv_endpoint": "10.0.0.1:1234", "num_machines": "2"}, {})
    options = LaunchOptions.from_given(given)
    assert (options.main_process_ip, options.main_process_port) == ("10.0.0.1", 1234)


def test_a_variable_that_cannot_be_is_named() -> None:
    with pytest.raises(ConfigurationError, match="DRIVETRAIN_FSDP_OFFLOAD_PARAMS is 'maybe'"):
        settings_in_environment({"DRIVETRAIN_FSDP_OFFLOAD_PARAMS": "maybe"})


def test_every_setting_reaches_the_processes_as_it_was() -> None:
    values: dict[str, Any] = {}
    samples = {"int": 1, "float": 0.5, "text": "a", "words": ["A", "B"], "bool": False, "bools": [False] * 3}
    for name, setting in SETTINGS.items():
        if setting.variable and not setting.of_launcher and not setting.inert:
            values[name] = setting.choices[-1] if setting.choices else samples.get(setting.kind, True)
    assert settings_in_environment(variables_of(values)) == values


# What Accelerate's launcher sets beside what was asked for.
DEFAULTS_OF_THEIRS = {
    "ACCELERATE_MIXED_PRECISION": "no",
    "ACCELERATE_DYNAMO_BACKEND": "NO",
    "ACCELERATE_DYNAMO_MODE": "default",
    "ACCELERATE_DYNAMO_USE_FULLGRAPH": "False",
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_SHARDING_STRATEGY": "FULL_SHARD",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_OFFLOAD_PARAMS": "false",
    "FSDP_MIN_NUM_PARAMS": "100000000",
    "FSDP_FORWARD_PREFETCH": "false",
    "FSDP_USE_ORIG_PARAMS": "true",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    "FSDP_SYNC_MODULE_STATES": "true",
    "FSDP_ACTIVATION_CHECKPOINTING": "false",
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "false",
}


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ({}, {"use_fsdp": True, "fsdp_reshard_after_forward": "true", "fsdp_sharding_strategy": None}),
        (
            {"FSDP_VERSION": "1", "FSDP_SHARDING_STRATEGY": "SHARD_GRAD_OP"},
            {"fsdp_sharding_strategy": "SHARD_GRAD_OP", "fsdp_reshard_after_forward": None},
        ),
        (
            {"FSDP_VERSION": "1", "FSDP_RESHARD_AFTER_FORWARD": "shard_grad_op"},
            {"fsdp_reshard_after_forward": "SHARD_GRAD_OP", "fsdp_sharding_strategy": None},
        ),
        ({"FSDP_TRANSFORMER_CLS_TO_WRAP": "A,B"}, {"fsdp_transformer_layer_cls_to_wrap": ["A", "B"]}),
        ({"FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP"}, {"fsdp_min_num_params": 100000000}),
        (
            {"ACCELERATE_FP8_BACKEND": "AO", "ACCELERATE_FP8_MARGIN": "0", "ACCELERATE_FP8_PAD_INNER_DIM": "True"},
            {"fp8_backend": "ao", "fp8_margin": None, "fp8_pad_inner_dim": True},
        ),
        ({"ACCELERATE_FP8_BACKEND": "TE", "ACCELERATE_FP8_OVERRIDE_FPROP": "True"}, {"fp8_backend": "te"}),
        (
            {"DRIVETRAIN_USE_DEEPSPEED": "1", "DRIVETRAIN_DEEPSPEED_ZERO_STAGE": "1"},
            {"use_deepspeed": True, "use_fsdp": None, "zero_stage": "1", "mixed_precision": "no"},
        ),
        (
            {"ACCELERATE_GRADIENT_CLIPPING": "auto", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "auto"},
            {"gradient_clipping": None, "gradient_accumulation_steps": None},
        ),
    ],
)
def test_what_accelerates_launcher_sets_means_what_was_asked_for(
    chosen: dict[str, str], expected: dict[str, Any]
) -> None:
    found = settings_in_environment({**DEFAULTS_OF_THEIRS, **chosen})
    assert {name: found.get(name) for name in expected} == expected
