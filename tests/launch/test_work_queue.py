"""Ranks that die while all take items from a work queue: only the item is affected."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.launch.launching import launch, write_script

pytestmark = pytest.mark.timeout(120)

SCRIPT = """
import os, signal, sys
from drivetrain import PartialState

state = PartialState(cpu=True)
FATE = {fate!r}

with state.split_between_processes(list(range(8)), dynamic=True) as work:
    if FATE in ("kill", "raise") and state.process_index != {rank}:
        state.store.wait(["taken"])  # so that the fast ones do not take everything
    for item in work:
        state.store.set("taken", "1")
        if FATE == "all" or (state.process_index == {rank} and FATE != "later"):
            if FATE == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("no memory for this one")
        work.done(item * item)
    print(state.process_index, work.results(), flush=True)
if FATE == "later" and state.process_index == {rank}:
    os.kill(os.getpid(), signal.SIGKILL)
if FATE == "later":
    state.wait_for_everyone()
"""
RESULTS = str([item * item for item in range(8)])


def run(home: Path, fate: str, rank: int = 1, processes: int = 3):
    write_script(home, SCRIPT.format(fate=fate, rank=rank))
    return launch("--num_processes", str(processes), "--cpu", "script.py", cwd=home, timeout=100)


@pytest.mark.parametrize(("fate", "named"), [("kill", "killed by signal 9 (SIGKILL)"), ("raise", "no memory for this")])
def test_what_a_rank_had_that_dies_is_done_by_others_and_the_run_succeeds(tmp_path: Path, fate: str, named: str):
    ended = run(tmp_path, fate)
    assert ended.code == 0, ended.err
    assert sorted(ended.out.splitlines()) == [f"0 {RESULTS}", f"2 {RESULTS}"]
    assert ended.err.count("rank 1 (pid") == 1
    assert named in ended.err
    assert "The other ranks continue" in ended.err


@pytest.mark.slow
def test_without_rank_0_the_others_end_their_work_and_the_exit_code_is_its_own(tmp_path: Path):
    ended = run(tmp_path, "kill", rank=0)
    assert sorted(ended.out.splitlines()) == [f"1 {RESULTS}", f"2 {RESULTS}"]
    assert ended.code == 128 + signal.SIGKILL
    assert "rank 0 (pid" in ended.err


@pytest.mark.slow
def test_a_run_whose_ranks_all_fail_in_a_queue_has_failed(tmp_path: Path):
    ended = run(tmp_path, "all", processes=2)
    assert ended.code == 1
    assert "no memory for this one" in ended.err


def test_a_rank_that_dies_after_the_queue_ends_all_as_ever(tmp_path: Path):
    ended = run(tmp_path, "later", processes=2)
    assert ended.code == 128 + signal.SIGKILL
    assert "The other process was stopped." in ended.err
