"""The commands of `accelerate` as functions: their parsers, and what they do with parsed arguments."""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from drivetrain.compat.accelerate.commands.config import BaseConfig, ClusterConfig, SageMakerConfig
from drivetrain.compat.accelerate.commands.config.config_args import load_config_from_file
from drivetrain.compat.accelerate.commands.env import env_command, env_command_parser
from drivetrain.compat.accelerate.commands.estimate import estimate_command, estimate_command_parser
from drivetrain.compat.accelerate.commands.launch import launch_command, launch_command_parser
from drivetrain.compat.accelerate.commands.test import test_command_parser as parser_of_test
from drivetrain.compat.accelerate.commands.to_fsdp2 import (
    convert_config_to_fsdp2,
    to_fsdp2_command,
    to_fsdp2_command_parser,
)
from drivetrain.compat.accelerate.commands.tpu import tpu_command_launcher, tpu_command_parser
from drivetrain.runtime.errors import ConfigurationError

FSDP1 = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_strategy": "FULL_SHARD", "fsdp_version": 1}}


# The launch.


@pytest.mark.parametrize("flag", ["--num_processes", "--num-processes"])
def test_flags_of_a_launch_have_underscores_or_hyphens(flag: str) -> None:
    args = launch_command_parser().parse_args(["--cpu", flag, "4", "train.py", "--lr", "0.1"])
    assert (args.num_processes, args.cpu, args.multi_gpu) == (4, True, False)
    assert (args.training_script, args.training_script_args) == ("train.py", ["--lr", "0.1"])


def test_help_shows_each_flag_once() -> None:
    shown = launch_command_parser().format_help()
    assert shown.count("--mixed_precision") >= 1
    assert "--mixed-precision" not in shown


def test_a_parser_may_be_one_of_several_subcommands() -> None:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers()
    for make in (launch_command_parser, env_command_parser, parser_of_test, tpu_command_parser):
        make(commands)
    assert parser.parse_args(["launch", "train.py"]).func is launch_command
    assert parser.parse_args(["env", "--config_file", "own.yaml"]).config_file == "own.yaml"


def test_a_launch_runs_the_script_with_its_arguments(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, sys\nprint(os.environ['WORLD_SIZE'], sys.argv[1:])\n")
    args = launch_command_parser().parse_args(["--cpu", "--num_processes", "1", str(script), "--lr", "0.1"])
    launch_command(args)
    assert "1 ['--lr', '0.1']" in capfd.readouterr().out


def test_a_script_that_fails_raises_with_its_exit_code(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit(3)\n")
    with pytest.raises(subprocess.CalledProcessError) as caught:
        launch_command(launch_command_parser().parse_args(["--cpu", "--num_processes", "1", str(script)]))
    assert caught.value.returncode == 3


def test_a_launch_refuses_a_file_with_unknown_keys(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("num_processes: 1\nnum_procesess: 2\n")
    args = launch_command_parser().parse_args(["--config_file", str(tmp_path / "own.yaml"), __file__])
    with pytest.raises(ConfigurationError, match="num_procesess"):
        launch_command(args)


# The configuration file.


@pytest.mark.parametrize(("write", "read"), [("to_yaml_file", "from_yaml_file"), ("to_json_file", "from_json_file")])
def test_a_configuration_is_read_as_it_was_written(tmp_path: Path, write: str, read: str) -> None:
    config = ClusterConfig(num_processes=2, mixed_precision="bf16", fsdp_config={"fsdp_version": 2})
    getattr(config, write)(tmp_path / "own")
    found = getattr(ClusterConfig, read)(tmp_path / "own")
    assert found.to_dict() == config.to_dict()
    assert (found.num_processes, found.fsdp_config, found.machine_rank) == (2, {"fsdp_version": 2}, 0)


def test_configurations_share_no_tables() -> None:
    first, second = ClusterConfig(), ClusterConfig()
    first.fsdp_config["fsdp_version"] = 2
    assert second.fsdp_config == {}


@pytest.mark.parametrize(
    ("environment", "kind"), [("LOCAL_MACHINE", ClusterConfig), ("AMAZON_SAGEMAKER", SageMakerConfig)]
)
def test_the_file_says_the_kind_of_its_configuration(tmp_path: Path, environment: str, kind: type[BaseConfig]) -> None:
    (tmp_path / "own.yaml").write_text(f"compute_environment: {environment}\nmixed_precision: fp16\n")
    found = load_config_from_file(tmp_path / "own.yaml")
    assert type(found) is kind
    assert found.to_dict()["mixed_precision"] == "fp16"


def test_a_file_with_unknown_keys_is_no_configuration(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("num_procesess: 2\n")
    with pytest.raises(ConfigurationError, match="num_procesess"):
        load_config_from_file(tmp_path / "own.yaml")


# FSDP 1 to FSDP 2.


def converted(tmp_path: Path, *flags: str) -> None:
    source = tmp_path / "own.yaml"
    source.write_text(yaml.safe_dump(FSDP1))
    to_fsdp2_command(to_fsdp2_command_parser().parse_args(["--config_file", str(source), *flags]))


def test_a_file_is_converted_to_fsdp2(tmp_path: Path) -> None:
    converted(tmp_path, "--output_file", str(tmp_path / "new.yaml"))
    found = yaml.safe_load((tmp_path / "new.yaml").read_text())
    assert found == convert_config_to_fsdp2(FSDP1)
    assert found["fsdp_config"] == {"fsdp_version": 2, "fsdp_reshard_after_forward": True}


def test_a_file_is_converted_in_its_place_only_when_asked(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="--overwrite"):
        converted(tmp_path)
    assert yaml.safe_load((tmp_path / "own.yaml").read_text()) == FSDP1
    converted(tmp_path, "--overwrite")
    assert yaml.safe_load((tmp_path / "own.yaml").read_text())["fsdp_config"]["fsdp_version"] == 2


def test_an_existing_file_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "new.yaml").write_text("kept: 1\n")
    with pytest.raises(FileExistsError):
        converted(tmp_path, "--output_file", str(tmp_path / "new.yaml"))
    assert (tmp_path / "new.yaml").read_text() == "kept: 1\n"


def test_a_file_of_fsdp2_stays_as_it_is() -> None:
    config: dict[str, Any] = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}}
    assert convert_config_to_fsdp2(config) == config


# The others.


def test_memory_is_estimated_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", "vocab_size": 10, **sizes}))
    words = [str(tmp_path / "config.json"), "--dtypes", "float32", "float16"]
    estimate_command(estimate_command_parser().parse_args(words))
    shown = capsys.readouterr().out
    assert "float32" in shown
    assert "float16" in shown
    assert "int4" not in shown


def test_the_command_for_a_tpu_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--tpu_name", "pod", "--tpu_zone", "zone", "--command", "ls", "--command", "pwd", "--debug"]
    tpu_command_launcher(tpu_command_parser().parse_args(words))
    shown = capsys.readouterr().out
    assert "gcloud compute tpus tpu-vm ssh pod --zone zone --command cd /usr/share; ls; pwd --worker all" in shown


def test_versions_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    env_command(env_command_parser().parse_args([]))
    assert "torch" in capsys.readouterr().out.lower()
