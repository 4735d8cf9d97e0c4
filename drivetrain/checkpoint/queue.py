"""Saves in the background: at most one at a time, and no error lost."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from drivetrain.checkpoint.save import Save
from drivetrain.checkpoint.storage import Storage
from drivetrain.runtime.errors import deprecated, warn_ignored
from drivetrain.runtime.logging import get_logger
from drivetrain.runtime.state import PartialState

logger = get_logger(__name__)

_SHARED_NAME = "save_queue"


class PendingSave:
    """A checkpoint that is being written, or was.

    Args:
        directory: The checkpoint's directory.
        finished: Whether it is written already.

    Attributes:
        directory: The checkpoint's directory, which is there once this is done without an error.
    """

    def __init__(self, directory: str, finished: bool = False) -> None:
        self.directory = directory
        self._finished = threading.Event()
        if finished:
            self._finished.set()
        self._error: BaseException | None = None
        self._reported = False
        self._callbacks: list[Callable[[PendingSave], None]] = []
        self._lock = threading.Lock()

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
        self._running: PendingSave | None = None
        self.failed: PendingSave | None = None
        state.before_leaving(self._wait_quietly)
        atexit.register(_report, weakref.ref(self))

    @property
    def pending(self) -> PendingSave | None:
        """The save that is in flight, if any."""
        running = self._running
        return running if running is not None and not running.done() else None

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
        optimizers: object = None,
    ) -> PendingSave:
        """Write a checkpoint; call it on all processes. Waits for the one before. See `save_run_state`."""
        if optimizers is not None:
            warn_ignored("save", "optimizers", optimizers, "Leave it out.", since="0.1.0", removed_in="0.3.0")
        self.finish()
        save = Save(directory, shared, own, self._state, step, storage, extra)
        if block:
            save.run()
            return PendingSave(save.directory, finished=True)
        save.copy()
        self._running = pending = PendingSave(save.directory)
        # Not a daemon: the interpreter waits for it at the end. Not a process: a spawned one imports the script again.
        threading.Thread(target=self._work, args=(save, pending), name="drivetrain-save").start()
        return pending

    @deprecated(since="0.1.0", removed_in="0.3.0")
    def prepare(self, tensors: Iterable[Tensor]) -> None:
        """Do nothing: memory for copies comes with the first save in the background."""

    @deprecated(since="0.1.0", removed_in="0.3.0")
    def settle(self) -> None:
        """Do nothing: a save in the background has its copies once it returns, so that anything may change."""

    @property
    @deprecated(since="0.1.0", removed_in="0.3.0")
    def staging_bytes(self) -> int:
        """Return 0: no memory is held for copies between saves."""
        return 0

    @deprecated(since="0.1.0", removed_in="0.3.0", use="finish")
    def release(self) -> None:
        """Wait for the save in flight; its copies go with it."""
        self._wait_quietly()

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
        if self._running is not None:
            self._running._finished.wait()
            self._running = None
        self.check()

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
