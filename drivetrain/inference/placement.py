"""Dispatch of a model's modules to devices, CPU memory and disk by a device map."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from drivetrain.checkpoint.export import open_weights
from drivetrain.checkpoint.tree import Entry
from drivetrain.inference import loading
from drivetrain.inference.device_map import DeviceMap
from drivetrain.inference.hooks import ModelHook, ModuleT, MoveGuard
from drivetrain.inference.loading import Checkpoint, Location, fill_empty, listed, load_checkpoint_in_model
from drivetrain.inference.meta import meta_leftovers
from drivetrain.inference.offloaded import (
    INDEX,
    FolderWeights,
    Place,
    like,
    mapped_range,
    mark_mapped,
    named_places,
    write_offloaded,
)
from drivetrain.inference.streaming import StreamOptions, WeightStream
from drivetrain.runtime.errors import CheckpointError, ConfigurationError, nearest
from drivetrain.runtime.pytrees import find_device, send_to_device

# Modules that a device map splits


class _OneDevice(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        try:
            return func(*args, **kwargs)
        except torch.OutOfMemoryError:  # a RuntimeError too, but moving tensors does not help
            raise
        except RuntimeError:
            # Only errors that tensors on several devices can explain are retried.
            tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            if len({tensor.device for tensor in tensors}) < 2:
                raise
        device = _target_device(func, args, kwargs, tensors)
        args, kwargs = pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), (args, kwargs))
        return func(*args, **kwargs)


def _target_device(func: Any, args: Any, kwargs: Mapping[str, Any], tensors: list[Tensor]) -> torch.device:
    name = getattr(func, "__name__", "")
    if isinstance(kwargs.get("out"), Tensor):
        return kwargs["out"].device  # type: ignore[no-any-return]
    if (name.endswith("_") and not name.endswith("__")) or name.startswith("__i"):
        return args[0].device  # type: ignore[no-any-return]
    return max(tensors, key=lambda tensor: tensor.numel() * tensor.element_size()).device


class _OneDeviceHooks:
    def __init__(self) -> None:
        self._open: list[_OneDevice] = []
        self._suspended: list[_OneDevice | None] = []

    def enter(self, module: nn.Module, args: Any) -> None:
        self._open.append(_OneDevice().__enter__())  # type: ignore[no-untyped-call]

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._open:
            self._open.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def suspend(self, module: nn.Module, args: Any) -> None:
        # Submodules do not need the mode, which slows down every operation.
        mode = self._open[-1] if self._open else None
        # The mode can only be exited if the forward has not entered another one inside it.
        if mode is not None and _get_current_function_mode() is mode:  # type: ignore[no-untyped-call]
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._suspended.append(mode)
        else:
            self._suspended.append(None)

    def resume(self, module: nn.Module, args: Any, output: Any) -> None:
        mode = self._suspended.pop() if self._suspended else None
        if mode is not None:
            mode.__enter__()  # type: ignore[no-untyped-call]


def align_split_modules(model: nn.Module, computes: Mapping[nn.Module, torch.device]) -> list[RemovableHandle]:
    handles: list[RemovableHandle] = []
    several = len(set(computes.values())) > 1
    for module in model.modules():
        called = [each for child in module.children() for each in callable_modules(child)]
        if not called:
            continue
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        devices = {computes[each] for each in module.modules() if each in computes}
        # Inputs are moved only for the root module and for modules that the device map names.
        takes_any = several and bool(devices) and module not in computes
        # CPU tensors of a module with an execution device are offloaded, so they are on that device during its call.
        devices |= {tensor.device for tensor in own if module not in computes or tensor.device.type != "cpu"}
        # The hooks let a module on several devices combine the tensors of its parts.
        if len(devices) > 1 or takes_any:
            hooks = _OneDeviceHooks()
            handles += [
                module.register_forward_pre_hook(hooks.enter),
                module.register_forward_hook(hooks.leave, always_call=True, prepend=True),
            ]
            for each in called:
                handles += [
                    each.register_forward_pre_hook(hooks.suspend),
                    each.register_forward_hook(hooks.resume, always_call=True),
                ]
    return handles


def callable_modules(module: nn.Module) -> Iterator[nn.Module]:
    # A `ModuleList` or `ModuleDict` is not called itself, but its children are.
    if isinstance(module, nn.ModuleList | nn.ModuleDict) and type(module).forward is nn.Module.forward:
        for child in module.children():
            yield from callable_modules(child)
    else:
        yield module


# Hooks of a placed model


HOOK = "_hf_hook"
"""Attribute from which transformers, diffusers and peft read a module's execution device."""


class Placement:
    def __init__(self, stream: WeightStream, written: Sequence[Place] = (), moved: Sequence[Place] = ()) -> None:
        self.stream = stream
        self._written, self._moved = list(written), list(moved)
        self._handles: list[RemovableHandle] = []
        self._guards: list[MoveGuard] = []

    def hold(self, *handles: RemovableHandle) -> None:
        self._handles += handles

    def guard(self, computes: Mapping[nn.Module, torch.device]) -> None:
        kinds = {
            (tensor.dtype, where)
            for module, device in computes.items()
            for tensor in (*module.parameters(), *module.buffers())
            for where in (tensor.device, device)
        }
        self._guards.append(MoveGuard(computes, kinds))

    def remove(self) -> None:
        """Remove the hooks, and move offloaded weights to CPU memory.

        Weights in the model's own files stay there.
        """
        self.stream.remove()
        for handle in self._handles:
            handle.remove()
        for guard in self._guards:
            guard.remove()
        in_memory: dict[int, Tensor] = {}
        for place in self._written:
            old = place.tensor
            if id(old) not in in_memory:
                # The offload folder may be deleted afterwards, so the model must not map its files.
                in_memory[id(old)] = like(old, old.detach().clone()) if mapped_range(old) is not None else old
            place.put(in_memory[id(old)])
        for place in self._moved:
            place.put(place.tensor.to("cpu"))
        self._handles, self._guards, self._written, self._moved = [], [], [], []


class PlacedHook(ModelHook):
    """Hook that moves a module's inputs to its device.

    Libraries such as peft read the device from the module's `_hf_hook`.
    """

    stays = True  # peft adds hooks to single modules, which must not remove this one

    def __init__(
        self,
        placement: Placement,
        execution_device: torch.device,
        offload: bool,
        io_same_device: bool = False,
        skip_keys: str | Sequence[str] | None = None,
    ) -> None:
        self.placement, self.execution_device, self.offload = placement, execution_device, offload
        self.io_same_device, self.skip_keys = io_same_device, skip_keys
        self._came_from: list[torch.device | None] = []

    def detach_hook(self, module: ModuleT) -> ModuleT:
        self.placement.remove()
        return module

    def move_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if self.io_same_device:
            self._came_from.append(find_device([args, kwargs]))
        moved = send_to_device((args, kwargs), self.execution_device, skip_keys=self.skip_keys)
        return moved  # type: ignore[no-any-return]

    def move_outputs(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Return the output, moved to the device of the inputs if `io_same_device` is True."""
        device = self._came_from.pop() if self._came_from else None
        return output if device is None or output is None else send_to_device(output, device, skip_keys=self.skip_keys)


def attach(
    model: nn.Module,
    stream: WeightStream,
    device_map: Mapping[str, Location],
    skip_keys: str | Sequence[str] | None = None,
    written: Sequence[Place] = (),
    moved: Sequence[Place] = (),
) -> Placement:
    placement = Placement(stream, written, moved)
    offloaded = {module for group in stream.groups for module in group.modules}
    computes: dict[nn.Module, torch.device] = dict.fromkeys(offloaded, stream.device)
    modules = dict(model.named_modules())
    for name, where in device_map.items():
        if name in modules:
            moves = where == "disk" or not isinstance(where, torch.device) or where.type in ("cpu", "meta")
            for module in callable_modules(modules[name]):
                computes.setdefault(module, stream.device if moves else where)  # type: ignore[arg-type]
    crosses = any(device.type != "cpu" for device in computes.values())
    for module, device in computes.items():
        is_root = module is model
        hook = PlacedHook(placement, device, module in offloaded, is_root, skip_keys)
        setattr(module, HOOK, hook)
        if crosses and not is_root:
            placement.hold(module.register_forward_pre_hook(hook.move_inputs, prepend=True, with_kwargs=True))
    if model not in computes:
        setattr(model, HOOK, PlacedHook(placement, stream.device, False, True, skip_keys))
    root: PlacedHook = getattr(model, HOOK)
    if crosses:
        placement.hold(*align_split_modules(model, {model: stream.device, **computes}))
        placement.guard({**computes, model: stream.device})
        # Prepended last, so that the model's inputs are moved before all other hooks run.
        placement.hold(
            model.register_forward_pre_hook(root.move_inputs, prepend=True, with_kwargs=True),
            model.register_forward_hook(root.move_outputs, always_call=True),
        )
    return placement


def detach(model: nn.Module) -> None:
    found = getattr(model, HOOK, None)
    if isinstance(found, PlacedHook):
        found.placement.remove()
        for module in model.modules():
            module.__dict__.pop(HOOK, None)


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
    """Distribute a model over devices, CPU memory and disk by a device map.

    The model's call is unchanged. Modules on disk, and modules on the CPU next to accelerators, are offloaded: their
    weights are copied to the main device during the forward. Safetensors files that the model was loaded from are used
    in place.

    Args:
        model: The model.
        device_map: Dict from module name to device or `"disk"`, or a name that `load_checkpoint_and_dispatch` accepts.
        main_device: Device that computes offloaded modules. Default: the first accelerator in the map. If there is
            none, the machine's first accelerator for maps with modules on disk, or else the CPU.
        state_dict: Values of the model's tensors on the meta device.
        offload_dir: Folder for weights on disk that are in no safetensors file. It may contain an earlier offload.
        offload_index: Index of the files in `offload_dir`. None reads the folder's own index.
        offload_buffers: Offload the buffers of offloaded modules too, instead of keeping them on the main device.
        skip_keys: Keys of keyword arguments and outputs whose values are not moved.
        preload_module_classes: Class names of modules that use the weights of submodules without calling them.
        force_hooks: Add hooks even if the model is on one device.
        stream: Options of the transfer of offloaded weights.

    Returns:
        The model. The map is available as `model.hf_device_map`.

    Raises:
        ConfigurationError: The map does not fit the model, or weights go to disk and no folder is given.
        CheckpointError: A tensor has no value.
    """
    given = loading.as_dict(model, device_map, offload_buffers=offload_buffers)
    where = loading.locations(model, given)
    if isinstance(given, DeviceMap):  # the map was proven to fit with these options only
        main_device = given.main_device if main_device is None else main_device
        if stream is None and given.main_device != "cpu":
            stream = StreamOptions(prefetch=given.prefetch)
    detach(model)  # an earlier dispatch would keep replacing weights that are moved below
    _load_meta_tensors(model, where, state_dict, offload_dir, offload_index)
    devices = list(dict.fromkeys(where.values()))
    all_on_cpu = devices == [loading.CPU] and main_device is None
    main = loading.CPU if all_on_cpu else loading.execution_device(main_device, devices)
    places = named_places(model)
    where = _with_shared_buffers(places, where, main)
    offloaded = [name for name, at in where.items() if at == loading.DISK or (at == loading.CPU and main != at)]
    # Buffers are small and may change during a forward, so they stay on the main device by default.
    moved = {name: at for name, at in where.items() if isinstance(at, torch.device) and name not in offloaded}
    beside = [name for name in offloaded if not (offload_buffers or places[name].is_parameter)]
    moved |= dict.fromkeys(beside, main)
    offloaded = [name for name in offloaded if name not in beside]
    _move(places, moved)
    written = _to_disk(places, [name for name in offloaded if where[name] == loading.DISK], offload_dir)
    if offloaded or force_hooks or len(set(moved.values())) > 1:
        made = WeightStream(model, main, offloaded, stream, preload_module_classes)
        needed = {name: loading.location(at) for name, at in given.items()}
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
    """Load a checkpoint into a model that is distributed over devices, CPU and disk.

    This combines `load_checkpoint_in_model` and `dispatch_model`.

    Args:
        model: The model, usually built under `init_empty_weights`.
        checkpoint: The checkpoint, as for `load_checkpoint_in_model`.
        device_map: A dict, one device or `"disk"` for the whole model, `"auto"`, `"balanced"`, `"balanced_low_0"` or
            `"sequential"`. None loads the model on its current devices.
        max_memory: Memory limit of each device, for named maps.
        no_split_module_classes: Class names of modules that stay on one device, for named maps.
        offload_folder: Folder for weights on disk, as for `load_checkpoint_in_model`.
        offload_buffers: Offload buffers too, as for `dispatch_model`.
        dtype: Dtype of the loaded weights, as for `load_checkpoint_in_model`.
        offload_state_dict: Accepted and ignored.
        skip_keys: Keys whose values are not moved, as for `dispatch_model`.
        preload_module_classes: Class names, as for `dispatch_model`.
        force_hooks: Add hooks even if the model is on one device.
        strict: Raise an error for missing and unexpected names.
        full_state_dict: The checkpoint contains full tensors, as for `load_checkpoint_in_model`.
        broadcast_from_rank0: Read the files on rank 0 only, as for `load_checkpoint_in_model`.
        main_device: Device that computes offloaded modules, as for `dispatch_model`.
        stream: Options of the transfer of offloaded weights, as for `dispatch_model`.

    Returns:
        The model.

    Raises:
        CheckpointError: The checkpoint cannot be read or does not match the model.
        ConfigurationError: The map does not fit the model.
    """
    given: dict[str, Any] | None = None
    if device_map is not None:
        given = loading.as_dict(model, device_map, max_memory, no_split_module_classes, dtype, offload_buffers)
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
    """Keep a model's parameters in CPU memory, and copy them to the device part by part during each forward.

    Args:
        model: The model.
        execution_device: Device of the forward. None means the first accelerator. On the CPU, nothing is copied.
        offload_buffers: Offload buffers too. If False, buffers stay on the device.
        state_dict: Values of the model's tensors on the meta device.
        preload_module_classes: Class names of modules that use the weights of submodules without calling them.
        stream: Options of the transfer of weights.

    Returns:
        The model.
    """
    return _offload(
        model, loading.CPU, execution_device, offload_buffers, state_dict, None, preload_module_classes, stream
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
    """Keep a model's parameters on disk, and read them part by part during each forward.

    Parameters that were loaded from safetensors files with `device_map="disk"` are read from these files. Other
    parameters are written to the folder. A model on the meta device gets its values from the folder.

    Args:
        model: The model.
        offload_dir: The folder. For a model on the meta device, a checkpoint or the folder of an earlier
            `disk_offload`.
        execution_device: Device of the forward. None means the first accelerator, or the CPU if there is none.
        offload_buffers: Offload buffers too. If False, buffers stay on the device.
        preload_module_classes: Class names of modules that use the weights of submodules without calling them.
        stream: Options of the transfer of weights.

    Returns:
        The model.
    """
    return _offload(
        model, loading.DISK, execution_device, offload_buffers, None, offload_dir, preload_module_classes, stream
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
    """Keep a model's weights in CPU memory or on disk, and load them in groups.

    Args:
        model: The model.
        onload_device: Device of the forward. None means the first accelerator.
        offload_device: Device of the weights between forwards. Only the CPU is supported.
        offload_type: `"block_level"` or `"leaf_level"`.
        num_blocks_per_group: Number of consecutive blocks that are copied together.
        non_blocking: Accepted and ignored. Copies are asynchronous if `use_stream` is True.
        use_stream: Copy the next group while the current one computes, if the device has room for both.
        record_stream: Accepted and ignored. Copies are freed only after the device has used them.
        low_cpu_mem_usage: With `use_stream`, pin weights one group at a time instead of all at once.
        offload_to_disk_path: Folder to keep the weights in, instead of CPU memory.

    Returns:
        The model.
    """
    if offload_type not in _TYPES:
        raise ConfigurationError(
            f"offload_type is {offload_type!r}, but must be one of "
            f"{', '.join(map(repr, _TYPES))}.{nearest(offload_type, _TYPES)}",
        )
    if loading.location(offload_device) != loading.CPU:
        raise ConfigurationError(
            f"offload_device={offload_device!r} is not supported. Use the CPU, or the disk with "
            "offload_to_disk_path=...",
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
    rest: loading.Location,
    device: Device | None,
    offload_buffers: bool,
    state_dict: Mapping[str, Tensor] | None,
    folder: Folder | None,
    preload_module_classes: Sequence[str] | None,
    stream: StreamOptions | None,
) -> nn.Module:
    main = loading.execution_device(device)
    detach(model)
    places = named_places(model)
    where = dict.fromkeys(places, rest)
    _load_meta_tensors(model, where, state_dict, folder, None)
    offloaded = [name for name, place in places.items() if offload_buffers or place.is_parameter]
    beside = [name for name in places if name not in offloaded]
    _move(places, dict.fromkeys(beside, main))
    written: list[Place] = []
    if rest == loading.DISK:
        written = _to_disk(places, offloaded, folder)
    else:
        _move(places, dict.fromkeys(offloaded, loading.CPU))
    made = WeightStream(model, main, offloaded, stream, preload_module_classes)
    attach(model, made, {"": main}, written=written, moved=[places[name] for name in beside])
    return model


def _load_meta_tensors(
    model: nn.Module,
    where: Mapping[str, loading.Location],
    state_dict: Mapping[str, Tensor] | None,
    folder: Folder | None,
    index: Mapping[str, Any] | None,
) -> None:
    if state_dict is not None:
        fill_empty(model, open_weights(state_dict), dict.fromkeys(where, loading.CPU))
    if index is not None or (folder is not None and Path(folder, INDEX).is_file()):
        fill_empty(model, FolderWeights(folder, index), where)
    elif folder is not None and os.path.isdir(folder) and meta_leftovers(model):
        fill_empty(model, open_weights(folder), where)
    left = [name for name in meta_leftovers(model) if where[name] != torch.device("meta")]
    if left:
        raise CheckpointError(
            f"{listed(left)}: these tensors are on the meta device and have no values. Load a checkpoint first, or use "
            "load_checkpoint_and_dispatch. Non-persistent buffers need init_empty_weights(include_buffers=False)."
        )


def _with_shared_buffers(
    places: Mapping[str, Place], where: Mapping[str, loading.Location], main: torch.device
) -> dict[str, loading.Location]:
    # A shared buffer is on disk only if all its modules are.
    found = dict(where)
    sharing: dict[int, list[str]] = {}
    for name, place in places.items():
        sharing.setdefault(id(place.tensor), []).append(name)
    for names in sharing.values():
        kept = next((at for at in (main, loading.CPU) if at in [where[name] for name in names]), None)
        if kept is not None:
            found.update({name: kept for name in names if where[name] == loading.DISK})
    return found


def _move(places: Mapping[str, Place], where: Mapping[str, torch.device]) -> None:
    moved: dict[tuple[int, torch.device], Tensor] = {}
    kept: list[Tensor] = []  # a reference keeps each id unique
    for name, device in where.items():
        old = places[name].tensor
        if device.type == "meta" or (old.device == device and mapped_range(old) is None):
            continue
        kept.append(old)
        if (id(old), device) not in moved:
            data = old.detach()
            # On an equal device, the tensor is memory-mapped and becomes a copy in memory.
            moved[id(old), device] = like(old, data.clone() if old.device == device else data.to(device))
        places[name].put(moved[id(old), device])


def _to_disk(places: Mapping[str, Place], names: Sequence[str], folder: Folder | None) -> list[Place]:
    # Tensors that are in no file yet are written first.
    sharing: dict[int, list[str]] = {}
    for name in names:
        if mapped_range(places[name].tensor) is None:
            sharing.setdefault(id(places[name].tensor), []).append(name)
    if not sharing:
        return []
    if folder is None:
        raise ConfigurationError(
            "The device map puts these tensors on disk, but no safetensors file contains them: "
            f"{listed([same[0] for same in sharing.values()])}. Pass offload_dir=... to write them to a folder.",
        )
    # Shared tensors are written once, under their first name.
    tensors = {same[0]: places[same[0]].tensor for same in sharing.values()}
    entries = [Entry(name, each.dtype, tuple(each.shape)) for name, each in tensors.items()]
    file = write_offloaded(entries, lambda name: tensors[name], folder)
    for first, *others in sharing.values():
        made = like(tensors[first], file.tensor(first))
        mark_mapped(made, file, first)
        for name in (first, *others):
            places[name].put(made)
    return [places[name] for same in sharing.values() for name in same]
