"""Which checkpoints to keep and what to call them; independent of how they are stored."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from drivetrain.callbacks.support.monitored_metric import is_better
from drivetrain.runtime.errors import ConfigurationError

_FIELD = re.compile(r"\{([^{}:]+)(:[^{}]*)?\}")


class BestK:
    """The best k checkpoints: paths and scores.

    Args:
        k: How many to keep; -1 for all, 0 for none.
        mode: `"min"` where a lower score is better, `"max"` where a higher one is.
        by_score: Keep those with the best scores. With False the newest are kept.
    """

    def __init__(self, k: int, mode: str, by_score: bool) -> None:
        self.k = k
        self.mode = mode
        self.by_score = by_score
        self.scores: dict[str, float] = {}  # path -> score, in the order in which they were saved
        self.newest: str = ""

    @property
    def best(self) -> str:
        """The path of the best checkpoint, or an empty text; where scores do not count, of the newest."""
        if not self.by_score:
            return self.newest
        best = ""
        for path, score in self.scores.items():
            if not best or is_better(score, self.scores[best], self.mode):
                best = path
        return best

    @property
    def worst(self) -> str:
        """The path of the checkpoint that goes first, or an empty text."""
        return self._worst_of(self.scores)

    def wants(self, score: float | None) -> bool:
        """Whether a checkpoint with this score is to be kept. One whose score is NaN never is."""
        if self.k == 0:
            return False
        if not self.by_score:
            return True
        if score is None or score != score:
            return False
        if self.k < 0 or len(self.scores) < self.k:
            return True
        return is_better(score, self.scores[self.worst], self.mode)

    def displaced(self) -> list[str]:
        """Return the paths of the checkpoints that have to go when one more comes."""
        left, gone = dict(self.scores), []
        while 0 < self.k <= len(left):
            gone.append(self._worst_of(left))
            del left[gone[-1]]
        return gone

    def add(self, path: str, score: float | None) -> list[str]:
        """Take a checkpoint in; returns the paths of those that go for it."""
        gone = [] if path in self.scores else self.displaced()
        for old in (path, *gone):
            self.scores.pop(old, None)
        self.scores[path] = 0.0 if score is None else score
        self.newest = path
        return gone

    def _worst_of(self, scores: Mapping[str, float]) -> str:
        worst = ""
        for path, score in scores.items():
            # Of equals the one that came later goes first; where scores do not count, the oldest one does.
            if not worst or (self.by_score and not is_better(score, scores[worst], self.mode)):
                worst = path
        return worst


class CheckpointName:
    """The name of a checkpoint, from a template such as `"{epoch}-{val_loss:.3f}"`.

    Args:
        template: Text with the names of metrics in braces, each with a format after a colon if wanted;
            `epoch` and `step` are always there.
        insert_names: Write `epoch=3` rather than `3`.
        equals: What stands between a name and its value.
        missing: What stands for a metric that was not logged.
    """

    def __init__(
        self, template: str, insert_names: bool = True, equals: str = "=", missing: float = float("nan")
    ) -> None:
        self.template = template
        self.insert_names = insert_names
        self.equals = equals
        self.missing = missing

    @property
    def fields(self) -> list[str]:
        """The names in braces."""
        return [match[1] for match in _FIELD.finditer(self.template)]

    def format(self, epoch: int, step: int, metrics: Mapping[str, Any]) -> str:
        """Return the name.

        Args:
            epoch: The current epoch, from 0.
            step: The number of optimizer steps so far.
            metrics: Names and values of what was logged.

        Raises:
            ConfigurationError: If a format does not fit its value.
        """

        def fill(match: re.Match[str]) -> str:
            name, style = match[1], (match[2] or ":")[1:]
            value: Any = {"epoch": epoch, "step": step}.get(name)
            if value is None:
                value = float(metrics[name]) if name in metrics else self.missing
            try:
                text = format(value, style)
            except ValueError as error:
                raise ConfigurationError(
                    f"The checkpoint name {self.template!r} writes {name} = {value!r} as {style!r}: {error}. "
                    "Use a format for numbers, such as {epoch:02d} or {val_loss:.3f}.",
                    code="DT-007",
                ) from None
            # A metric's name may hold a slash, which would make a directory.
            return f"{name.replace('/', '_')}{self.equals}{text}" if self.insert_names else text

        return _FIELD.sub(fill, self.template)
