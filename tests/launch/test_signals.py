"""Signals that reach a launch: the ranks end with it, and its exit code names them."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from tests.launch.launching import started, wait_for_lines, write_script

pytestmark = pytest.mark.timeout(120)

WAITS = """
    import os, signal, sys, time

    def told(number, frame):
        print("rank", os.environ["RANK"], "got", signal.Signals(number).name, flush=True)
        if "stubborn" not in sys.argv:
            sys.exit(0)

    signal.signal(signal.SIGINT, told)
    signal.signal(signal.SIGTERM, told)
    print("ready", os.getpid(), flush=True)
    while True:
        time.sleep(0.1)
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["ctrl_c", "sigterm"])
def test_a_signal_reaches_every_rank_once_and_lets_it_end(tmp_path: Path, number: signal.Signals, code: int) -> None:
    write_script(tmp_path, WAITS)
    command = ("-m", "drivetrain", "launch", "--num_processes", "2", "--cpu", "script.py")
    with started(*command, cwd=tmp_path) as process:
        wait_for_lines(process, "ready", 2)
        os.killpg(process.pid, number)  # as the terminal does: the whole foreground group
        out, err = process.communicate(timeout=30)
        assert process.returncode == code
        assert sorted(out.splitlines()) == [f"rank {rank} got {number.name}" for rank in range(2)]
        assert "Traceback" not in err


# As `fit` does: finish the step, save, then let KeyboardInterrupt end the script.
SAVES_AND_RAISES = """
    import os, signal, sys, time

    seen = []
    signal.signal(signal.SIGINT, lambda *_: seen.append(1))
    print("ready", os.getpid(), flush=True)
    while not seen:
        time.sleep(0.01)
    time.sleep(0.3 * int(os.environ["RANK"]))
    print("saved", os.environ["RANK"], flush=True)
    raise KeyboardInterrupt
"""


def test_ctrl_c_after_which_each_rank_raises_keyboard_interrupt_ends_with_130_and_no_traceback(tmp_path: Path) -> None:
    write_script(tmp_path, SAVES_AND_RAISES)
    command = ("-m", "drivetrain", "launch", "--num_processes", "2", "--cpu", "--max_restarts", "3", "script.py")
    with started(*command, cwd=tmp_path) as process:
        wait_for_lines(process, "ready", 2)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert sorted(out.splitlines()) == ["saved 0", "saved 1"]
    assert err == "drivetrain: interrupted: waiting for the processes to exit. Press Ctrl-C again to kill them.\n"


def test_ranks_that_were_interrupted_without_the_launcher_end_with_130_too(tmp_path: Path) -> None:
    write_script(tmp_path, SAVES_AND_RAISES)
    command = ("-m", "drivetrain", "launch", "--num_processes", "2", "--cpu", "script.py")
    with started(*command, cwd=tmp_path) as process:
        lines = wait_for_lines(process, "ready", 2)
        for line in lines:
            os.kill(int(line.split()[1]), signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert sorted(out.splitlines()) == ["saved 0", "saved 1"]
    assert "was interrupted (KeyboardInterrupt)" in err
    assert "Traceback" not in err


def test_a_second_ctrl_c_kills_ranks_that_do_not_end(tmp_path: Path) -> None:
    write_script(tmp_path, WAITS)
    command = ("-m", "drivetrain", "launch", "--num_processes", "2", "--cpu", "script.py", "stubborn")
    with started(*command, cwd=tmp_path) as process:
        wait_for_lines(process, "ready", 2)
        os.killpg(process.pid, signal.SIGINT)
        wait_for_lines(process, "got SIGINT", 2)
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=10)
        assert process.returncode == 130


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux, whose kernel ends the ranks")
def test_no_rank_outlives_a_killed_launcher(tmp_path: Path) -> None:
    write_script(tmp_path, WAITS)
    command = ("-m", "drivetrain", "launch", "--num_processes", "2", "--cpu", "script.py")
    with started(*command, cwd=tmp_path) as process:
        lines = wait_for_lines(process, "ready", 2)
        ranks = [psutil.Process(int(line.split()[1])) for line in lines]
        process.kill()
        _, alive = psutil.wait_procs(ranks, timeout=10)
        assert not alive
