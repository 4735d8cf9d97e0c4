"""The part of Fabric that lets processes work together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from drivetrain.accelerator import Accelerator
from drivetrain.runtime.nested import recursively_apply, send_to_device


class Processes:
    """What a loop asks of all processes."""

    accelerator: Accelerator
    _strategy: Any

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on the main process."""
        self.accelerator.print(*args, **kwargs)

    def barrier(self, name: str | None = None) -> None:
        """Wait for all processes."""
        self._strategy.barrier(name=name)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Give all processes one process's object.

        Args:
            obj: Tensors, or anything that can be pickled.
            src: Whose.
        """
        return self._strategy.broadcast(obj, src=src)

    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Stack tensors of all processes along a new first dimension; the tensors themselves in a world of one.

        Args:
            data: Nested structure of tensors of equal shapes.
            group: Taken for Lightning's sake; all processes take part.
            sync_grads: Whether gradients flow back to each process's tensors.
        """
        gather = partial(self._strategy.all_gather, group=group, sync_grads=sync_grads)
        return recursively_apply(gather, self._on_device(data))

    def all_reduce(self, data: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce tensors over all processes.

        Args:
            data: Nested structure of tensors of equal shapes.
            group: Taken for Lightning's sake; all processes take part.
            reduce_op: `"mean"`, `"sum"`, `"max"`, `"min"`, or torch's `ReduceOp`.
        """
        reduce = partial(self._strategy.all_reduce, group=group, reduce_op=reduce_op)
        return recursively_apply(reduce, self._on_device(data))

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

    def _on_device(self, data: Any) -> Any:
        return send_to_device(data, self._strategy.root_device)
