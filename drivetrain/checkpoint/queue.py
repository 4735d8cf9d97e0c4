"""Saves in the background: at most one at a time, and no error lost."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from drivetrain.checkpoint.save import Copying, GlobalPlan, Save, StagingBuffer, addresses_of
from drivetrain.checkpoint.storage import Storage
from drivetrain.runtime.logging import get_logger
from drivetrain.runtime.state import PartialState

logger = get_logger(__name__)

_SHARED_NAME = "save_queue"
# Of generators, metrics and the like, and the room between files; what is not used of it is never touched.
_SMALL_STATES = 64 << 20


class PendingSave:
    """A checkpoint that is being written, or was.

    Attributes:
        directory: The checkpoint's directory, which is there once this is done without an error.
    """

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self._finished = threading.Event()
        self._error: BaseException | None = None
        self._reported = False
        self._callbacks: list[Callable[[PendingSave], None]] = []
        self._lock = threading.Lock()

    @classmethod
    def finished(cls, directory: str) -> PendingSave:
        """One that is written already.

        Args:
            directory: The checkpoint.
        """
        pending = cls(directory)
        pending._finish(None)
        return pending

    def done(self) -> bool:
        """Whether it is written or has failed."""
        return self._finished.is_set()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until it is written.

        Args:
            timeout: Seconds to wait at most; for ever if None.

        Raises:
            CheckpointError: It could not be written; raised on all processes.
            TimeoutError: It is still being written.
        """
        if not self._finished.wait(timeout):
            raise TimeoutError(f"{self.directory} is still being written after {timeout} s.")
        self.raise_if_failed()

    def raise_if_failed(self) -> None:
        """Raise the error that it ended with, if it has; returns at once."""
        if self._error is not None:
            self._reported = True
            raise self._error

    def claim(self) -> None:
        """Take over reporting its error: `SaveQueue.check` and `finish` do not raise it, `wait` does."""
        self._reported = True

    def add_done_callback(self, callback: Callable[[PendingSave], None]) -> None:
        """Call `callback(self)` once it is written or has failed; at once where it is done already.

        It is called in the thread that writes, and `wait()` waits for it too. It may call neither collectives nor
        `wait()`, and should not raise: what it raises is logged.
        """
        with self._lock:
            if not self._finished.is_set():
                self._callbacks.append(callback)
                return
        self._call(callback)

    def failed(self) -> bool:
        """Whether it ended with an error."""
        return self._error is not None

    def _finish(self, error: BaseException | None) -> None:
        self._error = error
        while True:
            with self._lock:
                callbacks, self._callbacks = self._callbacks, []
                if not callbacks:
                    self._finished.set()
                    return
            for callback in callbacks:
                self._call(callback)

    def _call(self, callback: Callable[[PendingSave], None]) -> None:
        try:
            callback(self)
        except Exception:
            logger.exception(f"{self.directory}: what was to happen after the save failed.")


class SaveQueue:
    """Writes checkpoints one after another, in the background where asked.

    Attributes:
        failed: The save whose error was not raised yet, or None.

    Args:
        state: This process among its peers.
    """

    def __init__(self, state: PartialState) -> None:
        self._state = state
        self._buffer = StagingBuffer()
        self._plan: GlobalPlan | None = None
        self._running: PendingSave | None = None
        self._late: Copying | None = None
        self._watched: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self.failed: PendingSave | None = None
        state.before_leaving(self._wait_quietly)
        atexit.register(_report, weakref.ref(self))

    @property
    def pending(self) -> PendingSave | None:
        """The save that is in flight, if any."""
        running = self._running
        return running if running is not None and not running.done() else None

    @property
    def staging_bytes(self) -> int:
        """Memory held for copies of the state."""
        return self._buffer.nbytes

    def save(
        self,
        directory: str | os.PathLike[str],
        shared: Any,
        own: Any,
        *,
        step: int | None = None,
        block: bool = True,
        storage: Storage | None = None,
        extra: str | None = None,
        optimizers: Iterable[Optimizer] = (),
    ) -> PendingSave:
        """Write a checkpoint; call it on all processes. Waits for the one before.

        Args:
            directory: The checkpoint's directory or URL; replaced where it exists.
            shared: What is the same on all processes; its tensors may be sharded DTensors.
            own: What is this process's own.
            step: The optimizer step, for the manifest.
            block: Whether to return only once it is there. Else the state is copied and may change at once.
            storage: Where to; found from `directory` if None.
            extra: A local directory whose content becomes part of the checkpoint; from `extra_place`.
            optimizers: Those whose state nothing but their `step()` changes. Unless `block` is set, it is copied while
                training continues, and the next step of any of them waits for what is left.

        Returns:
            The save; done where `block` is true.

        Raises:
            CheckpointError: It cannot be written, or the one before could not be; raised on all processes.
        """
        self.finish()
        optimizers = list(optimizers)
        parameters, states = _changed_by(optimizers)
        changing = parameters | states
        save = Save(directory, shared, own, self._state, step, storage, extra, self._plan, changing)
        self._plan = save.plan
        if block:
            save.run()
            return PendingSave.finished(save.directory)
        pending = PendingSave(save.directory)
        self._late = save.stage(self._buffer, self._watch(optimizers, states))
        self._running = pending
        # Not a daemon: the interpreter waits for it at the end. Not a process: a spawned one imports the script again.
        threading.Thread(target=self._work, args=(save, pending), name="drivetrain-save").start()
        return pending

    def prepare(self, tensors: Iterable[Tensor]) -> None:
        """Get memory for the first save in the background while training continues; without, that save waits for it.

        Args:
            tensors: What is large of what will be saved: all parameters and the state of their optimizers.
        """
        likely = limit = 0
        for tensor in tensors:
            if isinstance(tensor, DTensor):
                tensor = tensor.to_local()
                likely += tensor.numel() * tensor.itemsize
            else:
                likely += tensor.numel() * tensor.itemsize // self._state.num_processes
            limit += tensor.numel() * tensor.itemsize
        self._buffer.prepare(likely, limit + _SMALL_STATES, self._state.kind)

    def settle(self) -> None:
        """Wait until the copies for the save in flight are made, if any; from then on anything may change."""
        late, self._late = self._late, None
        if late is not None:
            late.finish(torch.get_num_threads())

    def _watch(self, optimizers: Iterable[Optimizer], states: set[int]) -> set[int]:
        """Have steps wait for copies, and return which of the states may so be copied late."""
        unwatched: list[Optimizer] = []
        for optimizer in optimizers:
            if optimizer not in self._watched:
                try:
                    optimizer.register_step_pre_hook(self._before_step)
                except AttributeError:  # it never called Optimizer.__init__
                    unwatched.append(optimizer)
                    continue
                self._watched.add(optimizer)
        return states - _changed_by(unwatched)[1]

    def _before_step(self, *step: Any) -> None:
        if self._late is not None:
            self.settle()

    @property
    def has_lost(self) -> bool:
        """Whether a save in the background has failed whose error was not raised yet. Raises nothing."""
        failed = self.failed
        return failed is not None and not failed._reported

    def check(self) -> None:
        """Raise the error of a save in the background, if one has failed since. Costs next to nothing."""
        if self.failed is not None:
            failed, self.failed = self.failed, None
            if not failed._reported:  # by its own wait(), or by who claimed it
                failed.raise_if_failed()

    def finish(self) -> None:
        """Wait for the save in flight, and raise its error if it failed and that was not raised yet."""
        self.settle()
        if self._running is not None:
            self._running._finished.wait()
            self._running = None
        self.check()

    def release(self) -> None:
        """Wait for the save in flight and give the memory for copies back."""
        self._wait_quietly()
        self._buffer.release()

    def _work(self, save: Save, pending: PendingSave) -> None:
        error: BaseException | None = None
        try:
            save.run()
        except BaseException as raised:
            # Noted before it counts as done, so that none finds it done and nothing wrong.
            pending._error = error = raised
            self.failed = pending
        del save
        pending._finish(error)

    def _wait_quietly(self) -> None:
        if self._running is not None:
            self._running._finished.wait()

    def report(self) -> None:
        """At exit: an error that was never raised is at least logged."""
        self._wait_quietly()
        if self.failed is not None and not self.failed._reported:
            logger.error(f"A checkpoint was lost: {self.failed._error}", main_process_only=False)


# What torch.compiler.disable notes; it would import the compiler, which takes half a second. Compiled steps call it as
# it is, where tracing it would warn of locks.
vars(SaveQueue)["settle"]._torchdynamo_disable = True


def _changed_by(optimizers: Iterable[Optimizer]) -> tuple[set[int], set[int]]:
    """Addresses of the parameters and of the states that optimizers change; the two have none in common."""
    parameters: set[int] = set()
    fixed: set[int] = set()
    states: set[int] = set()
    for optimizer in optimizers:
        # Of another package, or of a class that never called Optimizer.__init__, it may have neither.
        known = getattr(optimizer, "state", None)
        for state in known.values() if isinstance(known, Mapping) else ():
            states |= addresses_of(state.values() if isinstance(state, dict) else ())
        for group in getattr(optimizer, "param_groups", ()):
            for parameter in group["params"]:
                (parameters if parameter.requires_grad else fixed).update(addresses_of([parameter.detach()]))
    return parameters, states - parameters - fixed


def _report(reference: weakref.ref[SaveQueue]) -> None:
    queue = reference()
    if queue is not None:
        queue.report()


def save_queue(state: PartialState) -> SaveQueue:
    """The queue of this process: one for all, so that two saves never meet."""
    shared = PartialState.registry()
    if _SHARED_NAME not in shared:
        shared[_SHARED_NAME] = SaveQueue(state)
    queue: SaveQueue = shared[_SHARED_NAME]
    return queue
