"""Calls that run one after the other on a thread of their own."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

Call = Callable[[], Any]
Item = tuple[Call, int]


class CallQueue:
    """A bounded queue of calls and the thread that makes them; the thread lives while there is anything to do.

    Args:
        name: The name of the thread.
        run: Makes one call, given with the number of values that it writes; it must not raise.
        limit: How many calls may wait.
    """

    def __init__(self, name: str, run: Callable[[Call, int], None], limit: int) -> None:
        self._name, self._run, self._limit = name, run, limit
        self._items: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._pending = 0
        self._generation = 0
        self._thread: threading.Thread | None = None

    @property
    def pending(self) -> int:
        """How many calls wait or run."""
        return self._pending

    @property
    def is_current(self) -> bool:
        """Whether this is the thread that makes the calls."""
        return threading.current_thread() is self._thread

    def put(self, call: Call, values: int = 1, *, always: bool = False) -> bool:
        """Let the thread make a call after those before it; returns at once.

        Args:
            call: The call.
            values: How many values it writes.
            always: Take it even where the queue is full.

        Returns:
            Whether there was room.
        """
        with self._changed:
            if self._pending >= self._limit and not always:
                return False
            self._pending += 1
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=self._work, args=(self._items, self._generation), name=self._name, daemon=True
                )
                self._thread.start()
        self._items.put((call, values))
        return True

    def drain(self, timeout: float) -> bool:
        """Wait until all calls are made; returns whether they are."""
        with self._changed:
            return self._changed.wait_for(lambda: self._pending == 0, timeout)

    def stop(self) -> int:
        """End the thread after the call that it makes now, if any; returns how many values still waited."""
        with self._changed:
            items, self._items = self._items, queue.SimpleQueue()
            idle = self._thread if self._pending == 0 else None
            self._generation += 1
            self._pending, self._thread = 0, None
        waiting = 0
        while True:
            try:
                item = items.get_nowait()
            except queue.Empty:
                break
            waiting += item[1] if item is not None else 0
        items.put(None)
        if idle is not None and not self.is_current:
            idle.join(1.0)
        return waiting

    def _work(self, items: queue.SimpleQueue[Item | None], generation: int) -> None:
        while (item := items.get()) is not None:
            self._run(*item)
            del item  # the values of a call that is made are not kept
            with self._changed:
                if generation == self._generation:
                    self._pending -= 1
                    self._changed.notify_all()
