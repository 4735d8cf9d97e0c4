"""Debug mode: a call that differs is an error on every process, and none waits for ever for another."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from drivetrain import CollectiveError, PartialState
from drivetrain.runtime import collectives
from tests.pool import run_in_processes

DEBUG = {"DRIVETRAIN_DEBUG": "1"}


def take_turns(state: PartialState) -> None:
    with state.main_process_first():
        pass


# What rank 1 calls while the others wait in `wait_for_everyone`, and how it is shown.
AGAINST_A_BARRIER: dict[str, tuple[Callable[[PartialState], Any], str]] = {
    "gather": (lambda state: collectives.gather(torch.ones(3)), "gather(float32[3])"),
    "gather_rows": (lambda state: collectives.gather_rows(torch.ones(3), keep=1), "gather_rows(float32[*])"),
    "gather_object": (lambda state: collectives.gather_object(1), "gather_object()"),
    "reduce": (lambda state: collectives.reduce(torch.ones(3)), "reduce(float32[3])"),
    "main_process_first": (take_turns, "main_process_first()"),
}


def meet_a_barrier() -> dict[str, str]:
    state, messages = PartialState(), {}
    for name, (call, _) in AGAINST_A_BARRIER.items():
        mine = call if state.process_index == 1 else PartialState.wait_for_everyone
        with pytest.raises(CollectiveError) as caught:
            mine(state)
        messages[name] = str(caught.value)
    take_turns(state)  # where all call the same, nothing is different
    return messages


@pytest.fixture(scope="module")
def met() -> list[dict[str, str]]:
    return run_in_processes(meet_a_barrier, world_size=3, env=DEBUG)


@pytest.mark.parametrize("name", AGAINST_A_BARRIER)
def test_another_call_than_the_barrier_of_the_others_is_named_on_every_rank(
    name: str, met: list[dict[str, str]]
) -> None:
    here = os.path.basename(__file__)
    for message in (each[name] for each in met):
        lines = message.splitlines()
        assert lines[0].startswith("Rank(s) [1] ")
        assert lines[1].startswith("  rank 0: wait_for_everyone() at ")
        assert lines[2].startswith(f"  rank 1: {AGAINST_A_BARRIER[name][1]} at ")
        assert all(f"{here}:" in line for line in lines[1:4])


def wait_for_one_that_ends() -> str:
    state = PartialState()
    collectives.gather(torch.ones(1))
    if state.process_index == 1:
        state._leave()
        return ""
    with pytest.raises(CollectiveError) as caught:
        state.wait_for_everyone()
    dist.destroy_process_group()
    return str(caught.value)


def test_a_process_that_ends_early_is_named_with_its_last_call() -> None:
    message = run_in_processes(wait_for_one_that_ends, env=DEBUG)[0]
    assert "calls wait_for_everyone() at " in message
    assert "rank 1 has exited; its last call was gather(float32[1]) at " in message


def wait_for_one_that_does_not_come() -> str:
    state = PartialState(timeout=timedelta(seconds=3))
    if state.process_index == 1:
        state.store.wait(["seen"], timedelta(seconds=30))  # type: ignore[union-attr]
        return ""
    with pytest.raises(CollectiveError) as caught:
        state.wait_for_everyone()
    state.store.set("seen", "1")  # type: ignore[union-attr]
    return str(caught.value)


def test_a_process_that_does_not_come_in_time_is_named() -> None:
    message = run_in_processes(wait_for_one_that_does_not_come, env=DEBUG)[0]
    assert "rank 1 did not arrive within 0:00:03" in message


def compare_in_a_group_of_the_scripts_own() -> str:
    dist.init_process_group("gloo")
    state = PartialState()
    with pytest.raises(CollectiveError) as caught:
        collectives.gather(torch.ones(1 + state.process_index))
    state.wait_for_everyone()
    return str(caught.value)


def test_calls_are_compared_also_where_the_script_made_the_process_group() -> None:
    messages = run_in_processes(compare_in_a_group_of_the_scripts_own, env=DEBUG)
    assert all("rank 1: gather(float32[2])" in message for message in messages)


def leave_no_keys() -> int:
    state = PartialState()
    for _ in range(50):
        state.wait_for_everyone()
    assert state.store is not None
    return sum(state.store.check([f"debug/{number}/{state.process_index}"]) for number in range(51))


def test_the_store_does_not_fill_up() -> None:
    assert run_in_processes(leave_no_keys, env=DEBUG) == [1, 1]
