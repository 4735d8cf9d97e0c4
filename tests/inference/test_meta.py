"""Models that are built without memory."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from drivetrain.inference import init_empty_weights, init_on_device, meta_leftovers


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.last.weight = self.first.weight
        shared = nn.Parameter(torch.ones(3))
        shared.note = "mine"
        self.one, self.other = nn.Identity(), nn.Identity()
        self.one.register_parameter("weight", shared)
        self.other.weight = shared
        self.register_buffer("positions", torch.arange(5) * 2, persistent=False)
        self.register_buffer("count", torch.tensor([7]))


def devices_of(model: nn.Module) -> dict[str, str]:
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    return {name: held.device.type for name, held in tensors}


def test_parameters_have_no_memory_and_buffers_have_their_values():
    with init_empty_weights():
        model = Tied()
    assert all(held.is_meta for held in model.parameters())
    assert model.positions.tolist() == [0, 2, 4, 6, 8]
    assert model.count.tolist() == [7]
    assert meta_leftovers(model) == dict.fromkeys(
        ["first.weight", "last.weight", "one.weight", "other.weight"], "parameter"
    )


def test_ties_made_while_the_model_is_built_stay():
    with init_empty_weights():
        model = Tied()
    assert model.last.weight is model.first.weight
    assert model.one.weight is model.other.weight
    assert model.one.weight.note == "mine"


def test_buffers_without_memory_are_listed_by_what_fills_them():
    with init_empty_weights(include_buffers=True):
        model = Tied()
    assert set(devices_of(model).values()) == {"meta"}
    left = meta_leftovers(model)
    assert left["positions"] == "buffer that no state dict holds"
    assert left["count"] == "buffer"
    assert meta_leftovers(Tied()) == {}


@pytest.mark.parametrize("buffers", [False, True])
def test_every_way_to_make_a_parameter_is_caught(buffers: bool):
    given = torch.ones(3)
    with init_empty_weights(include_buffers=buffers):
        model = nn.Module()
        model.empty = nn.Parameter(torch.empty(3))
        model.given = nn.Parameter(given, requires_grad=False)
        model.register_parameter("registered", nn.Parameter(torch.zeros(2)))
        model.listed = nn.ParameterList([torch.ones(2)])
        model.lazy = nn.LazyLinear(4)
    model.lazy.initialize_parameters(torch.empty(2, 3, device="meta"))
    assert {name: held.device.type for name, held in model.named_parameters()} == dict.fromkeys(
        ["empty", "given", "registered", "listed.0", "lazy.weight", "lazy.bias"], "meta"
    )
    assert not model.given.requires_grad
    assert model.lazy.weight.shape == (4, 3)
    assert type(model.empty) is nn.Parameter


def test_another_thread_builds_as_always():
    found: list[dict[str, str]] = []
    with init_empty_weights(include_buffers=True):
        thread = threading.Thread(target=lambda: found.append(devices_of(Tied())))
        thread.start()
        thread.join()
    assert set(found[0].values()) == {"cpu"}


def test_contexts_come_and_go_while_another_thread_registers_a_parameter():
    decorated()  # the first context of a process has torch ask for parameters
    found: list[dict[str, str]] = []
    asked, ended = threading.Event(), threading.Event()

    def slow(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        if threading.current_thread() is other and not asked.is_set():
            asked.set()
            assert ended.wait(20)

    def build() -> None:
        with init_empty_weights(include_buffers=True):
            found.append(devices_of(Tied()))

    other = threading.Thread(target=build)
    handle = register_module_parameter_registration_hook(slow)
    try:
        other.start()
        assert asked.wait(20)
        with init_empty_weights(include_buffers=True):
            pass
        ended.set()
        other.join()
    finally:
        handle.remove()
    assert set(found[0].values()) == {"meta"}


def test_one_context_may_be_active_in_two_threads():
    context = init_empty_weights()
    entered, left = threading.Event(), threading.Event()
    found: list[bool] = []

    def build() -> None:
        with context:
            entered.set()
            assert left.wait(20)
            found.append(nn.Linear(2, 2).weight.is_meta)
        found.append(nn.Linear(2, 2).weight.is_meta)

    other = threading.Thread(target=build)
    with context:
        other.start()
        assert entered.wait(20)
    left.set()
    other.join()
    assert [*found, nn.Linear(2, 2).weight.is_meta] == [True, False, False]


@init_empty_weights()
def decorated() -> nn.Module:
    return nn.Linear(2, 2)


def test_it_is_a_decorator_that_can_be_called_again():
    assert [decorated().weight.is_meta for _ in range(2)] == [True, True]
    assert not nn.Linear(2, 2).weight.is_meta


def test_contexts_are_entered_again_and_the_inner_one_decides():
    context = init_empty_weights(include_buffers=True)
    with context, context:
        assert nn.Linear(2, 2).weight.is_meta
        with init_on_device("cpu"):
            inner = nn.BatchNorm1d(2)
            with init_empty_weights():
                innermost = nn.BatchNorm1d(2)
        again = nn.BatchNorm1d(2)
    assert set(devices_of(inner).values()) == {"cpu"}
    assert innermost.weight.is_meta
    assert not innermost.running_mean.is_meta
    assert set(devices_of(again).values()) == {"meta"}
    assert not nn.Linear(2, 2).weight.is_meta


@pytest.mark.parametrize("buffers", [False, True])
def test_an_exception_undoes_it(buffers: bool):
    with pytest.raises(KeyError), init_empty_weights(include_buffers=buffers):
        raise KeyError
    assert set(devices_of(Tied()).values()) == {"cpu"}


def test_a_parameter_made_outside_is_not_changed_itself():
    outside = nn.Parameter(torch.ones(2))
    with init_empty_weights():
        model = nn.Module()
        model.weight = outside
    assert not outside.is_meta
    assert model.weight.is_meta
