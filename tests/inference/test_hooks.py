"""Hooks around the forward of a module."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain import ModelHook, SequentialHook, add_hook_to_module, remove_hook_from_module
from drivetrain.inference import remove_hook_from_submodules

X = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))


class Layer(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)

    def forward(self, x: torch.Tensor, *, fail: bool = False, scale: float = 1.0) -> torch.Tensor:
        if fail:
            raise RuntimeError("no forward today")
        return super().forward(x) * scale


class Before(ModelHook):
    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return (args[0] + 1, *args[1:]), {**kwargs, "scale": 2.0}


class After(ModelHook):
    def post_forward(self, module: nn.Module, output: torch.Tensor) -> torch.Tensor:
        return output + 1


class WithoutGradient(ModelHook):
    no_grad = True


class Watching(ModelHook):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def init_hook(self, module: nn.Module) -> nn.Module:
        self.seen.append("init")
        return module

    def on_error(self, module: nn.Module) -> None:
        self.seen.append("error")

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        self.seen.append("post")
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        self.seen.append("detach")
        return module


def registered(module: nn.Module) -> tuple[int, int]:
    return len(module._forward_pre_hooks), len(module._forward_hooks)


def test_arguments_and_outputs_pass_through_the_hook():
    layer = Layer()
    expected = layer(X + 1, scale=2.0)
    add_hook_to_module(layer, Before())
    assert torch.equal(layer(X), expected)
    add_hook_to_module(layer, After(), append=True)
    assert torch.equal(layer(X), expected + 1)


def test_a_second_hook_replaces_the_first_or_is_appended():
    layer, first = Layer(), Watching()
    expected = layer(X)
    add_hook_to_module(layer, first)
    add_hook_to_module(layer, After())
    assert torch.equal(layer(X), expected + 1)
    assert first.seen == ["init", "detach"]
    add_hook_to_module(layer, Watching(), append=True)
    assert isinstance(layer._hf_hook, SequentialHook)
    assert [type(each) for each in layer._hf_hook.hooks] == [After, Watching]


def test_a_hook_that_stays_is_beside_the_one_that_would_replace_it():
    class Staying(Watching):
        stays = True

    layer, staying, other = Layer(), Staying(), Watching()
    add_hook_to_module(layer, staying)
    add_hook_to_module(layer, other)
    expected = layer(X)
    add_hook_to_module(layer, After())
    assert torch.equal(layer(X), expected + 1)
    assert (staying.seen, other.seen) == (["init", "post", "post"], ["init", "post", "detach"])
    remove_hook_from_module(layer)
    assert staying.seen[-1] == "detach"
    assert registered(layer) == (0, 0)


def test_appending_does_not_detach_what_is_there():
    layer, first = Layer(), Watching()
    add_hook_to_module(layer, first)
    add_hook_to_module(layer, After(), append=True)
    assert first.seen == ["init"]


def test_a_removed_hook_leaves_nothing():
    plain = set(vars(Layer()))
    model = nn.Sequential(Layer(), Layer())
    for module in model.modules():
        add_hook_to_module(module, SequentialHook(Before(), After()))
    remove_hook_from_module(model[0])
    assert not hasattr(model[0], "_hf_hook")
    assert hasattr(model[1], "_hf_hook")
    remove_hook_from_submodules(model)
    assert all(registered(module) == (0, 0) and not hasattr(module, "_hf_hook") for module in model.modules())
    assert set(vars(model[1])) == plain


@pytest.mark.parametrize(
    ("hook", "expected"),
    [
        (ModelHook(), (0, 0)),
        (Before(), (1, 0)),
        (After(), (0, 1)),
        (SequentialHook(Before(), ModelHook()), (1, 0)),
        (SequentialHook(Before(), After()), (1, 1)),
        (WithoutGradient(), (1, 1)),
    ],
)
def test_only_what_a_hook_overrides_is_registered(hook: ModelHook, expected: tuple[int, int]):
    assert registered(add_hook_to_module(Layer(), hook)) == expected


def test_the_forward_stays_the_modules_own():
    layer = add_hook_to_module(Layer(), SequentialHook(Before(), After()))
    assert layer.forward.__func__ is Layer.forward
    assert list(inspect.signature(layer.forward).parameters) == ["x", "fail", "scale"]


def test_other_hooks_of_the_module_run_around_it():
    layer, order = Layer(), list[str]()

    class Noted(ModelHook):
        def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            order.append("pre")
            return args, kwargs

        def post_forward(self, module: nn.Module, output: Any) -> Any:
            order.append("post")
            return output

    layer.register_forward_pre_hook(lambda *_: order.append("other pre"))
    layer.register_forward_hook(lambda *_: order.append("other post"))
    add_hook_to_module(layer, Noted())
    layer(X)
    assert order == ["other pre", "pre", "post", "other post"]


@pytest.mark.parametrize("hook", [WithoutGradient(), SequentialHook(After(), WithoutGradient())])
def test_the_forward_runs_without_gradients(hook: ModelHook):
    layer = add_hook_to_module(Layer(), hook)
    assert not layer(X).requires_grad
    assert torch.is_grad_enabled()
    with pytest.raises(RuntimeError, match="no forward today"):
        layer(X, fail=True)
    assert torch.is_grad_enabled()
    with torch.no_grad():
        layer(X)
        assert not torch.is_grad_enabled()


def test_no_grad_can_be_set_on_a_hook_that_is_attached():
    layer, hook = Layer(), After()
    add_hook_to_module(layer, SequentialHook(hook, Before()))
    assert layer(X).requires_grad
    hook.no_grad = True
    assert not layer(X).requires_grad
    copied = copy.deepcopy(layer)
    hook.no_grad = False
    assert layer(X).requires_grad
    assert not copied(X).requires_grad
    copied._hf_hook.no_grad = False
    assert copied(X).requires_grad


def test_an_error_in_the_forward_reaches_the_hook_once_and_the_caller():
    layer, hook = Layer(), Watching()
    add_hook_to_module(layer, hook)
    try:
        raise KeyError
    except KeyError:
        layer(X)
    with pytest.raises(RuntimeError, match="no forward today"):
        layer(X, fail=True)
    layer(X)
    assert hook.seen == ["init", "post", "error", "post"]


def test_an_error_before_the_hook_leaves_the_hooks_around_it_alone():
    inner, outer = Layer(), nn.Sequential(Layer())
    add_hook_to_module(inner, WithoutGradient())
    inner.register_forward_pre_hook(lambda *_: 1 / 0, prepend=True)
    watching = Watching()
    add_hook_to_module(outer, watching)

    def call_inner(*_: Any) -> None:
        with pytest.raises(ZeroDivisionError):
            inner(X)

    outer[0].register_forward_hook(call_inner)
    outer(X)
    assert watching.seen == ["init", "post"]
    assert torch.is_grad_enabled()


def pickled(module: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(module))


def saved(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled, saved])
def test_a_copy_has_a_hook_of_its_own(copied: Any):
    layer = add_hook_to_module(Layer(), SequentialHook(Before(), After()))
    twin = copied(layer)
    assert torch.equal(twin(X), layer(X))
    remove_hook_from_module(twin)
    assert registered(twin) == (0, 0)
    assert registered(layer) == (1, 1)
    assert not torch.equal(twin(X), layer(X))


def test_a_copy_of_a_hook_alone_copies_no_module():
    layer = add_hook_to_module(Layer(), After())
    assert all(link.module is None for link in copy.deepcopy(layer._hf_hook)._links)


def test_a_hook_does_not_keep_its_module_alive():
    hook = After()
    add_hook_to_module(Layer(), hook)
    assert [link.module for link in hook._links] == [None]


@pytest.mark.parametrize("hook", [SequentialHook(Before(), After()), SequentialHook(Before(), WithoutGradient())])
def test_a_compiled_module_runs_its_hook(hook: ModelHook):
    layer = add_hook_to_module(Layer(), hook)
    expected = layer(X)
    compiled = torch.compile(layer, backend="eager")
    for _ in range(3):
        output = compiled(X)
        assert torch.equal(output, expected)
        assert output.requires_grad == expected.requires_grad
