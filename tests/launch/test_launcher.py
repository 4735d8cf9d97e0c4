"""The launcher as a user meets it: real processes, real exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.launch.launching import Ended, launch, write_script
from tests.pool import DEVICE

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
        variables.pop(DEVICE, None)  # the tests' own
        assert variables.pop("DRIVETRAIN_COMMAND").endswith("'${local_rank}' '$$' --unknown=1")
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


@pytest.mark.slow
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


def test_a_model_that_outlives_its_process_group_is_freed_before_the_interpreter_ends(tmp_path: Path) -> None:
    script = """
        import sys, weakref
        import torch
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        dist.init_process_group("gloo")
        model = DistributedDataParallel(torch.nn.Linear(1, 1))
        dist.destroy_process_group()
        sys.watched = weakref.ref(model, lambda _, sys=sys: print("freed, finalizing:", sys.is_finalizing()))
    """
    write_script(tmp_path, script)
    ended = launch("--cpu", "--num_processes", "2", "script.py", cwd=tmp_path)
    assert (ended.code, ended.out.splitlines()) == (0, ["freed, finalizing: False"] * 2), ended.err


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


def test_each_ranks_output_is_kept_where_log_dir_says(tmp_path: Path) -> None:
    write_script(tmp_path, "import os\nprint('hello from', os.environ['RANK'])\n")
    ended = launch("--num_processes", "2", "--cpu", "--log_dir", "logs", "script.py", cwd=tmp_path)
    assert ended.code == 0
    files = {path.parent.name: path.read_text() for path in (tmp_path / "logs").rglob("stdout.log")}
    assert files == {"0": "hello from 0\n", "1": "hello from 1\n"}
    assert sorted(ended.out.splitlines()) == ["[rank0]: hello from 0", "[rank1]: hello from 1"]
