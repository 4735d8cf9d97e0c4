"""`PartialState`: this process, its device and its peers, shared by everything in the process."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from enum import Enum
from functools import wraps
from typing import Any, ClassVar, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]
from torch.optim.optimizer import register_optimizer_step_post_hook

from drivetrain.runtime.collective_checks import CallComparison, call_collective, verify_operation
from drivetrain.runtime.devices import DeviceKind, detect_device_kind, get_device
from drivetrain.runtime.environment import ProcessEnvironment
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.heartbeat import Heartbeat
from drivetrain.runtime.process_group import (
    DEFAULT_TIMEOUT,
    barrier,
    destroy_process_group,
    group_store,
    group_timeout,
    init_process_group,
    leave_process_group,
)
from drivetrain.runtime.terminal import print_all
from drivetrain.runtime.work_queue import WorkQueue

Function = TypeVar("Function", bound=Callable[..., Any])

EXIT_PATIENCE = timedelta(seconds=3)
"""How long a process that ends waits for its peers to end too."""

_TRUE = {"1", "true", "yes", "on"}
_FOUND = ("environment", "kind", "device", "backend", "debug", "heartbeat", "call_comparison")
_OF_THE_GROUP = ("store", "leaving", "heartbeat")


class DistributedType(str, Enum):
    """How the processes of a run are spread."""

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_NPU = "MULTI_NPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_XPU = "MULTI_XPU"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    XLA = "XLA"
    MEGATRON_LM = "MEGATRON_LM"
    MULTI_HPU = "MULTI_HPU"
    MULTI_NEURON = "MULTI_NEURON"
    MULTI_DEVICE = "MULTI_DEVICE"


class PartialState:
    """This process among its peers. All instances in a process share one state.

    The first instance finds the environment, picks the device and, where there are several
    processes, joins their process group.

    Args:
        cpu: Run on the CPU even where there is an accelerator. The launcher's `--cpu` asks the same.
        device: Name of the kind of device, such as `"cuda"`, or of this process's device, such as `"cuda:1"`. The kind
            is found if None. Without a number, the device is that of the process's number on the machine.
        backend: Process-group backend; the device kind's own if None.
        timeout: How long a collective may wait for a peer.

    Raises:
        ConfigurationError: The state exists already and was asked to be something else.
        DeviceNotAvailableError: The device named is not there.

    Example:
        ```python
        from drivetrain import PartialState

        state = PartialState()
        with state.split_between_processes(["a", "b", "c"]) as mine:
            state.print(mine)
        ```
    """

    _shared: ClassVar[dict[str, Any]] = {}

    environment: ProcessEnvironment
    kind: DeviceKind
    device: torch.device
    backend: str | None
    debug: bool
    heartbeat: Heartbeat
    call_comparison: CallComparison | None
    """What compares the processes' calls in debug mode; None otherwise, and in a world of one."""

    def __init__(
        self,
        cpu: bool = False,
        *,
        device: str | None = None,
        backend: str | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        self.__dict__ = self._shared
        asked = "cpu" if cpu else device
        if "environment" in self._shared:
            if asked is None or asked == self.kind.name:
                return
            wanted, number = get_device(asked)
            if wanted is not self.kind or (number is not None and self.kind.device(number) != self.device):
                raise ConfigurationError(
                    f"This process already runs on {str(self.device)!r}, so it cannot be moved to {asked!r}. "
                    "Name the device where the first Accelerator, Trainer or PartialState is made.",
                )
            return
        if asked is None and _is_set("DRIVETRAIN_USE_CPU", "ACCELERATE_USE_CPU"):
            asked = "cpu"
        self.debug = _is_set("DRIVETRAIN_DEBUG", "ACCELERATE_DEBUG_MODE")
        environment = _in_existing_group(ProcessEnvironment.detect())
        kind, number = get_device(asked) if asked else (detect_device_kind(), None)
        if kind.name != "cpu" and environment.local_world_size > max(1, kind.count()):
            raise ConfigurationError(
                f"{environment.local_world_size} processes on this machine, but only {kind.count()} "
                f"{kind.name} device(s). Start fewer processes, or run on the CPU "
                "(`drivetrain launch --cpu`).",
            )
        chosen = kind.device(environment.local_rank if number is None else number)
        kind.set_device(chosen)
        self.backend = None
        if environment.is_distributed:
            if dist.is_initialized():
                self.backend = dist.get_backend()
            else:
                self.backend, store = init_process_group(
                    environment, kind, backend=backend, timeout=timeout, device=chosen
                )
                self._shared["store"] = store
                atexit.register(self._leave)
        if "heartbeat" not in self._shared:
            self.heartbeat = _watched_heartbeat(kind)
        self.call_comparison = None
        if self.debug and environment.is_distributed:
            limit = timeout or group_timeout() or DEFAULT_TIMEOUT
            own_store = self.store or group_store()
            self.call_comparison = CallComparison(own_store, environment.rank, environment.world_size, limit)
        self.environment, self.kind, self.device = environment, kind, chosen

    @property
    def initialized(self) -> bool:
        """Whether the process's state has been found."""
        return "environment" in self._shared

    @classmethod
    def existing(cls) -> PartialState | None:
        """The state of this process if it has been found already; unlike a call, this starts nothing."""
        return cls() if "environment" in cls._shared else None

    @classmethod
    def registry(cls) -> dict[str, Any]:
        """What is kept once per process, by name: other parts of drivetrain may add to it."""
        return cls._shared

    @property
    def store(self) -> Store | None:
        """The store that the processes met at; None in a world of one, and where a script made the process group."""
        return self._shared.get("store")

    def before_leaving(self, callback: Callable[[], None]) -> None:
        """Call `callback` once before the process group is destroyed, to release what depends on it."""
        self._shared.setdefault("leaving", []).append(callback)

    def _release(self) -> None:
        callbacks = self._shared.pop("leaving", [])
        for callback in callbacks:
            callback()

    def _leave(self) -> None:
        """At exit: release everything and leave the group, without waiting for peers after an exception."""
        store = self._shared.pop("store", None)
        if store is not None:
            self._release()
            failed = getattr(sys, "last_value", None) is not None
            leave_process_group(store, timedelta(milliseconds=1) if failed else EXIT_PATIENCE)

    @classmethod
    def _reset_state(cls) -> None:
        """Forget who this process is: whatever asks next, also by an instance that was there before, finds it again.

        A process group that was not left stays, and the next state is in it.
        """
        stays = _OF_THE_GROUP if dist.is_available() and dist.is_initialized() else ()
        for name in [name for name in cls._shared if name not in stays]:
            del cls._shared[name]

    def __getattr__(self, name: str) -> Any:
        # Only asked for what is not there: after a reset, or in an instance that comes out of a pickle.
        if name not in _FOUND or self.initialized:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        PartialState.__init__(self)
        return self.__dict__[name]

    def __reduce__(self) -> tuple[Any, ...]:
        return _sharing, (type(self),)

    # who and how many

    @property
    def distributed_type(self) -> DistributedType:
        """How the processes are spread."""
        own = DistributedType.__members__.get(self.kind.name.upper())
        if own is not None:  # of a kind whose devices one process may drive together
            return own
        if self.environment.world_size == 1:
            return DistributedType.NO
        word = {"cpu": "CPU", "cuda": "GPU"}.get(self.kind.name, self.kind.name.upper())
        return DistributedType.__members__.get(f"MULTI_{word}", DistributedType.MULTI_DEVICE)

    @property
    def use_distributed(self) -> bool:
        """Whether there is more than one process."""
        return self.environment.world_size > 1

    @property
    def num_processes(self) -> int:
        """Number of processes of the run."""
        return self.environment.world_size

    @property
    def process_index(self) -> int:
        """Global rank of this process."""
        return self.environment.rank

    @property
    def local_process_index(self) -> int:
        """Rank of this process on its machine."""
        return self.environment.local_rank

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return self.environment.rank == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first process of its machine."""
        return self.environment.local_rank == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this is the process with the highest rank."""
        return self.environment.rank == self.environment.world_size - 1

    @property
    def fork_launched(self) -> bool:
        """Whether a notebook's launcher has forked this process."""
        return os.environ.get("FORK_LAUNCHED", "").lower() in _TRUE

    def set_device(self) -> None:
        """Make this process's device the current one of its kind."""
        self.kind.set_device(self.device)

    @property
    def default_device(self) -> torch.device:
        """The device that this machine would run on by itself."""
        return detect_device_kind().device(self.environment.local_rank)

    # waiting and taking turns

    def wait_for_everyone(self) -> None:
        """Wait until every process is here.

        Raises:
            CollectiveError: If a peer is gone, or in debug mode if a process calls something else.
        """
        self._wait("wait_for_everyone")

    def _wait(self, name: str) -> None:
        if self.use_distributed:
            if self.debug:
                verify_operation(name, None, self)
            call_collective(name, self, barrier)

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Run the body on the main process first, then on the others.

        The others are released also when the body raises on the main process, so that none
        waits for a process that is gone.
        """
        with self._first(self.is_main_process, "main_process_first"):
            yield

    @contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """Run the body on each machine's first process first, then on the others."""
        with self._first(self.is_local_main_process, "local_main_process_first"):
            yield

    @contextmanager
    def _first(self, first: bool, name: str) -> Iterator[None]:
        if not first:
            self._wait(name)
        try:
            yield
        finally:
            if first:
                self._wait(name)

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False, dynamic: bool = False) -> Iterator[Any]:
        """Give each process its contiguous part of `inputs`; the first get one more where the length is no multiple.

        Args:
            inputs: A list, tuple, tensor, array, Hugging Face dataset, anything else with a length and
                slices, or a dict of equally long ones.
            apply_padding: Repeat the last item so that every process gets as many.
            dynamic: Give each process the next item whenever it is done with one, instead of a part that is known
                before. Results come back in the order of `inputs`, and what a process that dies had taken is given to
                another.

        Yields:
            This process's part, of the same type; with `dynamic`, a `WorkQueue`.

        Raises:
            ConfigurationError: The values of a dict differ in length, or their last item cannot be repeated.
        """
        if dynamic:
            with self._work_queue(inputs, apply_padding) as queue:
                yield queue
            return
        if self.num_processes == 1:
            yield inputs
            return
        if isinstance(inputs, dict):
            lengths = {key: len(value) for key, value in inputs.items()}
            if len(set(lengths.values())) > 1:
                raise ConfigurationError(
                    f"split_between_processes needs values of one length in a dict, got {lengths}."
                )
        length = len(next(iter(inputs.values()))) if isinstance(inputs, dict) and inputs else len(inputs)
        each, more = divmod(length, self.num_processes)
        start = self.process_index * each + min(self.process_index, more)
        end = start + each + (self.process_index < more)
        missing = each + (more > 0) - (end - start) if apply_padding and length else 0
        if apply_padding and more:
            _part(inputs, 0, 0, 1)  # refuse what cannot be padded on every process, not only where it is short
        yield _part(inputs, start, end, missing)

    def _work_queue(self, inputs: Any, apply_padding: bool) -> WorkQueue:
        if apply_padding:
            raise ConfigurationError(
                "split_between_processes takes no apply_padding with dynamic=True: how many items a process will take "
                "is not known. Leave one of them out.",
            )
        store = (self.store or group_store()) if self.use_distributed else HashStore()
        queue = WorkQueue(inputs, store, self.process_index, self.num_processes, self.heartbeat.beat)
        queue.wait_for_all()
        return queue

    # only on some processes

    def on_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """Decorate a function so that only the main process runs it; the others get None."""
        return self.on_main_process if function is None else self._only(function, lambda: self.is_main_process)

    def on_local_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """Decorate a function so that only each machine's first process runs it."""
        if function is None:
            return self.on_local_main_process
        return self._only(function, lambda: self.is_local_main_process)

    def on_last_process(self, function: Function) -> Function:
        """Decorate a function so that only the last process runs it."""
        return self._only(function, lambda: self.is_last_process)

    def on_process(self, function: Function | None = None, process_index: int | None = None) -> Any:
        """Decorate a function so that only the process with this rank runs it."""
        if function is None:
            return lambda given: self.on_process(given, process_index)
        return self._only(function, lambda: self.process_index == process_index)

    def on_local_process(self, function: Function | None = None, local_process_index: int | None = None) -> Any:
        """Decorate a function so that only the process with this rank on its machine runs it."""
        if function is None:
            return lambda given: self.on_local_process(given, local_process_index)
        return self._only(function, lambda: self.local_process_index == local_process_index)

    @staticmethod
    def _only(function: Function, wanted: Callable[[], bool]) -> Function:
        @wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs) if wanted() else None

        return cast("Function", guarded)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print once per machine."""
        if self.is_local_main_process:
            print_all(*args, **kwargs)

    def destroy_process_group(self, group: Any = None) -> None:
        """Leave the process group after waiting for the peers.

        Args:
            group: A group that a script has made beside it, which alone is destroyed.
        """
        if group is not None:
            dist.destroy_process_group(group)
            return
        if self.use_distributed and self.debug:
            verify_operation("destroy_process_group", None, self)
        self._release()
        self._shared.pop("store", None)
        destroy_process_group()

    def __repr__(self) -> str:
        return (
            f"Distributed environment: {self.distributed_type.value}\n"
            f"Backend: {self.backend}\n"
            f"Num processes: {self.num_processes}\n"
            f"Process index: {self.process_index}\n"
            f"Local process index: {self.local_process_index}\n"
            f"Device: {self.device}\n"
        )


def _watched_heartbeat(kind: DeviceKind) -> Heartbeat:
    """The heartbeat that the launcher reads, which also beats after each step of any optimizer."""
    heartbeat = Heartbeat.attach()
    if heartbeat.watched:
        heartbeat.describe_waits(group_timeout(), spinning=kind.name != "cpu")

        def beat(*_: Any) -> None:
            if not torch.compiler.is_compiling():
                heartbeat.beat()

        register_optimizer_step_post_hook(beat)
    return heartbeat


def _is_set(*names: str) -> bool:
    """Whether a switch is on: the first of the variables that is there counts, drivetrain's before another's."""
    given = (os.environ[name] for name in names if os.environ.get(name))
    return next(given, "").lower() in _TRUE


def _in_existing_group(environment: ProcessEnvironment) -> ProcessEnvironment:
    """This process's place in the process group that the script has made itself, if it has."""
    if not (dist.is_available() and dist.is_initialized()):
        return environment
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if (environment.rank, environment.world_size) == (rank, world_size):
        return environment
    if environment.is_distributed:
        raise ConfigurationError(
            f"torch.distributed was initialised as rank {rank} of {world_size}, but this process is rank "
            f"{environment.rank} of {environment.world_size} (from {environment.source}). Initialise it with "
            "what the launcher says, or let PartialState do it.",
        )
    return ProcessEnvironment(rank, world_size, rank, world_size, source="torch.distributed")


def _part(inputs: Any, start: int, end: int, missing: int) -> Any:
    """Slice `inputs` and repeat its very last item `missing` times."""
    if isinstance(inputs, dict):
        return type(inputs)({key: _part(value, start, end, missing) for key, value in inputs.items()})
    if hasattr(inputs, "select") and hasattr(inputs, "column_names"):
        # A slice of a Hugging Face dataset is a dict of columns, and no dataset.
        return inputs.select([*range(start, end), *[len(inputs) - 1] * missing])
    part = inputs[start:end]
    if missing == 0:
        return part
    last = inputs[-1:]
    if isinstance(inputs, torch.Tensor):
        return torch.cat([part, *[last] * missing])
    if isinstance(inputs, np.ndarray):
        return np.concatenate([part, *[last] * missing])
    if isinstance(inputs, (list, tuple, str)):
        return part + last * missing
    if isinstance(inputs, Sequence):
        return [*part, *[inputs[-1]] * missing]
    raise ConfigurationError(
        f"split_between_processes cannot repeat the last item of a {type(inputs).__name__}. Give a list, a "
        "tuple or a tensor, or leave apply_padding off.",
    )


def forget_process() -> None:
    """Forget who this process is, where it was made from another one that has a place of its own.

    Whatever asks next finds it again.
    """
    PartialState._reset_state()


def leave_run() -> None:
    """Leave the process group as at the end of a script, in a process that does not come to what `atexit` runs.

    A forked one does not, and its peers may still be meeting it.
    """
    if "store" in PartialState.registry():
        PartialState()._leave()


def _sharing(kind: type[PartialState]) -> PartialState:
    """An instance that finds its process's state when it is asked for it."""
    state = kind.__new__(kind)
    state.__dict__ = PartialState.registry()
    return state
