"""Machines that go and come while a run is under way; all of them are launchers on this host."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.launch.launching import started, write_script
from tests.launch.test_machines import free_port

pytestmark = [pytest.mark.crash, pytest.mark.timeout(240)]

# Trains until a file says that it is over, and tells how large the world is each time it has started. The state is a
# number that all agree on; told to stop, all save it and end at the same step.
TRAINS = """
    import os, pathlib, signal, sys, time
    import torch
    from drivetrain import PartialState
    from drivetrain.runtime.collectives import reduce

    told = []
    signal.signal(signal.SIGTERM, lambda *_: told.append(1))
    state = PartialState()
    steps = int(pathlib.Path("saved").read_text()) if os.path.exists("saved") else 0
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    say = lambda text: (pathlib.Path("said").open("a").write(text + "\\n"))
    if state.is_main_process:
        say(f"attempt {attempt} world {state.num_processes} from {'the start' if steps == 0 else 'a save'}")
    while True:
        agreed = reduce(torch.tensor([float(bool(told)), float(os.path.exists("over")), float(steps)]), "sum")
        assert agreed[2] == steps * state.num_processes
        if agreed[0] or agreed[1]:
            break
        steps += 1
        time.sleep(0.02)
        if state.is_main_process and steps % 10 == 0:
            pathlib.Path("saving").write_text(str(steps))
            os.replace("saving", "saved")
    if agreed[0]:
        sys.exit(75)
    say(f"rank {state.process_index} of {state.num_processes} is through")
"""


class Machines:
    """Launchers that take part in one run; the first serves the meeting."""

    def __init__(self, stack: ExitStack, home: Path) -> None:
        self._stack = stack
        self._home = home
        self._port = str(free_port())
        self._started = 0

    def start(self, *flags: str, machines: str = "1:2") -> subprocess.Popen[str]:
        """Start one more launcher."""
        settings = f"is_host={int(self._started == 0)},last_call_timeout=5,keep_alive_interval=1"
        address = ["--main_process_ip", "127.0.0.1", "--main_process_port", self._port, "--rdzv_conf", settings]
        command = ["--cpu", "--nnodes", machines, "--num_processes", "2", *address, *flags, "script.py"]
        self._started += 1
        return self._stack.enter_context(started("-m", "drivetrain", "launch", *command, cwd=self._home))

    def wait_until_said(self, text: str, timeout: float = 90) -> None:
        """Wait until a rank has written a line."""
        deadline = time.monotonic() + timeout
        while text not in self.said:
            assert time.monotonic() < deadline, f"nobody said {text!r}: {self.said}"
            time.sleep(0.1)

    @property
    def said(self) -> list[str]:
        """What the ranks have said so far."""
        path = self._home / "said"
        return path.read_text().splitlines() if path.exists() else []

    def end(self) -> None:
        """Let the run be over."""
        (self._home / "over").touch()


def test_a_run_goes_on_alone_when_the_other_machine_dies_and_takes_it_back_when_it_returns(tmp_path: Path) -> None:
    write_script(tmp_path, TRAINS)
    with ExitStack() as stack:
        machines = Machines(stack, tmp_path)
        first = machines.start("--max_restarts", "1")
        second = machines.start("--max_restarts", "1")
        machines.wait_until_said("attempt 0 world 2 from the start")
        _wait_for(tmp_path / "saved")

        os.kill(second.pid, signal.SIGKILL)
        machines.wait_until_said("attempt 1 world 1 from a save")

        third = machines.start("--max_restarts", "1")
        machines.wait_until_said("attempt 2 world 2 from a save")

        machines.end()
        ended = [(launcher.communicate(timeout=60)[1], launcher.returncode) for launcher in (first, third)]
    assert [code for _, code in ended] == [0, 0], ended
    assert sorted(machines.said[-2:]) == ["rank 0 of 2 is through", "rank 1 of 2 is through"]
    assert "Starting all processes again (restart 1 of 1)." in ended[0][0]
    assert "drivetrain: continuing with 1 machine(s) instead of 2." in ended[0][0]
    assert "drivetrain: continuing with 2 machine(s) instead of 1." in ended[0][0]


@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_machines_that_are_all_needed_restart_together(tmp_path: Path, backend: str) -> None:
    write_script(
        tmp_path,
        """
        import os, signal
        import torch, torch.distributed as dist
        from drivetrain import PartialState

        state, attempt = PartialState(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        dist.all_reduce(total := torch.ones(1))
        if attempt < 3 and state.process_index == attempt % 2:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(total)
        print("rank", state.process_index, "attempt", attempt, "sum", total.item())
        """,
    )
    address = ["--main_process_ip", "127.0.0.1", "--main_process_port", str(free_port()), "--rdzv_backend", backend]
    flags = ["--cpu", "--num_machines", "2", "--num_processes", "2", "--max_restarts", "3", *address]
    with ExitStack() as stack:
        launchers = [
            stack.enter_context(
                started("-m", "drivetrain", "launch", *flags, "--machine_rank", str(rank), "script.py", cwd=tmp_path)
            )
            for rank in range(2)
        ]
        ended = [(*launcher.communicate(timeout=120), launcher.returncode) for launcher in launchers]
    assert [code for *_, code in ended] == [0, 0], ended
    lines = sorted(line for out, *_ in ended for line in out.splitlines())
    assert lines == [f"rank {rank} attempt 3 sum 4.0" for rank in range(2)]
    for _, err, _ in ended:
        printed = [line for line in err.splitlines() if line.startswith("drivetrain: ")]
        # One that starts before another prints that it waits.
        announced = [line for line in printed if not line.startswith("drivetrain: waiting for ")]
        assert len(announced) == 3
        for attempt, line in enumerate(announced):  # the same cause on both machines
            assert line.startswith(f"drivetrain: rank {attempt % 2} (pid ")
            assert line.endswith(
                f"was killed by signal 9 (SIGKILL). Starting all processes again (restart {attempt + 1} of 3)."
            )


def test_a_machine_that_must_go_ends_the_run_of_all_as_resumable(tmp_path: Path) -> None:
    write_script(tmp_path, TRAINS)
    with ExitStack() as stack:
        machines = Machines(stack, tmp_path)
        first = machines.start("--max_restarts", "5", "--rdzv_backend", "c10d", machines="2")
        second = machines.start("--max_restarts", "5", "--rdzv_backend", "c10d", machines="2")
        machines.wait_until_said("attempt 0 world 2 from the start")
        second.send_signal(signal.SIGTERM)
        ended = [(launcher.communicate(timeout=60)[1], launcher.returncode) for launcher in (first, second)]
    assert [code for _, code in ended] == [75, 75], ended
    for err, _ in ended:
        assert err.count("start it again to resume") == 1


def _wait_for(path: Path, timeout: float = 60) -> None:
    deadline = time.monotonic() + timeout
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.1)
