from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from drivetrain import PartialState
from drivetrain.runtime.heartbeat import HEARTBEAT_VARIABLE, Heartbeat, Sign, read_sign


def leave_file(path: Path, pid: int) -> None:
    path.write_bytes(pid.to_bytes(8, "little") + bytes(24))


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The heartbeat file of this process."""
    path = tmp_path / "0"
    leave_file(path, os.getpid())
    monkeypatch.setenv(HEARTBEAT_VARIABLE, str(path))
    return path


def beats(path: Path) -> int:
    sign = read_sign(str(path), os.getpid())
    assert sign is not None
    return sign.beats


def test_the_launcher_reads_what_the_rank_counts(path: Path) -> None:
    heartbeat = Heartbeat.attach()
    heartbeat.beat()
    heartbeat.beat()
    heartbeat.describe_waits(timedelta(minutes=30), spinning=True)
    assert read_sign(str(path), os.getpid()) == Sign(beats=2, counts_cpu_time=False, timeout=1800)


def test_another_process_than_the_one_that_was_started_does_not_count(path: Path) -> None:
    leave_file(path, os.getpid() + 1)
    assert not Heartbeat.attach().watched
    assert read_sign(str(path), os.getpid()) is None


@pytest.mark.parametrize("content", [None, b"", b"short"])
def test_a_file_that_cannot_be_read_is_no_heartbeat(path: Path, content: bytes | None) -> None:
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    assert not Heartbeat.attach().watched
    assert read_sign(str(path), os.getpid()) is None


def test_each_step_of_any_optimizer_is_a_beat(path: Path) -> None:
    PartialState(cpu=True)
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    before = beats(path)
    for _ in range(3):
        optimizer.step()
    assert beats(path) == before + 3


def test_without_a_launcher_nothing_is_hung_on_optimizers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(HEARTBEAT_VARIABLE, raising=False)
    hooks = sys.modules["torch.optim.optimizer"]._global_optimizer_post_hooks
    before = len(hooks)
    PartialState(cpu=True)
    assert len(hooks) == before


def test_a_function_counts_beats_only_where_a_launcher_reads_them(path: Path) -> None:
    def answer() -> int:
        return 7

    assert Heartbeat().beating(answer) is answer
    assert Heartbeat.attach().beating(answer)() == 7
    assert beats(path) == 1


def test_what_a_rank_runs_first_imports_no_torch() -> None:
    command = "import sys, drivetrain.runtime.heartbeat, drivetrain.launch.worker; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", command], capture_output=True, text=True).stdout == "False\n"
