"""`AsyncCheckpointIO`: write checkpoints in a background thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from torch import Tensor

from drivetrain.compat.lightning.checkpoint_io import CheckpointIO, TorchCheckpointIO
from drivetrain.runtime.pytrees import recursively_apply

__all__ = ["AsyncCheckpointIO"]


class AsyncCheckpointIO(CheckpointIO):
    """Plugin that copies each checkpoint, and lets another plugin write it in a background thread.

    Old checkpoints are removed in the same thread, after their replacements are written. After a failed write nothing
    more is removed. The error is raised at the next save, or when `fit` ends.
    """

    def __init__(self, checkpoint_io: CheckpointIO | None = None) -> None:
        self._inner = checkpoint_io
        self._thread: ThreadPoolExecutor | None = None
        self._newest: Future[None] | None = None
        self._error: Exception | None = None

    def __getstate__(self) -> dict[str, Any]:
        self._wait()
        return {**self.__dict__, "_thread": None, "_newest": None}

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """The plugin that writes the checkpoints."""
        if self._inner is None:
            self._inner = TorchCheckpointIO()
        return self._inner

    @checkpoint_io.setter
    def checkpoint_io(self, checkpoint_io: CheckpointIO) -> None:
        self._inner = checkpoint_io

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Copy a checkpoint to the CPU, and queue it for writing."""
        self._raise_error()
        copied_args, copied_kwargs = _copied((args, kwargs))
        self._then(lambda: self.checkpoint_io.save_checkpoint(*copied_args, **copied_kwargs))

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Wait until all checkpoints are written, then read one."""
        self._wait()
        return self.checkpoint_io.load_checkpoint(*args, **kwargs)

    def remove_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Queue the removal of a checkpoint, after the writes before it."""
        self._then(lambda: self._error or self.checkpoint_io.remove_checkpoint(*args, **kwargs))

    def teardown(self) -> None:
        """Wait until all checkpoints are written, and stop the thread. Raise the first write error."""
        if self._thread is not None:
            self._thread.shutdown(wait=True)
        self._thread = self._newest = None
        self.checkpoint_io.teardown()
        self._raise_error()

    def _then(self, work: Callable[[], Any]) -> None:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoints")
        self._newest = self._thread.submit(self._do, work)

    def _do(self, work: Callable[[], Any]) -> None:
        try:
            work()
        except Exception as error:  # raised at the next call of the script
            self._error = self._error or error

    def _wait(self) -> None:
        if self._newest is not None:
            self._newest.result()

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error


def _copied(checkpoint: Any) -> Any:
    """Copy a nested structure's tensors to the CPU. Tensors that share memory keep sharing it."""
    made: dict[tuple[Any, ...], Tensor] = {}

    def copy(tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride()
        key = (*place, tensor.dtype, tensor.device) if tensor.numel() else (id(tensor),)
        if key not in made:
            made[key] = tensor.detach().to("cpu", copy=True)
        return made[key]

    return recursively_apply(copy, checkpoint)
