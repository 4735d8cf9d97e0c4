"""Simulated devices in this process: `start` makes torch and drivetrain know `sim:0`, `sim:1` and so on.

A process can rename its spare backend once, so what uses them runs in processes of its own (see tests/pool.py):

    def uses_two_devices() -> None:
        sim = start(2, cap=10_000)
        torch.ones(1000, device="sim:1")
        assert sim.peak(1) == 4000

Kernels run on the CPU; what they would take on a device is kept in a simulated clock (see device.cpp).
"""

from __future__ import annotations

import ctypes
import os
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from drivetrain import DeviceKind, register_device
from tests.simulated import collectives
from tests.simulated.building import CannotBuild, library

LIBRARY = "DRIVETRAIN_TESTS_SIMULATED"
"""The variable that gives processes of a test session the library, so that none of them builds it."""


@pytest.fixture(scope="session")
def simulated() -> Iterator[Path]:
    """The built library; skips where it cannot be built, naming what is missing."""
    try:
        path = library()
    except CannotBuild as error:
        pytest.skip(str(error))
    os.environ[LIBRARY] = str(path)
    yield path
    os.environ.pop(LIBRARY, None)  # each module that uses this has it as a fixture of its own


class Copies(NamedTuple):
    """Copies since the clock was reset.

    Attributes:
        count: How many.
        bytes: Of how many bytes in all.
    """

    count: int
    bytes: int


class Simulated:
    """The simulated devices of this process.

    Args:
        native: The library.

    Attributes:
        synchronisations: For each time that the host waited for a device since the clock was reset, why and at which
            line of Python.
    """

    def __init__(self, native: Any) -> None:
        self._native = native
        self.selected = self.lost = False
        memory = ("cap", "used", "peak", "blocks", "most_blocks", "blocks_ever", "bytes_ever", "refused")
        for name in (*memory, "copies", "copied_bytes", "hazards", "kernels"):
            getattr(native, f"sim_{name}").restype = ctypes.c_int64
        for name in ("now", "stream_time"):
            getattr(native, f"sim_{name}").restype = ctypes.c_double
        self.synchronisations: list[str] = []
        self._observe = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(self._note)  # kept, since the library calls it
        native.sim_on_synchronise(self._observe)
        native.sim_hazard.restype = ctypes.c_char_p

    @property
    def count(self) -> int:
        """How many devices there are."""
        return int(self._native.sim_devices())

    def cap(self, device: int, bytes_at_most: int) -> None:
        """Let a device have no more than so many bytes; 0 for no limit."""
        self._native.sim_set_cap(device, ctypes.c_int64(bytes_at_most))

    def limit(self, device: int) -> int:
        """Bytes that a device has; 0 for no limit."""
        return int(self._native.sim_cap(device))

    def used(self, device: int) -> int:
        """Bytes of the tensors on a device."""
        return int(self._native.sim_used(device))

    def peak(self, device: int) -> int:
        """The most bytes of tensors that there have been on a device."""
        return int(self._native.sim_peak(device))

    def memory_stats(self, device: int) -> dict[str, int]:
        """The main values of `torch.cuda.memory_stats`. Memory is reserved only while it is allocated."""
        used, most = self.used(device), self.peak(device)
        blocks, most_blocks, ever, bytes_ever, refused = (
            int(getattr(self._native, f"sim_{name}")(device))
            for name in ("blocks", "most_blocks", "blocks_ever", "bytes_ever", "refused")
        )
        of_bytes = {"current": used, "peak": most, "allocated": bytes_ever, "freed": bytes_ever - used}
        of_blocks = {"current": blocks, "peak": most_blocks, "allocated": ever, "freed": ever - blocks}
        found = {
            f"{name}.all.{key}": value
            for name, values in (("allocation", of_blocks), ("segment", of_blocks), ("active", of_blocks))
            for key, value in values.items()
        }
        for name in ("allocated_bytes", "reserved_bytes", "active_bytes", "requested_bytes"):
            found |= {f"{name}.all.{key}": value for key, value in of_bytes.items()}
        return {**found, "num_alloc_retries": 0, "num_ooms": refused}

    @property
    def is_used(self) -> bool:
        """Whether this process has selected one of the devices, or had memory there."""
        used = self.selected or any(self._native.sim_blocks_ever(device) for device in range(self.count))
        return used and not self.lost

    def check_not_lost(self) -> None:
        """Raise an error in a process that was forked from one that used the devices, as CUDA does."""
        if self.lost:
            raise RuntimeError("Cannot re-initialize sim in forked subprocess")

    def after_fork(self) -> None:
        """Take the devices, with their memory, from a process that was forked from one that used them."""
        if self.is_used:
            self.lost = True
            for device in range(self.count):
                self.cap(device, 1)

    def select(self, device: int) -> None:
        """Make a device the current one."""
        self.check_not_lost()
        self.selected = True
        self._native.sim_set_device(device)

    def reset_peak(self, device: int) -> None:
        """Let the most count from here."""
        self._native.sim_reset_peak(device)

    @property
    def kernels(self) -> int:
        """Kernels launched since the clock was reset, copies within a device included."""
        return int(self._native.sim_kernels())

    def _note(self, what: bytes) -> None:
        self.synchronisations.append(f"{what.decode()} at {_caller()}")

    def seed(self, seed: int, device: int) -> None:
        """Seed the generator of a device."""
        self._native.sim_seed(device, ctypes.c_uint64(seed))

    def random_state(self, device: int) -> torch.Tensor:
        """The state of a device's generator."""
        self.check_not_lost()
        return torch.ops.sim.random_state(device)

    def stream_time(self, stream: torch.Stream) -> float:
        """Simulated seconds until the work that has been given to a stream ends."""
        return float(self._native.sim_stream_time(stream.device_index, ctypes.c_int64(stream.stream_id)))

    @property
    def to_device(self) -> Copies:
        """Copies from the CPU."""
        return self._copies(0)

    @property
    def to_host(self) -> Copies:
        """Copies to the CPU."""
        return self._copies(1)

    @property
    def between(self) -> Copies:
        """Copies from one device to another."""
        return self._copies(2)

    def _copies(self, direction: int) -> Copies:
        return Copies(
            int(self._native.sim_copies(direction)),
            int(self._native.sim_copied_bytes(direction)),
        )

    def reset_clock(self, to_device: float = 0, to_host: float = 0, between: float = 0, kernels: float = 0) -> None:
        """Start the clock and all counts again.

        Args:
            to_device: Bytes a second of copies from the CPU; 0 takes no time.
            to_host: The same for copies to the CPU.
            between: The same for copies from one device to another.
            kernels: Bytes a second that kernels read and write.
        """
        self.synchronisations.clear()
        self._native.sim_reset_clock(*map(ctypes.c_double, (to_device, to_host, between, kernels)))

    @property
    def now(self) -> float:
        """Simulated seconds that have passed on the host; synchronise first to wait for the devices."""
        return float(self._native.sim_now())

    def spend(self, seconds: float, device: int | None = None) -> None:
        """Let time pass: on the current stream of a device, as a kernel of so many seconds, or on the host."""
        if device is None:
            self._native.sim_spend_on_host(ctypes.c_double(seconds))
        else:
            self._native.sim_spend_on_device(device, ctypes.c_double(seconds))

    @property
    def hazards(self) -> list[str]:
        """What was read before it had arrived, overwritten while it was read, or freed while it was in use."""
        return [self._native.sim_hazard(ctypes.c_int64(n)).decode() for n in range(self._native.sim_hazards())]

    @contextmanager
    def capped(self, *bytes_at_most: int) -> Iterator[None]:
        """Limits for the devices, one after the other, during the body."""
        before = [self.limit(device) for device in range(self.count)]
        try:
            for device, most in enumerate(bytes_at_most):
                self.cap(device, most)
                self.reset_peak(device)
            yield
        finally:
            for device, most in enumerate(before):
                self.cap(device, most)


_started: list[Simulated] = []


def start(devices: int = 2, cap: int = 0) -> Simulated:
    """Give this process its simulated devices; called again, it returns those that there are.

    Args:
        devices: How many; decided by the first call.
        cap: Bytes that each of them has; 0 for no limit.
    """
    if not _started:
        path = os.environ.get(LIBRARY) or str(library())
        torch.ops.load_library(path)
        native = ctypes.CDLL(path)
        torch.utils.rename_privateuse1_backend("sim")
        native.sim_start(devices)
        sim = Simulated(native)
        torch._register_device_module("sim", _module(sim, native))
        torch.utils.generate_methods_for_privateuse1_backend()
        collectives.register()
        register_device(DeviceKind("sim", backend=collectives.BACKEND), replace=True)
        _started.append(sim)
        os.register_at_fork(after_in_child=sim.after_fork)
    for device in range(_started[0].count):
        _started[0].cap(device, cap)
        _started[0].reset_peak(device)
    return _started[0]


def started() -> Simulated:
    """The simulated devices that `start` has given this process, with their limits and counts as they are."""
    return _started[0]


def _module(sim: Simulated, native: Any) -> types.ModuleType:
    """What `torch.sim` has, as `torch.cuda` has it."""

    def index(device: Any = None) -> int:
        if device is None:
            return int(native.sim_current_device())
        if isinstance(device, int):
            return device
        found = torch.device(device).index
        return int(native.sim_current_device()) if found is None else found

    @contextmanager
    def on(device: Any) -> Iterator[None]:
        before = index()
        native.sim_set_device(index(device))
        try:
            yield
        finally:
            native.sim_set_device(before)

    module = types.ModuleType("sim")
    members: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: sim.is_used,
        "_is_in_bad_fork": lambda: sim.lost,
        "_lazy_init": lambda: None,  # without it torch 2.9 takes the devices for unused, and synchronises none
        "device_count": lambda: sim.count,
        "current_device": index,
        "set_device": lambda device: sim.select(index(device)),
        "device": on,
        "manual_seed": lambda seed: sim.seed(seed, index()),
        "manual_seed_all": lambda seed: [sim.seed(seed, device) for device in range(sim.count)] and None,
        "get_rng_state": lambda device=None: sim.random_state(index(device)),
        "set_rng_state": lambda state, device=None: torch.ops.sim.set_random_state(index(device), state),
        "get_device_name": lambda device=None: "simulated device",
        "empty_cache": lambda: None,
        "synchronize": lambda device=None: torch.accelerator.synchronize(torch.device("sim", index(device))),
        "Stream": lambda device=None, priority=0: torch.Stream(torch.device("sim", index(device)), priority=priority),
        "Event": lambda enable_timing=False: torch.Event("sim", enable_timing=enable_timing),
        "current_stream": lambda device=None: torch.accelerator.current_stream(torch.device("sim", index(device))),
        "stream": lambda stream: stream,
        "memory_allocated": lambda device=None: sim.used(index(device)),
        "memory_reserved": lambda device=None: sim.used(index(device)),
        "max_memory_allocated": lambda device=None: sim.peak(index(device)),
        "reset_peak_memory_stats": lambda device=None: sim.reset_peak(index(device)),
        "memory_stats": lambda device=None: sim.memory_stats(index(device)),
        "mem_get_info": lambda device=None: _free(sim, index(device)),
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
    }
    for name, member in members.items():
        setattr(module, name, member)
    return module


def _free(sim: Simulated, device: int) -> tuple[int, int]:
    limit = sim.limit(device) or 2**40
    return limit - sim.used(device), limit


def _caller() -> str:
    """The innermost line of Python that is not torch's, as file:line."""
    frame = sys._getframe(2)
    while frame.f_back is not None and (
        os.sep + "torch" + os.sep in frame.f_code.co_filename or "ctypes" in frame.f_code.co_filename
    ):
        frame = frame.f_back
    return f"{os.path.relpath(frame.f_code.co_filename)}:{frame.f_lineno}"
