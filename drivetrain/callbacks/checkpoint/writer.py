"""What happens to a checkpoint once it is decided on: written, then named, then what it replaces removed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from drivetrain import checkpoint
from drivetrain.callbacks.checkpoint import folder
from drivetrain.callbacks.checkpoint.decision import Decision
from drivetrain.callbacks.checkpoint.kept import KeptCheckpoints
from drivetrain.callbacks.support.agreement import decide_on_main_process
from drivetrain.runtime.errors import CheckpointError
from drivetrain.runtime.logging import get_logger

if TYPE_CHECKING:
    from drivetrain.checkpoint import PendingSave
    from drivetrain.trainer.trainer import Trainer

logger = get_logger(__name__)


class CheckpointWriter:
    """Writes the checkpoints of one `ModelCheckpoint`, one at a time, and keeps account of them.

    All methods are called by all processes.

    Args:
        kept: The account.
        links: Whether `last` is a link.
        limit: How many checkpoints the directory may hold; None for any number.
        in_background: Whether training continues while one is written.
        forgives: Whether errors are logged instead of raised.
    """

    def __init__(
        self, kept: KeptCheckpoints, links: bool, limit: int | None, in_background: bool, forgives: bool
    ) -> None:
        self.kept = kept
        self._links = links
        self._limit = limit
        self._in_background = in_background
        self._forgives = forgives
        self._in_flight: _InFlight | None = None
        self._protected: set[str] = set()

    def protect(self, path: str) -> None:
        """Never remove a checkpoint, whatever becomes superfluous.

        Args:
            path: The checkpoint.
        """
        self._protected.add(path)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being written, and no error is left to report."""
        return self._in_flight is None

    def get_ready(self, trainer: Trainer, weights_only: bool) -> None:
        """Get memory for the first copy while training continues. The optimizers have their state by now.

        Args:
            trainer: The trainer.
            weights_only: Whether nothing but weights will be saved.
        """
        if not self._in_background or trainer.model is None:
            return
        tensors: list[Any] = [*trainer.model.parameters(), *trainer.model.buffers()]
        if not weights_only:
            for optimizer in trainer.optimizers:
                states = (state for state in optimizer.state.values() if isinstance(state, dict))
                tensors += (value for state in states for value in state.values())
        checkpoint.save_queue(trainer.accelerator.state).prepare(one for one in tensors if isinstance(one, Tensor))

    def save(self, trainer: Trainer, directory: str, decision: Decision, weights_only: bool) -> None:
        """Write a checkpoint, at once or in the background; `settle` came before.

        Args:
            trainer: The trainer.
            directory: The directory of checkpoints.
            decision: What and where.
            weights_only: Leave out everything but the weights.

        Raises:
            CheckpointError: It cannot be written; then all is as it was before.
        """
        target = decision.target
        if target is None:
            return
        if trainer.saves is not None:
            trainer.saves.finish()  # what others save reports its own error, which is not forgiven here
        before = self.kept.copy()
        # The account is part of the checkpoint, so it is brought up to date first.
        if decision.path is not None:
            self.kept.add(decision.path, decision.score, decision.among_best, is_whole=not weights_only)
        else:
            self.kept.record_newest(target, is_whole=not weights_only)
        if decision.last is not None:
            self.kept.last = decision.last
            self.kept.doomed += [decision.gone] if decision.gone else []
        files = trainer.checkpoint_files
        names = (decision.path, decision.last)
        named_twice = None not in names and (self._links or files.has_second_names(directory))
        after = _Once(lambda: self._follow_up(directory, decision, named_twice, files))
        targets = [path for path in names if path is not None]
        if named_twice:
            del targets[1:]  # the other one is a link or a copy
        try:
            if self._in_background:
                for path in targets:
                    pending = trainer.save_checkpoint(path, weights_only=weights_only, block=False)
                pending.claim()
                self._in_flight = _InFlight(pending, before, after)
                if trainer.is_global_zero:
                    pending.add_done_callback(lambda done: None if done.failed() else after.run_quietly())
            else:
                for path in targets:
                    trainer.save_checkpoint(path, weights_only)
        except CheckpointError as error:
            self._take_back(before, error)
        else:
            if not self._in_background:
                self._finish(after)

    def save_now(self, trainer: Trainer, path: str, is_passing: bool) -> bool:
        """Write a checkpoint with everything in it, at once.

        Args:
            trainer: The trainer.
            path: Where.
            is_passing: Whether a newer checkpoint makes it superfluous.

        Returns:
            Whether it was written.

        Raises:
            CheckpointError: It cannot be written.
        """
        self.settle(forgive=True)
        if trainer.saves is not None:
            try:
                trainer.saves.finish()
            except CheckpointError as error:
                logger.error(f"{error} Another one is saved now.")
        before = self.kept.copy()
        if is_passing:
            self.kept.passing = [*(old for old in self.kept.passing if old != path), path]
        self.kept.newest = path
        try:
            trainer.save_checkpoint(path)
        except CheckpointError as error:
            self._take_back(before, error)
            return False
        return True

    def poll(self, trainer: Trainer) -> None:
        """Let an error in the background end the run, as soon as it can be raised on all processes."""
        flight = self._in_flight
        if flight is None or not flight.pending.failed():
            return
        if self._forgives or trainer.world_size == 1:
            self.settle()
        else:
            # They agree on the step to stop at, and raise when training is over.
            trainer.control.request_stop(
                "ModelCheckpoint: a checkpoint could not be written in the background", for_good=False
            )

    def settle(self, forgive: bool = False) -> None:
        """Wait until what is being written is done.

        Args:
            forgive: Log an error even where errors are to be raised.

        Raises:
            CheckpointError: It could not be written; raised on all processes.
        """
        flight, self._in_flight = self._in_flight, None
        if flight is None:
            return
        try:
            flight.pending.wait()
        except CheckpointError as error:
            self._take_back(flight.before, error, forgive)
        else:
            self._finish(flight.after, forgive)

    def abandon(self, wait: bool) -> None:
        """Leave what is being written to itself, without an exchange with other processes.

        Args:
            wait: Whether to wait until it is done.
        """
        flight, self._in_flight = self._in_flight, None
        if flight is None:
            return
        if not wait:
            flight.pending.add_done_callback(_log_failure)
            return
        try:
            flight.pending.wait()
            flight.after.run()
        except CheckpointError as error:
            logger.error(f"ModelCheckpoint: {error}")

    def _finish(self, after: _Once, forgive: bool = False) -> None:
        try:
            removed = decide_on_main_process(after.run)
        except CheckpointError as error:
            if not (self._forgives or forgive):
                raise _with_way_out(error) from error
            logger.error(f"ModelCheckpoint: {error} The run continues.")
            return
        for path in removed:
            self.kept.forget(path)

    def _follow_up(
        self, directory: str, decision: Decision, named_twice: bool, files: checkpoint.CheckpointFiles
    ) -> list[str]:
        """Do what can be done once the checkpoint is durable; returns what was removed."""
        if named_twice and decision.path is not None and decision.last is not None:
            if self._links:
                folder.link(decision.last, decision.path)
            else:
                folder.duplicate(decision.last, decision.path)
        gone = list(self.kept.doomed)
        for path in gone:
            if path not in self._protected:
                folder.remove(path, files)
        if self._limit is not None:
            beyond = folder.surplus(directory, self._limit, self.kept.indispensable() | self._protected)
            for path in beyond:
                folder.remove(path, files)
            gone += beyond
        return gone

    def _take_back(self, before: KeptCheckpoints, error: CheckpointError, forgive: bool = False) -> None:
        self.kept = before
        if not (self._forgives or forgive):
            raise _with_way_out(error) from error
        logger.error(f"ModelCheckpoint: {error} The run continues; the checkpoints before this one are intact.")


def _with_way_out(error: CheckpointError) -> CheckpointError:
    """The error of a save, such as a full disk, with what may be done about it."""
    return type(error)(
        f"{error} The checkpoints before this one are intact. With ModelCheckpoint(on_save_error='warn') a run "
        "continues where a checkpoint cannot be written."
    )


def _log_failure(pending: PendingSave) -> None:
    try:
        pending.raise_if_failed()
    except CheckpointError as error:
        logger.error(f"ModelCheckpoint: {error}")


@dataclass
class _InFlight:
    """A save in the background, what there was before it, and what follows once it is durable."""

    pending: PendingSave
    before: KeptCheckpoints
    after: _Once


class _Once:
    """Work of the main process that is done once, in whichever thread comes first.

    Args:
        work: What to do.
    """

    def __init__(self, work: Callable[[], list[str]]) -> None:
        self._work: Callable[[], list[str]] | None = work
        self._lock = threading.Lock()
        self._result: list[str] = []
        self._error: Exception | None = None

    def run(self) -> list[str]:
        """Do it, or wait for the thread that does.

        Raises:
            Exception: It failed, now or then.
        """
        with self._lock:
            work, self._work = self._work, None
            if work is not None:
                try:
                    self._result = work()
                except Exception as error:
                    self._error = error
        if self._error is not None:
            raise self._error
        return self._result

    def run_quietly(self) -> None:
        """Do it; what it raises is raised by the next `run`."""
        try:
            self.run()
        except Exception:
            pass
