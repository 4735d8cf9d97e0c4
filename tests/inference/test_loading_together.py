"""Processes of one machine that load the same files: the disk is read once, whatever the number of processes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn

from drivetrain import PartialState, init_empty_weights, load_checkpoint_in_model
from drivetrain.checkpoint import save_safetensors
from tests.pool import run_in_processes

WIDTH, LAYERS = 1024, 12  # 48 MiB


def build() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def bytes_from_disk() -> int:
    """What the disk was read for this process so far; what was in memory already does not count."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))


def forget(path: Path) -> int:
    """Have the system drop a file from memory; returns its size."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return path.stat().st_size


def load(folder: str, device_map: dict[str, str] | None) -> tuple[int, float]:
    with init_empty_weights():
        model = build()
    PartialState().wait_for_everyone()
    before = bytes_from_disk()
    load_checkpoint_in_model(model, folder, device_map)
    total = sum(float(each.detach().sum()) for each in model.parameters())
    return bytes_from_disk() - before, total


@pytest.mark.skipif(not os.path.exists("/proc/self/io"), reason="the system does not count what is read from disk")
@pytest.mark.parametrize("device_map", [None, {"": "disk"}], ids=["in memory", "mapped"])
def test_two_processes_read_each_byte_once(tmp_path: Path, device_map: dict[str, str] | None):
    torch.manual_seed(0)
    model = build()
    save_safetensors(model.state_dict(), tmp_path)
    (path,) = tmp_path.glob("*.safetensors")
    size, before = forget(path), bytes_from_disk()
    path.read_bytes()
    if bytes_from_disk() - before < size:
        pytest.skip("temporary files are not on a disk that counts what is read")
    forget(path)
    ranks = run_in_processes(load, 2, args=(str(tmp_path), device_map), timeout=60)
    expected = sum(float(each.detach().sum()) for each in model.parameters())
    assert [total for _, total in ranks] == [expected] * 2
    assert size <= sum(read for read, _ in ranks) < 1.1 * size
