"""`drivetrain launch --launcher ray` with a real Ray of two nodes on this machine.

Each has two cores, and one has two GPUs by name: Ray counts what it was started with.
"""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.launch.launching import RANK_1_FAILS, Ended, launch, started, wait_for_lines, write_script

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]

TRAINS = """
    import json, os, sys
    import torch
    from drivetrain import Accelerator

    accelerator = Accelerator()
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    torch.manual_seed(100 + accelerator.process_index)
    losses = []
    for _ in range(5):
        loss = model(torch.randn(4, 3)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    weights = torch.cat([each.detach().flatten() for each in model.parameters()]).tolist()
    facts = {
        "losses": losses, "weights": weights, "world": accelerator.num_processes, "argv": sys.argv,
        "path": sys.path[0], "here": os.getcwd(), "mine": os.environ.get("MINE"),
        "precision": accelerator.mixed_precision, "threads": torch.get_num_threads(),
    }
    print(json.dumps([accelerator.process_index, facts]))
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a Ray of two nodes."""
    cluster_utils = pytest.importorskip("ray.cluster_utils", reason="needs Ray, which `make test-ray` installs")
    nodes = cluster_utils.Cluster()
    try:
        nodes.add_node(num_cpus=2, num_gpus=2, include_dashboard=False)
        nodes.add_node(num_cpus=2, num_gpus=0)
        yield nodes.address
    finally:
        nodes.shutdown()


def on_ray(cluster: str, home: Path, *arguments: str, timeout: float = 120, **variables: str) -> Ended:
    return launch("--launcher", "ray", *arguments, cwd=home, timeout=timeout, RAY_ADDRESS=cluster, **variables)


def facts(ended: Ended) -> dict[int, dict[str, object]]:
    assert (ended.code, ended.err) == (0, "")
    return dict(json.loads(line) for line in ended.out.splitlines())


def test_two_workers_train_as_two_processes_of_the_own_launcher_do(cluster: str, tmp_path: Path) -> None:
    write_script(tmp_path, TRAINS, "sub/train.py")
    flags = ["--num_processes", "2", "--cpu", "--mixed_precision", "bf16", "--num_cpu_threads_per_process", "1"]
    theirs = facts(on_ray(cluster, tmp_path, *flags, "sub/train.py", "--lr", "${x}", MINE="yes"))
    ours = facts(launch(*flags, "sub/train.py", "--lr", "${x}", cwd=tmp_path, MINE="yes"))
    assert theirs == ours
    assert theirs[0]["weights"] == theirs[1]["weights"]
    assert theirs[0]["losses"] != theirs[1]["losses"]
    assert {name: theirs[1][name] for name in ("world", "argv", "here", "mine", "precision", "threads")} == {
        "world": 2,
        "argv": ["sub/train.py", "--lr", "${x}"],
        "here": str(tmp_path),
        "mine": "yes",
        "precision": "bf16",
        "threads": 1,
    }


def runs(pid: int) -> bool:
    """Whether a process is there; one that has ended may not have been reaped."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    ("fail", "code", "said"),
    [
        ("raise ValueError('the root cause')", 1, "ValueError: the root cause"),
        ("sys.exit(7)", 7, "failed with exit code 7"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "killed by signal 9 (SIGKILL)"),
    ],
    ids=["raises", "exits", "killed"],
)
def test_one_that_fails_ends_the_run_with_its_message_and_its_exit_code(
    cluster: str, tmp_path: Path, fail: str, code: int, said: str
) -> None:
    write_script(tmp_path, RANK_1_FAILS.format(fail=fail))
    ended = on_ray(cluster, tmp_path, "--num_processes", "2", "--cpu", "script.py")
    assert ended.code == code
    assert "rank 1 (pid" in ended.err
    assert ended.err.count(said) == 1
    assert ended.err.count("Traceback") == ("raise" in fail)
    assert "The other process was stopped." in ended.err


def test_a_worker_that_dies_ends_the_run_and_its_rank(cluster: str, tmp_path: Path) -> None:
    write_script(
        tmp_path,
        """
        import os, pathlib, signal, time
        pathlib.Path(f"pid{os.environ['RANK']}").write_text(str(os.getpid()))
        if os.environ["RANK"] == "1":
            os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(100)
        """,
    )
    ended = on_ray(cluster, tmp_path, "--num_processes", "2", "--cpu", "script.py", timeout=60)
    assert ended.code == 1
    assert "rank 1" in ended.err
    assert "Its Ray worker died" in ended.err
    assert not any(runs(int((tmp_path / f"pid{rank}").read_text())) for rank in range(2))


def test_ctrl_c_reaches_each_rank_once_and_lets_it_end(cluster: str, tmp_path: Path) -> None:
    write_script(
        tmp_path,
        """
        import os, signal, sys, time

        def stop(number, frame):
            print("rank", os.environ["RANK"], "got", signal.Signals(number).name, flush=True)
            time.sleep(0.5)
            sys.exit(0)

        signal.signal(signal.SIGINT, stop)
        print("ready", flush=True)
        while True:
            time.sleep(0.1)
        """,
    )
    command = ("-m", "drivetrain", "launch", "--launcher", "ray", "--num_processes", "2", "--cpu", "script.py")
    with started(*command, cwd=tmp_path, RAY_ADDRESS=cluster) as process:
        wait_for_lines(process, "ready", 2)
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert sorted(out.splitlines()) == ["rank 0 got SIGINT", "rank 1 got SIGINT"]
    assert err == "drivetrain: interrupted: waiting for the processes to exit. Press Ctrl-C again to kill them.\n"


def test_a_run_that_is_preempted_saves_and_ends_with_75(cluster: str, tmp_path: Path) -> None:
    write_script(
        tmp_path,
        """
        import signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
        print("ready", flush=True)
        time.sleep(100)
        """,
    )
    command = ("-m", "drivetrain", "launch", "--launcher", "ray", "--num_processes", "2", "--cpu", "script.py")
    with started(*command, cwd=tmp_path, RAY_ADDRESS=cluster) as process:
        wait_for_lines(process, "ready", 2)
        process.terminate()
        _, err = process.communicate(timeout=60)
    assert process.returncode == 75
    assert err == (
        "drivetrain: the run was preempted and has saved its state: start it again to resume (exit code 75).\n"
    )


def test_after_a_failure_all_start_again(cluster: str, tmp_path: Path) -> None:
    write_script(
        tmp_path,
        """
        import os
        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
        print("rank", os.environ["RANK"], "attempt", attempt)
        if attempt == "0":
            raise RuntimeError("once")
        """,
    )
    ended = on_ray(cluster, tmp_path, "--num_processes", "2", "--cpu", "--max_restarts", "2", "script.py")
    assert ended.code == 0
    assert "Starting all processes again (restart 1 of 2)." in ended.err
    assert {"rank 0 attempt 1", "rank 1 attempt 1"} <= {*ended.out.splitlines()}


PLACE = """
    import json, os
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "GROUP_RANK", "CUDA_VISIBLE_DEVICES")
    print(json.dumps({name: os.environ.get(name) for name in names}))
"""


def test_ranks_on_two_nodes_are_numbered_node_by_node(cluster: str, tmp_path: Path) -> None:
    write_script(tmp_path, PLACE)
    ended = on_ray(cluster, tmp_path, "--num_processes", "4", "--cpu", "script.py")
    assert (ended.code, ended.err) == (0, "")
    found = sorted((json.loads(line) for line in ended.out.splitlines()), key=lambda each: each["RANK"])
    assert [each["RANK"] for each in found] == ["0", "1", "2", "3"]
    assert [(each["GROUP_RANK"], each["LOCAL_RANK"]) for each in found] == [
        ("0", "0"),
        ("0", "1"),
        ("1", "0"),
        ("1", "1"),
    ]
    assert {(each["LOCAL_WORLD_SIZE"], each["WORLD_SIZE"]) for each in found} == {("2", "4")}


def test_without_a_number_there_is_a_process_for_each_gpu_which_sees_those_of_its_node(
    cluster: str, tmp_path: Path
) -> None:
    write_script(tmp_path, PLACE)
    ended = on_ray(cluster, tmp_path, "script.py")
    assert (ended.code, ended.err) == (0, "")
    found = sorted((json.loads(line) for line in ended.out.splitlines()), key=lambda each: each["RANK"])
    assert [(each["LOCAL_RANK"], each["CUDA_VISIBLE_DEVICES"]) for each in found] == [("0", "0,1"), ("1", "0,1")]


def test_more_than_the_cluster_has_is_refused_with_what_it_has(cluster: str, tmp_path: Path) -> None:
    write_script(tmp_path, "raise AssertionError('must not run')")
    flags = ["--num_processes", "9", "--cpu", "--rdzv_conf", "timeout=2"]
    ended = on_ray(cluster, tmp_path, *flags, "script.py")
    assert ended.code == 1
    assert "Ray did not have 9 x 1 CPU free within 2 s, but only 4 of 4 CPU free" in ended.err
    assert "Traceback" not in ended.err


def test_a_ray_that_this_launch_starts_has_room_for_its_processes_and_ends_with_it(tmp_path: Path) -> None:
    write_script(tmp_path, "import os\nprint(os.environ['RANK'], os.environ['RAY_RAYLET_PID'])")
    flags = ["--ray_address", "local", "--num_processes", "5", "--cpu"]
    ended = launch("--launcher", "ray", *flags, "script.py", cwd=tmp_path, timeout=200)
    assert (ended.code, ended.err) == (0, "")
    assert sorted(line.split()[0] for line in ended.out.splitlines()) == ["0", "1", "2", "3", "4"]
    assert not runs(int(ended.out.split()[1]))


def test_an_address_where_no_ray_answers_is_refused_at_once(tmp_path: Path) -> None:
    write_script(tmp_path, "raise AssertionError('must not run')")
    with socket.socket() as taken:  # and does not listen
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        ended = launch("--launcher", "ray", "--ray_address", address, "script.py", cwd=tmp_path)
    assert ended.code == 1
    assert f"No Ray cluster is reachable at '{address}'" in ended.err
    assert "--ray_address local" in ended.err
    assert "Traceback" not in ended.err
