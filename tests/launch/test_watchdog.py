"""Ranks that make no progress: the launcher ends the run in bounded time and reports where each rank waits."""

from __future__ import annotations

import select
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from drivetrain.launch import watchdog
from drivetrain.launch.watchdog import RankReport, Watchdog
from drivetrain.runtime.exit_codes import HANG_EXIT_CODE
from drivetrain.runtime.heartbeat import HEARTBEAT_VARIABLE
from tests.launch.launching import launch, started, wait_for_lines, write_script
from tests.launch.test_machines import free_port

pytestmark = [pytest.mark.timeout(120), pytest.mark.crash]

TWO = ("--num_processes", "2", "--cpu")

# Rank 0 waits in a collective for ever. What rank 1 does meanwhile is the argument.
RANK_0_WAITS = """
    import os, signal, sys, time
    import torch
    from drivetrain import PartialState, gather

    state = PartialState()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
    gather(torch.ones(1))
    if state.process_index == 1:
        match sys.argv[1]:
            case "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "backward":
                while True:
                    time.sleep(0.1)
            case "barrier":
                state.wait_for_everyone()
                time.sleep(600)
    if sys.argv[1] == "backward":
        model(torch.ones(1)).backward()
    gather(torch.ones(100))
"""

REPORTS = {
    "stopped": ("gather", "gather(torch.ones(100))", "is stopped (SIGSTOP"),
    "barrier": ("gather", "gather(torch.ones(100))", "waits in wait_for_everyone"),
    "backward": ("backward", "model(torch.ones(1)).backward()", "is in no collective"),
}
LINES_OF_RANK_1 = {
    "backward": "script.py:15 in <module>: time.sleep(0.1)",
    "barrier": "script.py:17 in <module>: state.wait_for_everyone()",
}


@pytest.mark.parametrize("case", REPORTS)
def test_a_hang_ends_with_each_rank_its_collective_and_its_line(case: str, tmp_path: Path) -> None:
    write_script(tmp_path, RANK_0_WAITS)
    ended = launch(*TWO, "--hang_timeout", "3", "script.py", case, cwd=tmp_path)
    collective, line, rank_1 = REPORTS[case]
    assert ended.code == HANG_EXIT_CODE
    assert "the run hangs: no progress for" in ended.err
    first, second = ended.err[ended.err.index("  rank 0 (pid ") :].split("  rank 1 (pid ")
    assert f"waits in {collective}\n" in first
    assert line in first
    assert rank_1 in second
    assert LINES_OF_RANK_1.get(case, "") in second
    assert ("--debug" in second) == (case != "stopped")  # calls cannot differ where a rank makes none
    assert "Traceback" not in ended.err


def test_the_environment_sets_the_time_and_a_run_that_hangs_can_be_started_again(tmp_path: Path) -> None:
    write_script(
        tmp_path,
        """
        import os, time
        from drivetrain import PartialState

        state = PartialState()
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and state.process_index == 1:
            time.sleep(600)
        state.wait_for_everyone()
        print("through", state.process_index)
        """,
    )
    ended = launch(*TWO, "--max_restarts", "1", "script.py", cwd=tmp_path, DRIVETRAIN_HANG_TIMEOUT="2")
    assert ended.code == 0
    assert sorted(ended.out.splitlines()) == ["through 0", "through 1"]
    assert "waits in wait_for_everyone" in ended.err
    assert "Starting all processes again (restart 1 of 1)." in ended.err


def test_a_run_that_is_slow_but_makes_progress_is_left_alone(tmp_path: Path) -> None:
    write_script(
        tmp_path,
        """
        import time
        import torch
        from drivetrain import Accelerator

        accelerator = Accelerator()
        weight = torch.nn.Parameter(torch.ones(1))
        optimizer = accelerator.prepare(torch.optim.SGD([weight], lr=0.1))
        for step in range(4):
            time.sleep(1.2)
            optimizer.step()
        for number in range(4):
            time.sleep(1.2)
            accelerator.wait_for_everyone()
        for batch in accelerator.prepare(torch.utils.data.DataLoader(range(4), batch_size=1)):
            time.sleep(1.2)
        end = time.monotonic() + 5
        while time.monotonic() < end:
            sum(range(1000))
        """,
    )
    ended = launch(*TWO, "--hang_timeout", "4", "script.py", cwd=tmp_path)
    assert (ended.code, ended.err) == (0, "")


def test_a_mismatched_collective_that_aborts_ends_with_the_flag_that_finds_it(tmp_path: Path) -> None:
    write_script(
        tmp_path,
        """
        import torch
        from drivetrain import PartialState, gather
        gather(torch.ones(2 + PartialState().process_index))
        """,
    )
    ended = launch(*TWO, "script.py", cwd=tmp_path)
    assert ended.code == 128 + signal.SIGABRT
    assert "drivetrain launch --debug" in ended.err.splitlines()[-1]


def test_with_debug_a_gather_against_a_barrier_is_an_error_at_once(tmp_path: Path) -> None:
    write_script(tmp_path, RANK_0_WAITS)
    ended = launch(*TWO, "--debug", "script.py", "barrier", cwd=tmp_path)
    assert ended.code == 1
    assert "rank 0: gather(float32[100]) at script.py:21 in <module>" in ended.err
    assert "rank 1: wait_for_everyone() at script.py:17 in <module>" in ended.err


# without a time of its own, the watchdog follows the time-out of the process group

SLEEP_THEN_WAIT = """
    import time
    from datetime import timedelta
    import torch
    from drivetrain import PartialState, gather

    state = PartialState(cpu=True, timeout=timedelta(seconds=60))
    gather(torch.ones(1))
    print("ready", flush=True)
    time.sleep(5)
    print("slept", flush=True)
    if state.process_index == 0:
        gather(torch.ones(1))
    time.sleep(600)
"""


def test_by_default_only_a_wait_for_others_is_a_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "BEFORE_TIMEOUT", 57.0)  # a limit of 3 s instead of 45
    script = write_script(tmp_path, SLEEP_THEN_WAIT)
    heartbeats = tmp_path / "heartbeats"
    heartbeats.mkdir()
    watch = Watchdog(str(heartbeats), limit=None)
    port = str(free_port())
    with ExitStack() as stack:
        ranks = []
        for rank in range(2):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
            variables = {**place, "MASTER_PORT": port, HEARTBEAT_VARIABLE: watch.path(rank)}
            command = ("-m", "drivetrain.launch.worker", "script", str(script))
            ranks.append(stack.enter_context(started(*command, cwd=tmp_path, **variables)))
        watch.start({rank: process.pid for rank, process in enumerate(ranks)}, {0: 0, 1: 1}, world_size=2)
        for process in ranks:
            wait_for_lines(process, "ready", 1)
        assert polled(watch, until=lambda: has_line(ranks[0])) is None
        assert has_line(ranks[0])
        reports = polled(watch, until=lambda: False)
    assert reports is not None
    first, second = watch.describe(reports).split("  rank 1 ")
    assert "waits in gather" in first
    assert "is in no collective" in second


def polled(watch: Watchdog, until: Callable[[], bool]) -> list[RankReport] | None:
    deadline = time.monotonic() + 30
    while not until() and time.monotonic() < deadline:
        if (reports := watch.poll([0, 1])) is not None:
            return reports
        time.sleep(0.05)
    return None


def has_line(process: subprocess.Popen[str]) -> bool:
    assert process.stdout is not None
    return bool(select.select([process.stdout], [], [], 0)[0])
