"""Blocks under FSDP that are recomputed, offloaded or compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drivetrain import FSDP
from tests.shared_runs import SharedRuns
from tests.strategies.fsdp_models import EXACT, Block, Net, gap, net, plain, prepared, train, trained, whole

pytestmark = pytest.mark.sharded

runs = SharedRuns(__name__)


@runs
def recomputes() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, options in {
        "kept": {},
        "recomputed": {"activation_checkpointing": True},
        "offloaded": {"activation_checkpointing": "Block", "activation_offload": True},
    }.items():
        accelerator, model, optimizer = prepared(net, FSDP(**options))
        train(accelerator, model, optimizer)
        calls = sum(block.calls for block in model.blocks)
        found[name] = (calls, gap(whole(accelerator, model), plain(net)))
    return found


def test_activations_are_recomputed_and_the_numbers_stay(here):
    found = here(recomputes)
    assert {name: calls for name, (calls, _) in found.items()} == {"kept": 9, "recomputed": 18, "offloaded": 18}
    assert max(gap for _, gap in found.values()) < EXACT


@runs
def compiles() -> dict[str, Any]:
    seen = []

    def backend(graph: Any, inputs: Any) -> Any:
        seen.append(graph)
        return graph.forward

    class Quiet(Net):
        def __init__(self) -> None:
            super().__init__()
            for block in self.blocks:
                block.__class__ = QuietBlock

    def make() -> nn.Module:
        torch.manual_seed(5)
        return Quiet()

    found = gap(trained(make, FSDP(compile={"backend": backend}, activation_checkpointing=True)), plain(make))
    return {"gap": found, "graphs": len(seen)}


class QuietBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.linear(self.norm(x)))


def test_blocks_are_compiled(here):
    assert here(compiles)["gap"] < EXACT
    assert here(compiles)["graphs"] > 0
