"""Kernels of the host that give the same bits as torch's own in less time.

torch pools a tensor whose channels lie one after the other element by element, and one whose channels lie side by side
with vector instructions: the maxima and their places are the same, and it takes a quarter of the time. So the first is
laid out like the second, a few megabytes at a time. The backward takes the places and is torch's own.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

_TYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Of wider ones a vector holds too few; in torch's kernel for channels side by side, places do not fit into bytes."""
_LEAST_CHANNELS = 8
"""Of fewer, a vector has too little to do."""
_LEAST_ELEMENTS = 1 << 14
"""Smaller tensors are pooled sooner than they are copied into another layout."""
_MOST_BYTES = 4 << 20
"""Of a copy: what is read again right away comes from the cache, and the peak of memory stays where it is."""

_library: torch.library.Library | None = None


@cache
def use_faster_kernels() -> bool:
    """Pool by `max_pool2d` on the host with vector instructions, from here on in this process.

    Nothing changes where something else has replaced torch's kernel before.

    Returns:
        Whether it is used.
    """
    global _library
    kernel = torch.library.get_kernel("aten::max_pool2d_with_indices", "CPU")
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)

    def pool(
        x: Tensor,
        size: Sequence[int],
        stride: Sequence[int] = (),
        padding: Sequence[int] = (0,),
        dilation: Sequence[int] = (1,),
        ceil_mode: bool = False,
    ) -> tuple[Tensor, Tensor]:
        def by_torch(part: Tensor) -> Any:
            return kernel.call_boxed(keys, part, size, stride, padding, dilation, ceil_mode)

        result: tuple[Tensor, Tensor] = _pool_by_channels(x, by_torch) if _is_worth_it(x) else by_torch(x)
        return result

    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a kernel of torch's is replaced
        try:
            library.impl("max_pool2d_with_indices", pool, "CPU", allow_override=False)  # type: ignore[no-untyped-call]
        except RuntimeError:  # another package, or the user, has registered a kernel
            return False
    _library = library
    return True


def _is_worth_it(x: Tensor) -> bool:
    return (
        x.dim() == 4
        and x.shape[1] >= _LEAST_CHANNELS
        and x.numel() >= _LEAST_ELEMENTS
        and x.dtype in _TYPES
        and x.is_contiguous()
    )


def _pool_by_channels(x: Tensor, pool: Any) -> tuple[Tensor, Tensor]:
    """Maxima and their places, as `pool` gives them for `x`, from copies of parts of it."""
    rows = max(1, _MOST_BYTES * len(x) // x.nbytes)
    found: tuple[Tensor, Tensor] | None = None
    for first in range(0, len(x), rows):
        part = x[first : first + rows].contiguous(memory_format=torch.channels_last)
        pooled = pool(part)
        if found is None:
            found = tuple(each.new_empty((len(x), *each.shape[1:])) for each in pooled)
        for whole, each in zip(found, pooled, strict=True):
            whole[first : first + rows].copy_(each)
    assert found is not None
    return found
