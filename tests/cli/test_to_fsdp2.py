"""A configuration of FSDP 1 means the same as one of FSDP 2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from drivetrain import FSDP, ConfigurationError
from tests.commands import drivetrain

OLD = {
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_backward_prefetch": "BACKWARD_PRE",
    "fsdp_cpu_ram_efficient_loading": True,
    "fsdp_forward_prefetch": False,
    "fsdp_offload_params": False,
    "fsdp_sharding_strategy": "FULL_SHARD",
    "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    "fsdp_sync_module_states": True,
    "fsdp_transformer_layer_cls_to_wrap": "Block",
    "fsdp_use_orig_params": True,
}


def config(**changed: Any) -> dict[str, Any]:
    fsdp = {key: value for key, value in {**OLD, **changed}.items() if value is not None}
    return {"distributed_type": "FSDP", "num_machines": 2, "num_processes": 8, "fsdp_config": fsdp}


def convert_file(folder: Path, *arguments: str, content: Any = None) -> Any:
    source = folder / "old.yaml"
    source.write_text(yaml.safe_dump(config() if content is None else content))
    return drivetrain("to-fsdp2", "--config_file", source, *arguments)


def converted(folder: Path, **changed: Any) -> tuple[Any, str]:
    """What a changed configuration becomes, and what is printed."""
    printed = convert_file(folder, "--overwrite", content=config(**changed)).output
    return yaml.safe_load((folder / "old.yaml").read_text()), printed


def test_a_file_is_converted_and_each_change_is_listed(tmp_path: Path) -> None:
    target = tmp_path / "new.yaml"
    ended = convert_file(tmp_path, "--output-file", str(target))
    new = yaml.safe_load(target.read_text())
    assert new["fsdp_config"] == {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_offload_params": False,
        "fsdp_reshard_after_forward": True,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_transformer_layer_cls_to_wrap": "Block",
    }
    assert new | {"fsdp_config": None} == config() | {"fsdp_config": None}
    for key in ("fsdp_backward_prefetch", "fsdp_use_orig_params", "fsdp_sync_module_states", "fsdp_forward_prefetch"):
        assert f"{key}: left out" in ended.output
    assert FSDP.from_config(new["fsdp_config"]).options.wrap == ["Block"]


@pytest.mark.parametrize(
    ("key", "value", "reshards"),
    [
        ("fsdp_sharding_strategy", "SHARD_GRAD_OP", False),
        ("fsdp_sharding_strategy", 1, True),
        ("fsdp_sharding_strategy", "2", False),
        ("fsdp_reshard_after_forward", "FULL_SHARD", True),
        ("fsdp_reshard_after_forward", "SHARD_GRAD_OP", False),
        ("fsdp_reshard_after_forward", True, True),
        ("fsdp_reshard_after_forward", "false", False),
    ],
)
def test_how_much_is_sharded_is_kept(key: str, value: Any, reshards: bool, tmp_path: Path) -> None:
    new, _ = converted(tmp_path, **{"fsdp_sharding_strategy": None, key: value})
    assert new["fsdp_config"]["fsdp_reshard_after_forward"] is reshards
    assert "fsdp_sharding_strategy" not in new["fsdp_config"]


def test_hybrid_sharding_becomes_a_mesh_of_machines(tmp_path: Path) -> None:
    new, printed = converted(tmp_path, fsdp_sharding_strategy="HYBRID_SHARD")
    assert new["parallelism_config"] == {
        "parallelism_config_dp_replicate_size": 2,
        "parallelism_config_dp_shard_size": 4,
    }
    assert "replicates between machines" in printed


def test_what_shards_nothing_becomes_plain_data_parallelism(tmp_path: Path) -> None:
    new, _ = converted(tmp_path, fsdp_sharding_strategy="NO_SHARD")
    assert new["distributed_type"] == "MULTI_GPU"
    assert "fsdp_config" not in new


def test_a_file_is_replaced_only_when_asked(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="--output_file"):
        convert_file(tmp_path)
    target = tmp_path / "new.yaml"
    target.write_text("kept: true")
    with pytest.raises(ConfigurationError, match="already exists"):
        convert_file(tmp_path, "--output_file", str(target))
    assert target.read_text() == "kept: true"
    convert_file(tmp_path, "--overwrite")
    assert yaml.safe_load((tmp_path / "old.yaml").read_text())["fsdp_config"]["fsdp_version"] == 2


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ({"distributed_type": "FSDP"}, "no fsdp_config"),
        (config(fsdp_version=2), "fsdp_version is already 2"),
        (config(fsdp_sharding_strategy="ALL_SHARD"), "FULL_SHARD"),
        ([1], "no settings"),
    ],
)
def test_what_cannot_be_converted_is_refused_by_name(tmp_path: Path, content: Any, named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        convert_file(tmp_path, "--overwrite", content=content)
