"""Device maps: where modules go, why, and what is refused."""

from __future__ import annotations

import json
import logging
import pickle
import re
import sys
from collections import OrderedDict
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain import (
    ConfigurationError,
    DeviceNotAvailableError,
    check_device_map,
    clean_device_map,
    find_tied_parameters,
    get_balanced_memory,
    get_max_memory,
    infer_auto_device_map,
    init_empty_weights,
    resolve_device_map,
)
from drivetrain.inference import DeviceMap, check_tied_parameters_on_same_device


class Small(nn.Module):
    """Of 236 bytes: 64, 72 and 100."""

    def __init__(self) -> None:
        super().__init__()
        self.linear1 = nn.Linear(3, 4)
        self.batchnorm = nn.BatchNorm1d(4)
        self.linear2 = nn.Linear(4, 5)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.linear2(self.batchnorm(self.linear1(value)))


def three(*ties: tuple[str, str]) -> nn.Module:
    model = nn.Sequential(OrderedDict((f"layer{number}", Small()) for number in (1, 2, 3)))
    for target, source in ties:
        model.get_submodule(target).weight = model.get_submodule(source).weight
    return model


def linears(*sizes: int) -> nn.Module:
    """Modules of so many bytes."""
    return nn.Sequential(*(nn.Linear(size // 4, 1, bias=False) for size in sizes))


def with_buffers(*sizes: int) -> Small:
    model = Small()
    for number, (module, size) in enumerate(zip(model.children(), sizes, strict=False)):
        module.register_buffer(f"table{number}", torch.zeros(size // 4))
    return model


FIRST_TIE = ("layer3.linear2", "layer1.linear2")
SECOND_TIE = ("layer2.linear2", "layer1.linear2")
THIRD_TIE = ("layer2.linear1", "layer1.linear1")


@pytest.mark.parametrize(
    ("model", "max_memory", "expected"),
    [
        pytest.param(
            Small(),
            {0: 200, 1: 200},
            {"linear1": 0, "batchnorm": 1, "linear2": 1},
            id="room for the largest is left on the first",
        ),
        pytest.param(
            Small(),
            {0: 200, 1: 172, 2: 200},
            {"linear1": 0, "batchnorm": 1, "linear2": 1},
            id="and on no other",
        ),
        pytest.param(Small(), {0: 236, 1: 236}, {"": 0}, id="nor where all of it fits"),
        pytest.param(Small(), {0: 0, 1: 236}, {"": 1}, id="a device without memory has nothing"),
        pytest.param(
            three(),
            {0: 500, 1: 500},
            {"layer1": 0, "layer2.linear1": 0, "layer2.batchnorm": 0, "layer2.linear2": 1, "layer3": 1},
            id="modules are split",
        ),
        pytest.param(
            three(FIRST_TIE),
            {0: 400, 1: 500},
            {"layer1": 0, "layer3.linear2": 0, "layer2": 1, "layer3.linear1": 1, "layer3.batchnorm": 1},
            id="what is tied is together",
        ),
        pytest.param(
            three(FIRST_TIE, SECOND_TIE),
            {0: 400, 1: 500},
            {
                "layer1": 0,
                "layer2.linear2": 0,
                "layer3.linear2": 0,
                "layer2.linear1": 1,
                "layer2.batchnorm": 1,
                "layer3.linear1": 1,
                "layer3.batchnorm": 1,
            },
            id="so are three",
        ),
        pytest.param(
            three(FIRST_TIE, SECOND_TIE, THIRD_TIE),
            {0: 400, 1: 500},
            {
                "layer1": 0,
                "layer2.linear1": 0,
                "layer2.linear2": 0,
                "layer3.linear2": 0,
                "layer2.batchnorm": 1,
                "layer3.linear1": 1,
                "layer3.batchnorm": 1,
            },
            id="and two groups",
        ),
        pytest.param(linears(60, 60), {0: 60, "cpu": 200}, {"0": "cpu", "1": "cpu"}, id="streamed through the first"),
        pytest.param(linears(40, 60, 60), {0: 100, "cpu": 60}, {"0": 0, "1": "cpu", "2": "disk"}, id="then the disk"),
        pytest.param(
            linears(100, 40, 40), {0: 50, 1: 100, "cpu": 500}, {"0": 1, "1": "cpu", "2": "cpu"}, id="what cannot stream"
        ),
        pytest.param(
            linears(60, 60, 20, 20), {0: 80, 1: 80}, {"0": 0, "1": 1, "2": 1, "3": 0}, id="out of order if need be"
        ),
    ],
)
def test_where_modules_go(model: nn.Module, max_memory: dict[Any, int], expected: dict[str, Any]):
    found = infer_auto_device_map(model, max_memory=max_memory, no_split_module_classes=[])
    assert clean_device_map(dict(expected)) == found
    assert all(share.free >= 0 for share in found.shares.values())


def test_blocks_that_repeat_stay_whole_unless_all_may_be_split():
    for classes in (None, ["Small"], {"Small"}, "Small"):
        found = infer_auto_device_map(three(), {0: 500, 1: 500}, no_split_module_classes=classes)
        assert found == {"layer1": 0, "layer2": 1, "layer3": 1}
    model = nn.Sequential(Small())
    model._no_split_modules = ["Small"]
    assert infer_auto_device_map(model, {0: 200, 1: 300}) == {"": 1}
    del model._no_split_modules
    assert infer_auto_device_map(model, {0: 200, 1: 300}) == {"0.linear1": 0, "0.batchnorm": 1, "0.linear2": 1}


class WithOwnTensors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(2))
        self.linear = nn.Linear(2, 2)
        self.register_buffer("mask", torch.zeros(8), persistent=False)
        self.drop = nn.Dropout()


def test_a_modules_own_tensors_and_modules_without_any_have_devices():
    found = infer_auto_device_map(WithOwnTensors(), {0: 8, 1: 32, 2: 24}, clean_result=False, reserve_max_layer=False)
    assert found == {"scale": 0, "mask": 1, "linear": 2, "drop": 2}
    assert list(found) == ["scale", "mask", "linear", "drop"]


def test_a_module_under_two_names_is_in_the_map_under_both():
    model = nn.ModuleDict({"shared": nn.Embedding(4, 4)})
    model["encoder"] = nn.Sequential(model["shared"], nn.Linear(4, 4))
    found = infer_auto_device_map(model, {0: 64, 1: 80})
    assert found == {"shared": 0, "encoder.0": 0, "encoder.1": 1}


def test_weights_are_counted_as_they_will_be_loaded():
    model = linears(80, 80)
    assert infer_auto_device_map(model, {0: 80}, dtype=torch.float16) == {"": 0}
    assert infer_auto_device_map(model, {0: 20}, dtype="int4") == {"": 0}
    special = {"0.weight": "int8"}
    found = infer_auto_device_map(model, {0: 20, 1: 80}, special_dtypes=special, reserve_max_layer=False)
    assert found == {"0": 0, "1": 1}
    odd = nn.Linear(5, 1, bias=False)
    assert infer_auto_device_map(odd, {0: 3}, dtype="int4").shares[0].weights == 3  # not 2: the last byte is half full


def test_a_declared_tie_is_loaded_once():
    model = linears(80, 80)
    model.all_tied_weights_keys = {"1.weight": "0.weight"}
    assert infer_auto_device_map(model, {0: 80}) == {"": 0}


# Room for what is fetched ahead


def test_room_is_left_to_fetch_blocks_ahead_as_far_as_there_is_any():
    model, memory = linears(40, 40, 40, 40, 40), {0: 120, "cpu": 500}
    none, one, many = (infer_auto_device_map(model, memory, prefetch=ahead) for ahead in (0, 1, 9))
    assert [none.shares[0].weights, one.shares[0].weights, many.shares[0].weights] == [80, 40, 0]
    assert [none.shares[0].streamed, one.shares[0].streamed, many.shares[0].streamed] == [40, 80, 120]
    assert [none.prefetch, one.prefetch, many.prefetch] == [0, 1, 2]
    assert infer_auto_device_map(model, {0: 200}).prefetch == 0
    assert infer_auto_device_map(linears(60, 40, 40), {0: 115, "cpu": 500}).prefetch == 0


# Buffers of what is offloaded


def test_buffers_of_offloaded_modules_stay_where_those_are_computed():
    model = with_buffers(80, 120, 120)  # 144, 192 and 220 bytes, of which buffers are 80, 160 and 120
    model.linear3 = nn.Linear(4, 5)
    model.linear3.register_buffer("table3", torch.zeros(20))  # 180, of which 80
    found = infer_auto_device_map(model, {0: 330, 1: 400, "cpu": "1GB"})
    assert found == {"linear1": 1, "batchnorm": 1, "linear2": "cpu", "linear3": "cpu"}
    assert (found.main_device, found.shares[0].streamed) == (0, 100 + 120 + 80)


@pytest.mark.parametrize("memory", [{0: 400, "cpu": "1GB"}, {0: 350, "cpu": "1GB", "disk": 0}])
def test_where_they_have_no_room_a_map_that_offloads_them_comes_with_a_warning(
    memory: dict[Any, Any], recwarn: pytest.WarningsRecorder
):
    model = with_buffers(80, 120, 120)
    expected = infer_auto_device_map(model, memory, offload_buffers=True)
    assert not recwarn.list
    with pytest.warns(UserWarning, match="offload_buffers=True"):
        found = infer_auto_device_map(model, memory)
    assert found == expected
    assert "cpu" in found.values()


# Accelerators that have room for little


def inner(*widths: int) -> nn.Module:
    pairs = pairwise(widths)
    layers = OrderedDict((f"linear{number}", nn.Linear(*pair)) for number, pair in enumerate(pairs, 1))
    return nn.Sequential(OrderedDict(module=nn.Sequential(layers)))


def test_gaps_are_filled_with_modules_out_of_order_only_where_that_is_asked_for(caplog: pytest.LogCaptureFixture):
    model = inner(10, 4, 4, 8)
    assert set(infer_auto_device_map(model, {0: 256}).values()) == {"disk"}
    assert "insufficient memory" in caplog.text
    caplog.clear()
    found = infer_auto_device_map(model, {0: 256}, fallback_allocation=True)
    assert found == {"module.linear1": "disk", "module.linear2": 0, "module.linear3": "disk"}
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_a_block_is_split_to_fill_the_one_device_that_computes():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 20)) for _ in range(3)))
    found = infer_auto_device_map(model, {0: 5000}, fallback_allocation=True)
    assert sum(device == 0 for device in found.values()) > 0
    assert found.shares[0].free >= 0


def test_what_no_accelerator_can_compute_runs_on_the_cpu(caplog: pytest.LogCaptureFixture):
    found = infer_auto_device_map(linears(60, 60), {0: 4, "cpu": 1000})
    assert (found, found.main_device) == ({"": "cpu"}, "cpu")
    assert 'main_device="cpu"' in caplog.text


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        ({0: 30}, r"'1' takes 80 B .* largest budget is 0, 30 B: 50 B are missing. Give one device at least 80"),
        ({"cpu": 30}, r"the largest budget is 'cpu', 30 B: 50 B"),
        ({0: 60, 1: 60, "disk": 0}, r"takes 140 B, but the budgets hold 120 B in all: 20 B are missing"),
        ({0: 50, 1: 90, "disk": 0}, r"do not fit into the budgets: 0 50 B, 1 90 B, 'disk' 0 B"),
        ({}, r"no device that can compute has a budget"),
        ({"gpu0": 5}, r"'gpu0' is not a device"),
        ({-1: 5}, r"-1 is not a device"),
        ({0: "5 parsecs"}, r"'5 parsecs' is not a size"),
        ({0: -5}, r"max_memory.0. is -5 bytes"),
    ],
)
def test_budgets_that_hold_no_map_are_refused(memory: dict[Any, Any], message: str):
    with pytest.raises(ConfigurationError, match=message):
        infer_auto_device_map(linears(60, 80), memory)


def test_the_error_names_a_way_to_split_where_there_is_one():
    with pytest.raises(ConfigurationError, match=r"'layer1' takes .*no_split_module_classes=\[\]"):
        infer_auto_device_map(three(), {0: 150})


# Names of maps


BLOCKS = (40, 12, 12, 12, 12, 40)


@pytest.mark.parametrize(
    ("name", "memory", "shares"),
    [
        ("auto", {0: 200, 1: 200}, [64, 64]),
        ("balanced", {0: 200, 1: 200, 2: 200}, [40, 48, 40]),
        ("balanced", {0: 200, 1: 32, 2: 200}, [52, 24, 52]),
        ("balanced_low_0", {0: 200, 1: 200, 2: 200}, [0, 64, 64]),
        ("balanced_low_0", {0: 200, 1: 60, 2: 40}, [40, 48, 40]),
        ("sequential", {0: 200, 1: 200}, [128, 0]),
    ],
)
def test_named_maps_share_a_model_that_fits(name: str, memory: dict[Any, int], shares: list[int]):
    found = infer_auto_device_map(linears(*BLOCKS), memory, policy=name)
    assert [found.shares[device].weights for device in memory] == shares
    if name != "sequential":
        balanced = get_balanced_memory(linears(*BLOCKS), memory, low_zero=name == "balanced_low_0")
        assert infer_auto_device_map(linears(*BLOCKS), balanced) == found


def test_balanced_memory_is_exact_and_the_last_device_keeps_all_it_has():
    assert get_balanced_memory(Small(), {0: 300, 1: 500}) == {0: 136, 1: 500}
    assert get_balanced_memory(Small(), {0: "300B", 2: 300}) == {0: 136, 2: 300}
    assert get_balanced_memory(Small(), {0: 0, 1: 300, 2: 300}) == {0: 0, 1: 136, 2: 300}
    assert get_balanced_memory(Small(), {0: 300, "cpu": 1000}) == {0: 300, "cpu": 1000}
    assert get_balanced_memory(Small(), {0: 0, "cpu": 100}) == {0: 0, "cpu": 100}
    assert get_balanced_memory(Small(), {0: 100, 1: 100}) == {0: 100, 1: 100}  # does not fit: all is used
    assert get_balanced_memory(Small(), {0: 300, 1: 300}, no_split_module_classes={"Linear"}) == {0: 136, 1: 300}


def test_the_memory_that_there_is():
    memory = get_max_memory()
    assert list(memory)[-1] == "cpu"
    assert memory["cpu"] > 10**6
    assert list(get_max_memory({"disk": 1, "cpu": "1KB", 1: "1KiB", 0: 5})) == [0, 1, "cpu", "disk"]
    assert get_max_memory({"1": "1KiB", "cpu": "1KB"}) == {1: 1024, "cpu": 1000}


# Activations


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Linear(4, 4, bias=False)
        self.wide = nn.Linear(4, 64, bias=False)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.wide(self.narrow(value)).sum()


def test_activations_of_an_example_count():
    model = Wide()
    example = (torch.zeros(10, 4),)
    without = infer_auto_device_map(model, {0: 2000, 1: 4000}, reserve_max_layer=False)
    counted = infer_auto_device_map(model, {0: 2000, 1: 4000}, reserve_max_layer=False, example_args=example)
    assert (without, counted) == ({"": 0}, {"narrow": 0, "wide": 1})
    assert counted.shares[0].activations == 160 + 160  # what comes in and what goes out
    assert counted.shares[1].activations >= 160 + 2560
    assert not model.narrow.weight.is_meta
    assert not model.narrow._forward_pre_hooks
    named = infer_auto_device_map(model, {0: 2000, 1: 4000}, example_kwargs={"value": example[0]})
    assert named.shares[1].activations == counted.shares[1].activations


def test_a_forward_that_needs_values_cannot_be_measured():
    model = nn.Linear(2, 2)
    model.forward = lambda value: value[: int(value.sum())]
    with pytest.raises(ConfigurationError, match="activations cannot be measured"):
        infer_auto_device_map(model, {0: 2000}, example_args=(torch.ones(2),))


# The map itself


def test_a_map_is_a_dict_that_travels():
    found = infer_auto_device_map(linears(100, 100, 100, 100), {0: 200, 1: 104, "cpu": 500})
    assert isinstance(found, dict)
    assert json.loads(json.dumps(found.to_dict())) == found
    again = pickle.loads(pickle.dumps(found))
    assert isinstance(again, DeviceMap)
    assert (again, again.main_device, again.shares) == (found, found.main_device, found.shares)
    assert (found.boundaries, len(set(found.values()))) == (2, 3)


def test_the_table_and_the_page_show_devices_modules_and_bytes():
    found = infer_auto_device_map(linears(100, 100, 100, 100), {0: 200, 1: 104, "cpu": 500})
    lines = str(found).splitlines()
    assert lines[0].split() == re.findall(r"\w+", "device modules weights room to stream activations free after of")
    assert [line.split()[:2] for line in lines[2:-2]] == [["0", "0"], ["1", "1"], ["cpu", "2"]]
    assert re.split(r" {2,}", lines[2]) == ["0", "0", "100 B", "100 B", "0 B", "0 B", "200 B"]
    assert "2 - 3" in lines[4]
    assert lines[-1] == "2 boundaries between devices, 400 B in all"
    page = found.html()
    assert page.count('role="img"') == 4
    assert 'title="3: 100 B"' in page


def test_a_bar_is_as_long_as_its_device_unless_that_has_room_for_more_than_the_model():
    page = infer_auto_device_map(linears(100, 100), {0: 100, "cpu": 150, "disk": 10_000}).html()
    bars = re.findall(r'class="(bar(?: cut)?)" role="img" aria-label="([^:]*):[^"]*" style="width:([\d.]+)%"', page)
    assert bars == [("bar", "device 0", "66.667"), ("bar", "cpu", "100.000"), ("bar cut", "disk", "100.000")]


def test_a_module_is_explained():
    model = three(FIRST_TIE)
    found = infer_auto_device_map(model, {0: 300, 1: 300, "cpu": 500}, no_split_module_classes=[])
    assert "together with layer3.linear2 (shared weights)" in found.explain("layer1.linear2")
    assert "layer2.linear1" in found.explain("layer2")
    with pytest.raises(ConfigurationError, match=r"no module 'layr1'. Did you mean 'layer1'"):
        found.explain("layr1")
    kept = infer_auto_device_map(linears(100, 100, 100), {0: 200, "cpu": 500})
    assert kept.explain("2.weight") == (
        "2 (100 B) is on cpu, and is copied to 0 when it runs, with no room to prefetch it: 0 has 0 B left of "
        "200 B, with 100 B reserved for offloaded blocks."
    )
    assert "\nno room to prefetch a block: copies and computation do not overlap\n" in str(kept)
    roomier = infer_auto_device_map(linears(100, 100, 100), {0: 200, "cpu": 500}, prefetch=1)
    assert roomier.prefetch == 1
    assert "ahead" not in roomier.explain("2.weight") + str(roomier)


def test_verbose_logs_the_reasons(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO):
        infer_auto_device_map(Small(), {0: 200, 1: 200}, verbose=True)
    assert "linear2 (100 B) is on 1: 0 has 136 B left of 200 B" in caplog.text


@pytest.mark.parametrize(
    ("given", "cleaned"),
    [
        ({"a": 0, "b": 0, "c": 0}, {"": 0}),
        ({"a.x": 0, "a.y": 0, "b.x": 1, "b.y": 1, "c": 1}, {"a": 0, "b": 1, "c": 1}),
        (
            {"a.x": 0, "a.y": 0, "b.x.0": 1, "b.x.1": 1, "b.y.0": 2, "b.y.1": 2, "c": 2},
            {"a": 0, "b.x": 1, "b.y": 2, "c": 2},
        ),
        ({"a.b": 0, "ab": 1}, {"a": 0, "ab": 1}),
    ],
)
def test_a_map_is_cleaned(given: dict[str, int], cleaned: dict[str, int]):
    assert clean_device_map(given) == cleaned
    assert given == cleaned


def test_a_map_is_cleaned_within_a_module():
    assert clean_device_map({"a.x": 0, "a.y": 0, "b.x": 0, "b.y": 0}, "b") == {"a.x": 0, "a.y": 0, "b": 0}


# Maps that are given


def test_a_map_of_everything_passes():
    check_device_map(Small(), {"": 0})
    check_device_map(Small(), {"linear1": 0, "linear2": 1, "batchnorm": 1})
    check_device_map(three(FIRST_TIE), {"layer1": 0, "layer2": 1, "layer3": 0})
    check_device_map(three(FIRST_TIE), {"": 0, "layer2": 1})
    check_device_map(three(FIRST_TIE), {"layer1": "cuda", "layer2": 1, "layer3": torch.device("cuda:0")})
    check_device_map(three(FIRST_TIE), {"layer1": 0, "layer2": 1, "layer3": 0, "layer3.linear1": 0})


@pytest.mark.parametrize(
    ("device_map", "message"),
    [
        ({"layer1": 0, "layer2": 0, "layer3.linear1": 0, "layer3.batchnorm": 1}, "no device to layer3.linear2.weight"),
        ({"layer1": 0, "layer2": 1, "layer3": 0, "layer3.linear1": 1}, "puts 'layer3.linear1' on 1, but 'layer3'"),
        ({"": 0, "layer3": 1, "layer3.linear1.weight": 2}, "puts 'layer3.linear1.weight' on 2, but 'layer3'"),
        ({"layer1": 0, "layer2": 1, "layer3": 1}, "layer1.linear2.weight and layer3.linear2.weight are one weight"),
        ({"": "cpu", "layer3": "disk"}, "puts them on 'cpu' and 'disk'. Put both on one device."),
    ],
)
def test_a_map_that_does_not_fit_the_model_is_refused(device_map: dict[str, int], message: str):
    with pytest.raises(ConfigurationError, match=message):
        check_device_map(three(FIRST_TIE), device_map)


def test_names_that_are_nothing_in_the_model_are_warned_of_and_named_where_something_is_missing():
    with pytest.warns(UserWarning, match=r"device_map keys do not match any submodules.*'linear22'.*'linear2'"):
        check_device_map(Small(), {"linear1": 0, "linear2": 0, "batchnorm": 0, "linear22": 0})
    with (
        pytest.warns(UserWarning, match="do not match"),
        pytest.raises(ConfigurationError, match=r"no device to batchnorm.weight.* Did you mean 'batchnrm'"),
    ):
        check_device_map(Small(), {"linear1": 0, "linear2": 0, "batchnrm": 0})


def test_ties_over_several_devices_are_reported(caplog: pytest.LogCaptureFixture):
    model = three(FIRST_TIE)
    check_tied_parameters_on_same_device(find_tied_parameters(model), {"": 0})
    assert caplog.text == ""
    check_tied_parameters_on_same_device(find_tied_parameters(model), {"layer1": 0, "layer2": 0, "layer3": 1})
    assert "layer3.linear2.weight" in caplog.text


def test_a_name_a_device_and_a_dict_stand_for_maps():
    assert resolve_device_map(Small(), "cpu") == {"": "cpu"}
    assert resolve_device_map(Small(), torch.device("cpu")) == {"": "cpu"}
    assert resolve_device_map(Small(), {"": "disk"}) == {"": "disk"}
    assert isinstance(resolve_device_map(Small(), "auto", {"cpu": 500}), DeviceMap)
    with pytest.raises(ConfigurationError, match=r"'balancd' is not a device.* Did you mean 'balanced'"):
        resolve_device_map(Small(), "balancd")


def test_a_device_that_is_not_there_is_refused():
    absent = max((device for device in get_max_memory() if isinstance(device, int)), default=-1) + 1
    with pytest.raises(DeviceNotAvailableError, match=rf"'linear2' on {absent}, which this machine does not have"):
        resolve_device_map(Small(), {"linear1": "cpu", "batchnorm": "cpu", "linear2": absent})


def calls_of(function: Callable[[], Any]) -> tuple[Any, int]:
    """What a function returns, and how many functions of the package it called."""
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call" and "drivetrain" in frame.f_code.co_filename

    sys.setprofile(count)
    try:
        return function(), calls
    finally:
        sys.setprofile(None)


def test_the_work_to_place_a_model_grows_with_its_blocks_and_not_with_their_square():
    with init_empty_weights():
        small, large = (nn.Sequential(*(nn.TransformerEncoderLayer(1024, 8) for _ in range(size))) for size in (20, 80))
    budget = {0: "1GB", 1: "1.3GB", "cpu": "4GB"}
    for policy in ("sequential", "balanced"):
        _, few = calls_of(lambda policy=policy: infer_auto_device_map(small, budget, policy=policy))
        found, many = calls_of(lambda policy=policy: infer_auto_device_map(large, budget, policy=policy))
        assert len(found) == 80
        assert few < many < 8 * few, (policy, few, many)
