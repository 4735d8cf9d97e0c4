"""Random training runs give the weights of a plain loop; `make fuzz` runs as many as there is time for."""

from __future__ import annotations

import pytest

from tests.fuzz.__main__ import verdicts_of
from tests.fuzz.cases import STRATEGIES, Case, draw, reduced
from tests.fuzz.runs import Trained, compare, plain

# How many cases of each; a few seconds for each strategy.
COUNTS = {"single": 300, "ddp": 80, "ddp_unused": 80, "ddp_static": 60, "ddp_three": 40, "fsdp": 80}
COUNTS |= {"zero_1": 60, "zero_2": 60, "zero_3": 60}
DIVIDED = ("fsdp", "zero_1", "zero_2", "zero_3")


@pytest.mark.parametrize(
    "strategy", [pytest.param(name, marks=pytest.mark.sharded if name in DIVIDED else ()) for name in COUNTS]
)
def test_random_runs_give_the_weights_of_a_plain_loop(strategy):
    verdicts = verdicts_of([draw(seed, strategy) for seed in range(COUNTS[strategy])], timeout=280)
    failing = [f"{each.kind}: {each.case}\n{each.text}" for each in verdicts if each.fails]
    assert not failing, "\n\n".join(failing)
    # Else nothing would be shown. ZeRO refuses about half: 64 bits, batches that are left out, what begins to train.
    assert sum(each.kind == "equal" for each in verdicts) > 0.4 * len(verdicts)


# What once failed otherwise than by a difference: refused as another model's, and a process that waited for ever.
FOUND = [
    Case(model="tied", save="batch_end", then="fsdp"),
    Case(strategy="zero_3", model="unused", epochs=1, save="exception", save_at=2),
]


@pytest.mark.sharded
@pytest.mark.parametrize("case", FOUND, ids=str)
def test_what_was_found_gives_the_weights_of_a_plain_loop(case):
    assert [(each.kind, each.text) for each in verdicts_of([case], timeout=120)] == [("equal", "")]


def test_a_static_graph_that_changes_is_refused_with_what_to_do():
    [found] = verdicts_of([Case(seed=700160, strategy="ddp_static", loss="some", model="unused")], timeout=120)
    assert (found.kind, "static_graph=True" in found.text) == ("refused", True)


def test_every_strategy_is_tried():
    assert COUNTS.keys() == STRATEGIES.keys()


def test_a_difference_in_one_weight_is_seen():
    case = Case()
    trained = plain(case)
    weights = dict(trained.weights)
    weights["last.bias"] = weights["last.bias"] + 1e-5
    assert compare(case, trained, trained).kind == "equal"
    assert compare(case, trained, Trained(weights, trained.steps)).kind == "different"


def test_a_failing_case_is_reduced_to_the_options_that_matter():
    case = draw(3, "ddp")
    assert reduced(case, lambda each: each.samples > 2) == Case(seed=3, strategy="ddp")
    fails = Case(seed=3, strategy="ddp", model="tied", optimizer="adam", epochs=3)
    assert reduced(fails, lambda each: each.model == "tied") == Case(seed=3, strategy="ddp", model="tied")
