"""The XLA runtime: which torch_xla fits, what is missing, and when it can no longer start."""

from __future__ import annotations

import os
from importlib import metadata, util
from typing import Any

import pytest
import torch

from drivetrain import ConfigurationError, DeviceNotAvailableError
from drivetrain.runtime import xla
from drivetrain.runtime.devices import detect_device_kind, get_device_kind
from tests.pool import run_in_processes

ON_CPU = {"PJRT_DEVICE": "CPU", "DRIVETRAIN_USE_CPU": None, "TF_CPP_MIN_LOG_LEVEL": "2"}


@pytest.fixture
def without_torch_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(util, "find_spec", lambda name: None)
    monkeypatch.setattr(metadata, "version", absent)


@pytest.mark.parametrize("versions", [("2.9.0", "2.9.0"), ("2.9.1+cpu", "2.9.0"), ("2.10.0", "2.10.0rc1")])
def test_a_torch_xla_of_the_same_minor_version_fits(versions: tuple[str, str]) -> None:
    xla.check_pair(*versions)


@pytest.mark.parametrize("versions", [("2.13.0+cpu", "2.9.0"), ("2.9.0", "2.10.0"), ("2.1.0", "2.10.0")])
def test_a_torch_xla_of_another_torch_is_refused_with_the_pair_that_fits(versions: tuple[str, str]) -> None:
    torch_version, xla_version = versions
    minor = ".".join(xla_version.split(".")[:2])
    with pytest.raises(ConfigurationError) as caught:
        xla.check_pair(torch_version, xla_version)
    said = str(caught.value)
    assert f"torch_xla {xla_version} was built for torch {minor}, but torch {torch_version} is installed" in said
    assert f"pip install torch=={minor}.* torch_xla=={minor}.*" in said


@pytest.mark.usefixtures("without_torch_xla")
def test_without_torch_xla_the_error_has_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    with pytest.raises(DeviceNotAvailableError, match=r"torch_xla is not installed.*pip install \"drivetrain\[xla\]\""):
        get_device_kind("tpu")
    with pytest.raises(DeviceNotAvailableError, match=r"pip install \"drivetrain\[xla\]\""):
        xla.import_torch_xla()
    assert detect_device_kind().name != "xla"


def test_without_a_tpu_the_error_names_the_variable_that_asks_for_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    monkeypatch.setattr(util, "find_spec", lambda name: object() if name == "torch_xla" else None)
    with pytest.raises(DeviceNotAvailableError, match=r"'xla' was requested, but there is no TPU\. Set PJRT"):
        get_device_kind("xla")


def test_nothing_is_started_or_imported_by_asking() -> None:
    assert not xla.is_started()
    assert xla.device_count() == 1
    xla.wait()


def test_the_state_of_the_generator_is_the_number_that_it_is_seeded_with() -> None:
    number = 2**64 - 12345
    assert xla.seed_of(torch.tensor(list(number.to_bytes(8, "little")), dtype=torch.uint8)) == number


def backward_on_the_cpu_first() -> str:
    torch.ones(1, requires_grad=True).sum().backward()
    try:
        xla.start(spmd=False)
    except ConfigurationError as error:
        return str(error)
    return "started"


def start_and_compute() -> list[Any]:
    kind = detect_device_kind()
    before = xla.is_started()
    kind.manual_seed_all(11)
    kind.start(spmd=False)  # type: ignore[attr-defined]
    drawn = torch.rand(3, device=xla.device()).tolist()
    kind.manual_seed_all(11)
    value = torch.ones(2, device=xla.device(), requires_grad=True)
    (value * 3).sum().backward()
    again = torch.rand(3, device=xla.device()).tolist()
    return [kind.name, before, xla.is_started(), drawn == again, value.grad.tolist(), os.environ["PJRT_DEVICE"]]


@pytest.mark.xla
def test_a_runtime_that_starts_after_a_backward_on_the_cpu_is_refused_by_name() -> None:
    [said] = run_in_processes(backward_on_the_cpu_first, 1, env=ON_CPU, timeout=120)
    assert "backward() ran on the CPU in this process before its XLA device was first used" in said
    assert "restart the kernel" in said


@pytest.mark.xla
def test_a_seed_given_before_the_runtime_starts_holds_when_it_does() -> None:
    [seen] = run_in_processes(start_and_compute, 1, env=ON_CPU, timeout=120)
    assert seen == ["xla", False, True, True, [3.0, 3.0], "CPU"]
