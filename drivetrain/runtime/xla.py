"""This process's XLA runtime: whether it can be had, how it is started, and what its devices are.

`torch_xla` is imported only where an XLA device is asked for. Its runtime starts once in a process, with one device or,
under SPMD, with all of them as one; which of the two cannot be changed afterwards.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from contextlib import AbstractContextManager
from glob import glob
from importlib import metadata, util
from typing import Any

import torch

from drivetrain.runtime.errors import ConfigurationError, DeviceNotAvailableError

RUNTIME_VARIABLE = "PJRT_DEVICE"
"""Names what XLA runs on, such as `TPU` or `CPU`; torch_xla reads it."""

INSTALL = 'pip install "drivetrain[xla]"'


def why_absent() -> str:
    """Why this process cannot have XLA devices, and what to do."""
    if util.find_spec("torch_xla") is None:
        return f"torch_xla is not installed. Install it: {INSTALL}."
    return f"there is no TPU. Set {RUNTIME_VARIABLE}=CPU to run XLA on this machine's processor."


def import_torch_xla() -> Any:
    """The package `torch_xla`, for the torch that is installed."""
    try:
        found = metadata.version("torch_xla")
    except metadata.PackageNotFoundError:
        raise DeviceNotAvailableError(f"XLA devices need torch_xla, which is not installed: {INSTALL}.") from None
    check_pair(torch.__version__, found)
    if not os.environ.get(RUNTIME_VARIABLE) and not tpu_files():
        os.environ[RUNTIME_VARIABLE] = "CPU"  # what torch_xla takes by itself, with a warning
    return importlib.import_module("torch_xla")


def check_pair(torch_version: str, xla_version: str) -> None:
    """Refuse a torch_xla that was built for another torch: importing it would end in missing symbols."""
    ours, theirs = _minor(torch_version), _minor(xla_version)
    if ours != theirs:
        raise ConfigurationError(
            f"torch_xla {xla_version} was built for torch {theirs}, but torch {torch_version} is installed. Install a "
            f"pair: pip install torch=={theirs}.* torch_xla=={theirs}.* or, if it is released, "
            f"pip install torch_xla=={ours}.*",
        )


def is_started() -> bool:
    """Whether this process's XLA runtime runs already; starts and imports nothing."""
    package = sys.modules.get("torch_xla")
    return package is not None and bool(package._XLAC._xla_runtime_is_initialized())


def start(spmd: bool) -> None:
    """Start this process's XLA runtime; nothing where it runs like this already."""
    import_torch_xla()
    runtime = importlib.import_module("torch_xla.runtime")
    if is_started() and bool(runtime.is_spmd()) != spmd:
        now, asked = ("over all devices", "on one device") if not spmd else ("on one device", "over all devices")
        raise ConfigurationError(
            f"This process's XLA runtime runs {now} already and cannot run {asked} too. Use one way in a process: "
            "XLA(spmd=False) for one device, XLA() or XLAFSDP() for all.",
        )
    if not is_started():
        if spmd:
            runtime.use_spmd()
        # Starts the client. It must run before the first backward: torch's autograd makes its threads there, one for
        # each device that it sees, and none for XLA's that come later (torch 2.9).
        runtime.global_runtime_device_count()
    probe = torch.zeros(1, device=device(), requires_grad=True)
    try:
        probe.sum().backward()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        if "device_ready_queues_" not in str(error):
            raise
        raise ConfigurationError(
            "A backward ran on the CPU in this process before its XLA device was first used, so torch cannot run "
            "backwards on XLA here any more. Make the Accelerator or Trainer before anything calls backward(); in a "
            "notebook, restart the kernel.",
        ) from None


def device() -> torch.device:
    """This process's XLA device; under SPMD the one that stands for all."""
    found: torch.device = import_torch_xla().device()
    return found


def runs_on_cpu() -> bool:
    """Whether XLA compiles for the processor here, as in tests."""
    return os.environ.get(RUNTIME_VARIABLE, "").upper() == "CPU"


def device_count() -> int:
    """XLA devices of this machine; the runtime is not started for it."""
    if runs_on_cpu() or not tpu_files():
        given = os.environ.get("CPU_NUM_DEVICES", "1") if runs_on_cpu() else "1"
        return int(given) if given.isdigit() else 1
    import_torch_xla()
    return int(importlib.import_module("torch_xla._internal.tpu").num_available_devices())


def has_process_per_device() -> bool:
    """Whether a process can drive one device alone: not on the CPU, nor on TPUs v2 and v3, where it takes two cores."""
    if runs_on_cpu() or not tpu_files():
        return False
    import_torch_xla()
    tpu = importlib.import_module("torch_xla._internal.tpu")
    return int(tpu.num_available_chips()) == int(tpu.num_available_devices())


def sync(wait: bool = False) -> None:
    """Compile and run what has been recorded since the last call; the host does not wait for results."""
    import_torch_xla().sync(wait=wait)


def seed(value: int) -> None:
    """Seed the generator of the runtime, which must have been started."""
    _model().set_rng_state(value)


def rng_state() -> torch.Tensor:
    """The generator's state, eight bytes; the runtime must have been started."""
    state = int(_model().get_rng_state()) % 2**64
    return torch.tensor(list(state.to_bytes(8, "little")), dtype=torch.uint8)


def seed_of(state: torch.Tensor) -> int:
    """The number to seed the generator with to restore what `rng_state` returned."""
    return int.from_bytes(bytes(state.tolist()), "little")


def _model() -> Any:
    return importlib.import_module("torch_xla.core.xla_model")


def wait() -> None:
    """Wait until everything that was launched has run."""
    if is_started():
        _model().wait_device_ops()


def memory_info() -> dict[str, Any]:
    """What the runtime reports about this process's device, `bytes_used` among it."""
    info: dict[str, Any] = _model().get_memory_info(device())
    return info


def serve_profiles(port: int) -> Any:
    """Let TensorBoard capture profiles of this process."""
    import_torch_xla()
    return importlib.import_module("torch_xla.debug.profiler").start_server(port)


def trace(name: str, is_step: bool = False) -> AbstractContextManager[Any]:
    """A context whose body has a name in captured profiles."""
    profiler = importlib.import_module("torch_xla.debug.profiler")
    context: AbstractContextManager[Any] = (profiler.StepTrace if is_step else profiler.Trace)(name)
    return context


def _minor(version: str) -> str:
    found = re.match(r"\d+\.\d+", version)
    return found[0] if found else version


def tpu_files() -> list[str]:
    """The files through which a TPU is reached, where its driver library is installed."""
    files = glob("/dev/accel*") or glob("/dev/vfio/[0-9]*")
    return files if files and util.find_spec("libtpu") is not None else []
