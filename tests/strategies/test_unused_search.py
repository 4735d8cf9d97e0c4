"""What DDP's search for unused parameters costs is said where it finds none."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import DDP, Accelerator, ConfigurationError, PartialState, Task
from drivetrain.strategies.ddp.wrapper import WATCHED_STEPS
from tests.pool import ProcessesFailed, run_in_processes
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
    logging.getLogger("drivetrain.strategies.ddp.wrapper").addHandler(handler)
    return warned


def step_with(
    used: list[list[str]], micro_batches: int, steps: int, strategy: Any = SEARCHING, result: Any = None
) -> list[str]:
    """The warnings of a raw loop; of each process, what its micro-batches use in turn.

    `result` gets each step's gradients, and whether DDP still searches.
    """
    warned = listen()
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, strategy=strategy, gradient_accumulation_steps=micro_batches)
    module = Pair()
    model, optimizer = accelerator.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
    own = used[accelerator.process_index]
    for index in range(steps * micro_batches):
        with accelerator.accumulate(model):
            x = torch.full((1, 2), 1.0 + index + accelerator.process_index)
            accelerator.backward(model(x, own[index % len(own)]).sum())
            if result is not None:
                gradients = [None if p.grad is None else p.grad.clone() for p in module.parameters()]
                result.append((model.find_unused_parameters, gradients))
            optimizer.step()
            optimizer.zero_grad()
    accelerator.wait_for_everyone()
    return warned


def end_search(used: list[list[str]], micro_batches: int, steps: int, **options: Any) -> tuple[list[Any], list[Any]]:
    """What `step_with` gives for a search that ends by itself, and for one that does not."""
    found: list[Any] = []
    for ends in (True, False):
        result: list[Any] = []
        strategy = DDP(find_unused_parameters="auto" if ends else True, **options)
        step_with(used, micro_batches, steps, strategy, result)
        found.append(result)
        PartialState._reset_state()
    return found[0], found[1]


def take_part_later() -> None:
    used = ["l"] * (WATCHED_STEPS + 2) + ["lr"]
    step_with([used, used], 1, len(used), DDP(find_unused_parameters="auto"))


def fit_uneven() -> tuple[list[Any], list[Any], int]:
    """Weights after a run in which one process leaves out every second batch of the second half."""

    class LeavingOutTask(PairTask):
        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor | None:
            if self.trainer.global_step >= ENOUGH and batch_idx % 2 and self.trainer.global_rank:
                return None
            return self.net(batch[0], "l").sum()

    found: list[Any] = []
    for searches in ("auto", True):
        torch.manual_seed(0)
        trainer = quiet_trainer(DDP(find_unused_parameters=searches), max_epochs=2)
        task = LeavingOutTask()
        trainer.fit(task, DataLoader(TensorDataset(torch.ones(2 * ENOUGH, 2)), batch_size=1))
        found.append([p.detach().clone() for p in task.parameters()])
    return found[0], found[1], trainer.global_step


def fit() -> list[str]:
    warned = listen()
    trainer = quiet_trainer(SEARCHING, max_epochs=2)
    trainer.fit(PairTask(), DataLoader(TensorDataset(torch.ones(2 * ENOUGH, 2)), batch_size=1))
    return warned


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_a_search_that_finds_nothing_is_named_once_with_its_cost(micro_batches):
    first, second = run_in_processes(step_with, 2, args=([["lr"], ["lr"]], micro_batches, 3 * ENOUGH))
    [message] = first
    assert message.startswith("find_unused_parameters=True: the loss depended on all parameters in each of the first")
    assert re.search(COST, message)
    assert second == []


def test_a_search_in_fit_that_finds_nothing_is_named_once():
    first, second = run_in_processes(fit, 2)
    assert ["the loss depended on all parameters" in message for message in first] == [True]
    assert second == []


def test_parameters_that_never_take_part_are_named():
    [message], _ = run_in_processes(step_with, 2, args=([["l"], ["l"]], 1, ENOUGH))
    assert "the same parameters were unused on all processes: right.weight, right.bias. Freeze them" in message
    assert 'DDP(find_unused_parameters="auto")' in message


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


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": False}, {"comm_hook": "bf16"}], ids=str)
@pytest.mark.parametrize(
    ("used", "micro_batches"),
    [([["lr"], ["lr"]], 1), ([["l"], ["l"]], 1), ([["l"], ["l"]], 3), ([["lr"], ["lr"]], 3)],
)
def test_a_search_that_need_not_go_on_ends(used, micro_batches, options):
    for ended, searched in run_in_processes(end_search, 2, args=(used, micro_batches, 2 * ENOUGH), kwargs=options):
        steps = [searches for searches, _ in ended][micro_batches - 1 :: micro_batches]
        assert steps == [True] * WATCHED_STEPS + [False] * (len(steps) - WATCHED_STEPS)
        for (_, ours), (searches, theirs) in zip(ended, searched, strict=True):
            assert searches
            for one, other in zip(ours, theirs, strict=True):
                assert (one is None) == (other is None)
                assert one is None or torch.equal(one, other)


@pytest.mark.parametrize(("used", "micro_batches"), USEFUL.values(), ids=USEFUL)
def test_a_search_that_is_needed_goes_on(used, micro_batches):
    for ended, _ in run_in_processes(end_search, 2, args=(used, micro_batches, 2 * ENOUGH)):
        assert all(searches for searches, _ in ended)


def test_a_batch_left_out_depends_on_what_is_used():
    for ended, searched, steps in run_in_processes(fit_uneven, 2):
        assert steps == 2 * ENOUGH
        assert all(map(torch.equal, ended, searched))


def test_a_parameter_that_takes_part_later_is_an_error():
    with pytest.raises(ProcessesFailed, match=r"the loss depends on right\.(weight|bias), which no process used"):
        run_in_processes(take_part_later, 2, timeout=30)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"find_unused_parameters": "yes"}, "must be True, False or"),
        ({"find_unused_parameters": "auto", "static_graph": True}, "cannot be combined with static_graph=True"),
        ({"find_unused_parameters": "auto", "comm_hook": "powersgd"}, "cannot be combined with comm_hook='powersgd'"),
    ],
)
def test_options_that_cannot_be_are_refused(options, message):
    with pytest.raises(ConfigurationError, match=message):
        DDP(**options)
