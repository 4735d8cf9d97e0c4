"""Weights from files into models: where each lands, how it is cast, and what is refused."""

from __future__ import annotations

import json
import logging
import os
import pickle
import re
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from drivetrain import (
    Accelerator,
    CheckpointError,
    ConfigurationError,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
    load_state_dict,
    merge_adapters,
    prepare_pippy,
    quantize_model,
)
from drivetrain.inference.offloaded import mapped_range
from tests.inference.block_models import IDS, Blocks, empty, saved, seeded
from tests.pool import run_in_processes


def in_two_files(model: nn.Module, folder: Path, suffix: str) -> Path:
    """An index and two files, of which the second holds the last half of the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: value.clone() for name, value in model.state_dict().items() if name != "head.weight"}
    stem = "model" if suffix == "safetensors" else "pytorch_model"
    places = {}
    for number, part in enumerate((list(weights)[:9], list(weights)[9:]), start=1):
        file = f"{stem}-0000{number}-of-00002.{suffix}"
        one = {name: weights[name] for name in part}
        if suffix == "safetensors":
            save_file(one, folder / file)
        else:
            torch.save(one, folder / file)
        places.update(dict.fromkeys(part, file))
    index = folder / f"{stem}.{suffix}.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    return index


def bare_index(model: nn.Module, folder: Path) -> Path:
    """An index that is the map alone."""
    index = in_two_files(model, folder, "bin")
    index.write_text(json.dumps(json.loads(index.read_text())["weight_map"]))
    return index


def of_ours(model: nn.Module, folder: Path) -> Path:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(model)
    accelerator.save_state(str(folder))
    return folder


SOURCES = {
    "a file": lambda model, path: saved(model, path / "weights.safetensors"),
    "a folder": lambda model, path: saved(model, path / "model.safetensors").parent,
    "a file of torch.save": lambda model, path: (torch.save(model.state_dict(), path / "m.bin"), path / "m.bin")[1],
    "an index": lambda model, path: in_two_files(model, path, "safetensors"),
    "an index that is a map alone": bare_index,
    "a folder with an index": lambda model, path: in_two_files(model, path, "bin").parent,
    "a checkpoint of ours": lambda model, path: of_ours(model, path / "step_100"),
    "tensors": lambda model, path: model.state_dict(),
    "a URL of a file": lambda model, path: f"memory://{saved(model, path / 'm.safetensors')}",
    "a URL of a folder": lambda model, path: f"memory://{in_two_files(model, path, 'safetensors').parent}",
}


def uploaded(source, path: Path):
    if isinstance(source, str) and source.startswith("memory://"):
        import fsspec

        for file in path.iterdir():
            fsspec.filesystem("memory").pipe_file(str(file), file.read_bytes())
    return source


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("memory", [True, False], ids=["values", "no values"])
def test_every_source_fills_a_model(tmp_path, kind, memory):
    model = seeded()
    source = uploaded(SOURCES[kind](model, tmp_path), tmp_path)
    other = Blocks() if memory else empty()
    load_checkpoint_in_model(other, source, strict=True)
    assert torch.equal(other(IDS), model(IDS))
    assert other.head.weight is other.words.weight


@pytest.mark.parametrize("kind", ["a file", "an index", "a checkpoint of ours"])
def test_safetensors_are_used_from_where_they_are(tmp_path, kind):
    model = seeded()
    source = SOURCES[kind](model, tmp_path)
    other = empty()
    load_checkpoint_in_model(other, source, "disk")
    assert all(mapped_range(parameter) is not None for parameter in other.parameters())
    assert torch.equal(load_checkpoint_and_dispatch(empty(), source, "disk")(IDS), model(IDS))


@pytest.mark.parametrize("kind", ["a file of torch.save", "tensors"])
def test_others_are_written_to_the_offload_folder(tmp_path, kind):
    model = seeded()
    source = SOURCES[kind](model, tmp_path)
    with pytest.raises(ConfigurationError, match="offload_folder"):
        load_checkpoint_in_model(empty(), source, {"": "disk"})
    other = load_checkpoint_and_dispatch(empty(), source, "disk", offload_folder=tmp_path / "off")
    assert torch.equal(other(IDS), model(IDS))
    assert sum(file.stat().st_size for file in (tmp_path / "off").glob("*.safetensors")) > 0


def run_sharded(folder: str) -> None:
    from drivetrain import FSDP

    accelerator = Accelerator(cpu=True, strategy=FSDP())
    accelerator.prepare(seeded())
    accelerator.save_state(folder)


@pytest.mark.sharded
def test_a_run_in_shards_opens_on_one_process_without_merging(tmp_path):
    run_in_processes(run_sharded, 2, args=[str(tmp_path / "step_1")])
    other = empty()
    load_checkpoint_in_model(other, tmp_path / "step_1", strict=True)
    assert torch.equal(other(IDS), seeded()(IDS))


def test_weights_are_cast_on_the_way(tmp_path):
    path = saved(seeded(), tmp_path / "model.safetensors")
    other = empty()
    load_checkpoint_in_model(other, path, {"": "cpu"}, dtype="bfloat16", keep_in_fp32_modules=["norm"])
    assert other.words.weight.dtype == other.layers[0].up.bias.dtype == torch.bfloat16
    assert other.norm.weight.dtype == torch.float32
    assert torch.equal(other.words.weight, seeded().words.weight.bfloat16())


def test_without_a_dtype_weights_get_that_of_the_model(tmp_path):
    save_file(nn.Linear(3, 3).bfloat16().state_dict(), tmp_path / "m.safetensors")
    with init_empty_weights():
        model = nn.Linear(3, 3)
    with pytest.raises(ConfigurationError, match="dtype='bfloat16'"):
        load_checkpoint_in_model(model, tmp_path / "m.safetensors", {"": "disk"})
    load_checkpoint_in_model(model, tmp_path / "m.safetensors", {"": "disk"}, offload_folder=tmp_path)
    assert model.weight.dtype == torch.float32
    load_checkpoint_in_model(model, tmp_path / "m.safetensors", {"": "disk"}, dtype=torch.bfloat16)
    assert mapped_range(model.weight).file.path == str(tmp_path / "m.safetensors")


def test_integers_keep_their_dtype(tmp_path):
    model = nn.BatchNorm1d(3)
    load_checkpoint_in_model(model, nn.BatchNorm1d(3).state_dict(), dtype=torch.float16)
    assert (model.num_batches_tracked.dtype, model.running_mean.dtype) == (torch.int64, torch.float16)


def test_loading_again_over_mapped_weights_leaves_the_file_alone(tmp_path):
    path = saved(seeded(), tmp_path / "model.safetensors")
    before = path.read_bytes()
    model = empty()
    load_checkpoint_in_model(model, path, {"": "disk"})
    changed = {name: value + 1 for name, value in seeded().state_dict().items()}
    load_checkpoint_in_model(model, changed, {"": "cpu"})
    assert mapped_range(model.words.weight) is None
    assert torch.equal(model.words.weight, changed["words.weight"])
    assert path.read_bytes() == before


def test_what_is_missing_or_left_over_is_an_error_under_strict_only(tmp_path, caplog):
    weights = seeded().state_dict()
    weights["other"] = weights.pop("norm.bias")
    with caplog.at_level(logging.WARNING):
        load_checkpoint_in_model(seeded(), weights)
    assert "other" in caplog.text
    assert "norm.bias" in caplog.text
    with pytest.raises(CheckpointError, match=r"missing: norm\.bias; left over: other"):
        load_checkpoint_in_model(seeded(), weights, strict=True)


def test_a_weight_that_would_stay_without_values_is_an_error_that_names_it():
    weights = seeded().state_dict()
    del weights["norm.bias"]
    with pytest.raises(CheckpointError, match=r"has values for norm\.bias"):
        load_checkpoint_in_model(empty(), weights)


def test_a_table_without_values_is_an_error_that_says_how_to_have_it_computed():
    with init_empty_weights(include_buffers=True):
        model = Blocks()
    with pytest.raises(CheckpointError, match=r"table.*include_buffers=False"):
        load_checkpoint_in_model(model, seeded().state_dict())


def test_other_shapes_and_kinds_of_dtype_are_refused_before_anything_is_loaded():
    weights = seeded().state_dict()
    weights["norm.bias"] = torch.zeros(3)
    weights["norm.weight"] = torch.zeros(16, dtype=torch.int8)
    model = seeded()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"norm\.weight has the dtype int8.*norm\.bias is \(3,\) there"):
        load_checkpoint_in_model(model, {**weights, "words.weight": torch.ones(10, 16)})
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def cut(path: Path, index: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 10)


def lie(path: Path, index: Path) -> None:
    content = json.loads(index.read_text())
    content["weight_map"]["norm.bias"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(content))


def lead_away(path: Path, index: Path) -> None:
    index.write_text(index.read_text().replace("model-00001", "../model-00001"))


def overlap(path: Path, index: Path) -> None:
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    first, second = [name for name in header if header[name]["shape"] == [16, 16]][:2]
    header[second]["data_offsets"] = header[first]["data_offsets"]
    text = json.dumps(header, separators=(",", ":")).encode().ljust(length)
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut, r"00001-of-00002.safetensors is truncated"),
        (lambda path, index: path.unlink(), r"00001-of-00002.safetensors"),
        (lambda path, index: path.write_bytes(b"<html>not found</html>"), "does not begin with a safetensors header"),
        (lie, r"norm.bias in model-00001-of-00002.safetensors, but this file does not contain norm.bias"),
        (lead_away, "only files in its own directory"),
        (lambda path, index: index.write_text("[]"), "no weight_map"),
        (lambda path, index: index.write_text('{"weight_map": {"norm.bias": 3}}'), "does not map names"),
        (overlap, "does not begin where the previous tensor ends"),
    ],
)
def test_damaged_files_are_refused_by_name(tmp_path, damage, message):
    index = in_two_files(seeded(depth=2), tmp_path, "safetensors")
    damage(tmp_path / "model-00001-of-00002.safetensors", index)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint_in_model(empty(depth=2), index)


def closed(path: Path, name: str) -> str:
    """What loading says to a user who may not read something in a folder that all may enter."""
    os.chdir(path)
    os.chmod(name, 0)
    if os.geteuid() == 0:  # whom nothing is closed to
        os.seteuid(65534)
    try:
        load_checkpoint_and_dispatch(empty(depth=2), name.split("/")[0], "disk", main_device="cpu")
    except CheckpointError as error:
        return str(error)
    return "loaded"


@pytest.mark.skipif(not hasattr(os, "seteuid"), reason="the system has no users to be one of")
@pytest.mark.parametrize(
    "name",
    [
        "folder/model-00001-of-00002.safetensors",
        "folder/model.safetensors.index.json",
        "torch/pytorch_model-00002-of-00002.bin",
        "alone.safetensors",
        "step_100/tensors/rank_0_0.safetensors",
        "step_100/MANIFEST.json",
        "folder",
    ],
)
def test_what_may_not_be_read_is_refused_by_name(name):
    with tempfile.TemporaryDirectory() as place:  # those of pytest are closed to other users
        path = Path(place)
        in_two_files(seeded(depth=2), path / "folder", "safetensors")
        in_two_files(seeded(depth=2), path / "torch", "bin")
        saved(seeded(depth=2), path / "alone.safetensors")
        of_ours(seeded(depth=2), path / "step_100")
        path.chmod(0o755)
        (message,) = run_in_processes(closed, 1, args=[path, name])
    assert re.search(rf"{re.escape(str(path.resolve() / name))} cannot be read: .*Permission denied", message)


@pytest.mark.parametrize("place", ["", "memory://"], ids=["here", "a URL"])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: content[:-40], r"MANIFEST\.json is damaged"),
        (lambda content: b"", r"MANIFEST\.json is damaged"),
        (lambda content: content.replace(b'"step"', b'"stop"'), r"MANIFEST\.json is damaged: its content"),
        (lambda content: b'{"format": "of something else"}', r"MANIFEST\.json is not the manifest of a drivetrain"),
    ],
    ids=["cut", "empty", "changed", "another"],
)
def test_a_checkpoint_with_a_damaged_manifest_is_refused_by_its_name(tmp_path, damage, message, place):
    folder = of_ours(seeded(), tmp_path / "step_1")
    (folder / "MANIFEST.json").write_bytes(damage((folder / "MANIFEST.json").read_bytes()))
    if place:
        import fsspec

        for file in folder.rglob("*.*"):
            fsspec.filesystem("memory").pipe_file(str(file), file.read_bytes())
    for load in (load_checkpoint_in_model, load_checkpoint_and_dispatch):
        with pytest.raises(CheckpointError, match=message):
            load(empty(), f"{place}{folder}")


class Bomb:
    """Makes a folder where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def bombs(path: Path) -> dict[str, Path]:
    """Files of weights, each with a bomb in it, or as it."""
    weights = {**seeded(depth=2).state_dict(), "bomb": Bomb(path / "exploded")}
    (path / "parts").mkdir()
    (path / "parts" / "pytorch_model.bin.index.json").write_text(json.dumps({"words.weight": "one.bin"}))
    torch.save(weights, path / "parts" / "one.bin")
    torch.save(weights, path / "pytorch_model.bin")
    torch.save(weights, path / "old.bin", _use_new_zipfile_serialization=False)
    for name in ("bare.bin", "model.safetensors", "model.safetensors.index.json"):
        (path / name).write_bytes(pickle.dumps(Bomb(path / "exploded")))
    names = ("parts", "pytorch_model.bin", "old.bin", "bare.bin", "model.safetensors", "model.safetensors.index.json")
    return {name: path / name for name in names}


@pytest.mark.parametrize(
    "read",
    [
        lambda path: load_checkpoint_in_model(empty(depth=2), path),
        lambda path: load_checkpoint_and_dispatch(empty(depth=2), path, "disk", offload_folder=path.parent / "off"),
        load_state_dict,
        lambda path: quantize_model(empty(depth=2), "int8wo", weights=path),
        lambda path: merge_adapters(path, seeded(depth=2).state_dict(), path.parent / "merged"),
        lambda path: prepare_pippy(empty(depth=2), weights=path),
    ],
    ids=["load", "dispatch", "state dict", "quantise", "merge", "pipeline"],
)
def test_pickles_are_never_executed(tmp_path, read):
    for name, path in bombs(tmp_path).items():
        with pytest.raises((CheckpointError, ConfigurationError)) as refused:
            read(path)
        assert name in str(refused.value)
        assert not (tmp_path / "exploded").exists(), name
    pickle.loads((tmp_path / "bare.bin").read_bytes())
    assert (tmp_path / "exploded").exists()  # so it would have


def test_an_unaligned_file_is_read_right(tmp_path):
    weights = {name: value.detach() for name, value in nn.Linear(3, 5).named_parameters()}
    save_file(weights, tmp_path / "m.safetensors")
    content = (tmp_path / "m.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    shifted = (length + 1).to_bytes(8, "little") + content[8 : 8 + length] + b" " + content[8 + length :]
    (tmp_path / "m.safetensors").write_bytes(shifted)
    with init_empty_weights():
        model = nn.Linear(3, 5)
    load_checkpoint_and_dispatch(model, tmp_path / "m.safetensors", "disk", offload_folder=tmp_path / "off")
    assert torch.equal(model.weight, weights["weight"])
    assert torch.equal(load_state_dict(tmp_path / "m.safetensors")["bias"], weights["bias"])


def test_reading_a_file_gives_its_weights_in_memory(tmp_path):
    model = seeded()
    for source in (saved(model, tmp_path / "m.safetensors"), in_two_files(model, tmp_path / "parts", "bin")):
        found = load_state_dict(source, {"": "cpu"})
        assert all(torch.equal(value, model.state_dict()[name]) for name, value in found.items())
        assert len(found) == len(model.state_dict()) - 1


@pytest.mark.parametrize("offload_buffers", [False, True])
def test_buffers_of_modules_on_disk_stay_there_on_demand(tmp_path, offload_buffers):
    model = nn.BatchNorm1d(8)
    path = saved(model, tmp_path / "model.safetensors")
    with init_empty_weights(include_buffers=True):
        other = nn.BatchNorm1d(8)
    load_checkpoint_in_model(other, path, {"": "disk"}, offload_buffers=offload_buffers)
    assert mapped_range(other.weight) is not None
    assert (mapped_range(other.running_mean) is not None) == offload_buffers
    assert torch.equal(other.running_var, model.running_var)


def broadcast_and_shard(path: str) -> list[bool]:
    from torch.distributed.fsdp import fully_shard

    accelerator = Accelerator(cpu=True)
    path = path if accelerator.is_main_process else "/nowhere"
    results = []
    for sharded in (False, True):
        torch.manual_seed(accelerator.process_index)
        model = Blocks()
        if sharded:
            model = fully_shard(model)
        load_checkpoint_in_model(model, path, strict=True, broadcast_from_rank0=True)
        weight = model.layers[1].up.weight
        whole = weight.full_tensor() if sharded else weight
        results.append(torch.equal(whole, seeded().layers[1].up.weight))
    return results


@pytest.mark.sharded
def test_process_0_reads_for_all(tmp_path):
    path = saved(seeded(), tmp_path / "model.safetensors")
    assert run_in_processes(broadcast_and_shard, 2, args=[str(path)]) == [[True, True]] * 2


def sharded_weights_into_sharded_ones() -> tuple[bool, dict[str, torch.dtype]]:
    from torch.distributed.fsdp import fully_shard

    Accelerator(cpu=True)

    def sharded(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = Blocks()
        for module in (model.norm, model):
            fully_shard(module)
        return model

    weights, model = sharded(0).state_dict(), sharded(1)
    load_checkpoint_in_model(model, weights, strict=True, full_state_dict=False)
    same = torch.equal(model.layers[1].up.weight.full_tensor(), seeded().layers[1].up.weight)
    whole = {name: value.full_tensor() if name != "table" else value for name, value in weights.items()}
    options = {"dtype": "bfloat16", "keep_in_fp32_modules": ["norm"], "broadcast_from_rank0": True}
    load_checkpoint_in_model(model, whole, strict=True, **options)
    return same, {name: parameter.dtype for name, parameter in model.named_parameters()}


@pytest.mark.sharded
def test_sharded_weights_are_loaded_and_cast_as_whole_ones_are():
    for same, dtypes in run_in_processes(sharded_weights_into_sharded_ones, 2):
        assert same
        assert {name for name, dtype in dtypes.items() if dtype == torch.float32} == {"norm.weight", "norm.bias"}
        assert dtypes["layers.0.up.weight"] == torch.bfloat16


def sent_and_placed(path: str) -> tuple[str, bool]:
    accelerator = Accelerator(cpu=True)
    path = path if accelerator.is_main_process else "/nowhere"
    try:
        load_checkpoint_in_model(Blocks(), path, {"": "cpu"}, broadcast_from_rank0=True)
        message = ""
    except ConfigurationError as error:
        message = str(error)
    model = load_checkpoint_and_dispatch(Blocks(), path, {"": "cpu"}, broadcast_from_rank0=True)
    return message, torch.equal(model(IDS), seeded()(IDS))


def test_a_map_is_for_weights_that_are_not_sent_and_models_are_placed_after_it(tmp_path):
    path = saved(seeded(), tmp_path / "model.safetensors")
    for message, same in run_in_processes(sent_and_placed, 2, args=[str(path)]):
        assert re.search(r"device_map=\{'': 'cpu'\} does not apply to sharded weights", message)
        assert same


def test_sending_needs_a_process_group(tmp_path):
    with pytest.raises(ConfigurationError, match="process group"):
        load_checkpoint_in_model(seeded(), seeded().state_dict(), broadcast_from_rank0=True)
