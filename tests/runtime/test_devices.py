"""The registry of device kinds, and what a kind does with its module."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drivetrain import (
    ConfigurationError,
    DeviceKind,
    DeviceNotAvailableError,
    LaunchError,
    PartialState,
    Trainer,
    register_device,
)
from drivetrain.launch import notebook_launcher
from drivetrain.runtime import devices
from drivetrain.runtime.devices import get_device_kind, unregister_device
from drivetrain.runtime.seeds import RandomState
from tests.pool import ROOT
from tests.runtime.pretend import Pretend, pretend_device
from tests.simulated.devices import simulated as simulated

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


# packages that add devices

VENDORS = {
    "npu": "torch_npu",
    "mlu": "torch_mlu",
    "musa": "torch_musa",
    "sdaa": "torch_sdaa",
    "hpu": "habana_frameworks.torch",
}
VENDOR = """
import sys, types, torch
module = types.ModuleType("{name}")
module.is_available, module.device_count = lambda: True, lambda: 3
torch.{name} = module
"""
ASKS = """
import sys
from drivetrain import PartialState
from drivetrain.runtime.devices import get_device_kind

PartialState(cpu=True)
before = {package!r} in sys.modules
kind = get_device_kind({name!r})
print(before, {package!r} in sys.modules, kind.count())
"""


@pytest.mark.parametrize(("name", "package"), VENDORS.items())
def test_a_vendors_package_is_imported_when_its_kind_is_asked_for(name: str, package: str, tmp_path: Path) -> None:
    place = tmp_path.joinpath(*package.split("."))
    place.mkdir(parents=True)
    (place / "__init__.py").write_text(VENDOR.format(name=name))
    assert run_with(tmp_path, ASKS.format(name=name, package=package)).stdout.split() == ["False", "True", "3"]


def test_a_vendors_package_without_its_driver_is_named(tmp_path: Path) -> None:
    (tmp_path / "torch_npu.py").write_text("raise ImportError('libascendcl.so: cannot open shared object file')")
    script = """
from drivetrain import DeviceNotAvailableError
from drivetrain.runtime.devices import get_device_kind
try:
    get_device_kind("npu")
except DeviceNotAvailableError as error:
    print(error.message)
"""
    said = run_with(tmp_path, script).stdout
    assert "its package torch_npu cannot be imported: ImportError: libascendcl.so" in said


def run_with(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a process that finds the packages of a folder."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    return subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120, check=True
    )


def install(folder: Path, name: str, entry: str, module: str, code: str) -> None:
    """Install a distribution with one module and an entry point for a kind of device, as pip does it."""
    (folder / f"{module}.py").write_text(code)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[drivetrain.devices]\n{entry}\n")


CHIP = """
import torch
from drivetrain import DeviceKind
from drivetrain.runtime.devices import unregister_device
from tests.simulated import collectives, devices

def kind():
    devices.start(1)
    unregister_device("sim")  # nothing of the test's own is left: the entry point's kind is used
    return DeviceKind("sim", backend=collectives.BACKEND)
"""
TRAINS = """
import sys, torch
from torch.utils.data import DataLoader, TensorDataset
from drivetrain import Task, Trainer

class Learns(Task):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

trainer = Trainer(accelerator={device!r}, max_epochs=1, logger=False,
                  enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
task = Learns()
before = task.layer.weight.detach().clone()
trainer.fit(task, DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=2))
print("chip" in sys.modules, task.layer.weight.device, not torch.equal(before, task.layer.weight.cpu()))
"""


@pytest.mark.usefixtures("simulated")
def test_a_package_adds_its_device_by_an_entry_point(tmp_path: Path) -> None:
    install(tmp_path, "chip-for-drivetrain", "sim = chip:kind", "chip", CHIP)
    last = run_with(tmp_path, TRAINS.format(device="sim")).stdout.splitlines()[-1]
    assert last == "True sim:0 True"


def test_no_entry_point_is_loaded_for_a_known_kind(tmp_path: Path) -> None:
    install(tmp_path, "chip-for-drivetrain", "sim = chip:kind", "chip", "raise RuntimeError('loaded')")
    last = run_with(tmp_path, TRAINS.format(device="cpu")).stdout.splitlines()[-1]
    assert last == "False cpu True"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise RuntimeError('no driver')", "RuntimeError: no driver."),
        ("kind = lambda: 3", "TypeError: it is a int, not a DeviceKind."),
    ],
)
def test_a_broken_entry_point_is_named_and_others_are_used(code: str, said: str, tmp_path: Path) -> None:
    install(tmp_path, "broken-chip", "broken = broken_chip:kind", "broken_chip", code)
    good = "from tests.runtime.pretend import Pretend\nkind = Pretend()"
    install(tmp_path, "good-chip", "pretend = good_chip:kind", "good_chip", good)
    script = "from drivetrain.runtime.devices import get_device_kind\nprint(get_device_kind('pretend').count())"
    done = run_with(tmp_path, script)
    assert done.stdout.split() == ["2"]
    assert f"The kind of device 'broken' of broken-chip cannot be used: {said}" in done.stderr


DETECTS = """
import sys, warnings
import drivetrain
from drivetrain import Trainer

before = {package!r} in sys.modules
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    trainer = Trainer(devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False)
    print(before, trainer.strategy.topology.kind.name, {package!r} in sys.modules)
print(*(str(each.message) for each in seen if {package!r} in str(each.message)))
"""
ITS_DEVICE = """
import sys, types, torch
module = types.ModuleType("npu")
module.is_available, module.device_count, module.set_device = lambda: True, lambda: 3, lambda device: None
torch.utils.rename_privateuse1_backend("npu")
torch._register_device_module("npu", module)
"""


def test_an_installed_vendors_package_is_imported_to_detect_its_devices(tmp_path: Path) -> None:
    (tmp_path / "torch_npu.py").write_text(ITS_DEVICE)
    done = run_with(tmp_path, DETECTS.format(package="torch_npu"))
    assert done.stdout.split() == ["False", "npu", "True"]


def test_a_vendors_package_that_cannot_be_imported_leaves_the_cpu_and_a_warning(tmp_path: Path) -> None:
    (tmp_path / "torch_npu.py").write_text("raise ImportError('libascendcl.so: cannot open shared object file')")
    first, second = run_with(tmp_path, DETECTS.format(package="torch_npu")).stdout.splitlines()
    assert first.split() == ["False", "cpu", "False"]
    assert second.startswith("npu devices are not used: ")
    assert "its package torch_npu cannot be imported: ImportError: libascendcl.so" in second


# what each kind declares


def test_bfloat16_is_refused_where_mixed_precision_has_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    with pretend_device() as kind:
        assert kind.supports_bf16()
        kind.autocast_dtype = torch.float16
        assert not kind.supports_bf16()
        for precision in ("bf16-mixed", "bf16-true"):
            with pytest.raises(ConfigurationError, match="needs bfloat16, which this machine's pretend device does"):
                Trainer(accelerator="pretend", devices=1, precision=precision, logger=False)
        kind.module.is_bf16_supported = lambda: True  # type: ignore[attr-defined]
        assert kind.supports_bf16()  # what torch's module says of the device at hand counts more


def test_a_device_that_was_not_started_is_not_started_to_read_its_random_state() -> None:
    with pretend_device() as kind:
        assert "pretend" in RandomState.capture().devices
        kind.module.is_initialized = lambda: False  # type: ignore[attr-defined]
        assert "pretend" not in RandomState.capture().devices


def test_gpus_are_counted_without_starting_their_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def starts() -> bool:
        raise AssertionError("torch.cuda.is_available() starts the driver, so that no process may be forked")

    monkeypatch.setattr(torch.cuda, "is_available", starts)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: torch.device("cuda"))
    assert devices.detect_device_kind() is kind_of("cuda")
    assert get_device_kind("gpu").count() == 2
    assert "cuda" not in RandomState.capture().devices


# fork

KINDS_THAT_START = ["cuda", "xpu", "mps", *VENDORS]


@pytest.mark.parametrize("name", KINDS_THAT_START)
def test_a_started_device_is_named_where_a_process_is_to_be_forked(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = kind_of(name)
    started = SimpleNamespace(is_available=lambda: True, device_count=lambda: 2, is_initialized=lambda: True)
    monkeypatch.setattr(torch, name, started, raising=False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: SimpleNamespace(type=name))
    monkeypatch.delenv("DRIVETRAIN_USE_CPU", raising=False)
    said = "is already in use in this process" if kind.forks else "devices cannot be used in forked processes"
    with pytest.raises(LaunchError, match=f"^{name} {said}"):
        notebook_launcher(print, num_processes=2, start_method="fork")


def test_only_kinds_whose_driver_starts_when_they_are_counted_are_never_forked() -> None:
    kinds = set(devices._KINDS.values())
    assert {kind.name for kind in kinds if not kind.forks} == {"xpu", *(["cuda"] if torch.version.hip else [])}
