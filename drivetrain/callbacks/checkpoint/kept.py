"""Which checkpoints of a run there are, and which of them are to go."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

from drivetrain.callbacks.checkpoint.policy import BestK
from drivetrain.callbacks.checkpoint.restored import RestoredState


@dataclass
class KeptCheckpoints:
    """The checkpoints that one `ModelCheckpoint` has written and not yet removed.

    Attributes:
        best: The best ones, or the newest where scores do not count.
        last: The path of `last`, or an empty text.
        newest: The path of the newest one, whatever its score.
        beside: The newest one where it is not among the best, kept for `last` to link to.
        passing: Those written for a run that was about to be ended; a newer one makes them superfluous.
        doomed: Those that a newer one has made superfluous, and that are still to be removed.
    """

    best: BestK
    last: str = ""
    newest: str = ""
    beside: str = ""
    passing: list[str] = field(default_factory=list)
    doomed: list[str] = field(default_factory=list)

    def add(self, path: str, score: float | None, among_best: bool, is_whole: bool = True) -> None:
        """Take in a checkpoint under a name of its own, and record those that go for it.

        Args:
            path: The checkpoint.
            score: Its score, if scores count.
            among_best: Whether it is kept for its score; else only for being the newest.
            is_whole: Whether a run can resume from it.
        """
        if self.beside and self.beside != path:
            self.doomed.append(self.beside)
        self.beside = "" if among_best else path
        if among_best:
            self.doomed += self.best.add(path, score)
        self.record_newest(path, is_whole)

    def record_newest(self, path: str, is_whole: bool = True) -> None:
        """Let a checkpoint be the newest; where a run can resume from it, those for the meantime go."""
        self.newest = path
        if is_whole:
            self.doomed += self.passing
            self.passing = []
        self.doomed = [old for old in dict.fromkeys(self.doomed) if old != path]

    def forget(self, path: str) -> None:
        """Take a checkpoint that was removed off the list."""
        self.best.scores.pop(path, None)
        self.doomed = [old for old in self.doomed if old != path]

    def indispensable(self) -> set[str]:
        """Those that no limit removes: the best by score, `last`, and the newest."""
        best = self.best.scores if self.best.by_score else ()
        return {path for path in (*best, self.last, self.newest, self.beside) if path}

    def copy(self) -> KeptCheckpoints:
        """The same, to return to if a save fails."""
        return copy.deepcopy(self)

    def state_dict(self, directory: str) -> dict[str, Any]:
        """Everything, by names within the directory of the checkpoints.

        Args:
            directory: That directory.
        """
        inside = directory.rstrip("/") + "/"

        def name(path: str) -> str:
            return path.removeprefix(inside)

        return {
            "best_k_models": [[name(path), score] for path, score in self.best.scores.items()],
            "newest_of_best": name(self.best.newest),
            "last_model_path": name(self.last),
            "newest_model_path": name(self.newest),
            "beside": name(self.beside),
            "passing": [name(path) for path in self.passing],
            "doomed": [name(path) for path in self.doomed],
        }

    def restore(self, state: RestoredState, directory: str) -> None:
        """Take everything back.

        Args:
            state: What `state_dict` returned, checked.
            directory: The directory of the checkpoints now.
        """

        def here(name: str) -> str:
            return f"{directory.rstrip('/')}/{name}" if name else ""

        self.best.scores = {here(name): score for name, score in state.scores.items()}
        self.best.newest = here(state.names["newest_of_best"])
        self.last, self.newest = here(state.names["last"]), here(state.names["newest"])
        self.beside = here(state.names["beside"])
        self.passing = [here(name) for name in state.lists["passing"]]
        self.doomed = [here(name) for name in state.lists["doomed"]]
