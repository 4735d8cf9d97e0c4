"""Device kinds that a process can run on, and the vendor-specific code for each.

A kind names its process-group backend, selects and synchronizes a device, and provides streams and random state. Third
parties add kinds with `register_device`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import os
import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch

from drivetrain.runtime import xla
from drivetrain.runtime.environment import is_set
from drivetrain.runtime.errors import ConfigurationError, DeviceNotAvailableError, nearest
from drivetrain.runtime.host import host_memory

DeviceName = Literal["auto", "cpu", "cuda", "gpu", "mps", "xpu", "npu", "mlu", "musa", "sdaa", "hpu", "xla", "tpu"]
"""Names of the built-in device kinds, which editors complete. `"auto"` detects one."""

ENTRY_POINTS = "drivetrain.devices"
"""Group of entry points by which other packages add device types."""


class DeviceKind:
    """Device type, such as `cuda`, with its process-group backend and its vendor-specific operations.

    Args:
        name: torch's device type, which users also write, such as `"cuda"`.
        backend: Process-group backend for collectives over tensors on this device type.
        aliases: Other names that users may write.
        package: Package that adds the device type to torch, such as `"torch_npu"`. It is imported when the type is
            requested.
        visible_variable: Environment variable that selects visible devices, such as `"CUDA_VISIBLE_DEVICES"`.
        autocast_dtype: dtype of mixed precision on these devices: `torch.float16` if they do not have bfloat16.
        forks: False if counting the devices already starts their driver, so that no process may be forked.

    Attributes:
        drives_all: True if one process drives all devices of a machine, instead of one device per process.
        strategies: Names of the strategies that can run on it; `"auto"` selects the first. Empty if all can.

    Example:
        ```python
        from drivetrain.runtime.devices import DeviceKind, get_device_kind, register_device

        register_device(DeviceKind("vpu", backend="gloo"), replace=True)
        assert get_device_kind("vpu").backend == "gloo"
        ```
    """

    drives_all: bool = False
    strategies: tuple[str, ...] = ()

    def __init__(
        self,
        name: str,
        backend: str,
        aliases: tuple[str, ...] = (),
        *,
        package: str | None = None,
        visible_variable: str | None = None,
        autocast_dtype: torch.dtype = torch.bfloat16,
        forks: bool = True,
    ) -> None:
        self.name = name
        self.backend = backend
        self.aliases = aliases
        self.package = package
        self.visible_variable = visible_variable
        self.autocast_dtype = autocast_dtype
        self.forks = forks

    def load(self) -> None:
        """Import the package that adds this device type to torch, if it is installed and not imported yet.

        Raise DeviceNotAvailableError if the installed package cannot be imported, for example without its driver.
        """
        package = self.package
        if not package or self.module is not None or importlib.util.find_spec(package.partition(".")[0]) is None:
            return
        try:
            importlib.import_module(package)
        except Exception as error:
            raise DeviceNotAvailableError(
                f"Device {self.name!r} was requested, but its package {package} cannot be imported: "
                f"{type(error).__name__}: {error}. Check the installation of its driver."
            ) from error

    def __reduce__(self) -> tuple[Any, ...]:
        # Kinds are compared by identity, so copies and unpickled kinds must be the registered object.
        return _kind_named, (self.name,)

    @property
    def module(self) -> Any:
        """Torch module of this device kind, such as `torch.cuda`, or None if torch was built without it."""
        return getattr(torch, self.name, None)

    @property
    def autocast_type(self) -> str:
        """Name of this device kind for `torch.autocast` and `torch.amp.GradScaler`, such as `"cuda"`."""
        return self.name

    @property
    def supports_streams(self) -> bool:
        """True if this device type has streams, on which copies can overlap with computation."""
        return hasattr(self.module, "Stream") and hasattr(self.module, "current_stream")

    @property
    def pins_memory(self) -> bool:
        """True if copies from pinned host memory to this device type can run asynchronously."""
        return self.supports_streams

    def is_available(self) -> bool:
        """Return True if this machine has at least one device of this kind."""
        available = getattr(self.module, "is_available", None)
        return bool(available()) if available is not None else False

    def count(self) -> int:
        """Return the number of devices of this kind that are visible to this process."""
        counter = getattr(self.module, "device_count", None)
        return int(counter()) if counter is not None else int(self.is_available())

    def default_processes(self) -> int:
        """Return how many processes a run starts on this machine by default, usually one for each device."""
        return 1 if self.drives_all else self.count()

    def why_absent(self) -> str:
        """Return the reason why this kind of device is unavailable, phrased as the end of an error message."""
        return "this machine has none (or torch was built without it)."

    def device(self, index: int) -> torch.device:
        """Return the `torch.device` for the process with a given local rank, such as `cuda:1` for rank 1.

        Args:
            index: Local rank of the process.
        """
        return torch.device(self.name, index)

    def set_device(self, device: torch.device) -> None:
        """Make a device the current device of this process, like `torch.cuda.set_device`.

        Args:
            device: The device.
        """
        setter = getattr(self.module, "set_device", None)
        if setter is not None:
            setter(device)

    def synchronize(self, device: torch.device | None = None) -> None:
        """Wait until a device has finished all work queued on it, like `torch.cuda.synchronize`.

        Args:
            device: The device; the current one if None.
        """
        waiter = getattr(self.module, "synchronize", None)
        if waiter is not None:
            waiter() if device is None else waiter(device)

    def empty_cache(self) -> None:
        """Return the unused memory of PyTorch's caching allocator to the device."""
        release = getattr(self.module, "empty_cache", None)
        if release is not None:
            release()

    def memory_use(self, device: torch.device) -> tuple[int, int, int] | None:
        """Return this process's memory on a device in bytes: allocated, peak allocated and reserved.

        Return None if torch does not count memory for this device type.

        Args:
            device: The device.
        """
        module = self.module
        if not hasattr(module, "max_memory_allocated"):
            return None
        most, held = module.max_memory_allocated(device), module.memory_reserved(device)
        return int(module.memory_allocated(device)), int(most), int(held)

    def reset_peak_memory(self, device: torch.device) -> None:
        """Reset the statistics of a device's peak memory use, if torch keeps them for devices of this type.

        Args:
            device: The device.
        """
        reset = getattr(self.module, "reset_peak_memory_stats", None)
        if reset is not None:
            reset(device)

    def free_memory(self, device: torch.device) -> tuple[int, int] | None:
        """Return the free and total memory of a device in bytes, or None if they cannot be queried.

        Unused memory held by the caching allocator counts as free.

        Args:
            device: The device.
        """
        info = getattr(self.module, "mem_get_info", None)
        if info is None:
            return None
        # Memory that the allocator has reserved but not used is free for this process.
        free, total = info(device)
        use = self.memory_use(device)
        return int(free) + (max(0, use[2] - use[0]) if use else 0), int(total)

    def utilization(self, device: torch.device) -> float | None:
        """Return the fraction of recent time in which a device was in use, by any process.

        Return None if torch cannot query it, for CUDA without the package `nvidia-ml-py`.

        Args:
            device: The device.
        """
        read = getattr(self.module, "utilization", None)
        try:
            return None if read is None else float(read(device)) / 100
        except (ImportError, RuntimeError, OSError):
            return None

    def describe(self, device: torch.device) -> str:
        """Return the product name of a device, such as `NVIDIA H100`, or this kind's `name` if torch gives none.

        Args:
            device: The device.
        """
        name = getattr(self.module, "get_device_name", None)
        return self.name if name is None else str(name(device))

    def make_stream(self, device: torch.device | None = None) -> Any | None:
        """Create a stream on a device, or return None if this device type has no streams.

        Args:
            device: Device of the stream; the current one if None.
        """
        if not self.supports_streams:
            return None
        return self.module.Stream() if device is None else self.module.Stream(device=device)

    def current_stream(self, device: torch.device | None = None) -> Any | None:
        """Return the current stream of a device, or None if this device type has no streams.

        Args:
            device: The device; the current one if None.
        """
        if not self.supports_streams:
            return None
        return self.module.current_stream() if device is None else self.module.current_stream(device)

    def stream_context(self, stream: Any | None) -> AbstractContextManager[Any]:
        """Return a context manager that runs its body on a stream, or does nothing if `stream` is None.

        Args:
            stream: A stream from `make_stream`, or None.
        """
        if stream is None:
            return nullcontext()
        context: AbstractContextManager[Any] = self.module.stream(stream)
        return context

    def manual_seed_all(self, seed: int) -> None:
        """Seed the random generators of all devices of this kind.

        Args:
            seed: The seed.
        """
        seeder = getattr(self.module, "manual_seed_all", None) or getattr(self.module, "manual_seed", None)
        if seeder is not None:
            seeder(seed)

    def get_rng_state(self) -> torch.Tensor | None:
        """Return the random state of the current device as a byte tensor.

        Return None if it has no generator, or if this process has not started the device.
        """
        started = getattr(self.module, "is_initialized", None)
        if started is not None and not started():
            return None  # reading it would start the device, even for a run on the CPU
        getter = getattr(self.module, "get_rng_state", None)
        state: torch.Tensor | None = getter() if getter is not None else None
        return state

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Restore a random state that `get_rng_state` returned.

        Args:
            state: The byte tensor.
        """
        setter = getattr(self.module, "set_rng_state", None)
        if setter is not None:
            setter(state)

    def is_started(self) -> bool:
        """Return True if this process has initialized a device of this kind, so that forking is no longer safe."""
        check = getattr(self.module, "is_initialized", None)
        return bool(check()) if check is not None else False

    def supports_bf16(self) -> bool:
        """Return True if devices of this kind can compute in bfloat16."""
        check = getattr(self.module, "is_bf16_supported", None)
        return bool(check()) if check is not None else self.autocast_dtype is torch.bfloat16

    def supports_float8(self) -> bool:
        """Return True if the hardware can multiply matrices in 8-bit floating point (FP8)."""
        getter = getattr(self.module, "get_device_capability", None)
        capability = getter() if getter is not None and self.is_available() else None
        # FP8 matrix units: gfx942 (MI300) on AMD, Ada and Hopper on NVIDIA.
        least = (9, 4) if torch.version.hip else (8, 9)
        return isinstance(capability, tuple) and capability >= least

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, backend={self.backend!r})"


class CPU(DeviceKind):
    """Implementation of `DeviceKind` for the CPU."""

    def __init__(self) -> None:
        super().__init__("cpu", backend="gloo")

    @property
    def supports_streams(self) -> bool:
        return False

    def is_available(self) -> bool:
        return True

    def count(self) -> int:
        return 1

    def device(self, index: int) -> torch.device:
        return torch.device("cpu")

    def set_device(self, device: torch.device) -> None: ...

    def empty_cache(self) -> None: ...

    def is_started(self) -> bool:
        return False

    def synchronize(self, device: torch.device | None = None) -> None: ...

    def memory_use(self, device: torch.device) -> tuple[int, int, int] | None:
        return None

    def reset_peak_memory(self, device: torch.device) -> None: ...

    def free_memory(self, device: torch.device) -> tuple[int, int] | None:
        return host_memory()

    def manual_seed_all(self, seed: int) -> None: ...

    def get_rng_state(self) -> torch.Tensor | None:
        return None

    def set_rng_state(self, state: torch.Tensor) -> None: ...


class CUDA(DeviceKind):
    """Device kind for GPUs of NVIDIA (CUDA) and AMD (ROCm)."""

    def __init__(self) -> None:
        super().__init__(
            "cuda", "nccl", ("gpu",), visible_variable="CUDA_VISIBLE_DEVICES", forks=torch.version.hip is None
        )

    def is_available(self) -> bool:
        # torch.cuda.is_available() starts the driver, which forked processes could then not use. NVML only counts.
        return self.count() > 0


class MPS(DeviceKind):
    """Implementation of `DeviceKind` for the GPU of an Apple computer (`mps`)."""

    def __init__(self) -> None:
        super().__init__("mps", backend="gloo")

    @property
    def supports_streams(self) -> bool:
        return False

    def is_available(self) -> bool:
        return torch.backends.mps.is_available()

    def supports_bf16(self) -> bool:
        return torch.backends.mps.is_macos_or_newer(14, 0)

    def device(self, index: int) -> torch.device:
        return torch.device("mps")

    def set_device(self, device: torch.device) -> None: ...

    def memory_use(self, device: torch.device) -> tuple[int, int, int] | None:
        # Metal does not record a peak, so the current value replaces it.
        current = int(self.module.current_allocated_memory())
        return current, current, int(self.module.driver_allocated_memory())

    def free_memory(self, device: torch.device) -> tuple[int, int] | None:
        total = int(self.module.recommended_max_memory())
        return total - int(self.module.driver_allocated_memory()), total


class XLADevice(DeviceKind):
    """XLA devices, such as TPUs, as torch_xla provides them.

    Selecting an XLA device does not start the runtime. The strategy starts it, because the choice between one device
    and all of them (SPMD) is final.
    """

    drives_all = True
    strategies = ("xla", "xla_fsdp")

    def __init__(self) -> None:
        # Gloo for everything except gradients: XLA would compile a graph for each new shape.
        super().__init__("xla", backend="gloo", aliases=("tpu",))
        self._seed: int | None = None

    def is_available(self) -> bool:
        # Check the package first: listing /dev is slow, and every captured random state calls this method.
        found = importlib.util.find_spec("torch_xla") is not None
        return found and bool(os.environ.get(xla.RUNTIME_VARIABLE) or xla.tpu_files())

    def why_absent(self) -> str:
        return xla.why_absent()

    def count(self) -> int:
        return xla.device_count()

    def device(self, index: int) -> torch.device:
        return torch.device("xla", 0)

    def set_device(self, device: torch.device) -> None:
        # Only check the installation: the strategy starts the runtime.
        xla.import_torch_xla()

    def is_started(self) -> bool:
        return xla.is_started()

    def start(self, spmd: bool) -> None:
        # `spmd` uses all devices as one. A seed that was set earlier is applied once the runtime has started.
        xla.start(spmd)
        if self._seed is not None:
            xla.seed(self._seed)
            self._seed = None

    def synchronize(self, device: torch.device | None = None) -> None:
        xla.wait()

    def memory_use(self, device: torch.device) -> tuple[int, int, int] | None:
        if not xla.is_started():
            return None
        info = xla.memory_info()
        used = int(info.get("bytes_used", 0))
        return used, int(info.get("peak_bytes_used", used)), 0

    def free_memory(self, device: torch.device) -> tuple[int, int] | None:
        if not xla.is_started():
            return None
        info = xla.memory_info()
        total = int(info.get("bytes_limit", 0))
        return total - int(info.get("bytes_used", 0)), total

    def manual_seed_all(self, seed: int) -> None:
        if xla.is_started():
            xla.seed(seed)
        else:  # starting the runtime just for a seed would forbid forking and fix its mode
            self._seed = seed

    def get_rng_state(self) -> torch.Tensor | None:
        return xla.rng_state() if xla.is_started() else None

    def set_rng_state(self, state: torch.Tensor) -> None:
        self.manual_seed_all(xla.seed_of(state))


_KINDS: dict[str, DeviceKind] = {}

ADDED: set[str] = set()
"""Names of the kinds that were registered beside those of this file."""


def register_device(kind: DeviceKind, *, replace: bool = False) -> None:
    """Register a device kind, so that users can select it by name.

    Args:
        kind: The kind. Its name and aliases become valid wherever a device is named.
        replace: Allow replacing a kind with the same name.

    Raises:
        ConfigurationError: If the name is taken and `replace` is False.
    """
    names = (kind.name, *kind.aliases)
    taken = [name for name in names if name in _KINDS]
    if taken and not replace:
        raise ConfigurationError(
            f"A device kind named {taken[0]!r} is already registered; pass replace=True to replace it."
        )
    for name in taken:
        if name in _KINDS and _KINDS[name].name == name:
            unregister_device(name)  # removes its aliases too, which would otherwise still resolve to it
    _KINDS.update(dict.fromkeys(names, kind))
    ADDED.add(kind.name)


def unregister_device(name: str) -> None:
    """Remove a device kind that was added with `register_device`."""
    kind = _KINDS.pop(name, None)
    if kind is not None:
        ADDED.discard(kind.name)
        for alias in (kind.name, *kind.aliases):
            _KINDS.pop(alias, None)


register_device(CPU())
for _kind in (
    CUDA(),
    MPS(),
    DeviceKind("xpu", "xccl", visible_variable="ZE_AFFINITY_MASK", forks=False),
    DeviceKind("npu", "hccl", package="torch_npu", visible_variable="ASCEND_RT_VISIBLE_DEVICES"),
    DeviceKind("mlu", "cncl", package="torch_mlu", visible_variable="MLU_VISIBLE_DEVICES"),
    DeviceKind("musa", "mccl", package="torch_musa", visible_variable="MUSA_VISIBLE_DEVICES"),
    DeviceKind("sdaa", "tccl", package="torch_sdaa", visible_variable="SDAA_VISIBLE_DEVICES"),
    DeviceKind("hpu", "hccl", package="habana_frameworks.torch", visible_variable="HABANA_VISIBLE_MODULES"),
):
    register_device(_kind)
_XLA = XLADevice()
register_device(_XLA)
ADDED.clear()


def get_device_kind(name: str) -> DeviceKind:
    """Return the device kind of a name, such as `"cuda"`, if this machine has one.

    Raise ConfigurationError for an unknown name and DeviceNotAvailableError if there is no such device.
    """
    base = name.split(":", 1)[0].lower()
    if base not in _KINDS:
        _register_entry_points()
    kind = _KINDS.get(base)
    if kind is None:
        raise ConfigurationError(
            f"Unknown device {name!r}. Known: {', '.join(sorted(_KINDS))}.{nearest(base, _KINDS)} "
            "Use drivetrain.register_device to add another kind.",
        )
    if kind.package:
        kind.load()
    if not kind.is_available():
        raise DeviceNotAvailableError(
            f"Device {name!r} was requested, but {kind.why_absent()} "
            f"Available here: {', '.join(k.name for k in available_device_kinds())}."
        )
    return kind


def get_device(name: str) -> tuple[DeviceKind, int | None]:
    """Parse a device name such as `"cuda:1"` to its device kind and index."""
    kind, (_, _, number) = get_device_kind(name), name.partition(":")
    if not number:
        return kind, None
    chooses = kind.name != "cpu" and not kind.drives_all
    if not number.isdigit() or (chooses and int(number) >= kind.count()):
        raise ConfigurationError(
            f"Device {name!r} was requested, but this process sees {kind.count()} {kind.name} device(s).",
        )
    return kind, int(number) if chooses else None


def available_device_kinds() -> list[DeviceKind]:
    """Return the device kinds that this machine has, the CPU last."""
    kinds = [kind for kind in dict.fromkeys(_KINDS.values()) if kind.is_available()]
    return sorted(kinds, key=lambda kind: kind.name == "cpu")


def detect_device_kind() -> DeviceKind:
    """Return the default device kind of this machine.

    Packages that add a device type to torch are imported if they are installed.
    """
    # XLA comes first: torch.accelerator does not know it. A replaced kind is not detected.
    if _KINDS.get(_XLA.name) is _XLA and _XLA.is_available():
        return _XLA
    _load_packages()
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None:
        if accelerator.type not in _KINDS:
            _register_entry_points()
        kind = _KINDS.get(accelerator.type)
        if kind is not None and kind.is_available():
            return kind
    return _KINDS["cpu"]


def cpu_is_requested() -> bool:
    """Return True if an environment variable asks for a run on the CPU."""
    return is_set("DRIVETRAIN_USE_CPU", "ACCELERATE_USE_CPU")


@functools.cache
def _load_packages() -> None:
    for kind in list(dict.fromkeys(_KINDS.values())):
        try:
            kind.load()
        except DeviceNotAvailableError as error:
            warnings.warn(f"{kind.name} devices are not used: {error.message}", stacklevel=4)


@functools.cache
def _register_entry_points() -> None:
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS):
        try:
            found = entry.load()
            kind = found if isinstance(found, DeviceKind) else found()
            if not isinstance(kind, DeviceKind):
                raise TypeError(f"it is a {type(kind).__name__}, not a DeviceKind")
            if kind.name not in _KINDS:
                register_device(kind)
        except Exception as error:
            owner = entry.dist.name if entry.dist is not None else "an installed package"
            warnings.warn(
                f"The kind of device {entry.name!r} of {owner} cannot be used: {type(error).__name__}: {error}.",
                stacklevel=4,
            )


def _kind_named(name: str) -> DeviceKind:
    return _KINDS[name]
