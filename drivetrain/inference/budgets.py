"""How much memory there is for a model on each device."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from drivetrain.inference.blocks import Loading, blocks_of
from drivetrain.inference.solver import Budget, Device, Problem, balanced_shares
from drivetrain.runtime.byte_sizes import parse_bytes
from drivetrain.runtime.devices import DeviceKind, available_device_kinds, detect_device_kind
from drivetrain.runtime.errors import ConfigurationError, nearest
from drivetrain.runtime.logging import get_logger

logger = get_logger(__name__)

STORES = ("cpu", "disk")


class BalancedMemory(dict[Device, int]):
    """What `get_balanced_memory` returns: shares that need no room beside them, unlike the memory of a device."""


def get_max_memory(max_memory: Mapping[Any, int | str] | None = None) -> dict[Device, int]:
    """Bytes of memory that there are for a model on each device, accelerators first, then the host.

    Args:
        max_memory: Bytes, or text such as `"20GiB"`, by device: a number or a name for an accelerator, `"cpu"`,
            `"disk"`. None for what is free on all devices of this machine.

    Returns:
        Bytes by device.

    Raises:
        ConfigurationError: It names something that is no device, or a size that is none.
    """
    if max_memory is None:
        return _free_memory()
    parsed = {as_device(device): parse_bytes(size) for device, size in max_memory.items()}
    negative = [device for device, size in parsed.items() if size < 0]
    if negative:
        raise ConfigurationError(
            f"max_memory gives {negative[0]!r} {parsed[negative[0]]} bytes; give 0 or more.", code="DT-002"
        )
    absent = [device for device in parsed if device not in STORES and not is_there(device)]
    if absent:
        logger.info(f"max_memory names devices that this machine does not have: {', '.join(map(str, absent))}.")
    return BalancedMemory(parsed) if isinstance(max_memory, BalancedMemory) else _in_order(parsed)


def _free_memory() -> dict[Device, int]:
    found: dict[Device, int] = {}
    host: DeviceKind
    *_, host = available_device_kinds()
    kind = detect_device_kind()
    if kind is not host:
        for index in range(kind.count()):
            device = kind.device(index)
            memory = kind.free_memory(device)
            if memory is not None:
                found[index if device.index is not None else kind.name] = memory[0]
    memory = host.free_memory(host.device(0))
    return {**found, "cpu": memory[0] if memory is not None else 0}


def _in_order(given: Mapping[Device, int]) -> dict[Device, int]:
    """Accelerators by number, those with names as given, then the host and the disk."""

    def rank(device: Device) -> tuple[int, int]:
        if isinstance(device, int):
            return 0, device
        return (2, STORES.index(device)) if device in STORES else (1, 0)

    return {device: given[device] for device in sorted(given, key=rank)}


def as_device(given: Any) -> Device:
    """A device as maps name it: a number for an accelerator, or its name; `"cpu"` or `"disk"`.

    Raises:
        ConfigurationError: It is none.
    """
    if isinstance(given, bool) or not isinstance(given, (int, str, torch.device)):
        raise ConfigurationError(f"{given!r} is no device. Give a number, a name, or a torch.device.", code="DT-020")
    if isinstance(given, int):
        if given < 0:
            raise ConfigurationError(f"{given} is no device; accelerators are counted from 0.", code="DT-020")
        return given
    name = str(given)
    if name in STORES:
        return name
    if name.isdecimal():
        return int(name)
    try:
        torch.device(name)
    except RuntimeError:
        known = ["cpu", "disk", *(kind.name for kind in available_device_kinds())]
        raise ConfigurationError(
            f"{name!r} is no device.{nearest(name, known)} Give a number for an accelerator, its name such as "
            '"cuda:0", "cpu" or "disk".',
            code="DT-020",
        ) from None
    return name


def is_there(device: Device) -> bool:
    """Whether this machine has a device that a map names."""
    if device in STORES or device == "meta":
        return True
    kinds = {kind.name: kind for kind in available_device_kinds()}
    if isinstance(device, int):
        kind = detect_device_kind()
        return kind.name not in STORES and device < kind.count()
    named = torch.device(device)
    return named.type in kinds and (named.index or 0) < kinds[named.type].count()


def budgets_of(max_memory: Mapping[Device, int]) -> list[Budget]:
    """Budgets from bytes by device; the disk has room for everything unless it is given a limit."""
    kinds: dict[Any, Any] = {"cpu": "host", "disk": "disk"}
    found = [Budget(device, limit, kinds.get(device, "accelerator")) for device, limit in max_memory.items()]
    found.sort(key=lambda budget: ("accelerator", "host", "disk").index(budget.kind))
    if "disk" not in max_memory:
        found.append(Budget("disk", float("inf"), "disk"))
    return found


def get_balanced_memory(
    model: nn.Module,
    max_memory: Mapping[Any, int | str] | None = None,
    no_split_module_classes: Collection[str] | None = None,
    dtype: str | torch.dtype | None = None,
    special_dtypes: Mapping[str, str | torch.dtype] | None = None,
    low_zero: bool = False,
) -> dict[Device, int]:
    """Bytes for each device with which `infer_auto_device_map` gives each accelerator as even a share as can be.

    Args:
        model: The model; it may have no memory.
        max_memory: What may be used of each device. See `get_max_memory`.
        no_split_module_classes: Names of classes whose modules stay whole. See `infer_auto_device_map`.
        dtype: Count floats as if they were of this dtype, where that is smaller.
        special_dtypes: The same for single tensors, by name.
        low_zero: Leave as much of the first accelerator free as the others can do without.

    Returns:
        Bytes by device. The last accelerator keeps all that it has; all do where the model does not fit on them.
    """
    memory = get_max_memory(max_memory)
    blocks = blocks_of(model, no_split_module_classes, Loading(dtype, special_dtypes))
    shares = balanced_shares(Problem(blocks, budgets_of(memory)), "balanced_low_0" if low_zero else "balanced")
    if shares is None:
        return memory
    *_, last = shares
    return BalancedMemory({**memory, **{device: share for device, share in shares.items() if device != last}})
