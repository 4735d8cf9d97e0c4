from __future__ import annotations

import itertools

import pytest

from drivetrain import ConfigurationError, DrivetrainError, PartialState
from drivetrain.callbacks import step_schedule
from drivetrain.callbacks.step_schedule import StepTimer, decide_on_main_process
from tests.pool import run_in_processes


def decided() -> list[int]:
    state = PartialState()
    return decide_on_main_process(lambda: [state.process_index, 7])


def test_all_processes_get_what_the_main_process_decided() -> None:
    assert run_in_processes(decided, world_size=3) == [[0, 7]] * 3


def raised(error: Exception) -> tuple[str, str]:
    state = PartialState()

    def decide() -> None:
        assert state.is_main_process, "only the main process is asked"
        raise error

    try:
        decide_on_main_process(decide)
    except Exception as caught:
        return type(caught).__name__, str(caught)
    return "", ""


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ConfigurationError("no such metric"), [("ConfigurationError", "no such metric")] * 2),
        (
            KeyError("a"),
            [("KeyError", "'a'"), ("DrivetrainError", "On the main process: KeyError('a')")],
        ),
    ],
)
def test_what_the_main_process_raises_is_raised_everywhere(error: Exception, expected: list[object]) -> None:
    assert run_in_processes(raised, args=(error,)) == expected


def test_alone_nothing_is_exchanged() -> None:
    assert decide_on_main_process(lambda: 3) == 3
    with pytest.raises(KeyError):
        decide_on_main_process(lambda: {}["a"])
    assert issubclass(ConfigurationError, DrivetrainError)


def due_steps(seconds: float, steps: int) -> list[int]:
    # Clocks of their own, so that no step lasts longer because the machine is busy.
    clock = 0.0
    step_schedule.time.monotonic = lambda: clock
    timer = StepTimer(seconds, step=0)
    due = []
    for step in range(1, steps + 1):
        # The clocks of two processes run apart: only the main process's counts.
        clock += 0.004 if PartialState().is_main_process else 0.001
        if timer.is_due(step):
            due.append(step)
    return due


def test_the_timer_is_due_at_the_same_steps_on_all_processes() -> None:
    first, second = run_in_processes(due_steps, args=(0.05, 60))
    assert first == second
    assert first
    # 60 steps of 4 ms and more hold at least 4 intervals of 50 ms; halving may come late by a few steps.
    assert 2 <= len(first) <= 60
    assert all(later - earlier >= 2 for earlier, later in itertools.pairwise(first))
