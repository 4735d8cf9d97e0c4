"""Models that take turns on a device."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from drivetrain import CpuOffload, UserCpuOffloadHook, add_hook_to_module, cpu_offload_with_hook
from drivetrain.runtime.devices import detect_device_kind

X = torch.ones(1, 4)


class Model(nn.Linear):
    """What runs anywhere, also on the meta device, which stands for an accelerator here."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.moves: list[str] = []

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # Nothing comes back from the meta device with its values; zeros are enough to see where it is.
        self.moves.append(self.weight.device.type)
        if self.weight.is_meta:
            for name, parameter in self._parameters.items():
                self._parameters[name] = nn.Parameter(torch.zeros(parameter.shape))
            return self
        return super()._apply(fn, recurse)


def where(*models: nn.Module) -> list[str]:
    return [next(model.parameters()).device.type for model in models]


def test_a_model_comes_for_its_forward_and_leaves_for_the_next_ones():
    first, first_hook = cpu_offload_with_hook(Model(), "meta")
    second, second_hook = cpu_offload_with_hook(Model(), "meta", prev_module_hook=first_hook)
    assert where(first, second) == ["cpu", "cpu"]
    hidden = first(X)
    assert hidden.is_meta
    assert where(first, second) == ["meta", "cpu"]
    for _ in range(3):
        second(hidden)
        assert where(first, second) == ["cpu", "meta"]
    second_hook.offload()
    assert where(first, second) == ["cpu", "cpu"]


def test_a_model_that_is_there_is_not_moved_again():
    model, hook = cpu_offload_with_hook(Model(), "meta")
    model(X)
    moves = len(model.moves)
    model(X)
    assert len(model.moves) == moves
    hook.remove()
    assert where(model) == ["meta"]
    assert not hasattr(model, "_hf_hook")


def test_the_device_is_this_machines_accelerator_where_none_is_named():
    assert CpuOffload().execution_device == detect_device_kind().device(0)


def test_the_hook_can_be_attached_by_hand():
    model = Model()
    hook = CpuOffload("meta")
    add_hook_to_module(model, hook)
    by_hand = UserCpuOffloadHook(model, hook)
    assert model(input=X).is_meta
    by_hand.offload()
    assert where(model) == ["cpu"]
