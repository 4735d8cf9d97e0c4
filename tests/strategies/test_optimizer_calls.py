"""Steps without torch's bookkeeping for profilers equal torch's own; profilers, hooks and patches still see them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from drivetrain.strategies import optimizer_calls


def weight() -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.full((3,), 2.0)
    return parameter


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad])
def test_a_step_is_torchs_step(kind: Any) -> None:
    ours, theirs = weight(), weight()
    optimizers = kind([ours], lr=0.1), kind([theirs], lr=0.1)
    for _ in range(3):
        optimizer_calls.step(optimizers[0])
        optimizers[1].step()
    assert torch.equal(ours, theirs)
    assert torch.is_grad_enabled()


class Noting(torch.optim.SGD):
    """A step of the user's own."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        return super().step(closure)


def test_a_step_of_a_class_of_the_users_own_is_run() -> None:
    optimizer = Noting([weight()], lr=0.1)
    optimizer_calls.step(optimizer)
    assert optimizer.steps == 1


def hook_on_the_optimizer(optimizer: Any, note: Callable[..., None]) -> Any:
    return optimizer.register_step_pre_hook(note)


def hook_after_it(optimizer: Any, note: Callable[..., None]) -> Any:
    return optimizer.register_step_post_hook(note)


def hook_on_all(optimizer: Any, note: Callable[..., None]) -> Any:
    return register_optimizer_step_pre_hook(note)


def hook_after_all(optimizer: Any, note: Callable[..., None]) -> Any:
    return register_optimizer_step_post_hook(note)


@pytest.mark.parametrize("register", [hook_on_the_optimizer, hook_after_it, hook_on_all, hook_after_all])
def test_hooks_on_steps_are_called(register: Callable[..., Any]) -> None:
    called: list[Any] = []

    def note(optimizer: Any, args: Any, kwargs: Any) -> None:
        called.append(optimizer)

    optimizer = torch.optim.SGD([weight()], lr=0.1)
    handle = register(optimizer, note)
    try:
        optimizer_calls.step(optimizer)
        assert called == [optimizer]
    finally:
        handle.remove()
    optimizer_calls.step(optimizer)
    assert called == [optimizer]


def test_a_step_that_was_put_in_its_place_is_called() -> None:
    optimizer = torch.optim.SGD([weight()], lr=0.1)
    called: list[str] = []
    optimizer.step = lambda: called.append("step")  # type: ignore[assignment, method-assign]
    optimizer.zero_grad = lambda set_to_none=True: called.append("zero_grad")  # type: ignore[method-assign]
    optimizer_calls.step(optimizer)
    optimizer_calls.zero_grad(optimizer)
    assert called == ["step", "zero_grad"]


def test_a_step_that_was_put_in_the_place_of_its_class_s_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[Any] = []
    monkeypatch.setattr(torch.optim.SGD, "step", called.append)
    optimizer = torch.optim.SGD([weight()], lr=0.1)
    optimizer_calls.step(optimizer)
    assert called == [optimizer]


def test_a_scheduler_sees_the_step_that_it_waits_for(recwarn: pytest.WarningsRecorder) -> None:
    optimizer = torch.optim.SGD([weight()], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer_calls.step(optimizer)
    scheduler.step()
    assert not [each for each in recwarn if "lr_scheduler.step()" in str(each.message)]


def test_a_profiler_sees_steps_and_cleared_gradients() -> None:
    optimizer = torch.optim.SGD([weight()], lr=0.1)
    optimizer_calls.step(optimizer)
    with torch.profiler.profile() as profiler:
        optimizer_calls.step(optimizer)
        optimizer_calls.zero_grad(optimizer)
    names = {event.key for event in profiler.key_averages()}
    assert {"Optimizer.step#SGD.step", "Optimizer.zero_grad#SGD.zero_grad"} <= names


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_are_cleared_as_asked_for(set_to_none: bool) -> None:
    parameter = weight()
    optimizer_calls.zero_grad(torch.optim.SGD([parameter]), set_to_none)
    gradient: Tensor | None = parameter.grad
    assert gradient is None if set_to_none else torch.equal(gradient, torch.zeros(3))  # type: ignore[arg-type]


def test_a_differentiable_step_keeps_its_graph() -> None:
    given = torch.ones(3, requires_grad=True)
    parameter = given.clone()
    parameter.grad = torch.full((3,), 2.0, requires_grad=True)
    optimizer_calls.step(torch.optim.SGD([parameter], lr=0.1, differentiable=True))
    assert parameter.grad_fn is not None
    assert torch.equal(parameter, torch.full((3,), 0.8))


MADE_AND_STEPPED = """
import sys, torch
from drivetrain.strategies import optimizer_calls
parameter = torch.nn.Parameter(torch.ones(3))
with optimizer_calls.compiler_not_imported():
    optimizer = torch.optim.AdamW([parameter])
    assert optimizer.state_dict()["param_groups"]
parameter.grad = torch.ones(3)
optimizer_calls.step(optimizer)
assert not torch.equal(parameter, torch.ones(3))
assert "torch._dynamo" not in sys.modules

method = torch.optim.Optimizer.add_param_group
assert not hasattr(method.__wrapped__, "__dynamo_disable")
torch.optim.SGD([parameter])  # by torch's own way, which has a compiler leave the method out
assert "torch._dynamo" in sys.modules
left_out = method.__wrapped__.__dynamo_disable
with optimizer_calls.compiler_not_imported():
    torch.optim.SGD([parameter])
    assert method.__wrapped__.__dynamo_disable is left_out
assert method.__wrapped__.__dynamo_disable is left_out
"""


def test_an_optimizer_is_made_and_stepped_without_torchs_compiler_which_leaves_it_out_later_all_the_same() -> None:
    subprocess.run([sys.executable, "-c", MADE_AND_STEPPED], check=True, timeout=120)
