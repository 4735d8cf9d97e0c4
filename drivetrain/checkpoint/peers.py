"""The processes that write or read one checkpoint together, and how they agree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist

from drivetrain.runtime.errors import CheckpointError, DamagedCheckpointError
from drivetrain.runtime.state import PartialState

Result = TypeVar("Result")

_GROUP = "checkpoint_group"


@dataclass(frozen=True)
class Failure:
    """What went wrong on one process, for the others to raise too.

    Attributes:
        rank: Of the process.
        reason: What went wrong.
        is_damage: Whether a checkpoint is not whole.
    """

    rank: int
    reason: str
    is_damage: bool = False


class Peers:
    """The processes of a run, over a process group of their own: checkpoints are written beside the training.

    Make it on all processes at once.

    Args:
        state: This process among its peers; None for a process that acts alone.

    Attributes:
        rank: Of this process.
        size: How many there are.
        is_main: Whether this is rank 0.
    """

    def __init__(self, state: PartialState | None) -> None:
        together = state is not None and state.use_distributed
        self.rank = state.process_index if state is not None and together else 0
        self.size = state.num_processes if state is not None and together else 1
        self._group = _own_group(state) if state is not None and together else None
        self.is_main = self.rank == 0
        self._cause: BaseException | None = None

    def gather(self, item: Any) -> list[Any] | None:
        """Collect one item from each process on rank 0; None elsewhere."""
        if self._group is None:
            return [item]
        items: list[Any] | None = [None] * self.size if self.is_main else None
        _exchange(dist.gather_object, item, items, dst=0, group=self._group)
        return items

    def scatter(self, items: list[Any] | None) -> Any:
        """Give each process its item of rank 0's list."""
        if self._group is None:
            assert items is not None
            return items[0]
        received: list[Any] = [None]
        _exchange(dist.scatter_object_list, received, items, src=0, group=self._group)
        return received[0]

    def agree(self, failure: Failure | None) -> Failure | None:
        """Share the first failure of any process with all."""
        if self._group is None:
            return failure
        failures: list[Any] = [None] * self.size
        _exchange(dist.all_gather_object, failures, failure, group=self._group)
        return next((one for one in failures if one is not None), None)

    def attempt(self, work: Callable[[], Result]) -> Result | Failure:
        """Run something that may fail without leaving the others waiting; `fail` raises later what it raised here."""
        try:
            return work()
        except BaseException as error:
            self._cause = error
            return Failure(self.rank, reason_of(error), isinstance(error, DamagedCheckpointError))

    def fail(self, failure: Failure, what: str, advice: str = "") -> NoReturn:
        """Raise, on each process, what one of them met.

        Args:
            failure: What was agreed on.
            what: What could not be done.
            advice: What to do.
        """
        if self._cause is not None and not isinstance(self._cause, Exception):
            raise self._cause  # a Ctrl-C stays one
        where = f"rank {failure.rank}: " if self.size > 1 else ""
        kind = DamagedCheckpointError if failure.is_damage else CheckpointError
        raise kind(f"{what}: {where}{failure.reason}{advice}") from self._cause


def reason_of(error: BaseException) -> str:
    """An exception in the words of a message."""
    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror} (errno {error.errno})"
    return f"{type(error).__name__}: {error}"


def _exchange(collective: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Call a collective, during which a peer may be lost."""
    try:
        collective(*args, **kwargs)
    except (RuntimeError, ValueError) as error:
        raise CheckpointError(f"Another process was lost while a checkpoint was written or read: {error}") from error


def _own_group(state: PartialState) -> Any:
    """A gloo group that only checkpoints use, made once: their collectives must not mix with the training's."""
    shared = PartialState.registry()
    if _GROUP not in shared:
        shared[_GROUP] = dist.new_group(backend="gloo")
        state.before_leaving(lambda: shared.pop(_GROUP, None))
    return shared[_GROUP]
