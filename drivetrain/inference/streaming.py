"""Streaming of offloaded weights: groups are copied to the device as the forward needs them, and freed again."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import psutil
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from drivetrain.inference.device_copies import DeviceCopies, MappedPages, groups_of
from drivetrain.inference.hooks import MoveGuard, StreamedModelError
from drivetrain.inference.offloaded import mapped_range, named_places
from drivetrain.runtime.devices import get_device_kind
from drivetrain.runtime.errors import ConfigurationError


@dataclass(frozen=True)
class StreamOptions:
    """Options that control how offloaded weights are copied to the device during a forward pass.

    Args:
        groups: `"block"` makes one group of each repeated block, and of each other module with weights of its own.
            `"leaf"` makes one group of each module with weights of its own.
        num_blocks_per_group: Number of consecutive blocks that form one group.
        prefetch: Number of groups to copy ahead, in the order of the previous forward. None means one, or zero if the
            device has no room for two groups.
        budget: Bytes of the first groups that stay on the device. None means zero, or four fifths of the available
            memory on the CPU, where the pages are reclaimable.
        pin: Pin the offloaded weights in place, instead of copying them through pinned buffers.
    """

    groups: str = "block"
    num_blocks_per_group: int = 1
    prefetch: int | None = None
    budget: int | None = None
    pin: bool = False

    def __post_init__(self) -> None:
        if (self.prefetch is not None and self.prefetch < 0) or (self.budget is not None and self.budget < 0):
            raise ConfigurationError(
                f"prefetch and budget must not be negative, but are {self.prefetch} and {self.budget}. Use 0 for none.",
            )


MOST_AHEAD = 1
"""Number of groups to prefetch by default. All copies share one stream, so prefetching more groups saves no time."""


class _Mover(Protocol):
    def enter(self, number: int, ahead: Sequence[int]) -> None: ...

    def leave(self, number: int) -> None: ...

    def remove(self) -> None: ...


class WeightStream:
    """Copies a model's offloaded weights to the device group by group, before the modules that need them run.

    On the CPU, weights are memory-mapped from their safetensors files and nothing is copied. On other devices, each
    group is copied while the previous one computes. Between forwards, all parameters are on the host and can be read
    and saved.

    Args:
        model: The model. The streamed weights get no gradients.
        device: Device of the forward.
        names: Names of the parameters and buffers to stream, or None for all parameters. On the CPU, weights that are
            not memory-mapped are left out.
        options: Options of the transfer.
        preload_module_classes: Class names of modules that use the weights of submodules without calling them.

    Attributes:
        groups: The groups, in model order.
        device: Device of the forward.
        prefetch: Number of groups that are copied ahead.

    Example:
        ```python
        import torch
        from safetensors.torch import save_file
        from torch import nn

        from drivetrain import init_empty_weights, load_checkpoint_in_model
        from drivetrain.inference import WeightStream

        save_file(nn.Linear(4, 4).state_dict(), "linear.safetensors")
        with init_empty_weights():
            model = nn.Linear(4, 4)
        load_checkpoint_in_model(model, "linear.safetensors", {"": "disk"})
        stream = WeightStream(model)
        model(torch.ones(1, 4))
        stream.remove()
        ```
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device | str = "cpu",
        names: Collection[str] | None = None,
        options: StreamOptions | None = None,
        preload_module_classes: Collection[str] | None = None,
    ) -> None:
        self.device, self._options = torch.device(device), options or StreamOptions()
        places = named_places(model)
        chosen = [name for name, place in places.items() if place.is_parameter] if names is None else list(names)
        wanted = {id(tensor): tensor for tensor in (places[name].tensor for name in chosen) if self._moves(tensor)}
        given = self._options
        self.groups = groups_of(model, wanted.keys(), given.groups, given.num_blocks_per_group, preload_module_classes)
        self.prefetch = self._default_prefetch() if given.prefetch is None else given.prefetch
        self._mover = self._make_mover()
        # Successor of each group in the last forward. Before the first forward, the next group in model order.
        self._after = {number: number + 1 for number in range(len(self.groups) - 1)}
        self._open = [0] * len(self.groups)
        self._present: set[int] = set()
        self._last: int | None = None
        self._handles: list[RemovableHandle] = []
        self._frozen = [
            tensor for tensor in wanted.values() if isinstance(tensor, nn.Parameter) and tensor.requires_grad
        ]
        # Gradients would be lost with the copies of the weights. `remove` restores the flags.
        for parameter in self._frozen:
            parameter.requires_grad_(False)
        self._trainable = [[t for t in group.rest if isinstance(t, nn.Parameter)] for group in self.groups]
        for number, group in enumerate(self.groups):
            for module in group.modules:
                self._handles += self._watch(module, number, module is group.modules[-1])
        kinds = {(each.dtype, where) for each in wanted.values() for where in (each.device, self.device)}
        self._guard = MoveGuard(_holders(model, wanted.keys()), kinds)

    def _moves(self, tensor: Tensor) -> bool:
        return self.device.type != "cpu" or mapped_range(tensor) is not None

    def _default_prefetch(self) -> int:
        memory = None if self.device.type == "cpu" else get_device_kind(self.device.type).free_memory(self.device)
        if memory is None:
            return 1
        sizes, budget = [group.nbytes for group in self.groups], self._options.budget or 0
        # The groups within the budget stay on the device.
        free = memory[0] - sum(size for size, held in zip(sizes, accumulate(sizes), strict=True) if held <= budget)
        return MOST_AHEAD if max_consecutive_size(sizes, MOST_AHEAD + 1) <= free else 0

    def _make_mover(self) -> _Mover:
        given = self._options
        if self.device.type != "cpu":
            return DeviceCopies(self.groups, self.device, given.budget or 0, self.prefetch + 1, given.pin)
        available = psutil.virtual_memory().available
        total = sum(group.nbytes for group in self.groups)
        budget = available * 4 // 5 if given.budget is None else given.budget
        # Caching a file larger than memory would evict the pages that the next forward needs first.
        return MappedPages(self.groups, budget, cache=total <= available)

    def _watch(self, module: nn.Module, number: int, is_last: bool) -> list[RemovableHandle]:
        return [
            # Prepended, so that other pre-hooks of the module already find its weights.
            module.register_forward_pre_hook(_Call(self, number, is_last).enter, prepend=True),
            module.register_forward_hook(_Call(self, number, is_last).leave, always_call=True),
        ]

    def enter(self, number: int) -> None:
        # Called before a module of the group runs. Also starts to load the groups that follow.
        if torch.is_grad_enabled():
            self._refuse_gradients(number)
        last, self._last = self._last, number
        if last is not None and last != number:
            self._after[last] = number
            # The last module of the group did not run, for example in an early exit.
            if not self._open[last]:
                self._release(last)
        self._open[number] += 1
        self._present.add(number)
        ahead = [number]
        for _ in range(self.prefetch):
            # Models may call modules in another order than they register them.
            following = self._after.get(ahead[-1], number)
            # In a small model, the groups ahead include the one in use.
            if following in ahead:
                break
            ahead.append(following)
        self._mover.enter(number, ahead[1:])

    def leave(self, number: int, is_last: bool) -> None:
        # Called after a module of the group. The last one frees the group's weights on the device.
        if not self._open[number]:
            return  # `enter` raised before the group was opened
        self._open[number] -= 1
        if is_last and not self._open[number]:
            self._release(number)

    def _release(self, number: int) -> None:
        if number in self._present:
            self._present.discard(number)
            self._mover.leave(number)

    def _refuse_gradients(self, number: int) -> None:
        for parameter in self._trainable[number]:
            if parameter.requires_grad:
                group = self.groups[number]
                name = next(p.name for p, rest in zip(group.places, group.rest, strict=True) if rest is parameter)
                raise StreamedModelError(
                    f"{name} in {group.name or 'the model'} requires a gradient, but is offloaded. Call "
                    "requires_grad_(False) on it and train other parameters, such as LoRA's, or load the model into "
                    "memory."
                )

    def remove(self) -> None:
        """Stop streaming: remove all hooks from the model, and free the device's copies of the weights.

        The weights stay in host memory or files.
        """
        self._mover.remove()
        for handle in self._handles:
            handle.remove()
        self._guard.remove()
        for parameter in self._frozen:
            parameter.requires_grad_(True)
        self._handles, self._frozen = [], []


def max_consecutive_size(sizes: Sequence[int], count: int) -> int:
    # After the last group, the next forward begins with the first one.
    around = [*sizes, *sizes[: count - 1]] if len(sizes) >= count else list(sizes)
    return max((sum(around[start : start + count]) for start in range(len(sizes))), default=0)


class _Call:
    def __init__(self, stream: WeightStream, number: int, is_last: bool) -> None:
        self._stream, self._number, self._is_last = stream, number, is_last

    def enter(self, module: nn.Module, args: Any) -> None:
        self._stream.enter(self._number)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._stream.leave(self._number, self._is_last)


def _holders(model: nn.Module, wanted: Collection[int]) -> list[nn.Module]:
    return [
        module
        for module in model.modules()
        if any(id(tensor) in wanted for tensor in (*module.parameters(), *module.buffers()))
    ]
