"""Ranks that fail: what the user reads, how the others end, and the exit code."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.launch.launching import RANK_1_FAILS, Ended, launch, write_script

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def raised(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    home = tmp_path_factory.mktemp("raises")
    write_script(home, RANK_1_FAILS.format(fail="raise ValueError('the root cause')"))
    return launch("--num_processes", "2", "--cpu", "script.py", cwd=home, timeout=100)


class TestARankThatRaises:
    def test_stops_the_peer_that_waits_for_it(self, raised: Ended) -> None:
        assert raised.code == 1
        assert raised.seconds < 30

    def test_is_named_with_its_traceback_once(self, raised: Ended) -> None:
        assert "rank 1 (pid" in raised.err
        assert "The other process was stopped." in raised.err
        assert raised.err.count("Traceback (most recent call last)") == 1
        assert raised.err.rstrip().endswith("ValueError: the root cause")

    def test_shows_no_frame_but_the_scripts_own(self, raised: Ended) -> None:
        frames = [line.strip() for line in raised.err.splitlines() if line.strip().startswith("File ")]
        assert len(frames) == 1
        assert "script.py" in frames[0]


def test_a_killed_rank_is_named_with_the_signal_and_a_likely_cause(tmp_path: Path) -> None:
    write_script(tmp_path, RANK_1_FAILS.format(fail="os.kill(os.getpid(), signal.SIGKILL)"))
    ended = launch("--num_processes", "2", "--cpu", "script.py", cwd=tmp_path, timeout=100)
    assert ended.code == 128 + signal.SIGKILL
    assert "rank 1 (pid" in ended.err
    assert "killed by signal 9 (SIGKILL)" in ended.err
    assert "memory" in ended.err
    assert "Traceback" not in ended.err  # what its peer saw is a consequence


@pytest.mark.parametrize(
    ("last_line", "code", "message"),
    [
        pytest.param("sys.exit(3)", 3, "rank 0", marks=pytest.mark.slow),
        ("sys.exit('no data at /data')", 1, "no data at /data"),
        ("os._exit(9)", 9, "rank 0"),
    ],
)
def test_the_exit_code_passes_through(tmp_path: Path, last_line: str, code: int, message: str) -> None:
    write_script(tmp_path, f"import os, sys\n{last_line}\n")
    ended = launch("--cpu", "script.py", cwd=tmp_path)
    assert ended.code == code
    assert ended.err.count(message) == 1
    assert "Traceback" not in ended.err


def test_a_mistake_in_the_script_is_shown_as_python_shows_it(tmp_path: Path) -> None:
    write_script(tmp_path, "x = (1,\n", "broken.py")
    ended = launch("--num_processes", "2", "--cpu", "broken.py", cwd=tmp_path)
    assert ended.code == 1
    assert ended.err.rstrip().endswith("SyntaxError: '(' was never closed")
    assert ended.err.count("SyntaxError") == 1


def test_a_restart_runs_all_again_and_tells_why(tmp_path: Path) -> None:
    write_script(
        tmp_path,
        """
        import os, sys
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
            raise OSError("a flaky disk")
        print("done", os.environ["RANK"])
        """,
    )
    ended = launch("--num_processes", "2", "--cpu", "--max_restarts", "1", "script.py", cwd=tmp_path)
    assert ended.code == 0
    assert {"done 0", "done 1"} <= set(ended.out.splitlines())
    assert ended.err.count("OSError: a flaky disk") == 1
    assert "failed with exit code 1. Starting all processes again (restart 1 of 1)." in ended.err
