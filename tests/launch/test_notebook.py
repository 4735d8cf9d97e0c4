"""Several processes from a function."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from drivetrain import ConfigurationError, LaunchError, PartialState
from drivetrain.launch import notebook_launcher
from tests.launch.launching import run, write_script


@pytest.fixture(autouse=True)
def plain_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "DRIVETRAIN_LAUNCHED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DRIVETRAIN_USE_CPU", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def test_forked_processes_meet_and_compute_although_this_one_has_computed(tmp_path: Path) -> None:
    # GNU OpenMP's threads do not survive a fork: without care, the children's first parallel loop waits for ever.
    write_script(
        tmp_path,
        """
        import os
        import torch
        import torch.distributed as dist
        from drivetrain.launch import notebook_launcher

        torch.set_num_threads(2)
        offset = float(torch.ones(2_000_000).relu().sum())

        def train(path):
            dist.init_process_group("gloo")
            total = torch.ones(2_000_000).relu().sum() - offset + dist.get_rank() + 1
            dist.all_reduce(total)
            told = (dist.get_rank(), total.item(), torch.get_num_threads(), os.environ["DRIVETRAIN_MIXED_PRECISION"])
            print(" ".join(map(str, told)) + "\\n", end="")  # in one write: the other process prints too
            dist.destroy_process_group()

        print("returned", notebook_launcher(train, ("x",), num_processes=2, mixed_precision="bf16"))
        print("left behind", [name for name in os.environ if name.startswith(("DRIVETRAIN_LAUNCHED", "RANK"))])
        """,
    )
    ended = run("script.py", cwd=tmp_path, OMP_NUM_THREADS="2")
    assert ended.code == 0, ended.err
    assert sorted(ended.out.splitlines()) == ["0 3.0 2 bf16", "1 3.0 2 bf16", "left behind []", "returned None"]


def _rank_1_raises() -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        raise ValueError("the root cause")
    dist.all_reduce(torch.ones(1))


def _rank_1_is_killed() -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        os.kill(os.getpid(), 9)
    dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (_rank_1_raises, "(?s)rank 1 .*_rank_1_raises.*ValueError: the root cause"),
        (_rank_1_is_killed, "(?s)rank 1 .*killed by signal 9"),
    ],
)
def test_the_first_failure_is_raised_here_and_ends_the_others(function: object, said: str) -> None:
    begin = time.monotonic()
    with pytest.raises(LaunchError, match=said):
        notebook_launcher(function, num_processes=2)  # type: ignore[arg-type]
    assert time.monotonic() - begin < 30


def test_one_process_runs_in_this_one() -> None:
    seen: list[tuple[int, str | None]] = []
    notebook_launcher(
        lambda value: seen.append((value, os.environ.get("DRIVETRAIN_MIXED_PRECISION"))),
        (5,),
        num_processes=1,
        mixed_precision="bf16",
    )
    assert seen == [(5, "bf16")]
    assert os.environ.get("DRIVETRAIN_MIXED_PRECISION") is None


def _large(rank_sent: int) -> tuple[int, torch.Tensor]:
    return int(os.environ["RANK"]) + rank_sent, torch.ones(100_000)


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.crash)])
def test_what_the_first_process_returns_is_returned(method: str) -> None:
    number, ones = notebook_launcher(_large, (5,), num_processes=2, start_method=method)
    assert number == 5
    assert ones.sum() == 100_000  # more than a pipe holds at once


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_process_that_is_done_waits_until_its_peers_have_met_it(method: str, tmp_path: Path) -> None:
    # Without, one that only meets the others and ends resets the connections that they are still making.
    notebook_launcher(_notes_that_it_leaves, (str(tmp_path),), num_processes=2, start_method=method)
    assert sorted(os.listdir(tmp_path)) == ["rank 0 left", "rank 1 left"]


def test_processes_meet_also_where_torchrun_has_started_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The agent of torchrun serves the store of its own processes only. Without care, these would wait for it.
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    notebook_launcher(_notes_that_it_leaves, (str(tmp_path),), num_processes=2)
    assert sorted(os.listdir(tmp_path)) == ["rank 0 left", "rank 1 left"]


def _notes_that_it_leaves(folder: str) -> None:
    state = PartialState()
    state.before_leaving(Path(folder, f"rank {state.process_index} left").touch)


@pytest.mark.slow
def test_a_script_without_a_guard_is_imported_as_far_as_it_starts_processes(tmp_path: Path) -> None:
    script = """
        from drivetrain import PartialState, notebook_launcher

        def count(more):
            return PartialState().num_processes + more

        print("counted", notebook_launcher(count, (1,), num_processes=2, start_method="spawn", cpu=True))
    """
    write_script(tmp_path, script)
    ended = run("script.py", cwd=tmp_path, timeout=100)
    assert (ended.code, ended.out.splitlines()) == (0, ["counted 3"]), ended.err


def test_a_value_that_cannot_be_pickled_is_left_out_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="cannot be pickled"):
        assert notebook_launcher(_returns_a_function, num_processes=2) is None


def _returns_a_function() -> object:
    return lambda: 1


def test_a_failed_attempt_is_followed_by_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert notebook_launcher(_fails_once, (str(tmp_path / "tried"),), num_processes=2, max_restarts=1) == "1"
    assert "restart 1 of 1" in capsys.readouterr().err


def _fails_once(path: str) -> str:
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise ValueError("the first attempt")
    return os.environ["TORCHELASTIC_RESTART_COUNT"]


def _recurses(depth: int = 30) -> None:
    if depth == 0:
        raise ValueError("deep down")
    if depth % 2:
        _recurses(depth - 1)
    else:
        _recurses(depth - 1)  # another line, so that Python does not shorten the traceback itself


def test_a_notebook_shows_a_failure_in_twelve_lines() -> None:
    with pytest.raises(LaunchError) as caught:
        notebook_launcher(_recurses, num_processes=2)
    shown = caught.value._render_traceback_()  # type: ignore[attr-defined]
    assert len(shown) == 12 < len(str(caught.value).splitlines())
    assert "rank" in shown[0]
    assert shown[-1] == "ValueError: deep down"


def test_it_refuses_to_fork_where_a_device_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drivetrain.runtime.devices.CPU.is_started", lambda self: True)
    with pytest.raises(LaunchError, match=r"cpu is already in use in this process.*Restart the kernel.*spawn"):
        notebook_launcher(_recurses, num_processes=2)


def test_it_refuses_where_an_accelerator_object_exists() -> None:
    PartialState._reset_state()
    PartialState(cpu=True)
    try:
        with pytest.raises(LaunchError, match="Restart the kernel"):
            notebook_launcher(_rank_1_raises, num_processes=2)
    finally:
        PartialState._reset_state()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"num_processes": 0}, "num_processes is 0"),
        ({"use_port": "any"}, "use_port is 'any'"),
        ({"num_nodes": 2, "num_processes": 2}, "use_port is 0"),
        ({"mixed_precision": "half"}, "mixed_precision is 'half'"),
        ({"start_method": "thread"}, "start_method is 'thread'"),
        ({"num_nodes": 2, "num_processes": 2, "use_port": 1, "max_restarts": 1}, "max_restarts is 1 for 2 machines"),
    ],
)
def test_a_mistake_is_told_before_anything_starts(arguments: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        notebook_launcher(_rank_1_raises, **arguments)  # type: ignore[arg-type]
