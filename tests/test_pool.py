"""The pool must be right before any test that stands on it can be."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist

from tests import pool
from tests.pool import ProcessesFailed, run_in_processes


def who_am_i(prefix: str, suffix: str = "") -> str:
    return f"{prefix}{os.environ['RANK']} of {os.environ['WORLD_SIZE']}{suffix}"


def environment_of_rank(*names: str) -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in names}


def sum_over_gloo(tensor: torch.Tensor) -> torch.Tensor:
    dist.init_process_group("gloo")
    dist.all_reduce(tensor)
    return tensor


def raise_on_rank(rank: int) -> None:
    if os.environ["RANK"] == str(rank):
        print("about to fail")
        raise ValueError("the wrong sort of leaves")
    signal.pause()


def raise_everywhere() -> None:
    raise ValueError(f"leaves on rank {os.environ['RANK']}")


def wait_forever_on_rank(rank: int) -> str:
    if os.environ["RANK"] == str(rank):
        print("settling down")
        a_place_to_hang()
    return "through"


def a_place_to_hang() -> None:
    signal.pause()


def hang_in_a_collective() -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        dist.barrier()
    else:
        signal.pause()


def die_by_signal() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def exit_quietly() -> None:
    os._exit(3)


def compare_two_numbers() -> None:
    left, right = 40, 2
    assert left == right


def leave_a_stray_process(own_group: bool) -> int:
    return subprocess.Popen(["sleep", "600"], start_new_session=own_group).pid


def say(text: str) -> None:
    print(f"{text} from {os.environ['RANK']}")
    os.write(2, b"and below python\n")


def draw_numbers() -> tuple[float, float]:
    import random

    return random.random(), float(np.random.rand())


def big_tensor() -> torch.Tensor:
    return torch.full((1000, 1000), float(os.environ["RANK"]))


def test_results_come_in_rank_order() -> None:
    results = run_in_processes(who_am_i, world_size=3, args=("rank ",), kwargs={"suffix": "!"})
    assert results == ["rank 0 of 3!", "rank 1 of 3!", "rank 2 of 3!"]


def test_ranks_form_a_world_and_leave_it() -> None:
    results = run_in_processes(sum_over_gloo, world_size=2, args=(torch.tensor([1.0, 2.0]),))
    assert [result.tolist() for result in results] == [[2.0, 4.0]] * 2


def test_large_results_come_back_whole() -> None:
    results = run_in_processes(big_tensor, world_size=2)
    assert [float(result.sum()) for result in results] == [0.0, 1_000_000.0]


def test_ranks_see_the_environment_and_directory_of_the_test(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("A_VARIABLE", "a value")
    monkeypatch.setenv("ANOTHER", "unwanted")
    monkeypatch.chdir(tmp_path)
    names = ("A_VARIABLE", "ANOTHER", "DRIVETRAIN_USE_CPU", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    [seen] = run_in_processes(environment_of_rank, 1, args=names, env={"ANOTHER": None})
    assert seen == {
        "A_VARIABLE": "a value",
        "ANOTHER": None,
        "DRIVETRAIN_USE_CPU": "1",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
    }
    assert run_in_processes(os.getcwd, 1) == [str(tmp_path)]


def test_unseeded_ranks_draw_different_numbers() -> None:
    first, second = run_in_processes(draw_numbers, 2)
    assert first[0] != second[0]
    assert first[1] != second[1]


def test_output_is_shown_again_in_rank_order(capfd: pytest.CaptureFixture[str]) -> None:
    run_in_processes(say, 2, args=("greetings",))
    out = capfd.readouterr().out
    assert out == "greetings from 0\nand below python\ngreetings from 1\nand below python\n"


def test_a_raise_names_its_rank_and_stops_the_others_at_once() -> None:
    began = time.monotonic()
    with pytest.raises(ProcessesFailed, match="failed on rank 1 of 3") as caught:
        run_in_processes(raise_on_rank, world_size=3, args=(1,), timeout=60)
    assert time.monotonic() - began < 10
    assert caught.value.ranks == [1]
    assert caught.value.hung == []
    assert "ValueError: the wrong sort of leaves" in str(caught.value)
    assert "in raise_on_rank" in caught.value.tracebacks[1]
    assert "about to fail" in str(caught.value)


def test_every_rank_that_raises_is_shown() -> None:
    with pytest.raises(ProcessesFailed) as caught:
        run_in_processes(raise_everywhere, world_size=2)
    assert sorted(caught.value.ranks) == [0, 1]
    assert "leaves on rank 0" in str(caught.value)
    assert "leaves on rank 1" in str(caught.value)


def test_a_failed_assertion_shows_its_values() -> None:
    with pytest.raises(ProcessesFailed, match="assert 40 == 2"):
        run_in_processes(compare_two_numbers, 1)


@pytest.mark.parametrize(
    ("function", "words"), [(die_by_signal, "was killed by SIGKILL"), (exit_quietly, "exited with code 3")]
)
def test_a_death_is_a_failure(function: object, words: str) -> None:
    with pytest.raises(ProcessesFailed, match=words):
        run_in_processes(function, 1)  # type: ignore[arg-type]


def test_a_hang_is_killed_and_shows_where_it_was() -> None:
    with pytest.raises(ProcessesFailed, match=r"still ran after 1 s on rank 1 of 2") as caught:
        run_in_processes(wait_forever_on_rank, world_size=2, args=(1,), timeout=1)
    assert caught.value.hung == [1]
    assert "in a_place_to_hang" in caught.value.tracebacks[1]
    assert "settling down" in str(caught.value)


def test_a_hang_inside_a_collective_shows_where_it_was() -> None:
    with pytest.raises(ProcessesFailed) as caught:
        run_in_processes(hang_in_a_collective, world_size=2, timeout=4)
    assert caught.value.hung == [0, 1]
    assert "in barrier" in caught.value.tracebacks[0]


def test_the_pool_works_on_after_a_failure() -> None:
    with pytest.raises(ProcessesFailed):
        run_in_processes(raise_everywhere, 1)
    assert run_in_processes(who_am_i, 1, args=("",)) == ["0 of 1"]


@pytest.mark.parametrize("own_group", [False, True])
def test_nothing_survives_a_call(own_group: bool) -> None:
    strays = run_in_processes(leave_a_stray_process, 2, args=(own_group,))
    assert not any(psutil.pid_exists(pid) for pid in strays)
    assert psutil.Process(pool._shared_server().process.pid).children(recursive=True) == []


def test_nothing_survives_a_hang() -> None:
    with pytest.raises(ProcessesFailed):
        run_in_processes(wait_forever_on_rank, world_size=2, args=(1,), timeout=0.5)
    assert psutil.Process(pool._shared_server().process.pid).children(recursive=True) == []


@pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_PDEATHSIG, which only Linux has")
def test_nothing_survives_a_killed_session(tmp_path: Path) -> None:
    script = (
        "from tests import pool, test_pool\n"
        "print(pool._shared_server().process.pid, flush=True)\n"
        "pool.run_in_processes(test_pool.wait_forever_on_rank, 2, args=(1,), timeout=100)\n"
    )
    session = subprocess.Popen([sys.executable, "-c", script], cwd=pool.ROOT, stdout=subprocess.PIPE, text=True)
    assert session.stdout is not None
    server = psutil.Process(int(session.stdout.readline()))
    deadline = time.monotonic() + 60
    while not (ranks := server.children()):
        assert time.monotonic() < deadline, "the pool forked no ranks"
    session.kill()
    session.wait()
    session.stdout.close()
    _, alive = psutil.wait_procs([server, *ranks], timeout=20)
    assert alive == []


def test_the_server_has_one_thread_when_it_forks() -> None:
    assert pool._shared_server().threads == 1


def test_a_function_that_cannot_be_sent_is_refused() -> None:
    with pytest.raises(TypeError, match="defined at the top of a module"):
        run_in_processes(lambda: None, 1)


def call_the_pool_again() -> None:
    run_in_processes(who_am_i, 1, args=("",))


def test_a_rank_cannot_start_ranks() -> None:
    with pytest.raises(ProcessesFailed, match="called inside a rank"):
        run_in_processes(call_the_pool_again, 1)
