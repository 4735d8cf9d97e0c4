"""Sizes that cannot be, each named with what would fit; needs no megatron-core."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

from drivetrain import ConfigurationError, available_strategies
from drivetrain.strategies.megatron.configuration import MegatronOptions, check_fits


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tensor_parallel": 0}, "tensor_parallel must be a whole number of at least 1, got 0"),
        ({"pipeline_parallel": True}, "pipeline_parallel must be a whole number of at least 1, got True"),
        ({"virtual_pipeline": 2}, "pipeline_parallel=1. Set pipeline_parallel to 2 or more"),
        ({"sequence_parallel": True}, "tensor_parallel=1. Set tensor_parallel to 2 or more"),
        ({"recompute": "ful"}, "Allowed: None, 'selective' .* and 'full'"),
    ],
)
def test_options_that_contradict_each_other_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        MegatronOptions(**given)


@pytest.mark.parametrize(
    ("given", "processes", "message"),
    [
        ({"tensor_parallel": 4}, 6, "tensor_parallel=4 needs a multiple of 4 processes, but there are 6. Start 4 or 8"),
        (
            {"tensor_parallel": 2, "pipeline_parallel": 2},
            6,
            "tensor_parallel=2 x pipeline_parallel=2 needs .* product is 1, 2, 3 or 6",
        ),
        ({"context_parallel": 3}, 4, "context_parallel=3 needs a multiple of 3"),
        ({"expert_parallel": 3}, 4, "Set expert_parallel to 1, 2 or 4"),
        ({"pipeline_parallel": 8}, 4, "needs a multiple of 8 processes, but there are 4. Start 8"),
    ],
)
def test_sizes_that_do_not_fit_the_processes_are_refused(given: dict[str, Any], processes: int, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        MegatronOptions(**given).place(0, processes)


@pytest.mark.parametrize(
    ("what", "size", "parts", "message"),
    [
        (
            "num_layers",
            6,
            4,
            "num_layers=6 is not a multiple of p, which is 4. Set p to 1, 2, 3 or 6, or num_layers to 4 or 8",
        ),
        ("num_attention_heads", 5, 2, "Set p to 1 or 5, or num_attention_heads to 4 or 6"),
        ("num_query_groups", 1, 2, "Set p to 1, or num_query_groups to 2"),
    ],
)
def test_sizes_of_the_model_are_named_with_what_would_fit(what: str, size: int, parts: int, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        check_fits(what, size, "p", parts)


def test_neighbouring_ranks_share_layers_and_the_stages_are_furthest_apart() -> None:
    place = MegatronOptions(tensor_parallel=2, pipeline_parallel=2).place(5, 8)
    assert place.coordinates() == {"pp": 1, "dp_replicate": 0, "dp_shard": 0, "cp": 0, "tp": 1}
    assert (place.data_shard.index, place.data_shard.count) == (0, 2)
    assert (place.loss_rank, place.data_ranks, place.value_ranks) == (5, (4, 6), (4, 6))


def test_megatron_is_a_name_of_a_strategy() -> None:
    assert "megatron" in available_strategies()


@pytest.mark.skipif(find_spec("megatron") is not None, reason="megatron-core is installed")
def test_without_the_package_the_install_line_is_named() -> None:
    from drivetrain import Megatron

    with pytest.raises(ConfigurationError, match=r"pip install 'drivetrain\[megatron\]'"):
        Megatron()
