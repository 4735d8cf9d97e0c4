"""The kinds of device that a process can run on, and what differs between them.

Nothing outside this file names a vendor: a kind names its process-group backend, picks and
synchronises a device, and gives its streams and its random state. A third party adds one with `register_device`.
"""

from __future__ import annotations

import importlib.util
import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from drivetrain.runtime import xla
from drivetrain.runtime.errors import ConfigurationError, DeviceNotAvailableError, nearest
from drivetrain.runtime.host import host_memory

_VISIBLE_VARIABLES = {
    "cuda": "CUDA_VISIBLE_DEVICES",
    "xpu": "ZE_AFFINITY_MASK",
    "npu": "ASCEND_RT_VISIBLE_DEVICES",
    "mlu": "MLU_VISIBLE_DEVICES",
    "hpu": "HABANA_VISIBLE_MODULES",
}


class DeviceKind:
    """One kind of device, such as `cuda`, with everything that is particular to it.

    Args:
        name: The name that users write, which is torch's own for it.
        backend: Process-group backend for collectives over tensors of this kind.
        aliases: Other names that users write for it.

    Attributes:
        drives_all: Whether one process drives all devices of a machine, rather than one each.
        strategies: Names of those that can run on it, the first of which `"auto"` stands for; empty where all can.

    Example:
        ```python
        from drivetrain.runtime.devices import DeviceKind, get_device_kind, register_device

        register_device(DeviceKind("vpu", backend="gloo"), replace=True)
        assert get_device_kind("vpu").backend == "gloo"
        ```
    """

    drives_all: bool = False
    strategies: tuple[str, ...] = ()

    def __init__(self, name: str, backend: str, aliases: tuple[str, ...] = ()) -> None:
        self.name = name
        self.backend = backend
        self.aliases = aliases

    def __reduce__(self) -> tuple[Any, ...]:
        # One object of each kind in a process, also after a copy or in another process.
        return _kind_named, (self.name,)

    @property
    def module(self) -> Any:
        """Torch's module for this kind, such as `torch.cuda`; None where torch was built without it."""
        return getattr(torch, self.name, None)

    @property
    def visible_variable(self) -> str | None:
        """The environment variable that lists the devices of this kind which a process sees; None if there is none."""
        return _VISIBLE_VARIABLES.get(self.name)

    @property
    def autocast_type(self) -> str:
        """The device type that `torch.autocast` and `torch.amp.GradScaler` take."""
        return self.name

    @property
    def supports_streams(self) -> bool:
        """Whether copies can overlap with compute on a second stream."""
        return hasattr(self.module, "Stream") and hasattr(self.module, "current_stream")

    @property
    def pins_memory(self) -> bool:
        """Whether page-locked host memory makes copies to this kind asynchronous."""
        return self.supports_streams

    def is_available(self) -> bool:
        """Whether this machine has at least one such device."""
        available = getattr(self.module, "is_available", None)
        return bool(available()) if available is not None else False

    def count(self) -> int:
        """Number of such devices that this process can see."""
        counter = getattr(self.module, "device_count", None)
        return int(counter()) if counter is not None else int(self.is_available())

    def default_processes(self) -> int:
        """How many processes a run starts on this machine where no number is given."""
        return 1 if self.drives_all else self.count()

    def why_absent(self) -> str:
        """Why `is_available` is False, and what to do; ends a sentence."""
        return "this machine has none (or torch was built without it)."

    def device(self, index: int) -> torch.device:
        """The device for the process with this local rank."""
        return torch.device(self.name, index)

    def set_device(self, device: torch.device) -> None:
        """Make `device` the current one of this process."""
        setter = getattr(self.module, "set_device", None)
        if setter is not None:
            setter(device)

    def synchronize(self, device: torch.device | None = None) -> None:
        """Wait until everything queued on the device has run."""
        waiter = getattr(self.module, "synchronize", None)
        if waiter is not None:
            waiter() if device is None else waiter(device)

    def empty_cache(self) -> None:
        """Give memory that the allocator keeps back to the device."""
        release = getattr(self.module, "empty_cache", None)
        if release is not None:
            release()

    def memory_use(self, device: torch.device) -> tuple[int, int, int] | None:
        """Bytes of this process's tensors now and at most, and what the allocator holds; None if none are counted."""
        module = self.module
        if not hasattr(module, "max_memory_allocated"):
            return None
        most, held = module.max_memory_allocated(device), module.memory_reserved(device)
        return int(module.memory_allocated(device)), int(most), int(held)

    def reset_peak_memory(self, device: torch.device) -> None:
        """Let the most that tensors have taken count from here, where it is counted."""
        reset = getattr(self.module, "reset_peak_memory_stats", None)
        if reset is not None:
            reset(device)

    def free_memory(self, device: torch.device) -> tuple[int, int] | None:
        """Bytes that are free on a device, with what the allocator keeps back, and all it has; None if not counted."""
        info = getattr(self.module, "mem_get_info", None)
        if info is None:
            return None
        free, total = info(device)
        use = self.memory_use(device)
        return int(free) + (max(0, use[2] - use[0]) if use else 0), int(total)

    def describe(self, device: torch.device) -> str:
        """The name of a device, such as a GPU's model; the name of the kind where it has no other.

        Args:
            device: The device.
        """
        name = getattr(self.module, "get_device_name", None)
        return self.name if name is None else str(name(device))

    def make_stream(self, device: torch.device | None = None) -> Any | None:
        """A new stream, or None where the kind has none."""
        if not self.supports_streams:
            return None
        return self.module.Stream() if device is None else self.module.Stream(device=device)

    def current_stream(self) -> Any | None:
        """The stream in use, or None where the kind has none."""
        return self.module.current_stream() if self.supports_streams else None

    def stream_context(self, stream: Any | None) -> AbstractContextManager[Any]:
        """Run the body on `stream`; a null context for None."""
        if stream is None:
            return nullcontext()
        context: AbstractContextManager[Any] = self.module.stream(stream)
        return context

    def manual_seed_all(self, seed: int) -> None:
        """Seed the generators of all devices of this kind."""
        seeder = getattr(self.module, "manual_seed_all", None) or getattr(self.module, "manual_seed", None)
        if seeder is not None:
            seeder(seed)

    def get_rng_state(self) -> torch.Tensor | None:
        """Random state of the current device, a byte tensor; None where the kind has none of its own."""
        getter = getattr(self.module, "get_rng_state", None)
        state: torch.Tensor | None = getter() if getter is not None else None
        return state

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Restore what `get_rng_state` returned."""
        setter = getattr(self.module, "set_rng_state", None)
        if setter is not None:
            setter(state)

    def is_started(self) -> bool:
        """Whether this process uses such devices already, in a state that does not survive a fork."""
        check = getattr(self.module, "is_initialized", None)
        return bool(check()) if check is not None else False

    def supports_bf16(self) -> bool:
        """Whether bfloat16 arithmetic runs on this kind."""
        check = getattr(self.module, "is_bf16_supported", None)
        return bool(check()) if check is not None else True

    def supports_float8(self) -> bool:
        """Whether products of 8-bit floats are computed by this kind's hardware."""
        getter = getattr(self.module, "get_device_capability", None)
        capability = getter() if getter is not None and self.is_available() else None
        least = (9, 4) if torch.version.hip else (8, 9)
        return isinstance(capability, tuple) and capability >= least

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, backend={self.backend!r})"


class CPU(DeviceKind):
    """The host: always there, no streams, and its random state is torch's default generator."""

    def __init__(self) -> None:
        super().__init__("cpu", backend="gloo")

    @property
    def supports_streams(self) -> bool:
        """False: the host computes where it copies."""
        return False

    def is_available(self) -> bool:
        """True: there is always a host."""
        return True

    def count(self) -> int:
        """One: any number of processes share the host."""
        return 1

    def device(self, index: int) -> torch.device:
        """The host, whatever the local rank."""
        return torch.device("cpu")

    def set_device(self, device: torch.device) -> None:
        """Nothing to choose."""

    def empty_cache(self) -> None:
        """Nothing is cached."""

    def is_started(self) -> bool:
        """False: nothing of the host's is lost in a fork."""
        return False

    def synchronize(self, device: torch.device | None = None) -> None:
        """Nothing is queued."""

    def memory_use(self, device: torch.device) -> tuple[int, int, int] | None:
        """None: what tensors take is a part of the process's memory."""
        return None

    def reset_peak_memory(self, device: torch.device) -> None:
        """Nothing is counted."""

    def free_memory(self, device: torch.device) -> tuple[int, int] | None:
        """What this process can still take of the machine's memory, or of its container's, and all there is."""
        return host_memory()

    def manual_seed_all(self, seed: int) -> None:
        """Nothing of its own to seed: torch's default generator is seeded by the caller."""

    def get_rng_state(self) -> torch.Tensor | None:
        """None: torch's default generator is captured by the caller."""
        return None

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Nothing of its own to restore."""


class MPS(DeviceKind):
    """Apple's GPU: one device, no process-group backend of its own."""

    def __init__(self) -> None:
        super().__init__("mps", backend="gloo")

    @property
    def supports_streams(self) -> bool:
        """False: torch exposes no streams for it."""
        return False

    def is_available(self) -> bool:
        """Whether torch can use the Metal backend here."""
        return torch.backends.mps.is_available()

    def device(self, index: int) -> torch.device:
        """The one device, whatever the local rank."""
        return torch.device("mps")

    def set_device(self, device: torch.device) -> None:
        """Nothing to choose."""

    def memory_use(self, device: torch.device) -> tuple[int, int, int] | None:
        """What tensors take now, for the most as well, which Metal does not count; and what the driver holds."""
        current = int(self.module.current_allocated_memory())
        return current, current, int(self.module.driver_allocated_memory())

    def free_memory(self, device: torch.device) -> tuple[int, int] | None:
        """What Metal recommends to use at most, less what the driver holds."""
        total = int(self.module.recommended_max_memory())
        return total - int(self.module.driver_allocated_memory()), total


class XLADevice(DeviceKind):
    """What torch_xla compiles for, such as a TPU: one process may drive all devices of a machine as one.

    Choosing one starts nothing: the strategy does, since whether the runtime has one device or all cannot be changed.
    """

    drives_all = True
    strategies = ("xla", "xla_fsdp")

    def __init__(self) -> None:
        # Gloo: what is exchanged beside gradients is small, and XLA would compile a graph for each of its shapes.
        super().__init__("xla", backend="gloo", aliases=("tpu",))
        self._seed: int | None = None

    def is_available(self) -> bool:
        """Whether torch_xla is installed, and there is a TPU or `PJRT_DEVICE` names something else."""
        # The package first: looking through /dev takes longer, and each random state that is kept asks this.
        found = importlib.util.find_spec("torch_xla") is not None
        return found and bool(os.environ.get(xla.RUNTIME_VARIABLE) or xla.tpu_files())

    def why_absent(self) -> str:
        """What is missing: torch_xla, or a TPU."""
        return xla.why_absent()

    def count(self) -> int:
        """XLA devices of this machine."""
        return xla.device_count()

    def device(self, index: int) -> torch.device:
        """This process's device, whatever the local rank."""
        return torch.device("xla", 0)

    def set_device(self, device: torch.device) -> None:
        """See that torch_xla is there and fits this torch."""
        xla.import_torch_xla()

    def is_started(self) -> bool:
        """Whether this process's XLA runtime runs."""
        return xla.is_started()

    def start(self, spmd: bool) -> None:
        """Start this process's runtime, as `drivetrain.runtime.xla.start` does, with the seed given before."""
        xla.start(spmd)
        if self._seed is not None:
            xla.seed(self._seed)
            self._seed = None

    def synchronize(self, device: torch.device | None = None) -> None:
        """Wait until everything that was launched has run."""
        xla.wait()

    def memory_use(self, device: torch.device) -> tuple[int, int, int] | None:
        """What the runtime reports of the device; None before it has started."""
        if not xla.is_started():
            return None
        info = xla.memory_info()
        used = int(info.get("bytes_used", 0))
        return used, int(info.get("peak_bytes_used", used)), 0

    def free_memory(self, device: torch.device) -> tuple[int, int] | None:
        """What the runtime reports of the device; None before it has started."""
        if not xla.is_started():
            return None
        info = xla.memory_info()
        total = int(info.get("bytes_limit", 0))
        return total - int(info.get("bytes_used", 0)), total

    def manual_seed_all(self, seed: int) -> None:
        """Seed the generator; one that is not there yet when the runtime starts, since a fork may come before."""
        if xla.is_started():
            xla.seed(seed)
        else:
            self._seed = seed

    def get_rng_state(self) -> torch.Tensor | None:
        """State of the generator, eight bytes; None before the runtime starts."""
        return xla.rng_state() if xla.is_started() else None

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Restore what `get_rng_state` returned."""
        self.manual_seed_all(xla.seed_of(state))


_KINDS: dict[str, DeviceKind] = {}

ADDED: set[str] = set()
"""Names of the kinds that were registered beside those of this file."""


def started_device() -> str | None:
    """Name of a kind of device that this process uses already, in a state that does not survive a fork, if any."""
    return next((kind.name for kind in _KINDS.values() if kind.is_started()), None)


def register_device(kind: DeviceKind, *, replace: bool = False) -> None:
    """Add a kind of device.

    Args:
        kind: The kind; its name and aliases become valid wherever a device is named.
        replace: Whether a kind of the same name may be replaced.

    Raises:
        ConfigurationError: The name is taken and `replace` is False.
    """
    names = (kind.name, *kind.aliases)
    taken = [name for name in names if name in _KINDS]
    if taken and not replace:
        raise ConfigurationError(
            f"A device kind named {taken[0]!r} is registered already; pass replace=True to replace it."
        )
    for name in taken:
        if name in _KINDS and _KINDS[name].name == name:
            unregister_device(name)  # with its aliases, which would otherwise still lead to it
    _KINDS.update(dict.fromkeys(names, kind))
    ADDED.add(kind.name)


def unregister_device(name: str) -> None:
    """Remove a kind that `register_device` added."""
    kind = _KINDS.pop(name, None)
    if kind is not None:
        ADDED.discard(kind.name)
        for alias in (kind.name, *kind.aliases):
            _KINDS.pop(alias, None)


register_device(CPU())
register_device(DeviceKind("cuda", backend="nccl", aliases=("gpu",)))
register_device(MPS())
register_device(DeviceKind("xpu", backend="xccl"))
register_device(DeviceKind("npu", backend="hccl"))
register_device(DeviceKind("mlu", backend="cncl"))
register_device(DeviceKind("hpu", backend="hccl"))
_XLA = XLADevice()
register_device(_XLA)
ADDED.clear()


def get_device_kind(name: str) -> DeviceKind:
    """Look a kind up by name, such as `"cuda"`, and make sure that this machine has one."""
    base = name.split(":", 1)[0].lower()
    kind = _KINDS.get(base)
    if kind is None:
        raise ConfigurationError(
            f"Unknown device {name!r}. Known: {', '.join(sorted(_KINDS))}.{nearest(base, _KINDS)} "
            "Another one can be added with drivetrain.register_device.",
        )
    if not kind.is_available():
        raise DeviceNotAvailableError(
            f"Device {name!r} was asked for, but {kind.why_absent()} "
            f"Available here: {', '.join(k.name for k in available_device_kinds())}."
        )
    return kind


def get_device(name: str) -> tuple[DeviceKind, int | None]:
    """Look up a kind, and the number of a device of it, by a name such as `"cuda"` or `"cuda:1"`."""
    kind, (_, _, number) = get_device_kind(name), name.partition(":")
    if not number:
        return kind, None
    chooses = kind.name != "cpu" and not kind.drives_all
    if not number.isdigit() or (chooses and int(number) >= kind.count()):
        raise ConfigurationError(
            f"Device {name!r} was asked for, but this process sees {kind.count()} {kind.name} device(s), from 0 on.",
        )
    return kind, int(number) if chooses else None


def available_device_kinds() -> list[DeviceKind]:
    """The kinds that this machine has, accelerators first, the CPU last."""
    kinds = [kind for kind in dict.fromkeys(_KINDS.values()) if kind.is_available()]
    return sorted(kinds, key=lambda kind: kind.name == "cpu")


def detect_device_kind() -> DeviceKind:
    """The kind that a run uses when none is named: XLA's where it is set up, torch's accelerator, else the CPU."""
    if _KINDS.get(_XLA.name) is _XLA and _XLA.is_available():
        return _XLA
    if torch.accelerator.is_available():
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is not None and accelerator.type in _KINDS:
            return _KINDS[accelerator.type]
    return _KINDS["cpu"]


def _kind_named(name: str) -> DeviceKind:
    """The kind of this name, whether this machine has one or not."""
    return _KINDS[name]
