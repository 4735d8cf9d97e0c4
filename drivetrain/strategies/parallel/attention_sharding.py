"""How attention on the CPU runs on split tensors: torch 2.13 has rules for the kernels of GPUs only."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

aten = torch.ops.aten

# Each row and each head is computed by itself: (rows, heads, tokens, head size).
_SPLIT = (Shard(0), Shard(1), Replicate())


@cache
def let_attention_run_split() -> None:
    """Register the rules of the CPU's kernel, once."""

    @register_sharding(aten._scaled_dot_product_flash_attention_for_cpu.default)  # type: ignore[untyped-decorator]
    def forward(*args: Any, **options: Any) -> Any:
        others = [None] * (len(args) - 3)
        return [([place, place], [place, place, place, *others]) for place in _SPLIT]

    @register_sharding(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)  # type: ignore[untyped-decorator]
    def backward(*args: Any, **options: Any) -> Any:
        others = [None] * (len(args) - 6)
        return [([place] * 3, [*[place] * 6, *others]) for place in _SPLIT]
