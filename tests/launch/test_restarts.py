"""Starting all ranks again: after any death, on fresh stores, with what the dead have left out of the way."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tests.launch.launching import launch, write_script
from tests.launch.test_machines import free_port

pytestmark = [pytest.mark.crash, pytest.mark.timeout(300)]
LONG = [pytest.mark.slow, pytest.mark.timeout(1100)]  # 2 s a restart, and three times that on a busy machine

# A rank dies at a random moment: while it joins the process group, or between two collectives.
DIES = """
    import os, random, signal, sys, threading, time
    import torch, torch.distributed as dist
    from drivetrain import PartialState

    attempt, last, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(sys.argv[1]), int(os.environ["RANK"])
    drawn = random.Random(attempt)
    if attempt < last and rank == drawn.randrange(2):
        delay = drawn.random() * drawn.choice([0.05, 0.3])
        threading.Thread(target=lambda: (time.sleep(delay), os.kill(os.getpid(), signal.SIGKILL)), daemon=True).start()
    if "plain" in sys.argv:
        dist.init_process_group("gloo")
    else:
        PartialState()
    for _ in range(10):
        dist.all_reduce(total := torch.tensor([float(rank + 1)]))
    while attempt < last:
        dist.all_reduce(torch.ones(1))
    print("rank", rank, "attempt", attempt, "sum", total.item())
"""


@pytest.mark.parametrize(
    ("kills", "flags", "arguments"),
    [
        (5, [], []),
        (4, [], ["plain"]),
        (3, ["--main_process_port"], []),
        pytest.param(50, [], [], marks=LONG),
        pytest.param(50, [], ["plain"], marks=LONG),
    ],
    ids=["free_port", "a_script_of_plain_torch", "named_port", "50_times", "50_times_in_plain_torch"],
)
def test_ranks_meet_again_after_every_death(tmp_path: Path, kills: int, flags: list[str], arguments: list[str]) -> None:
    write_script(tmp_path, DIES)
    flags = [part for flag in flags for part in (flag, str(free_port()))]
    command = ["--num_processes", "2", "--cpu", "--max_restarts", str(kills), *flags, "script.py", str(kills)]
    ended = launch(*command, *arguments, cwd=tmp_path, timeout=max(290, 20 * kills))
    assert ended.code == 0, ended.err
    assert sorted(ended.out.splitlines()) == [f"rank {rank} attempt {kills} sum 3.0" for rank in range(2)]
    announced = [line for line in ended.err.splitlines() if line.startswith("drivetrain: ")]
    assert len(announced) == kills
    for number, line in enumerate(announced, 1):
        assert "was killed by signal 9 (SIGKILL). Starting all processes again" in line
        assert line.endswith(f"(restart {number} of {kills}).")


def test_the_last_failure_ends_the_run_and_is_shown_in_full(tmp_path: Path) -> None:
    write_script(tmp_path, "import os\nraise ValueError('attempt ' + os.environ['TORCHELASTIC_RESTART_COUNT'])\n")
    ended = launch("--cpu", "--max_restarts", "2", "script.py", cwd=tmp_path)
    assert ended.code == 1
    said = [line for line in ended.err.splitlines() if line.startswith("ValueError")]
    assert said == [f"ValueError: attempt {number}" for number in range(3)]
    assert ended.err.count("Starting all processes again") == 2


def test_what_a_dead_rank_has_left_is_gone_before_the_next_attempt(tmp_path: Path) -> None:
    # A process that still writes a checkpoint would write into the next attempt's.
    write_script(
        tmp_path,
        """
        import os, signal, subprocess, sys, time
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            ignores = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
            child = subprocess.Popen([sys.executable, "-c", ignores], stdout=subprocess.DEVNULL)
            open("child", "w").write(str(child.pid))
            os.kill(os.getpid(), signal.SIGKILL)
        left = int(open("child").read())
        state = open(f"/proc/{left}/stat").read().split()[2] if os.path.exists(f"/proc/{left}") else "gone"
        print(state in ("Z", "gone"))
        """,
    )
    ended = launch("--cpu", "--max_restarts", "1", "script.py", cwd=tmp_path)
    assert (ended.code, ended.out) == (0, "True\n"), ended.err
    left = int((tmp_path / "child").read_text())
    assert not psutil.pid_exists(left) or psutil.Process(left).status() == psutil.STATUS_ZOMBIE
