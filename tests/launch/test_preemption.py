"""Signals that a scheduler sends, and the exit code with which a run asks to be started again."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from drivetrain.runtime.exit_codes import RESUME_EXIT_CODE
from tests.launch.launching import launch, started, wait_for_lines, write_script

pytestmark = pytest.mark.timeout(120)

LAUNCH = ("-m", "drivetrain", "launch", "--num_processes", "2", "--cpu")

# Both ranks say when they are told to stop. Rank 1 needs a moment longer to save; what each does then is the argument.
SAVES = """
    import os, signal, subprocess, sys, time

    rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
    told = []
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, frame: told.append(signal.Signals(number).name))
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], **quiet)
    print("ready", os.getpid(), child.pid, flush=True)
    while not told or "never" in sys.argv:
        time.sleep(0.01)
    time.sleep(0.5 * int(rank))
    if "raise" in sys.argv and rank == "0":
        raise OSError("the disk is full")
    if "raise" in sys.argv:
        time.sleep(60)
    print(rank, *told, "child", child.poll(), flush=True)
    child.kill()
    if "through" not in sys.argv:
        sys.exit(75)
"""


def test_the_code_is_the_one_that_means_try_again() -> None:
    assert RESUME_EXIT_CODE == os.EX_TEMPFAIL == 75


@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGUSR1])
def test_a_preempted_run_saves_and_asks_to_be_started_again(tmp_path: Path, number: signal.Signals) -> None:
    write_script(tmp_path, SAVES)
    with started(*LAUNCH, "--max_restarts", "3", "script.py", cwd=tmp_path) as process:
        wait_for_lines(process, "ready", 2)
        process.send_signal(number)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 75
    # once, and to the ranks alone: loader workers would die of it
    assert sorted(out.splitlines()) == [f"{rank} {number.name} child None" for rank in range(2)]
    assert err == (
        "drivetrain: the run was preempted and has saved its state: start it again to resume (exit code 75).\n"
    )


def test_a_run_that_is_through_before_it_must_end_has_succeeded(tmp_path: Path) -> None:
    write_script(tmp_path, SAVES)
    with started(*LAUNCH, "script.py", "through", cwd=tmp_path) as process:
        wait_for_lines(process, "ready", 2)
        process.send_signal(signal.SIGUSR1)
        _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (0, "")


def test_ranks_that_do_not_end_are_killed_after_the_grace_period(tmp_path: Path) -> None:
    write_script(tmp_path, SAVES)
    with started(*LAUNCH, "--preemption_grace_period", "0.5", "script.py", "never", cwd=tmp_path) as process:
        wait_for_lines(process, "ready", 2)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM
    assert "rank 0, 1 had not exited 0.5 s after SIGTERM and was killed" in err
    assert "--preemption_grace_period" in err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_ranks_that_have_saved_in_time_get_more_of_it_for_their_exit(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    write_script(
        tmp_path,
        """
        import atexit, os, signal, sys, time

        signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
        atexit.register(print, "left", os.environ["RANK"], flush=True)
        atexit.register(time.sleep, 2)
        print("ready", flush=True)
        time.sleep(60)
        """,
    )
    with started(*LAUNCH, "--preemption_grace_period", "1", "script.py", cwd=tmp_path) as process:
        wait_for_lines(process, "ready", 2)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert sorted(out.splitlines()) == ["left 0", "left 1"]
    assert "was killed" not in err


def test_a_second_sigterm_kills_at_once(tmp_path: Path) -> None:
    write_script(tmp_path, SAVES)
    with started(*LAUNCH, "script.py", "never", cwd=tmp_path) as process:
        lines = wait_for_lines(process, "ready", 2)
        ranks = [psutil.Process(int(line.split()[1])) for line in lines]
        process.send_signal(signal.SIGUSR1)
        process.send_signal(signal.SIGTERM)  # what SLURM sends at the end of the time it gave
        _, alive = psutil.wait_procs(ranks, timeout=1)
        assert set(alive) == set(ranks)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=10)


def test_a_rank_that_cannot_save_is_shown_and_stops_the_other(tmp_path: Path) -> None:
    write_script(tmp_path, SAVES)
    with started(*LAUNCH, "script.py", "raise", cwd=tmp_path) as process:
        wait_for_lines(process, "ready", 2)
        begin = time.monotonic()
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=30)
    assert time.monotonic() - begin < 10  # the other would wait for a minute
    assert process.returncode == 128 + signal.SIGTERM
    assert err.rstrip().endswith("OSError: the disk is full")


# Somebody else, such as a cluster's agent, has told the ranks.
ASKS_ITSELF = """
    import os, sys, time

    time.sleep(0.3 * int(os.environ["RANK"]))
    print("saved", os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
    if os.environ["TORCHELASTIC_RESTART_COUNT"] != sys.argv[1]:
        sys.exit(75)
"""


def test_ranks_that_were_preempted_by_others_are_started_again(tmp_path: Path) -> None:
    write_script(tmp_path, ASKS_ITSELF)
    ended = launch("--num_processes", "2", "--cpu", "--max_restarts", "2", "script.py", "2", cwd=tmp_path)
    assert ended.code == 0
    assert sorted(ended.out.splitlines()) == [f"saved {rank} {attempt}" for rank in range(2) for attempt in range(3)]
    assert ended.err.splitlines() == [
        "drivetrain: the run was preempted and has saved its state. Starting all processes again "
        f"(restart {number} of 2)."
        for number in (1, 2)
    ]


def test_without_restarts_left_the_scheduler_is_asked(tmp_path: Path) -> None:
    write_script(tmp_path, ASKS_ITSELF)
    ended = launch("--num_processes", "2", "--cpu", "script.py", "1", cwd=tmp_path)
    assert ended.code == 75
    assert sorted(ended.out.splitlines()) == ["saved 0 0", "saved 1 0"]
    assert ended.err.count("\n") == 1
    assert "start it again" in ended.err


FAILS_SLOWLY = """
    import os, signal, time

    signal.signal(signal.SIGTERM, lambda *_: None)
    print("attempt", os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
    if os.environ["RANK"] == "0":
        import atexit
        atexit.register(lambda: (print("failing", flush=True), time.sleep(3)))
        raise SystemExit(3)
    time.sleep(600)
"""


def test_a_run_that_is_to_end_is_not_started_again(tmp_path: Path) -> None:
    write_script(tmp_path, FAILS_SLOWLY)
    with started(*LAUNCH, "--max_restarts", "3", "script.py", cwd=tmp_path) as process:
        wait_for_lines(process, "failing", 1)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 75
    assert "attempt 1" not in out
    assert "stopped before the processes were started again: start it again to resume" in err
