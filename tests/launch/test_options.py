from __future__ import annotations

from typing import Any

import pytest

from drivetrain import ConfigurationError, DeviceNotAvailableError, DrivetrainDeprecationWarning
from drivetrain.launch import LaunchOptions
from drivetrain.launch.launcher import LaunchPlan
from drivetrain.launch.options import MIXED_PRECISIONS
from drivetrain.runtime.devices import detect_device_kind

# what is given; what the message must say: the value, what is allowed, what to do
MISTAKES: list[tuple[dict[str, Any], list[str]]] = [
    ({"num_processes": 0}, ["num_processes is 0", "at least 1", "Omit it"]),
    ({"num_machines": 0}, ["num_machines is 0", "at least 1"]),
    ({"max_restarts": -1}, ["max_restarts is -1", "at least 0"]),
    ({"gradient_accumulation_steps": 0}, ["gradient_accumulation_steps is 0", "at least 1"]),
    ({"monitor_interval": 0.0}, ["monitor_interval is 0.0", "more than 0"]),
    ({"machine_rank": 1}, ["machine_rank is 1", "0 to 0", "a different rank"]),
    (
        {"machine_rank": 2, "num_machines": 2, "main_process_ip": "10.0.0.1"},
        ["machine_rank is 2", "num_machines=2", "0 to 1"],
    ),
    ({"num_machines": 2}, ["num_machines is 2", "main_process_ip", "address of machine 0"]),
    (
        {"num_machines": 2, "num_processes": 3, "main_process_ip": "10.0.0.1"},
        ["num_processes is 3", "2 machines", "multiple of 2"],
    ),
    ({"num_machines": "two"}, ["'two'", '"1:2"']),
    ({"num_machines": "0:2"}, ["0:2", "at least 1"]),
    ({"num_machines": "2:1"}, ["'2:1'", 'Use "1:2"']),
    ({"num_machines": "1:2"}, ["1:2", "main_process_ip"]),
    (
        {"num_machines": "1:2", "main_process_ip": "10.0.0.1", "rdzv_backend": "static"},
        ["'1:2'", "needs a fixed number", "Remove rdzv_backend"],
    ),
    (
        {"num_machines": "1:2", "main_process_ip": "10.0.0.1", "num_processes": 3},
        ["num_processes is 3", "2 machines", "multiple of 2"],
    ),
    ({"preemption_grace_period": 0}, ["preemption_grace_period is 0", "more than 0"]),
    ({"hang_timeout": -1.0}, ["hang_timeout is -1.0", "at least 0", "0 means no limit"]),
    ({"main_process_port": 70000}, ["70000", "0 to 65535", "remove main_process_port"]),
    ({"mixed_precision": "bf61"}, ["'bf61'", "fp16", "Did you mean 'bf16'?"]),
    ({"rdzv_backend": "c10"}, ["'c10'", "static", "Did you mean 'c10d'?"]),
    ({"rdzv_conf": "timeout"}, ["'timeout'", "key=value"]),
    ({"tee": "4"}, ["'4'", "3 (both)"]),
    ({"gpu_ids": "0,x"}, ["'0,x'", '"all"']),
    ({"gpu_ids": "0,0"}, ["'0,0'", "different"]),
    ({"gpu_ids": "0", "num_processes": 2}, ["names 1 device", "2 processes", "remove num_processes"]),
    ({"gpu_ids": "0", "cpu": True}, ["cpu and gpu_ids contradict"]),
    ({"multi_gpu": True, "cpu": True}, ["cpu and multi_gpu contradict"]),
    ({"launcher": "rai"}, ["'rai'", "elastic", "Did you mean 'ray'?"]),
    ({"launcher": "ray", "gpu_ids": "0"}, ["gpu_ids is '0'", "launcher='ray'", "Remove one of the two"]),
    ({"launcher": "ray", "log_dir": "logs"}, ["log_dir is 'logs'", "launcher='ray'"]),
    (
        {"launcher": "ray", "num_machines": 2, "main_process_ip": "10.0.0.1"},
        ["main_process_ip is '10.0.0.1'", "Ray selects"],
    ),
    ({"module": True, "no_python": True}, ["module and no_python contradict"]),
]


@pytest.mark.parametrize(
    ("given", "said"), MISTAKES, ids=lambda value: "-".join(value) if isinstance(value, dict) else ""
)
def test_a_mistake_says_what_was_given_what_is_allowed_and_what_to_do(given: dict[str, Any], said: list[str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        LaunchOptions(**given)
    for part in said:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("flag", "variable", "limit"),
    [(None, None, None), (None, "", None), (None, "90", 90.0), (60.0, "90", 60.0), (0.0, "90", 0.0), (None, "0", 0.0)],
)
def test_the_time_without_progress_is_the_flags_or_the_environments(
    flag: float | None, variable: str | None, limit: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DRIVETRAIN_HANG_TIMEOUT", raising=False)
    if variable is not None:
        monkeypatch.setenv("DRIVETRAIN_HANG_TIMEOUT", variable)
    assert LaunchOptions(hang_timeout=flag).hang_limit == limit


@pytest.mark.parametrize("variable", ["soon", "-1", "nan"])
def test_a_time_that_is_none_is_refused(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRIVETRAIN_HANG_TIMEOUT", variable)
    with pytest.raises(ConfigurationError, match=f"DRIVETRAIN_HANG_TIMEOUT is '{variable}', but must be"):
        _ = LaunchOptions().hang_limit


@pytest.mark.parametrize("given", [{"preload": "torch"}, {"no_preload": True}], ids=["preload", "no_preload"])
def test_options_of_preloading_warn_and_change_nothing(given: dict[str, Any]) -> None:
    with pytest.warns(DrivetrainDeprecationWarning, match=f"{next(iter(given))}=.* has no effect"):
        options = LaunchOptions(cpu=True, **given)
    assert options.variables == LaunchOptions(cpu=True).variables


def test_the_first_source_that_gives_an_option_counts() -> None:
    flags = {"num_processes": 2, "mixed_precision": None, "cpu": None}
    file = {"num_processes": 8, "mixed_precision": "bf16"}
    assert LaunchOptions.from_sources(flags, file) == LaunchOptions(num_processes=2, mixed_precision="bf16")


def test_an_unknown_option_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigurationError, match=r"'num_procs'.*Did you mean 'num_processes'"):
        LaunchOptions.from_sources({"num_procs": 2})


@pytest.mark.parametrize(
    ("gpu_ids", "ids"), [(None, None), ("all", None), ("2", ("2",)), ("0, 3", ("0", "3")), ("0,", ("0",))]
)
def test_gpu_ids_are_taken_apart(gpu_ids: str | None, ids: tuple[str, ...] | None) -> None:
    assert LaunchOptions(gpu_ids=gpu_ids).device_ids == ids


@pytest.mark.parametrize(
    ("given", "least", "most"),
    [(1, 1, 1), (2, 2, 2), ("2", 2, 2), ("1:4", 1, 4)],
)
def test_machines_may_come_and_go_where_a_range_is_given(given: int | str, least: int, most: int) -> None:
    options = LaunchOptions(num_machines=given, main_process_ip="10.0.0.1", num_processes=8, cpu=True)
    assert (options.min_machines, options.max_machines) == (least, most)
    assert LaunchPlan.make(options).local_processes == 8 // most


@pytest.mark.skipif(detect_device_kind().name != "cpu", reason="needs a machine without accelerator")
@pytest.mark.parametrize("given", [{"gpu_ids": "0"}, {"multi_gpu": True}], ids=["gpu_ids", "multi_gpu"])
def test_accelerators_asked_for_where_there_are_none_are_an_error(given: dict[str, Any]) -> None:
    with pytest.raises(DeviceNotAvailableError, match=f"{next(iter(given))}.*none on this machine.*run on the CPU"):
        LaunchPlan.make(LaunchOptions(**given))


def test_processes_share_the_cores_unless_the_user_said_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert LaunchPlan.make(LaunchOptions(cpu=True, num_processes=1024)).variables["OMP_NUM_THREADS"] == "1"
    told = LaunchOptions(cpu=True, num_processes=2, num_cpu_threads_per_process=3)
    assert LaunchPlan.make(told).variables["OMP_NUM_THREADS"] == "3"
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert "OMP_NUM_THREADS" not in LaunchPlan.make(LaunchOptions(cpu=True, num_processes=2)).variables


def test_one_process_on_the_cpu_is_the_default_and_keeps_torchs_own_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    plan = LaunchPlan.make(LaunchOptions(cpu=True))
    assert plan.local_processes == 1
    assert "OMP_NUM_THREADS" not in plan.variables


def test_every_precision_that_can_be_resolved_can_be_given_to_the_launcher() -> None:
    from drivetrain import available_precisions

    assert set(available_precisions()) <= set(MIXED_PRECISIONS)


def test_deepspeeds_file_must_exist_only_if_deepspeed_is_used() -> None:
    named = {"deepspeed_config_file": "no/such.json"}
    LaunchOptions(deepspeed_config=named).check_script(__file__)
    with pytest.raises(ConfigurationError, match=r"'no/such\.json'.*does not exist"):
        LaunchOptions(deepspeed_config=named, use_deepspeed=True).check_script(__file__)
