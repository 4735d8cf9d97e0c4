"""Tensors that are the same memory, or are meant to be."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from drivetrain.inference import (
    check_tied_parameters_in_config,
    find_tied_parameters,
    id_tensor_storage,
    init_empty_weights,
    retie_parameters,
)


def tied() -> nn.Module:
    model = nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in ("a", "b", "c", "d")})
    model["c"].weight = model["a"].weight
    model["d"].weight = model["a"].weight
    return model


@pytest.mark.parametrize("on_meta", [False, True])
def test_names_of_one_parameter_are_a_group(on_meta: bool):
    if on_meta:
        with init_empty_weights():
            model = tied()
    else:
        model = tied()
    assert find_tied_parameters(model) == [["a.weight", "c.weight", "d.weight"]]
    assert find_tied_parameters(nn.Linear(2, 2)) == []


@pytest.mark.parametrize(
    ("parts", "groups"),
    [
        ([(0, 6), (4, 8)], [["p0", "p1"]]),
        ([(0, 4), (4, 8)], []),
        ([(0, 8), (2, 4), (5, 8)], [["p0", "p1", "p2"]]),
        ([(0, 3), (3, 5), (4, 8)], [["p1", "p2"]]),
    ],
)
def test_views_are_tied_where_they_overlap(parts: list[tuple[int, int]], groups: list[list[str]]):
    whole, model = torch.zeros(8), nn.Module()
    for number, (start, end) in enumerate(parts):
        model.register_parameter(f"p{number}", nn.Parameter(whole[start:end]))
    assert find_tied_parameters(model) == groups


def test_declared_ties_count_though_each_has_memory_of_its_own():
    model = nn.ModuleDict({name: nn.Linear(2, 2) for name in ("head", "words", "other")})
    model.all_tied_weights_keys = {"head.weight": "words.weight", "gone.weight": "words.weight"}
    assert find_tied_parameters(model) == [["head.weight", "words.weight"]]
    assert check_tied_parameters_in_config(model)
    assert not check_tied_parameters_in_config(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("config", "declared"),
    [
        ({"tie_word_embeddings": True}, True),
        ({"tie_word_embeddings": False}, False),
        ({"is_encoder_decoder": True, "tie_encoder_decoder": True}, True),
        ({"tie_encoder_decoder": True}, False),
    ],
)
def test_ties_in_a_config(config: dict[str, bool], declared: bool):
    model = nn.Linear(2, 2)
    model.config = SimpleNamespace(**config)
    model.get_output_embeddings = lambda: model
    assert check_tied_parameters_in_config(model) is declared


def test_groups_are_tied_again_to_the_one_with_memory():
    with init_empty_weights():
        model = tied()
    groups = find_tied_parameters(model)
    model["c"].weight = loaded = nn.Parameter(torch.ones(4, 4))
    retie_parameters(model, groups)
    assert model["a"].weight is loaded
    assert model["d"].weight is loaded
    assert model["b"].weight is not loaded


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_storages_are_told_apart(device: str):
    one, other = torch.empty(4, device=device), torch.empty(4, device=device)
    assert id_tensor_storage(one) == id_tensor_storage(one[2:])
    assert id_tensor_storage(one) != id_tensor_storage(other)
    assert id_tensor_storage(one)[2] == 16
