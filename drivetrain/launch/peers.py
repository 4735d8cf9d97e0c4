"""How the launchers of several machines keep in step: failures, ends, signs of life, and counts of attempts.

Torch's elastic agents do not inform each other: a machine whose ranks wait for a dead peer learns of it by a time-out.
Here each launcher writes into the store that all of them share, and reads what the others wrote.
"""

from __future__ import annotations

import json
import time

from torch.distributed import Store  # type: ignore[attr-defined]

from drivetrain.launch.ranks import LOST_AFTER
from drivetrain.launch.report import RankFailure, first_failure

_POLL_INTERVAL = 1.0  # seconds between two questions to the store while all is well
_SETTLE = 2.5  # seconds in which machines that see one failure write theirs, or that they have none
_STACKS_TIME = 4.0  # seconds that other machines have to ask their ranks for their stacks
_FAREWELL = 3.0  # seconds that the machine that serves the store waits for the others to have read


def agree_on_counts(store: Store, machine: int, machines: int, attempts: int, failures: int) -> tuple[int, int]:
    """Count alike on every machine, also on one that has joined late.

    Args:
        store: One that only this round's machines have written to.
        machine: Index of this one.
        machines: How many there are.
        attempts: How often this machine has started its ranks.
        failures: How many of these ended in a failure.

    Returns:
        The largest of each over all machines.
    """
    if machines == 1:
        return attempts, failures
    store.set(f"drivetrain/counts/{machine}", json.dumps([attempts, failures]))
    counts = [json.loads(store.get(f"drivetrain/counts/{peer}")) for peer in range(machines)]
    return max(count[0] for count in counts), max(count[1] for count in counts)


class Peers:
    """The launchers of all machines of a run, seen from one of them, during one attempt.

    Args:
        store: The store that the rendezvous gave.
        machine: Index of this one.
        machines: How many there are.
        attempt: Number of restarts so far.
    """

    def __init__(self, store: Store, machine: int, machines: int, attempt: int) -> None:
        self._store = store
        self._machine = machine
        self._machines = machines
        self._prefix = f"drivetrain/attempt{attempt}"
        self._next_poll = 0.0
        self._beats = 0
        self._last_signs = {peer: (-1, time.monotonic()) for peer in range(machines) if peer != machine}

    def publish(self, failure: RankFailure | None) -> None:
        """Publish to the others how the first rank of this machine failed; None if it was only stopped."""
        if self._machines == 1:
            return
        self._write("failed", failure.to_json() if failure is not None else "")
        self._write_for_all("failed")

    def publish_stopping(self) -> None:
        """Publish to the others that this launcher was asked to end, and will not start its ranks again."""
        if self._machines > 1:
            self._write("stopping", "1")

    def any_stopping(self) -> bool:
        """Whether another launcher was asked to end."""
        return self._any_wrote("stopping")

    def failed_elsewhere(self) -> bool:
        """Whether another machine has published a failure."""
        if self._machines == 1:
            return False
        try:
            return bool(self._store.check([f"{self._prefix}/failed"]))
        except RuntimeError:
            # Not a failure by itself: machine 0 may be through and gone while others still write files.
            self._machines = 1
            return False

    def collect_stacks(self, own: str) -> str:
        """The lines of all machines about their ranks, after asking them, a few seconds at most.

        Args:
            own: The lines about this machine's ranks.
        """
        if self._machines == 1:
            return own
        self._write("stacks", own)
        self._write_for_all("stacks_wanted")
        found = [own]
        try:
            deadline = time.monotonic() + _STACKS_TIME
            while not self._store.check(self._keys("stacks")) and time.monotonic() < deadline:
                time.sleep(0.05)
            found = []
            for machine, key in enumerate(self._keys("stacks")):
                here = self._store.check([key])
                found.append(self._store.get(key).decode() if here else f"  machine {machine} did not answer.")
        except RuntimeError:
            pass  # the machine that serves the store is gone
        return "\n".join(found)

    def stacks_wanted(self) -> bool:
        """Whether another machine asks for the stacks of this one's ranks, which it was not given yet."""
        if self._machines == 1:
            return False
        try:
            asked = self._store.check([f"{self._prefix}/stacks_wanted"])
            return bool(asked) and not self._store.check([f"{self._prefix}/stacks/{self._machine}"])
        except RuntimeError:
            return False

    def give_stacks(self, own: str) -> None:
        """Answer a machine that asks for stacks."""
        self._write("stacks", own)

    def is_time_to_poll(self) -> bool:
        """Whether it is time to ask the store again; it is asked once in a while only, and given a sign of life."""
        now = time.monotonic()
        if self._machines == 1 or now < self._next_poll:
            return False
        self._next_poll = now + _POLL_INTERVAL
        self._beats += 1
        self._write("alive", str(self._beats))
        return True

    def lost(self) -> list[int]:
        """Machines that gave no sign of life for `LOST_AFTER` seconds."""
        now = time.monotonic()
        try:
            for peer, (beats, _) in self._last_signs.items():
                if self._machines == 1 or not self._store.check([key := f"{self._prefix}/alive/{peer}"]):
                    continue
                if (new := int(self._store.get(key))) != beats:
                    self._last_signs[peer] = (new, now)
        except RuntimeError:
            self._machines = 1
        if self._machines == 1:
            return []
        return [peer for peer, (_, last) in self._last_signs.items() if now - last > LOST_AFTER]

    def all_done(self) -> bool:
        """Publish that this machine's ranks have ended well; whether those of all others have too."""
        if self._machines == 1:
            return True
        self._write("done", "1")
        try:
            return self._machines == 1 or bool(self._store.check(self._keys("done")))
        except RuntimeError:
            return True  # the machine that serves the store has seen everybody and left

    def agree_on_first(self, own: RankFailure | None, *, final: bool = True) -> RankFailure | None:
        """Find the first failure over all machines, after this machine's ranks have ended.

        Args:
            own: The first of this machine.
            final: Whether this launcher ends now, and must stay until the others have read.

        Returns:
            The failure with the earliest time by the machines' clocks; `own` where none answers.
        """
        if self._machines == 1:
            return own
        self.publish(own)
        found = [own] if own is not None else []
        try:
            deadline = time.monotonic() + _SETTLE
            while not self._store.check(self._keys("failed")) and time.monotonic() < deadline:
                time.sleep(0.05)
            for key in self._keys("failed"):
                if self._store.check([key]) and (published := self._store.get(key).decode()):
                    found.append(RankFailure.from_json(published))
            if final:
                self._await_readers()
        except RuntimeError:
            pass  # the machine that serves the store has read everything and left
        return first_failure(found) if found else None

    def _await_readers(self) -> None:
        """Stay until everybody has read, for one of us serves the store."""
        self._write("read", "1")
        deadline = time.monotonic() + _FAREWELL
        while not self._store.check(self._keys("read")) and time.monotonic() < deadline:
            time.sleep(0.05)

    def _keys(self, what: str) -> list[str]:
        return [f"{self._prefix}/{what}/{machine}" for machine in range(self._machines)]

    def _write(self, what: str, value: str) -> None:
        try:
            self._store.set(f"{self._prefix}/{what}/{self._machine}", value)
        except RuntimeError:
            self._machines = 1

    def _write_for_all(self, what: str) -> None:
        try:
            self._store.set(f"{self._prefix}/{what}", "1")
        except RuntimeError:
            self._machines = 1  # the machine that served the store is gone

    def _any_wrote(self, what: str) -> bool:
        try:
            return any(self._store.check([key]) for key in self._keys(what) if self._machines > 1)
        except RuntimeError:
            return False
