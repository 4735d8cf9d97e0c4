"""Device maps: where each module of a model goes, found so that everything fits, shown, and checked."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from itertools import product
from typing import Any, get_args

import torch
from torch import nn

from drivetrain.inference.map_page import as_page, as_table, explain
from drivetrain.inference.sizes import Loading, activations_of, all_tensors, blocks_of, units_of_placement
from drivetrain.inference.solver import (
    Budget,
    Device,
    Placement,
    Policy,
    Problem,
    Share,
    balanced_shares,
    refuse,
    solve,
)
from drivetrain.inference.streaming import MOST_AHEAD
from drivetrain.inference.tensors import find_tied_parameters
from drivetrain.runtime.devices import DeviceKind, available_device_kinds, detect_device_kind
from drivetrain.runtime.errors import ConfigurationError, DeviceNotAvailableError, nearest
from drivetrain.runtime.host import as_bytes, parse_bytes
from drivetrain.runtime.logging import get_logger

# How much memory there is for a model on each device


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
        raise ConfigurationError(f"max_memory gives {negative[0]!r} {parsed[negative[0]]} bytes; give 0 or more.")
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
    """A device as maps name it: a number for an accelerator, or its name; `"cpu"` or `"disk"`."""
    if isinstance(given, bool) or not isinstance(given, (int, str, torch.device)):
        raise ConfigurationError(f"{given!r} is no device. Give a number, a name, or a torch.device.")
    if isinstance(given, int):
        if given < 0:
            raise ConfigurationError(f"{given} is no device; accelerators are counted from 0.")
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


DEVICE_MAP_NAMES = ("auto", "balanced", "balanced_low_0", "sequential")


class DeviceMap(dict[str, Any]):
    """Where each module of a model goes: a dict of devices by the names of modules, which can also be printed.

    Args:
        devices: The dict.
        problem: The blocks and budgets that it was found for.
        placement: What was found for them.

    Example:
        ```python
        from torch import nn

        from drivetrain import infer_auto_device_map

        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        device_map = infer_auto_device_map(model, max_memory={0: 300, "cpu": "1GB"}, reserve_max_layer=False)
        print(device_map)  # a table
        print(device_map.explain("1"))
        ```
    """

    def __init__(self, devices: Mapping[str, Any], problem: Problem, placement: Placement) -> None:
        super().__init__(devices)
        self._problem, self._placement = problem, placement

    def __reduce__(self) -> tuple[Any, ...]:
        return DeviceMap, (dict(self), self._problem, self._placement)

    @property
    def main_device(self) -> Device | None:
        """The device that computes what is kept on the CPU or the disk; None where nothing is."""
        main = self._placement.main
        return None if main is None else self._problem.budgets[main].device

    @property
    def prefetch(self) -> int:
        """How many blocks that are kept elsewhere are fetched ahead of the one that the main device computes.

        As many as the map has proven room for; one where it was asked for none, and memory is left.
        """
        main, problem = self._placement.main, self._problem
        kept = [
            block.streamed
            for block, place in zip(problem.blocks, self._placement.places, strict=True)
            if block.streamed and not problem.computes(place, main)
        ]
        if main is None or not kept:
            return 0
        proven = problem.stream_buffers - 1
        return max(proven, min(MOST_AHEAD, proven + int(problem.shares(self._placement)[main].free // max(kept))))

    @property
    def shares(self) -> dict[Device, Share]:
        """What each device takes: the proof that the map fits, in which no share has less than 0 bytes free."""
        shares = self._problem.shares(self._placement)
        return {budget.device: share for budget, share in zip(self._problem.budgets, shares, strict=True)}

    @property
    def boundaries(self) -> int:
        """How often the order of execution goes from one device to another."""
        return self._problem.boundaries(self._placement)

    def to_dict(self) -> dict[str, int | str]:
        """The plain dict, of numbers and names alone."""
        return {name: device if isinstance(device, int) else str(device) for name, device in self.items()}

    def explain(self, name: str) -> str:
        """Why a module is where it is.

        Args:
            name: Its name.

        Raises:
            ConfigurationError: The map has no such module.
        """
        found = [block for block in self._problem.blocks for unit in block.names if _is_within(name, unit)]
        found = found or [block for block in self._problem.blocks for unit in block.names if _is_within(unit, name)]
        if not found:
            names = {unit[:end] for block in self._problem.blocks for unit in block.names for end in _ends(unit)}
            raise ConfigurationError(f"The model has no module {name!r}.{nearest(name, names)}")
        return "\n".join(explain(self._problem, self._placement, block) for block in dict.fromkeys(found))

    def html(self) -> str:
        """A page that draws the devices as bars."""
        return as_page(self._problem, self._placement)

    def __str__(self) -> str:
        return as_table(self._problem, self._placement)


def _ends(name: str) -> list[int]:
    """Where the names of the modules that a name is within end, and its own."""
    return [*(index for index, letter in enumerate(name) if letter == "."), len(name)]


def _is_within(name: str, module: str) -> bool:
    return not module or name == module or name.startswith(f"{module}.")


def infer_auto_device_map(
    model: nn.Module,
    max_memory: Mapping[Any, int | str] | None = None,
    no_split_module_classes: Collection[str] | None = None,
    dtype: str | torch.dtype | None = None,
    special_dtypes: Mapping[str, str | torch.dtype] | None = None,
    verbose: bool = False,
    clean_result: bool = True,
    offload_buffers: bool = False,
    fallback_allocation: bool = False,
    reserve_max_layer: bool | None = None,
    prefetch: int = 0,
    policy: str = "sequential",
    example_args: Sequence[Any] = (),
    example_kwargs: Mapping[str, Any] | None = None,
) -> DeviceMap:
    """Find where the modules of a model go: on accelerators as far as they fit, then on the CPU, then on the disk.

    The map is proven: on each device, the weights on it, room for the largest block that is computed there and kept
    elsewhere, and activations where an example is given, are at most what it has. Each device has one run of the order
    of execution, where that is possible; weights that are tied are on one device and counted once.

    Args:
        model: The model; it may have no memory.
        max_memory: What may be used of each device. See `get_max_memory`. The disk has room for everything, unless
            `"disk"` is given a limit.
        no_split_module_classes: Names of classes whose modules stay on one device, such as those with residual
            connections. None keeps what the model names in `_no_split_modules` whole, else the blocks that it repeats;
            an empty list lets all modules be split.
        dtype: Count floats as if they were of this dtype, where that is smaller.
        special_dtypes: The same for single tensors, by name.
        verbose: Log where each block goes, and why.
        clean_result: Name a module in place of all modules inside that go to one device.
        offload_buffers: Keep the buffers of modules on the CPU or the disk there too, rather than on the device that
            computes them.
        fallback_allocation: Fill what is left of accelerators with single modules, out of order.
        reserve_max_layer: Leave room for the largest block on the first accelerator where it can be spared. None
            does, unless `max_memory` comes from `get_balanced_memory`.
        prefetch: Leave room to fetch so many blocks that are kept elsewhere ahead of the one that is computed, or as
            many as leave a map.
        policy: `"sequential"`, or another name of a map. See `resolve_device_map`.
        example_args: Positional arguments of a forward, by whose shapes activations are measured.
        example_kwargs: Keyword arguments of it.

    Returns:
        The map: a dict of devices by the names of modules.

    Raises:
        ConfigurationError: There is no such map; what is short and what would do is in the message.
    """
    memory = get_max_memory(max_memory)
    reserve = not isinstance(memory, BalancedMemory) if reserve_max_layer is None else reserve_max_layer
    kind = _policy(policy)
    activations = {}
    if example_args or example_kwargs:
        units = units_of_placement(model, no_split_module_classes)
        activations = activations_of(model, units, example_args, example_kwargs or {}, dtype)

    def attempt(buffers_too: bool, on_host: bool, classes: Collection[str] | None) -> tuple[Problem, Placement | None]:
        blocks = blocks_of(model, classes, Loading(dtype, special_dtypes, buffers_too), activations)
        for ahead in range(prefetch, -1, -1):
            problem = Problem(blocks, budgets_of(memory), ahead + 1)
            placement = solve(problem, kind, reserve, fallback_allocation, on_host)
            if placement is not None:
                break
        return problem, placement

    for on_host, buffers_too in product((False, True), dict.fromkeys((offload_buffers, True))):
        problem, placement = attempt(buffers_too, on_host, no_split_module_classes)
        if placement is not None:
            if buffers_too and not offload_buffers:
                _warn_of_buffers(model)
            break
    if fallback_allocation and no_split_module_classes is None and _only_streams(problem, placement):
        # One device computes all of it, so that blocks can be split between what stays there and what does not.
        finer = attempt(offload_buffers, False, [])
        problem, placement = (problem, placement) if finer[1] is None else finer
    if placement is None:
        raise refuse(problem, units_of_placement(model, []))
    _warn_of_unused(problem, placement)
    found = DeviceMap(_devices(problem, placement), problem, placement)
    if verbose:
        for block in problem.blocks:
            logger.info(explain(problem, placement, block))
    return DeviceMap(clean_device_map(dict(found)), problem, placement) if clean_result else found


def _only_streams(problem: Problem, placement: Placement | None) -> bool:
    """Whether there is one accelerator, and nothing stays on it."""
    rooms = problem.accelerators
    return len(rooms) == 1 and (placement is None or rooms[0] not in placement.places)


def _warn_of_buffers(model: nn.Module) -> None:
    buffers = sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
    warnings.warn(
        f"The buffers of offloaded modules (of {as_bytes(buffers)} in all) have no room on the device that computes "
        "them. The map holds with offload_buffers=True; pass it here and where the model is dispatched.",
        stacklevel=3,
    )


def _policy(name: str) -> Policy:
    if name not in DEVICE_MAP_NAMES:
        raise ConfigurationError(
            f"{name!r} is no device map.{nearest(name, DEVICE_MAP_NAMES)} Names: {', '.join(DEVICE_MAP_NAMES)}.",
        )
    policy: Any = "balanced" if name == "auto" else name
    assert policy in get_args(Policy)
    return policy  # type: ignore[no-any-return]


def _devices(problem: Problem, placement: Placement) -> dict[str, Device]:
    found = sorted(
        (position, name, problem.budgets[place].device)
        for block, place in zip(problem.blocks, placement.places, strict=True)
        for position, name in zip(block.positions, block.names, strict=True)
    )
    return {name: device for _, name, device in found}


def _warn_of_unused(problem: Problem, placement: Placement) -> None:
    if all(problem.computes(place, None) for place in placement.places):
        return
    if placement.main is not None and problem.accelerators and problem.budgets[placement.main].kind == "host":
        logger.warning(
            "insufficient memory: no accelerator has room for the largest block that is kept on the CPU or the disk, "
            'so those are computed on the CPU. Pass main_device="cpu" where the model is dispatched.'
        )
    unused = [str(problem.budgets[room].device) for room in problem.accelerators if room not in placement.places]
    if unused:
        logger.warning(
            f"insufficient memory: no weights stay on {', '.join(unused)}, since the first block that does not fit "
            "ends what is placed in order. Pass fallback_allocation=True to fill what is left with others."
        )


def clean_device_map(device_map: dict[str, Any], module_name: str = "") -> dict[str, Any]:
    """Name a module in place of all modules inside of it, where they go to one device.

    Args:
        device_map: The map, which is changed.
        module_name: Do so within this module alone.

    Returns:
        The same map.
    """
    below: dict[str, list[str]] = {}
    for name in device_map:
        if _is_within(name, module_name):
            parts = name.split(".") if name else []
            for end in range(module_name.count(".") + 1 if module_name else 0, len(parts) + 1):
                below.setdefault(".".join(parts[:end]), []).append(name)
    grouped: dict[str, str] = {}
    for module in sorted(below, key=lambda name: name.count(".") if name else -1):
        names = [name for name in below[module] if name not in grouped]
        if all(device_map[name] == device_map[names[0]] for name in names):
            grouped.update(dict.fromkeys(names, module))
    cleaned = {grouped.get(name, name): device for name, device in device_map.items()}
    device_map.clear()
    device_map.update(cleaned)
    return device_map


def check_device_map(model: nn.Module, device_map: Mapping[str, Any]) -> None:
    """Check that a map names a device for each parameter and buffer of a model, once, and one for those that are tied.

    Names of the map that are nothing in the model are warned of.

    Args:
        model: The model.
        device_map: The map.

    Raises:
        ConfigurationError: Something has no device, or two.
    """
    modules = {name for name, _ in model.named_modules(remove_duplicate=False)}
    tensors = all_tensors(model)
    unknown = [name for name in device_map if name not in modules and name not in tensors]
    if unknown:
        warnings.warn(
            "The following device_map keys do not match any submodules in the model: "
            + ", ".join(f"{name!r}{nearest(name, modules)}" for name in unknown),
            stacklevel=2,
        )
    devices = {name: _device_of(name, device_map) for name in tensors}
    missing = [name for name, device in devices.items() if device is None]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        hint = nearest(missing[0].rpartition(".")[0] or missing[0], unknown)
        raise ConfigurationError(
            f"The device map gives no device to {', '.join(missing[:3])}{more}.{hint} Add them, a module that they are "
            'in, or "" for all that is not named.',
        )
    refuse_two_devices(model, device_map)


def refuse_two_devices(model: nn.Module, device_map: Mapping[str, Any]) -> None:
    """Refuse a map that gives a module, or a weight that is tied, two devices."""
    where = {name: _one_spelling(device) for name, device in device_map.items()}
    for inside in where:
        name = next((inside[:end] for end in reversed(_ends(inside)[:-1]) if inside[:end] in where), None)
        if name is not None and where[inside] != where[name]:
            raise ConfigurationError(
                f"The device map names {inside!r} twice: {device_map[inside]!r} by its own name, and "
                f"{device_map[name]!r} by {name!r}. Name the other modules of {name!r} one by one.",
            )
    for group in find_tied_parameters(model):
        devices = {name: _device_of(name, where) for name in group}
        apart = [name for name in group if devices[name] != devices[group[0]]]
        if apart:
            one, other = group[0], apart[0]
            raise ConfigurationError(
                f"{one} and {other} are one weight, but the device map puts them on {_device_of(one, device_map)!r} "
                f"and {_device_of(other, device_map)!r}. Put both on one device"
                + (f", with {', '.join(sorted({*group} - {one, other}))}." if len(group) > 2 else "."),
            )


def _one_spelling(device: Any) -> str:
    """A device as torch spells it, so that `0` and `"cuda:0"` are the same where they are."""
    named = as_device(device)
    kind = detect_device_kind()
    if isinstance(named, int):
        return str(named) if kind.name == "cpu" else _one_spelling(str(kind.device(named)))
    kept = (*STORES, "meta")
    return next((each for each in kept if named.split(":")[0] == each), named if ":" in named else f"{named}:0")


def check_tied_parameters_on_same_device(tied_params: Sequence[Sequence[str]], device_map: Mapping[str, Any]) -> None:
    """Warn of weights that are tied, and that a map puts on several devices.

    Args:
        tied_params: Groups of names, as `find_tied_parameters` returns them.
        device_map: The map.
    """
    for group in tied_params:
        devices = {name: _device_of(name, device_map) for name in group}
        if len(set(devices.values())) > 1:
            logger.warning(f"Tied parameters are on different devices: {devices}. Put them on one.")


def _device_of(name: str, device_map: Mapping[str, Any]) -> Any | None:
    """The device of a tensor: that of the longest name that it is within."""
    while name not in device_map and name:
        name = name.rpartition(".")[0]
    return device_map.get(name)


def resolve_device_map(
    model: nn.Module,
    device_map: str | int | torch.device | Mapping[str, Any],
    max_memory: Mapping[Any, int | str] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """The map that a name, a device or a dict stands for, checked against the model and this machine.

    Args:
        model: The model; it may have no memory.
        device_map: `"auto"` and `"balanced"` let each accelerator have as even a share as can be, `"balanced_low_0"`
            all but the first, `"sequential"` fills one after the other; where blocks are streamed, there is room to
            fetch one ahead, if possible. Or one device for all, or a map.
        max_memory: What may be used of each device, where a map is to be found. See `get_max_memory`.
        **options: Other arguments of `infer_auto_device_map`.

    Raises:
        ConfigurationError: The map does not fit the model. See `check_device_map`.
        DeviceNotAvailableError: It names a device that this machine does not have.
    """
    if isinstance(device_map, str) and device_map in DEVICE_MAP_NAMES:
        device_map = infer_auto_device_map(model, max_memory, policy=device_map, **{"prefetch": 1, **options})
    elif isinstance(device_map, str | int | torch.device):
        try:
            device_map = {"": as_device(device_map)}
        except ConfigurationError as error:
            hint = nearest(str(device_map), DEVICE_MAP_NAMES)
            raise ConfigurationError(f"{error.message}{hint} Names of maps: {', '.join(DEVICE_MAP_NAMES)}.") from None
    check_device_map(model, device_map)
    for name, device in device_map.items():
        if not is_there(as_device(device)):
            raise DeviceNotAvailableError(
                f"The device map puts {name or 'the model'!r} on {device!r}, which this machine does not have. Devices "
                f"here: {', '.join(map(repr, (*get_max_memory(), 'disk')))}."
            )
    return dict(device_map) if not isinstance(device_map, DeviceMap) else device_map
