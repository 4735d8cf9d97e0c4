"""Configuration files of Accelerate mean what they say, and what is written reads back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from drivetrain import ConfigurationError
from drivetrain.launch import LaunchOptions
from drivetrain.launch.options import Given
from drivetrain.launch.settings.sources import (
    collect,
    config_of,
    default_config_file,
    read_config,
    settings_of,
    write_config,
)

# What stands at the top of every file that the questionnaire writes.
TOP = """
compute_environment: LOCAL_MACHINE
debug: false
downcast_bf16: 'no'
enable_cpu_affinity: false
machine_rank: 0
main_training_function: main
num_machines: 1
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
"""

# name: (the file, values that must be among the settings, variables that must reach the processes)
FILES: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "one process": (
        "distributed_type: 'NO'\nmixed_precision: fp16\nnum_processes: 1\nuse_cpu: false\ngpu_ids: all",
        {"num_processes": 1, "mixed_precision": "fp16", "gpu_ids": "all", "same_network": True},
        {"DRIVETRAIN_MIXED_PRECISION": "fp16"},
    ),
    "several on the CPU, with mpirun": (
        "distributed_type: MULTI_CPU\nnum_processes: 4\nuse_cpu: true\nmpirun_config:\n  mpirun_ccl: '1'\n"
        "  mpirun_hostfile: /etc/hostname\nipex_config:\n  ipex: true",
        {"cpu": True, "num_processes": 4, "mpirun_hostfile": "/etc/hostname"},
        {"DRIVETRAIN_USE_CPU": "1"},
    ),
    "several GPUs": (
        "distributed_type: MULTI_GPU\nnum_processes: 8\nuse_cpu: false\n"
        "gpu_ids: 0,1,2,3,4,5,6,7\nmixed_precision: bf16",
        {"multi_gpu": True, "num_processes": 8, "gpu_ids": "0,1,2,3,4,5,6,7"},
        {"DRIVETRAIN_MIXED_PRECISION": "bf16"},
    ),
    "FSDP 1": (
        "distributed_type: FSDP\nnum_processes: 2\nfsdp_config:\n  fsdp_activation_checkpointing: true\n"
        "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  fsdp_backward_prefetch: BACKWARD_PRE\n"
        "  fsdp_cpu_ram_efficient_loading: true\n  fsdp_forward_prefetch: false\n  fsdp_offload_params: false\n"
        "  fsdp_reshard_after_forward: SHARD_GRAD_OP\n  fsdp_state_dict_type: FULL_STATE_DICT\n"
        "  fsdp_sync_module_states: true\n  fsdp_transformer_layer_cls_to_wrap: Block,Head\n"
        "  fsdp_use_orig_params: true\n  fsdp_version: 1",
        {"use_fsdp": True, "fsdp_version": "1", "fsdp_transformer_layer_cls_to_wrap": ["Block", "Head"]},
        {
            "DRIVETRAIN_USE_FSDP": "1",
            "DRIVETRAIN_FSDP_RESHARD_AFTER_FORWARD": "SHARD_GRAD_OP",
            "DRIVETRAIN_FSDP_TRANSFORMER_LAYER_CLS_TO_WRAP": "Block,Head",
            "DRIVETRAIN_FSDP_ACTIVATION_CHECKPOINTING": "true",
        },
    ),
    "FSDP of older files, by numbers": (
        "distributed_type: FSDP\nfp16: true\nfsdp_config:\n  fsdp_sharding_strategy: 2\n  min_num_params: 2000\n"
        "  fsdp_backward_prefetch_policy: BACKWARD_PRE\n"
        "  fsdp_auto_wrap_policy: SIZE_BASED_WRAP\n  offload_params: true",
        {"fsdp_sharding_strategy": "SHARD_GRAD_OP", "fsdp_min_num_params": 2000, "mixed_precision": "fp16"},
        {"DRIVETRAIN_FSDP_OFFLOAD_PARAMS": "true", "DRIVETRAIN_FSDP_MIN_NUM_PARAMS": "2000"},
    ),
    "FSDP 2 on a grid": (
        "distributed_type: FSDP\nnum_processes: 8\nfsdp_config:\n  fsdp_version: 2\n"
        "  fsdp_reshard_after_forward: true\nparallelism_config:\n  parallelism_config_cp_size: 2\n"
        "  parallelism_config_cp_comm_strategy: alltoall\n"
        "  parallelism_config_dp_replicate_size: 1\n  parallelism_config_dp_shard_size: 2\n"
        "  parallelism_config_tp_size: 2",
        {"use_parallelism_config": True, "parallelism_config_tp_size": 2},
        {
            "DRIVETRAIN_USE_PARALLELISM_CONFIG": "1",
            "DRIVETRAIN_PARALLELISM_CONFIG_CP_SIZE": "2",
            "DRIVETRAIN_PARALLELISM_CONFIG_CP_COMM_STRATEGY": "alltoall",
            "DRIVETRAIN_FSDP_RESHARD_AFTER_FORWARD": "true",
        },
    ),
    "tensor parallel of older files": (
        "distributed_type: TP\nnum_processes: 2\ntp_config:\n  tp_size: 2",
        {"parallelism_config_tp_size": 2, "use_parallelism_config": True},
        {"DRIVETRAIN_PARALLELISM_CONFIG_TP_SIZE": "2"},
    ),
    "DeepSpeed": (
        "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config:\n  gradient_accumulation_steps: 4\n"
        "  gradient_clipping: 1.0\n  offload_optimizer_device: none\n  offload_param_device: none\n"
        "  zero3_init_flag: false\n  zero_stage: 2\n  deepspeed_multinode_launcher: standard",
        {"use_deepspeed": True, "zero_stage": "2", "gradient_accumulation_steps": 4},
        {
            "DRIVETRAIN_USE_DEEPSPEED": "1",
            "DRIVETRAIN_DEEPSPEED_ZERO_STAGE": "2",
            "DRIVETRAIN_DEEPSPEED_GRADIENT_CLIPPING": "1.0",
            "DRIVETRAIN_GRADIENT_ACCUMULATION_STEPS": "4",
        },
    ),
    "DeepSpeed with a JSON": (
        "distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: ds.json\n  zero3_init_flag: true",
        {"deepspeed_config_file": "ds.json"},
        {"DRIVETRAIN_DEEPSPEED_CONFIG_FILE": "ds.json", "DRIVETRAIN_DEEPSPEED_ZERO3_INIT": "true"},
    ),
    "Megatron": (
        "distributed_type: MEGATRON_LM\nnum_processes: 4\nmegatron_lm_config:\n  megatron_lm_gradient_clipping: 1.0\n"
        "  megatron_lm_pp_degree: 2\n  megatron_lm_num_micro_batches: 2\n  megatron_lm_tp_degree: 2\n"
        "  megatron_lm_sequence_parallelism: true\n  megatron_lm_use_distributed_optimizer: true\n"
        "  megatron_lm_recompute_activations: true",
        {"use_megatron_lm": True, "megatron_lm_tp_degree": 2},
        {"DRIVETRAIN_USE_MEGATRON_LM": "1", "DRIVETRAIN_MEGATRON_LM_NUM_MICRO_BATCHES": "2"},
    ),
    "fp8 as the questionnaire spells it": (
        "distributed_type: MULTI_GPU\nmixed_precision: fp8\nfp8_config:\n  amax_compute_algorithm: max\n"
        "  amax_history_length: 16\n  backend: TE\n  fp8_format: E4M3\n  interval: 1\n  margin: 0\n"
        "  override_linear_precision: [false, false, false]\n  use_autocast_during_eval: false",
        {"fp8_backend": "te", "fp8_amax_compute_algo": "max", "fp8_amax_history_len": 16},
        {"DRIVETRAIN_FP8_BACKEND": "te", "DRIVETRAIN_FP8_AMAX_HISTORY_LEN": "16", "DRIVETRAIN_FP8_FORMAT": "E4M3"},
    ),
    "fp8 as the flags spell it": (
        "distributed_type: MULTI_GPU\nmixed_precision: fp8\nfp8_config:\n  fp8_backend: ao\n"
        "  fp8_pad_inner_dim: false\n"
        "  fp8_enable_fsdp_float8_all_gather: true",
        {"fp8_backend": "ao", "fp8_pad_inner_dim": False},
        {"DRIVETRAIN_FP8_PAD_INNER_DIM": "false", "DRIVETRAIN_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER": "true"},
    ),
    "a TPU": (
        "distributed_type: XLA\nnum_processes: 8\nmixed_precision: bf16\ndowncast_bf16: 'yes'\ntpu_name: null",
        {"tpu": True, "downcast_bf16": True},
        {"DRIVETRAIN_DOWNCAST_BF16": "1", "DRIVETRAIN_MIXED_PRECISION": "bf16"},
    ),
    "torch.compile": (
        "distributed_type: 'NO'\ndynamo_config:\n  dynamo_backend: INDUCTOR\n  dynamo_mode: reduce-overhead\n"
        "  dynamo_use_dynamic: true\n  dynamo_use_fullgraph: false\n  dynamo_use_regional_compilation: true",
        {"dynamo_backend": "inductor", "dynamo_mode": "reduce-overhead"},
        {"DRIVETRAIN_DYNAMO_BACKEND": "inductor", "DRIVETRAIN_DYNAMO_USE_REGIONAL_COMPILATION": "1"},
    ),
    "torch.compile of older files, and no read as false": (
        "distributed_type: NO\nmixed_precision: no\ndynamo_backend: EAGER\nnum_processes: 1",
        {"dynamo_backend": "eager", "mixed_precision": "no", "num_processes": 1},
        {"DRIVETRAIN_DYNAMO_BACKEND": "eager", "DRIVETRAIN_MIXED_PRECISION": "no"},
    ),
    "several machines": (
        "distributed_type: MULTI_GPU\nnum_machines: 4\nmachine_rank: 3\nmain_process_ip: 10.0.0.1\n"
        "main_process_port: 29501\nnum_processes: 32\nrdzv_backend: c10d\nsame_network: false",
        {"num_machines": "4", "machine_rank": 3, "main_process_port": 29501, "rdzv_backend": "c10d"},
        {},
    ),
    "a number that was not given, and a strategy that is not in use": (
        "distributed_type: MULTI_GPU\nnum_processes: -1\ndeepspeed_config:\n  zero_stage: 3\nfsdp_config: {}",
        {"multi_gpu": True},
        {},
    ),
}


def written(folder: Path, text: str) -> Path:
    """A file with the usual top, without the keys that `text` gives by itself."""
    own = {line.partition(":")[0] for line in text.splitlines()}
    kept = [line for line in TOP.splitlines() if line.partition(":")[0] not in own]
    path = folder / "config.yaml"
    path.write_text("\n".join([*kept, text]))
    return path


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_accelerates_is_taken_as_it_is(tmp_path: Path, name: str) -> None:
    text, settings, variables = FILES[name]
    path = written(tmp_path, text)
    found = read_config(path)
    assert {key: found.get(key) for key in settings} == settings
    options = LaunchOptions.from_given(collect({}, {}, str(path)))
    reach = options.variables
    assert {key: reach.get(key) for key in variables} == variables
    if "use_deepspeed" not in settings and "DEEPSPEED" not in text:
        assert not any("DEEPSPEED" in variable for variable in reach)


@pytest.mark.parametrize("name", FILES)
def test_what_is_written_reads_back(tmp_path: Path, name: str) -> None:
    found = read_config(written(tmp_path, FILES[name][0]))
    write_config(tmp_path / "new" / "config.yaml", found)
    assert read_config(tmp_path / "new" / "config.yaml").items() >= found.items()


# what the file holds; what the message must name
MISTAKES: list[tuple[str, list[str]]] = [
    ("mixed_precison: bf16", ["'mixed_precison'", "config.yaml", "Did you mean 'mixed_precision'?"]),
    (
        "fsdp_config:\n  fsdp_shardin_strategy: 1",
        ["'fsdp_shardin_strategy'", "fsdp_config", "'fsdp_sharding_strategy'"],
    ),
    ("fsdp_version: 2", ["'fsdp_version'", "belongs under fsdp_config"]),
    ("fsdp_config: 3", ["fsdp_config", "int", "mapping"]),
    ("fsdp_config:\n  fsdp_min_num_params: many", ["fsdp_min_num_params", "'many'", "whole number"]),
    ("fsdp_config:\n  fsdp_offload_params: perhaps", ["fsdp_offload_params", "'perhaps'", "true or false"]),
    ("distributed_type: MULTI_GPPU", ["distributed_type", "'MULTI_GPPU'", "Did you mean 'multi_gpu'?"]),
    ("distributed_type: MULTI_GPU\nuse_cpu: true", ["MULTI_GPU", "use_cpu", "MULTI_CPU"]),
    ("compute_environment: AMAZON_SAGEMAKER", ["compute_environment", "SageMaker", "entry point"]),
    ("num_processes: [2]", ["num_processes", "[2]", "whole number"]),
    ("tpu_use_cluster: true", ["tpu_use_cluster", "on each of them"]),
    ("parallelism_config:\n  parallelism_config_sp_size: 2", ["parallelism_config_sp_size", "cp_size"]),
    ("megatron_lm_config:\n  megatron_lm_use_custom_fsdp: true", ["megatron_lm_use_custom_fsdp", "use_fsdp"]),
    ("fp8_config:\n  margin: 1\n  fp8_margin: 2", ["fp8_margin", "1", "2", "another key"]),
    ("- a list", ["config.yaml", "list", "mapping"]),
    ("a: [", ["config.yaml", "is not YAML"]),
    ("2024-99-99: 1", ["config.yaml", "is not YAML"]),
]


@pytest.mark.parametrize(("text", "named"), MISTAKES, ids=lambda value: value[:40] if isinstance(value, str) else "")
def test_a_mistake_in_a_file_names_the_key_and_the_file(tmp_path: Path, text: str, named: list[str]) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigurationError) as caught:
        read_config(path)
    for part in named:
        assert part in str(caught.value)


def test_a_file_that_is_not_there_is_named_with_its_neighbour(tmp_path: Path) -> None:
    (tmp_path / "fsdp.yaml").write_text("")
    with pytest.raises(ConfigurationError, match=r"no configuration file.*fsdb.yaml.*Did you mean .*fsdp.yaml"):
        read_config(tmp_path / "fsdb.yaml")


@pytest.mark.parametrize("name", ["a.yaml", "a.json"])
@pytest.mark.parametrize("kind", ["multiplied", "nested", "within itself"])
def test_a_file_that_stands_for_values_without_end_is_refused(tmp_path: Path, kind: str, name: str) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10)]
    texts = {"multiplied": "\n".join(lines), "nested": "[" * 50_000, "within itself": "num_processes: &a [*a]"}
    path = tmp_path / name
    path.write_text(texts[kind])
    with pytest.raises(ConfigurationError, match=f"{name} is not"):
        read_config(path)


def test_a_json_file_is_read_too(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"distributed_type": "FSDP", "num_processes": 2, "fsdp_config": {}}')
    assert read_config(tmp_path / "config.json") == {"num_processes": 2, "use_fsdp": True}


def test_every_key_that_is_written_is_one_of_accelerates(tmp_path: Path) -> None:
    config = config_of(settings_of(yaml.safe_load(FILES["FSDP 2 on a grid"][0]), "config.yaml"))
    assert config["distributed_type"] == "FSDP"
    assert config["fsdp_config"] == {"fsdp_version": 2, "fsdp_reshard_after_forward": True}
    assert config["parallelism_config"]["parallelism_config_tp_size"] == 2


@pytest.mark.parametrize(
    ("variables", "path"),
    [
        ({"DRIVETRAIN_CONFIG_FILE": "/a/b.yaml"}, "/a/b.yaml"),
        ({"XDG_CONFIG_HOME": "/x"}, "/x/drivetrain/default_config.yaml"),
        ({}, str(Path("~/.config/drivetrain/default_config.yaml").expanduser())),
    ],
)
def test_the_users_own_file_is_in_the_users_folder(variables: dict[str, str], path: str) -> None:
    assert str(default_config_file(variables)) == path


def test_a_wrong_stand_in_is_refused_by_the_flag_that_was_given() -> None:
    with pytest.raises(ConfigurationError, match=r"^--as is 'acclerate', but must be one of accelerate"):
        collect({"stand_in": "acclerate"}, {}, None)


def test_given_values_keep_where_they_came_from(tmp_path: Path) -> None:
    path = written(tmp_path, FILES["FSDP 1"][0])
    given = collect({"num_processes": 4}, {"DRIVETRAIN_MIXED_PRECISION": "bf16"}, str(path))
    assert given["num_processes"] == Given(4, "flag --num_processes")
    assert given["mixed_precision"] == Given("bf16", "environment DRIVETRAIN_MIXED_PRECISION")
    assert given["use_fsdp"] == Given(True, f"file {path}")
