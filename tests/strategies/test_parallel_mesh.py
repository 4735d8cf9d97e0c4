"""The grid of processes: who shares a batch, whose values count, and which sizes there can be."""

from __future__ import annotations

import re

import pytest

from drivetrain import ConfigurationError, Parallel, ProcessEnvironment
from drivetrain.data import DataShard
from drivetrain.strategies import resolve_strategy
from drivetrain.strategies.parallel.mesh import DIMENSIONS, MeshPlace, MeshSizes

GRIDS = [
    ({}, 4),
    ({"tp": 2}, 4),
    ({"cp": 2}, 4),
    ({"pp": 2}, 4),
    ({"tp": 2, "cp": 2}, 4),
    ({"tp": 2, "pp": 2, "dp_replicate": 2}, 16),
    ({"tp": 2, "cp": 3, "pp": 2, "dp_replicate": 2, "dp_shard": 2}, 48),
]


@pytest.mark.parametrize(("sizes", "world"), GRIDS)
def test_every_process_has_a_place_of_its_own(sizes, world):
    filled = MeshSizes(**sizes).fill(world)
    places = [MeshPlace(filled, rank) for rank in range(world)]
    assert len({tuple(place.coordinates()[name] for name in DIMENSIONS) for place in places}) == world
    assert [place.rank_of() for place in places] == list(range(world))


@pytest.mark.parametrize(("sizes", "world"), GRIDS)
def test_processes_that_differ_in_data_only_load_different_data(sizes, world):
    filled = MeshSizes(**sizes).fill(world)
    loaded: dict[tuple[int, ...], list[int]] = {}
    for rank in range(world):
        place = MeshPlace(filled, rank)
        at = place.coordinates()
        loaded.setdefault((at["pp"], at["cp"], at["tp"]), []).append(place.data_shard.index)
        assert place.data_shard.count == filled.dp_replicate * filled.dp_shard
    for shards in loaded.values():
        assert sorted(shards) == list(range(filled.dp_replicate * filled.dp_shard))


@pytest.mark.parametrize(("sizes", "world"), GRIDS)
def test_each_data_shard_is_stood_for_by_one_process_and_each_part_of_a_sequence_counts_once(sizes, world):
    filled = MeshSizes(**sizes).fill(world)
    place = MeshPlace(filled, world - 1)
    shards = [MeshPlace(filled, rank).data_shard.index for rank in place.data_ranks]
    assert shards == list(range(filled.dp_replicate * filled.dp_shard))
    at = [MeshPlace(filled, rank).coordinates() for rank in place.value_ranks]
    assert {(each["tp"], each["pp"]) for each in at} == {(0, filled.pp - 1)}
    assert len(at) == filled.dp_replicate * filled.dp_shard * filled.cp
    assert set(place.data_ranks) <= set(place.value_ranks)


def test_neighbours_share_layers_first():
    sizes = MeshSizes(tp=2).fill(4)
    assert [MeshPlace(sizes, rank).data_shard for rank in range(4)] == [DataShard(0, 2)] * 2 + [DataShard(1, 2)] * 2


REFUSED = [
    ({"tp": 3}, 4, "tp=3 needs a multiple of 3 processes, but there are 4"),
    ({"tp": 2, "dp_shard": 1}, 4, "tp=2 multiplies to 2, but there are 4 processes. Start 2 processes, change a size"),
    ({"dp_replicate": 2, "dp_shard": 4}, 4, "dp_replicate=2 x dp_shard=4 multiplies to 8, but there are 4 processes"),
]


@pytest.mark.parametrize(("sizes", "world", "message"), REFUSED)
def test_sizes_that_do_not_multiply_to_the_processes_are_refused_with_the_numbers(sizes, world, message):
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        MeshSizes(**sizes).fill(world)


OPTIONS = [
    ({"tp": 0}, "tp must be a whole number of processes, at least 1, got 0"),
    ({"cp": 1.5}, "cp must be a whole number of processes, at least 1, got 1.5"),
    ({"pp": True}, "pp must be a whole number"),
    ({"dp_shard": -2}, "dp_shard must be a whole number of processes, at least 1, or -1, got -2"),
    ({"tp": 2}, "tp=2 needs a plan of the layers to split. Set tp_plan="),
    ({"tp": 2, "tp_plan": "model"}, "tp_plan must be a mapping of patterns to styles, or 'auto', got 'model'"),
    ({"loss_parallel": True}, "loss_parallel=True requires tp > 1"),
    ({"cp": 2, "pp": 2}, "cp=2 and pp=2 cannot be combined yet"),
    ({"pp_schedule": "gpipe"}, r"\(pp_schedule\) require pp > 1"),
    ({"dp_shards": 2}, "Parallel has no option 'dp_shards'.*Did you mean 'dp_shard'"),
    ({"replicate_size": 2}, "Parallel has no option 'replicate_size'"),
]


@pytest.mark.parametrize(("options", "message"), OPTIONS)
def test_options_that_cannot_be_are_refused(options, message):
    with pytest.raises(ConfigurationError, match=message):
        Parallel(**options)


@pytest.mark.parametrize("name", ["parallel", "tp", "cp", "pipeline"])
def test_a_name_alone_says_no_sizes(name):
    message = rf"strategy='{name}' needs the number of processes for each dimension. Use strategy=Parallel\(tp=2"
    with pytest.raises(ConfigurationError, match=message):
        resolve_strategy(name, ProcessEnvironment.detect({}))


def test_accelerates_names_of_sizes():
    strategy = Parallel.from_config({"dp_replicate_size": 2, "dp_shard_size": 4, "cp_size": 2, "tp_size": None})
    assert strategy.sizes == MeshSizes(dp_replicate=2, dp_shard=4, cp=2)
    prefixed = Parallel.from_config({"parallelism_config_cp_size": 2}, wrap=None)
    assert (prefixed.sizes, prefixed.options.wrap) == (MeshSizes(dp_shard=1, cp=2), None)
    with pytest.raises(ConfigurationError, match=r"Unknown size 'tp_sise'.*Did you mean 'tp_size'"):
        Parallel.from_config({"tp_sise": 2})
