"""Layers whose weights are stored in a small dtype."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain import (
    ConfigurationError,
    LayerwiseCastingHook,
    add_hook_to_module,
    attach_align_device_hook,
    attach_layerwise_casting_hooks,
    remove_hook_from_submodules,
)

STORED, COMPUTED = torch.float8_e4m3fn, torch.bfloat16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(8, 6)
        self.conv = nn.Conv1d(6, 6, 3, padding=1)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 4)

    def forward(self, tokens: torch.Tensor, fail: bool = False) -> torch.Tensor:
        hidden = self.conv(self.embed(tokens).transpose(1, 2)).transpose(1, 2)
        return self.head(self.norm(hidden))


TOKENS = torch.arange(8).view(2, 4)


def rounded() -> nn.Module:
    """The model whose weights went through the small dtype."""
    model = Block().to(COMPUTED)
    for layer in (model.conv, model.head):
        for parameter in layer.parameters():
            parameter.data = parameter.data.to(STORED).to(COMPUTED)
    return model


def dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    return {name: parameter.dtype for name, parameter in model.named_parameters()}


def cast(**options: Any) -> nn.Module:
    model = Block().to(COMPUTED)
    attach_layerwise_casting_hooks(model, STORED, COMPUTED, **options)
    return model


def test_linear_and_convolution_layers_are_stored_small_and_all_else_is_not():
    stored = {name for name, dtype in dtypes(cast()).items() if dtype == STORED}
    assert stored == {"conv.weight", "conv.bias", "head.weight", "head.bias"}


def test_the_output_is_that_of_the_rounded_weights_to_the_last_bit():
    model = cast()
    before = {name: value.view(torch.uint8).clone() for name, value in model.head.state_dict().items()}
    for _ in range(2):
        assert torch.equal(model(TOKENS), rounded()(TOKENS))
    assert all(torch.equal(value.view(torch.uint8), before[name]) for name, value in model.head.state_dict().items())
    assert dtypes(model)["head.weight"] == STORED


@pytest.mark.parametrize(
    ("options", "skipped"),
    [
        ({"skip_modules_pattern": "hea"}, {"head"}),
        ({"skip_modules_pattern": ("^head$", "nothing")}, {"head"}),
        ({"skip_modules_classes": (nn.Conv1d,)}, {"conv"}),
    ],
)
def test_modules_are_skipped_by_name_or_class(options: dict[str, Any], skipped: set[str]):
    found = dtypes(cast(**options))
    assert {name for name in ("conv", "head") if found[f"{name}.weight"] == COMPUTED} == skipped


def test_inputs_are_cast_to_the_dtype_of_the_computation():
    layer = nn.Linear(4, 4)
    add_hook_to_module(layer, LayerwiseCastingHook(torch.float16, COMPUTED, non_blocking=False))
    assert layer(torch.ones(1, 4)).dtype == COMPUTED
    assert layer(input=torch.ones(1, 4)).dtype == COMPUTED


def test_an_error_leaves_the_weights_stored_small():
    model = cast()
    with pytest.raises(RuntimeError):
        model.head(torch.ones(1, 5))
    assert model.head.weight.dtype == STORED
    assert isinstance(model.head.weight, nn.Parameter)


def test_a_layer_that_is_used_in_two_places_is_cast_once():
    layer = nn.Linear(4, 4).to(COMPUTED)
    attach_layerwise_casting_hooks(nn.ModuleList([nn.Sequential(layer), nn.Sequential(layer)]), STORED, COMPUTED)
    assert isinstance(layer._hf_hook, LayerwiseCastingHook)


@pytest.mark.parametrize("cast_first", [True, False])
def test_it_goes_together_with_offloading(cast_first: bool):
    model = Block().to(COMPUTED)
    if cast_first:
        attach_layerwise_casting_hooks(model, STORED, COMPUTED)
    attach_align_device_hook(model, "cpu", offload=True)
    if not cast_first:
        attach_layerwise_casting_hooks(model, STORED, COMPUTED)
    with torch.no_grad():
        outputs = [model(TOKENS) for _ in range(2)]
        expected = rounded()(TOKENS)
    assert all(torch.equal(output, expected) for output in outputs)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_adapters_beside_the_stored_weights_get_their_gradients():
    model, plain = cast().requires_grad_(False), rounded().requires_grad_(False)
    gradients = []
    for each in (model, plain):
        added = torch.zeros(6, dtype=COMPUTED, requires_grad=True)
        each.norm.register_forward_hook(lambda _module, _args, output, added=added: output + added)
        each(TOKENS).sum().backward()
        gradients.append(added.grad)
    assert torch.equal(*gradients)


def test_it_is_copied_removed_and_compiled():
    model = cast()
    expected = model(TOKENS)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(TOKENS), expected)
    with torch.no_grad():
        assert torch.equal(torch.compile(twin.head, backend="eager")(torch.ones(1, 6)), model.head(torch.ones(1, 6)))
    remove_hook_from_submodules(twin)
    assert not hasattr(twin.head, "_hf_hook")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((torch.int8, COMPUTED), "storage_dtype=torch.int8 is not a floating-point dtype"),
        ((STORED, "bfloat16"), "compute_dtype='bfloat16' is not a floating-point dtype"),
        ((STORED, COMPUTED, "."), "Block has nothing to cast: every linear and convolution layer is skipped"),
    ],
)
def test_what_cannot_be_cast_is_refused(options: tuple[Any, ...], message: str):
    with pytest.raises(ConfigurationError, match=message):
        attach_layerwise_casting_hooks(Block(), *options)
