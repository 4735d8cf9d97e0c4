"""Checks that turn a hanging or failing collective into an error that names the rank and the cause."""

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

_FIRST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.05  # seconds between two checks of the store


def verify_operation(
    operation: str, data: Any, state: PartialState, ignore: Literal["rows", "sizes"] | None = None
) -> None:
    """In debug mode, raise an error if ranks call different collectives or pass tensors of unequal shapes.

    The ranks compare their calls through the store, not through a collective. A rank that calls something else is
    therefore reported instead of causing a hang.
    """
    if state.call_comparison is not None:
        described = "" if data is None else _describe_structure(data, ignore)
        state.call_comparison.compare(f"{operation}({described})", user_line())


class CallComparison:
    """Debug check that all ranks call the same collectives."""

    def __init__(self, store: Store, rank: int, world_size: int, timeout: timedelta) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._timeout = timeout
        self._number = 0

    def compare(self, call: str, line: str) -> None:
        self._number += 1
        try:
            self._store.set(self._key(self._rank), f"{call}\n{line}")
            missing = self._wait()
            if missing:
                raise CollectiveError(self._absence_message(missing, call))
            calls = [self._read(rank) for rank in range(self._world_size)]
            # Every rank has published this call, so every rank has read the previous one: deleting it is safe.
            self._store.delete_key(self._key(self._rank, self._number - 1))
        except (dist.DistStoreError, dist.DistNetworkError) as error:
            raise CollectiveError(
                f"Rank {self._rank} could not compare {call} with the other processes: {error}. The process that "
                "serves the store has exited; see its error for the cause."
            ) from error
        # Usually a single rank has diverged, so the minority is reported.
        usual = Counter(each for each, _ in calls).most_common(1)[0][0]
        different = [rank for rank, (each, _) in enumerate(calls) if each != usual]
        if different:
            listing = "\n".join(f"  rank {rank}: {each} at {place}" for rank, (each, place) in enumerate(calls))
            raise CollectiveError(
                f"Rank(s) {different} do not take part in the same exchange as the others:\n{listing}\n"
                "All processes must call the same collectives in the same order, on tensors of the same shapes "
                "and dtypes. Use pad_across_processes before gathering tensors with different numbers of rows."
            )

    def _key(self, rank: int, number: int | None = None) -> str:
        return f"debug/{self._number if number is None else number}/{rank}"

    def _wait(self) -> list[int]:
        waited_for = list(range(self._world_size))
        deadline, pause = time.monotonic() + self._timeout.total_seconds(), _FIRST_PAUSE
        while not self._store.check([self._key(rank) for rank in waited_for]):
            waited_for = [rank for rank in waited_for if not self._store.check([self._key(rank)])]
            ended = [rank for rank in waited_for if self._store.check([leaving_key(rank)])]
            if ended or time.monotonic() > deadline:
                # A rank may have published its call between the two checks and then exited: check again.
                return [rank for rank in ended or waited_for if not self._store.check([self._key(rank)])]
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        return []

    def _read(self, rank: int, number: int | None = None) -> tuple[str, str]:
        call, _, line = self._store.get(self._key(rank, number)).decode().partition("\n")
        return call, line

    def _absence_message(self, missing: list[int], call: str) -> str:
        last = []
        for rank in missing:
            state = "has exited" if self._store.check([leaving_key(rank)]) else f"did not arrive within {self._timeout}"
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
    state.heartbeat.beat()
    try:
        function(*args, **kwargs)
    except dist.DistError as error:
        raise CollectiveError(_failure_message(operation, state, error)) from error
    except RuntimeError as error:
        if type(error) is not RuntimeError:  # OutOfMemoryError is a subclass with a message of its own
            raise
        raise CollectiveError(_failure_message(operation, state, error)) from error


def _failure_message(operation: str, state: PartialState, error: Exception) -> str:
    return (
        f"{operation} failed on rank {state.process_index} of {state.num_processes}: {error}\n"
        "Most often another process raised or was stopped: see its own error. If processes call different "
        "collectives or use different shapes, `drivetrain launch --debug` (DRIVETRAIN_DEBUG=1) shows where."
    )


def _describe_structure(data: Any, ignore: str | None) -> str:

    def describe(leaf: Any) -> _Words:
        if not isinstance(leaf, Tensor):
            return _Words(type(leaf).__name__)
        # Sizes that may differ between ranks are shown as `*`.
        ignored = {"rows": 1, "sizes": leaf.dim()}.get(ignore or "", 0)
        sizes = [_Words("*") if dim < ignored else size for dim, size in enumerate(leaf.shape)]
        return _Words(f"{str(leaf.dtype).removeprefix('torch.')}{sizes}")

    return repr(recursively_apply(describe, data, test_type=is_leaf))


class _Words(str):
    # Shown without quotes in error messages.

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)
