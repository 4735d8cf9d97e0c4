"""Estimates of memory: exact where they are counted, and the documented formulas beyond one process."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.profiler import ProfilerActivity, profile

from drivetrain import ConfigurationError
from drivetrain.planning import plan
from drivetrain.runtime.host import as_bytes
from tests.cli import models
from tests.commands import drivetrain
from tests.pool import run_in_processes

MODEL = "tests.cli.models:Tagger"
ROWS, LENGTH = 8, 64
WIDTH = 256
SCALARS = 1024
"""Bytes of steps and the like."""


def estimate(*arguments: str) -> Any:
    ended = drivetrain("estimate-memory", *arguments, "--json")
    assert ended.exit_code == 0, ended.output
    return json.loads(ended.output)


def peak_of_real_step(precision: str, trace: Path) -> int:
    """Bytes that torch's allocator hands out at most in a second training step, and what is kept before it."""
    torch.set_num_threads(1)
    model = models.Tagger(WIDTH)
    model = model.to(torch.bfloat16) if precision == "bf16-true" else model
    optimizer = torch.optim.AdamW(model.parameters())
    batch = models.tokens(ROWS, LENGTH)

    def step() -> None:
        autocast = torch.autocast("cpu", torch.bfloat16) if precision == "bf16" else contextlib.nullcontext()
        with autocast:
            loss = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    torch.backends.mkldnn.set_flags(False)  # oneDNN's products take buffers of their own, which are no tensors
    step()
    kept = 3 * sum(p.numel() * p.element_size() for p in model.parameters()) + batch.numel() * batch.element_size()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    profiler.export_chrome_trace(str(trace))
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("name") == "[memory]"]
    current = peak = 0
    for event in sorted(events, key=lambda event: event["ts"]):
        current += event["args"]["Bytes"]
        peak = max(peak, current)
    return kept + peak


IN_THE_OTHER_LANE = [pytest.param(name, marks=pytest.mark.sharded) for name in ("bf16", "bf16-true")]


@pytest.mark.parametrize("precision", ["32", *IN_THE_OTHER_LANE])
def test_a_step_on_one_process_takes_what_the_allocator_counts(precision: str, tmp_path: Path) -> None:
    (real,) = run_in_processes(peak_of_real_step, 1, args=(precision, tmp_path / "trace.json"), timeout=100)
    arguments = ("--precision", precision, "--input", f"{ROWS}x{LENGTH}:int64", "--strategy", "single")
    model = (MODEL, "--kwargs", json.dumps({"width": WIDTH}), "--num_processes", "1")
    [row] = estimate(*model, *arguments)["training"]["single"].values()
    assert real > 15e6
    assert row["total"] == pytest.approx(real, abs=SCALARS)


def test_the_model_is_counted_with_its_largest_unit() -> None:
    model = models.Tagger(width=64, layers=3)
    size = estimate(MODEL, "--kwargs", '{"width": 64, "layers": 3}')["model"]
    block = sum(parameter.numel() for parameter in model.blocks[0].parameters())
    assert size["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert size["largest_unit"] == block
    assert size["matrices"] == 3 * 2 * 64 * 256


def test_states_are_counted_without_inputs() -> None:
    count = sum(parameter.numel() for parameter in models.Tagger().parameters())
    states = estimate(MODEL, "--optimizer", "sgd_momentum")["states"]
    assert states == {"32": 12 * count, "bf16": 12 * count, "bf16-true": 6 * count}


def test_a_step_is_planned_for_each_strategy_and_precision() -> None:
    arguments = ("--num-processes", "2", "--precision", "32", "--precision", "bf16", "--input", "2x8:int64")
    found = estimate(MODEL, *arguments, "--strategy", "ddp", "--strategy", "fsdp", "--strategy", "deepspeed_stage_3")
    assert set(found["training"]) == {"ddp", "fsdp", "deepspeed:3"}
    assert all(set(row) == {"32", "bf16"} for row in found["training"].values())
    of_ddp, of_fsdp = (found["training"][name]["32"] for name in ("ddp", "fsdp"))
    assert of_fsdp["parameters"] < 0.6 * of_ddp["parameters"]
    planned = plan(MODEL, "2xL4-24GB", inputs=["2x8:int64"], strategies=["ddp"], precisions=["32"], recompute=[False])
    assert planned.results[0].to_dict()["peak_bytes"] == of_ddp["total"]
    assert of_ddp["total"] == sum(size for kind, size in of_ddp.items() if kind != "total")


def test_safetensors_are_counted_by_their_headers(tmp_path: Path) -> None:
    weights = {"model.layers.0.w": torch.zeros(4, 8), "model.layers.1.w": torch.zeros(4, 8), "head": torch.zeros(5)}
    save_file({name: tensor.half() for name, tensor in weights.items()}, tmp_path / "model.safetensors")
    found = estimate(str(tmp_path), "--dtypes", "float32", "int4")
    assert found["model"] | {"trainable": 0} == {
        "parameters": 69,
        "trainable": 0,
        "matrices": 64,
        "largest_unit": 32,
        "buffers": 0,
        "stored": 138,
    }
    assert {name: row["total"] for name, row in found["inference"].items()} == {"float32": 276, "int4": 34.5}


def test_inference_counts_what_streams_and_four_bits_of_layers_alone() -> None:
    model = models.Tagger(width=64, layers=3)
    block = sum(parameter.numel() for parameter in model.blocks[0].parameters())
    matrices = sum(parameter.numel() for parameter in model.blocks.parameters() if parameter.dim() > 1)
    others = sum(parameter.numel() for parameter in model.parameters()) - matrices
    rows = estimate(MODEL, "--kwargs", '{"width": 64, "layers": 3}')["inference"]
    assert rows["bfloat16"]["largest_unit"] == 2 * block
    assert rows["bfloat16"]["streamed"] == 2 * 2 * block
    assert rows["nf4"]["total"] == pytest.approx(matrices * 4.5 / 8 + 2 * others)
    assert rows["nf4_double"]["total"] == pytest.approx(matrices * (4 + 1 / 8 + 1 / 512) / 8 + 2 * others)


def test_the_model_is_placed_on_devices_in_each_dtype() -> None:
    arguments = (MODEL, "--device", "150KB", "--device", "150KB", "--cpu", "1MB", "--dtypes", "bfloat16", "nf4")
    maps = estimate(*arguments)["device_maps"]
    assert {name: set(placed.values()) for name, placed in maps.items()} == {"bfloat16": {0, 1}, "nf4": {0}}
    printed = drivetrain("estimate-memory", *arguments).output
    assert "Device map, nf4" in printed
    assert "boundaries between devices" in printed


def test_a_kv_cache_is_added(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is missing: pip install transformers")
    transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=100, n_positions=16).save_pretrained(tmp_path)
    rows = estimate(str(tmp_path), "--batch", "4", "--seq", "16")["inference"]
    assert rows["bfloat16"]["kv_cache"] == 2 * 2 * 2 * 32 * 16 * 4
    assert rows["float32"]["with_kv_cache"] == rows["float32"]["total"] + 2 * rows["bfloat16"]["kv_cache"]


def test_the_table_names_strategies_and_precisions() -> None:
    printed = drivetrain("estimate-memory", MODEL, "--num-processes", "4").output
    assert "in each of 4, if sharded" in printed
    for pattern in ("adamw", "bf16-true", "int4"):
        assert pattern in printed


def test_the_table_has_a_row_for_each_strategy_and_reasons() -> None:
    arguments = ("--input", "2x8:int64", "--precision", "32", "--strategy", "fsdp", "--strategy", "hsdp")
    printed = drivetrain("estimate-memory", MODEL, "--num-processes", "4", *arguments).output
    assert re.search(r"^  fsdp +[\d.]+ MiB$", printed, flags=re.MULTILINE)
    assert "hsdp, dp_replicate=1: it needs several machines." in printed


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["tests.cli.models:Taggr"], "'Tagger'"),
        (["tests.cli.no_such:Tagger"], "'tests.cli.no_such'"),
        (["tests.cli.models:not_a_model"], "torch.nn.Module"),
        ([MODEL, "--kwargs", '{"depth": 3}'], "depth"),
        ([MODEL, "--kwargs", "{"], "JSON"),
        ([MODEL, "--strategy", "fdsp", "--input", "2x8:int64"], "'fsdp'"),
        ([MODEL, "--strategy", "fsdp"], "--input 8x128:int64"),
        ([MODEL, "--precision", "bf61"], "'bf16'"),
        ([MODEL, "--optimizer", "adamm"], "Did you mean 'adam'"),
        ([MODEL, "--input", "8 by 4"], "8x128:int64"),
        (["nothing"], "package.module:Class"),
        ([MODEL, "--seq", "16"], "needs the shape of its inputs"),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_estimated_is_refused_by_name(arguments: list[str], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        drivetrain("estimate-memory", *arguments)


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (1536, "1.5 KiB"), (3 * 2**40, "3 TiB"), (2**52, "4096 TiB")])
def test_bytes_are_written_with_their_unit(count: int, text: str) -> None:
    assert as_bytes(count) == text
