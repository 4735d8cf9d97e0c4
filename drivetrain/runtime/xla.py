"""XLA runtime of this process: availability, start, devices and random state.

`torch_xla` is imported only if an XLA device is requested. Its runtime starts once per process, with one device or,
under SPMD, with all devices as one. This choice cannot be changed afterwards.
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
"""Environment variable that selects torch_xla's platform, such as `TPU` or `CPU`."""

INSTALL = 'pip install "drivetrain[xla]"'


def why_absent() -> str:
    if util.find_spec("torch_xla") is None:
        return f"torch_xla is not installed. Install it: {INSTALL}."
    return f"there is no TPU. Set {RUNTIME_VARIABLE}=CPU to run XLA on this machine's processor."


def import_torch_xla() -> Any:
    """Import `torch_xla`, after checking that it suits the installed torch."""
    try:
        found = metadata.version("torch_xla")
    except metadata.PackageNotFoundError:
        raise DeviceNotAvailableError(f"XLA devices need torch_xla, which is not installed: {INSTALL}.") from None
    check_pair(torch.__version__, found)
    if not os.environ.get(RUNTIME_VARIABLE) and not tpu_files():
        os.environ[RUNTIME_VARIABLE] = "CPU"  # torch_xla's own default, but without its warning
    return importlib.import_module("torch_xla")


def check_pair(torch_version: str, xla_version: str) -> None:
    """Raise an error if torch_xla was built for another version of torch."""
    # A mismatch would otherwise surface as an undefined symbol while torch_xla is imported.
    ours, theirs = _minor(torch_version), _minor(xla_version)
    if ours != theirs:
        raise ConfigurationError(
            f"torch_xla {xla_version} was built for torch {theirs}, but torch {torch_version} is installed. Install a "
            f"pair: pip install torch=={theirs}.* torch_xla=={theirs}.* or, if it is released, "
            f"pip install torch_xla=={ours}.*",
        )


def is_started() -> bool:
    """Return True if this process has started its XLA runtime."""
    package = sys.modules.get("torch_xla")
    return package is not None and bool(package._XLAC._xla_runtime_is_initialized())


def start(spmd: bool) -> None:
    import_torch_xla()
    runtime = importlib.import_module("torch_xla.runtime")
    if is_started() and bool(runtime.is_spmd()) != spmd:
        now, asked = ("over all devices", "on one device") if not spmd else ("on one device", "over all devices")
        raise ConfigurationError(
            f"The XLA runtime of this process already runs {now}, so it cannot run {asked}. Use one mode per process: "
            "XLA(spmd=False) for one device, XLA() or XLAFSDP() for all.",
        )
    if not is_started():
        if spmd:
            runtime.use_spmd()
        # This call starts the client, which must precede the first backward: torch's autograd then creates a thread
        # per device that exists, and none for XLA devices that are added later (torch 2.9).
        runtime.global_runtime_device_count()
    # Run one backward now, so that a missing autograd thread fails here with a clear message.
    probe = torch.zeros(1, device=device(), requires_grad=True)
    try:
        probe.sum().backward()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        if "device_ready_queues_" not in str(error):
            raise
        raise ConfigurationError(
            "backward() ran on the CPU in this process before its XLA device was first used, so torch can no longer "
            "run it on XLA here. Create the Accelerator or Trainer before anything calls backward(); in a "
            "notebook, restart the kernel.",
        ) from None


def device() -> torch.device:
    found: torch.device = import_torch_xla().device()
    return found


def runs_on_cpu() -> bool:
    return os.environ.get(RUNTIME_VARIABLE, "").upper() == "CPU"


def device_count() -> int:
    """Return the number of XLA devices on this machine without starting the XLA runtime."""
    if runs_on_cpu() or not tpu_files():
        # On the CPU, PJRT creates as many devices as this variable says.
        given = os.environ.get("CPU_NUM_DEVICES", "1") if runs_on_cpu() else "1"
        return int(given) if given.isdigit() else 1
    import_torch_xla()
    return int(importlib.import_module("torch_xla._internal.tpu").num_available_devices())


def has_process_per_device() -> bool:
    """Return True if each XLA device can have a process of its own, as on most TPUs.

    This is False on the CPU and on TPU v2 and v3, where a process drives both cores of a chip.
    """
    if runs_on_cpu() or not tpu_files():
        return False
    import_torch_xla()
    tpu = importlib.import_module("torch_xla._internal.tpu")
    return int(tpu.num_available_chips()) == int(tpu.num_available_devices())


def sync(wait: bool = False) -> None:
    import_torch_xla().sync(wait=wait)


def seed(value: int) -> None:
    _xla_model().set_rng_state(value)


def rng_state() -> torch.Tensor:
    """Return the state of the XLA random generator as a tensor."""
    state = int(_xla_model().get_rng_state()) % 2**64
    return torch.tensor(list(state.to_bytes(8, "little")), dtype=torch.uint8)


def seed_of(state: torch.Tensor) -> int:
    return int.from_bytes(bytes(state.tolist()), "little")


def _xla_model() -> Any:
    return importlib.import_module("torch_xla.core.xla_model")


def wait() -> None:
    if is_started():
        _xla_model().wait_device_ops()


def memory_info() -> dict[str, Any]:
    info: dict[str, Any] = _xla_model().get_memory_info(device())
    return info


def serve_profiles(port: int) -> Any:
    """Start a server for TensorBoard's profiler in this process."""
    import_torch_xla()
    return importlib.import_module("torch_xla.debug.profiler").start_server(port)


def trace(name: str, is_step: bool = False) -> AbstractContextManager[Any]:
    """Label the operations of a `with` block in XLA profiles."""
    profiler = importlib.import_module("torch_xla.debug.profiler")
    context: AbstractContextManager[Any] = (profiler.StepTrace if is_step else profiler.Trace)(name)
    return context


def _minor(version: str) -> str:
    found = re.match(r"\d+\.\d+", version)
    return found[0] if found else version


def tpu_files() -> list[str]:
    """Return the paths of the TPU device files, or an empty list without TPUs."""
    files = glob("/dev/accel*") or glob("/dev/vfio/[0-9]*")
    return files if files and util.find_spec("libtpu") is not None else []
