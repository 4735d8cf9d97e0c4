"""Folders of weights, and mappings over them, under Accelerate's names."""

from __future__ import annotations

import json
import os

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from drivetrain import (
    CheckpointError,
    OffloadedWeightsLoader,
    PrefixedDataset,
    extract_submodules_state_dict,
    load_offloaded_weight,
    load_offloaded_weights,
    offload_state_dict,
    offload_weight,
    save_offload_index,
)


@pytest.mark.parametrize(
    "weight",
    [torch.randn(2, 3).to(dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)]
    + [torch.tensor(3), torch.zeros(0, 4), torch.tensor([True, False]), torch.randn(4, 6).t()],
    ids=lambda weight: f"{weight.dtype} {tuple(weight.shape)}",
)
def test_a_weight_comes_back_as_it_was(tmp_path, weight):
    index = offload_weight(weight, "a.weight", tmp_path)
    assert index == {"a.weight": {"dtype": str(weight.dtype)[6:], "shape": list(weight.shape)}}
    assert torch.equal(load_offloaded_weight(tmp_path / "a.weight.dat", index["a.weight"]), weight)


def test_a_file_that_is_too_short_is_refused(tmp_path):
    index = offload_weight(torch.zeros(8), "w", tmp_path, {})
    os.truncate(tmp_path / "w.dat", 12)
    with pytest.raises(CheckpointError, match=r"w\.dat is truncated"):
        load_offloaded_weight(tmp_path / "w.dat", index["w"])


def test_an_index_is_added_to(tmp_path):
    save_offload_index({}, tmp_path)
    assert not (tmp_path / "index.json").exists()
    offload_state_dict(tmp_path, {"a": torch.zeros(2)})
    offload_state_dict(tmp_path, {"b": torch.zeros(3)})
    assert set(json.loads((tmp_path / "index.json").read_text())) == {"a", "b"}


def test_weights_of_memory_and_folder_are_one_mapping(tmp_path):
    state = nn.Linear(3, 4).state_dict()
    offload_state_dict(tmp_path, state)
    memory = {"weight": state["weight"] + 1}
    weights = OffloadedWeightsLoader(memory, save_folder=tmp_path)
    assert sorted(weights) == ["bias", "weight"]
    assert len(weights) == 2
    assert torch.equal(weights["weight"], memory["weight"])
    assert torch.equal(weights["bias"], state["bias"])


def test_weights_of_safetensors_are_not_copied(tmp_path):
    save_file({"w": torch.arange(4.0)}, tmp_path / "m.safetensors")
    index = {"weight": {"safetensors_file": str(tmp_path / "m.safetensors"), "weight_name": "w", "dtype": "float32"}}
    weights = OffloadedWeightsLoader(index=index)
    assert torch.equal(weights["weight"], torch.arange(4.0))
    assert weights["weight"].data_ptr() == weights["weight"].data_ptr()
    index["weight"]["dtype"] = "float16"
    assert OffloadedWeightsLoader(index=index)["weight"].dtype == torch.float16


@pytest.mark.parametrize(
    ("content", "message"), [("[]", "not a valid index"), ("{", "cannot be read"), (None, "cannot be read")]
)
def test_a_folder_without_an_index_is_refused(tmp_path, content, message):
    if content is not None:
        (tmp_path / "index.json").write_text(content)
    with pytest.raises(CheckpointError, match=message):
        OffloadedWeightsLoader(save_folder=tmp_path)


def test_an_index_that_names_what_a_file_does_not_hold_is_refused(tmp_path):
    save_file({"w": torch.arange(4.0)}, tmp_path / "m.safetensors")
    index = {"weight": {"safetensors_file": "m.safetensors", "weight_name": "v"}}
    with pytest.raises(CheckpointError, match=r"refers to v in .*m\.safetensors for weight"):
        OffloadedWeightsLoader(save_folder=tmp_path, index=index)["weight"]


def test_a_prefix_is_added_to_names():
    part = PrefixedDataset({"a.x": 1, "a.y": 2, "b.x": 3}, "a.")
    assert dict(part) == {"x": 1, "y": 2}
    assert len(part) == 2


def test_entries_of_modules_are_chosen_by_whole_names():
    state = {"a.1": 0, "a.10": 1, "a.2": 2, "a.1.x": 3, "a.10.x": 4}
    assert extract_submodules_state_dict(state, ["a.1", "a.2"]) == {"a.1": 0, "a.2": 2, "a.1.x": 3}


def test_weights_of_a_folder_are_read_into_a_model(tmp_path):
    state = nn.Linear(3, 4).state_dict()
    index = offload_weight(state["weight"], "weight", tmp_path, {})
    model = nn.Linear(3, 4, device="meta")
    load_offloaded_weights(model, index, tmp_path)
    assert torch.equal(model.weight, state["weight"])
    assert model.bias.is_meta


NAMES_THAT_LEAD_OUT = ["../out", "/tmp/out", "a/../../out", "a\\..\\..\\out", "nul\0byte", "link/out"]


@pytest.mark.parametrize("name", NAMES_THAT_LEAD_OUT)
def test_a_name_that_leads_out_of_the_folder_is_neither_written_nor_read(tmp_path, name):
    folder, outside = tmp_path / "folder", tmp_path / "elsewhere"
    folder.mkdir()
    outside.mkdir()
    (folder / "link").symlink_to(outside)
    (tmp_path / "out.dat").write_bytes(bytes(8))
    (outside / "out.dat").write_bytes(bytes(8))
    before = sorted(path for path in tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match="points outside the folder"):
        offload_weight(torch.ones(2), name, folder)
    (folder / "index.json").write_text(json.dumps({name: {"dtype": "float32", "shape": [2]}}))
    with pytest.raises(CheckpointError, match="points outside the folder"):
        OffloadedWeightsLoader(save_folder=folder)[name]
    assert sorted(path for path in tmp_path.rglob("*") if path.name != "index.json") == before


def test_a_file_of_an_index_is_in_its_folder(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    save_file({"w": torch.ones(2)}, tmp_path / "outside.safetensors")
    index = {"w": {"safetensors_file": "../outside.safetensors", "weight_name": "w"}}
    (folder / "index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="points outside the folder"):
        OffloadedWeightsLoader(save_folder=folder)["w"]


def test_a_weight_may_have_a_name_with_a_folder_in_it(tmp_path):
    index = offload_weight(torch.ones(2), "experts/0.weight", tmp_path)
    save_offload_index(index, tmp_path)
    assert torch.equal(OffloadedWeightsLoader(save_folder=tmp_path)["experts/0.weight"], torch.ones(2))


def test_an_index_that_is_nested_without_end_is_refused(tmp_path):
    (tmp_path / "index.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="cannot be read"):
        OffloadedWeightsLoader(save_folder=tmp_path)
