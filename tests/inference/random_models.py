"""Random models and budgets for device maps, and what a map takes, counted byte by byte apart from the solver."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from drivetrain.inference import dtype_byte_size

SIZES = (1, 3, 4, 4, 8, 16, 16, 40)
DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.int8)


class Leaf(nn.Module):
    def __init__(self, size: int, dtype: torch.dtype, buffer: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size, dtype=dtype), requires_grad=False)
        if buffer:
            self.register_buffer("table", torch.zeros(buffer), persistent=buffer % 2 == 0)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value


class Pair(nn.Module):
    def __init__(self, first: nn.Module, second: nn.Module, own: int) -> None:
        super().__init__()
        self.first, self.second = first, second
        if own:
            self.scale = nn.Parameter(torch.zeros(own))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value


@dataclass
class Case:
    """A model, and what `infer_auto_device_map` is given for it."""

    model: nn.Module
    max_memory: dict[Any, int]
    dtype: str | None = None
    special_dtypes: dict[str, str] = field(default_factory=dict)
    offload_buffers: bool = False
    no_split_module_classes: list[str] | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        names = ("max_memory", "dtype", "special_dtypes", "offload_buffers", "no_split_module_classes")
        return {name: getattr(self, name) for name in names}


def random_case(rng: random.Random) -> Case:
    """A model of up to six blocks: uneven, nested, with buffers and ties; and budgets, some of which are zero."""
    model = nn.Sequential(*(_block(rng) for _ in range(rng.randint(1, 6))))
    leaves = [(name, module) for name, module in model.named_modules() if isinstance(module, Leaf)]
    for _ in range(rng.choice((0, 0, 1, 2))):
        (_, one), (_, other) = rng.choice(leaves), rng.choice(leaves)
        if one.weight.numel() == other.weight.numel():
            other.weight = one.weight
        elif one.weight.numel() > other.weight.numel() > 1 and one.weight.dtype == other.weight.dtype:
            other.weight = nn.Parameter(one.weight.data[: other.weight.numel()], requires_grad=False)
    if rng.random() < 0.5:
        model = model.to("meta") if not _has_views(model) else model
    dtype = rng.choice((None, None, "float16", "int4"))
    alone = [name for name, leaf in leaves if sum(leaf.weight is each.weight for _, each in leaves) == 1]
    special = {f"{rng.choice(alone)}.weight": "int8"} if alone and not _has_views(model) and rng.random() < 0.3 else {}
    total = sum(tensor.numel() * tensor.element_size() for tensor in [*model.parameters(), *model.buffers()])
    memory: dict[Any, int] = {
        index: rng.choice((0, rng.randint(0, total), rng.randint(0, total // 2 + 1), total // 2 + 1))
        for index in range(rng.randint(0, 3))
    }
    if rng.random() < 0.7 or not memory:
        memory["cpu"] = rng.choice((0, rng.randint(0, total), 2 * total))
    if rng.random() < 0.3:
        memory["disk"] = rng.choice((0, rng.randint(0, total)))
    return Case(model, memory, dtype, special, rng.random() < 0.5, rng.choice((None, [], ["Pair"])))


def _block(rng: random.Random, depth: int = 0) -> nn.Module:
    if depth == 2 or rng.random() < 0.5:
        return Leaf(rng.choice(SIZES), rng.choice(DTYPES), rng.choice((0, 0, 0, 1, 4)))
    return Pair(_block(rng, depth + 1), _block(rng, depth + 1), rng.choice((0, 0, 2)))


def _has_views(model: nn.Module) -> bool:
    return any(each.untyped_storage().nbytes() != each.numel() * each.element_size() for each in model.parameters())


class Counted:
    """What units of a case take on devices.

    Args:
        case: The case.
        units: Names of its units, each a module or a tensor.
        offload_buffers: Whether buffers of offloaded units are offloaded.
    """

    def __init__(self, case: Case, units: Iterable[str], offload_buffers: bool) -> None:
        self.case, self.offload_buffers = case, offload_buffers
        self.parameters = dict(case.model.named_parameters(remove_duplicate=False))
        self.tensors = self.parameters | dict(case.model.named_buffers(remove_duplicate=False))
        self.inside = {
            unit: [name for name in self.tensors if not unit or f"{name}.".startswith(f"{unit}.")] for unit in units
        }

    def bytes_of(self, names: Iterable[str]) -> int:
        """Bytes of tensors, those of shared memory once."""
        covered: dict[tuple[Any, float], set[int]] = {}
        for name in names:
            tensor = self.tensors[name]
            size = tensor.element_size()
            start = tensor.storage_offset() * size
            held = covered.setdefault((tensor.untyped_storage()._cdata, self._scale(name)), set())
            held.update(range(start, start + tensor.numel() * size))
        return sum(math.ceil(len(held) * scale) for (_, scale), held in covered.items())

    def _scale(self, name: str) -> float:
        tensor = self.tensors[name]
        if name in self.case.special_dtypes:
            return dtype_byte_size(self.case.special_dtypes[name]) / tensor.element_size()
        if self.case.dtype is not None and tensor.is_floating_point():
            return min(1.0, dtype_byte_size(self.case.dtype) / tensor.element_size())
        return 1.0

    def tied_units(self) -> list[list[str]]:
        """Units in groups that share memory."""
        merged: list[tuple[list[str], set[int]]] = []
        for unit, names in self.inside.items():
            units, storages = [unit], {self.tensors[name].untyped_storage()._cdata for name in names}
            for each in [each for each in merged if each[1] & storages]:
                merged.remove(each)
                units, storages = each[0] + units, each[1] | storages
            merged.append((units, storages))
        return [units for units, _ in merged]

    def fits(self, devices: Mapping[str, Any], main: Any) -> bool:
        """Whether units go where a map has them, with a main device that computes what is kept elsewhere."""
        memory = self.case.max_memory
        needed: dict[Any, int] = {}
        kept: list[str] = []
        for device in set(devices.values()):
            units = [unit for unit in devices if devices[unit] == device]
            needed[device] = self.bytes_of(name for unit in units for name in self.inside[unit])
            if device == "disk" or (device == "cpu" and main != "cpu"):
                kept += units
        if kept and main is None:
            return False
        if kept:
            moving = [[n for n in self.inside[unit] if self.offload_buffers or n in self.parameters] for unit in kept]
            staying = [n for unit in kept for n in self.inside[unit] if n not in self.parameters]
            needed[main] = needed.get(main, 0) + max(map(self.bytes_of, moving))
            needed[main] += 0 if self.offload_buffers else self.bytes_of(staying)
        return all(size <= memory.get(device, math.inf if device == "disk" else 0) for device, size in needed.items())

    def any_map_fits(self) -> bool:
        """Whether there is a map that fits, by trying all of them."""
        limits: dict[Any, float] = {device: size for device, size in self.case.max_memory.items() if size}
        if "disk" not in self.case.max_memory:
            limits["disk"] = math.inf
        parts = [self._part(group) for group in self.tied_units()]
        mains = [None, *(device for device in limits if device != "disk")]
        return any(_can_place(parts, limits, main, 0, 0) for main in mains)

    def _part(self, group: list[str]) -> tuple[int, int, int]:
        """Bytes of units that are placed together: all, of the largest that is streamed, and of what stays resident."""
        names = [name for unit in group for name in self.inside[unit]]
        moving = [[n for n in self.inside[unit] if self.offload_buffers or n in self.parameters] for unit in group]
        staying = [] if self.offload_buffers else [name for name in names if name not in self.parameters]
        return self.bytes_of(names), max(map(self.bytes_of, moving)), self.bytes_of(staying)


def _can_place(
    parts: list[tuple[int, int, int]], free: dict[Any, float], main: Any, largest: int, resident: int
) -> bool:
    """Whether parts can be placed into what is free, beside the largest that is streamed and what is resident."""
    if main is not None and free[main] < largest + resident:
        return False
    if not parts:
        return True
    (size, streamed, staying), *others = parts
    for device, left in free.items():
        if size > left:
            continue
        kept = device == "disk" or (device == "cpu" and main != "cpu")
        if kept and main is None:
            continue
        now = {**free, device: left - size}
        if _can_place(
            others, now, main, max(largest, streamed) if kept else largest, resident + staying if kept else resident
        ):
            return True
    return False


def units_of(case: Case) -> list[str]:
    """The parts that are placed: modules without others inside or kept whole, and tensors beside modules."""
    repeated = {"Pair"} if _repeats_pairs(case.model) else set()
    kept_whole = repeated if case.no_split_module_classes is None else set(case.no_split_module_classes)
    names: list[str] = []

    def visit(name: str, module: nn.Module) -> None:
        children = list(module.named_children())
        if not children or type(module).__name__ in kept_whole:
            names.append(name)
            return
        before = f"{name}." if name else ""
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        names.extend(before + key for key, _ in own)
        for key, child in children:
            visit(before + key, child)

    visit("", case.model)
    return names


def _repeats_pairs(model: nn.Module) -> bool:
    return sum(isinstance(child, Pair) for child in model.children()) > 1
