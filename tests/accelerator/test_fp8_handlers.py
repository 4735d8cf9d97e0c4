"""Accelerate's holders and keys for fp8, in both spellings, become the `FP8` that they mean."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from drivetrain import (
    FP8,
    Accelerator,
    AORecipeKwargs,
    AutocastKwargs,
    ConfigurationError,
    FP8RecipeKwargs,
    MSAMPRecipeKwargs,
    TERecipeKwargs,
)
from drivetrain.accelerator.accelerate_names import Launched
from drivetrain.accelerator.preparation import make_precision
from tests.strategies.precision.fp8_models import FLOAT8, float8_layers, net

DELAYED = {"margin": 0, "amax_history_len": 1024, "amax_compute_algo": "most_recent"}


def meaning(precision: Any) -> dict[str, Any]:
    assert isinstance(precision, FP8)
    backend = precision.backend
    found = {"backend": backend.name, "recipe": backend.recipe}
    if backend.name == "torchao":
        return {**found, "pad": backend._pad, "gather": backend._gathers}
    if backend.name == "te":
        return {**found, "format": backend.format, "in_evaluation": backend.in_evaluation, **backend._delayed}
    return found


TE = {"backend": "te", "recipe": "delayed", "format": "HYBRID", "in_evaluation": False, **DELAYED}
HANDLERS: list[tuple[Any, dict[str, Any]]] = [
    (AORecipeKwargs(), {"backend": "torchao", "recipe": "tensorwise", "pad": True, "gather": True}),
    (
        AORecipeKwargs(pad_inner_dim=False, enable_fsdp_float8_all_gather=False),
        {"backend": "torchao", "recipe": "tensorwise", "pad": False, "gather": False},
    ),
    (TERecipeKwargs(), TE),
    (
        TERecipeKwargs(True, 1, 1, "E4M3", 16, "max", (False, False, False)),
        {
            **TE,
            "in_evaluation": True,
            "margin": 1,
            "format": "E4M3",
            "amax_history_len": 16,
            "amax_compute_algo": "max",
        },
    ),
    (
        TERecipeKwargs(use_mxfp8_block_scaling=True),
        {"backend": "te", "recipe": "mxfp8", "format": "HYBRID", "in_evaluation": False},
    ),
    (MSAMPRecipeKwargs(), {"backend": "msamp", "recipe": "O2"}),
    (MSAMPRecipeKwargs("O1"), {"backend": "msamp", "recipe": "O1"}),
    (FP8RecipeKwargs(), TE),
    (FP8RecipeKwargs(backend="TE", margin=3), {**TE, "margin": 3}),
    (FP8RecipeKwargs(backend="MSAMP", opt_level="O1"), {"backend": "msamp", "recipe": "O1"}),
]


@pytest.mark.parametrize(("handler", "expected"), HANDLERS)
def test_a_handler_becomes_a_precision(handler, expected):
    assert meaning(make_precision("fp8", [handler], Launched({}))) == expected


def test_a_handler_counts_under_fp8_alone():
    assert not isinstance(make_precision("bf16", [AORecipeKwargs()], Launched({})), FP8)


def test_autocasts_options_go_with_a_recipe():
    precision = make_precision("fp8", [AORecipeKwargs(), AutocastKwargs(cache_enabled=False)], Launched({}))
    assert not precision.cache_enabled


def test_an_accelerator_takes_a_recipe_and_a_filter():
    handler = AORecipeKwargs(module_filter_func=lambda layer, name: name == "first" or name.endswith("up"))
    accelerator = Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[handler])
    assert float8_layers(accelerator.prepare(net())) == ["first", "blocks.0.up", "blocks.1.up"]


def test_an_accelerator_takes_torchaos_own_configuration():
    from torchao.float8 import Float8LinearConfig

    handler = AORecipeKwargs(config=Float8LinearConfig.from_recipe_name("rowwise"))
    model = Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[handler]).prepare(net())
    assert float8_layers(model) == FLOAT8
    assert "axs" in repr(model.blocks[0].up)


@pytest.mark.parametrize(
    ("handlers", "message"),
    [
        ([AORecipeKwargs(), TERecipeKwargs()], "AORecipeKwargs and TERecipeKwargs, but only one FP8 recipe"),
        ([AORecipeKwargs(), AORecipeKwargs()], "two objects of type AORecipeKwargs"),
        ([FP8RecipeKwargs(backend="AO")], "FP8RecipeKwargs(backend)='AO' is not supported. Allowed: te, msamp"),
        ([TERecipeKwargs(fp8_format="E5M2")], "format='E5M2' is not supported. Allowed: HYBRID, E4M3"),
        ([TERecipeKwargs(override_linear_precision=(False, False, True))], "recipe='rowwise_gw_hp'"),
        ([TERecipeKwargs(use_mxfp8_block_scaling=True, amax_history_len=4)], "which keeps no history"),
    ],
)
def test_what_cannot_be_is_refused(handlers, message):
    with pytest.raises(ConfigurationError) as raised:
        Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=handlers)
    assert message in str(raised.value)


def test_a_recipe_beside_a_precision_is_refused():
    with pytest.raises(ConfigurationError, match="AORecipeKwargs cannot be combined with mixed_precision="):
        Accelerator(cpu=True, mixed_precision=FP8(), kwargs_handlers=[AORecipeKwargs()])


# As `accelerate config` asks and writes it, and as the launcher's flags spell the same.
QUESTIONNAIRE = """
backend: TE
use_autocast_during_eval: false
margin: 2
interval: 1
fp8_format: E4M3
amax_history_length: 32
amax_compute_algorithm: max
override_linear_precision: [false, false, false]
"""
FLAGS = """
fp8_backend: te
fp8_use_autocast_during_eval: "False"
fp8_margin: "2"
fp8_interval: "1"
fp8_format: E4M3
fp8_amax_history_len: "32"
fp8_amax_compute_algo: max
fp8_override_linear_precision: "false,false,false"
"""


@pytest.mark.parametrize("text", [QUESTIONNAIRE, FLAGS], ids=["questionnaire", "flags"])
def test_both_spellings_of_a_config_mean_the_same(text):
    expected = {**TE, "margin": 2, "format": "E4M3", "amax_history_len": 32, "amax_compute_algo": "max"}
    assert meaning(FP8.from_config(yaml.safe_load(text))) == expected


CONFIGS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"backend": "torchao", "recipe": "tensorwise", "pad": True, "gather": True}),
    (
        {"backend": "AO", "enable_fsdp_float8_all_gather": False, "pad_inner_dim": "no"},
        {"backend": "torchao", "recipe": "tensorwise", "pad": False, "gather": False},
    ),
    ({"backend": "MSAMP", "optimization_level": "O1"}, {"backend": "msamp", "recipe": "O1"}),
    ({"opt_level": "O1"}, {"backend": "msamp", "recipe": "O1"}),
    ({"amax_compute_algo": "MAX"}, {**TE, "amax_compute_algo": "max"}),
    ({"backend": "TE", "opt_level": None}, TE),
]


@pytest.mark.parametrize(("config", "expected"), CONFIGS)
def test_a_config_becomes_a_precision(config, expected):
    assert meaning(FP8.from_config(config)) == expected


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"amax_history": 3}, "Unknown key 'amax_history' in fp8_config"),
        ({"amax_history": 3}, "Did you mean 'amax_history_len'?"),
        ({"backend": "apex"}, "fp8_config's backend='apex'"),
        ({"backend": "AO", "margin": 1}, "contains margin, which the backend 'torchao' does not support"),
        ({"amax_history_len": 3, "amax_history_length": 4}, "in two spellings: 3 and 4"),
        ({"backend": "TE", "margin": "much"}, "fp8_margin='much' is not supported. Use a whole number"),
        ({"pad_inner_dim": "maybe"}, "fp8_pad_inner_dim='maybe' is not supported. Use true or false"),
    ],
)
def test_a_config_that_cannot_be_is_refused(config, message):
    with pytest.raises(ConfigurationError) as raised:
        FP8.from_config(config)
    assert message in str(raised.value)
