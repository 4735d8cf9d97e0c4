"""The global generators are as they were after each batch, whatever was drawn from them meanwhile and between."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from drivetrain.runtime.seeds import KeptGenerators, seed_all_generators


def drawn() -> list[float]:
    return [random.random(), random.gauss(0, 1), *np.random.normal(size=3), *torch.randn(3).tolist()]


def use_everything() -> None:
    seed_all_generators(5)
    np.random.normal()  # a second normal number waits
    drawn()


def nothing() -> None:
    pass


def one_normal() -> None:
    np.random.normal()


@pytest.mark.parametrize("between", [nothing, one_normal, drawn, lambda: np.random.seed(3)])
@pytest.mark.parametrize("within", [nothing, one_normal, use_everything])
def test_what_is_drawn_afterwards_is_what_would_have_been(within: Callable[[], None], between: Callable[[], None]):
    def run(kept: KeptGenerators | None) -> list[list[float]]:
        seed_all_generators(1)
        seen = []
        for _ in range(4):
            if kept is not None:
                with kept:
                    within()
            between()
            seen.append(drawn())
            between()
        return seen

    assert run(KeptGenerators()) == run(None)


def test_another_generator_in_the_place_of_numpys_is_kept_too():
    usual = np.random.get_bit_generator()
    try:
        kept = KeptGenerators()
        with kept:
            pass
        np.random.set_bit_generator(np.random.MT19937(7))
        for _ in range(2):
            with kept:
                use_everything()
        found = np.random.random(3)
        np.random.set_bit_generator(np.random.MT19937(7))
        assert found.tolist() == np.random.random(3).tolist()
        np.random.set_bit_generator(np.random.PCG64(7))
        with kept:
            np.random.random(2)
        found = np.random.random(3)
        np.random.set_bit_generator(np.random.PCG64(7))
        assert found.tolist() == np.random.random(3).tolist()
    finally:
        np.random.set_bit_generator(usual)


def test_it_goes_to_workers_without_the_state():
    kept = KeptGenerators()
    with kept:
        pass
    assert len(pickle.dumps(kept)) < 200
    with pickle.loads(pickle.dumps(kept)):
        pass


@pytest.mark.parametrize(
    ("draw", "name"),
    [
        (random.random, "python"),
        (lambda: random.gauss(0, 1), "python"),
        (np.random.random, "numpy"),
        (np.random.normal, "numpy"),
        (lambda: torch.rand(()), "torch"),
        (lambda: torch.manual_seed(3), "torch"),
    ],
)
@pytest.mark.parametrize("waiting", [False, True], ids=["", "normal numbers wait"])
def test_those_that_have_drawn_are_found(draw: Callable[[], object], name: str, waiting: bool):
    seed_all_generators(1)
    if waiting:
        random.gauss(0, 1)
        np.random.normal()
    kept = KeptGenerators()
    for _ in range(2):
        with kept:
            assert kept.changed() == []
            draw()
            assert kept.changed() == [name]
            assert kept.changed({"python", "numpy", "torch"} - {name}) == []
        assert kept.changed() == []
