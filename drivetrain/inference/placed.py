"""What a model that is spread over devices, memory and disk carries with it: its hooks, and how to undo them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from drivetrain.checkpoint.mapped_file import mapped_range
from drivetrain.inference.execution import Location
from drivetrain.inference.guard import MoveGuard
from drivetrain.inference.hooks import ModelHook, ModuleT
from drivetrain.inference.split_modules import align_split_modules, callable_modules
from drivetrain.inference.streaming import WeightStream
from drivetrain.inference.weight_places import Place, like
from drivetrain.runtime.nested import find_device, send_to_device

HOOK = "_hf_hook"
"""The attribute at which transformers, diffusers and peft look for where a module computes."""


class Placement:
    """The hooks of a model, and the weights that were in memory before.

    Args:
        stream: The weights that come and go.
        written: Where weights are that were written to disk, and are in memory again once the hooks are gone.
        moved: Where buffers are that were moved beside them, and are on the CPU again then.
    """

    def __init__(self, stream: WeightStream, written: Sequence[Place] = (), moved: Sequence[Place] = ()) -> None:
        self.stream = stream
        self._written, self._moved = list(written), list(moved)
        self._handles: list[RemovableHandle] = []
        self._guards: list[MoveGuard] = []

    def hold(self, *handles: RemovableHandle) -> None:
        """Remove these too."""
        self._handles += handles

    def guard(self, computes: Mapping[nn.Module, torch.device]) -> None:
        """Refuse to move or cast these modules, for as long as the hooks are there.

        Args:
            computes: The modules, and where each computes.
        """
        kinds = {
            (tensor.dtype, where)
            for module, device in computes.items()
            for tensor in (*module.parameters(), *module.buffers())
            for where in (tensor.device, device)
        }
        self._guards.append(MoveGuard(computes, kinds))

    def remove(self) -> None:
        """Take all hooks away. Weights are where they were before: in memory, or in the model's own files."""
        self.stream.remove()
        for handle in self._handles:
            handle.remove()
        for guard in self._guards:
            guard.remove()
        in_memory: dict[int, Tensor] = {}
        for place in self._written:
            old = place.tensor
            if id(old) not in in_memory:
                in_memory[id(old)] = like(old, old.detach().clone()) if mapped_range(old) is not None else old
            place.put(in_memory[id(old)])
        for place in self._moved:
            place.put(place.tensor.to("cpu"))
        self._handles, self._guards, self._written, self._moved = [], [], [], []


class PlacedHook(ModelHook):
    """What a module's `_hf_hook` is: where it computes, to be read by other packages.

    Args:
        placement: Of the whole model.
        execution_device: Where the module computes.
        offload: Whether its weights come and go.
        io_same_device: Whether its outputs are moved to where its inputs were.
        skip_keys: Keys of inputs and outputs that stay where they are.
    """

    stays = True  # beside a hook of peft's on one of the modules

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
        """Take away the hooks of the whole model.

        Args:
            module: The module that this belongs to.
        """
        self.placement.remove()
        return module

    def move_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Called before the module."""
        if self.io_same_device:
            self._came_from.append(find_device([args, kwargs]))
        moved = send_to_device((args, kwargs), self.execution_device, skip_keys=self.skip_keys)
        return moved  # type: ignore[no-any-return]

    def move_outputs(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Called after it, or after it has raised."""
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
    """Let a model's modules get their inputs on the device on which they compute, and outputs go back.

    Args:
        model: The model.
        stream: Its weights that come and go.
        device_map: Where its modules are.
        skip_keys: Keys of inputs and outputs that stay where they are.
        written: Where weights are that were in memory and were written to disk.
        moved: Where buffers are that were on the CPU and were moved beside them.
    """
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
        placement.hold(
            model.register_forward_pre_hook(root.move_inputs, prepend=True, with_kwargs=True),
            model.register_forward_hook(root.move_outputs, always_call=True),
        )
    return placement


def detach(model: nn.Module) -> None:
    """Take away what an earlier `attach` has put on a model.

    Args:
        model: The model.
    """
    found = getattr(model, HOOK, None)
    if isinstance(found, PlacedHook):
        found.placement.remove()
        for module in model.modules():
            module.__dict__.pop(HOOK, None)
