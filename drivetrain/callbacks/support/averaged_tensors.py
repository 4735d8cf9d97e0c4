"""A running average of what a model computes with, in this process's part of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from drivetrain.runtime.collectives import broadcast
from drivetrain.strategies.gradients import local_part

if TYPE_CHECKING:
    from torch import nn

    from drivetrain.strategies import Strategy

AvgFn = Callable[[Tensor, Tensor, Any], Tensor]
MultiAvgFn = Callable[[Any, Any, Any], None]


class AveragedTensors:
    """The average of a model's parameters, and of its saved buffers if wanted, over the moments of `update`.

    Every process averages what it holds: the whole model, or its shards.

    Args:
        strategy: What placed the model.
        model: What it made of the task.
        use_buffers: Whether buffers are averaged; else those of the model are used.
        device: Where the average is kept; beside the model if None.
        avg_fn: Returns the new average of a tensor, from the average, the tensor and how many were averaged.
        multi_avg_fn: Changes a list of averages in place, given lists; the mean of all if neither is given.

    Attributes:
        count: How many moments were averaged.
        swapped: Whether the model has the average, and this the model's own values.
    """

    def __init__(
        self,
        strategy: Strategy,
        model: nn.Module,
        use_buffers: bool = True,
        device: torch.device | str | int | None = None,
        avg_fn: AvgFn | None = None,
        multi_avg_fn: MultiAvgFn | None = None,
    ) -> None:
        self.count = 0
        self.swapped = False
        self._strategy, self._model, self._use_buffers = strategy, model, use_buffers
        self._device = None if device is None else torch.device(device)
        self._avg_fn, self._multi_avg_fn = avg_fn, multi_avg_fn
        self._average: list[Tensor] = []
        self._weights: list[Tensor] = []
        self.refresh()

    def refresh(self) -> None:
        """Find the model's parameters again, and let its next forward see what was written to them."""
        found = self._strategy.state.parameters_in_place(self._model).values()
        self._weights = [local_part(each.detach()) for each in found if not each.is_meta]

    @torch.no_grad()
    def update(self) -> None:
        """Take the model's present values into the average; the first ones become the average."""
        live = self._live()
        if not self._average:
            self._average = [each.to(self._device or each.device, copy=True) for each in live]
        elif self._avg_fn is not None and self._multi_avg_fn is None:
            for average, value in zip(self._average, live, strict=True):
                count = torch.tensor(self.count, device=average.device)
                average.copy_(self._avg_fn(average, value.to(average.device), count))
        else:
            self._update_together(live)
        self.count += 1

    @torch.inference_mode(mode=False)  # that of a validation, in which torch cannot detach a shard
    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the model's values and the average; call it on all processes. Nothing to do before an average."""
        if not self._average:
            return
        self.refresh()
        for value, average in zip(self._live(), self._average, strict=True):
            kept = value.to(average.device, copy=True)
            value.copy_(average)
            average.copy_(kept)
        self.swapped = not self.swapped

    def share_buffers(self) -> None:
        """Give all processes rank 0's values of what is averaged but differs among them: call it on all."""
        buffers = self._own_buffers()
        if buffers and self._strategy.topology.environment.is_distributed:
            broadcast(buffers)

    def states(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return copies of the model's own state and of that with the average in it; call it on all processes."""
        if self.swapped:
            self.swap()
            own, averaged = self._state(), self._swapped_state()
            self.swap()
            return own, averaged
        return self._state(), self._swapped_state()

    @torch.no_grad()
    def load(self, averaged: dict[str, Any], count: int) -> None:
        """Take back an average; call it on all processes.

        Args:
            averaged: What `states` returned second, under any strategy.
            count: How many moments it is the average of.
        """
        own = self._live()
        kept = [each.clone() for each in own]
        self._strategy.state.load_model(self._model, averaged)
        self.refresh()
        self._average = [each.to(self._device or each.device, copy=True) for each in self._live()]
        for value, before in zip(self._live(), kept, strict=True):
            value.copy_(before)
        self.count = count

    def _live(self) -> list[Tensor]:
        return [*self._weights, *self._own_buffers()]

    def _own_buffers(self) -> list[Tensor]:
        """The saved buffers, looked up each time: a module may put another in place of one."""
        if not self._use_buffers:
            return []
        return [
            local_part(buffer.detach())
            for module in self._strategy.unwrap(self._model).modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and not buffer.is_meta and name not in module._non_persistent_buffers_set
        ]

    def _update_together(self, live: Sequence[Tensor]) -> None:
        groups: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
        for average, value in zip(self._average, live, strict=True):
            averages, values = groups.setdefault((average.device, average.dtype), ([], []))
            averages.append(average)
            values.append(value.to(average.device))
        for (device, _), (averages, values) in groups.items():
            if self._multi_avg_fn is not None:
                self._multi_avg_fn(averages, values, torch.tensor(self.count, device=device))
            elif averages[0].is_floating_point():
                torch._foreach_lerp_(averages, values, 1.0 / (self.count + 1))
            else:
                for average, value in zip(averages, values, strict=True):
                    average.copy_(average + (value - average) / (self.count + 1))

    def _state(self) -> dict[str, Any]:
        state = self._strategy.state.model(self._model)
        return {name: value.detach().clone() if isinstance(value, Tensor) else value for name, value in state.items()}

    def _swapped_state(self) -> dict[str, Any]:
        self.swap()
        state = self._state()
        self.swap()
        return state
