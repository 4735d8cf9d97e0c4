"""Single parameters and buffers that are put on a device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from drivetrain import ConfigurationError, set_module_tensor_to_device
from drivetrain.inference.tensors import tied_tensors


class Own(nn.Parameter):
    pass


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))


@pytest.mark.parametrize("name", ["0.weight", "1.running_mean"])
def test_a_tensor_goes_to_a_device_and_comes_back_with_a_value(name: str):
    whole = model()
    before = whole.state_dict()[name].clone()
    set_module_tensor_to_device(whole, name, "meta")
    assert whole.state_dict()[name].is_meta
    with pytest.raises(ConfigurationError, match=f"'{name}' is on the meta device.*Pass value="):
        set_module_tensor_to_device(whole, name, "cpu")
    set_module_tensor_to_device(whole, name, "cpu", value=before)
    assert torch.equal(whole.state_dict()[name], before)


def test_a_value_on_the_device_is_not_copied():
    layer, value = nn.Linear(3, 4), torch.zeros(4, 3)
    set_module_tensor_to_device(layer, "weight", "cpu", value=value)
    assert layer.weight.data_ptr() == value.data_ptr()
    same = layer.weight
    set_module_tensor_to_device(layer, "weight", "cpu")
    assert layer.weight is same


@pytest.mark.parametrize(
    ("value", "dtype", "expected"),
    [
        (torch.zeros(4, 3, dtype=torch.float64), None, torch.float32),
        (torch.zeros(4, 3, dtype=torch.float64), torch.float16, torch.float16),
        (torch.zeros(4, 3, dtype=torch.float64), "torch.bfloat16", torch.bfloat16),
        (torch.zeros(4, 3, dtype=torch.int8), torch.float16, torch.int8),
        (None, "bfloat16", torch.bfloat16),
        (None, None, torch.float32),
    ],
)
def test_the_dtype_is_the_one_given_or_that_of_what_is_replaced(
    value: torch.Tensor | None, dtype: str | torch.dtype | None, expected: torch.dtype
):
    layer = nn.Linear(3, 4)
    set_module_tensor_to_device(layer, "weight", "cpu", value=value, dtype=dtype)
    assert layer.weight.dtype == expected
    assert layer.weight.requires_grad == expected.is_floating_point


def test_a_parameter_keeps_its_class_attributes_and_gradient():
    layer = nn.Linear(3, 4)
    layer.weight = Own(layer.weight.data, requires_grad=False)
    layer.weight.note = "kept"
    set_module_tensor_to_device(layer, "weight", "cpu", dtype=torch.float16)
    assert type(layer.weight) is Own
    assert layer.weight.note == "kept"
    assert not layer.weight.requires_grad
    layer.bias.grad = torch.ones(4)
    set_module_tensor_to_device(layer, "bias", "cpu", dtype=torch.float16)
    assert torch.equal(layer.bias.grad, torch.ones(4, dtype=torch.float16))


def test_scales_of_a_weight_of_8_bits_are_kept_with_it():
    layer = nn.Linear(3, 4)
    value, scales = torch.ones(4, 3, dtype=torch.int8), torch.ones(4, dtype=torch.float16)
    set_module_tensor_to_device(layer, "weight", "cpu", value=value, dtype=torch.int8, fp16_statistics=scales)
    assert torch.equal(layer.weight.SCB, scales)


def test_a_tied_weight_is_put_on_a_device_once():
    whole = model()
    whole[2].weight = nn.Parameter(whole[0].weight.data.view(3, 4))  # the same memory, another shape
    twin = nn.ModuleList([nn.Linear(3, 4, bias=False), nn.Linear(3, 4, bias=False), nn.Linear(3, 4)])
    twin[1].weight = twin[0].weight
    tied = tied_tensors(twin)
    assert list(tied) == [twin[0].weight.data_ptr()]
    for name in ("0.weight", "1.weight", "2.weight"):
        set_module_tensor_to_device(twin, name, "meta", tied_params_map=tied)
    assert twin[0].weight is twin[1].weight
    assert twin[2].weight is not twin[0].weight
    views = tied_tensors(whole)
    for name in ("0.weight", "2.weight"):
        set_module_tensor_to_device(whole, name, "meta", tied_params_map=views)
    assert [tuple(whole[each].weight.shape) for each in (0, 2)] == [(4, 3), (3, 4)]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("0.wieght", {}, "no parameter or buffer named '0.wieght'.*'0.weight'"),
        ("5.weight", {}, "no parameter or buffer named '5.weight'"),
        ("0.weight", {"value": torch.zeros(2, 2)}, r"mismatch for '0.weight': the tensor has \(4, 3\).*\(2, 2\)"),
        ("0.weight", {"dtype": "bfloat61"}, "'bfloat61' is not a dtype.*bfloat16"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(name: str, options: dict, message: str):
    with pytest.raises(ConfigurationError, match=message):
        set_module_tensor_to_device(model(), name, "cpu", **options)
