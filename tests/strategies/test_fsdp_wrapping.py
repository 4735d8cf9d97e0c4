"""Which modules of a model become units."""

from __future__ import annotations

import pytest
from torch import nn

from drivetrain import ConfigurationError
from drivetrain.strategies.wrapping import units_of, without_tied_across
from tests.strategies.fsdp_models import Block, Net


def names(model, units):
    known = {id(module): name for name, module in model.named_modules()}
    return sorted(known[id(unit)] for unit in units)


class Layered(nn.Module):
    """Blocks in blocks, as experts in layers; and a name of its own for what is not to be split."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.stem = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.pair = nn.ModuleDict({"left": Block(), "right": Block()})


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Block() for _ in range(2))


class Named(Net):
    _no_split_modules = ("LayerNorm",)


BLOCKS = ["blocks.0", "blocks.1", "blocks.2"]


@pytest.mark.parametrize(
    ("model", "wrap", "expected"),
    [
        (Net(), "auto", BLOCKS),
        (Net(), None, []),
        (Net(), "Block", BLOCKS),
        (Net(), Block, BLOCKS),
        (Net(), [Block, "Embedding"], [*BLOCKS, "tokens"]),
        (Net(), lambda module: isinstance(module, nn.Linear), [*(f"{name}.linear" for name in BLOCKS), "head"]),
        (Net(), 80, [*BLOCKS, "tokens"]),
        (Named(), "auto", [f"{name}.norm" for name in BLOCKS]),
        (Layered(), "auto", ["layers.0", "layers.1", "pair.left", "pair.right"]),
        (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "auto", []),
    ],
)
def test_what_becomes_a_unit(model, wrap, expected):
    assert names(model, units_of(model, wrap)) == expected


def test_inner_units_come_first():
    model = Layered()
    order = names_in_order(model, units_of(model, [Layer, Block]))
    assert order.index("layers.0.experts.1") < order.index("layers.0")


def names_in_order(model, units):
    known = {id(module): name for name, module in model.named_modules()}
    return [known[id(unit)] for unit in units]


@pytest.mark.parametrize(
    ("wrap", "says"),
    [
        ("Blok", r"has no module of this class. It has: .*Block \(3\).* Did you mean 'Block'\?"),
        (nn.Conv2d, r"wrap names 'Conv2d', but the model has no module"),
        (lambda module: False, r"returned True for no module. It has: "),
        (10**9, r"more than the model's \d+ parameters"),
        (0, "must be at least 1"),
        (True, "wrap=True is not supported. Allowed: 'auto'"),
        (1.5, "wrap cannot be a float. Allowed: 'auto'"),
        ([], "is empty"),
        ([3], "takes classes or class names, got 3"),
    ],
)
def test_a_policy_that_matches_nothing_is_refused(wrap, says):
    with pytest.raises(ConfigurationError, match=says):
        units_of(Net(), wrap)


def test_units_tied_to_each_other_are_left_to_what_is_around_them():
    model = Net()
    model.blocks[2].linear.weight = model.blocks[0].linear.weight
    assert names(model, without_tied_across(model, units_of(model, "auto"))) == ["blocks.1"]


def test_a_block_used_several_times_stays_a_unit():
    model = Net()
    model.blocks = nn.ModuleList([model.blocks[0]] * 3)
    assert names(model, without_tied_across(model, units_of(model, "auto"))) == ["blocks.0"]
