"""Several launchers at once: two machines of one run (both on this host), and two runs on one machine."""

from __future__ import annotations

import signal
import socket
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from drivetrain.runtime.exit_codes import HANG_EXIT_CODE
from tests.launch.launching import Ended, end, started, write_script

pytestmark = [pytest.mark.timeout(150), pytest.mark.crash]

MEET = """
    import os, sys, time
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor([dist.get_rank()])
    dist.all_reduce(total)
    print("rank", dist.get_rank(), "of", dist.get_world_size(), "sum", total.item())
    if "fail" in sys.argv:
        if dist.get_rank() == 3:
            raise RuntimeError("the last rank is broken")
        time.sleep(600)
    dist.destroy_process_group()
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_together(cwd: Path, *commands: list[str]) -> list[Ended]:
    begin = time.monotonic()
    with ExitStack() as stack:
        processes = [
            stack.enter_context(started("-m", "drivetrain", "launch", "--cpu", *command, cwd=cwd))
            for command in commands
        ]
        return [end(process, begin, timeout=100) for process in processes]


def two_machines(cwd: Path, *script: str, backend: str = "static") -> list[Ended]:
    flags = ["--num_machines", "2", "--num_processes", "4", "--rdzv_backend", backend]
    address = ["--main_process_ip", "127.0.0.1", "--main_process_port", str(free_port())]
    return run_together(
        cwd, *([*flags, *address, "--machine_rank", str(rank), "script.py", *script] for rank in range(2))
    )


@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_two_machines_form_one_world(tmp_path: Path, backend: str) -> None:
    write_script(tmp_path, MEET)
    ended = two_machines(tmp_path, backend=backend)
    assert [one.code for one in ended] == [0, 0], ended
    lines = sorted(line for one in ended for line in one.out.splitlines())
    assert lines == [f"rank {rank} of 4 sum 6" for rank in range(4)]
    if backend == "static":  # machine 0 holds the first ranks; c10d counts machines as they come
        assert "rank 0 of" in ended[0].out


@pytest.mark.parametrize(("rank", "other"), [(0, "the other machines"), (1, "machine 0")])
def test_ctrl_c_ends_a_machine_that_waits_for_another(tmp_path: Path, rank: int, other: str) -> None:
    write_script(tmp_path, MEET)
    port = free_port()
    flags = ["--num_machines", "2", "--num_processes", "2", "--main_process_ip", "127.0.0.1"]
    flags += ["--main_process_port", str(port), "--machine_rank", str(rank), "script.py"]
    begin = time.monotonic()
    with started("-m", "drivetrain", "launch", "--cpu", *flags, cwd=tmp_path) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == f"drivetrain: waiting for {other} at 127.0.0.1:{port} ...\n"
        process.send_signal(signal.SIGINT)
        ended = end(process, begin, timeout=20)
    assert ended.code == 130
    assert "Traceback" not in ended.err


def test_one_machine_does_not_read_the_address_of_machine_0(tmp_path: Path) -> None:
    write_script(tmp_path, MEET)
    [ended] = run_together(tmp_path, ["--num_processes", "2", "--main_process_ip", "10.255.255.1", "script.py"])
    assert ended.code == 0, ended


def test_a_failure_on_one_machine_stops_the_other_which_shows_it_too(tmp_path: Path) -> None:
    write_script(tmp_path, MEET)
    ended = two_machines(tmp_path, "fail")
    for one in ended:
        assert one.code == 1
        assert one.seconds < 60  # the other ranks would sleep for ten minutes
        assert "rank 3 (pid" in one.err
        assert one.err.count("RuntimeError: the last rank is broken") == 1
        assert one.err.count("Traceback") == 1


def test_a_hang_is_reported_with_the_ranks_of_both_machines(tmp_path: Path) -> None:
    write_script(
        tmp_path,
        """
        import time
        from drivetrain import PartialState

        state = PartialState()
        if state.process_index == 1:
            time.sleep(600)
        state.wait_for_everyone()
        """,
    )
    flags = ["--num_machines", "2", "--num_processes", "2", "--hang_timeout", "3", "--main_process_ip", "127.0.0.1"]
    flags += ["--main_process_port", str(free_port())]
    ended = run_together(tmp_path, *([*flags, "--machine_rank", str(rank), "script.py"] for rank in range(2)))
    for one in ended:
        assert one.code == HANG_EXIT_CODE
        assert "waits in wait_for_everyone" in one.err
        assert "time.sleep(600)" in one.err


def test_two_launches_at_once_do_not_collide(tmp_path: Path) -> None:
    write_script(tmp_path, MEET)
    ended = run_together(tmp_path, *[["--num_processes", "2", "script.py"]] * 2)
    assert [one.code for one in ended] == [0, 0], ended
    assert [sorted(one.out.splitlines()) for one in ended] == [["rank 0 of 2 sum 1", "rank 1 of 2 sum 1"]] * 2


def test_a_port_that_is_taken_is_told_with_what_to_do(tmp_path: Path) -> None:
    write_script(tmp_path, MEET)
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        (ended,) = run_together(tmp_path, ["--main_process_port", str(port), "script.py"])
    assert ended.code == 1
    assert str(port) in ended.err
    assert "--main_process_port" in ended.err
    assert "Traceback" not in ended.err
