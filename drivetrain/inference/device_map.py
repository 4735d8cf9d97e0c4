"""Device maps: dicts from module name to device, computed from memory budgets, and their checks."""

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
    no_fit_error,
    solve,
)
from drivetrain.inference.streaming import MOST_AHEAD
from drivetrain.inference.tensors import find_tied_parameters
from drivetrain.runtime.devices import DeviceKind, available_device_kinds, detect_device_kind
from drivetrain.runtime.errors import ConfigurationError, DeviceNotAvailableError, nearest
from drivetrain.runtime.host import as_bytes, parse_bytes
from drivetrain.runtime.logging import get_logger

logger = get_logger(__name__)

STORES = ("cpu", "disk")


class BalancedMemory(dict[Device, int]):
    """Memory limits by device from `get_balanced_memory`, as a dict class that `infer_auto_device_map` recognizes.

    With this dict, `infer_auto_device_map` reserves no extra memory.
    """


def get_max_memory(max_memory: Mapping[Any, int | str] | None = None) -> dict[Device, int]:
    """Return the memory limit of each device in bytes: the given `max_memory`, or the memory that is free.

    Args:
        max_memory: Limits by device, in bytes or as text such as `"20GiB"`. Keys are an accelerator's number or name,
            `"cpu"` and `"disk"`. None means the free memory of every device of this machine.

    Returns:
        A dict from device to bytes.

    Raises:
        ConfigurationError: A key is not a device, or a value is not a size.
    """
    if max_memory is None:
        return _free_memory()
    parsed = {as_device(device): parse_bytes(size) for device, size in max_memory.items()}
    negative = [device for device, size in parsed.items() if size < 0]
    if negative:
        raise ConfigurationError(f"max_memory[{negative[0]!r}] is {parsed[negative[0]]} bytes. Use 0 or more.")
    absent = [device for device in parsed if device not in STORES and not device_exists(device)]
    if absent:
        logger.info(f"max_memory ignores devices that this machine does not have: {', '.join(map(str, absent))}.")
    return BalancedMemory(parsed) if isinstance(max_memory, BalancedMemory) else _sorted_devices(parsed)


def _free_memory() -> dict[Device, int]:
    found: dict[Device, int] = {}
    host: DeviceKind
    # The CPU is always the last kind.
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


def _sorted_devices(given: Mapping[Device, int]) -> dict[Device, int]:
    def rank(device: Device) -> tuple[int, int]:
        if isinstance(device, int):
            return 0, device
        return (2, STORES.index(device)) if device in STORES else (1, 0)

    return {device: given[device] for device in sorted(given, key=rank)}


def as_device(given: Any) -> Device:
    if isinstance(given, bool) or not isinstance(given, (int, str, torch.device)):
        raise ConfigurationError(f"{given!r} is not a device. Use a number, a name, or a torch.device.")
    if isinstance(given, int):
        if given < 0:
            raise ConfigurationError(f"{given} is not a device. Accelerators have numbers from 0 upwards.")
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
            f"{name!r} is not a device.{nearest(name, known)} Use an accelerator's number, its name such as "
            '"cuda:0", "cpu" or "disk".',
        ) from None
    return name


def device_exists(device: Device) -> bool:
    if device in STORES or device == "meta":
        return True
    kinds = {kind.name: kind for kind in available_device_kinds()}
    if isinstance(device, int):
        kind = detect_device_kind()
        return kind.name not in STORES and device < kind.count()
    named = torch.device(device)
    return named.type in kinds and (named.index or 0) < kinds[named.type].count()


def budgets_of(max_memory: Mapping[Device, int]) -> list[Budget]:
    # A disk without a limit is unlimited.
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
    """Return memory limits that spread a model evenly over the accelerators.

    They are for `infer_auto_device_map`.

    Args:
        model: The model. It may be on the meta device.
        max_memory: Upper limits by device. See `get_max_memory`.
        no_split_module_classes: Class names of modules that stay on one device. See `infer_auto_device_map`.
        dtype: Count floating-point weights in this dtype if it is smaller than their own.
        special_dtypes: Dtypes of single tensors, by name.
        low_zero: Leave as much memory of the first accelerator free as possible.

    Returns:
        A dict from device to bytes. The last accelerator keeps its full limit. All devices do if the model does not
        fit.
    """
    memory = get_max_memory(max_memory)
    blocks = blocks_of(model, no_split_module_classes, Loading(dtype, special_dtypes))
    shares = balanced_shares(Problem(blocks, budgets_of(memory)), "balanced_low_0" if low_zero else "balanced")
    if shares is None:
        return memory
    *_, last = shares  # keeps its full limit, since later placement may need a few bytes more than the even shares
    return BalancedMemory({**memory, **{device: share for device, share in shares.items() if device != last}})


DEVICE_MAP_NAMES = ("auto", "balanced", "balanced_low_0", "sequential")


class DeviceMap(dict[str, Any]):
    """Dict from module name to device, with methods to print it, draw it and explain it.

    Args:
        devices: The dict.
        problem: Blocks and memory budgets that the map was computed for.
        placement: Device index of each block.

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
        """Device that runs the offloaded modules, or None if no module is offloaded."""
        main = self._placement.main
        return None if main is None else self._problem.budgets[main].device

    @property
    def prefetch(self) -> int:
        """Number of offloaded blocks that can be copied to the main device in advance, while another block runs.

        The number that was proven to fit. At least one if memory for one more block is left.
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
        """Dict that maps each device to the memory in bytes that weights, offloaded blocks and activations need."""
        shares = self._problem.shares(self._placement)
        return {budget.device: share for budget, share in zip(self._problem.budgets, shares, strict=True)}

    @property
    def boundaries(self) -> int:
        """Number of times that activations move between devices during one forward of the model."""
        return self._problem.boundaries(self._placement)

    def to_dict(self) -> dict[str, int | str]:
        """Return a plain dict from module name to device, for example to store as JSON."""
        return {name: device if isinstance(device, int) else str(device) for name, device in self.items()}

    def explain(self, name: str) -> str:
        """Return the reason, in a few sentences, why this device map places the module `name` on its device.

        Args:
            name: Name of the module.

        Raises:
            ConfigurationError: The map has no such module.
        """
        found = [block for block in self._problem.blocks for unit in block.names if _is_within(name, unit)]
        found = found or [block for block in self._problem.blocks for unit in block.names if _is_within(unit, name)]
        if not found:
            names = {unit[:end] for block in self._problem.blocks for unit in block.names for end in _prefix_ends(unit)}
            raise ConfigurationError(f"The model has no module {name!r}.{nearest(name, names)}")
        return "\n".join(explain(self._problem, self._placement, block) for block in dict.fromkeys(found))

    def html(self) -> str:
        """Return an HTML page with a bar chart of the memory use of each device."""
        return as_page(self._problem, self._placement)

    def __str__(self) -> str:
        return as_table(self._problem, self._placement)


def _prefix_ends(name: str) -> list[int]:
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
    """Assign each module to an accelerator, or to CPU and disk if memory is short.

    The result is checked to fit. On each device, weights, room for the largest offloaded block and activations (if an
    example is given) stay within the limit. Modules are placed in execution order. Tied weights share a device and
    count once.

    Args:
        model: The model. It may be on the meta device.
        max_memory: Upper limits by device. See `get_max_memory`. The disk is unlimited unless `"disk"` has a limit.
        no_split_module_classes: Class names of modules that stay on one device, such as blocks with residual
            connections. None uses the model's `_no_split_modules`, or else its repeated blocks. An empty list allows
            any split.
        dtype: Count floating-point weights in this dtype if it is smaller than their own.
        special_dtypes: Dtypes of single tensors, by name.
        verbose: Log the device of each block and the reason.
        clean_result: Replace entries of submodules on the same device by one entry of their parent.
        offload_buffers: Offload the buffers of offloaded modules too, instead of keeping them on the execution device.
        fallback_allocation: Fill the remaining accelerator memory with single modules, out of order.
        reserve_max_layer: Reserve room for the largest block on the first accelerator if possible. None does so unless
            `max_memory` comes from `get_balanced_memory`.
        prefetch: Number of offloaded blocks to reserve room for, besides the block that is computed. Lowered until a
            map exists.
        policy: `"sequential"`, `"auto"`, `"balanced"` or `"balanced_low_0"`. See `resolve_device_map`.
        example_args: Positional arguments of a forward, whose shapes determine the activations' size.
        example_kwargs: Keyword arguments of that forward.

    Returns:
        The map, a dict from module name to device.

    Raises:
        ConfigurationError: No map fits. The message names what is missing and what would suffice.
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
        # Reserve room for fewer prefetched blocks until a placement exists.
        for ahead in range(prefetch, -1, -1):
            problem = Problem(blocks, budgets_of(memory), ahead + 1)
            placement = solve(problem, kind, reserve, fallback_allocation, on_host)
            if placement is not None:
                break
        return problem, placement

    # Compute offloaded blocks on the CPU, and offload buffers, only if no other map fits.
    for on_host, buffers_too in product((False, True), dict.fromkeys((offload_buffers, True))):
        problem, placement = attempt(buffers_too, on_host, no_split_module_classes)
        if placement is not None:
            if buffers_too and not offload_buffers:
                _warn_of_buffers(model)
            break
    if fallback_allocation and no_split_module_classes is None and _all_offloaded(problem, placement):
        # With one accelerator, splitting a block between it and the CPU costs no transfer between accelerators.
        finer = attempt(offload_buffers, False, [])
        problem, placement = (problem, placement) if finer[1] is None else finer
    if placement is None:
        raise no_fit_error(problem, units_of_placement(model, []))
    _warn_of_unused(problem, placement)
    found = DeviceMap(_devices(problem, placement), problem, placement)
    if verbose:
        for block in problem.blocks:
            logger.info(explain(problem, placement, block))
    return DeviceMap(clean_device_map(dict(found)), problem, placement) if clean_result else found


def _all_offloaded(problem: Problem, placement: Placement | None) -> bool:
    rooms = problem.accelerators
    return len(rooms) == 1 and (placement is None or rooms[0] not in placement.places)


def _warn_of_buffers(model: nn.Module) -> None:
    buffers = sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
    warnings.warn(
        f"The buffers of offloaded modules ({as_bytes(buffers)} in total) do not fit on the execution device. Pass "
        "offload_buffers=True both here and to dispatch_model to offload the buffers too.",
        stacklevel=3,
    )


def _policy(name: str) -> Policy:
    if name not in DEVICE_MAP_NAMES:
        raise ConfigurationError(
            f"{name!r} is not a device map.{nearest(name, DEVICE_MAP_NAMES)} Names: {', '.join(DEVICE_MAP_NAMES)}.",
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
            "insufficient memory: no accelerator has room for the largest offloaded block, so offloaded blocks are "
            'computed on the CPU. Pass main_device="cpu" to dispatch_model.'
        )
    unused = [str(problem.budgets[room].device) for room in problem.accelerators if room not in placement.places]
    if unused:
        logger.warning(
            f"insufficient memory: no weights stay on {', '.join(unused)}, since placement in order stops at the first "
            "block that does not fit. Pass fallback_allocation=True to fill the remaining memory with other modules."
        )


def clean_device_map(device_map: dict[str, Any], module_name: str = "") -> dict[str, Any]:
    """Shorten a device map in place, by joining entries with the same device.

    Args:
        device_map: The map to change.
        module_name: Only change entries inside this module.

    Returns:
        The map that was passed.
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
            # Parents come first, so a name is grouped under its outermost uniform parent.
            grouped.update(dict.fromkeys(names, module))
    cleaned = {grouped.get(name, name): device for name, device in device_map.items()}
    device_map.clear()
    device_map.update(cleaned)
    return device_map


def check_device_map(model: nn.Module, device_map: Mapping[str, Any]) -> None:
    """Raise an error unless a device map covers each tensor of a model exactly once.

    Tied weights must be on one device. Keys that match no module or tensor of the model produce a warning.

    Args:
        model: The model.
        device_map: The map.

    Raises:
        ConfigurationError: A tensor has no device, or two.
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
            f"The device map gives no device to {', '.join(missing[:3])}{more}.{hint} Add them, a module that contains "
            'them, or "" as the default.',
        )
    check_single_device(model, device_map)


def check_single_device(model: nn.Module, device_map: Mapping[str, Any]) -> None:
    where = {name: _indexed_name(device) for name, device in device_map.items()}
    for inside in where:
        name = next((inside[:end] for end in reversed(_prefix_ends(inside)[:-1]) if inside[:end] in where), None)
        if name is not None and where[inside] != where[name]:
            raise ConfigurationError(
                f"The device map puts {inside!r} on {device_map[inside]!r}, but {name!r}, which contains it, on "
                f"{device_map[name]!r}. Replace the entry {name!r} with one entry for each of its submodules.",
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


def _indexed_name(device: Any) -> str:
    """Return the full name of a device, such as `cuda:0` for `0` and `"cuda"`."""
    named = as_device(device)
    kind = detect_device_kind()
    if isinstance(named, int):
        return str(named) if kind.name == "cpu" else _indexed_name(str(kind.device(named)))
    kept = (*STORES, "meta")
    return next((each for each in kept if named.split(":")[0] == each), named if ":" in named else f"{named}:0")


def check_tied_parameters_on_same_device(tied_params: Sequence[Sequence[str]], device_map: Mapping[str, Any]) -> None:
    """Log a warning for tied weights that a device map assigns to several devices.

    Args:
        tied_params: Groups of names, as from `find_tied_parameters`.
        device_map: The map.
    """
    for group in tied_params:
        devices = {name: _device_of(name, device_map) for name in group}
        if len(set(devices.values())) > 1:
            logger.warning(f"Tied parameters are on different devices: {devices}. Map them to one device.")


def _device_of(name: str, device_map: Mapping[str, Any]) -> Any | None:
    while name not in device_map and name:
        name = name.rpartition(".")[0]
    return device_map.get(name)


def resolve_device_map(
    model: nn.Module,
    device_map: str | int | torch.device | Mapping[str, Any],
    max_memory: Mapping[Any, int | str] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Return a checked device map for a strategy such as `"auto"`, a device or a dict.

    Args:
        model: The model. It may be on the meta device.
        device_map: One device for the whole model, a dict, or a name. `"auto"` and `"balanced"` spread the model evenly
            over the accelerators. `"balanced_low_0"` leaves the first one as empty as possible. `"sequential"` fills
            one after the other. Named maps reserve room to prefetch one offloaded block if possible.
        max_memory: Upper limits by device for named maps. See `get_max_memory`.
        **options: Further arguments of `infer_auto_device_map`.

    Raises:
        ConfigurationError: The map does not fit the model. See `check_device_map`.
        DeviceNotAvailableError: The map names a device that this machine does not have.
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
        if not device_exists(as_device(device)):
            raise DeviceNotAvailableError(
                f"The device map puts {name or 'the model'!r} on {device!r}, which this machine does not have. Devices "
                f"here: {', '.join(map(repr, (*get_max_memory(), 'disk')))}."
            )
    return dict(device_map) if not isinstance(device_map, DeviceMap) else device_map
