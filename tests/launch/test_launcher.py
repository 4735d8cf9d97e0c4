"""The launcher as a user meets it: real processes, real exit codes."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.launch.launching import Ended, launch, started, wait_for_lines, write_script

pytestmark = pytest.mark.timeout(120)

SCRIPT_ARGUMENTS = ["--num_processes", "7", "--cpu", "-m", "--", "${local_rank}", "$$", "--unknown=1"]

TWO_RANKS = """
    import json, os, pathlib, sys
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader, Dataset

    class Squares(Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return index * index

    def main():
        dist.init_process_group("gloo")
        total = torch.tensor([dist.get_rank() + 1])
        dist.all_reduce(total)
        # A spawned worker imports the script anew to find Squares.
        loader = DataLoader(Squares(), batch_size=2, num_workers=1, multiprocessing_context="spawn")
        ours = {name: value for name, value in os.environ.items() if name.startswith(("DRIVETRAIN_", "OMP_"))}
        facts = {
            "total": total.item(),
            "backend": dist.get_backend(),
            "argv": sys.argv[1:],
            "script": sys.argv[0],
            "path": sys.path[0],
            "file": __file__,
            "spawned": torch.cat(list(loader)).tolist(),
            "variables": ours,
        }
        pathlib.Path(f"rank{dist.get_rank()}.json").write_text(json.dumps(facts))
        dist.destroy_process_group()

    if __name__ == "__main__":
        main()
"""


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended]:
    """One launch that several tests look at."""
    home = tmp_path_factory.mktemp("two_ranks")
    write_script(home, TWO_RANKS, "sub/train.py")
    flags = ["--num-processes", "2", "--cpu", "--mixed_precision", "bf16", "--gradient_accumulation_steps", "4"]
    return home, launch(*flags, "sub/train.py", *SCRIPT_ARGUMENTS, cwd=home)


@pytest.fixture(scope="module")
def facts(two_ranks: tuple[Path, Ended]) -> list[dict[str, Any]]:
    home, ended = two_ranks
    assert ended.code == 0, ended.err
    return [json.loads((home / f"rank{rank}.json").read_text()) for rank in range(2)]


class TestTwoProcessesOnTheCPU:
    def test_meet_over_gloo(self, facts: list[dict[str, Any]]) -> None:
        assert [(rank["total"], rank["backend"]) for rank in facts] == [(3, "gloo"), (3, "gloo")]

    def test_get_the_scripts_arguments_untouched(self, facts: list[dict[str, Any]]) -> None:
        assert [rank["argv"] for rank in facts] == [SCRIPT_ARGUMENTS] * 2

    def test_see_the_script_as_plain_python_runs_it(
        self, facts: list[dict[str, Any]], two_ranks: tuple[Path, Ended]
    ) -> None:
        home = two_ranks[0]
        assert facts[0]["script"] == "sub/train.py"
        assert facts[0]["path"] == str(home / "sub")
        assert facts[0]["file"] == str(home / "sub" / "train.py")

    def test_can_spawn_workers_that_find_the_script(self, facts: list[dict[str, Any]]) -> None:
        assert [rank["spawned"] for rank in facts] == [[0, 1, 4, 9]] * 2

    def test_learn_the_flags_from_the_environment(self, facts: list[dict[str, Any]]) -> None:
        variables = dict(facts[1]["variables"])
        assert int(variables.pop("OMP_NUM_THREADS")) >= 1
        del variables["DRIVETRAIN_HEARTBEAT"]
        assert variables == {
            "DRIVETRAIN_LAUNCHED": "1",
            "DRIVETRAIN_USE_CPU": "1",
            "DRIVETRAIN_MIXED_PRECISION": "bf16",
            "DRIVETRAIN_GRADIENT_ACCUMULATION_STEPS": "4",
        }

    def test_are_started_without_a_word(self, two_ranks: tuple[Path, Ended]) -> None:
        ended = two_ranks[1]
        assert (ended.out, ended.err) == ("", "")


def test_ranks_do_not_write_into_each_others_lines(tmp_path: Path) -> None:
    write_script(
        tmp_path,
        """
        import os
        for step in range(500):
            print("rank", os.environ["RANK"], "step", step)
    """,
    )
    ended = launch("--num_processes", "2", "--cpu", "script.py", cwd=tmp_path, PYTHONUNBUFFERED="1")
    expected = [f"rank {rank} step {step}" for rank in range(2) for step in range(500)]
    assert sorted(ended.out.splitlines()) == sorted(expected)


def test_a_script_that_leaves_its_process_group_and_model_behind_ends_cleanly(tmp_path: Path) -> None:
    # Left to the interpreter, gloo's threads abort about one process of three at exit.
    write_script(
        tmp_path,
        """
        import atexit, torch, torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        atexit.register(lambda: print("saved by", dist.get_rank(), sum(p.numel() for p in model.parameters())))
        dist.init_process_group("gloo")
        model = DistributedDataParallel(torch.nn.Linear(4, 4))
        for _ in range(3):
            model(torch.randn(2, 4)).sum().backward()
        """,
    )
    ended = launch("--num_processes", "3", "--cpu", "script.py", cwd=tmp_path, timeout=100)
    assert (ended.code, ended.err) == (0, "")
    assert sorted(ended.out.splitlines()) == [f"saved by {rank} 20" for rank in range(3)]


# Rank 0 waits in a collective, deaf to SIGTERM, and would wait for half an hour.
RANK_1_FAILS = """
    import os, signal, sys
    import torch
    import torch.distributed as dist

    signal.signal(signal.SIGTERM, lambda *_: None)
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        {fail}
    dist.all_reduce(torch.ones(1))
"""


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
        ("sys.exit(3)", 3, "rank 0"),
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


def test_a_module_runs_as_python_m_would_run_it(tmp_path: Path) -> None:
    write_script(tmp_path, "value = 5", "pkg/__init__.py")
    write_script(
        tmp_path,
        """
        import sys
        from . import value
        print(__name__, __package__, __spec__.name, value, sys.argv[1:], sys.path[0])
        """,
        "pkg/__main__.py",
    )
    ended = launch("-m", "--cpu", "pkg", "--lr", "1", cwd=tmp_path)
    assert (ended.code, ended.err) == (0, "")
    assert ended.out == f"__main__ pkg pkg.__main__ 5 ['--lr', '1'] {tmp_path}\n"


def test_a_program_that_is_not_python_runs_too(tmp_path: Path) -> None:
    ended = launch("--cpu", "--num_processes", "2", "--no_python", "sh", "-c", "echo $RANK; exit 5", cwd=tmp_path)
    assert ended.code == 5
    assert sorted(ended.out.split()) == ["0", "1"]


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
    assert err == "drivetrain: interrupted: the processes are ending; Ctrl-C again kills them.\n"


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


def test_each_ranks_output_is_kept_where_log_dir_says(tmp_path: Path) -> None:
    write_script(tmp_path, "import os\nprint('hello from', os.environ['RANK'])\n")
    ended = launch("--num_processes", "2", "--cpu", "--log_dir", "logs", "script.py", cwd=tmp_path)
    assert ended.code == 0
    files = {path.parent.name: path.read_text() for path in (tmp_path / "logs").rglob("stdout.log")}
    assert files == {"0": "hello from 0\n", "1": "hello from 1\n"}
    assert sorted(ended.out.splitlines()) == ["[rank0]: hello from 0", "[rank1]: hello from 1"]
