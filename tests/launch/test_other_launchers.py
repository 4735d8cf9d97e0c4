"""A script of drivetrain's under `accelerate launch` and torchrun does what their variables ask for."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from drivetrain.launch.settings.sources import config_of, read_config, settings_of
from tests.launch.launching import clean_environment, write_script
from tests.launch.settings.test_file import FILES, TOP
from tests.pool import ROOT

pytestmark = [pytest.mark.compat, pytest.mark.timeout(300)]

SCRIPT = """
    import json
    import torch
    from drivetrain import Accelerator

    torch.manual_seed(0)
    accelerator = Accelerator()
    model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    for _ in range(3):
        loss = model(torch.ones(4, 8)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    strategy = accelerator.strategy
    if accelerator.is_main_process:
        options = getattr(strategy, "options", None)
        sharded = [type(each).__name__ for each in model.parameters()].count("DTensor")
        print(json.dumps({
            "strategy": strategy.name,
            "wrap": getattr(options, "wrap", None),
            "sharded": sharded,
            "precision": accelerator.mixed_precision,
            "processes": accelerator.num_processes,
            "compiled": model._compiled_call_impl is not None,
            "loss": loss.item(),
        }))
"""


def python() -> str:
    """A Python that has accelerate: this one, or that of the environment for comparisons."""
    others = [str(ROOT / name / "bin" / "python") for name in (".venv-compat", ".venv-bench")]
    if importlib.util.find_spec("accelerate") is not None:
        return sys.executable
    found = next((path for path in others if os.path.exists(path)), None)
    return found or pytest.skip("needs accelerate, here or in .venv-bench (made by `make bench`)")


def result(folder: Path, *command: str, **variables: str) -> dict[str, Any]:
    """What the script has printed when it was started by a command."""
    write_script(folder, SCRIPT)
    environment = clean_environment(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", **variables)
    ended = subprocess.run(
        [python(), *command, "script.py"], cwd=folder, env=environment, capture_output=True, text=True, timeout=240
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


ACCELERATE = ("-m", "accelerate.commands.launch")
SHARDED = {"strategy": "fsdp", "processes": 2, "sharded": 8}


@pytest.fixture(scope="module")
def loss(tmp_path_factory: pytest.TempPathFactory) -> float:
    """The last loss on one process."""
    return result(tmp_path_factory.mktemp("single"))["loss"]


def test_flags_of_accelerate_launch(tmp_path: Path, loss: float) -> None:
    flags = "--use_fsdp --num_processes 2 --fsdp_version 2 --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP"
    classes = "--fsdp_transformer_layer_cls_to_wrap Linear --mixed_precision no --main_process_port 0"
    found = result(tmp_path, *ACCELERATE, *flags.split(), *classes.split())
    assert found.items() >= {**SHARDED, "wrap": ["Linear"], "precision": "no"}.items()
    assert found["loss"] == pytest.approx(loss, abs=1e-6)


def test_a_file_of_accelerate_launch(tmp_path: Path) -> None:
    (tmp_path / "fsdp.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 2\n"
        "main_process_port: 0\nfsdp_config:\n  fsdp_version: 1\n  fsdp_reshard_after_forward: SHARD_GRAD_OP\n"
        "  fsdp_auto_wrap_policy: SIZE_BASED_WRAP\n  fsdp_min_num_params: 10\n"
    )
    there = result(tmp_path, *ACCELERATE, "--config_file", "fsdp.yaml")
    assert there.items() >= {**SHARDED, "wrap": 10, "precision": "bf16"}.items()
    here = result(tmp_path, "-m", "drivetrain", "launch", "--cpu", "--config_file", "fsdp.yaml")
    assert here == there


def test_variables_under_torchrun(tmp_path: Path, loss: float) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # --standalone would have the ranks meet at this machine's name, which need not resolve.
    meeting = ["--master_addr", "127.0.0.1", "--master_port", str(port)]
    torchrun = ["-m", "torch.distributed.run", "--nproc_per_node", "2", *meeting]
    variables = {"ACCELERATE_USE_FSDP": "true", "FSDP_TRANSFORMER_CLS_TO_WRAP": "Linear"}
    found = result(tmp_path, *torchrun, **variables)
    assert found.items() >= {**SHARDED, "wrap": ["Linear"]}.items()
    assert found["loss"] == pytest.approx(loss, abs=1e-6)
    assert result(tmp_path, *torchrun)["strategy"] == "ddp"


def test_compilation_of_accelerate_launch(tmp_path: Path, loss: float) -> None:
    found = result(tmp_path, *ACCELERATE, *["--cpu", "--num_processes", "1", "--dynamo_backend", "eager"])
    assert found.items() >= {"compiled": True, "processes": 1, "strategy": "single"}.items()
    assert found["loss"] == pytest.approx(loss, abs=1e-6)


READ_BY_ACCELERATE = """
import sys
from accelerate.commands.config.config_args import load_config_from_file
for path in sys.argv[1:]:
    config = load_config_from_file(path)
    print(config.distributed_type.value, config.num_processes)
"""


def test_accelerate_reads_what_is_written(tmp_path: Path) -> None:
    paths, expected = [], []
    for number, (text, _, _) in enumerate(FILES.values()):
        config = config_of(settings_of(yaml.safe_load(TOP) | yaml.safe_load(text), "config.yaml"))
        paths.append(tmp_path / f"{number}.yaml")
        paths[-1].write_text(yaml.safe_dump(config))
        expected.append(config["distributed_type"])
    ended = subprocess.run(
        [python(), "-c", READ_BY_ACCELERATE, *map(str, paths)], capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    assert [line.split()[0] for line in ended.stdout.splitlines()] == expected


FLAGS_OF_ACCELERATE = """
from accelerate.commands.launch import launch_command_parser
print(*(flag for action in launch_command_parser()._actions for flag in action.option_strings))
"""


def test_every_flag_of_accelerate_launch_is_taken() -> None:
    import click

    from drivetrain.cli.launch import launch

    ended = subprocess.run([python(), "-c", FLAGS_OF_ACCELERATE], capture_output=True, text=True, timeout=120)
    theirs = {flag.replace("-", "_") if flag.startswith("--") else flag for flag in ended.stdout.split()}
    ours = {flag for each in launch.params if isinstance(each, click.Option) for flag in each.opts} | {"-h", "--help"}
    assert len(theirs) > 100, ended.stderr
    assert theirs - {flag.replace("-", "_") if flag.startswith("--") else flag for flag in ours} == set()


WRITES_DEFAULT = """
import sys
from accelerate.commands.config.default import write_basic_config
write_basic_config(save_location=sys.argv[1])
"""


def test_what_accelerate_writes_is_read(tmp_path: Path) -> None:
    path = tmp_path / "theirs.yaml"
    subprocess.run([python(), "-c", WRITES_DEFAULT, str(path)], check=True, capture_output=True, timeout=120)
    assert read_config(path)["num_processes"] >= 1
