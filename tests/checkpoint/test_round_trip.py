"""What is saved is what is loaded, on any number of processes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from drivetrain import CheckpointError, PartialState
from drivetrain.checkpoint import Checkpoint, compare_states, load_run_state, save_run_state
from tests.checkpoint.states import alone, assert_same, odd_tensors, own_state, run_state
from tests.pool import run_in_processes


def test_every_kind_of_tensor_comes_back_bit_by_bit(tmp_path: Path) -> None:
    state = {"tensors": odd_tensors(), "groups": [{"lr": math.nan, "betas": (0.9, 0.999), 3: "int key"}]}
    save_run_state(tmp_path / "one", state, own_state(), alone())
    shared, own = load_run_state(tmp_path / "one", alone())
    assert_same(shared, state)
    assert_same(own, own_state())
    assert shared["tensors"]["tied"] is shared["tensors"]["tied_again"]


def test_the_tensor_files_are_safetensors_and_everything_else_is_json(tmp_path: Path) -> None:
    tensors = odd_tensors()
    save_run_state(tmp_path / "one", {"tensors": tensors}, own_state(), alone())
    found = {}
    for path in (tmp_path / "one").rglob("*"):
        if path.suffix == ".safetensors":
            found.update(safetensors.torch.load_file(path))
        elif path.is_file():
            json.loads(path.read_bytes())
    for name, tensor in tensors.items():
        # safetensors has no name for complex128, which is kept as bytes, and tied tensors are there once
        if name not in ("torch.complex128", "tied_again"):
            assert_same(found[f"tensors/{name}"], tensor)


def test_templates_are_filled_where_they_are_in_any_dtype(tmp_path: Path) -> None:
    save_run_state(tmp_path / "one", run_state(3), {}, alone())
    weight, bias = torch.zeros(4, 8).T, torch.zeros(8, dtype=torch.float64)
    into = {"state_dict": {"layer.weight": weight, "layer.bias": bias}}
    shared, _ = load_run_state(tmp_path / "one", alone(), into=into)
    assert shared["state_dict"]["layer.weight"].data_ptr() == weight.data_ptr()
    torch.testing.assert_close(weight, run_state(3)["state_dict"]["layer.weight"], rtol=0, atol=0)
    torch.testing.assert_close(bias, run_state(3)["state_dict"]["layer.bias"].double(), rtol=0, atol=0)
    assert_same(shared["optimizer_states"], run_state(3)["optimizer_states"])


def test_a_checkpoint_of_another_model_is_refused_with_names_and_shapes(tmp_path: Path) -> None:
    save_run_state(tmp_path / "one", run_state(), {}, alone())
    into = {"state_dict": {"layer.weight": torch.zeros(8, 5), "head.weight": torch.full((2,), 7.0)}}
    with pytest.raises(CheckpointError) as raised:
        load_run_state(tmp_path / "one", alone(), into=into)
    message = str(raised.value)
    assert "not in the checkpoint: state_dict/head.weight" in message
    assert "only in the checkpoint: state_dict/layer.bias" in message
    assert "state_dict/layer.weight: (8, 4) in the checkpoint, (8, 5) here" in message


def test_tied_weights_that_are_held_once_fill_each_of_their_names(tmp_path: Path) -> None:
    weight = torch.arange(6.0).reshape(2, 3)
    state = {"models": [{"in/first.weight": weight, "second.weight": weight, "bias": torch.ones(2)}]}
    save_run_state(tmp_path / "one", state, {}, alone())
    # As shards are: an object for each name, whose memory tells nothing.
    names = {"in/first.weight": (2, 3), "second.weight": (2, 3), "bias": (2,)}
    into = {"models": [{name: torch.zeros(size) for name, size in names.items()}]}
    shared, _ = load_run_state(tmp_path / "one", alone(), into=into)
    for model in (shared["models"][0], into["models"][0]):
        assert all(torch.equal(model[name], value) for name, value in state["models"][0].items())
    untied = {"models": [{"in/first.weight": torch.zeros(2, 3), "third.weight": torch.zeros(2, 3)}]}
    with pytest.raises(CheckpointError, match=r"not in the checkpoint: models/0/third\.weight"):
        load_run_state(tmp_path / "one", alone(), into=untied)


def test_without_strict_what_does_not_fit_is_reported(tmp_path: Path) -> None:
    save_run_state(tmp_path / "one", run_state(), {}, alone())
    kept = torch.full((2,), 7.0)
    into = {"state_dict": {"layer.weight": torch.zeros(8, 4), "head.weight": kept}}
    shared, report = Checkpoint(tmp_path / "one").shared(into, strict=False)
    assert (report.missing, report.left_over) == (["state_dict/head.weight"], ["state_dict/layer.bias"])
    assert not report.fits
    assert kept.tolist() == [7.0, 7.0]
    assert_same(shared["state_dict"], run_state()["state_dict"])


def test_two_state_dicts_are_compared_by_name_and_shape() -> None:
    here = {"a": torch.zeros(2), "b": torch.zeros(3)}
    report = compare_states(here, {"b": torch.zeros(4), "c": torch.zeros(1)})
    assert (report.missing, report.left_over) == (["a"], ["c"])
    assert report.different == ["b: (4,) in the checkpoint, (3,) here"]
    assert compare_states(here, here).fits


def test_only_what_is_asked_for_is_read(tmp_path: Path) -> None:
    save_run_state(tmp_path / "one", run_state(), {}, alone())
    shared, _ = load_run_state(tmp_path / "one", only=("state_dict",))
    assert_same(shared, {"state_dict": run_state()["state_dict"]})


def test_torchs_own_load_reads_it(tmp_path: Path) -> None:
    save_run_state(tmp_path / "one", run_state(4), {}, alone())
    wanted = {"state_dict/layer.bias": torch.zeros(8)}
    with pytest.warns(UserWarning, match="single process"):
        torch.distributed.checkpoint.load(wanted, storage_reader=Checkpoint(tmp_path / "one").tensors)
    assert_same(wanted["state_dict/layer.bias"], run_state(4)["state_dict"]["layer.bias"])


def save_in_world(directory: str, sharded: bool) -> None:
    state = PartialState()
    shared = run_state(5)
    if sharded:
        mesh = init_device_mesh("cpu", (state.num_processes,))
        shared["state_dict"] = {
            "rows": distribute_tensor(rows(), mesh, [Shard(0)]),
            "columns": distribute_tensor(rows(), mesh, [Shard(1)]),
            "few": distribute_tensor(torch.ones(1, 2), mesh, [Shard(0)]),
            "whole": distribute_tensor(rows(), mesh, [Replicate()]),
        }
    save_run_state(directory, shared, own_state(state.process_index), state)


def load_in_world(directory: str) -> tuple[Any, Any]:
    return load_run_state(directory, PartialState())


def load_sharded_in_world(directory: str) -> list[bool]:
    state = PartialState()
    mesh = init_device_mesh("cpu", (state.num_processes,))
    into = {
        "rows": distribute_tensor(torch.zeros(7, 5), mesh, [Shard(1)]),
        "columns": distribute_tensor(torch.zeros(7, 5), mesh, [Shard(1)]),
        "few": distribute_tensor(torch.zeros(1, 2), mesh, [Shard(0)]),
        "whole": torch.zeros(7, 5),
    }
    shared, _ = load_run_state(directory, state, into={"state_dict": into})
    found = shared["state_dict"]
    assert all(isinstance(found[name], DTensor) for name in ("rows", "columns", "few"))
    full = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in found.items()}
    return [torch.equal(full[name], expected) for name, expected in expected_rows().items()]


def rows() -> Tensor:
    return torch.arange(35.0).reshape(7, 5)


def expected_rows() -> dict[str, Tensor]:
    return {"rows": rows(), "columns": rows(), "few": torch.ones(1, 2), "whole": rows()}


@pytest.mark.parametrize(("writers", "readers"), [(1, 2), (2, 1), (2, 3), (2, 2)])
def test_any_number_of_processes_reads_what_any_number_wrote(writers: int, readers: int, tmp_path: Path) -> None:
    directory = str(tmp_path / "one")
    run_in_processes(save_in_world, writers, args=(directory, False))
    for rank, (shared, own) in enumerate(run_in_processes(load_in_world, readers, args=(directory,))):
        assert_same(shared, run_state(5))
        assert_same(own, own_state(rank) if writers == readers else None)


def test_replicated_tensors_are_written_once_and_shared_out(tmp_path: Path) -> None:
    directory = tmp_path / "one"
    run_in_processes(save_in_world, 2, args=(str(directory), False))
    keys = [
        set(safetensors.torch.load_file(directory / f"tensors/rank_{rank}_0.safetensors")) - {f"process/{rank}"}
        for rank in range(2)
    ]
    shared = [{key for key in one if not key.startswith("process/")} for one in keys]
    assert not shared[0] & shared[1]
    assert shared[0]
    assert shared[1]


@pytest.mark.parametrize(("writers", "readers"), [(2, 3), (3, 2), (2, 1), (1, 2)])
def test_sharded_tensors_move_between_worlds(writers: int, readers: int, tmp_path: Path) -> None:
    directory = str(tmp_path / "one")
    run_in_processes(save_in_world, writers, args=(directory, True))
    assert run_in_processes(load_sharded_in_world, readers, args=(directory,)) == [[True] * 4] * readers
    shared, _ = load_run_state(directory)
    assert_same(shared["state_dict"], expected_rows())


def save_unequal(directory: str) -> str:
    state = PartialState()
    shared = run_state() if state.process_index == 0 else {"bad": object()}
    try:
        save_run_state(directory, shared, {}, state)
    except CheckpointError as error:
        return str(error)
    finally:
        assert dist.is_initialized()
    return ""


def test_what_one_process_cannot_save_is_raised_on_all(tmp_path: Path) -> None:
    messages = run_in_processes(save_unequal, 2, args=(str(tmp_path / "one"),))
    assert all("rank 1: bad is a builtins.object" in message for message in messages)
    assert list(tmp_path.iterdir()) == []


def save_parts(directory: str) -> None:
    """Each process holds one of two layers, and says what it knows of the other's."""
    state = PartialState()
    parts = {
        name: torch.full((2, 3), float(rank)) if rank == state.process_index else torch.empty(2, 3, device="meta")
        for rank, name in enumerate(["first", "second"])
    }
    save_run_state(directory, {"model": parts}, {}, state)


def load_parts(directory: str) -> dict[str, Tensor]:
    state = PartialState()
    here = "second" if state.process_index else "first"
    into = {n: torch.empty(2, 3, device="cpu" if n == here else "meta") for n in ("first", "second")}
    shared, _ = load_run_state(directory, state, into={"model": into})
    assert torch.equal(shared["model"][here], into[here])
    return {name: value for name, value in shared["model"].items() if not value.is_meta}


def test_a_tensor_on_the_meta_device_stands_for_what_a_peer_holds(tmp_path: Path) -> None:
    directory = str(tmp_path / "one")
    run_in_processes(save_parts, 2, args=(directory,))
    whole = {"first": torch.zeros(2, 3), "second": torch.ones(2, 3)}
    shared, _ = load_run_state(directory, alone())
    assert_same(shared["model"], whole)
    first, second = run_in_processes(load_parts, 2, args=(directory,))
    assert_same({**first, **second}, whole)


def test_a_tensor_that_no_process_has_values_of_is_refused(tmp_path: Path) -> None:
    nothing = torch.empty(2, device="meta")
    for shared, own in (({"model": {"w": nothing}}, {}), ({}, {"w": nothing})):
        with pytest.raises(CheckpointError, match="w is on the meta device"):
            save_run_state(tmp_path / "one", shared, own, alone())
    assert not (tmp_path / "one").exists()
