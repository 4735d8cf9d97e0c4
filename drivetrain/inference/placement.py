"""Models over devices, memory and disk, by a map."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.checkpoint.mapped_file import mapped_range, mark_mapped
from drivetrain.checkpoint.tensor_file import Entry
from drivetrain.checkpoint.weight_files import open_weights
from drivetrain.inference import execution
from drivetrain.inference.device_map import DeviceMap
from drivetrain.inference.loading import Checkpoint, fill_empty, listed, load_checkpoint_in_model
from drivetrain.inference.meta import meta_leftovers
from drivetrain.inference.offloaded import INDEX, FolderWeights, write_offloaded
from drivetrain.inference.placed import attach, detach
from drivetrain.inference.streaming import StreamOptions, WeightStream
from drivetrain.inference.weight_places import Place, like, named_places
from drivetrain.runtime.errors import CheckpointError, ConfigurationError, nearest

Device = torch.device | str | int
Folder = str | os.PathLike[str]


def dispatch_model(
    model: nn.Module,
    device_map: Any,
    main_device: Device | None = None,
    state_dict: Mapping[str, Tensor] | None = None,
    offload_dir: Folder | None = None,
    offload_index: Mapping[str, Any] | None = None,
    offload_buffers: bool = False,
    skip_keys: str | Sequence[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    force_hooks: bool = False,
    *,
    stream: StreamOptions | None = None,
) -> nn.Module:
    """Put a model's modules where a map has them, so that it runs as before.

    What is on the CPU beside accelerators, and what is on disk, comes to the main device as the forward needs it.
    Safetensors files that a model on the CPU was loaded from stay where they are and are not copied.

    Args:
        model: The model.
        device_map: Devices or `"disk"` by the names of modules; or one of the names that `load_checkpoint_and_dispatch`
            takes.
        main_device: Where what is offloaded is computed with. By default the first device of the map that is neither
            the CPU nor the disk; else the machine's first accelerator where something is on disk, else the CPU.
        state_dict: Values for what is on the CPU, where the model has none.
        offload_dir: Where weights for the disk are written that are in no safetensors file, or are already.
        offload_index: What is in that folder; its own index if None.
        offload_buffers: Whether buffers of offloaded modules are offloaded too, rather than on the main device.
        skip_keys: Keys of inputs and outputs that stay on the device that they are on.
        preload_module_classes: Names of classes whose modules use weights of modules within them without calling those.
        force_hooks: Attach hooks to a model that is on one device too.
        stream: How weights come and go.

    Returns:
        The model, with the map as its `hf_device_map`.

    Raises:
        ConfigurationError: The map does not fit the model, or weights are to be on disk and no folder is given.
        CheckpointError: A weight has no values anywhere.
    """
    given = execution.as_dict(model, device_map, offload_buffers=offload_buffers)
    where = execution.locations(model, given)
    if isinstance(given, DeviceMap):  # as what was proven to fit
        main_device = given.main_device if main_device is None else main_device
        if stream is None and given.main_device != "cpu":
            stream = StreamOptions(prefetch=given.prefetch)
    detach(model)
    _give_values(model, where, state_dict, offload_dir, offload_index)
    devices = list(dict.fromkeys(where.values()))
    all_on_cpu = devices == [execution.CPU] and main_device is None
    main = execution.CPU if all_on_cpu else execution.execution_device(main_device, devices)
    places = named_places(model)
    where = _with_shared_buffers(places, where, main)
    offloaded = [name for name, at in where.items() if at == execution.DISK or (at == execution.CPU and main != at)]
    # Buffers are small and change: on the main device unless they are to be offloaded.
    moved = {name: at for name, at in where.items() if isinstance(at, torch.device) and name not in offloaded}
    beside = [name for name in offloaded if not (offload_buffers or places[name].is_parameter)]
    moved |= dict.fromkeys(beside, main)
    offloaded = [name for name in offloaded if name not in beside]
    _move(places, moved)
    written = _to_disk(places, [name for name in offloaded if where[name] == execution.DISK], offload_dir)
    if offloaded or force_hooks or len(set(moved.values())) > 1:
        made = WeightStream(model, main, offloaded, stream, preload_module_classes)
        needed = {name: execution.location(at) for name, at in given.items()}
        attach(model, made, needed, skip_keys, written, [places[name] for name in beside])
    model.hf_device_map = dict(given)  # type: ignore[assignment]
    return model


def load_checkpoint_and_dispatch(
    model: nn.Module,
    checkpoint: Checkpoint,
    device_map: Any = None,
    max_memory: Mapping[Any, int | str] | None = None,
    no_split_module_classes: Sequence[str] | None = None,
    offload_folder: Folder | None = None,
    offload_buffers: bool = False,
    dtype: torch.dtype | str | None = None,
    offload_state_dict: bool | None = None,
    skip_keys: str | Sequence[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    force_hooks: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
    *,
    main_device: Device | None = None,
    stream: StreamOptions | None = None,
) -> nn.Module:
    """Load weights into a model and put its modules where a map has them: `load_checkpoint_in_model`, `dispatch_model`.

    Args:
        model: The model, usually built by `init_empty_weights`.
        checkpoint: As for `load_checkpoint_in_model`.
        device_map: A map; one device or `"disk"` for the whole model; `"auto"`, `"balanced"`, `"balanced_low_0"` or
            `"sequential"`; or None to load the model where it is.
        max_memory: For a map by name, what it may take of each device.
        no_split_module_classes: For a map by name, names of classes whose modules stay whole.
        offload_folder: As for `load_checkpoint_in_model`.
        offload_buffers: As for `dispatch_model`.
        dtype: As for `load_checkpoint_in_model`.
        offload_state_dict: As for `load_checkpoint_in_model`.
        skip_keys: As for `dispatch_model`.
        preload_module_classes: As for `dispatch_model`.
        force_hooks: As for `dispatch_model`.
        strict: As for `load_checkpoint_in_model`.
        full_state_dict: As for `load_checkpoint_in_model`.
        broadcast_from_rank0: As for `load_checkpoint_in_model`.
        main_device: As for `dispatch_model`.
        stream: As for `dispatch_model`.

    Returns:
        The model.

    Raises:
        CheckpointError: As for `load_checkpoint_in_model`.
        ConfigurationError: As for both.
    """
    given: dict[str, Any] | None = None
    if device_map is not None:
        given = execution.as_dict(model, device_map, max_memory, no_split_module_classes, dtype, offload_buffers)
    load_checkpoint_in_model(
        model,
        checkpoint,
        None if broadcast_from_rank0 else given,
        offload_folder,
        dtype,
        offload_buffers=offload_buffers,
        strict=strict,
        full_state_dict=full_state_dict,
        broadcast_from_rank0=broadcast_from_rank0,
    )
    if given is None:
        return model
    return dispatch_model(
        model,
        given,
        main_device,
        offload_dir=offload_folder,
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        preload_module_classes=preload_module_classes,
        force_hooks=force_hooks,
        stream=stream,
    )


def cpu_offload(
    model: nn.Module,
    execution_device: Device | None = None,
    offload_buffers: bool = False,
    state_dict: Mapping[str, Tensor] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    *,
    stream: StreamOptions | None = None,
) -> nn.Module:
    """Keep a model's parameters in the host's memory, and copy them to a device as the forward needs them.

    Args:
        model: The model.
        execution_device: The device; the machine's first accelerator if None. With the CPU, nothing is copied.
        offload_buffers: Whether buffers too, which are on the device otherwise.
        state_dict: The values, where the model has none.
        preload_module_classes: As for `dispatch_model`.
        stream: How weights come and go.

    Returns:
        The model.
    """
    return _offload(
        model, execution.CPU, execution_device, offload_buffers, state_dict, None, preload_module_classes, stream
    )


def disk_offload(
    model: nn.Module,
    offload_dir: Folder,
    execution_device: Device | None = None,
    offload_buffers: bool = False,
    preload_module_classes: Sequence[str] | None = None,
    *,
    stream: StreamOptions | None = None,
) -> nn.Module:
    """Keep a model's parameters on disk, and read them as the forward needs them.

    Parameters that are in a safetensors file already, as those of a model that was loaded with `device_map="disk"`,
    are used from there. Others are written to the folder, and those of a model without values are read from it.

    Args:
        model: The model.
        offload_dir: The folder; for a model without values a checkpoint, or what an earlier `disk_offload` wrote.
        execution_device: Where the model computes; the machine's first accelerator if None, else the CPU.
        offload_buffers: Whether buffers too, which are on the device otherwise.
        preload_module_classes: As for `dispatch_model`.
        stream: How weights come and go.

    Returns:
        The model.
    """
    return _offload(
        model, execution.DISK, execution_device, offload_buffers, None, offload_dir, preload_module_classes, stream
    )


_TYPES = {"block_level": "block", "leaf_level": "leaf"}


def group_offload(
    model: nn.Module,
    onload_device: Device | None = None,
    offload_device: Device = "cpu",
    offload_type: str = "block_level",
    num_blocks_per_group: int = 1,
    non_blocking: bool = False,
    use_stream: bool = False,
    record_stream: bool = False,
    low_cpu_mem_usage: bool = False,
    offload_to_disk_path: Folder | None = None,
) -> nn.Module:
    """Offload a model by groups of blocks, with the arguments of diffusers' function for it.

    Args:
        model: The model.
        onload_device: Where it computes; the machine's first accelerator if None.
        offload_device: Where weights are between calls; only the CPU.
        offload_type: `"block_level"` or `"leaf_level"`.
        num_blocks_per_group: How many blocks that follow each other come and go together.
        non_blocking: Accepted: copies are asynchronous where `use_stream` is on.
        use_stream: Whether the next group is copied while one computes, if the device has room for both.
        record_stream: Accepted: copies live until the device has used them.
        low_cpu_mem_usage: With `use_stream`, whether weights are page-locked on their way, rather than all at once.
        offload_to_disk_path: A folder to keep the weights in instead.

    Returns:
        The model.
    """
    if offload_type not in _TYPES:
        raise ConfigurationError(
            f"offload_type={offload_type!r}: give one of {', '.join(map(repr, _TYPES))}."
            f"{nearest(offload_type, _TYPES)}",
            code="DT-001",
        )
    if execution.location(offload_device) != execution.CPU:
        raise ConfigurationError(
            f"offload_device={offload_device!r}: weights can be on the CPU between calls, or on disk with "
            "offload_to_disk_path=...",
            code="DT-001",
        )
    options = StreamOptions(
        groups=_TYPES[offload_type],
        num_blocks_per_group=num_blocks_per_group,
        prefetch=None if use_stream else 0,
        pin=use_stream and not low_cpu_mem_usage,
    )
    if offload_to_disk_path is not None:
        return disk_offload(model, offload_to_disk_path, onload_device, stream=options)
    return cpu_offload(model, onload_device, stream=options)


def _offload(
    model: nn.Module,
    rest: execution.Location,
    device: Device | None,
    offload_buffers: bool,
    state_dict: Mapping[str, Tensor] | None,
    folder: Folder | None,
    preload_module_classes: Sequence[str] | None,
    stream: StreamOptions | None,
) -> nn.Module:
    """Offload all of a model."""
    main = execution.execution_device(device)
    detach(model)
    places = named_places(model)
    where = dict.fromkeys(places, rest)
    _give_values(model, where, state_dict, folder, None)
    offloaded = [name for name, place in places.items() if offload_buffers or place.is_parameter]
    beside = [name for name in places if name not in offloaded]
    _move(places, dict.fromkeys(beside, main))
    written: list[Place] = []
    if rest == execution.DISK:
        written = _to_disk(places, offloaded, folder)
    else:
        _move(places, dict.fromkeys(offloaded, execution.CPU))
    made = WeightStream(model, main, offloaded, stream, preload_module_classes)
    attach(model, made, {"": main}, written=written, moved=[places[name] for name in beside])
    return model


def _give_values(
    model: nn.Module,
    where: Mapping[str, execution.Location],
    state_dict: Mapping[str, Tensor] | None,
    folder: Folder | None,
    index: Mapping[str, Any] | None,
) -> None:
    """Fill what is on the meta device from weights that are given, or are in a folder already."""
    if state_dict is not None:
        fill_empty(model, open_weights(state_dict), dict.fromkeys(where, execution.CPU))
    if index is not None or (folder is not None and Path(folder, INDEX).is_file()):
        fill_empty(model, FolderWeights(folder, index), where)
    elif folder is not None and os.path.isdir(folder) and meta_leftovers(model):
        fill_empty(model, open_weights(folder), where)
    left = [name for name in meta_leftovers(model) if where[name] != torch.device("meta")]
    if left:
        raise CheckpointError(
            f"{listed(left)}: no values in the model, nor where others are. Load a checkpoint first, or use "
            "load_checkpoint_and_dispatch; buffers that no checkpoint holds need "
            "init_empty_weights(include_buffers=False)."
        )


def _with_shared_buffers(
    places: Mapping[str, Place], where: Mapping[str, execution.Location], main: torch.device
) -> dict[str, execution.Location]:
    """Locations in which a buffer of several modules is not on disk where another of its names keeps it in reach."""
    found = dict(where)
    sharing: dict[int, list[str]] = {}
    for name, place in places.items():
        sharing.setdefault(id(place.tensor), []).append(name)
    for names in sharing.values():
        kept = next((at for at in (main, execution.CPU) if at in [where[name] for name in names]), None)
        if kept is not None:
            found.update({name: kept for name in names if where[name] == execution.DISK})
    return found


def _move(places: Mapping[str, Place], where: Mapping[str, torch.device]) -> None:
    """Put tensors on devices, what is shared once for each device."""
    moved: dict[tuple[int, torch.device], Tensor] = {}
    kept: list[Tensor] = []  # so that no id is used again
    for name, device in where.items():
        old = places[name].tensor
        if device.type == "meta" or (old.device == device and mapped_range(old) is None):
            continue
        kept.append(old)
        if (id(old), device) not in moved:
            data = old.detach()
            moved[id(old), device] = like(old, data.clone() if old.device == device else data.to(device))
        places[name].put(moved[id(old), device])


def _to_disk(places: Mapping[str, Place], names: Sequence[str], folder: Folder | None) -> list[Place]:
    """Let tensors be parts of files; returns the places of those that were written for that."""
    sharing: dict[int, list[str]] = {}
    for name in names:
        if mapped_range(places[name].tensor) is None:
            sharing.setdefault(id(places[name].tensor), []).append(name)
    if not sharing:
        return []
    if folder is None:
        raise ConfigurationError(
            f"{listed([same[0] for same in sharing.values()])}: on disk by the map, and in no safetensors file. Pass "
            "offload_dir=..., where they are written.",
            code="DT-005",
        )
    tensors = {same[0]: places[same[0]].tensor for same in sharing.values()}
    entries = [Entry(name, each.dtype, tuple(each.shape)) for name, each in tensors.items()]
    file = write_offloaded(entries, lambda name: tensors[name], folder)
    for first, *others in sharing.values():
        made = like(tensors[first], file.tensor(first))
        mark_mapped(made, file, first)
        for name in (first, *others):
            places[name].put(made)
    return [places[name] for same in sharing.values() for name in same]
