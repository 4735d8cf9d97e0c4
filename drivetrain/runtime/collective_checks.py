"""What keeps a collective that goes wrong from hanging in silence: a check before, a reason after."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor

from drivetrain.runtime.errors import CollectiveError
from drivetrain.runtime.nested import is_leaf, recursively_apply
from drivetrain.runtime.state import PartialState


def verify_operation(operation: str, data: Any, ignore: Literal["rows", "sizes"] | None = None) -> None:
    """Compare between all processes which collective they call on which structure of tensors.

    Called by every collective in debug mode.

    Args:
        operation: The collective's name.
        data: The structure that it is given.
        ignore: In what tensors may differ: in their first dimension, or in all of them.

    Raises:
        CollectiveError: On every process, naming the ranks that differ from the others.
    """
    state = PartialState()
    mine = f"{operation}({_outline(data, ignore)})"
    calls: list[Any] = [None] * state.num_processes
    call_collective(operation, state, dist.all_gather_object, calls, mine)
    usual = Counter(calls).most_common(1)[0][0]
    different = [rank for rank, call in enumerate(calls) if call != usual]
    if different:
        listing = "\n".join(f"  rank {rank}: {call}" for rank, call in enumerate(calls))
        raise CollectiveError(
            f"Rank(s) {different} do not take part in the same exchange as the others:\n{listing}\n"
            "All processes must call the same collectives in the same order, on tensors of the same shapes "
            "and dtypes. Rows of different number can be gathered after pad_across_processes."
        )


def call_collective(
    operation: str, state: PartialState, function: Callable[..., Any], *args: Any, **kwargs: Any
) -> None:
    """Run a collective; where it fails, say on which rank and why that usually is.

    Args:
        operation: The collective's name for the message.
        state: This process among its peers.
        function: The function of `torch.distributed`.
        *args: Its arguments.
        **kwargs: Its keyword arguments.

    Raises:
        CollectiveError: If it fails.
    """
    try:
        function(*args, **kwargs)
    except dist.DistError as error:
        raise CollectiveError(_failure(operation, state, error)) from error
    except RuntimeError as error:
        if type(error) is not RuntimeError:  # out of memory is one too, and says so itself
            raise
        raise CollectiveError(_failure(operation, state, error)) from error


def _failure(operation: str, state: PartialState, error: Exception) -> str:
    return (
        f"{operation} failed on rank {state.process_index} of {state.num_processes}: {error}\n"
        "Most often a peer raised or was stopped, and its own error says why; or shapes differ between "
        "processes, which DRIVETRAIN_DEBUG=1 shows."
    )


def _outline(data: Any, ignore: str | None) -> str:
    """The structure with shapes and dtypes in place of tensors and types in place of other values."""

    def describe(leaf: Any) -> _Words:
        if not isinstance(leaf, Tensor):
            return _Words(type(leaf).__name__)
        ignored = {"rows": 1, "sizes": leaf.dim()}.get(ignore or "", 0)
        sizes = [_Words("*") if dim < ignored else size for dim, size in enumerate(leaf.shape)]
        return _Words(f"{str(leaf.dtype).removeprefix('torch.')}{sizes}")

    return repr(recursively_apply(describe, data, test_type=is_leaf))


class _Words(str):
    """Text that a container's repr shows without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)
