"""Models over memory and disk as a map says: each weight where it was said to be, and outputs as before."""

from __future__ import annotations

import json
import logging
import os

import pytest
import torch
from torch import nn

from drivetrain import (
    CheckpointError,
    ConfigurationError,
    StreamOptions,
    check_device_map,
    cpu_offload,
    disk_offload,
    dispatch_model,
    group_offload,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
    offload_state_dict,
    resolve_device_map,
)
from drivetrain.inference import loading
from drivetrain.inference.offloaded import mapped_range
from tests.inference.block_models import IDS, Blocks, empty, saved, seeded

CPU_ALONE = not torch.accelerator.is_available()
on_cpu = pytest.mark.skipif(not CPU_ALONE, reason="this machine has an accelerator, which the default would choose")


def on_disk(model: nn.Module) -> set[str]:
    return {name for name, tensor in model.named_parameters() if mapped_range(tensor) is not None}


def hooks(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


MIXED = {
    "words": "cpu",
    "head": "cpu",
    "layers.0": "disk",
    "layers.1": "cpu",
    "layers.2.up": "disk",
    "layers.2.down": "cpu",
    "layers.3": "disk",
    "norm": "cpu",
}


@pytest.mark.parametrize(
    ("device_map", "disk"),
    [
        ({"": "cpu"}, 0),
        ({"": "disk"}, 19),
        ("disk", 19),
        (MIXED, 10),
        ({"": "disk", "layers": "cpu"}, 3),
    ],
    ids=["cpu", "disk", "a name", "mixed", "nested"],
)
def test_each_weight_is_where_the_map_says(tmp_path, device_map, disk):
    expected = seeded()(IDS)
    model = dispatch_model(seeded(), device_map, main_device="cpu", offload_dir=tmp_path)
    assert len(on_disk(model)) == disk
    assert torch.equal(model(IDS), expected)
    assert model.head.weight is model.words.weight
    assert model.hf_device_map == (device_map if isinstance(device_map, dict) else {"": device_map})


SPLIT = {"words": "cpu", "table": "cpu", "layers": "disk", "norm": "disk", "head": "disk"}
TWICE = {"words": "cpu", "table": "cpu", "layers": "disk", "layers.1": "cpu", "norm": "cpu", "head": "cpu"}


@pytest.mark.parametrize(
    ("device_map", "message"),
    [
        (SPLIT, r"head\.weight and words\.weight are one weight, but .* on 'disk' and 'cpu'\. Put both on one device"),
        (TWICE, r"puts 'layers\.1' on 'cpu', but 'layers', which contains it, on 'disk'"),
    ],
    ids=["a tie on two", "a module twice"],
)
def test_a_map_that_gives_something_two_devices_is_refused_by_each_function(tmp_path, device_map, message):
    path = saved(seeded(), tmp_path / "model.safetensors")
    kept, built = seeded(), empty()
    for place in (
        lambda: check_device_map(kept, device_map),
        lambda: resolve_device_map(kept, device_map),
        lambda: dispatch_model(kept, device_map, main_device="cpu", offload_dir=tmp_path / "off"),
        lambda: load_checkpoint_in_model(built, path, device_map),
        lambda: load_checkpoint_and_dispatch(built, path, device_map, main_device="cpu"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            place()
    assert hooks(kept) == 0
    assert on_disk(kept) == set()
    assert all(parameter.is_meta for parameter in built.parameters())


@on_cpu
def test_a_model_on_one_device_has_no_hooks(tmp_path):
    model = dispatch_model(seeded(), {"": "cpu"})
    assert hooks(model) == 0
    assert not hasattr(model, "_hf_hook")
    assert hooks(cpu_offload(seeded())) == 0


def test_modules_in_memory_have_no_hooks(tmp_path):
    model = dispatch_model(seeded(), MIXED, main_device="cpu", offload_dir=tmp_path)
    assert hooks(model.layers[1]) == hooks(model.norm) == hooks(model.words) == 0
    assert hooks(model.layers[0]) == 2


@on_cpu
def test_other_packages_read_where_a_module_computes(tmp_path):
    model = disk_offload(seeded(), tmp_path)
    hook = model.layers[0]._hf_hook
    assert (hook.execution_device, hook.offload) == (torch.device("cpu"), True)
    assert model._hf_hook.io_same_device


@on_cpu
def test_disk_offload_of_a_model_over_safetensors_writes_nothing(tmp_path):
    path = saved(seeded(), tmp_path / "model.safetensors")
    model = empty()
    load_checkpoint_in_model(model, path, {"": "disk"})
    disk_offload(model, tmp_path / "off")
    assert not (tmp_path / "off").exists()
    assert torch.equal(model(IDS), seeded()(IDS))


@on_cpu
def test_disk_offload_writes_what_is_in_memory_once(tmp_path):
    model = disk_offload(seeded(), tmp_path)
    files = {file.name for file in tmp_path.iterdir()}
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    assert sum(file.stat().st_size for file in tmp_path.glob("*.safetensors")) < size + 8192
    disk_offload(seeded(), tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == files


@on_cpu
@pytest.mark.parametrize("written", ["a checkpoint", "by disk_offload", "by offload_state_dict"])
def test_disk_offload_of_a_model_without_values_reads_the_folder(tmp_path, written):
    if written == "a checkpoint":
        saved(seeded(), tmp_path / "model.safetensors")
    elif written == "by disk_offload":
        disk_offload(seeded(), tmp_path)
    else:
        offload_state_dict(tmp_path, {k: v for k, v in seeded().state_dict().items() if k != "head.weight"})
    model = disk_offload(empty(), tmp_path)
    assert on_disk(model) == {name for name, _ in model.named_parameters()}
    assert torch.equal(model(IDS), seeded()(IDS))
    assert model.head.weight is model.words.weight


@on_cpu
def test_values_are_given_as_a_state_dict_too():
    weights = seeded().state_dict()
    for model in (cpu_offload(empty(), state_dict=weights), dispatch_model(empty(), {"": "cpu"}, state_dict=weights)):
        assert torch.equal(model(IDS), seeded()(IDS))


@pytest.mark.parametrize("of_ours", [False, True], ids=["of safetensors", "of a folder"])
def test_an_index_that_is_given_leads_to_the_weights(tmp_path, of_ours):
    weights = {name: value for name, value in seeded().state_dict().items() if name != "head.weight"}
    folder = tmp_path / "off" if of_ours else None
    if folder is not None:
        offload_state_dict(folder, weights)
        index = json.loads((folder / "index.json").read_text())
        (folder / "index.json").unlink()
    else:
        path = str(saved(seeded(), tmp_path / "model.safetensors"))
        index = {name: {"safetensors_file": path, "weight_name": name, "dtype": "float32"} for name in weights}
    model = dispatch_model(empty(), "disk", main_device="cpu", offload_dir=folder, offload_index=index)
    assert on_disk(model) == {name for name, _ in model.named_parameters()}
    assert torch.equal(model(IDS), seeded()(IDS))


@on_cpu
def test_the_device_that_computes_with_offloaded_weights_is_logged_once(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(loading.logger, "_seen", set())
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            disk_offload(seeded(), tmp_path)
    assert caplog.text.count("Modules whose weights are offloaded compute on cpu.") == 1


@on_cpu
@pytest.mark.parametrize("buffers", [False, True])
def test_buffers_are_offloaded_on_demand_and_keep_what_the_forward_writes(tmp_path, buffers):
    model, plain = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    disk_offload(model, tmp_path, offload_buffers=buffers, stream=StreamOptions(budget=0))
    assert (mapped_range(model.running_mean) is not None) == buffers
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(8, 4)
        assert torch.equal(model(x), plain(x))
    assert torch.equal(model.running_mean, plain.running_mean)


@on_cpu
def test_weights_are_in_memory_again_once_hooks_are_removed(tmp_path):
    model = disk_offload(seeded(), tmp_path)
    model._hf_hook.detach_hook(model)
    for file in tmp_path.iterdir():
        os.truncate(file, 0)
    assert on_disk(model) == set()
    assert torch.equal(model(IDS), seeded()(IDS))
    assert all(parameter.requires_grad for parameter in model.parameters())


@on_cpu
def test_a_model_can_be_placed_again(tmp_path):
    model, expected = seeded(), seeded()(IDS)
    for place in (MIXED, {"": "disk"}, {"": "cpu"}, MIXED):
        dispatch_model(model, place, offload_dir=tmp_path)
        assert torch.equal(model(IDS), expected)
    assert hooks(dispatch_model(model, {"": "cpu"})) == 0


@on_cpu
@pytest.mark.parametrize("disk", [False, True])
@pytest.mark.parametrize("kind", ["block_level", "leaf_level"])
def test_group_offload_takes_the_arguments_of_diffusers(tmp_path, kind, disk):
    model = group_offload(
        seeded(),
        offload_type=kind,
        num_blocks_per_group=2,
        use_stream=True,
        offload_to_disk_path=tmp_path if disk else None,
    )
    assert torch.equal(model(IDS), seeded()(IDS))
    stream = model._hf_hook.placement.stream if disk else None
    assert stream is None or len(stream.groups) == {"block_level": 5, "leaf_level": 11}[kind]


@pytest.mark.parametrize(
    ("device_map", "message"),
    [
        ({"words": "cpu", "layerz": "disk"}, "'layerz'.*Did you mean 'layers"),
        ({"words": "cpu", "layers": "disk", "head": "cpu"}, r"no entry for norm\.weight"),
        ({"": "cuda:0"} if CPU_ALONE else {"": "xpu:99"}, "Device"),
        ({"": 0} if CPU_ALONE else {"": 99}, "this machine has 0 accelerators"),
        ({"": "nowhere"}, "is not a device"),
        ("autos", "Did you mean 'auto'"),
    ],
    ids=str,
)
def test_maps_that_do_not_fit_are_refused(tmp_path, device_map, message):
    with pytest.raises((ConfigurationError, RuntimeError), match=message):
        dispatch_model(seeded(), device_map, offload_dir=tmp_path)


def test_weights_for_the_disk_need_a_folder():
    with pytest.raises(ConfigurationError, match=r"words\.weight.*offload_dir"):
        dispatch_model(seeded(), {"": "disk"}, main_device="cpu")


def test_a_model_without_values_is_refused_by_name(tmp_path):
    with pytest.raises(CheckpointError, match=r"words\.weight.*no values"):
        dispatch_model(empty(), {"": "disk"}, main_device="cpu", offload_dir=tmp_path / "off")


@pytest.mark.parametrize(
    ("options", "message"), [({"offload_type": "block"}, "block_level"), ({"offload_device": "disk"}, "to_disk_path")]
)
def test_group_offload_refuses_what_it_cannot(options, message):
    with pytest.raises(ConfigurationError, match=message):
        group_offload(seeded(), **options)


def test_hooks_on_one_device_are_on_demand(tmp_path):
    model = dispatch_model(seeded(), {"": "cpu"}, main_device="cpu", force_hooks=True)
    assert model._hf_hook.execution_device == torch.device("cpu")
    assert torch.equal(model(IDS), seeded()(IDS))


def test_loading_without_a_map_leaves_a_plain_model(tmp_path):
    model = load_checkpoint_and_dispatch(Blocks(), saved(seeded(), tmp_path / "model.safetensors"))
    assert hooks(model) == 0
    assert torch.equal(model(IDS), seeded()(IDS))


def test_loading_and_placing_over_memory_and_disk(tmp_path):
    path = saved(seeded(), tmp_path / "model.safetensors")
    model = load_checkpoint_and_dispatch(
        empty(), path, MIXED, main_device="cpu", strict=True, stream=StreamOptions(budget=0)
    )
    assert len(on_disk(model)) == 10
    assert torch.equal(model(IDS), seeded()(IDS))


@pytest.mark.parametrize(("classes", "splits"), [(["Block"], False), ([], True)])
def test_a_map_by_name_keeps_the_classes_whole_that_are_named(tmp_path, classes, splits):
    model = load_checkpoint_and_dispatch(
        empty(),
        saved(seeded(), tmp_path / "model.safetensors"),
        "sequential",
        max_memory={"cpu": 6500},
        no_split_module_classes=classes,
    )
    assert set(model.hf_device_map.values()) == {"cpu", "disk"}
    assert any(name.endswith((".up", ".down")) for name in model.hf_device_map) == splits
    assert torch.equal(model(IDS), seeded()(IDS))
