"""Weights that come to a GPU as its forward needs them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from drivetrain import StreamOptions, cpu_offload, disk_offload, group_offload, load_checkpoint_and_dispatch
from tests.inference.block_models import IDS, Block, empty, saved, seeded

pytestmark = pytest.mark.gpu

WAYS = {
    "memory": lambda folder: cpu_offload(seeded()),
    "disk": lambda folder: disk_offload(seeded(), folder / "off"),
    "a checkpoint": lambda folder: load_checkpoint_and_dispatch(
        empty(), saved(seeded(), folder / "m.safetensors"), "disk"
    ),
    "page-locked": lambda folder: group_offload(seeded(), use_stream=True),
    "page-locked on the way": lambda folder: group_offload(seeded(), use_stream=True, low_cpu_mem_usage=True),
    "a first part that stays": lambda folder: cpu_offload(seeded(), stream=StreamOptions(budget=4000)),
}


@pytest.mark.parametrize("way", WAYS)
def test_outputs_are_those_of_the_model_on_the_gpu(way: str, tmp_path: Path) -> None:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    with torch.no_grad():
        expected = seeded().to(device)(IDS.to(device)).cpu()
        model = WAYS[way](tmp_path)
        for _ in range(3):
            output = model(IDS)
            assert output.device == IDS.device
            assert torch.equal(output, expected)
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}


def test_at_most_two_groups_are_on_the_gpu() -> None:
    model = nn.Sequential(*(Block(1024) for _ in range(8)))
    block = sum(each.numel() * each.element_size() for each in model[0].parameters())
    group_offload(model, use_stream=True, low_cpu_mem_usage=True)
    with torch.no_grad():
        model(torch.ones(1, 1024))
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model(torch.ones(1, 1024))
        torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 2.5 * block
