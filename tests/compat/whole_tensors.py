"""Lets a script compare a model that FSDP2 shards with a plain one."""

from __future__ import annotations


def prepare() -> None:
    """Let `torch.allclose` gather what is sharded."""
    import torch
    from torch.distributed.tensor import DTensor

    close = torch.allclose

    def whole(tensor):
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    torch.allclose = lambda first, second: close(whole(first), whole(second))
