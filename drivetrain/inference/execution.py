"""Which devices a map names, and which one computes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from drivetrain.inference.device_map import DEVICE_MAP_NAMES, DeviceMap, refuse_two_devices, resolve_device_map
from drivetrain.inference.weight_places import named_places
from drivetrain.runtime.devices import available_device_kinds, detect_device_kind, get_device_kind
from drivetrain.runtime.errors import ConfigurationError, nearest
from drivetrain.runtime.logging import get_logger

logger = get_logger(__name__)

DISK = "disk"
CPU = torch.device("cpu")

Location = torch.device | str
"""A device, or `"disk"`."""


def location(given: torch.device | str | int) -> Location:
    """What a map's value stands for.

    Args:
        given: A device, its name, the number of an accelerator, or `"disk"`.

    Raises:
        ConfigurationError: It names no device.
        DeviceNotAvailableError: This machine has no such device.
    """
    if isinstance(given, str) and given == DISK:
        return DISK
    if isinstance(given, int):
        kind = detect_device_kind()
        count = 0 if kind.name == "cpu" else kind.count()
        if not 0 <= given < count:
            raise ConfigurationError(
                f"Device {given} was named, and there are {count} accelerators here. Available: "
                f"{', '.join(each.name for each in available_device_kinds())}, disk.",
                code="DT-020",
            )
        return kind.device(given)
    try:
        device = torch.device(given)
    except RuntimeError as error:
        raise ConfigurationError(
            f"{given!r} names no device. Give such as 0, 'cuda:1', 'cpu' or 'disk'.", code="DT-020"
        ) from error
    if device.type == "meta":
        return device
    kind = get_device_kind(device.type)
    if ":" not in str(device) and kind.name != "cpu":
        return kind.device(0)
    return device if kind.name != "cpu" else CPU


def execution_device(given: torch.device | str | int | None, others: Collection[Location] = ()) -> torch.device:
    """Where weights that come and go are computed with.

    Args:
        given: What was asked for.
        others: Where the rest of the model is.

    Returns:
        That device; else the first accelerator among the others, the machine's first one, or the CPU.
    """
    if given is not None:
        found = location(given)
        if not isinstance(found, torch.device):
            raise ConfigurationError(
                "Nothing can be computed on disk. Give a device, such as 0 or 'cpu'.", code="DT-020"
            )
        return found
    there = next((each for each in others if isinstance(each, torch.device) and each != CPU), None)
    if there is not None:
        return there
    kind = detect_device_kind()
    device = CPU if kind.name == "cpu" else kind.device(0)
    logger.info_once("Modules whose weights are offloaded compute on %s.", device)
    return device


def locations(model: nn.Module, device_map: Mapping[str, torch.device | str | int]) -> dict[str, Location]:
    """Where each parameter and buffer is to be.

    Args:
        model: The model.
        device_map: Devices or `"disk"` by the names of modules, parameters and buffers; the empty one is for all that
            has no other.

    Raises:
        ConfigurationError: A name is not in the model, a parameter is in no entry, or it or what it is tied to has two
            devices.
    """
    places = named_places(model)
    known = {*(name for name, _ in model.named_modules(remove_duplicate=False)), *places}
    for name in device_map:
        if name not in known:
            raise ConfigurationError(
                f"device_map names {name!r}, which is not in the model.{nearest(name, known)}", code="DT-043"
            )
    parsed = {name: location(value) for name, value in device_map.items()}
    found = {name: longest(name, parsed) for name in places}
    missed = [name for name, place in places.items() if found[name] is None and place.is_parameter]
    if missed:
        near = nearest(missed[0].rpartition(".")[0], device_map)
        raise ConfigurationError(f"device_map has no entry for {', '.join(missed[:8])}.{near}", code="DT-110")
    refuse_two_devices(model, device_map)
    rest = next(iter(parsed.values()), CPU)  # buffers of the model itself, which maps leave out
    return {name: rest if where is None else where for name, where in found.items()}


def longest(name: str, device_map: Mapping[str, Location]) -> Location | None:
    """The value of the longest name in a map that is a tensor's, or of a module around it; None where there is none."""
    prefix = name
    while prefix not in device_map:
        if not prefix:
            return None
        prefix = prefix.rpartition(".")[0]
    return device_map[prefix]


def as_dict(
    model: nn.Module,
    device_map: Any,
    max_memory: Mapping[Any, int | str] | None = None,
    no_split_module_classes: Sequence[str] | None = None,
    dtype: torch.dtype | str | None = None,
    offload_buffers: bool = False,
) -> dict[str, torch.device | str | int]:
    """A map as a dict, whatever it was given as.

    Args:
        model: The model.
        device_map: A dict, what has a `to_dict`, a device for the whole model, or `"auto"`, `"balanced"`,
            `"balanced_low_0"` or `"sequential"`.
        max_memory: For those names, as for `infer_auto_device_map`.
        no_split_module_classes: The same.
        dtype: The same.
        offload_buffers: The same.
    """
    if isinstance(device_map, Mapping):
        return device_map if isinstance(device_map, DeviceMap) else dict(device_map)
    if hasattr(device_map, "to_dict"):
        return dict(device_map.to_dict())
    if device_map not in DEVICE_MAP_NAMES:
        if isinstance(device_map, str) and device_map != DISK and nearest(device_map, DEVICE_MAP_NAMES):
            raise ConfigurationError(
                f"device_map={device_map!r} is no map.{nearest(device_map, DEVICE_MAP_NAMES)}", code="DT-001"
            )
        location(device_map)
        return {"": device_map}
    return resolve_device_map(
        model,
        device_map,
        max_memory,
        no_split_module_classes=no_split_module_classes,
        dtype=dtype,
        offload_buffers=offload_buffers,
    )
