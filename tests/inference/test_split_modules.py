"""Modules around modules on several devices: what they compute is the plain model's."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drivetrain import ConfigurationError, dispatch_model, infer_auto_device_map
from tests.pool import run_in_processes
from tests.simulated.devices import simulated as simulated
from tests.simulated.devices import start

WIDTH = 4


class Around(nn.Module):
    """Uses parameters and buffers of its own before, between and after the modules in it, and adds its input."""

    def __init__(self, inner: list[nn.Module], rng: random.Random) -> None:
        super().__init__()
        self.inner = nn.ModuleList(inner)
        self.last = nn.Linear(WIDTH, WIDTH) if rng.random() < 0.5 else nn.Identity()
        self.adds = rng.random() < 0.5
        self.kinds = [rng.choice(("", "parameter", "buffer")) for _ in range(3)]
        for number, kind in enumerate(self.kinds):
            if kind == "parameter":
                self.register_parameter(f"own{number}", nn.Parameter(torch.randn(WIDTH)))
            elif kind:
                self.register_buffer(f"own{number}", torch.randn(WIDTH), persistent=rng.random() < 0.5)

    def forward(self, x: Tensor) -> Tensor:
        given, x = x, self.mixed(x, 0)
        for module in self.inner:
            x = self.mixed(module(x), 1)
        x = self.mixed(self.last(x), 2)
        x = torch.cat([x, x])[: len(x)]
        return x + given if self.adds else x

    def mixed(self, x: Tensor, number: int) -> Tensor:
        if not self.kinds[number]:
            return x
        own = getattr(self, f"own{number}")
        return x.mul_(own.cos()) if number == 1 else torch.cat([x, own.expand_as(x)]).view(2, *x.shape).sum(0)


def random_model(rng: random.Random, depth: int = 0) -> nn.Module:
    if depth == 2 or (depth and rng.random() < 0.5):
        return nn.Linear(WIDTH, WIDTH) if rng.random() < 0.7 else nn.LayerNorm(WIDTH)
    return Around([random_model(rng, depth + 1) for _ in range(rng.randint(1, 3))], rng)


def random_budgets(rng: random.Random, size: int) -> dict[Any, int]:
    memory: dict[Any, int] = {index: rng.randint(size // 8, size) for index in range(2)}
    return {**memory, "cpu": rng.choice((0, 2 * size))}


def run_all(models: int, folder: str) -> tuple[int, list[str]]:
    """Run so many random models by their maps: how many have one over several devices, and which are wrong."""
    start(2)
    ran, wrong = 0, []
    for seed in range(models):
        rng = random.Random(seed)
        torch.manual_seed(seed)
        model = random_model(rng).eval()
        x = torch.randn(3, WIDTH)
        with torch.no_grad():
            expected = copy.deepcopy(model)(x)
        size = sum(each.numel() * 4 for each in [*model.parameters(), *model.buffers()])
        try:
            found = infer_auto_device_map(model, random_budgets(rng, size), offload_buffers=rng.random() < 0.5)
        except ConfigurationError:
            continue
        if len(set(found.values())) == 1:
            continue  # a plain model, which takes inputs on its device
        ran += 1
        try:
            with torch.no_grad():
                dispatch_model(model, found, offload_dir=f"{folder}/{seed}")
                outputs = [model(x).cpu() for _ in range(2)]
            if not all(torch.allclose(each, expected, atol=1e-5) for each in outputs):
                wrong.append(f"{seed}: differs")
        except RuntimeError as error:
            wrong.append(f"{seed}: {error!r}"[:200])
    return ran, wrong


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize("models", [40, pytest.param(2000, marks=pytest.mark.slow)])
def test_inputs_and_own_tensors_meet_what_modules_on_other_devices_return(models: int, tmp_path: Path):
    ((ran, wrong),) = run_in_processes(run_all, 1, args=(models, str(tmp_path)), timeout=300)
    assert ran > models // 3
    assert not wrong, (len(wrong), wrong[:5])


class Ends(nn.Module):
    """A table that nothing uses, and a scale that meets what the last module returns."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(2))
        self.scale = nn.Parameter(torch.full((WIDTH,), 2.0))
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, fail: bool = False) -> Tensor:
        x = self.last(self.first(x))
        if fail:
            raise ValueError("no forward today")
        return x * self.scale


class Seeing(nn.Linear):
    """Notes how many modes there are as it runs."""

    def __init__(self, seen: list[int]) -> None:
        super().__init__(WIDTH, WIDTH)
        self.seen = seen

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(modes())
        return super().forward(x)


class Skipping(nn.Module):
    """Without tensors of its own: its input is added to what another device returns."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []
        self.first, self.blocks = Seeing(self.seen), nn.ModuleList([Seeing(self.seen), Seeing(self.seen)])

    def forward(self, x: Tensor) -> Tensor:
        given, x = x, self.first(x)
        with torch.device("meta"):  # a mode of its own, within which nothing is suspended
            x = self.blocks[0](x)
        self.seen.append(modes())
        return self.blocks[1](x) + given


def modes() -> int:
    return len(torch.overrides._get_current_function_mode_stack())


def run_skipping() -> tuple[float, list[int], int]:
    start(2)
    torch.manual_seed(0)
    model, x = nn.Sequential(Skipping(), nn.Linear(WIDTH, WIDTH)), torch.randn(2, WIDTH)
    expected = model(x)
    model[0].seen.clear()
    dispatch_model(model, {"0.first": 0, "0.blocks": 1, "1": 1}, main_device=0)
    gap = float((model(x) - expected).abs().max().detach())
    return gap, model[0].seen, modes()


@pytest.mark.usefixtures("simulated")
def test_only_a_split_module_itself_looks_at_where_tensors_are():
    ((gap, seen, after),) = run_in_processes(run_skipping, 1, timeout=60)
    assert gap < 1e-6
    # In the first module, in one within a mode of the forward's own, in the forward, and in the last module.
    assert seen == [0, 2, 1, 0]
    assert after == 0


def run_split() -> list[Any]:
    """What a split model does after an error and in a backward, and whether anything is left open."""
    start(2)
    torch.manual_seed(0)
    model, x = Ends(), torch.ones(1, WIDTH)
    expected = model(x)
    dispatch_model(model, {"table": 0, "scale": 0, "first": 0, "last": 1}, main_device=0)
    found: list[Any] = []
    try:
        model(x, fail=True)
    except ValueError as error:
        found.append(str(error))
    output = model(x)
    found.append(float((output - expected).abs().sum()))
    output.sum().backward()
    found.append(sorted({str(parameter.grad.device) for parameter in model.parameters()}))
    found.append(len(torch.overrides._get_current_function_mode_stack()))
    return found


@pytest.mark.usefixtures("simulated")
def test_a_split_model_is_as_any_other_after_errors_and_in_a_backward():
    (found,) = run_in_processes(run_split, 1, timeout=60)
    devices = ["sim:0", "sim:1"]
    assert found == ["no forward today", 0.0, devices, 0]
