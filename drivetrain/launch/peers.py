"""How the launchers of several machines tell each other that a rank has failed.

Torch's elastic agents do not: a machine whose ranks wait for a dead peer learns of it by a time-out. Here
each launcher writes its first failure into the store that all of them share, and looks for the others'.
"""

from __future__ import annotations

import time

from torch.distributed import Store  # type: ignore[attr-defined]

from drivetrain.launch.report import RankFailure, first_failure

_LOOK_INTERVAL = 1.0  # seconds between two questions to the store while all is well
_SETTLE = 0.5  # seconds in which machines that see one failure write theirs
_FAREWELL = 3.0  # seconds that the machine that serves the store waits for the others to have read


class Peers:
    """The launchers of all machines of a run, seen from one of them.

    Args:
        store: the store that the rendezvous gave.
        machine: index of this one.
        machines: how many there are.
        attempt: number of restarts so far.
    """

    def __init__(self, store: Store, machine: int, machines: int, attempt: int) -> None:
        self._store = store
        self._machine = machine
        self._machines = machines
        self._prefix = f"drivetrain/attempt{attempt}"
        self._next_look = 0.0
        self._published = False

    def publish(self, failure: RankFailure) -> None:
        """Tell the others how the first rank of this machine failed."""
        if self._machines == 1 or self._published:
            return
        self._published = True
        try:
            self._store.set(f"{self._prefix}/failed/{self._machine}", failure.to_json())
            self._store.set(f"{self._prefix}/failed", "1")
        except RuntimeError:
            self._machines = 1  # whoever served the store is gone: nobody is left to tell

    def failed_elsewhere(self) -> bool:
        """Whether another machine has told of a failure; asks the store once in a while only."""
        now = time.monotonic()
        if self._machines == 1 or now < self._next_look:
            return False
        self._next_look = now + _LOOK_INTERVAL
        try:
            return bool(self._store.check([f"{self._prefix}/failed"]))
        except RuntimeError:
            # Not a failure by itself: machine 0 may be through and gone while others still write files.
            self._machines = 1
            return False

    def agree_on_first(self, own: RankFailure | None) -> RankFailure | None:
        """Find the first failure over all machines, after this machine's ranks have ended.

        Returns:
            The failure with the earliest time by the machines' clocks; `own` where nobody answers.
        """
        if self._machines == 1:
            return own
        time.sleep(_SETTLE)
        found = [own] if own is not None else []
        try:
            for machine in range(self._machines):
                key = f"{self._prefix}/failed/{machine}"
                if machine != self._machine and self._store.check([key]):
                    found.append(RankFailure.from_json(self._store.get(key).decode()))
            self._say_farewell()
        except RuntimeError:
            pass  # the machine that serves the store has read everything and left
        return first_failure(found) if found else None

    def _say_farewell(self) -> None:
        """Stay until everybody has read, for one of us serves the store."""
        self._store.set(f"{self._prefix}/read/{self._machine}", "1")
        everybody = [f"{self._prefix}/read/{machine}" for machine in range(self._machines)]
        deadline = time.monotonic() + _FAREWELL
        while not self._store.check(everybody) and time.monotonic() < deadline:
            time.sleep(0.05)
