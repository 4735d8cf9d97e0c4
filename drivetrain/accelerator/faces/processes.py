"""Who am I, who goes first, who speaks: the process control of `PartialState` on the Accelerator."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch

from drivetrain.accelerator.engine_state import AcceleratorState
from drivetrain.runtime.state import DistributedType

Function = TypeVar("Function", bound=Callable[..., Any])


class ProcessControl:
    """Accelerate's process members, each the one of `self.state`."""

    state: AcceleratorState

    @property
    def device(self) -> torch.device:
        """Where this process's tensors live."""
        return self.state.device

    @property
    def distributed_type(self) -> DistributedType:
        """How the processes are spread."""
        return self.state.distributed_type

    @property
    def use_distributed(self) -> bool:
        """Whether there is more than one process."""
        return self.state.use_distributed

    @property
    def multi_device(self) -> bool:
        """Whether there is more than one process, each with a device of its own."""
        return self.state.use_distributed

    @property
    def num_processes(self) -> int:
        """Number of processes of the run."""
        return self.state.num_processes

    @property
    def process_index(self) -> int:
        """Global rank of this process."""
        return self.state.process_index

    @property
    def local_process_index(self) -> int:
        """Rank of this process on its machine."""
        return self.state.local_process_index

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return self.state.is_main_process

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first process of its machine."""
        return self.state.is_local_main_process

    @property
    def is_last_process(self) -> bool:
        """Whether this is the process with the highest rank."""
        return self.state.is_last_process

    def wait_for_everyone(self) -> None:
        """Wait until every process is here."""
        self.state.wait_for_everyone()

    def main_process_first(self) -> AbstractContextManager[None]:
        """Run the body on the main process first, then on the others."""
        return self.state.main_process_first()

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Run the body on each machine's first process first, then on the others."""
        return self.state.local_main_process_first()

    def split_between_processes(
        self, inputs: Any, apply_padding: bool = False, dynamic: bool = False
    ) -> AbstractContextManager[Any]:
        """Give each process its part of `inputs`, or the next item each time; see `PartialState`."""
        return self.state.split_between_processes(inputs, apply_padding, dynamic)

    def on_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """Decorate a function so that only the main process runs it."""
        return self.state.on_main_process(function)

    def on_local_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """Decorate a function so that only each machine's first process runs it."""
        return self.state.on_local_main_process(function)

    def on_last_process(self, function: Function) -> Function:
        """Decorate a function so that only the last process runs it."""
        return self.state.on_last_process(function)

    def on_process(self, function: Function | None = None, process_index: int | None = None) -> Any:
        """Decorate a function so that only the process with this rank runs it."""
        return self.state.on_process(function, process_index)

    def on_local_process(self, function: Function | None = None, local_process_index: int | None = None) -> Any:
        """Decorate a function so that only the process with this rank on its machine runs it."""
        return self.state.on_local_process(function, local_process_index)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print once per machine."""
        self.state.print(*args, **kwargs)
