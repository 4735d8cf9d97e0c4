"""`drivetrain config`: what it asks, writes and shows."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from drivetrain.cli.config import Questionnaire
from drivetrain.launch.options import SETTINGS
from drivetrain.launch.settings.sources import read_config, write_config
from tests.launch.launching import clean_environment, run


class Scripted:
    """Answers questions by what they begin with; else with their default.

    Args:
        answers: The answer to each question, by its beginning.
    """

    def __init__(self, answers: dict[str, Any]) -> None:
        self.answers = answers
        self.asked: list[str] = []

    def choose(self, question: str, choices: Sequence[str], default: str) -> str:
        answer = self._answer(question, default)
        assert answer in choices
        return str(answer)

    def confirm(self, question: str, default: bool) -> bool:
        return bool(self._answer(question, default))

    def enter(self, question: str, name: str, default: str) -> Any:
        return SETTINGS[name].parse(self._answer(question, default) or None, name)

    def _answer(self, question: str, default: Any) -> Any:
        self.asked.append(question)
        return next((self.answers[key] for key in self.answers if question.startswith(key)), default)


CPUS = {"What should the script run on": "several processes on the CPU", "How many processes, over": "2"}
GPUS = {"What should the script run on": "several accelerators", "How many processes, over": "4"}
# answers; settings that must be in the file
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "all by default": ({}, {"num_processes": 1, "mixed_precision": "no"}),
    "FSDP on a grid": (
        {
            **GPUS,
            "How is the model distributed": "FSDP",
            "Class names of layers": "Block",
            "Use a device mesh": True,
            "Tensor-parallel size": "2",
            "Context-parallel size": "2",
        },
        {
            "use_fsdp": True,
            "fsdp_version": "2",
            "fsdp_transformer_layer_cls_to_wrap": ["Block"],
            "use_parallelism_config": True,
            "parallelism_config_tp_size": 2,
            "parallelism_config_cp_comm_strategy": "allgather",
        },
    ),
    "DeepSpeed": (
        {
            **CPUS,
            "How is the model distributed": "DeepSpeed",
            "Which ZeRO stage": "3",
            "Where to offload parameters": "nvme",
            "Clip gradients": True,
            "How many micro-batches": "4",
        },
        {
            "use_deepspeed": True,
            "cpu": True,
            "zero_stage": "3",
            "offload_param_nvme_path": "/local_nvme",
            "gradient_clipping": 1.0,
            "gradient_accumulation_steps": 4,
        },
    ),
    "DeepSpeed with a JSON": (
        {
            **CPUS,
            "How is the model distributed": "DeepSpeed",
            "Do you have a DeepSpeed JSON": True,
            "Path of the file": "ds.json",
        },
        {"deepspeed_config_file": "ds.json"},
    ),
    "Megatron": (
        {**GPUS, "How is the model distributed": "Megatron", "How many pipeline stages": "2"},
        {"use_megatron_lm": True, "megatron_lm_pp_degree": 2, "megatron_lm_num_micro_batches": 1},
    ),
    "several machines": (
        {**GPUS, "How many machines": "2", "What is the address": "10.0.0.1"},
        {"num_machines": "2", "main_process_ip": "10.0.0.1", "main_process_port": 29500},
    ),
    "mpirun": ({**CPUS, "Start the processes with mpirun": True}, {"mpirun_hostfile": "~/hostfile"}),
    "fp8 and compilation": (
        {
            "Which mixed precision": "fp8",
            "Which library": "te",
            "Compile models": True,
            "Choose its mode": True,
            "Which mode": "max-autotune",
        },
        {"mixed_precision": "fp8", "fp8_backend": "te", "dynamo_backend": "inductor", "dynamo_mode": "max-autotune"},
    ),
    "a TPU": (
        {"What should the script run on": "a TPU", "Which mixed precision": "bf16", "Round float32": True},
        {"tpu": True, "downcast_bf16": True},
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_answers_are_written_and_read_back(tmp_path: Path, name: str) -> None:
    answers, expected = RUNS[name]
    terminal = Scripted(answers)
    values = Questionnaire(terminal).ask()
    assert all(any(question.startswith(key) for question in terminal.asked) for key in answers)
    write_config(tmp_path / "config.yaml", values)
    found = read_config(tmp_path / "config.yaml")
    assert {key: found.get(key) for key in expected} == expected


def test_default_update_and_show(tmp_path: Path) -> None:
    home = {"XDG_CONFIG_HOME": str(tmp_path), "DRIVETRAIN_MIXED_PRECISION": "bf16"}
    path = tmp_path / "drivetrain" / "default_config.yaml"
    first = run("-m", "drivetrain", "config", "default", cwd=tmp_path, **home)
    assert (first.code, path.is_file()) == (0, True), first.err
    again = run("-m", "drivetrain", "config", "default", cwd=tmp_path, **home)
    assert (again.code, "--overwrite" in again.err) == (2, True)
    path.write_text("distributed_type: FSDP\nfp16: true\nfsdp_config:\n  min_num_params: 7\n")
    assert run("-m", "drivetrain", "config", "update", cwd=tmp_path, **home).code == 0
    assert "mixed_precision: fp16" in path.read_text()
    assert "  fsdp_min_num_params: 7" in path.read_text()
    shown = run("-m", "drivetrain", "config", "show", "--num-processes", "3", cwd=tmp_path, **home).out
    rows = {line.split("  ")[0]: line.split() for line in shown.splitlines()}
    assert rows["num_processes"][1:] == ["3", "flag", "--num_processes"]
    assert rows["mixed_precision"][1:] == ["bf16", "environment", "DRIVETRAIN_MIXED_PRECISION"]
    assert rows["fsdp_min_num_params"][1:] == ["7", "file", str(path)]
    assert rows["max_restarts"][1:] == ["0", "default"]


def test_questions_need_a_terminal(tmp_path: Path) -> None:
    ended = run("-m", "drivetrain", "config", cwd=tmp_path)
    assert (ended.code, "Traceback" in ended.err) == (2, False)
    assert "needs a terminal" in ended.err
    assert "drivetrain config default" in ended.err


def test_the_questions_can_be_answered_in_a_terminal(tmp_path: Path) -> None:
    pytest.importorskip("questionary", reason="needs questionary")
    ours, theirs = pty.openpty()
    variables = clean_environment(XDG_CONFIG_HOME=str(tmp_path), TERM="xterm")
    command = [sys.executable, "-m", "drivetrain", "config"]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=variables) as process:
        os.close(theirs)
        screen, end = b"", time.monotonic() + 60
        while process.poll() is None and time.monotonic() < end:
            if select.select([ours], [], [], 0.3)[0]:
                try:
                    screen += os.read(ours, 65536)
                except OSError:
                    break
            else:
                os.write(ours, b"\r")  # takes the default of the question that is shown
        process.kill()
    assert b"What should the script run on?" in screen
    assert read_config(tmp_path / "drivetrain" / "default_config.yaml")["num_processes"] == 1
