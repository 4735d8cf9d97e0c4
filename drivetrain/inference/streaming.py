"""A model's weights come group by group as its forward needs them, and go again."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import psutil
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from drivetrain.checkpoint.safetensors_file import mapped_range
from drivetrain.inference.device_copies import DeviceCopies, MappedPages, groups_of
from drivetrain.inference.hooks import MoveGuard, StreamedModelError
from drivetrain.inference.offloaded import named_places
from drivetrain.runtime.devices import get_device_kind
from drivetrain.runtime.errors import ConfigurationError


@dataclass(frozen=True)
class StreamOptions:
    """How weights come and go.

    Args:
        groups: `"block"`: blocks that repeat, and of the rest each module that has weights itself; `"leaf"`: each
            module that has weights itself.
        num_blocks_per_group: How many blocks that follow each other come and go together.
        prefetch: How many groups are fetched ahead, in the order of the forward before. If None, one; none where
            the device's free memory does not hold the one that computes and the one after it.
        budget: Bytes of the first groups that stay once they are there. On the CPU, where that is memory that the
            system can take back, four fifths of what is available if None; on another device none.
        pin: Whether weights in memory are page-locked where they are, rather than on their way.
    """

    groups: str = "block"
    num_blocks_per_group: int = 1
    prefetch: int | None = None
    budget: int | None = None
    pin: bool = False

    def __post_init__(self) -> None:
        if (self.prefetch is not None and self.prefetch < 0) or (self.budget is not None and self.budget < 0):
            raise ConfigurationError(
                f"prefetch={self.prefetch}, budget={self.budget}: give a number of groups, and bytes; 0 for none.",
            )


MOST_AHEAD = 1
"""So many groups are fetched ahead by default. Copies follow each other on one stream, so that one is on its way while
another computes; more take memory, and no time less."""


class _Mover(Protocol):
    """How groups get to where a model computes, and leave it."""

    def enter(self, number: int, ahead: Sequence[int]) -> None: ...

    def leave(self, number: int) -> None: ...

    def remove(self) -> None: ...


class WeightStream:
    """Owns the order in which groups of weights are used, and lets each be there when its modules are called.

    On the CPU weights are used straight from the safetensors files that they are in, and nothing is copied. On another
    device each group is copied there while the one before it computes. Between calls a model's parameters are on the
    host with their values, so that they can be read and saved.

    Args:
        model: The model; it computes as before, without gradients for these weights.
        device: Where it computes.
        names: The parameters and buffers that come and go; all parameters if None. On the CPU those that are in memory
            stay there.
        options: How.
        preload_module_classes: Names of classes whose modules use weights of modules within them without calling those.

    Attributes:
        groups: The groups, in the order of the model.
        device: Where it computes.
        prefetch: How many groups are fetched ahead.

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
        self.prefetch = self._how_many_ahead() if given.prefetch is None else given.prefetch
        self._mover = self._make_mover()
        # Which group was used after each; until the first forward, the next one of the model.
        self._after = {number: number + 1 for number in range(len(self.groups) - 1)}
        self._open = [0] * len(self.groups)
        self._present: set[int] = set()
        self._last: int | None = None
        self._handles: list[RemovableHandle] = []
        self._frozen = [
            tensor for tensor in wanted.values() if isinstance(tensor, nn.Parameter) and tensor.requires_grad
        ]
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

    def _how_many_ahead(self) -> int:
        """What the memory of the device has room for beside what computes."""
        memory = None if self.device.type == "cpu" else get_device_kind(self.device.type).free_memory(self.device)
        if memory is None:
            return 1
        sizes, budget = [group.nbytes for group in self.groups], self._options.budget or 0
        free = memory[0] - sum(size for size, held in zip(sizes, accumulate(sizes), strict=True) if held <= budget)
        return MOST_AHEAD if most_in_a_row(sizes, MOST_AHEAD + 1) <= free else 0

    def _make_mover(self) -> _Mover:
        given = self._options
        if self.device.type != "cpu":
            return DeviceCopies(self.groups, self.device, given.budget or 0, self.prefetch + 1, given.pin)
        available = psutil.virtual_memory().available
        total = sum(group.nbytes for group in self.groups)
        budget = available * 4 // 5 if given.budget is None else given.budget
        # A file that memory cannot hold displaces, each time it is read, what the next time begins with.
        return MappedPages(self.groups, budget, cache=total <= available)

    def _watch(self, module: nn.Module, number: int, is_last: bool) -> list[RemovableHandle]:
        return [
            module.register_forward_pre_hook(_Call(self, number, is_last).enter, prepend=True),
            module.register_forward_hook(_Call(self, number, is_last).leave, always_call=True),
        ]

    def enter(self, number: int) -> None:
        """Let a group be there; called before each of its modules."""
        if torch.is_grad_enabled():
            self._refuse_gradients(number)
        last, self._last = self._last, number
        if last is not None and last != number:
            self._after[last] = number
            if not self._open[last]:
                self._let_go(last)
        self._open[number] += 1
        self._present.add(number)
        ahead = [number]
        for _ in range(self.prefetch):
            following = self._after.get(ahead[-1], number)
            if following in ahead:
                break
            ahead.append(following)
        self._mover.enter(number, ahead[1:])

    def leave(self, number: int, is_last: bool) -> None:
        """Drop a group where its last module has returned; called after each of its modules."""
        if not self._open[number]:
            return  # it was refused before it began
        self._open[number] -= 1
        if is_last and not self._open[number]:
            self._let_go(number)

    def _let_go(self, number: int) -> None:
        if number in self._present:
            self._present.discard(number)
            self._mover.leave(number)

    def _refuse_gradients(self, number: int) -> None:
        for parameter in self._trainable[number]:
            if parameter.requires_grad:
                group = self.groups[number]
                name = next(p.name for p, rest in zip(group.places, group.rest, strict=True) if rest is parameter)
                raise StreamedModelError(
                    f"{name} in {group.name or 'the model'} requires a gradient, but its values come and go. Call "
                    "requires_grad_(False) on it and train other parameters beside it, such as LoRA's; or load the "
                    "model into memory to train it."
                )

    def remove(self) -> None:
        """Leave the model as any other, with its weights where they are between calls."""
        self._mover.remove()
        for handle in self._handles:
            handle.remove()
        self._guard.remove()
        for parameter in self._frozen:
            parameter.requires_grad_(True)
        self._handles, self._frozen = [], []


def most_in_a_row(sizes: Sequence[int], count: int) -> int:
    """Bytes of the largest groups that follow each other, so many of them; after the last comes the first."""
    around = [*sizes, *sizes[: count - 1]] if len(sizes) >= count else list(sizes)
    return max((sum(around[start : start + count]) for start in range(len(sizes))), default=0)


class _Call:
    """The hooks of one module, which can be copied and pickled with it."""

    def __init__(self, stream: WeightStream, number: int, is_last: bool) -> None:
        self._stream, self._number, self._is_last = stream, number, is_last

    def enter(self, module: nn.Module, args: Any) -> None:
        """Called before the module."""
        self._stream.enter(self._number)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Called after it, or after it has raised."""
        self._stream.leave(self._number, self._is_last)


def _holders(model: nn.Module, wanted: Collection[int]) -> list[nn.Module]:
    """The modules with one of these tensors in them, at any depth."""
    return [
        module
        for module in model.modules()
        if any(id(tensor) in wanted for tensor in (*module.parameters(), *module.buffers()))
    ]
