"""Reader for which rank 0 reads the data and sends every process its batches."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain.data.batch_info import BatchInfo
from drivetrain.data.iterable import Pair, distribute_pairs, pairs_of_process, whole_batches
from drivetrain.data.order import Position
from drivetrain.data.reader import Opened, Reader, do_nothing, last_rows
from drivetrain.data.sharding import Layout, check_same_stream
from drivetrain.runtime.collectives import broadcast, broadcast_object_list
from drivetrain.runtime.errors import DataError
from drivetrain.runtime.pytrees import recursively_apply
from drivetrain.runtime.seeds import EpochStart, isolated_random_state, kept_generators
from drivetrain.runtime.state import PartialState

_END, _FAILED, _SAME_FORM, _NEW_FORM = range(4)
_COMMON = 6  # numbers in a header that concern all processes
_EACH = 4  # numbers in a header for each process: present, rows, padding and last
_UNKNOWN = -1

_Step = list[Pair | None]


class Slot(NamedTuple):
    # Rank 0 sends it to the other ranks before the tensor's data.
    shape: tuple[int, ...]
    dtype: torch.dtype


class DispatchReader:
    """Reader that reads all data on rank 0 and sends every process its batches.

    The structure of the batches is sent when it changes, and their tensors are sent in each step. If reading fails on
    rank 0, every process raises an error.
    """

    finds_rows = reads_ahead = False
    ends_alike = True

    def __init__(self, make_reader: Callable[[], Reader], layout: Layout, loader: Any, compared: bool = False) -> None:
        self.layout = layout
        self._compared = compared
        layout.check()
        self._make_reader = make_reader
        self._loader = loader
        self._reader: Reader | None = None

    def __len__(self) -> int:
        return self.layout.steps(len(self._loader), last_rows(self._loader))

    def open(self, epoch: int, position: Position, limit: int | None = None) -> Opened:
        if not dist.is_initialized():  # no other processes, although the layout has several shards
            opened = self._own_reader().open(epoch, position, limit)
            steps = distribute_pairs(opened.pairs, self.layout, opened.head)
            pairs = pairs_of_process(steps, self.layout.shard.index)
            return opened._replace(pairs=pairs)
        exchange = _Exchange(self.layout)
        if dist.get_rank() != 0:
            # Any process may save the position, so all need that of rank 0.
            start = broadcast_object_list([None])[0]
            if start is not None:
                self._compare(partial(self._digest, epoch, start))
            return Opened(exchange.receive(), start or EpochStart.capture([]), do_nothing)
        try:
            opened = self._own_reader().open(epoch, position, limit)
        except Exception as error:
            broadcast_object_list([None])
            # The other ranks wait for a position first, and then for a step.
            exchange.fail(error)
            raise
        broadcast_object_list([opened.start])
        self._compare(lambda: getattr(self._own_reader(), "begins_with", None))
        steps = distribute_pairs(opened.pairs, self.layout, opened.head)
        return opened._replace(pairs=exchange.send(steps))

    def restart(self) -> None:
        self._reader = None

    def _compare(self, read: Callable[[], str | None]) -> None:
        if self._compared:
            check_same_stream(type(self._loader.dataset).__name__, read(), read)
            self._compared = False

    def _digest(self, epoch: int, start: EpochStart) -> str | None:
        try:
            with isolated_random_state(), kept_generators(self._loader, self._loader.dataset):
                reader = self._make_reader()
                reader.open(epoch, Position(start=start))
                return getattr(reader, "begins_with", None)
        except Exception:
            return None

    def _own_reader(self) -> Reader:
        if self._reader is None:
            self._reader = self._make_reader()
        return self._reader


class _Exchange:
    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._form: bytes = b""
        self._skeletons: list[Any] = []
        # Process groups that drivetrain creates have gloo for CPU tensors besides the device's backend.
        on_host = "cpu" in str(dist.get_backend_config())
        self._device = torch.device("cpu") if on_host else PartialState().device

    def send(self, steps: Iterator[_Step]) -> Iterator[Pair]:
        index = self._layout.shard.index
        step = self._next(steps)
        if step is None:
            self._send_header([_END] + [0] * (_COMMON - 1))
            return
        while step is not None:
            final, following = _is_final(step), None
            # A process without further batches may leave, so a step without it is sent along with the previous one.
            if not final and any(pair is not None and pair[1].last for pair in step):
                following = self._next(steps)
            self._send_step(step, more=following is not None)
            if following is not None:
                self._send_step(following, more=False)
            for each in (step, following):
                if each is not None and (pair := each[index]) is not None:
                    yield pair
            if final or following is not None:
                return
            step = self._next(steps)

    def _next(self, steps: Iterator[_Step]) -> _Step | None:
        try:
            return next(steps, None)
        except Exception as error:
            self.fail(error)
            raise

    def receive(self) -> Iterator[Pair]:
        index = self._layout.shard.index
        while True:
            own, more, final = self._receive_step(index)
            following: Pair | None = None
            if more:
                following, _, _ = self._receive_step(index)
            if own is not None:
                yield own
            if following is not None:
                yield following
            if more or final:
                return

    def fail(self, error: Exception) -> None:
        """Make the other ranks raise the error with which rank 0 has failed."""
        self._send_header([_FAILED] + [0] * (_COMMON - 1))
        broadcast_object_list([f"{type(error).__name__}: {error}"])

    def _send_header(self, common: list[int], each: list[int] | None = None) -> None:
        # All headers have one length, so that the other ranks can allocate the tensor before receiving it.
        numbers = common + (each or [0] * (_EACH * self._layout.shard.count))
        broadcast(torch.tensor(numbers, dtype=torch.int64, device=self._device))

    def _send_step(self, step: _Step, more: bool) -> None:
        tensors: list[Tensor] = []

        def take_out(tensor: Tensor) -> Slot:
            tensors.append(tensor.detach().to(self._device).contiguous())
            return Slot(tuple(tensor.shape), tensor.dtype)

        skeletons = [
            None if pair is None else recursively_apply(take_out, pair[0], test_type=_is_plain_tensor) for pair in step
        ]
        # The structure of the batches is sent only when it changes.
        form = pickle.dumps(skeletons)
        common, each = _header_of(step, _SAME_FORM if form == self._form else _NEW_FORM, more)
        self._send_header(common, each)
        if form != self._form:
            broadcast_object_list([form])
            self._form = form
        broadcast(tensors)

    def _receive_step(self, index: int) -> tuple[Pair | None, bool, bool]:
        size = _COMMON + _EACH * self._layout.shard.count
        numbers = broadcast(torch.empty(size, dtype=torch.int64, device=self._device)).tolist()
        code, more, final, number, global_rows, consumed = numbers[:_COMMON]
        if code == _END:
            return None, False, True
        if code == _FAILED:
            reason = broadcast_object_list([None])[0]
            raise DataError(f"Reading the data failed on rank 0, which reads for all processes: {reason}")
        if code == _NEW_FORM:
            self._skeletons = pickle.loads(broadcast_object_list([None])[0])
        tensors: list[Tensor] = []

        def allocate(slot: Slot) -> Tensor:
            tensors.append(torch.empty(slot.shape, dtype=slot.dtype, device=self._device))
            return tensors[-1]

        # Tensors are allocated in the order in which rank 0 sends them.
        batches = [recursively_apply(allocate, each, test_type=_is_slot) for each in self._skeletons]
        broadcast(tensors)
        present, rows, padding, last = numbers[_COMMON + _EACH * index : _COMMON + _EACH * (index + 1)]
        if not present:
            return None, bool(more), bool(final)
        info = BatchInfo(number, _known(rows), padding, _known(global_rows), bool(last), _known(consumed))
        if info.global_rows is None:
            everyone = zip(numbers[_COMMON::_EACH], numbers[_COMMON + 2 :: _EACH], strict=True)
            info.weights = whole_batches(padding, sum(there and not padded for there, padded in everyone))
        return (batches[index], info), bool(more), bool(final)


def _header_of(step: _Step, code: int, more: bool) -> tuple[list[int], list[int]]:
    first = next(pair[1] for pair in step if pair is not None)
    common = [
        code,
        int(more),
        int(_is_final(step)),
        first.index,
        _number(first.global_rows),
        _number(first.consumed),
    ]
    each: list[int] = []
    for pair in step:
        each += [0] * _EACH if pair is None else [1, _number(pair[1].rows), pair[1].padding, int(pair[1].last)]
    return common, each


def _is_final(step: _Step) -> bool:
    return all(pair is None or pair[1].last for pair in step)


def _number(value: int | None) -> int:
    return _UNKNOWN if value is None else value


def _known(value: int) -> int | None:
    return None if value == _UNKNOWN else value


def _is_slot(value: object) -> bool:
    return isinstance(value, Slot)


def _is_plain_tensor(value: object) -> bool:
    return isinstance(value, Tensor) and type(value) is Tensor and value.layout is torch.strided
