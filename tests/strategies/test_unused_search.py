"""What DDP's search for unused parameters costs is said where it finds none."""

from __future__ import annotations

import logging
import re

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator, Task
from drivetrain.strategies.ddp.unused_search import WATCHED_STEPS
from tests.pool import run_in_processes
from tests.strategies.quiet import quiet_trainer

SEARCHING = "ddp_find_unused_parameters_true"
ENOUGH = WATCHED_STEPS + 2
COST = r"The search takes \d+\.\d\d ms of a step of \d+\.\d\d ms \(\d+\.\d %; medians, measured on this process\)\.$"


class Pair(nn.Module):
    """Uses those of its two layers that it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, used: str) -> torch.Tensor:
        outputs = [layer(x) for name, layer in (("l", self.left), ("r", self.right)) if name in used]
        return sum(outputs[1:], outputs[0])


class PairTask(Task):
    def __init__(self) -> None:
        super().__init__()
        self.net = Pair()

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.net(batch[0], "lr").sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def listen() -> list[str]:
    """What the watch will have warned of."""
    warned: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("drivetrain.strategies.ddp.unused_search").addHandler(handler)
    return warned


def step_with(used: list[list[str]], micro_batches: int, steps: int) -> list[str]:
    """The warnings of a raw loop; of each process, what its micro-batches use in turn."""
    warned = listen()
    accelerator = Accelerator(cpu=True, strategy=SEARCHING, gradient_accumulation_steps=micro_batches)
    module = Pair()
    model, optimizer = accelerator.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
    own = used[accelerator.process_index]
    for index in range(steps * micro_batches):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 2), own[index % len(own)]).sum())
            optimizer.step()
            optimizer.zero_grad()
    accelerator.wait_for_everyone()
    return warned


def fit() -> list[str]:
    warned = listen()
    trainer = quiet_trainer(SEARCHING, max_epochs=2)
    trainer.fit(PairTask(), DataLoader(TensorDataset(torch.ones(2 * ENOUGH, 2)), batch_size=1))
    return warned


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_a_search_that_finds_nothing_is_named_once_with_its_cost(micro_batches):
    first, second = run_in_processes(step_with, 2, args=([["lr"], ["lr"]], micro_batches, 3 * ENOUGH))
    [message] = first
    assert message.startswith("find_unused_parameters=True: all parameters took part in the loss in each of the first")
    assert re.search(COST, message)
    assert second == []


def test_a_search_in_fit_that_finds_nothing_is_named_once():
    first, second = run_in_processes(fit, 2)
    assert ["all parameters took part" in message for message in first] == [True]
    assert second == []


def test_parameters_that_never_take_part_are_named():
    [message], _ = run_in_processes(step_with, 2, args=([["l"], ["l"]], 1, ENOUGH))
    assert "were the same on all processes: right.weight, right.bias. Freeze them" in message
    assert "DDP(static_graph=True)" in message


USEFUL = {
    "one step of one process": ([["lr"], ["lr"] * (WATCHED_STEPS - 1) + ["l"]], 1),
    "each process another": ([["l"], ["r"]], 1),
    "steps in turn": ([["l", "r"], ["l", "r"]], 1),
    "the last micro-batch of a window": ([["lr", "l"], ["lr", "l"]], 2),
}


@pytest.mark.parametrize(("used", "micro_batches"), USEFUL.values(), ids=USEFUL)
def test_a_search_that_is_needed_is_not_warned_of(used, micro_batches):
    assert run_in_processes(step_with, 2, args=(used, micro_batches, 2 * ENOUGH)) == [[], []]


def test_a_run_of_fewer_steps_says_nothing():
    assert run_in_processes(step_with, 2, args=([["lr"], ["lr"]], 1, WATCHED_STEPS)) == [[], []]
