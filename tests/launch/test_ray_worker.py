"""One rank on a worker of Ray, without Ray: how its process starts, what of it is reported, how it is ended."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from drivetrain import LaunchError
from drivetrain.launch.ray_launcher import (
    Place,
    RayWorker,
    Report,
    environment_of_rank,
    rank_order,
    variables_of_ranks,
    variables_to_pass_on,
)
from tests.launch.launching import write_script

VARIABLES = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}


@pytest.fixture
def worker() -> Iterator[RayWorker]:
    started = RayWorker()
    yield started
    started.clean_up()


def start(worker: RayWorker, home: Path, source: str) -> None:
    script = write_script(home, source)
    paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    worker.start(["-m", "drivetrain.launch.worker", "script", str(script)], VARIABLES | paths, str(home))


def to_the_end(worker: RayWorker) -> tuple[dict[int, bytes], Report]:
    """All that the rank writes, and the last report."""
    written = {1: b"", 2: b""}
    while True:
        report = worker.poll(1.0)
        for kind, data in report.output:
            written[kind] += data
        if not report.alive:
            return written, report


def test_a_rank_that_raises_is_reported_with_its_output_its_traceback_and_its_place(
    worker: RayWorker, tmp_path: Path
) -> None:
    start(
        worker,
        tmp_path,
        """
        import os, sys
        print("here", os.environ["RANK"], os.getcwd())
        sys.stderr.write("half a line")
        raise ValueError("the root cause")
        """,
    )
    written, report = to_the_end(worker)
    assert written == {1: f"here 3 {tmp_path}\n".encode(), 2: b"half a line"}
    [failure] = report.failures
    assert (failure.rank, failure.local_rank, failure.exit_code) == (3, 1, 1)
    assert failure.text.rstrip().endswith("ValueError: the root cause")


def test_a_rank_hears_sigint_though_its_worker_does_not(worker: RayWorker, tmp_path: Path) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # as Ray starts its workers
    try:
        start(worker, tmp_path, "import time\nprint('ready')\ntime.sleep(60)\n")
        while not worker.poll(1.0).output:
            pass
        worker.forward(signal.SIGINT)
        _, report = to_the_end(worker)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert [failure.exit_code for failure in report.failures] in ([], [130])
    assert not report.alive


def test_a_rank_that_is_deaf_is_killed(worker: RayWorker, tmp_path: Path) -> None:
    start(
        worker,
        tmp_path,
        """
        import signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("ready")
        time.sleep(60)
        """,
    )
    while not worker.poll(1.0).output:
        pass
    begin = time.monotonic()
    worker.stop(0.2)
    assert not worker.poll(0).alive
    assert time.monotonic() - begin < 5


def test_a_directory_that_is_not_there_is_refused_by_name(worker: RayWorker, tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"has no folder .*gone.*same path"):
        worker.start(["x"], VARIABLES, str(tmp_path / "gone"))


def test_a_rank_gets_the_launchers_variables_but_for_those_of_its_machine() -> None:
    launcher = {"LR": "1", "HOSTNAME": "a", "RAY_ADDRESS": "a:1", "CUDA_VISIBLE_DEVICES": "0", "SLURM_JOB_ID": "7"}
    machine = {"HOSTNAME": "b", "CUDA_VISIBLE_DEVICES": "5", "LR": "2", "PYTHONBREAKPOINT": "ray.util.rpdb.set_trace"}
    found = environment_of_rank(variables_to_pass_on(launcher), machine)
    assert found == {"LR": "1", "HOSTNAME": "b", "CUDA_VISIBLE_DEVICES": "5"}


def test_ranks_of_a_machine_follow_each_other_and_each_sees_its_own_device_at_its_local_rank() -> None:
    places = [Place("a", "1", ("10",)), Place("b", "2", ("0",)), Place("a", "1", ("9",))]
    order = rank_order(places)
    assert order == [2, 0, 1]
    found = list(variables_of_ranks([places[i] for i in order]))
    assert [(each["LOCAL_RANK"], each["LOCAL_WORLD_SIZE"], each["GROUP_RANK"]) for each in found] == [
        ("0", "2", "0"),
        ("1", "2", "0"),
        ("0", "1", "1"),
    ]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in found] == ["9,10", "9,10", "0"]
