"""Hooks that move a module's weights and inputs to one device for the forward, and offload the weights afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from drivetrain.inference.hooks import (
    ModelHook,
    MoveGuard,
    Registered,
    SequentialHook,
    add_hook_to_module,
    hook_of,
    remove_hook_from_module,
)
from drivetrain.inference.offloaded import PrefixedDataset
from drivetrain.inference.sizes import named_module_tensors
from drivetrain.inference.tensors import (
    TiedTensors,
    locate,
    release_memory,
    set_module_tensor_to_device,
    tied_address,
    tied_tensors,
)
from drivetrain.runtime.devices import detect_device_kind
from drivetrain.runtime.errors import CheckpointError, ConfigurationError, nearest
from drivetrain.runtime.pytrees import find_device, send_to_device

ModuleT = TypeVar("ModuleT", bound=nn.Module)
Device = torch.device | str | int
_CPU, _META = torch.device("cpu"), torch.device("meta")
_STATE_HANDLES = "_hf_hook_state_handles"


class AlignDevicesHook(ModelHook):
    """Hook that runs a module on one device, to which it moves inputs and weights.

    With `offload`, the weights are loaded before each forward. Otherwise, they stay on the device.

    Args:
        execution_device: Device of the forward. If None, inputs and weights are not moved.
        offload: Keep the weights off the device, and copy each to the device for the forward only.
        io_same_device: Return the output to the device of the input.
        weights_map: Offloaded weights by their names in the module. Values may be read on access. None keeps the
            offloaded weights in CPU memory.
        offload_buffers: Offload buffers too. If False, buffers stay on the device.
        place_submodules: Include the tensors of submodules.
        skip_keys: Keys of keyword arguments and outputs whose values are not moved.
        tied_params_map: Copies of tied weights by address and device. See `set_module_tensor_to_device`.

    Attributes:
        original_devices: Device of each tensor before offloading, by name.
        input_device: Device of the last input, if `io_same_device` is True.
    """

    _device: torch.device | None
    _decisive = (*ModelHook._decisive, "execution_device", "offload", "io_same_device")

    def __init__(
        self,
        execution_device: Device | None = None,
        offload: bool = False,
        io_same_device: bool = False,
        weights_map: Mapping[str, Tensor] | None = None,
        offload_buffers: bool = False,
        place_submodules: bool = False,
        skip_keys: str | Sequence[str] | None = None,
        tied_params_map: TiedTensors | None = None,
    ) -> None:
        self.execution_device = execution_device
        self.offload = offload
        self.io_same_device = io_same_device
        self.weights_map = weights_map
        self.offload_buffers = offload_buffers
        self.place_submodules = place_submodules
        self.skip_keys = skip_keys
        self.tied_params_map = tied_params_map
        self.input_device: torch.device | None = None
        self.original_devices: dict[str, torch.device] = {}
        self._guard: MoveGuard | None = None
        self._keeps = False
        self._offloaded: list[str] = []
        self._tied: TiedTensors = {}
        self._shared: set[str] = set()
        self._placeholders: list[tuple[dict[str, Any], str, Tensor]] = []
        self._borrowed: list[tuple[int, torch.device]] = []

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "execution_device":
            vars(self)["_device"] = None if value is None else torch.device(value)
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        return (
            f"AlignDevicesHook(execution_device={self.execution_device}, offload={self.offload}, "
            f"io_same_device={self.io_same_device}, offload_buffers={self.offload_buffers}, "
            f"place_submodules={self.place_submodules}, skip_keys={self.skip_keys!r})"
        )

    def __getstate__(self) -> dict[str, Any]:
        # These tables use memory addresses as keys, which are wrong in a copy.
        return {**vars(self), "tied_params_map": None, "_tied": {}, "_shared": set(), "_borrowed": []}

    def needs(self) -> tuple[bool | Registered, bool, bool]:
        # Subclasses may override any method, so register those that they override.
        if type(self) is not AlignDevicesHook:
            return super().needs()
        after = self.offload or self.io_same_device
        before: bool | Registered = after or self.execution_device is not None
        if before and not after and not self.no_grad:
            before = self._move_inputs  # faster than pre_forward: most placed modules only move their inputs
        return before, after, self.offload or self.no_grad

    def init_hook(self, module: ModuleT) -> ModuleT:
        """Move the module's tensors to the execution device, or offload its weights."""
        tensors = _tensors(module, self.place_submodules)
        given = self.tied_params_map
        tied = self._tied = tied_tensors(module, self.place_submodules) if given is None else given
        if not self.offload:
            if self._device is not None:
                for name in tensors:
                    self._put(module, name, self._device, tied_params_map=tied)
            return module
        # Weights maps lack non-persistent buffers, so these stay on the device even with `offload_buffers`.
        kept = _non_persistent_buffers(module) if self.offload_buffers else _buffer_names(module, self.place_submodules)
        going = {name: tensor for name, tensor in tensors.items() if name not in kept}
        self.original_devices = {name: tensor.device for name, tensor in tensors.items()}
        self._offloaded = list(going)
        self._keeps = self.weights_map is None
        if self.weights_map is None:
            self.weights_map = _copy_to_cpu(module, going, tied)
        _check_complete(module, going, self.weights_map)
        self._shared = {name for name, each in going.items() if tied_address(each, tied) and self._register_tied(name)}
        for name in tensors:
            if name in going:
                self._put(module, name, _META)
            elif self._device is not None:
                self._put(module, name, self._device, tied_params_map=tied)
        # Without these hooks, state dicts would contain meta tensors, and loading one would change only those.
        saves: Any = module.register_state_dict_post_hook
        loads: Any = module.register_load_state_dict_pre_hook
        vars(module)[_STATE_HANDLES] = [saves(_save_offloaded), loads(_load_offloaded)]
        self._forbid_moves(module, tensors)
        return module

    def _forbid_moves(self, module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        devices = {_CPU if self._device is None else self._device}
        if self._keeps:
            devices |= {kept.device for kept in self._weights.values()}
        kinds = {(tensor.dtype, device) for tensor in tensors.values() for device in devices}
        self._guard = MoveGuard(module.modules() if self.place_submodules else [module], kinds, self._apply_in_place)

    def _apply_in_place(self, module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool) -> nn.Module:
        for child in module.children() if recurse else ():
            child._apply(function)  # type: ignore[no-untyped-call]
        for tensor in _tensors(module, False).values():
            if not tensor.is_meta:
                function(tensor)
        if self._keeps and _offloading_hook(hook_of(module)) is self:
            for kept in self._weights.values():
                function(kept)
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        device = self._device
        if self.io_same_device:
            first = args[0] if args else None
            found = first.device if isinstance(first, Tensor) else find_device((args, kwargs))
            vars(self)["input_device"] = found  # `__setattr__` of hooks is slow, and this runs in every forward
        if self.offload:
            for name in self._offloaded:
                self._load_tensor(module, name, _CPU if device is None else device)
        return (args, kwargs) if device is None else self._move_inputs(module, args, kwargs) or (args, kwargs)

    def _move_inputs(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        device: Any = self._device
        for value in (*args, *kwargs.values()) if kwargs else args:
            if (not isinstance(value, Tensor) or value.device != device) and value is not None:
                return send_to_device(args, device), send_to_device(kwargs, device, skip_keys=self.skip_keys)
        return None

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        if self.offload:
            self._unload()
        if self.io_same_device and self.input_device is not None:
            output = send_to_device(output, self.input_device, skip_keys=self.skip_keys)
        return output

    def on_error(self, module: nn.Module) -> None:
        if self.offload:
            self._unload()

    def detach_hook(self, module: ModuleT) -> ModuleT:
        if self.offload:
            if self._guard is not None:
                self._guard.remove()
            for handle in vars(module).pop(_STATE_HANDLES, ()):
                handle.remove()
            for name, device in self.original_devices.items():
                if device.type != "meta":
                    value = self._weights[name] if name in self._offloaded else None
                    self._put(module, name, device, value=value)
        return module

    def _put(self, module: nn.Module, name: str, device: torch.device, **options: Any) -> None:
        set_module_tensor_to_device(module, name, device, clear_cache=False, **options)

    def _register_tied(self, name: str) -> bool:
        first, again = self._weights[name], self._weights[name]
        if first.data_ptr() == again.data_ptr():
            self._tied.setdefault(first.data_ptr(), {})
            return True
        return False  # the map reads a new tensor at each access, and its address may be reused by another

    def _load_tensor(self, module: nn.Module, name: str, device: torch.device) -> None:
        value = self._weights[name]
        table, last = locate(module, name)
        self._placeholders.append((table, last, table[last]))
        tied = self._tied if name in self._shared else None
        address = tied_address(value, tied)
        if address is not None and device not in tied[address]:  # type: ignore[index]
            self._borrowed.append((address, device))
        # bitsandbytes stores the scales of an int8 weight as `SCB` next to it.
        scales = None
        if value.dtype == torch.int8 and "weight" in name:
            scales = self._weights.get(name.replace("weight", "SCB"))
        self._put(module, name, device, value=value, fp16_statistics=scales, tied_params_map=tied)
        if torch.is_grad_enabled() and table[last].requires_grad:
            _forbid_gradient(table[last], f"{name!r} of {type(module).__name__}")

    def _unload(self) -> None:
        while self._placeholders:
            table, name, placeholder = self._placeholders.pop()
            table[name] = placeholder
        while self._borrowed:
            address, device = self._borrowed.pop()
            self._tied[address].pop(device, None)

    @property
    def _weights(self) -> Mapping[str, Tensor]:
        return self.weights_map or {}


def _check_complete(module: nn.Module, names: Iterable[str], weights: Mapping[str, Tensor]) -> None:
    held = set(weights)  # `name in weights` may read a tensor from disk
    for name in names:
        if name not in held:
            raise CheckpointError(
                f"{type(module).__name__} cannot be offloaded: weights_map has no {name!r}.{nearest(name, held)} Pass "
                "a map with all parameters of the module, and also its buffers if offload_buffers=True."
            )


def _tensors(module: nn.Module, recurse: bool) -> dict[str, Tensor]:
    named = [*module.named_parameters(recurse=recurse, remove_duplicate=False)]
    return dict([*named, *module.named_buffers(recurse=recurse, remove_duplicate=False)])


def _buffer_names(module: nn.Module, recurse: bool) -> set[str]:
    return {name for name, _ in module.named_buffers(recurse=recurse, remove_duplicate=False)}


def _non_persistent_buffers(module: nn.Module) -> set[str]:
    return {
        f"{path}.{name}" if path else name
        for path, inner in module.named_modules(remove_duplicate=False)
        for name in inner._non_persistent_buffers_set
    }


def _copy_to_cpu(module: nn.Module, tensors: Mapping[str, Tensor], tied: TiedTensors | None) -> dict[str, Tensor]:
    empty = [name for name, tensor in tensors.items() if tensor.is_meta]
    if empty:
        raise ConfigurationError(
            f"{empty[0]!r} of {type(module).__name__} is on the meta device and has no value to offload. Pass "
            "weights_map=..., or load the model first.",
        )
    kept = {}
    for name, tensor in tensors.items():
        address = tied_address(tensor, tied)
        known = None if address is None else tied[address].get(_CPU)  # type: ignore[index]
        kept[name] = (tensor if known is None else known).detach().to(_CPU)
        if address is not None:
            tied[address].setdefault(_CPU, kept[name])  # type: ignore[index]
    return kept


def _save_offloaded(module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    hook: Any = _offloading_hook(hook_of(module))
    for name in getattr(hook, "_offloaded", ()):
        if prefix + name in state and state[prefix + name].is_meta:
            state[prefix + name] = hook.weights_map[name]


def _forbid_gradient(parameter: Tensor, what: str) -> None:
    def refuse(_gradient: Tensor) -> None:
        raise ConfigurationError(
            f"{what} is offloaded, so its gradient would be lost. Freeze it with requires_grad_(False), or keep the "
            "module on its device.",
        )

    # The gradient would accumulate on the loaded copy, which the hook discards after the forward.
    watch: Any = parameter.register_hook
    watch(refuse)


def _load_offloaded(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    hook: Any = _offloading_hook(hook_of(module))
    for name in getattr(hook, "_offloaded", ()):
        value = state.get(prefix + name)
        if value is None or value.is_meta:
            continue
        if not hook._keeps:
            raise ConfigurationError(
                f"{prefix + name!r} is offloaded to a user-provided weights_map and cannot be loaded in place. "
                "Remove the hooks first, or load the model before offloading it.",
            )
        held = hook.weights_map[name]
        if held.shape == value.shape:  # load_state_dict itself raises for other shapes
            held.copy_(value)
            state[prefix + name] = torch.empty_like(value, device=_META)


def has_offloaded_params(module: nn.Module) -> bool:
    """Return True if a module's own weights are offloaded, so that a hook loads them only while the module runs.

    Args:
        module: The module. Submodules are not checked.
    """
    return _offloading_hook(hook_of(module)) is not None


def _offloading_hook(hook: Any) -> Any:
    hooks = hook.hooks if isinstance(hook, SequentialHook) else (hook,)
    return next((each for each in hooks if getattr(each, "offload", False)), None)


@contextmanager
def align_module_device(module: nn.Module, execution_device: Device | None = None) -> Iterator[None]:
    """Context manager that moves a module's own parameters to one device.

    They return on exit.

    Args:
        module: The module, without its submodules. Offloaded weights are loaded for the duration of the context.
        execution_device: The device. If None, offloaded modules use the device of their hook, and other modules are not
            moved.
    """
    hook = _offloading_hook(hook_of(module))
    if isinstance(hook, AlignDevicesHook):
        before = hook.execution_device
        if execution_device is not None:
            hook.execution_device = execution_device
        try:
            hook.pre_forward(module)
            yield
        finally:
            # Unloads the weights without moving any output.
            hook.on_error(module)
            hook.execution_device = before
        return
    device: Any = getattr(hook, "execution_device", None) if execution_device is None else execution_device
    held = [(*locate(module, name), parameter) for name, parameter in module.named_parameters(recurse=False)]
    try:
        for _, name, _ in held if device is not None else ():
            set_module_tensor_to_device(module, name, device, clear_cache=False)
        yield
    finally:
        for table, name, parameter in held if device is not None else ():
            if hook is not None:
                table[name] = parameter  # the offloaded value has not changed
            else:
                set_module_tensor_to_device(module, name, parameter.device, clear_cache=False)


def get_state_dict_offloaded_model(model: nn.Module) -> dict[str, Any]:
    """Return the full state dict of a model, including its offloaded weights.

    Args:
        model: The model.

    Raises:
        CheckpointError: A tensor is on the meta device and no hook offloads it.
    """
    state: dict[str, Any] = model.state_dict()
    empty = [name for name, value in state.items() if isinstance(value, Tensor) and value.is_meta]
    if empty:
        raise CheckpointError(
            f"{len(empty)} tensors of the model have no value, such as {empty[0]!r}. They are on the meta device and "
            "are not offloaded. Load the model's weights first."
        )
    return state


# Hooks for whole models


def attach_execution_device_hook(
    module: nn.Module,
    execution_device: Device,
    skip_keys: str | Sequence[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    tied_params_map: TiedTensors | None = None,
) -> None:
    """Add hooks to a module and its submodules that move the inputs of each to one device.

    Args:
        module: The module. Modules that already have a hook are skipped.
        execution_device: Device of the forward.
        skip_keys: Keys of keyword arguments whose values are not moved.
        preload_module_classes: Class names of modules whose submodules get no hook.
        tied_params_map: Copies of tied weights by address and device. See `set_module_tensor_to_device`.
    """
    if tied_params_map is None:
        tied_params_map = tied_tensors(module)
    if hook_of(module) is None and any(True for _ in named_module_tensors(module, recurse=True)):
        hook = AlignDevicesHook(execution_device, skip_keys=skip_keys, tied_params_map=tied_params_map)
        add_hook_to_module(module, hook)
    if type(module).__name__ in (preload_module_classes or ()):
        return
    for child in module.children():
        attach_execution_device_hook(child, execution_device, skip_keys, preload_module_classes, tied_params_map)


def attach_align_device_hook(
    module: nn.Module,
    execution_device: Device | None = None,
    offload: bool = False,
    weights_map: Mapping[str, torch.Tensor] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | Sequence[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    tied_params_map: TiedTensors | None = None,
) -> None:
    """Add hooks to a module and its submodules that move inputs and offloaded weights to the execution device.

    Args:
        module: The module.
        execution_device: Device of the forward.
        offload: Keep the weights off the device, and copy them to the device for each submodule's forward only.
        weights_map: Offloaded weights by their names in the model.
        offload_buffers: Offload buffers too.
        module_name: Name of `module` in the model.
        skip_keys: Keys of keyword arguments and outputs whose values are not moved.
        preload_module_classes: Class names of modules that load all their weights at once, because they use a
            submodule's weights without calling it.
        tied_params_map: Copies of tied weights by address and device. See `set_module_tensor_to_device`.
    """
    if tied_params_map is None:
        tied_params_map = tied_tensors(module)
    whole = offload and type(module).__name__ in (preload_module_classes or ())
    holds = whole or any(True for _ in named_module_tensors(module))
    if holds and not (offload and has_offloaded_params(module)):  # a shared module is visited more than once
        of_module = weights_map
        if weights_map is not None and module_name:
            of_module = PrefixedDataset(weights_map, f"{module_name}.")
        hook = AlignDevicesHook(
            execution_device,
            offload,
            weights_map=of_module,
            offload_buffers=offload_buffers,
            place_submodules=whole,
            skip_keys=skip_keys,
            tied_params_map=tied_params_map,
        )
        add_hook_to_module(module, hook, append=True)
    if whole:
        return
    for name, child in module.named_children():
        attach_align_device_hook(
            child,
            execution_device,
            offload,
            weights_map,
            offload_buffers,
            f"{module_name}.{name}" if module_name else name,
            skip_keys,
            preload_module_classes,
            tied_params_map,
        )


def attach_align_device_hook_on_blocks(
    module: nn.Module,
    execution_device: Device | Mapping[str, Device] | None = None,
    offload: bool | Mapping[str, bool] = False,
    weights_map: Mapping[str, torch.Tensor] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | Sequence[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    tied_params_map: TiedTensors | None = None,
) -> None:
    """Add hooks to the named blocks of a model, so that each runs on its assigned device.

    Args:
        module: The model.
        execution_device: Device of the forward, or a dict from block name to device.
        offload: Offload the weights between forwards, or a dict from block name to bool.
        weights_map: Offloaded weights by their names in the model.
        offload_buffers: Offload buffers too.
        module_name: Prefix of the module's name in the model.
        skip_keys: Keys of keyword arguments and outputs whose values are not moved.
        preload_module_classes: Class names of modules that load all weights at once. See `attach_align_device_hook`.
        tied_params_map: Copies of tied weights by address and device. See `set_module_tensor_to_device`.
    """
    devices: Mapping[str, Any]
    if isinstance(execution_device, Mapping):
        devices = execution_device
        offloads = offload if isinstance(offload, Mapping) else dict.fromkeys(devices, offload)
    elif isinstance(offload, Mapping):
        devices, offloads = dict.fromkeys(offload, execution_device), offload
    else:
        devices, offloads = {module_name: execution_device}, {module_name: offload}
    if tied_params_map is None:
        tied_params_map = tied_tensors(module)
    shared: dict[str, Any] = {"skip_keys": skip_keys, "tied_params_map": tied_params_map}
    placed = set[int]()
    for inner, block in module.named_modules(remove_duplicate=False):
        name, outermost = ".".join(filter(None, (module_name, inner))), not inner
        if name not in devices or name not in offloads or id(block) in placed:
            if outermost:
                # The model itself only returns its output to the device of its input.
                add_hook_to_module(block, AlignDevicesHook(io_same_device=True, **shared), append=True)
            continue
        device = devices[name]
        # A block that is registered under two names gets one hook.
        placed.add(id(block))
        if offloads[name]:
            attach_align_device_hook(
                block,
                device,
                True,
                weights_map,
                offload_buffers,
                name,
                preload_module_classes=preload_module_classes,
                **shared,
            )
            # A block without tensors of its own has no hook yet, but must move its inputs.
            if hook_of(block) is None:
                add_hook_to_module(block, AlignDevicesHook(device, io_same_device=outermost, **shared), append=True)
        else:
            hook = AlignDevicesHook(device, io_same_device=outermost, place_submodules=True, **shared)
            add_hook_to_module(block, hook, append=True)
        if device is not None and (isinstance(execution_device, Mapping) or isinstance(offload, Mapping)):
            attach_execution_device_hook(block, device, skip_keys, preload_module_classes, tied_params_map)


# Models that take turns on one device


_ON_CPU = torch.device("cpu")


class CpuOffload(ModelHook):
    """Hook that keeps a model on the CPU until its first forward, and then moves it to the execution device.

    Args:
        execution_device: Device of the forward. None means the first accelerator, or the CPU if there is none.
        prev_module_hook: Handle of the model that runs before this one. That model is moved to the CPU when this one
            runs. See `cpu_offload_with_hook`.
    """

    def __init__(
        self, execution_device: Device | None = None, prev_module_hook: UserCpuOffloadHook | None = None
    ) -> None:
        self.prev_module_hook = prev_module_hook
        self.execution_device = detect_device_kind().device(0) if execution_device is None else execution_device

    def init_hook(self, module: ModuleT) -> ModuleT:
        return module.to(_ON_CPU)

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        device = torch.device(self.execution_device)
        previous = self.prev_module_hook
        if previous is not None and previous.model is not module and not _is_on(previous.model, _ON_CPU):
            # Free the memory before this model is moved: both may not fit on the device at the same time.
            previous.offload()
            release_memory(device)
        if not _is_on(module, device):
            module.to(device)
        return send_to_device(args, device), send_to_device(kwargs, device)


def _is_on(module: nn.Module, device: torch.device) -> bool:
    index = device.index
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.device.type != device.type or (index is not None and tensor.device.index not in (None, index)):
            return False
    return True


class UserCpuOffloadHook:
    """Handle that moves a model back to the CPU, or removes the model's `CpuOffload` hook.

    Args:
        model: The model.
        hook: The `CpuOffload` hook of the model.
    """

    def __init__(self, model: nn.Module, hook: ModelHook) -> None:
        self.model, self.hook = model, hook

    def offload(self) -> None:
        """Move the model back to the CPU, until its next call moves the model to the device again."""
        self.hook.init_hook(self.model)

    def remove(self) -> None:
        """Remove the hook that moves the model between the CPU and a device. The model stays where it is now."""
        remove_hook_from_module(self.model)


def cpu_offload_with_hook(
    model: ModuleT, execution_device: Device | None = None, prev_module_hook: UserCpuOffloadHook | None = None
) -> tuple[ModuleT, UserCpuOffloadHook]:
    """Keep a model on the CPU until its forward, and return a handle that moves the model back afterwards.

    It then stays on the device until another model runs. This serves pipelines of several models in which one model may
    run many times in a row. A model leaves the device when its successor runs, or when `offload()` of its handle is
    called.

    Args:
        model: The model.
        execution_device: Device of the forward. None means the first accelerator, or the CPU if there is none.
        prev_module_hook: Handle that this function returned for the previous model.

    Returns:
        The model, and a handle with `offload()` and `remove()`.

    Example:
        ```python
        import torch
        from torch import nn

        from drivetrain import cpu_offload_with_hook

        encoder, first = cpu_offload_with_hook(nn.Linear(4, 8))
        decoder, second = cpu_offload_with_hook(nn.Linear(8, 4), prev_module_hook=first)
        hidden = encoder(torch.ones(4))
        for _ in range(3):
            output = decoder(hidden)  # moves the encoder to the CPU on the first call
        second.offload()
        ```
    """
    hook = CpuOffload(execution_device, prev_module_hook)
    add_hook_to_module(model, hook, append=True)
    return model, UserCpuOffloadHook(model, hook)
