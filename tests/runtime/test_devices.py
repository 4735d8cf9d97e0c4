"""The registry of device kinds, and what a kind does with its module."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from drivetrain import ConfigurationError, DeviceKind, DeviceNotAvailableError, PartialState, register_device
from drivetrain.runtime import devices
from drivetrain.runtime.devices import get_device_kind, unregister_device
from tests.runtime.pretend import Pretend, pretend_device

BACKENDS = {
    "cpu": "gloo",
    "cuda": "nccl",
    "mps": "gloo",
    "xpu": "xccl",
    "npu": "hccl",
    "mlu": "cncl",
    "musa": "mccl",
    "sdaa": "tccl",
    "hpu": "hccl",
}


def kind_of(name: str) -> DeviceKind:
    return devices._KINDS[name]


@pytest.mark.parametrize(("name", "backend"), BACKENDS.items())
def test_every_kind_has_its_backend(name: str, backend: str) -> None:
    assert kind_of(name).name == name
    assert kind_of(name).backend == backend


@pytest.mark.parametrize("name", BACKENDS)
def test_a_kind_that_is_absent_answers_instead_of_failing(name: str) -> None:
    kind = kind_of(name)
    if kind.is_available():
        assert kind.count() >= 1
    else:
        assert kind.count() == 0
        with pytest.raises(DeviceNotAvailableError, match=f"'{name}' was requested.*Available here: .*cpu"):
            get_device_kind(name)


@pytest.mark.parametrize("name", ["cpu", "CPU", "cpu:0"])
def test_a_kind_is_found_by_its_name(name: str) -> None:
    assert get_device_kind(name).name == "cpu"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cdua", r"Unknown device 'cdua'\. Known: cpu, cuda.*Did you mean 'cuda'\?.*register_device"),
        ("quantum", r"Unknown device 'quantum'\. Known: .*xpu\. Use drivetrain"),
        ("", "Unknown device ''"),
    ],
)
def test_an_unknown_name_is_refused_with_the_known_ones(name: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        get_device_kind(name)


def test_the_cpu_is_always_there_and_listed_last() -> None:
    with pretend_device():
        names = [kind.name for kind in devices.available_device_kinds()]
    assert "pretend" in names
    assert names[-1] == "cpu"
    assert devices.detect_device_kind() in devices.available_device_kinds()


def test_a_registered_kind_has_its_name_and_aliases_until_it_is_removed() -> None:
    with pretend_device() as kind:
        assert get_device_kind("pretend") is kind
        assert get_device_kind("makebelieve") is kind
        assert devices.available_device_kinds().count(kind) == 1
    for name in ("pretend", "makebelieve"):
        with pytest.raises(ConfigurationError, match=f"Unknown device '{name}'"):
            get_device_kind(name)


def test_a_name_is_taken_only_on_purpose() -> None:
    with pretend_device() as first:
        with pytest.raises(ConfigurationError, match=r"'pretend' is already registered.*replace=True"):
            register_device(Pretend())
        assert get_device_kind("pretend") is first
        second = Pretend()
        second.aliases = ("fantasy",)
        register_device(second, replace=True)
        assert get_device_kind("pretend") is get_device_kind("fantasy") is second
        with pytest.raises(ConfigurationError, match="Unknown device 'makebelieve'"):
            get_device_kind("makebelieve")


def test_taking_an_alias_on_purpose_leaves_the_kind_that_had_it() -> None:
    with pretend_device() as kind:
        register_device(DeviceKind("thief", backend="gloo", aliases=("makebelieve",)), replace=True)
        try:
            assert get_device_kind("pretend") is kind
            assert kind_of("makebelieve").name == "thief"
        finally:
            unregister_device("thief")


def test_a_clash_of_an_alias_registers_nothing() -> None:
    with pytest.raises(ConfigurationError, match="'gpu' is already registered"):
        register_device(DeviceKind("unheard_of", backend="gloo", aliases=("gpu",)))
    with pytest.raises(ConfigurationError, match="Unknown device 'unheard_of'"):
        get_device_kind("unheard_of")
    assert kind_of("gpu") is kind_of("cuda")


def test_removing_by_an_alias_removes_the_kind() -> None:
    register_device(Pretend())
    unregister_device("makebelieve")
    with pytest.raises(ConfigurationError, match="Unknown device 'pretend'"):
        get_device_kind("pretend")


def test_a_kind_asks_its_module() -> None:
    kind = Pretend(count=3)
    device = kind.device(1)
    kind.set_device(device)
    kind.synchronize()
    kind.synchronize(device)
    kind.empty_cache()
    kind.manual_seed_all(5)
    kind.set_rng_state(torch.tensor([9], dtype=torch.uint8))
    assert kind.module.calls == [
        ("set_device", device),
        ("synchronize", None),
        ("synchronize", device),
        ("empty_cache",),
        ("manual_seed_all", 5),
    ]
    state = kind.get_rng_state()
    assert state is not None
    assert state.tolist() == [9]
    assert kind.count() == 3
    assert repr(kind) == "Pretend('pretend', backend='gloo')"


@pytest.mark.parametrize("kind", [kind_of("cpu"), Pretend(), DeviceKind("not_in_torch", "gloo")], ids=repr)
def test_a_kind_without_streams_runs_in_order(kind: DeviceKind) -> None:
    assert not kind.supports_streams
    assert not kind.pins_memory
    assert kind.make_stream() is None
    assert kind.current_stream() is None
    with kind.stream_context(None) as stream:
        assert stream is None


class Streaming(Pretend):
    """A pretend device with streams."""

    def __init__(self) -> None:
        super().__init__()
        self.module.Stream = lambda device=None: f"stream on {device}"  # type: ignore[attr-defined]
        self.module.current_stream = lambda: "current"  # type: ignore[attr-defined]
        self.module.stream = contextlib.nullcontext  # type: ignore[attr-defined]


def test_a_kind_with_streams_makes_and_enters_them() -> None:
    kind = Streaming()
    assert kind.supports_streams
    assert kind.pins_memory
    assert kind.current_stream() == "current"
    assert kind.make_stream(torch.device("cpu")) == "stream on cpu"
    with kind.stream_context(kind.make_stream()) as entered:
        assert entered == "stream on None"


def test_a_module_without_a_function_is_not_asked() -> None:
    """Torch's modules for devices differ in what they have; a third party's may be smaller still."""
    kind = DeviceKind("not_in_torch", backend="gloo")
    assert kind.module is None
    kind.set_device(torch.device("cpu"))
    kind.synchronize()
    kind.empty_cache()
    kind.manual_seed_all(1)
    kind.set_rng_state(torch.zeros(1))
    assert kind.get_rng_state() is None
    assert not kind.is_available()
    assert kind.supports_bf16()


def test_the_host_is_one_device_for_all_ranks() -> None:
    cpu = kind_of("cpu")
    assert {cpu.device(index) for index in range(3)} == {torch.device("cpu")}
    assert cpu.count() == 1
    assert cpu.autocast_type == "cpu"
    assert cpu.get_rng_state() is None


def test_the_accelerator_of_torch_is_detected_if_it_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    class Accelerator:
        type = "pretend"

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: Accelerator())
    assert devices.detect_device_kind().name == "cpu"
    with pretend_device() as kind:
        assert devices.detect_device_kind() is kind
        state: Any = PartialState()
        assert state.kind is kind
