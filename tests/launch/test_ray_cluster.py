"""What is refused before a Ray cluster is asked for anything."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from drivetrain import DeviceNotAvailableError, LaunchError
from drivetrain.launch import LaunchOptions
from drivetrain.launch.ray_launcher import connected, count_of_ranks


def test_without_ray_the_message_has_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with (
        pytest.raises(LaunchError, match=r'needs Ray.*pip install "drivetrain\[ray\]"'),
        connected(LaunchOptions(launcher="ray")),
    ):
        pass


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("ray://10.0.0.1:10001", "a machine of the cluster"),
        ("10.0.0.1", "must be HOST:PORT"),
        ("10.0.0.1:port", "must be HOST:PORT"),
    ],
)
def test_an_address_that_cannot_be_is_refused(address: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace())  # which is not asked
    with (
        pytest.raises(LaunchError, match=said) as caught,
        connected(LaunchOptions(launcher="ray", ray_address=address)),
    ):
        pass
    assert repr(address) in str(caught.value)


@pytest.mark.parametrize(
    ("options", "devices", "expected"),
    [
        ({}, 8, (8, True)),
        ({}, 0, (1, False)),
        ({"cpu": True}, 8, (1, False)),
        ({"num_processes": 3}, 8, (3, True)),
        ({"num_processes": 3, "cpu": True}, 8, (3, False)),
        ({"num_processes": 3, "multi_gpu": True}, 0, (3, True)),  # an autoscaler may add them
    ],
)
def test_there_is_one_process_a_gpu_unless_a_number_is_given(
    options: dict[str, object], devices: int, expected: tuple[int, bool]
) -> None:
    ray = SimpleNamespace(cluster_resources=lambda: {"CPU": 4.0, "GPU": float(devices)} if devices else {"CPU": 4.0})
    assert count_of_ranks(ray, LaunchOptions(launcher="ray", **options)) == expected  # type: ignore[arg-type]


def test_one_process_a_gpu_where_there_is_none_is_refused() -> None:
    ray = SimpleNamespace(cluster_resources=lambda: {"CPU": 4.0})
    with pytest.raises(DeviceNotAvailableError, match="num_processes"):
        count_of_ranks(ray, LaunchOptions(launcher="ray", multi_gpu=True))
