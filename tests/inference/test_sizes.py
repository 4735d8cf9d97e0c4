"""How many bytes modules hold."""

from __future__ import annotations

from enum import Enum

import pytest
import torch
from torch import nn

from drivetrain import ConfigurationError
from drivetrain.inference import (
    calculate_maximum_sizes,
    compute_module_sizes,
    dtype_byte_size,
    get_max_layer_size,
    init_empty_weights,
    named_module_tensors,
)


class Custom(Enum):
    INT2 = "int2"


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        (torch.float32, 4),
        (torch.bfloat16, 2),
        (torch.float8_e4m3fn, 1),
        (torch.bool, 1 / 8),
        (torch.complex64, 8),
        (torch.uint4, 0.5),
        ("int4", 0.5),
        ("nf4", 0.5),
        ("fp8", 1),
        ("torch.float16", 2),
        ("float", 4),
        (Custom.INT2, 0.25),
    ],
)
def test_bytes_of_an_element(dtype: object, size: float):
    assert dtype_byte_size(dtype) == size


def test_what_is_no_dtype_is_refused():
    with pytest.raises(ConfigurationError, match="'auto' is not a dtype"):
        dtype_byte_size("auto")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 4)
        self.blocks = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, 10)
        self.head.weight = self.words.weight
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer("mask", torch.ones(8, dtype=torch.bool), persistent=False)


SIZES = {
    "": 160 + 80 + 72 + 40 + 12 + 8,
    "words": 160,
    "words.weight": 160,
    "blocks": 152,
    "blocks.0": 80,
    "blocks.1": 72,
    "head": 40,
    "scale": 12,
    "mask": 8,
}


@pytest.mark.parametrize("on_meta", [False, True])
def test_each_tensor_is_counted_once(on_meta: bool):
    with init_empty_weights(include_buffers=True) if on_meta else torch.no_grad():
        model = Model()
    sizes = compute_module_sizes(model)
    assert SIZES.items() <= sizes.items()
    assert "head.weight" not in sizes


def test_floats_are_counted_as_of_a_dtype_and_single_ones_as_of_another():
    sizes = compute_module_sizes(
        Model(), dtype="float16", special_dtypes={"words.weight": "int4", "scale": torch.float64}
    )
    assert sizes["words"] == 20
    assert sizes["blocks.0"] == 40
    assert sizes["blocks.1.num_batches_tracked"] == 8
    assert sizes["scale"] == 24
    assert compute_module_sizes(Model().bfloat16(), dtype=torch.float32)["blocks.0"] == 40
    assert compute_module_sizes(Model(), buffers_only=True)[""] == 8 + 16 + 16 + 8


@pytest.mark.parametrize(
    ("parts", "size"), [([(0, 6), (4, 8)], 32), ([(0, 4), (4, 8)], 32), ([(2, 4), (0, 8), (1, 3)], 32)]
)
def test_views_of_one_storage_count_what_they_cover(parts: list[tuple[int, int]], size: int):
    whole, model = torch.zeros(8), nn.Module()
    for number, (start, end) in enumerate(parts):
        model.register_buffer(f"b{number}", whole[start:end])
    assert compute_module_sizes(model)[""] == size


def test_a_view_with_gaps_counts_its_own_elements():
    model = nn.Module()
    model.register_buffer("column", torch.zeros(8, 8)[:, 0])
    assert compute_module_sizes(model)[""] == 32


def test_the_largest_part_that_stays_on_one_device():
    model = Model()
    sizes = compute_module_sizes(model)
    parts = list(model.named_children())
    assert get_max_layer_size(parts, sizes, []) == (160, ["words"])
    assert get_max_layer_size(parts[1:], sizes, []) == (80, ["blocks.0"])
    assert get_max_layer_size(parts[1:], sizes, ["Sequential"]) == (152, ["blocks"])
    assert calculate_maximum_sizes(model) == (SIZES[""], (160, ["words"]))
    model._no_split_modules = ["Sequential"]
    model.words = nn.Identity()
    assert calculate_maximum_sizes(model)[1] == (200, ["head"])


def test_tensors_of_a_module_by_name():
    model = Model()
    assert dict(named_module_tensors(model)).keys() == {"scale", "mask"}
    assert dict(named_module_tensors(model, include_buffers=False)).keys() == {"scale"}
    assert "mask" not in dict(named_module_tensors(model, recurse=True, remove_non_persistent=True))
    assert "blocks.1.running_mean" in dict(named_module_tensors(model, recurse=True, remove_non_persistent=True))
