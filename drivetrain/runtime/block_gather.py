"""Blocks of results that come to the main process while all processes compute."""

from __future__ import annotations

import pickle
import threading
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain.runtime.collective_checks import call_collective
from drivetrain.runtime.collectives import cannot_be_sent
from drivetrain.runtime.errors import CollectiveError
from drivetrain.runtime.process_group import group_timeout
from drivetrain.runtime.state import PartialState

_OPERATION = "gather of results"
_GROUP, _COUNT, _ABANDONED = "results_group", "results_gathers", "results_abandoned"
_END, _LEFT = -1, -2  # in place of a block's size


class BlockGather:
    """Collects blocks of results on the main process.

    A process sends a block as soon as it has it and waits for no other process before `finish`; how many blocks each
    has may differ. The main process receives them in a thread: in each turn one of every other process, once it has
    one of its own, so that it waits for those that are behind and not for what takes as long everywhere.

    Make it on all processes at once, and end it with `finish` or `abandon`.

    Args:
        state: This process among its peers.
    """

    def __init__(self, state: PartialState) -> None:
        self._state = state
        self._blocks: list[Any] = []
        self._sent: list[tuple[Any, Tensor]] = []
        self._turns, self._ending, self._abandoned = threading.Semaphore(0), False, False
        self._error: Exception | None = None
        self._receiver: threading.Thread | None = None
        if not state.use_distributed:
            return
        shared = PartialState.registry()
        self._group = _own_group(state)
        self._tag = shared[_COUNT] = shared.get(_COUNT, 0) + 1  # late messages of one that was abandoned stay apart
        if state.is_main_process:
            self._receiver = threading.Thread(target=self._receive_all, name="gather of results", daemon=True)
            self._receiver.start()

    def add(self, block: Any) -> None:
        """Give a block of this process.

        Args:
            block: What can be pickled, in host memory; it must not change afterwards.

        Raises:
            DataError: It cannot be pickled.
        """
        if not self._state.use_distributed or self._state.is_main_process:
            self._blocks.append(block)
            self._turns.release()
            return
        try:
            content = pickle.dumps(block, protocol=pickle.HIGHEST_PROTOCOL)
        except (pickle.PicklingError, AttributeError, TypeError) as error:  # pickle raises all of them
            raise cannot_be_sent(_OPERATION, self._state, error) from error
        self._send(torch.tensor([len(content)]))
        self._send(torch.frombuffer(bytearray(content), dtype=torch.uint8))

    def finish(self) -> list[Any]:
        """Wait until all have come.

        Returns:
            The blocks of all processes on the main process, nothing on the others.

        Raises:
            CollectiveError: A process is gone.
            DataError: A block cannot be read on the main process.
        """
        if not self._state.use_distributed:
            return self._blocks
        if self._receiver is None:
            self._send(torch.tensor([_END]))
            for work, _ in self._sent:
                call_collective(_OPERATION, self._state, work.wait)
            return []
        self._ending = True
        self._turns.release()
        self._receiver.join()
        if self._error is not None:
            raise self._error
        return self._blocks

    def abandon(self) -> None:
        """Leave without waiting, after an error; the main process then raises in its `finish`."""
        self._abandoned = True
        if not self._state.use_distributed:
            return
        if self._receiver is None:
            self._send(torch.tensor([_LEFT]))
        else:  # takes what still comes, so that no sender waits
            self._ending = True
            self._turns.release()
        # Gloo reads what is being sent until it is received, or until the group ends.
        PartialState.registry().setdefault(_ABANDONED, []).append(self)

    def _send(self, tensor: Tensor) -> None:
        self._sent.append((dist.isend(tensor, 0, group=self._group, tag=self._tag), tensor))

    def _receive_all(self) -> None:
        """Receive until no process has more."""
        try:
            left = list(range(1, self._state.num_processes))
            while left:
                if not self._ending:
                    self._turns.acquire()
                left = [rank for rank in left if self._receive(rank)]
        except Exception as error:
            self._error = error

    def _receive(self, rank: int) -> bool:
        """Receive one block of a process; returns False where it has no more."""
        size = int(self._received(torch.zeros(1, dtype=torch.int64), rank))
        if size == _END:
            return False
        if size == _LEFT:
            raise CollectiveError(f"{_OPERATION}: rank {rank} has left before its last block; its own error says why.")
        content = self._received(torch.empty(size, dtype=torch.uint8), rank)
        if self._abandoned:
            return True
        buffer: Any = content.numpy()
        try:
            self._blocks.append(pickle.loads(buffer))
        except (pickle.UnpicklingError, AttributeError, TypeError, ImportError) as error:
            raise cannot_be_sent(_OPERATION, self._state, error) from error
        return True

    def _received(self, tensor: Tensor, rank: int) -> Tensor:
        call_collective(_OPERATION, self._state, dist.recv, tensor, rank, group=self._group, tag=self._tag)
        return tensor


def _own_group(state: PartialState) -> Any:
    """A gloo group for results alone, made once: they are sent beside what the processes exchange as they compute."""
    shared = PartialState.registry()
    if _GROUP not in shared:
        shared[_GROUP] = dist.new_group(backend="gloo", timeout=group_timeout())
        state.before_leaving(_forget)
    return shared[_GROUP]


def _forget() -> None:
    for name in (_GROUP, _COUNT, _ABANDONED):
        PartialState.registry().pop(name, None)
