"""Parameters that some steps leave out, and windows that end otherwise than planned, under ZeRO and in a plain loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from drivetrain import Accelerator, ConfigurationError, DeepSpeed
from tests.shared_runs import SharedRuns
from tests.strategies.deepspeed_models import EXACT, NEEDS_DEEPSPEED, STAGES

pytestmark = NEEDS_DEEPSPEED

runs = SharedRuns(__name__, timeout=240)

OFFLOADED = {"offload_optimizer": "cpu"}


@pytest.fixture
def result_of() -> Callable[[Callable[..., Any]], Any]:
    return lambda run: runs.of(run)[0]


class Paths(nn.Module):
    """Two paths from input to output, of which a forward takes one or both, and a layer that none takes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 5), nn.Linear(3, 1)
        self.b, self.c, self.never = nn.Linear(5, 3), nn.Linear(5, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor, way: str) -> Tensor:
        hidden = torch.tanh(self.first(x))
        return self.last(torch.tanh(sum(getattr(self, path)(hidden) for path in way)))


class Case(NamedTuple):
    """The paths of each step's micro-batches, and what else a loop does."""

    ways: tuple[tuple[str, ...], ...]
    frozen: tuple[int, ...] = ()
    backwards: int = 1
    clip: float | None = None


CASES = {
    "never used": Case((("b",),) * 4),
    "used late": Case((("b",), ("b",), ("bc",), ("bc",))),
    "used early": Case((("bc",), ("bc",), ("b",), ("b",))),
    "used by turns": Case((("b",), ("c",), ("b",), ("c",))),
    "used by turns, clipped": Case((("b",), ("c",), ("b",), ("c",)), clip=0.05),
    "used by some micro-batches": Case((("b", "c"), ("c", "b"), ("b", "b"), ("c", "bc"))),
    "frozen later": Case((("bc",),) * 4, frozen=(2, 3)),
    "frozen for a while": Case((("bc",),) * 4, frozen=(1, 2)),
    "two backwards": Case((("bc",),) * 3, backwards=2),
}
SECONDARY = {"zero_hpz_partition_size": 2}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.3)


def rows() -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(3)
    while True:
        yield torch.randn(4, 4, generator=generator)


def losses(output: Tensor, case: Case) -> list[Tensor]:
    parts = [output.square().mean(), output.abs().mean()][: case.backwards]
    return [part / len(case.ways[0]) for part in parts]


def plain(case: Case, make: Callable[[nn.Module], torch.optim.Optimizer]) -> dict[str, Tensor]:
    model, batches = Paths(), rows()
    optimizer = make(model)
    for step, ways in enumerate(case.ways):
        model.c.requires_grad_(step not in case.frozen)
        optimizer.zero_grad()
        for way in ways:
            x = next(batches)
            for number in range(case.backwards):
                losses(model(x, way), case)[number].backward()
        if case.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        optimizer.step()
    return model.state_dict()


def sharded(case: Case, make: Callable[[nn.Module], torch.optim.Optimizer], strategy: DeepSpeed) -> dict[str, Tensor]:
    accelerator, model, batches = Accelerator(cpu=True, strategy=strategy), Paths(), rows()
    prepared, optimizer = accelerator.prepare(model, make(model))
    for step, ways in enumerate(case.ways):
        model.c.requires_grad_(step not in case.frozen)
        optimizer.zero_grad()
        for number, way in enumerate(ways):
            x = next(batches)[2 * accelerator.process_index :][:2]
            within = accelerator.no_sync(prepared) if number < len(ways) - 1 else torch.enable_grad()
            with within:
                for each in range(case.backwards):
                    accelerator.backward(losses(prepared(x, way), case)[each])
        if case.clip is not None:
            accelerator.clip_grad_norm_(prepared.parameters(), case.clip)
        optimizer.step()
    return accelerator.get_state_dict(prepared)


def gap(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    return max((float((found[name] - value).abs().max()) for name, value in expected.items() if found), default=0.0)


@runs
def all_cases(directory: Path) -> dict[str, float]:
    found = {}
    for name, case in CASES.items():
        expected = plain(case, sgd)
        for stage in STAGES:
            found[f"{name}, stage {stage}"] = gap(sharded(case, sgd, DeepSpeed(stage=stage)), expected)
        # Every one of these runs is one more of another stage, or with other options, in this process.
        secondary = DeepSpeed(stage=3, **SECONDARY)
        found[f"{name}, stage 3 with a secondary partition"] = gap(sharded(case, sgd, secondary), expected)
        for stage in (2, 3):
            if case.backwards == 1 or stage == 3:
                strategy = DeepSpeed(stage=stage, **OFFLOADED)
                found[f"{name}, stage {stage} offloaded"] = gap(sharded(case, sgd, strategy), expected)
    return found


def test_parameters_without_a_gradient_stay_as_in_one_process(result_of):
    assert {name: each for name, each in result_of(all_cases).items() if each > EXACT} == {}


@runs
def decayed(directory: Path) -> dict[str, bool]:
    found = {}
    for stage in STAGES:
        for precision in ("no", "bf16-true") if stage else ("no",):
            accelerator, model = (
                Accelerator(cpu=True, strategy=DeepSpeed(stage=stage), mixed_precision=precision),
                Paths(),
            )
            before = model.never.weight.detach().clone()
            prepared, optimizer = accelerator.prepare(model, adamw(model))
            for x in (torch.ones(2, 4, dtype=model.first.weight.dtype),) * 3:
                accelerator.backward(prepared(x, "b").square().mean())
                optimizer.step()
            after = accelerator.get_state_dict(prepared).get("never.weight", before)
            found[f"{stage} {precision}"] = torch.equal(after.float(), before.to(after.dtype).float())
    return found


def test_adamw_does_not_decay_a_parameter_that_takes_no_part(result_of):
    assert {name for name, same in result_of(decayed).items() if not same} == set()


class Unsized(IterableDataset):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(24.0).reshape(8, 3) / 24)


@runs
def short_windows(directory: Path) -> dict[str, float]:
    """Two micro-batches on each process, and a window of five that ends with the loader."""

    def line() -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(3, 1)

    model = line()
    for x in torch.stack(list(Unsized())).split(4):
        (model(x).square().mean() / 2).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    found = {}
    for stage in STAGES:
        for options in ({}, OFFLOADED) if stage > 1 else ({},):
            strategy = DeepSpeed(stage=stage, **options)
            accelerator = Accelerator(cpu=True, strategy=strategy, gradient_accumulation_steps=5)
            prepared = line()
            prepared, optimizer, loader = accelerator.prepare(
                prepared, torch.optim.SGD(prepared.parameters(), lr=0.1), DataLoader(Unsized(), batch_size=2)
            )
            for x in loader:
                with accelerator.accumulate(prepared):
                    optimizer.zero_grad()
                    accelerator.backward(prepared(x).square().mean())
                    optimizer.step()
            found[f"{stage} {options}"] = gap(accelerator.get_state_dict(prepared), model.state_dict())
    return found


def test_the_last_window_of_a_loader_without_a_length_counts_what_it_holds(result_of):
    assert {name: each for name, each in result_of(short_windows).items() if each > EXACT} == {}


@runs
def other_memory_formats(directory: Path) -> dict[int, float]:
    def images() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 1)).to(memory_format=torch.channels_last)
        model[2].weight = nn.Parameter(torch.randn(16, 1).t())
        return model

    model, x = images(), torch.randn(4, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    model(x).square().mean().backward()
    adamw(model).step()
    found = {}
    for stage in STAGES:
        accelerator, prepared = Accelerator(cpu=True, strategy=DeepSpeed(stage=stage)), images()
        prepared, optimizer = accelerator.prepare(prepared, adamw(prepared))
        accelerator.backward(prepared(x[2 * accelerator.process_index :][:2]).square().mean())
        optimizer.step()
        found[stage] = gap(accelerator.get_state_dict(prepared), model.state_dict())
    return found


def test_parameters_of_another_memory_format_are_trained(result_of):
    assert max(result_of(other_memory_formats).values()) <= EXACT


CHANGED_BY_HAND: dict[str, Callable[[Any, Any, list[nn.Parameter]], Any]] = {
    "group appended": lambda optimizer, bare, c: optimizer.param_groups.append({"params": c, "lr": 0.1}),
    "groups added up": lambda optimizer, bare, c: optimizer.param_groups.__iadd__([{"params": c, "lr": 0.1}]),
    "parameter appended": lambda optimizer, bare, c: optimizer.param_groups[0]["params"].append(c[0]),
    "parameters replaced": lambda optimizer, bare, c: optimizer.param_groups[0].update(params=c),
    "group appended to the user's own": lambda optimizer, bare, c: bare.param_groups.append(
        {**bare.param_groups[0], "params": c}
    ),
    "parameter appended to the user's own": lambda optimizer, bare, c: bare.param_groups[0]["params"].append(c[0]),
}


@runs
def refusals(directory: Path) -> dict[str, str]:
    def prepared(model: nn.Module, stage: int, of: nn.Module | None = None) -> tuple[Accelerator, nn.Module, Any]:
        accelerator = Accelerator(cpu=True, strategy=DeepSpeed(stage=stage))
        return accelerator, *accelerator.prepare(model if of is None else of, adamw(model))

    def unfrozen(stage: int) -> None:
        model = Paths()
        model.c.requires_grad_(False)
        accelerator, engine, _ = prepared(model, stage)
        model.c.requires_grad_(True)
        accelerator.backward(engine(torch.ones(2, 4), "bc").sum())

    def added(stage: int) -> None:
        model = Paths()
        optimizer = torch.optim.SGD(model.b.parameters(), lr=0.1)
        _, optimizer = Accelerator(cpu=True, strategy=DeepSpeed(stage=stage)).prepare(model, optimizer)
        optimizer.add_param_group({"params": list(model.c.parameters())})

    def by_hand(change: Callable[[Any, Any, list[nn.Parameter]], Any], stage: int) -> None:
        model = Paths()
        bare = torch.optim.SGD(model.b.parameters(), lr=0.1)
        accelerator = Accelerator(cpu=True, strategy=DeepSpeed(stage=stage))
        engine, optimizer = accelerator.prepare(model, bare)
        change(optimizer, bare, list(model.c.parameters()))
        accelerator.backward(engine(torch.ones(2, 4), "bc").sum())
        optimizer.step()

    def two_dtypes(stage: int) -> None:
        model = Paths()
        model.c.to(torch.bfloat16)
        prepared(model, stage)

    calls: dict[str, Callable[[int], Any]] = {
        "unfrozen": unfrozen,
        "frozen and unfrozen under Adam": lambda stage: sharded(
            CASES["frozen for a while"], adamw, DeepSpeed(stage=stage)
        ),
        "group added": added,
        "two dtypes": two_dtypes,
        **{name: partial(by_hand, change) for name, change in CHANGED_BY_HAND.items()},
    }
    found = {}
    for name, call in calls.items():
        for stage in (1, 2, 3):
            found[f"{name}, {stage}"] = refusal_of(call, stage)
    frozen = Paths()
    frozen.c.requires_grad_(False)
    groups = [{"params": list(frozen.c.parameters())}, {"params": list(frozen.b.parameters())}]
    for stage in (1, 2):
        accelerator = Accelerator(cpu=True, strategy=DeepSpeed(stage=stage))
        found[f"frozen group, {stage}"] = refusal_of(
            lambda _, engine=accelerator: engine.prepare(frozen, torch.optim.SGD(groups, lr=0.1)), stage
        )
    model = Paths()
    found["compiled, 3"] = refusal_of(lambda stage: prepared(model, stage, torch.compile(model)), 3)
    return found


def refusal_of(call: Callable[[int], Any], stage: int) -> str:
    try:
        call(stage)
    except ConfigurationError as error:
        return str(error)
    return "not refused"


@pytest.mark.parametrize(
    ("case", "parts"),
    [
        ("unfrozen", ("c.weight, c.bias", "did not require gradients")),
        ("frozen and unfrozen under Adam", ("c.weight, c.bias", "step count")),
        ("group added", ("c.weight, c.bias", "before prepare")),
        ("two dtypes", ("torch.float32: first.weight", "torch.bfloat16: c.weight, c.bias")),
    ],
)
def test_what_zero_cannot_train_as_one_process_is_refused_with_its_names(result_of, case, parts):
    for stage in (1, 2, 3):
        for part in parts:
            assert part in result_of(refusals)[f"{case}, {stage}"]


@pytest.mark.parametrize("case", CHANGED_BY_HAND)
def test_groups_that_are_changed_by_hand_are_refused_rather_than_lost(result_of, case):
    for stage in (1, 2, 3):
        assert "param_groups after prepare" in result_of(refusals)[f"{case}, {stage}"]


@pytest.mark.parametrize("stage", [1, 2])
def test_a_group_without_a_trained_parameter_is_refused_by_number(result_of, stage):
    assert "the optimizer's group 0 are frozen (c.weight, c.bias)" in result_of(refusals)[f"frozen group, {stage}"]


def test_zero_3_refuses_a_module_that_torch_compile_has_wrapped(result_of):
    assert "Paths was wrapped by torch.compile before prepare" in result_of(refusals)["compiled, 3"]
