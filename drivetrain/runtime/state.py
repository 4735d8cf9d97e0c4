"""`PartialState`: this process's rank, device and process group, shared by all code in the process."""

from __future__ import annotations

import atexit
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
from drivetrain.runtime.devices import DeviceKind, cpu_is_requested, detect_device_kind, get_device
from drivetrain.runtime.environment import ProcessEnvironment, is_set
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
"""Time for which an exiting process waits for the other processes to exit."""

_FOUND = ("environment", "kind", "device", "backend", "debug", "heartbeat", "call_comparison")
_OF_THE_GROUP = ("store", "leaving", "heartbeat")


class DistributedType(str, Enum):
    """Kind of distributed run, such as `MULTI_GPU`, given by the device kind and the number of processes."""

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
    """Rank, device and process group of the current process, shared by all instances of the class.

    The first instance reads the environment, selects the device and, if there are several processes, initializes the
    process group.

    Args:
        cpu: Run on the CPU even if there is an accelerator, like the launcher's `--cpu`.
        device: Name of a device kind, such as `"cuda"`, or of this process's device, such as `"cuda:1"`. The kind is
            detected if None. Without a number, the local rank selects the device.
        backend: Process-group backend; that of the device kind if None.
        timeout: Timeout of collectives; 30 minutes if None.
        moves: Move the process to `device` if it runs on another one, as each Trainer and Accelerator does. Processes
            of a process group cannot move.

    Raises:
        ConfigurationError: If the process already runs on another device and does not move.
        DeviceNotAvailableError: If this machine does not have the device.

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
    """Comparison of the collectives that all ranks call in debug mode, or None."""

    def __init__(
        self,
        cpu: bool = False,
        *,
        device: str | None = None,
        backend: str | None = None,
        timeout: timedelta | None = None,
        moves: bool = False,
    ) -> None:
        self.__dict__ = self._shared
        asked = "cpu" if cpu else device
        if "environment" in self._shared:
            # Later instances share the state, so they can only confirm the device or move all of them.
            if asked is None or asked == self.kind.name:
                return
            wanted, number = get_device(asked)
            if wanted is not self.kind or number is not None:
                chosen = wanted.device(number or 0)
                if not moves and (wanted is not self.kind or chosen != self.device):
                    raise ConfigurationError(_another_device(self.device, asked))
                self.move_to(wanted, chosen)
            return
        if asked is None and cpu_is_requested():
            asked = "cpu"
        self.debug = is_set("DRIVETRAIN_DEBUG", "ACCELERATE_DEBUG_MODE")
        environment = _in_existing_group(ProcessEnvironment.detect())
        kind, number = get_device(asked) if asked else (detect_device_kind(), None)
        if kind.name != "cpu" and environment.local_world_size > max(1, kind.count()):
            raise ConfigurationError(
                f"This machine runs {environment.local_world_size} processes, but has only {kind.count()} {kind.name} "
                "device(s). Start fewer processes, or run on the CPU (`drivetrain launch --cpu`).",
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
            # A reset keeps it while the process group exists; a second one would add another optimizer hook.
            self.heartbeat = _watched_heartbeat(kind)
        self.call_comparison = None
        if self.debug and environment.is_distributed:
            limit = timeout or group_timeout() or DEFAULT_TIMEOUT
            own_store = self.store or group_store()
            self.call_comparison = CallComparison(own_store, environment.rank, environment.world_size, limit)
        # Last, because `environment` marks the state as complete: an error above must not leave half of it.
        self.environment, self.kind, self.device = environment, kind, chosen

    def move_to(self, kind: DeviceKind, device: torch.device) -> None:
        """Switch this process to another device, for example for a second Trainer in a run of a single process.

        Each Trainer and Accelerator of a process may have a device of its own. A Trainer selects it when it runs.

        Args:
            kind: Kind of the device.
            device: The device.

        Raises:
            ConfigurationError: If the process belongs to a process group.
        """
        if device == self.device:
            return
        if self.environment.is_distributed:
            raise ConfigurationError(_another_device(self.device, device))
        kind.set_device(device)
        self.kind, self.device = kind, device

    @property
    def initialized(self) -> bool:
        """True if the rank and device of this process have already been detected."""
        return "environment" in self._shared

    @classmethod
    def existing(cls) -> PartialState | None:
        """Return this process's state, or None if it is not initialized.

        Nothing is initialized by the call.
        """
        return cls() if "environment" in cls._shared else None

    @classmethod
    def registry(cls) -> dict[str, Any]:
        """Return the dict shared by all `PartialState` instances.

        Modules may store per-process objects in it.
        """
        return cls._shared

    @property
    def store(self) -> Store | None:
        """Key-value store that all processes share, through which drivetrain has connected them at the start.

        None in a single process, or if the script made the process group.
        """
        return self._shared.get("store")

    def before_leaving(self, callback: Callable[[], None]) -> None:
        """Register a callback that runs once, just before the process group is destroyed.

        Args:
            callback: Called without arguments.
        """
        self._shared.setdefault("leaving", []).append(callback)

    def _release(self) -> None:
        callbacks = self._shared.pop("leaving", [])
        for callback in callbacks:
            callback()

    def _leave(self) -> None:
        """Leave the process group at exit."""
        store = self._shared.pop("store", None)
        if store is not None:
            self._release()
            # The interpreter sets last_value when an uncaught exception ends the script.
            failed = getattr(sys, "last_value", None) is not None
            leave_process_group(store, timedelta(milliseconds=1) if failed else EXIT_PATIENCE)

    @classmethod
    def _reset_state(cls) -> None:
        # An initialized process group is kept, and the next state uses it.
        stays = _OF_THE_GROUP if dist.is_available() and dist.is_initialized() else ()
        for name in [name for name in cls._shared if name not in stays]:
            del cls._shared[name]

    def __getattr__(self, name: str) -> Any:
        # Called for missing attributes only: after a reset, or in an unpickled instance.
        if name not in _FOUND or self.initialized:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        PartialState.__init__(self)
        return self.__dict__[name]

    def __reduce__(self) -> tuple[Any, ...]:
        return _sharing, (type(self),)

    # ranks and devices

    @property
    def distributed_type(self) -> DistributedType:
        """Kind of distributed run, given by the device kind and the number of processes."""
        own = DistributedType.__members__.get(self.kind.name.upper())
        if own is not None:  # a kind for which one process may drive several devices
            return own
        if self.environment.world_size == 1:
            return DistributedType.NO
        word = {"cpu": "CPU", "cuda": "GPU"}.get(self.kind.name, self.kind.name.upper())
        return DistributedType.__members__.get(f"MULTI_{word}", DistributedType.MULTI_DEVICE)

    @property
    def use_distributed(self) -> bool:
        """True if the run has more than one process."""
        return self.environment.world_size > 1

    @property
    def num_processes(self) -> int:
        """Number of processes of the run (world size)."""
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
        """True if this process is rank 0."""
        return self.environment.rank == 0

    @property
    def is_local_main_process(self) -> bool:
        """True if this is the first process on its machine."""
        return self.environment.local_rank == 0

    @property
    def is_last_process(self) -> bool:
        """True if this process has the highest rank."""
        return self.environment.rank == self.environment.world_size - 1

    @property
    def fork_launched(self) -> bool:
        """True if the environment variable `FORK_LAUNCHED` says that a notebook launcher forked this process."""
        return is_set("FORK_LAUNCHED")

    def set_device(self) -> None:
        """Select this process's device as the current one, as `torch.cuda.set_device` does for GPUs."""
        self.kind.set_device(self.device)

    @property
    def default_device(self) -> torch.device:
        """Device that this machine would use if none were requested."""
        return detect_device_kind().device(self.environment.local_rank)

    # synchronization

    def wait_for_everyone(self) -> None:
        """Wait until every process has called this (a barrier).

        Raises:
            CollectiveError: If a process has exited, or in debug mode if a process calls something else.
        """
        self._wait("wait_for_everyone")

    def _wait(self, name: str) -> None:
        if self.use_distributed:
            if self.debug:
                verify_operation(name, None, self)
            call_collective(name, self, barrier)

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Context manager that runs its body on the main process first, and then on all other processes.

        If the body raises on the main process, the others are released as well, so that none waits forever.
        """
        with self._first(self.is_main_process, "main_process_first"):
            yield

    @contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """Context manager that runs its body on the first process of each machine before all others."""
        with self._first(self.is_local_main_process, "local_main_process_first"):
            yield

    @contextmanager
    def _first(self, first: bool, name: str) -> Iterator[None]:
        # The first process meets the others in one barrier: after its body, and before theirs.
        if not first:
            self._wait(name)
        try:
            yield
        finally:
            if first:
                self._wait(name)

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False, dynamic: bool = False) -> Iterator[Any]:
        """Return a context manager that gives each process its part of `inputs`, for example for inference.

        The context manager yields one contiguous part to each. If the length is not a multiple of the number of
        processes, the first processes get one more item.

        Args:
            inputs: A list, tuple, tensor, array, Hugging Face dataset or other object with a length and slices, or a
                dict of such objects with equal lengths.
            apply_padding: Repeat the last item so that all parts are equally long.
            dynamic: Let each process take the next item when it has finished the previous one. Results are returned in
                the order of `inputs`. Items of a process that dies go to another process.

        Yields:
            This process's part, of the type of `inputs`, or with `dynamic` a `WorkQueue`.

        Raises:
            ConfigurationError: If the values of a dict differ in length, or the last item cannot be repeated.
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
                    f"The values of a dict must have equal lengths to be split, but have {lengths}."
                )
        length = len(next(iter(inputs.values()))) if isinstance(inputs, dict) and inputs else len(inputs)
        each, more = divmod(length, self.num_processes)
        start = self.process_index * each + min(self.process_index, more)
        end = start + each + (self.process_index < more)
        missing = each + (more > 0) - (end - start) if apply_padding and length else 0
        if apply_padding and more:
            _slice_and_pad(inputs, 0, 0, 1)  # raises on every process, not only on those that need padding
        yield _slice_and_pad(inputs, start, end, missing)

    def _work_queue(self, inputs: Any, apply_padding: bool) -> WorkQueue:
        if apply_padding:
            raise ConfigurationError(
                "split_between_processes cannot use apply_padding with dynamic=True, because the number of items per "
                "process is not known in advance. Remove one of the two arguments.",
            )
        # A single process has no rendezvous store, so its queue uses one in memory.
        store = (self.store or group_store()) if self.use_distributed else HashStore()
        queue = WorkQueue(inputs, store, self.process_index, self.num_processes, self.heartbeat.beat)
        queue.wait_for_all()
        return queue

    # execution on some processes only

    def on_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """Decorate a function so that only the main process runs it.

        On other processes it returns None.

        Args:
            function: The function, or None if the decorator is used with parentheses.
        """
        return self.on_main_process if function is None else self._only_if(function, lambda: self.is_main_process)

    def on_local_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """Decorate a function so that only the first process of each machine runs it.

        Args:
            function: The function, or None if the decorator is used with parentheses.
        """
        if function is None:
            return self.on_local_main_process
        return self._only_if(function, lambda: self.is_local_main_process)

    def on_last_process(self, function: Function) -> Function:
        """Decorate a function so that only the process with the highest rank runs it.

        Args:
            function: The function.
        """
        return self._only_if(function, lambda: self.is_last_process)

    def on_process(self, function: Function | None = None, process_index: int | None = None) -> Any:
        """Decorate a function so that only the process with the given global rank runs it.

        Args:
            function: The function, or None if the decorator is used with arguments.
            process_index: Global rank of the process.
        """
        if function is None:
            return lambda given: self.on_process(given, process_index)
        return self._only_if(function, lambda: self.process_index == process_index)

    def on_local_process(self, function: Function | None = None, local_process_index: int | None = None) -> Any:
        """Decorate a function so that on each machine only the process with the given local rank runs it.

        Args:
            function: The function, or None if the decorator is used with arguments.
            local_process_index: Rank of the process on its machine.
        """
        if function is None:
            return lambda given: self.on_local_process(given, local_process_index)
        return self._only_if(function, lambda: self.local_process_index == local_process_index)

    @staticmethod
    def _only_if(function: Function, wanted: Callable[[], bool]) -> Function:
        @wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs) if wanted() else None

        return cast("Function", guarded)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print like the built-in `print`, but only on the first process of each machine.

        Args:
            *args: Objects to print.
            **kwargs: Keyword arguments of `print`.
        """
        if self.is_local_main_process:
            print_all(*args, **kwargs)

    def destroy_process_group(self, group: Any = None) -> None:
        """Wait for all processes, then destroy the default process group.

        Args:
            group: A process group that the script created. If given, only this group is destroyed.
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


def _another_device(device: torch.device, asked: object) -> str:
    return (
        f"This process already runs on {str(device)!r}, so it cannot be moved to {str(asked)!r}. Select the device in "
        "the first Accelerator, Trainer or PartialState that is created."
    )


def _watched_heartbeat(kind: DeviceKind) -> Heartbeat:
    heartbeat = Heartbeat.attach()
    if heartbeat.watched:
        heartbeat.describe_waits(group_timeout(), spinning=kind.name != "cpu")

        def beat(*_: Any) -> None:
            # A traced beat would run during compilation only, not at each step.
            if not torch.compiler.is_compiling():
                heartbeat.beat()

        # An optimizer step counts as progress.
        register_optimizer_step_post_hook(beat)
    return heartbeat


def _in_existing_group(environment: ProcessEnvironment) -> ProcessEnvironment:
    if not (dist.is_available() and dist.is_initialized()):
        return environment
    # The script has already made a process group.
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if (environment.rank, environment.world_size) == (rank, world_size):
        return environment
    if environment.is_distributed:
        raise ConfigurationError(
            f"torch.distributed was initialised as rank {rank} of {world_size}, but this process is rank "
            f"{environment.rank} of {environment.world_size} (from {environment.source}). Initialise it with "
            "the launcher's values, or let PartialState initialise it.",
        )
    return ProcessEnvironment(rank, world_size, rank, world_size, source="torch.distributed")


def _slice_and_pad(inputs: Any, start: int, end: int, missing: int) -> Any:
    if isinstance(inputs, dict):
        return type(inputs)({key: _slice_and_pad(value, start, end, missing) for key, value in inputs.items()})
    if hasattr(inputs, "select") and hasattr(inputs, "column_names"):
        # Slicing a Hugging Face dataset would return a dict of columns instead of a dataset.
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
        f"split_between_processes cannot repeat the last item of a {type(inputs).__name__}. Pass a list, a tuple or a "
        "tensor, or remove apply_padding.",
    )


def forget_process() -> None:
    PartialState._reset_state()


def leave_run() -> None:
    # For forked processes. Others may still be waiting for this one.
    if "store" in PartialState.registry():
        PartialState()._leave()


def _sharing(kind: type[PartialState]) -> PartialState:
    state = kind.__new__(kind)
    # Not the pickled state: the unpickling process has its own rank and device.
    state.__dict__ = PartialState.registry()
    return state
