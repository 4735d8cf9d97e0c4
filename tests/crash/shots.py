"""Where and when a rank of the crash harness is killed: drawn anew for each attempt of a run, from a seed."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from drivetrain import Callback, Task, Trainer

MOST_BATCHES = 10  # of an attempt: a bound on how far a killed attempt gets
LAST_CHANCE = "the last batch that it may reach"
_FILE_EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate")


class Shot(Callback):
    """Kills this process with SIGKILL, once.

    Args:
        home: the run's directory; each shot leaves a line there that says where it hit.
        kind: `"moment"`, some time after a batch; `"save"`, at a file operation of the checkpoint that is saved after
            a batch; `"resume"`, at a file operation before the first batch; `"start"`, some time after the imports.
        batches: after how many batches to draw the gun, at most `MOST_BATCHES`, after which it shoots anyway.
        events: at which file operation.
        delay: how many seconds later.
    """

    def __init__(self, home: Path, attempt: int, kind: str, batches: int, events: int, delay: float) -> None:
        self.home = home
        self.attempt = attempt
        self.kind = kind
        self.batches = batches
        self.events = events
        self.delay = delay
        self._seen = 0
        self._armed = kind == "resume"
        if kind in ("resume", "save"):
            sys.addaudithook(self._on_audit)
            os.fsync = self._watched(os.fsync)
        elif kind == "start":
            self._shoot_later()

    @classmethod
    def of_this_attempt(cls, home: Path, kills: int, seed: int) -> Shot | None:
        """The shot that this process gets in this attempt of its run; None if it is another's turn, or nobody's."""
        attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        drawn = random.Random(f"{seed}/{attempt}")
        victim = drawn.randrange(int(os.environ["WORLD_SIZE"]))
        kind = drawn.choices(["moment", "save", "resume", "start"], [4, 5, 1, 1])[0]
        batches, events = drawn.randint(1, MOST_BATCHES - 2), drawn.randint(1, 24)
        delay = drawn.random() * (0.03 if kind == "moment" else 0.5)
        if attempt >= kills or int(os.environ["RANK"]) != victim:
            return None
        return cls(home, attempt, kind, batches, events, delay)

    def on_train_batch_end(self, trainer: Trainer, task: Task, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.batches -= 1
        if self.batches == 0 and self.kind == "moment":
            self._shoot_later()
        elif self.batches == 0 and self.kind == "save":
            self._armed = True
        if self.batches <= -MOST_BATCHES:
            self.shoot(LAST_CHANCE)

    def shoot(self, where: str) -> None:
        """End this process here and now."""
        line = {"attempt": self.attempt, "rank": int(os.environ["RANK"]), "kind": self.kind, "where": where}
        self._armed = False
        with (self.home / "shots").open("ab", buffering=0) as file:
            file.write(f"{json.dumps(line)}\n".encode())
        os.kill(os.getpid(), signal.SIGKILL)

    def _shoot_later(self) -> None:
        def shoot() -> None:
            time.sleep(self.delay)
            self.shoot(f"{self.delay:.3f} s later")

        threading.Thread(target=shoot, daemon=True).start()

    def _on_audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._armed and event in _FILE_EVENTS and f"{self.home}/checkpoints" in str(arguments[0]):
            self._count(f"{event} {Path(str(arguments[0])).name}")

    def _watched(self, fsync: Callable[[Any], None]) -> Callable[[Any], None]:
        def watched(file: Any) -> None:
            if self._armed:
                self._count("before fsync")
            fsync(file)
            if self._armed:
                self._count("after fsync")

        return watched

    def _count(self, where: str) -> None:
        self._seen += 1
        if self._seen == self.events:
            self.shoot(where)
