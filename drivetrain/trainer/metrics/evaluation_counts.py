"""How many batches were evaluated."""

from __future__ import annotations


class EvaluationCounts(dict[str, int]):
    """Batches of each loader, in all evaluations of a kind; those within `fit` and those of a verb are of two kinds.

    Attributes:
        alone: Whether the verb under way only evaluates.
    """

    alone = False

    def count(self, stage: str, loader: int) -> int:
        """Count a batch. Returns how many there were before.

        Args:
            stage: `"validate"`, `"test"` or `"predict"`.
            loader: The number of its loader.
        """
        key = f"{_kind(stage, self.alone)}/{loader}"
        before = self.get(key, 0)
        self[key] = before + 1
        return before

    def total(self, stage: str, alone: bool) -> int:
        """Batches of a kind of evaluation so far, of all loaders.

        Args:
            stage: `"validate"`, `"test"` or `"predict"`.
            alone: Of the verb, rather than within `fit`.
        """
        return sum(count for key, count in self.items() if key.startswith(f"{_kind(stage, alone)}/"))


def _kind(stage: str, alone: bool) -> str:
    return f"{stage} alone" if alone else stage
