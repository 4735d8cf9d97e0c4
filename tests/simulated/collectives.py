"""Collectives between simulated devices: gloo moves the bytes, and a communication stream of the clock takes the time.

As NCCL does, a collective begins when what was launched before it on the current stream has ended, runs on a stream of
its own, and `wait` makes the current stream wait, not the host. All ranks compare what they call, so that a difference
is an error that names both calls and not a hang.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

BACKEND = "simccl"


@dataclass
class Call:
    """A collective that was called.

    Attributes:
        name: Its operation.
        ranks: How many processes took part.
        bytes: Bytes of the tensors that this process gave, or received if it gave none.
        start: When it began, in simulated seconds.
        end: When it ended.
        waited: For how many seconds the stream that waited for it had nothing else to do.
    """

    name: str
    ranks: int
    bytes: int
    start: float = 0.0
    end: float = 0.0
    waited: float = 0.0


@dataclass
class Network:
    """What connects the devices, and what was sent over it.

    Attributes:
        bandwidth: Bytes per second; 0 takes no time.
        latency: Seconds that a collective takes in any case.
        compares: Whether the ranks compare their calls.
        calls: The collectives since `calls` was cleared.
    """

    bandwidth: float = 0.0
    latency: float = 0.0
    compares: bool = True
    calls: list[Call] = field(default_factory=list)


network = Network()


class Pending(dist.Work):
    """A collective that is under way on the communication stream."""

    def __init__(
        self, call: Call, event: torch.Event | None, tensors: Any, held: Any, result: Any, arrives: Any = None
    ) -> None:
        super().__init__()
        self._call, self._event, self._held = call, event, held
        self._arrives = arrives  # gloo's work of a receive, whose sender may wait for what this process sends later
        self._future: Future[Any] = Future(devices=[tensors[0].device]) if event is not None else Future()
        self._result = result
        self._future.set_result(result)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Make the current stream wait."""
        if self._arrives is not None:
            self._arrives.wait()
            self._arrives = None
        if self._event is not None:
            current = torch.accelerator.current_stream()
            self._call.waited += max(0.0, self._call.end - _time(current))
            current.wait_event(self._event)
        self._held = None
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        arrived = self._arrives is None or self._arrives.is_completed()
        return arrived and (self._event is None or self._event.query())

    def is_success(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def result(self) -> Any:
        return self._result

    def get_future(self) -> Future[Any]:
        return self._future

    def boxed(self) -> Any:
        return self


class SimulatedGroup(dist.ProcessGroup):
    """Process group whose tensors may be on simulated devices or on the CPU."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._rank, self._size = rank, size
        self._gloo = dist.ProcessGroupGloo(dist.PrefixStore("simulated", store), rank, size, timeout)
        self._streams: dict[torch.device, torch.Stream] = {}
        self._sends: list[Any] = []

    # What torch asks of a group

    def getBackendName(self) -> str:
        return BACKEND

    def _get_backend(self, device: torch.device) -> Any:
        return self._gloo if device.type == "cpu" else self

    def _get_backend_name(self) -> str:
        return BACKEND

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    @property
    def supports_coalescing(self) -> bool:
        return False

    @property
    def supports_splitting(self) -> bool:
        return False

    def _set_sequence_number_for_group(self) -> None: ...

    def _get_sequence_number_for_group(self) -> int:
        return len(network.calls)

    def set_timeout(self, timeout: timedelta) -> None: ...

    def shutdown(self) -> None: ...

    def abort(self) -> None: ...

    # Collectives

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        opts = opts or dist.AllreduceOptions()
        mean = opts.reduceOp == dist.ReduceOp.AVG
        if mean:
            opts.reduceOp = dist.ReduceOp.SUM

        def run(given: Any) -> None:
            self._gloo.allreduce(given, opts).wait()
            if mean:
                for each in given:
                    each.div_(self._size)

        return self._call("allreduce", tensors, tensors, run, tensors, tensors)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Any:
        plain = dist.AllreduceOptions()
        if opts is not None:
            plain.reduceOp = opts.reduceOp
        for each in tensors[:-1]:
            self.allreduce([each], plain)
        return self.allreduce([tensors[-1]], plain)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Any:
        def run(given: Any) -> None:
            self._gloo.broadcast(given, opts).wait()

        return self._call("broadcast", tensors, tensors, run, tensors, tensors)

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        def run(given: Any) -> None:
            self._gloo.reduce(given, opts).wait()

        return self._call("reduce", tensors, tensors, run, tensors, tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        def run(given: Any) -> None:
            self._gloo.allgather(given[0], given[1]).wait()

        flat = [each for row in outputs for each in row]
        return self._call("allgather", inputs, flat, run, (outputs, inputs), outputs)

    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any = None) -> Any:
        def run(tensors: Any) -> None:
            whole, own = tensors
            parts = [torch.empty_like(own) for _ in range(self._size)]
            self._gloo.allgather([parts], [own.contiguous()]).wait()
            whole.view(self._size, -1).copy_(torch.stack([part.reshape(-1) for part in parts]))

        return self._call("all_gather_single", [given], [output], run, (output, given), output)

    def _allgather_base(self, output: Tensor, given: Tensor, opts: Any = None) -> Any:
        return self.all_gather_single(output, given, opts)

    def allgather_into_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        works = [self.all_gather_single(*pair) for pair in zip(outputs, inputs, strict=True)]
        return works[-1]

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any = None) -> Any:
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        mean = op == dist.ReduceOp.AVG

        def run(tensors: Any) -> None:
            own, whole = tensors
            options = dist.AllreduceOptions()
            options.reduceOp = dist.ReduceOp.SUM if mean else op
            total = whole.clone()
            self._gloo.allreduce([total], options).wait()
            part = total.reshape(self._size, -1)[self._rank]
            own.copy_((part / self._size if mean else part).view_as(own))

        return self._call("reduce_scatter_single", [given], [output], run, (output, given), output)

    def _reduce_scatter_base(self, output: Tensor, given: Tensor, opts: Any = None) -> Any:
        return self.reduce_scatter_single(output, given, opts)

    def reduce_scatter_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        works = [self.reduce_scatter_single(*pair, opts) for pair in zip(outputs, inputs, strict=True)]
        return works[-1]

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Any:
        works = [
            self.reduce_scatter_single(output, torch.cat([each.reshape(-1) for each in parts]), opts)
            for output, parts in zip(outputs, inputs, strict=True)
        ]
        return works[-1]

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Any:
        def run(given: Any) -> None:
            self._gloo.scatter(given[0], given[1], opts).wait()

        flat = [each for row in inputs for each in row]
        return self._call("scatter", flat, outputs, run, (outputs, inputs), outputs)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        def run(given: Any) -> None:
            self._gloo.gather(given[0], given[1], opts).wait()

        flat = [each for row in outputs for each in row]
        return self._call("gather", inputs, flat, run, (outputs, inputs), outputs)

    def all_to_all_single(
        self, output: Tensor, given: Tensor, output_sizes: Any = None, input_sizes: Any = None, opts: Any = None
    ) -> Any:
        def run(tensors: Any) -> None:
            self._gloo.alltoall_base(
                tensors[0], tensors[1], list(output_sizes or ()), list(input_sizes or ()), dist.AllToAllOptions()
            ).wait()

        return self._call("all_to_all_single", [given], [output], run, (output, given), output, compared=False)

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        def run(tensors: Any) -> None:
            theirs, own = tensors
            received = torch.empty(sum(each.numel() for each in theirs), dtype=theirs[0].dtype)
            self._gloo.alltoall_base(
                received,
                torch.cat([each.reshape(-1) for each in own]),
                [each.numel() for each in theirs],
                [each.numel() for each in own],
                dist.AllToAllOptions(),
            ).wait()
            for each, part in zip(theirs, received.split([each.numel() for each in theirs]), strict=True):
                each.copy_(part.view_as(each))

        return self._call("alltoall", inputs, outputs, run, (outputs, inputs), outputs, compared=False)

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> Any:
        def run(given: Any) -> None:
            # Who receives may come later. Gloo's work owns the memory that it sends.
            self._sends.append(self._gloo.send([each.clone() for each in given], to, tag))

        return self._call("send", tensors, [], run, tensors, tensors, compared=False)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> Any:
        def run(given: Any) -> Any:
            return self._gloo.recv(given, source, tag)

        return self._call("recv", [], tensors, run, tensors, tensors, compared=False)

    def barrier(self, opts: Any = None) -> Any:
        while self._sends:
            self._sends.pop().wait()
        return self._gloo.barrier()

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        self._gloo.monitored_barrier(timeout or timedelta(seconds=60), wait_all_ranks)

    # How each of them runs

    def _call(
        self,
        name: str,
        read: Sequence[Tensor],
        written: Sequence[Tensor],
        run: Callable[[Any], Any],
        given: Any,
        result: Any,
        compared: bool = True,
    ) -> Any:
        every = [*read, *written]
        device = every[0].device
        size = sum(each.nbytes for each in (read or written))
        if compared and network.compares:
            self._compare(name, (read or written)[0])
        with torch.no_grad():
            if device.type == "cpu":
                return Pending(Call(name, self._size, size), None, every, None, result, run(given))
            stream = self._stream(device)
            stream.wait_stream(torch.accelerator.current_stream(device))
            arrives = run(_on_cpu(given))
            takes = network.latency + (size / network.bandwidth if network.bandwidth else 0.0)
            call = Call(name, self._size, size, start=_time(stream))
            event = torch.Event(device.type)
            with stream:
                torch.ops.sim.launch(list(read), list(written), f"collective {name}", takes)
                event.record(stream)
                call.end = _time(stream)
                network.calls.append(call)
                return Pending(call, event, every, every, result, arrives)

    def _stream(self, device: torch.device) -> torch.Stream:
        if device not in self._streams:
            self._streams[device] = torch.Stream(device)
        return self._streams[device]

    def _compare(self, name: str, tensor: Tensor) -> None:
        """Raise an error on all ranks if one calls something else, or if two have the same device."""
        mine = torch.zeros(80, dtype=torch.uint8)
        text = f"{name} of {tensor.numel()} x {tensor.dtype} on {tensor.device}".encode()[: len(mine)]
        mine[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
        all_of_them = [torch.empty_like(mine) for _ in range(self._size)]
        self._gloo.allgather([all_of_them], [mine]).wait()
        called = [bytes(each[each > 0].tolist()).decode() for each in all_of_them]
        calls, devices = zip(*(each.rsplit(" on ", 1) for each in called), strict=True)
        listed = ", ".join(f"rank {rank}: {each}" for rank, each in enumerate(called))
        if len({each.split(" of ")[0] if name in _UNEVEN else each for each in calls}) > 1:
            raise RuntimeError(f"The ranks call different collectives: {listed}.")
        if tensor.device.type != "cpu" and len(set(devices)) < self._size:
            raise RuntimeError(f"Two ranks of one machine use the same device: {listed}.")


# Only the ranks that send give tensors.
_UNEVEN = {"scatter", "gather", "broadcast"}


def _on_cpu(given: Any) -> Any:
    if isinstance(given, Tensor):
        return torch.ops.sim.on_cpu(given.detach())
    return type(given)(_on_cpu(each) for each in given)


def _time(stream: torch.Stream) -> float:
    from tests.simulated.devices import started

    return started().stream_time(stream)


def register() -> None:
    """Make the backend known to torch."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _create, devices=["sim"])


def _create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> SimulatedGroup:
    return SimulatedGroup(store, rank, size, timeout)
