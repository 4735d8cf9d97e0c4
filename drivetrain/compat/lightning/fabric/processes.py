"""The part of Fabric that lets processes work together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from drivetrain.accelerator import Accelerator
from drivetrain.runtime.collectives import broadcast, broadcast_object_list, reduce
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.nested import recursively_apply


class Processes:
    """What a loop asks of all processes."""

    accelerator: Accelerator

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on the main process."""
        self.accelerator.print(*args, **kwargs)

    def barrier(self, name: str | None = None) -> None:
        """Wait for all processes."""
        self.accelerator.wait_for_everyone()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Give all processes one process's object.

        Args:
            obj: Tensors, or anything that can be pickled.
            src: Whose.
        """
        return broadcast(obj, src) if isinstance(obj, Tensor) else broadcast_object_list([obj], src)[0]

    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Stack tensors of all processes along a new first dimension; the tensors themselves in a world of one.

        Args:
            data: Nested structure of tensors of equal shapes.
            group: Taken for Lightning's sake; all processes take part.
            sync_grads: Not supported.
        """
        if sync_grads:
            raise ConfigurationError("all_gather(sync_grads=True) is not supported; use torch.distributed.nn.")
        if self.accelerator.num_processes == 1:
            return data
        return recursively_apply(lambda tensor: self.accelerator.gather(tensor.unsqueeze(0)), data)

    def all_reduce(self, data: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce tensors over all processes.

        Args:
            data: Nested structure of tensors of equal shapes.
            group: Taken for Lightning's sake; all processes take part.
            reduce_op: `"mean"` or `"sum"`.
        """
        return reduce(data, str(reduce_op).lower())

    @contextmanager
    def rank_zero_first(self, local: bool = False) -> Iterator[None]:
        """Let the first process run the body before the others.

        Args:
            local: The first of each machine.
        """
        engine = self.accelerator
        first = engine.local_main_process_first() if local else engine.main_process_first()
        with first:
            yield
