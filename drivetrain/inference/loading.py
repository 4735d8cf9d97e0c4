"""Loading of checkpoint files into a model, each weight read once, cast, and placed on its device."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain import checkpoint as files
from drivetrain.checkpoint.export import JoinedWeights, Weights, parse_dtype
from drivetrain.checkpoint.tree import Entry, dtype_name
from drivetrain.inference.device_map import DEVICE_MAP_NAMES, DeviceMap, check_single_device, resolve_device_map
from drivetrain.inference.meta import meta_leftovers
from drivetrain.inference.offloaded import (
    Place,
    like,
    mapped_range,
    mark_mapped,
    named_places,
    persistent,
    write_offloaded,
)
from drivetrain.inference.tensors import find_tied_parameters
from drivetrain.runtime.devices import available_device_kinds, detect_device_kind, get_device_kind
from drivetrain.runtime.errors import CheckpointError, ConfigurationError, nearest
from drivetrain.runtime.logging import get_logger
from drivetrain.runtime.memory import wraps_others

logger = get_logger(__name__)

DISK = "disk"
CPU = torch.device("cpu")

Location = torch.device | str
"""A `torch.device`, or the string `"disk"`."""


def location(given: torch.device | str | int) -> Location:
    if isinstance(given, str) and given == DISK:
        return DISK
    if isinstance(given, int):
        kind = detect_device_kind()
        count = 0 if kind.name == "cpu" else kind.count()
        if not 0 <= given < count:
            raise ConfigurationError(
                f"Device {given} does not exist: this machine has {count} accelerators. Available: "
                f"{', '.join(each.name for each in available_device_kinds())}, disk.",
            )
        return kind.device(given)
    try:
        device = torch.device(given)
    except RuntimeError as error:
        raise ConfigurationError(f"{given!r} is not a device. Use for example 0, 'cuda:1', 'cpu' or 'disk'.") from error
    if device.type == "meta":
        return device
    kind = get_device_kind(device.type)
    if ":" not in str(device) and kind.name != "cpu":
        return kind.device(0)
    return device if kind.name != "cpu" else CPU


def execution_device(given: torch.device | str | int | None, others: Collection[Location] = ()) -> torch.device:
    if given is not None:
        found = location(given)
        if not isinstance(found, torch.device):
            raise ConfigurationError("The disk can store weights but not compute. Use a device such as 0 or 'cpu'.")
        return found
    there = next((each for each in others if isinstance(each, torch.device) and each != CPU), None)
    if there is not None:
        return there
    kind = detect_device_kind()
    device = CPU if kind.name == "cpu" else kind.device(0)
    logger.info_once("Modules whose weights are offloaded compute on %s.", device)
    return device


def locations(model: nn.Module, device_map: Mapping[str, torch.device | str | int]) -> dict[str, Location]:
    places = named_places(model)
    known = {*(name for name, _ in model.named_modules(remove_duplicate=False)), *places}
    for name in device_map:
        if name not in known:
            raise ConfigurationError(f"device_map names {name!r}, which is not in the model.{nearest(name, known)}")
    parsed = {name: location(value) for name, value in device_map.items()}
    found = {name: location_of(name, parsed) for name in places}
    missed = [name for name, place in places.items() if found[name] is None and place.is_parameter]
    if missed:
        near = nearest(missed[0].rpartition(".")[0], device_map)
        raise ConfigurationError(f"device_map has no entry for {', '.join(missed[:8])}.{near} Add one.")
    check_single_device(model, device_map)
    rest = next(iter(parsed.values()), CPU)  # device maps may leave out buffers of the root module
    return {name: rest if where is None else where for name, where in found.items()}


def location_of(name: str, device_map: Mapping[str, Location]) -> Location | None:
    """Look up a tensor's location in a device map, by the longest prefix of its name.

    Returns None without a match.
    """
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
    if isinstance(device_map, Mapping):
        return device_map if isinstance(device_map, DeviceMap) else dict(device_map)
    if hasattr(device_map, "to_dict"):
        return dict(device_map.to_dict())
    if device_map not in DEVICE_MAP_NAMES:
        if isinstance(device_map, str) and device_map != DISK and nearest(device_map, DEVICE_MAP_NAMES):
            raise ConfigurationError(f"Unknown device map {device_map!r}.{nearest(device_map, DEVICE_MAP_NAMES)}")
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


Checkpoint = str | os.PathLike[str] | Mapping[str, Tensor]
Devices = Mapping[str, torch.device | str | int]

_SHOWN = 8


def load_checkpoint_in_model(
    model: nn.Module,
    checkpoint: Checkpoint,
    device_map: Any = None,
    offload_folder: str | os.PathLike[str] | None = None,
    dtype: torch.dtype | str | None = None,
    offload_state_dict: bool = False,
    offload_buffers: bool = False,
    keep_in_fp32_modules: Sequence[str] | None = None,
    offload_8bit_bnb: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> None:
    """Load a checkpoint into a model whose weights are on the devices of a device map.

    Tied weights need only one of their names in the checkpoint. Weights on disk are memory-mapped from the checkpoint's
    own files if these are safetensors of the right dtype.

    Args:
        model: The model. It may be on the meta device, as `init_empty_weights` builds it.
        checkpoint: A safetensors file, a `torch.save` file, an index of several files, a folder with one of these, a
            drivetrain checkpoint, an fsspec URL of any of them, or a dict from name to tensor.
        device_map: A dict from module name to device or `"disk"`, one of these for the whole model, or the name of a
            map. None keeps the devices of the parameters, and uses the CPU for parameters on the meta device.
        offload_folder: Folder for weights on disk that cannot be memory-mapped from their own files.
        dtype: Dtype of the loaded floating-point weights. None keeps the model's dtypes.
        offload_state_dict: Accepted and ignored. Loading never needs more than one additional weight in memory.
        offload_buffers: Keep the buffers of modules on disk on the disk too.
        keep_in_fp32_modules: Parts of names. Weights whose name contains one become float32 even if `dtype` is given.
        offload_8bit_bnb: Accepted and ignored. Weights of any dtype follow the map.
        strict: Raise an error for missing and unexpected names.
        full_state_dict: The checkpoint contains full tensors for a sharded model. False if it is a dict with the same
            shards as the model.
        broadcast_from_rank0: Read the files on rank 0 only, and broadcast each weight. Not possible with a map.

    Raises:
        CheckpointError: The files cannot be read, do not match the model, or leave a tensor of the model without
            values.
        ConfigurationError: The map does not fit the model.
    """
    wanted = parse_dtype(dtype.removeprefix("torch.") if isinstance(dtype, str) else dtype)
    if broadcast_from_rank0 or any(wraps_others(each) and files.is_sharded(each) for each in model.parameters()):
        if device_map is not None:
            raise ConfigurationError(
                f"device_map={device_map!r} does not apply to sharded weights or with broadcast_from_rank0: these "
                "stay on the devices of the model's parameters. Remove device_map or broadcast_from_rank0.",
            )
        keep = keep_in_fp32_modules or ()
        files.load_over_processes(model, checkpoint, wanted, strict, full_state_dict, broadcast_from_rank0, keep)
        return
    loading = _Loading(model, files.open_weights(checkpoint), wanted, keep_in_fp32_modules or ())
    loading.compare(strict)
    where = None
    if device_map is not None:
        given = as_dict(model, device_map, dtype=wanted, offload_buffers=offload_buffers)
        where = locations(model, given)
    loading.load(where, offload_folder, offload_buffers)


def fill_empty(model: nn.Module, weights: Weights, where: Mapping[str, Location]) -> None:
    # Tensors that are not on the meta device keep their values.
    empty = {name for name, place in named_places(model).items() if place.tensor.is_meta}
    found = {name: weights for name in (*empty, *weights.same.values()) if name in weights}
    if empty and found:
        loading = _Loading(model, JoinedWeights(found, weights.where), None, (), only=empty)
        loading.compare(strict=False, quiet=True)
        loading.load(where, None, offload_buffers=True, complete=False)


def load_some(
    model: nn.Module,
    weights: Weights,
    names: Collection[str],
    used: Collection[str],
    where: Mapping[str, Location],
    dtype: torch.dtype | None,
    keep_in_fp32: Collection[str],
    folder: str | os.PathLike[str] | None,
) -> None:
    # Weights in `used` are already loaded.
    left = {name: weights for name in weights if name not in used}
    wanted = set(names) & persistent(model)
    loading = _Loading(model, JoinedWeights(left, weights.where), dtype, keep_in_fp32, only=wanted)
    loading.compare(strict=False)
    loading.load(where, folder, offload_buffers=False)


@dataclass(eq=False)
class _Item:
    names: list[str]
    places: list[Place]
    source: str  # name of the weight in the checkpoint
    dtype: torch.dtype

    @property
    def old(self) -> Tensor:
        return self.places[0].tensor

    def put(self, tensor: Tensor) -> Tensor:
        made = like(self.old, tensor)
        # Under all names, so that a tied tensor stays tied.
        for place in self.places:
            place.put(made)
        return made


class _Loading:
    def __init__(
        self,
        model: nn.Module,
        weights: Weights,
        dtype: torch.dtype | None,
        keep_in_fp32: Collection[str],
        only: Collection[str] | None = None,
    ) -> None:
        self._model, self._weights = model, weights
        self._dtype, self._keep = dtype, keep_in_fp32
        self._ties = find_tied_parameters(model)
        saved = persistent(model)
        shared: dict[int, list[str]] = {}
        places = {name: place for name, place in named_places(model).items() if name in (only or saved)}
        for name, place in places.items():
            shared.setdefault(id(place.tensor), []).append(name)
        self.items: list[_Item] = []
        self.missing: list[str] = []
        declared = {name: group for group in self._ties for name in group}
        used: set[str] = set()
        for names in shared.values():
            source = next((found for name in names if (found := self._source(name)) is not None), None)
            used.update(name for name in names if name in weights)
            if source is not None:
                used.add(source)
                held = [places[name] for name in names]
                self.items.append(_Item(names, held, source, self._dtype_of(names[0], held[0].tensor)))
            # A tensor that is tied to one in the checkpoint is not missing.
            elif not any(self._source(other) for name in names for other in declared.get(name, ())):
                self.missing.extend(names)
        self.left_over = [name for name in weights if name not in used and name not in saved]

    def _source(self, name: str) -> str | None:
        found = name if name in self._weights else self._weights.same.get(name)
        return found if found in self._weights else None

    def _dtype_of(self, name: str, old: Tensor) -> torch.dtype:
        if self._dtype is None or not old.is_floating_point():
            return old.dtype
        keeps = any(part in name for part in self._keep) and self._dtype.itemsize < torch.float32.itemsize
        return torch.float32 if keeps else self._dtype

    def compare(self, strict: bool, quiet: bool = False) -> None:
        # Shapes and kinds of dtype are always compared, names only if `strict` is True.
        where, kind = self._weights.where, type(self._model).__name__
        wrong = []
        for item in self.items:
            entry, old = self._weights.entries[item.source], item.old
            if entry.shape != tuple(old.shape):
                wrong.append(f"{item.names[0]} is {tuple(entry.shape)} there and {tuple(old.shape)} in the model")
            elif entry.dtype.is_floating_point != old.dtype.is_floating_point and not wraps_others(old):
                there, here = dtype_name(entry.dtype), dtype_name(old.dtype)
                wrong.append(f"{item.names[0]} has the dtype {there} there and {here} in the model")
        if strict and self.missing:
            wrong.append(f"missing: {listed(self.missing)}")
        if strict and self.left_over:
            wrong.append(f"left over: {listed(self.left_over)}")
        if wrong:
            advice = "" if strict else " Build the model as it was when its weights were saved."
            raise CheckpointError(f"{where} does not fit {kind}: {listed(wrong, '; ')}.{advice}")
        if self.left_over and not quiet:
            logger.warning(
                f"Some weights of {where} were not used when loading {kind}: {listed(self.left_over)}. Pass "
                "strict=True to raise an error instead."
            )
        if self.missing and not quiet:
            logger.warning(f"{where} has no values for {listed(self.missing)}. {kind} keeps its current values.")

    def load(
        self,
        where: Mapping[str, Location] | None,
        folder: str | os.PathLike[str] | None,
        offload_buffers: bool,
        complete: bool = True,
    ) -> None:
        targets: dict[str, Tensor] = {}
        copies: list[tuple[Tensor, Tensor]] = []
        on_disk: list[_Item] = []
        for item in self.items:
            to = self._location(item, where)
            if to == DISK and (offload_buffers or item.places[0].is_parameter):
                on_disk.append(item)
                continue
            device = to if isinstance(to, torch.device) else CPU
            if device.type == "meta":
                continue
            target = self._target(item, device)
            if item.source in targets:  # the file has one weight for two untied tensors of the model
                copies.append((target, targets[item.source]))
            else:
                targets[item.source] = target
        with torch.no_grad(), torch.inference_mode(False):
            self._weights.fill(targets)
            # After `fill`, since until then the first target has no values.
            for target, filled in copies:
                target.copy_(filled)
            self._map_from_disk(on_disk, folder)
        self._tie()
        if complete:
            self._check_complete(where)

    def _location(self, item: _Item, where: Mapping[str, Location] | None) -> Location:
        if where is None:
            return CPU if item.old.is_meta else item.old.device
        found = [where[name] for name in item.names]
        # A tied weight stays on disk only if the map puts all of its names on disk.
        return next((each for each in found if each != DISK), found[0])

    def _target(self, item: _Item, device: torch.device) -> Tensor:
        old = item.old
        # Values of a memory-mapped tensor must not be overwritten, since it is a part of a file.
        is_its_own = not wraps_others(old) and mapped_range(old) is None
        if is_its_own and old.device == device and old.dtype == item.dtype:
            return old.detach()
        return item.put(torch.empty(old.shape, dtype=item.dtype, device=device)).detach()

    def _map_from_disk(self, items: Sequence[_Item], folder: str | os.PathLike[str] | None) -> None:
        written: list[_Item] = []
        for item in items:
            found = self._weights.mapped(item.source)
            if found is None or self._weights.entries[item.source].dtype != item.dtype:
                written.append(item)
                continue
            file, name = found
            mark_mapped(item.put(file.tensor(name)), file, name)
        if not written:
            return
        if folder is None:
            raise ConfigurationError(self._why_written(written))
        sources = {item.names[0]: item for item in written}
        entries = [Entry(name, item.dtype, tuple(item.old.shape)) for name, item in sources.items()]
        file = write_offloaded(
            entries, lambda name: self._weights[sources[name].source].to(sources[name].dtype), folder
        )
        for name, item in sources.items():
            mark_mapped(item.put(file.tensor(name)), file, name)

    def _why_written(self, items: Sequence[_Item]) -> str:
        first = items[0]
        there = self._weights.entries[first.source].dtype
        if there != first.dtype:
            reason = (
                f"{first.names[0]} needs dtype {dtype_name(first.dtype)} on disk, but is {dtype_name(there)} in "
                f"{self._weights.where}. Pass dtype={dtype_name(there)!r} to use this file"
            )
        else:
            reason = (
                f"{first.names[0]} cannot be memory-mapped in {self._weights.where}; only local safetensors files can. "
                "Convert it to such a file"
            )
        return f"{reason}, or pass offload_folder=... to write a copy there."

    def _tie(self) -> None:
        places = named_places(self._model)
        for group in self._ties:
            held = [places[name] for name in group]
            kept = next((place.tensor for place in held if not place.tensor.is_meta), None)
            for place in held:
                if kept is not None and place.tensor.is_meta and place.tensor.shape == kept.shape:
                    place.put(kept)

    def _check_complete(self, where: Mapping[str, Location] | None) -> None:
        left = {
            name: what
            for name, what in meta_leftovers(self._model).items()
            if where is None or where.get(name) != torch.device("meta")
        }
        if not left:
            return
        computed = [name for name, what in left.items() if what == "buffer that no state dict holds"]
        if computed:
            raise CheckpointError(
                f"These non-persistent buffers have no values, and no checkpoint contains them: {listed(computed)}. "
                "Build the model with init_empty_weights(include_buffers=False), so that the model computes them."
            )
        raise CheckpointError(
            f"Neither {self._weights.where} nor the model has values for {listed(list(left))}. Build the model with "
            "values, or load a checkpoint that contains them."
        )


def listed(names: Sequence[str], between: str = ", ") -> str:
    shown = between.join(names[:_SHOWN])
    return f"{shown}{between}and {len(names) - _SHOWN} more" if len(names) > _SHOWN else shown


def load_state_dict(checkpoint_file: str | os.PathLike[str], device_map: Devices | None = None) -> dict[str, Tensor]:
    """Read all tensors of a checkpoint file, without unpickling arbitrary objects.

    Args:
        checkpoint_file: A checkpoint in any form that `load_checkpoint_in_model` accepts.
        device_map: Dict from module name to device. Tensors without an entry and tensors on `"disk"` are read into CPU
            memory.

    Returns:
        A dict from name to tensor.
    """
    weights = files.open_weights(checkpoint_file)
    parsed = {name: location(value) for name, value in (device_map or {}).items()}
    targets: dict[str, Tensor] = {}
    for name, entry in weights.entries.items():
        where: Any = location_of(name, parsed)
        device = where if isinstance(where, torch.device) else CPU
        targets[name] = torch.empty(entry.shape, dtype=entry.dtype, device=device)
    weights.fill(targets)
    return targets
