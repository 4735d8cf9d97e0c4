"""What `drivetrain verify` concludes from records: rounding, the first difference, and its cause."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drivetrain.verification.causes import diagnose
from drivetrain.verification.compare import Comparison, Run, difference, relative
from drivetrain.verification.run import VerificationResult

Edit = Callable[[Run], None]
STEPS, ROWS = 4, 8


def made(processes: int) -> Run:
    """Return the records of a sound run, in which each process trains on its share of the rows."""
    ranks = []
    for rank in range(processes):
        steps = []
        for step in range(STEPS):
            rows = [f"row {step * ROWS + number}" for number in range(rank, ROWS, processes)]
            share = {"loader": 0, "index": step, "rows": rows, "padding": 0, "counts": {"0 not 0": 4.0 + rank}}
            values = {"first.weight": [2.0, 0.5, -0.25], "head.bias": [1.0, 0.1, 0.2], "scale": [0.5, 0.5]}
            steps.append(
                {
                    "batches": [share],
                    "losses": [1.0 / (1 + step)],
                    "gradients": copy.deepcopy(values),
                    "elements": {name: each[1:] for name, each in values.items()},
                    "clipped": 1.5,
                    "rates": [0.1 / (1 + step)],
                    "skipped": False,
                    "generators": {"NumPy's": "a digest"},
                    "weights": {name: each[1:] for name, each in values.items()},
                    "buffers": {"seen": [3.0, 3.0]},
                }
            )
        ranks.append(
            {
                "steps": steps,
                "logged": [{"step": 1, "values": {"accuracy": 0.75}}],
                "start": {"first.weight": [0.5, -0.25], "head.bias": [0.1, 0.2], "scale": [0.5]},
                "loaders": 1,
                "shards": processes,
                "shard": rank,
                "strategy": "ddp",
                "precision": "32",
                "normalizations": [],
                "not_held": [],
                "unplaced": [],
                "computes_loss": True,
            }
        )
    return Run(ranks)


def judged(edit: Edit, precision: str = "32", rounding: Edit = lambda run: None) -> VerificationResult:
    subject, single, noisy = made(2), made(1), made(1)
    for rank in subject.ranks:
        rank["precision"] = precision
    edit(subject)
    rounding(noisy)
    return VerificationResult.of(Comparison(subject, single, single, noisy), made(1), precision)


def at(step: int, change: Callable[[dict[str, Any], int], Any]) -> Edit:
    """Return an edit that changes one step of each rank. The change takes the step's record and the rank."""

    def edit(run: Run) -> None:
        for number, rank in enumerate(run.ranks):
            change(rank["steps"][step], number)

    return edit


def every(change: Callable[[dict[str, Any], int], Any]) -> Edit:
    """Return an edit that changes the record of each rank."""

    def edit(run: Run) -> None:
        for number, rank in enumerate(run.ranks):
            change(rank, number)

    return edit


def both(*edits: Edit) -> Edit:
    def edit(run: Run) -> None:
        for each in edits:
            each(run)

    return edit


def scaled(name: str, factor: float, only: str = "") -> Callable[[dict[str, Any], int], None]:
    def change(step: dict[str, Any], rank: int) -> None:
        step[name] = {
            key: [value * factor for value in values] if only in key else values for key, values in step[name].items()
        }

    return change


def rows(of: Callable[[int, list[str]], list[str]]) -> Callable[[dict[str, Any], int], None]:
    def change(step: dict[str, Any], rank: int) -> None:
        step["batches"][0]["rows"] = of(rank, step["batches"][0]["rows"])

    return change


def all_steps(change: Callable[[dict[str, Any], int], Any]) -> Edit:
    return both(*(at(step, change) for step in range(STEPS)))


CAUSES: dict[str, tuple[Edit, int, str, str]] = {
    "the same rows": (all_steps(rows(lambda rank, own: ["a", "b"])), 0, "rows", "same rows on all ranks"),
    "rows of two ranks": (
        at(1, rows(lambda rank, own: ["row 8", "row 9", *own[2:]])),
        1,
        "rows",
        "rows repeated",
    ),
    "other rows": (all_steps(rows(lambda rank, own: [f"{rank} {each}" for each in own])), 0, "rows", "other rows"),
    "another order": (
        lambda run: [rank["steps"].insert(0, rank["steps"].pop()) for rank in run.ranks] and None,
        0,
        "rows",
        "other order of rows",
    ),
    "no loader": (
        both(
            every(lambda rank, _: rank.update(loaders=0)),
            all_steps(lambda step, _: step.update(batches=[], inputs=["a"])),
        ),
        0,
        "rows",
        "loader not prepared",
    ),
    "a mean of means": (
        at(2, lambda step, rank: step.update(losses=[0.5, 0.2][rank : rank + 1])),
        2,
        "loss",
        "mean per rank",
    ),
    "a loss times two": (at(1, lambda step, _: step.update(losses=[1.0])), 1, "loss", "loss scaled"),
    "padding rows": (
        at(3, lambda step, _: (step.update(losses=[0.3]), step["batches"][0].update(padding=2))),
        3,
        "loss",
        "padding rows",
    ),
    "batch norm": (
        both(
            every(lambda rank, _: rank.update(normalizations=["BatchNorm2d"])),
            at(0, lambda step, _: step.update(losses=[1.1])),
        ),
        0,
        "loss",
        "batch normalization",
    ),
    "random numbers": (
        both(
            every(lambda rank, _: rank.update(unplaced=["randn(3,)"])), at(0, lambda step, _: step.update(losses=[1.1]))
        ),
        0,
        "loss",
        "random numbers",
    ),
    "a contrastive loss": (at(0, lambda step, _: step.update(losses=[0.7])), 0, "loss", "loss over the batch"),
    "twice the gradients": (at(0, scaled("gradients", 2.0)), 0, "gradients", "gradients scaled"),
    "half of the gradients": (at(0, scaled("gradients", 0.5)), 0, "gradients", "gradients scaled"),
    "a third of the gradients": (at(0, scaled("gradients", 1 / 3)), 0, "gradients", "gradients scaled"),
    "other gradients": (at(1, scaled("gradients", 1.1, only="scale")), 1, "gradients", "other gradients"),
    "a parameter without gradient": (
        at(0, lambda step, _: step["gradients"].pop("scale")),
        0,
        "gradients",
        "other parameters",
    ),
    "nothing reduced": (
        both(
            at(0, lambda step, rank: scaled("gradients", 1.0 + rank)(step, rank)),
            at(0, lambda step, rank: scaled("weights", 1.0 + rank)(step, rank)),
        ),
        0,
        "gradients",
        "gradients not reduced",
    ),
    "one gradient not reduced": (
        both(
            at(0, lambda step, rank: scaled("gradients", 1.0 + rank, only="scale")(step, rank)),
            at(0, lambda step, rank: scaled("weights", 1.0 + rank, only="scale")(step, rank)),
        ),
        0,
        "gradients",
        "gradients not reduced",
    ),
    "weights of one rank": (
        at(1, lambda step, rank: scaled("weights", 1.0 + rank)(step, rank)),
        1,
        "weights",
        "drift",
    ),
    "a clipping norm": (at(0, lambda step, _: step.update(clipped=0.7)), 0, "clipped gradients", "clipping"),
    "a scheduler": (
        lambda run: (
            [
                step.update(rates=[0.1 / (1 + 2 * number)])
                for rank in run.ranks
                for number, step in enumerate(rank["steps"])
            ]
            and None
        ),
        1,
        "learning rates",
        "scheduler",
    ),
    "an overflow": (at(2, lambda step, _: step.update(skipped=True)), 2, "skipped steps", "overflow"),
    "another update": (at(1, scaled("weights", 1.01)), 1, "weights", "update"),
    "a parameter that no optimizer holds": (
        both(every(lambda rank, _: rank.update(not_held=["scale"])), at(0, scaled("weights", 1.01))),
        0,
        "weights",
        "parameters not in the optimizer",
    ),
    "a buffer of one rank": (
        at(0, lambda step, rank: step.update(buffers={"seen": [3.0 + rank, 3.0 + rank]})),
        0,
        "buffers",
        "buffer of one rank",
    ),
    "a buffer of all ranks": (
        at(0, lambda step, rank: step.update(buffers={"seen": [4.0, 4.0]})),
        0,
        "buffers",
        "buffer of one rank",
    ),
    "weights at the start": (
        every(lambda rank, number: rank["start"].update(scale=[0.5 + number])),
        0,
        "initial weights",
        "initial weights",
    ),
    "other weights at the start": (
        every(lambda rank, number: rank["start"].update(scale=[0.7])),
        0,
        "initial weights",
        "initial weights",
    ),
    "a metric": (
        every(lambda rank, _: rank["logged"][0].update(values={"accuracy": 0.7})),
        1,
        "logged values",
        "metric",
    ),
}


@pytest.mark.parametrize("mistake", CAUSES)
def test_each_mistake_is_named_with_its_first_step_and_quantity(mistake: str) -> None:
    edit, step, quantity, cause = CAUSES[mistake]

    result = judged(edit)

    assert result.verdict == "different"
    finding = result.finding
    assert finding is not None
    assert (finding.cause, finding.step, finding.quantity) == (cause, step, quantity), finding
    assert finding.remedy
    assert finding.sentence in str(result)
    with pytest.raises(AssertionError, match=r"Cause: "):
        result.assert_same()


def test_equal_records_are_identical() -> None:
    result = judged(lambda run: None)

    assert result.verdict == "identical"
    result.assert_same()


def test_four_times_the_measured_rounding_is_the_same_and_more_is_not() -> None:
    noise = at(0, lambda step, _: step.update(losses=[1.001]))

    assert judged(at(0, lambda step, _: step.update(losses=[1.0039])), rounding=noise).verdict == "same"
    assert judged(at(0, lambda step, _: step.update(losses=[1.0042])), rounding=noise).verdict == "different"


def test_low_precision_allows_its_own_rounding() -> None:
    edit = at(0, lambda step, _: step.update(losses=[1.003]))

    assert judged(edit, precision="bf16-mixed").verdict == "same"
    assert judged(edit).verdict == "different"


def test_a_script_that_is_not_deterministic_is_named_before_anything_else() -> None:
    other = made(1)
    other.ranks[0]["steps"][1]["losses"] = [0.9]
    single = made(1)
    subject = made(2)
    at(0, scaled("gradients", 2.0))(subject)

    finding = diagnose(Comparison(subject, single, single, made(1)), other)

    assert finding is not None
    assert (finding.cause, finding.step, finding.quantity) == ("nondeterminism", 1, "loss")


def test_states_of_generators_are_no_difference_but_are_told() -> None:
    single, seeded, scaled_too = made(1), made(1), made(1)
    for run in (seeded, scaled_too):
        at(2, lambda step, rank: step.update(generators={"NumPy's": "another"}))(run)
    at(2, scaled("gradients", 1.5))(scaled_too)
    compared = Comparison(made(2), single, single, made(1))

    same = VerificationResult.of(compared, seeded, "32")
    different = VerificationResult.of(compared, scaled_too, "32")

    assert same.is_same
    assert "other states of NumPy's generator from step 2 on" in same.notes[0]
    assert different.finding is not None
    assert different.finding.cause == "nondeterminism"
    assert "other states of random generators: NumPy's generator from step 2 on" in different.finding.evidence
    assert VerificationResult.of(compared, made(1), "32").notes == []


def test_differences_are_relative_to_the_size_of_a_tensor() -> None:
    expected = {"large": [100.0, -100.0], "zero": [0.0, 1e-9]}

    size, name = relative({"large": [100.1, -100.0], "zero": [1e-9, 0.0]}, expected)

    assert name == "large"
    assert size == pytest.approx(1e-3)
    assert relative({"large": [100.0, -100.0]}, {"large": [100.0, -100.0], "gone": [1.0]}) == (math.inf, "gone")
    assert relative({"large": [math.nan]}, {"large": [1.0]})[0] == math.inf
    assert relative({"large": [math.nan]}, {"large": [math.nan]})[0] == 0.0


def test_a_quantity_that_a_run_has_not_recorded_is_not_compared() -> None:
    subject = made(2)
    for rank in subject.ranks:
        del rank["steps"][0]["losses"], rank["steps"][0]["clipped"]

    assert difference(0, "loss", subject, made(1)) is None
    assert difference(0, "clipped gradients", subject, made(1)) is None


def test_records_are_read_as_they_were_written(tmp_path: Path) -> None:
    run = made(3)

    run.write(tmp_path / "records")
    made(2).write(tmp_path / "records")

    assert Run.read(tmp_path / "records").ranks == made(2).ranks


def test_readers_are_one_rank_of_each_group_that_trains_on_the_same_rows() -> None:
    run = made(4)
    for number, rank in enumerate(run.ranks):
        rank["shard"], rank["shards"] = number // 2, 2

    assert run.readers == [0, 2]
    assert run.shards == 2


def test_weights_whose_gradient_is_rounding_error_are_not_compared() -> None:
    """Adam moves them by a learning rate in any direction, as the bias of an attention's keys."""

    def edited(gradient: float) -> Comparison:
        subject, single = made(2), made(1)
        for run, weight in ((subject, 0.3), (single, 0.1)):
            for rank in run.ranks:
                for step in rank["steps"]:
                    step["elements"]["head.bias"][0] = gradient
                    step["weights"]["head.bias"][0] = weight
        return Comparison(subject, single, single, single)

    assert edited(1e-9).first is None
    for gradient in (0.1, 0.0):  # one that is trained, and one that is not
        first = edited(gradient).first
        assert first is not None
        assert (first.quantity, first.step, first.name) == ("weights", 0, "head.bias")
