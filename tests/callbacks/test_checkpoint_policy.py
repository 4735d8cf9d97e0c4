from __future__ import annotations

import math

import pytest

from drivetrain import ConfigurationError
from drivetrain.callbacks.checkpoint_files import BestK, CheckpointName


def kept_after(scores: list[float | None], k: int, mode: str = "min", by_score: bool = True) -> BestK:
    keep = BestK(k, mode, by_score)
    for number, score in enumerate(scores):
        if keep.wants(score):
            keep.add(str(number), score)
    return keep


@pytest.mark.parametrize(
    ("scores", "k", "mode", "kept", "best"),
    [
        ([3, 1, 2], 1, "min", ["1"], "1"),
        ([3, 1, 2], 1, "max", ["0"], "0"),
        ([3, 1, 2, 0.5], 2, "min", ["1", "3"], "3"),
        ([3, 1, 2, 4], 2, "max", ["0", "3"], "3"),
        ([3, 1, 2], -1, "min", ["0", "1", "2"], "1"),
        ([3, 1, 2], 0, "min", [], ""),
        ([1, 1, 1], 1, "min", ["0"], "0"),
        ([1, 1, 0], 2, "min", ["0", "2"], "2"),
        ([math.nan, 2, math.nan], 1, "min", ["1"], "1"),
        ([math.nan, math.nan], -1, "max", [], ""),
        ([math.inf, 2], 1, "min", ["1"], "1"),
        ([-math.inf, 2], 1, "max", ["1"], "1"),
    ],
)
def test_the_best_scores_are_kept(scores: list[float], k: int, mode: str, kept: list[str], best: str) -> None:
    keep = kept_after(scores, k, mode)  # type: ignore[arg-type]
    assert list(keep.scores) == kept
    assert keep.best == best


def test_the_newest_are_kept_where_scores_do_not_count() -> None:
    keep = kept_after([None, None, None], 2, by_score=False)
    assert list(keep.scores) == ["1", "2"]
    assert keep.best == "2"


def test_adding_names_those_that_go() -> None:
    keep = kept_after([3, 2], 2)
    assert keep.worst == "0"
    assert keep.displaced() == ["0"]
    assert keep.add("new", 1.0) == ["0"]
    assert keep.add("new", 0.5) == []
    assert keep.scores == {"1": 2.0, "new": 0.5}


def test_fewer_are_kept_from_now_on_if_k_was_lowered_between_runs() -> None:
    keep = kept_after([3, 2, 1], 3)
    keep.k = 1
    assert keep.add("3", 0.5) == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("template", "insert", "expected"),
    [
        ("{epoch}-{step}", True, "epoch=3-step=120"),
        ("{epoch}-{val_loss:.3f}", True, "epoch=3-val_loss=0.123"),
        ("{epoch:03d}", False, "003"),
        ("model-{epoch}-{val_loss:.1e}", False, "model-3-1.2e-01"),
        ("{val/acc:.2f}", True, "val_acc=0.50"),
        ("best", True, "best"),
        ("{missing:.2f}", True, "missing=nan"),
    ],
)
def test_names_are_made_from_templates(template: str, insert: bool, expected: str) -> None:
    metrics = {"val_loss": 0.1234, "val/acc": 0.5}
    assert CheckpointName(template, insert).format(epoch=3, step=120, metrics=metrics) == expected


def test_a_format_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"val_loss = 0.5 with 'd'.*Use a format for numbers"):
        CheckpointName("{val_loss:d}").format(0, 0, {"val_loss": 0.5})
