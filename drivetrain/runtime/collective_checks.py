"""What keeps a collective that goes wrong from hanging in silence: a check before, a reason after."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from drivetrain.runtime.errors import CollectiveError, user_line
from drivetrain.runtime.process_group import leaving_key
from drivetrain.runtime.pytrees import is_leaf, recursively_apply

if TYPE_CHECKING:
    from drivetrain.runtime.state import PartialState

_FIRST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.05  # seconds between two questions to the store


def verify_operation(
    operation: str, data: Any, state: PartialState, ignore: Literal["rows", "sizes"] | None = None
) -> None:
    """Compare between all processes which collective they call on which structure of tensors, and from which line.

    Called before every collective and every wait in debug mode. The processes meet at their store and not in a
    collective, so that none is stuck where another calls something else.
    """
    if state.call_comparison is not None:
        described = "" if data is None else _outline(data, ignore)
        state.call_comparison.compare(f"{operation}({described})", user_line())


class CallComparison:
    """Compares the calls of all processes, one after the other."""

    def __init__(self, store: Store, rank: int, world_size: int, timeout: timedelta) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._timeout = timeout
        self._number = 0

    def compare(self, call: str, line: str) -> None:
        """Publish this process's call and read those of all others."""
        self._number += 1
        try:
            self._store.set(self._key(self._rank), f"{call}\n{line}")
            missing = self._wait()
            if missing:
                raise CollectiveError(self._absence(missing, call))
            calls = [self._read(rank) for rank in range(self._world_size)]
            # Everybody has come here, so everybody has read what was published before.
            self._store.delete_key(self._key(self._rank, self._number - 1))
        except (dist.DistStoreError, dist.DistNetworkError) as error:
            raise CollectiveError(
                f"Rank {self._rank} could not compare {call} with the other processes: {error}. The process that "
                "serves the store is gone; its own error says why."
            ) from error
        usual = Counter(each for each, _ in calls).most_common(1)[0][0]
        different = [rank for rank, (each, _) in enumerate(calls) if each != usual]
        if different:
            listing = "\n".join(f"  rank {rank}: {each} at {place}" for rank, (each, place) in enumerate(calls))
            raise CollectiveError(
                f"Rank(s) {different} do not take part in the same exchange as the others:\n{listing}\n"
                "All processes must call the same collectives in the same order, on tensors of the same shapes "
                "and dtypes. Rows of different number can be gathered after pad_across_processes."
            )

    def _key(self, rank: int, number: int | None = None) -> str:
        return f"debug/{self._number if number is None else number}/{rank}"

    def _wait(self) -> list[int]:
        """Wait for all processes to publish this call; the ranks that have ended, or not come in time."""
        waited_for = list(range(self._world_size))
        deadline, pause = time.monotonic() + self._timeout.total_seconds(), _FIRST_PAUSE
        while not self._store.check([self._key(rank) for rank in waited_for]):
            waited_for = [rank for rank in waited_for if not self._store.check([self._key(rank)])]
            ended = [rank for rank in waited_for if self._store.check([leaving_key(rank)])]
            if ended or time.monotonic() > deadline:
                # A rank may have published between the two questions, and then ended.
                return [rank for rank in ended or waited_for if not self._store.check([self._key(rank)])]
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        return []

    def _read(self, rank: int, number: int | None = None) -> tuple[str, str]:
        call, _, line = self._store.get(self._key(rank, number)).decode().partition("\n")
        return call, line

    def _absence(self, missing: list[int], call: str) -> str:
        last = []
        for rank in missing:
            state = "has ended" if self._store.check([leaving_key(rank)]) else f"did not come within {self._timeout}"
            before = self._number - 1
            if before and self._store.check([self._key(rank, before)]):
                previous, line = self._read(rank, before)
                state += f"; its last call was {previous} at {line}"
            last.append(f"  rank {rank} {state}")
        return (
            f"Rank {self._rank} calls {call} at {user_line()}, but not all processes do:\n" + "\n".join(last) + "\n"
            "All processes must call the same collectives in the same order."
        )


def call_collective(
    operation: str, state: PartialState, function: Callable[..., Any], *args: Any, **kwargs: Any
) -> None:
    """Run a collective; where it fails, raise an error with the rank and the usual cause."""
    state.heartbeat.beat()
    try:
        function(*args, **kwargs)
    except dist.DistError as error:
        raise CollectiveError(_failure(operation, state, error)) from error
    except RuntimeError as error:
        if type(error) is not RuntimeError:  # out of memory is one too, with its own message
            raise
        raise CollectiveError(_failure(operation, state, error)) from error


def _failure(operation: str, state: PartialState, error: Exception) -> str:
    return (
        f"{operation} failed on rank {state.process_index} of {state.num_processes}: {error}\n"
        "Most often a peer raised or was stopped, and its own error says why; or processes call different "
        "collectives, or on different shapes, which `drivetrain launch --debug` (DRIVETRAIN_DEBUG=1) shows."
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
