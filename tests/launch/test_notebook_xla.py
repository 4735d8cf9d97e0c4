"""Functions of a notebook where the devices are XLA's."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from drivetrain.launch import LaunchOptions, notebook_launcher
from drivetrain.launch.launcher import LaunchPlan
from drivetrain.runtime import xla
from tests.pool import run_in_processes

ENVIRONMENT = {
    "PJRT_DEVICE": "CPU",
    "CPU_NUM_DEVICES": "4",
    "DRIVETRAIN_USE_CPU": None,
    "RANK": None,
    "WORLD_SIZE": None,
    "TF_CPP_MIN_LOG_LEVEL": "2",
}


def said_by(make: Callable[[], Any]) -> str:
    try:
        make()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def launch_in_each_way() -> dict[str, Any]:
    seen: list[Any] = []

    def train(*args: Any) -> None:
        seen.append((*args, os.environ["DRIVETRAIN_MIXED_PRECISION"], os.getpid()))

    refused = {
        "four": said_by(lambda: notebook_launcher(train, num_processes=4)),
        "machines": said_by(lambda: notebook_launcher(train, num_nodes=2)),
        "plan": said_by(lambda: LaunchPlan.make(LaunchOptions(num_processes=4))),
    }
    notebook_launcher(train, ("a model",), mixed_precision="bf16")
    notebook_launcher(train, ("a model",), num_processes=1, mixed_precision="bf16")
    options = LaunchOptions(downcast_bf16=True)
    return {
        "refused": refused,
        "seen": [entry == ("a model", "bf16", os.getpid()) for entry in seen],
        "started": xla.is_started(),
        "planned": LaunchPlan.make(options).local_processes,
        "variables": LaunchPlan.make(options).variables,
    }


@pytest.fixture(scope="module")
def launched() -> dict[str, Any]:
    [seen] = run_in_processes(launch_in_each_way, 1, env=ENVIRONMENT, timeout=120)
    return seen


@pytest.mark.xla
def test_one_process_runs_the_function_here_and_starts_no_device(launched: dict[str, Any]) -> None:
    assert launched["seen"] == [True, True]
    assert not launched["started"]


@pytest.mark.xla
@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("four", "XLA on the CPU cannot connect several processes, so each would train alone"),
        ("machines", "num_nodes=2: on TPUs notebook_launcher supports one host only"),
        ("plan", "4 processes were requested on this machine, but"),
    ],
)
def test_processes_that_would_train_alone_are_refused(launched: dict[str, Any], what: str, said: str) -> None:
    assert launched["refused"][what].startswith("ConfigurationError: ")
    assert said in launched["refused"][what]


@pytest.mark.xla
def test_a_script_is_one_process_and_learns_that_floats_are_rounded(launched: dict[str, Any]) -> None:
    assert launched["planned"] == 1
    assert launched["variables"]["DRIVETRAIN_DOWNCAST_BF16"] == "1"
