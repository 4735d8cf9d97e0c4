"""Devices and machines by name: memory, speed, and the links between them."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from drivetrain.runtime.errors import ConfigurationError, nearest

_GB = 10**9


@dataclass(frozen=True)
class Device:
    """Accelerator model, such as an H100, with its memory and speeds.

    Attributes:
        name: Name, such as `"H100-80GB"`.
        memory: Bytes of memory.
        tflops: Dense peak speed of matrix products in TFLOP/s, by dtype: `float32`, `bfloat16`, `float16`, `float8`.
        memory_speed: Bytes per second of its memory.
        link_speed: Bytes per second that it sends to others in the same machine.
        network_speed: Bytes per second that it sends to other machines.
        host_speed: Bytes per second between it and host memory.
        matrix_share: Share of the peak speed that large matrix products reach. For A100 and H100, it was fitted to
            published speeds.
        source: Where the figures are from.
    """

    name: str
    memory: float
    tflops: Mapping[str, float]
    memory_speed: float
    link_speed: float
    network_speed: float
    host_speed: float = 25 * _GB
    matrix_share: float = 0.6
    source: str = ""

    def flops(self, dtype: torch.dtype) -> float:
        """Return the peak speed of matrix products in a dtype, in FLOP/s.

        An unlisted dtype has the speed of float32.
        """
        return 1e12 * self.tflops.get(str(dtype).removeprefix("torch."), self.tflops["float32"])


@dataclass(frozen=True)
class Cluster:
    """Description of equal machines with equal devices, for which `plan` predicts a training's memory and speed.

    Attributes:
        device: The device.
        devices: Devices in each machine.
        machines: Number of machines.
        memory_share: Share of the memory speed that other operations reach.
        link_share: Share of the link and network speed that collectives reach.
        launch: Seconds that an operation takes at least.
        latency: Seconds that a collective takes at least, for each doubling of its processes.
        disk_speed: Bytes per second that a machine writes to checkpoint storage.
        host_memory_speed: Bytes per second of a machine's host memory, where offloaded optimizers compute.
    """

    device: Device
    devices: int
    machines: int = 1
    memory_share: float = 0.75
    link_share: float = 0.8
    launch: float = 3e-6
    latency: float = 1e-5
    disk_speed: float = 2 * _GB
    host_memory_speed: float = 200 * _GB

    @property
    def world_size(self) -> int:
        """Total number of devices in the cluster: the devices of one machine times the number of machines."""
        return self.devices * self.machines

    def with_world_size(self, count: int) -> Cluster:
        """Return a copy of this hardware description with `count` devices in total, to plan for another size.

        The devices must fit into one machine or fill whole machines.

        Args:
            count: Number of devices.

        Raises:
            ConfigurationError: The devices do not fill whole machines.
        """
        if count <= self.devices:
            return replace(self, devices=count, machines=1)
        if count % self.devices:
            raise ConfigurationError(
                f"A world size of {count} does not fill machines of {self.devices} devices. Use a multiple of "
                f"{self.devices}, or at most {self.devices}."
            )
        return replace(self, machines=count // self.devices)

    def slowed(self, ratio: float) -> Cluster:
        """Return a copy of the cluster whose computations take `ratio` times as long. Communication is unchanged."""
        device = replace(self.device, matrix_share=self.device.matrix_share / ratio)
        return replace(self, device=device, memory_share=self.memory_share / ratio, launch=self.launch * ratio)

    def __str__(self) -> str:
        machines = f"x{self.machines}" if self.machines > 1 else ""
        return f"{self.devices}x{self.device.name}{machines}"


def _gpu(
    name: str,
    memory: float,
    speeds: tuple[float, float, float, float],
    rates: tuple[float, float, float],
    source: str,
    matrix_share: float = 0.6,
) -> Device:
    float32, bfloat16, float16, float8 = speeds
    of = {"float32": float32, "bfloat16": bfloat16, "float16": float16, "float8_e4m3fn": float8}
    memory_speed, link, network = (1e9 * rate for rate in rates)
    return Device(
        name,
        memory,
        {dtype: speed for dtype, speed in of.items() if speed},
        memory_speed,
        link,
        network,
        source=source,
        matrix_share=matrix_share,
    )


_NVIDIA = "https://www.nvidia.com/en-us/data-center/"
_GRACE = f"{_NVIDIA}grace-hopper-superchip/"
_AMD = "https://www.amd.com/en/products/accelerators/instinct/"
_MI300X = f"{_AMD}mi300/mi300x.html"
_GIB = 2**30

DEVICES = {
    device.name: device
    for device in (
        # Memory as the driver reports it. Speeds: TFLOP/s of float32 (TF32 is off in torch by default), bfloat16,
        # float16 and float8, all dense. Rates in GB/s: memory, to other devices in the machine (one direction), to
        # other machines (of the usual servers with one network card for each device).
        _gpu("B200-180GB", 178 * _GIB, (75, 2250, 2250, 4500), (7700, 900, 50), f"{_NVIDIA}dgx-b200/"),
        _gpu("H200-141GB", 139.8 * _GIB, (67, 989.4, 989.4, 1978.9), (4800, 450, 50), f"{_NVIDIA}h200/", 0.55),
        _gpu("H100-80GB", 79.1 * _GIB, (67, 989.4, 989.4, 1978.9), (3350, 450, 50), f"{_NVIDIA}h100/", 0.55),
        _gpu("H100-PCIe-80GB", 79.1 * _GIB, (51, 756, 756, 1513), (2000, 50, 25), f"{_NVIDIA}h100/", 0.55),
        _gpu(
            "GH200-96GB", 94.5 * _GIB, (67, 989.4, 989.4, 1978.9), (4000, 450, 50), f"{_NVIDIA}grace-hopper-superchip/"
        ),
        _gpu("A100-80GB", 79.1 * _GIB, (19.5, 312, 312, 0), (2039, 300, 25), f"{_NVIDIA}a100/", 0.75),
        _gpu("A100-40GB", 39.4 * _GIB, (19.5, 312, 312, 0), (1555, 300, 25), f"{_NVIDIA}a100/", 0.75),
        _gpu("L40S-48GB", 44.4 * _GIB, (91.6, 362, 362, 733), (864, 25, 12.5), f"{_NVIDIA}l40s/"),
        _gpu("L4-24GB", 22 * _GIB, (30.3, 121, 121, 242), (300, 25, 12.5), f"{_NVIDIA}l4/"),
        _gpu("A10-24GB", 22 * _GIB, (31.2, 125, 125, 0), (600, 25, 12.5), f"{_NVIDIA}products/a10-gpu/"),
        _gpu("V100-32GB", 31.7 * _GIB, (15.7, 0, 125, 0), (900, 150, 12.5), f"{_NVIDIA}v100/"),
        _gpu("V100-16GB", 15.8 * _GIB, (15.7, 0, 125, 0), (900, 150, 12.5), f"{_NVIDIA}v100/"),
        _gpu("T4-16GB", 14.6 * _GIB, (8.1, 0, 65, 0), (320, 12.5, 6.25), f"{_NVIDIA}tesla-t4/"),
        _gpu(
            "RTX4090-24GB",
            23.5 * _GIB,
            (82.6, 165.2, 165.2, 330.3),
            (1008, 25, 12.5),
            "https://www.nvidia.com/en-us/geforce/graphics-cards/40-series/rtx-4090/",
        ),
        _gpu(
            "RTX3090-24GB",
            23.7 * _GIB,
            (35.6, 71, 71, 0),
            (936, 25, 12.5),
            "https://www.nvidia.com/en-us/geforce/graphics-cards/30-series/rtx-3090-3090ti/",
        ),
        _gpu(
            "MI300X-192GB", 191.5 * _GIB, (163.4, 1307.4, 1307.4, 2614.9), (5300, 448, 50), f"{_AMD}mi300/mi300x.html"
        ),
        _gpu("MI250X-64GB", 64 * _GIB, (23.9, 191.5, 191.5, 0), (1638, 100, 25), f"{_AMD}mi200/mi250x.html"),
    )
}
"""Known devices by name."""

_TEXT = re.compile(r"^(?:(?P<devices>\d+)x)?(?P<name>[A-Za-z][\w.-]*?)(?:x(?P<machines>\d+))?$")
_KEYS = {
    "matrix_share",
    "memory",
    "tflops",
    "memory_speed",
    "link_speed",
    "network_speed",
    "host_speed",
    "name",
    "source",
}


def read_hardware(text: str) -> Cluster:
    """Create a `Cluster` from a text such as `"8xH100-80GB"`, meaning eight H100 GPUs, or from a YAML file.

    Args:
        text: The devices of a machine, and after a second `x` the number of machines. `"this"` measures this machine.

    Raises:
        ConfigurationError: The device is unknown, a number is not positive, or the file is not valid.
    """
    if text == "this":
        return measure_this()
    if text.endswith((".yaml", ".yml")):
        return _from_file(Path(text))
    found = _TEXT.match(text)
    if found is None or found["name"] not in DEVICES:
        known = ", ".join(DEVICES)
        guess = nearest(found["name"] if found else text, DEVICES)
        raise ConfigurationError(
            f"--hardware {text!r} is not known. Use a form such as 8xH100-80GB or 8xH100-80GBx4, 'this', or a YAML "
            f"file. Devices: {known}.{guess}"
        )
    devices, machines = int(found["devices"] or 1), int(found["machines"] or 1)
    if devices < 1 or machines < 1:
        raise ConfigurationError(f"--hardware {text!r} must have at least one device and one machine.")
    return Cluster(DEVICES[found["name"]], devices, machines)


def _from_file(path: Path) -> Cluster:
    from drivetrain.runtime.yaml_text import load_yaml

    if not path.is_file():
        raise ConfigurationError(f"--hardware {str(path)!r}: the file does not exist.")
    content: Any = load_yaml(path.read_text(encoding="utf-8"))
    if not isinstance(content, Mapping) or not isinstance(content.get("device"), str | Mapping):
        raise ConfigurationError(
            f"{path} must be a mapping with the key 'device': the name of a known device, or a mapping with the keys "
            f"{', '.join(sorted(_KEYS))}."
        )
    given = dict(content)
    device = given.pop("device")
    made = _device(device, path) if isinstance(device, Mapping) else read_hardware(device).device
    allowed = set(Cluster.__dataclass_fields__) - {"device"}
    _refuse_unknown(given, allowed, path)
    cluster = Cluster(made, **{"devices": 1, **given})
    for name in allowed:
        if not isinstance(getattr(cluster, name), int | float) or getattr(cluster, name) <= 0:
            raise ConfigurationError(f"{path}: {name} must be a positive number, got {getattr(cluster, name)!r}.")
    return cluster


def _device(given: Mapping[str, Any], path: Path) -> Device:
    _refuse_unknown(given, _KEYS, path)
    missing = sorted({"memory", "tflops", "memory_speed", "link_speed", "network_speed"} - given.keys())
    if missing or not isinstance(given["tflops"], Mapping) or "float32" not in given["tflops"]:
        raise ConfigurationError(
            f"{path}: the device needs {', '.join(missing) or 'tflops as a mapping with float32'}. Memory is in bytes, "
            "tflops maps dtypes to TFLOP/s, speeds are in bytes per second."
        )
    values = {key: value if key in ("name", "source", "tflops") else float(value) for key, value in given.items()}
    made: dict[str, Any] = {"name": path.stem, **values}
    return Device(**made)


def _refuse_unknown(given: Mapping[str, Any], allowed: set[str], path: Path) -> None:
    for name in given:
        if name not in allowed:
            raise ConfigurationError(
                f"{path}: unknown key {name!r}. Allowed: {', '.join(sorted(allowed))}.{nearest(name, allowed)}"
            )


# This machine


def measure_this(seconds: float = 10.0) -> Cluster:
    """Measure the memory and speed of this machine's devices for about `seconds`, and return a `Cluster`.

    Links between the devices are not measured: they get the speed of copies within a device.

    Args:
        seconds: About how long to measure.
    """
    from drivetrain.runtime.devices import detect_device_kind
    from drivetrain.runtime.host import host_memory

    kind = detect_device_kind()
    device = kind.device(0)
    share = seconds / 4
    size = 512 if device.type == "cpu" else 4096
    tflops = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        a = torch.ones(size, size, dtype=dtype, device=device)
        rate = _rate(partial(torch.matmul, a, a), share, device)
        tflops[str(dtype).removeprefix("torch.")] = 2 * size**3 * rate / 1e12
    block = torch.ones(2**24, device=device)
    copies = 2 * block.nbytes * _rate(block.clone, share, device)
    memory = host_memory()[0] if device.type == "cpu" else torch.accelerator.get_memory_info(device)[1]
    made = Device(
        f"this-{device.type}", memory, tflops, copies, copies / 2, copies / 2, copies / 2, 1.0, "measured here"
    )
    return Cluster(made, max(1, kind.count()), memory_share=1.0, link_share=1.0)


def _rate(run: Callable[[], Any], seconds: float, device: torch.device) -> float:
    # Returns calls per second. The first call is not counted.

    def wait() -> None:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

    run()
    wait()
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        run()
        count += 1
        if count % 16 == 0:
            wait()
    wait()
    return count / (time.perf_counter() - start)
