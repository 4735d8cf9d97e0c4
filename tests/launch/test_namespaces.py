"""Two machines that only a network joins: two network namespaces with a pair of virtual interfaces between them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.launching import clean_environment, wait_for_lines, write_script

pytestmark = [pytest.mark.crash, pytest.mark.timeout(300)]

ADDRESSES = ("10.213.77.1", "10.213.77.2")

TRAIN = """
    import os, sys, time
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor([dist.get_rank()])
    dist.all_reduce(total)
    print("rank", dist.get_rank(), "of", dist.get_world_size(), "sum", total.item(), flush=True)
    while "stay" in sys.argv:
        time.sleep(0.5)
    dist.destroy_process_group()
"""


def ip(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *arguments], capture_output=True, text=True)


@pytest.fixture
def machines() -> Iterator[tuple[str, str]]:
    """Names of two namespaces, each with one address of a network that nothing else is on."""
    names = (f"drivetrain-{os.getpid()}-0", f"drivetrain-{os.getpid()}-1")
    links = (f"dt{os.getpid() % 100000}a", f"dt{os.getpid() % 100000}b")
    try:
        made = ip("netns", "add", names[0])
    except FileNotFoundError:
        pytest.skip("the command ip (iproute2) is not installed")
    if made.returncode:
        pytest.skip(f"network namespaces are not permitted here: {made.stderr.strip()}")
    try:
        steps = [["netns", "add", names[1]], ["link", "add", links[0], "type", "veth", "peer", "name", links[1]]]
        for name, link, address in zip(names, links, ADDRESSES, strict=True):
            steps += [
                ["link", "set", link, "netns", name],
                ["-n", name, "link", "set", link, "name", "veth"],
                ["-n", name, "address", "add", f"{address}/24", "dev", "veth"],
                ["-n", name, "link", "set", "veth", "up"],
                ["-n", name, "link", "set", "lo", "up"],
            ]
        for step in steps:
            if (done := ip(*step)).returncode:
                pytest.skip(f"virtual interfaces are not permitted here: {done.stderr.strip()}")
        yield names
    finally:
        for name in names:
            ip("netns", "delete", name)


def start(namespace: str, rank: int, directory: Path, backend: str, *script: str) -> subprocess.Popen[str]:
    launch = [sys.executable, "-m", "drivetrain", "launch", "--cpu", "--num_machines", "2", "--num_processes", "2"]
    meet = ["--main_process_ip", ADDRESSES[0], "--main_process_port", "29611", "--machine_rank", str(rank)]
    return subprocess.Popen(
        ["ip", "netns", "exec", namespace, *launch, *meet, "--rdzv_backend", backend, "script.py", *script],
        cwd=directory,
        env=clean_environment(GLOO_SOCKET_IFNAME="veth", TP_SOCKET_IFNAME="veth"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def end(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.kill()  # what it started ends with it
        process.communicate()


@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_machines_meet_over_the_network(machines: tuple[str, str], tmp_path: Path, backend: str) -> None:
    write_script(tmp_path, TRAIN)
    processes = [start(name, rank, tmp_path, backend) for rank, name in enumerate(machines)]
    try:
        ended = [process.communicate(timeout=200) for process in processes]
    finally:
        end(processes)
    assert [process.returncode for process in processes] == [0, 0], ended
    lines = sorted(line for out, _ in ended for line in out.splitlines() if line.startswith("rank"))
    assert lines == ["rank 0 of 2 sum 1", "rank 1 of 2 sum 1"]


def test_the_machine_that_is_left_reports_the_one_that_is_cut_off(machines: tuple[str, str], tmp_path: Path) -> None:
    write_script(tmp_path, TRAIN)
    processes = [start(name, rank, tmp_path, "static", "stay") for rank, name in enumerate(machines)]
    try:
        for process in processes:
            wait_for_lines(process, "of 2", 1)
        assert ip("-n", machines[1], "link", "set", "veth", "down").returncode == 0
        cut = time.monotonic()
        _, said = processes[0].communicate(timeout=120)
        assert time.monotonic() - cut < 90  # no sign of life for 30 seconds, and what ending takes
    finally:
        end(processes)
    assert processes[0].returncode == 1
    assert "gave no sign of life for 30 s" in said
    assert "Traceback" not in said
