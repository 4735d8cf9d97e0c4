from __future__ import annotations

from datetime import timedelta

from drivetrain import PartialState
from drivetrain.runtime.store_barrier import all_arrive
from tests.pool import run_in_processes


def arrive_all() -> list[bool]:
    PartialState()
    return [all_arrive("a", timedelta(seconds=20)), all_arrive("b", timedelta(seconds=20))]


def test_where_all_come_all_know() -> None:
    assert run_in_processes(arrive_all, world_size=3) == [[True, True]] * 3


def arrive_alone() -> bool | None:
    state = PartialState()
    here = all_arrive("a", timedelta(milliseconds=200)) if state.is_main_process else None
    state.wait_for_everyone()
    return here


def test_one_that_comes_alone_waits_no_longer_than_its_patience() -> None:
    assert run_in_processes(arrive_alone, timeout=60) == [False, None]


def arrive_late() -> bool:
    state = PartialState()
    if state.is_main_process:
        answer = all_arrive("a", timedelta(milliseconds=50))
        state.wait_for_everyone()
        return answer
    state.wait_for_everyone()
    return all_arrive("a", timedelta(seconds=20))


def test_one_that_comes_after_another_gave_up_is_told_so() -> None:
    assert run_in_processes(arrive_late) == [False, False]


def test_a_process_alone_is_all() -> None:
    assert all_arrive("a", timedelta(0))
