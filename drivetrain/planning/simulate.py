"""One optimizer step of a strategy on fake tensors: what it allocates, sends and computes."""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count
from torch.utils.module_tracker import ModuleTracker

KINDS = ("parameters", "gradients", "optimizer", "activations", "gathered", "reduced", "temporary", "inputs")
"""Kinds of memory, by use."""
HOST = "host"
"""Kind of what is in host memory, whatever its use."""
OFFLOADED = ("parameters", "gradients", "optimizer")
"""Kinds that a strategy with offloading keeps in host memory."""


@dataclass(frozen=True)
class Collective:
    """Collective operation that was recorded in a training step.

    Attributes:
        operation: Its name, such as `"all_gather"`.
        ranks: The global ranks that take part.
        bytes: Bytes that this process gives, or that it receives if it gives none.
    """

    operation: str
    ranks: tuple[int, ...]
    bytes: int


@dataclass(frozen=True)
class Event:
    """One operation of a training step, recorded by `Recorder`, with the sizes from which its time is predicted.

    Attributes:
        name: Name of the operator.
        phase: `"forward"`, `"backward"` or `"step"`.
        flops: Floating-point operations of matrix products and convolutions.
        dtype: The dtype in which it computes.
        bytes: Bytes that it reads and writes.
        reads: Numbers of the storages that it reads.
        writes: Numbers of the storages that it writes.
        collective: The collective, or None for a computation.
    """

    name: str
    phase: str
    flops: int
    dtype: torch.dtype
    bytes: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    collective: Collective | None = None


@dataclass
class Step:
    """Record of one process's simulated training step, from which the planner predicts memory and time.

    Attributes:
        peaks: Most bytes that were allocated at once, by phase and module, each with the bytes by kind.
        events: All operations in order.
        timeline: Allocated bytes after operations, each with the phase, the module and the bytes by kind.
        parameters: Number of parameters of the whole model, and of those of this process.
        checkpoint_bytes: Bytes of the checkpoint that this process writes.
    """

    peaks: dict[tuple[str, str], tuple[int, dict[str, int]]] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    timeline: list[tuple[str, str, dict[str, int]]] = field(default_factory=list)
    parameters: int = 0
    checkpoint_bytes: int = 0

    @property
    def peak(self) -> int:
        return max((size for size, _ in self.peaks.values()), default=0)

    @property
    def collectives(self) -> list[Collective]:
        return [event.collective for event in self.events if event.collective is not None]

    @property
    def flops(self) -> int:
        return sum(event.flops for event in self.events)


def is_backward() -> bool:
    return bool(ModuleTracker().is_bw)


class ModuleNames:
    """Tracks which submodule is running forward or backward, so that the planner can name where memory peaks.

    Torch's `ModuleTracker` knows them, too, but its hooks keep activations alive until Python collects cycles. Here a
    node of the autograd graph belongs to the module that ran when the node was created.
    """

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._running: list[str] = []
        self._begins: list[int] = [-1]
        self._modules: list[str] = [""]

    @property
    def is_within(self) -> bool:
        return bool(self._running)

    @contextmanager
    def of(self, model: nn.Module) -> Iterator[None]:
        self._names = {id(module): name for name, module in model.named_modules()}
        before = register_module_forward_pre_hook(self._enter)
        after = register_module_forward_hook(self._leave, always_call=True)
        try:
            yield
        finally:
            before.remove()
            after.remove()
            self._running.clear()

    def _enter(self, module: nn.Module, _: Any) -> None:
        self._running.append(self._names.get(id(module), ""))
        self._note()

    def _leave(self, *_: Any) -> None:
        if self._running:
            self._running.pop()
        self._note()

    def _note(self) -> None:
        self._begins.append(torch._C._autograd._get_sequence_nr())
        self._modules.append(self._running[-1] if self._running else "")

    def current(self) -> str:
        node = torch._C._current_autograd_node() if is_backward() else None
        if node is None:
            return self._running[-1] if self._running else ""
        place = bisect_right(self._begins, node._sequence_nr()) - 1
        return self._modules[max(0, place)]


# Names of the collectives' operators in torch, and the position of the tensors that a process gives


_COLLECTIVES = {
    "allreduce_": ("all_reduce", 0),
    "all_reduce": ("all_reduce", 0),
    "all_reduce_": ("all_reduce", 0),
    "_allgather_base_": ("all_gather", 1),
    "allgather_": ("all_gather", 1),
    "all_gather_into_tensor": ("all_gather", 0),
    "all_gather_into_tensor_out": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_": ("reduce_scatter", 1),
    "reduce_scatter_tensor": ("reduce_scatter", 0),
    "broadcast_": ("broadcast", 0),
    "broadcast": ("broadcast", 0),
    "alltoall_base_": ("all_to_all", 1),
    "all_to_all_single": ("all_to_all", 0),
    "send": ("send", 0),
    "recv_": ("recv", 0),
}
_FREE = {"view", "_unsafe_view", "detach", "t", "transpose", "permute", "expand", "alias", "slice", "select", "split"}
_FREE |= {
    "split_with_sizes",
    "chunk",
    "unsqueeze",
    "squeeze",
    "as_strided",
    "unbind",
    "empty",
    "empty_like",
    "wait_tensor",
}
_FREE |= {"new_empty", "empty_strided", "reshape", "lift_fresh", "_reshape_alias", "new_empty_strided", "set_"}

_WRITES_ONLY = ("fsdp",)  # operators whose schema does not say that their outputs are not read
_WITHOUT_KERNELS = ("c10d", "_c10d_functional", "prim")

_BUFFERS = {"all_gather": "gathered", "reduce_scatter": "reduced", "all_reduce": "reduced"}
_NOTHING: tuple[int, dict[str, int]] = (-1, {})
_READS = (torch.ops.aten._local_scalar_dense.default,)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Torch dispatch mode that records the allocations and operations of a training step, to predict its cost.

    Storages are followed from the operation that creates them to the end of their last view. FSDP resizes the
    storages of gathered parameters in place, which no operation shows, so those are looked at again with each one.

    Args:
        fake: The mode of the tensors to count. Others are shapes that torch and strategies compute.
        on_host: Kinds that are in host memory. They are counted together as the kind `"host"`, and in no peak.
    """

    def __init__(self, fake: FakeTensorMode | None = None, on_host: Collection[str] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fake = fake
        self.steps = self.prepares = False
        self._on_host = on_host
        self.modules = ModuleNames()
        self.parameters: Sequence[Tensor] = ()
        self.step = Step()
        self.by_kind: dict[str, int] = defaultdict(int)
        self.current = 0
        self._numbers: dict[int, int] = {}
        self._next = 0
        self._known: dict[int, tuple[int, str]] = {}
        self._gathered: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.records = False

    @property
    def module(self) -> str:
        return self.modules.current()

    @property
    def phase(self) -> str:
        return "step" if self.steps else "backward" if is_backward() else "forward"

    # Memory

    def add(self, value: Any, kind: str) -> None:
        for leaf in tree_leaves(value):
            if isinstance(leaf, DTensor):
                leaf = leaf._local_tensor
            if isinstance(leaf, Tensor) and self._is_counted(leaf):
                self._add(leaf.untyped_storage(), kind)

    def _is_counted(self, tensor: Tensor) -> bool:
        # Tensors on the meta device or of another fake mode are only shapes, as those of a pipeline.
        return tensor.device.type != "meta" and getattr(tensor, "fake_mode", self.fake) is self.fake

    def _add(self, storage: torch.UntypedStorage, kind: str, moves: bool = True) -> None:
        key, size = storage._cdata, storage.nbytes()
        known = self._known.get(key)
        if known is not None:
            if known[1] != kind and moves:
                self._change(known[1], -known[0])
                self._change(kind, known[0])
                self._known[key] = (known[0], kind)
            return
        self._known[key] = (size, kind)
        self._numbers[key] = self._next
        self._next += 1
        self._count(size, kind)
        weakref.finalize(storage, self._remove, key)

    def _move_temporary(self, storage: torch.UntypedStorage, kind: str) -> None:
        known = self._known.get(storage._cdata)
        if known is not None and known[1] in ("activations", "temporary"):
            self._add(storage, kind)

    def _remove(self, key: int) -> None:
        size, kind = self._known.pop(key)
        self._numbers.pop(key, None)
        self._gathered.pop(key, None)
        self._change(kind, -size)

    def _change(self, kind: str, size: int) -> None:
        kind = HOST if kind in self._on_host else kind
        self.by_kind[kind] += size
        if kind != HOST:
            self.current += size

    def _count(self, size: int, kind: str) -> None:
        self._change(kind, size)
        if size > 0 and self.records:
            place = (self.phase, self.module)
            if self.current > self.step.peaks.get(place, _NOTHING)[0]:
                self.step.peaks[place] = (self.current, dict(self.by_kind))

    def _look_at_gathered(self) -> None:
        # No operation shows that FSDP has freed a gathered parameter, only the size of its storage.
        for key, of in [*self._gathered.items()]:
            storage = of()
            if storage is None or storage.nbytes() != self._known[key][0]:
                self._gathered.pop(key)
                if storage is not None:
                    self._resize(key, storage.nbytes())

    def _gather_into(self, storage: torch.UntypedStorage) -> None:
        self._add(storage, "gathered")
        self._resize(storage._cdata, storage.nbytes())
        self._gathered[storage._cdata] = weakref.ref(storage)

    def _resize(self, key: int, now: int) -> None:
        size, kind = self._known[key]
        self._known[key] = (now, kind)
        self._count(now - size, kind)

    def find_gradients(self) -> None:
        self.add([each.grad for each in self.parameters if each.grad is not None], "gradients")

    def reset(self) -> None:
        self.step = Step({("forward", ""): (self.current, dict(self.by_kind))})
        self.records = True

    # Operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented
        name = func._schema.name.rpartition("::")[2]
        self._look_at_gathered()
        if name == "split_with_sizes_copy" and "out" in kwargs:
            for each in kwargs["out"]:
                self._gather_into(each.untyped_storage())
        result = self._read_number(args[0], func) if func in _READS else func(*args, **kwargs)
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        made = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        if any(not self._is_counted(each) for each in made):
            return result
        for each in made:
            self._add(each.untyped_storage(), self._kind_of_new(), moves=False)
        if name == "wait_tensor":  # what it returns is there when the collective has ended
            self._numbers[made[0].untyped_storage()._cdata] = self._numbers[given[0].untyped_storage()._cdata]
        if func.namespace in ("c10d", "_c10d_functional") and name in _COLLECTIVES:
            self._record_collective(name, args, kwargs, given, made)
        elif self.records and func.namespace not in _WITHOUT_KERNELS and name not in _FREE:
            self._record(func, name, args, kwargs, given, made, result)
        return result

    def _kind_of_new(self) -> str:
        # Besides parameters, an engine makes its master weights. An optimizer on the host computes there.
        if self.prepares or (self.steps and "optimizer" in self._on_host):
            return "optimizer"
        return "activations" if self.phase == "forward" else "temporary"

    def _read_number(self, tensor: Tensor, func: Any) -> Any:
        try:
            return func(tensor)
        except DataDependentOutputException:
            if self.modules.is_within and not is_backward():
                raise
            # Outside of the model: optimizers read their number of steps, strategies whether a process saw an error
            # (an integer) and whether a parameter took part (a float).
            return 1.0 if tensor.is_floating_point() else 0

    def _record(
        self, func: Any, name: str, args: Any, kwargs: Any, given: list[Tensor], made: list[Tensor], result: Any
    ) -> None:
        flops = _flops_of(func, name, args, kwargs, result)
        dtype = next((each.dtype for each in given if each.is_floating_point()), torch.float32)
        read, written = _read_and_written(func, args, kwargs, made)
        # A copy into an all-gather's output writes this process's part of it.
        moved = (*read, *(read if name == "all_gather_copy_in" else written))
        size = sum(each.numel() * each.element_size() for each in moved)
        self.step.events.append(Event(name, self.phase, flops, dtype, size, self._ids(read), self._ids(written)))
        held = {kind: size for kind, size in self.by_kind.items() if kind != HOST}
        self.step.timeline.append((self.phase, self.module, held))

    def _record_collective(self, name: str, args: Any, kwargs: Any, given: list[Tensor], made: list[Tensor]) -> None:
        operation, position = _COLLECTIVES[name]
        self.find_gradients()
        if operation in _BUFFERS:
            for each in (*given, *made):
                self._move_temporary(each.untyped_storage(), _BUFFERS[operation])
        tensors = [each for each in tree_leaves(args[position]) if isinstance(each, Tensor)] or given
        size = sum(each.numel() * each.element_size() for each in tensors)
        ranks = _ranks_of(tree_leaves((args, kwargs)))
        event = Collective(operation, ranks, size)
        if len(ranks) > 1 and self.records:
            ids = self._ids(given)
            if name == "all_reduce":  # it reduces a copy of its input
                self.step.events.append(Event("clone", self.phase, 0, tensors[0].dtype, 2 * size, ids, ids))
            self.step.events.append(
                Event(name, self.phase, 0, tensors[0].dtype, 0, ids, (*ids, *self._ids(made)), event)
            )

    def _ids(self, tensors: Sequence[Tensor]) -> tuple[int, ...]:
        return tuple({self._numbers.get(each.untyped_storage()._cdata, -1) for each in tensors})


def _read_and_written(func: Any, args: Any, kwargs: Any, made: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    read: list[Tensor] = []
    written: list[Tensor] = []
    for index, argument in enumerate(func._schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        tensors = [each for each in tree_leaves(value) if isinstance(each, Tensor)]
        writes = argument.alias_info is not None and argument.alias_info.is_write
        written += tensors if writes else []
        read += [] if argument.is_out or (writes and func.namespace in _WRITES_ONLY) else tensors
    # A tensor that is changed in place is in both lists.
    known = {each.untyped_storage()._cdata for each in written}
    return read, [*written, *(each for each in made if each.untyped_storage()._cdata not in known)]


def _flops_of(func: Any, name: str, args: Any, kwargs: Any, result: Any) -> int:
    if name.startswith("_scaled_dot_product") and "attention" in name:
        # Torch's table lacks the kernel of the CPU, and counts both halves of causal attention.
        is_causal = any(each is True for each in (*args, *kwargs.values()))
        tensors = [each.shape for each in args if isinstance(each, Tensor)]
        if name.endswith("backward"):
            count = sdpa_backward_flop_count(*tensors[:4])  # type: ignore[no-untyped-call]
        else:
            count = sdpa_flop_count(*tensors[:3])  # type: ignore[no-untyped-call]
        return int(count) // (2 if is_causal else 1)
    formula = flop_registry.get(func._overloadpacket)
    return int(formula(*args, **kwargs, out_val=result)) if formula is not None else 0


def _ranks_of(leaves: Sequence[Any]) -> tuple[int, ...]:
    for each in leaves:
        if isinstance(each, torch.ScriptObject):
            try:
                each = dist.ProcessGroup.unbox(each)
            except RuntimeError:
                continue  # an object of another kind, such as the kind of reduction
        if isinstance(each, dist.ProcessGroup):
            return tuple(dist.get_process_group_ranks(each))
    known = {str(group.group_name): group for group in dist.distributed_c10d._world.pg_map}
    named = [known[each] for each in leaves if isinstance(each, str) and each in known]
    return tuple(dist.get_process_group_ranks(named[-1])) if named else (0,)
