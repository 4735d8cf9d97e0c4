"""How often a prepared scheduler steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from drivetrain import Accelerator, GradientAccumulationPlugin, GradScalerKwargs
from tests.pool import run_in_processes


def last_epoch(batches: int = 8, make: Any = None, **options: Any) -> int:
    """How often a scheduler has stepped after one pass of so many global batches."""
    accelerator = Accelerator(cpu=True, **options)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = make(optimizer) if make else torch.optim.lr_scheduler.StepLR(optimizer, 1)
    samples = batches if accelerator.split_batches else batches * accelerator.num_processes
    size = accelerator.num_processes if accelerator.split_batches else 1
    loader = DataLoader(torch.ones(samples * size, 1), batch_size=size)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            optimizer.zero_grad()
            accelerator.backward(model(batch).sum())
            optimizer.step()
            scheduler.step()
    return int(scheduler.last_epoch)


CASES = [
    ("once per process, as schedules for an unsharded loader count on", {}, {1: 8, 2: 16}),
    ("once per step if asked for", {"step_scheduler_per_process": False}, {1: 8, 2: 8}),
    ("once per step where batches are split", {"split_batches": True}, {1: 8, 2: 8}),
    ("not while accumulating", {"gradient_accumulation_steps": 4}, {1: 2, 2: 4}),
    (
        "once per step while accumulating",
        {"gradient_accumulation_steps": 4, "step_scheduler_per_process": False},
        {1: 2, 2: 2},
    ),
    (
        "at each call if it does not follow the optimizer",
        {"gradient_accumulation_steps": 4, "step_scheduler_with_optimizer": False},
        {1: 8, 2: 8},
    ),
    (
        "not while accumulating, whatever the plugin says about adjusting it",
        {"gradient_accumulation_plugin": GradientAccumulationPlugin(num_steps=4, adjust_scheduler=False)},
        {1: 2, 2: 4},
    ),
]


def all_cases() -> list[int]:
    return [last_epoch(**options) for _, options, _ in CASES]


@pytest.mark.parametrize("processes", [1, 2])
def test_steps_of_a_scheduler(processes):
    for counts in run_in_processes(all_cases, processes):
        assert dict(zip([name for name, _, _ in CASES], counts, strict=True)) == {
            name: expected[processes] for name, _, expected in CASES
        }


def one_cycle(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=10)


def past_the_end() -> int:
    return last_epoch(8, one_cycle)


def test_a_one_cycle_schedule_stops_at_its_end():
    assert run_in_processes(past_the_end, 2) == [10, 10]  # of 16 steps that were asked for; torch raises at 11


def watched() -> list[float]:
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=2)
    optimizer, scheduler = accelerator.prepare(optimizer, scheduler)
    rates = []
    for _ in range(5):
        scheduler.step(1.0)
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


@pytest.mark.parametrize("processes", [1, 2])
def test_one_that_watches_a_metric_counts_each_value_once(processes):
    assert run_in_processes(watched, processes) == [[1.0, 1.0, 1.0, 0.5, 0.5]] * processes


def test_not_after_an_overflow_under_fp16():
    accelerator = Accelerator(
        cpu=True, mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=8.0, growth_interval=100)]
    )
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    other = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    apart = accelerator.prepare(torch.optim.lr_scheduler.StepLR(other, 1))
    counts, skipped = [], []
    for factor in (1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        accelerator.backward(model(torch.ones(1, 1)).sum() * factor)
        optimizer.step()
        scheduler.step()
        counts.append(scheduler.last_epoch)
        skipped.append(accelerator.optimizer_step_was_skipped)
    assert counts == [1, 1, 2]
    assert skipped == [False, True, False]
    assert apart.last_epoch == 0


def test_it_may_be_prepared_before_its_optimizer():
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    model = torch.nn.Linear(1, 1)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.StepLR(inner, 1))
    model, optimizer = accelerator.prepare(model, inner)
    accelerator.backward(model(torch.ones(1, 1)).sum() * float("inf"))
    optimizer.step()
    scheduler.step()
    assert scheduler.last_epoch == 0


def test_its_state_is_the_scheduler_s_own():
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    inner = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    scheduler = accelerator.prepare(inner)
    optimizer.step()
    scheduler.step()
    assert scheduler.state_dict() == inner.state_dict()
    assert scheduler.get_last_lr() == [1.0]
    scheduler.load_state_dict({**inner.state_dict(), "last_epoch": 7})
    assert inner.last_epoch == 7
