"""Adapters added to the weights that they were trained over: what is written, and how little of it is in memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from drivetrain import CheckpointError, ConfigurationError, merge_adapters
from drivetrain.checkpoint import open_weights, save_safetensors
from tests.commands import drivetrain
from tests.pool import ROOT

RANK = 4


def base_weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"words.weight": (50, 16), "up.weight": (40, 16), "up.bias": (40,), "down.weight": (16, 40), "scale": ()}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def adapters(prefix: str = "", first: str = ".lora_A", second: str = ".lora_B", scale: str = ".scaling") -> Any:
    generator = torch.Generator().manual_seed(1)
    found = {}
    for name, (out, into) in {"up": (40, 16), "down": (16, 40)}.items():
        found[f"{prefix}{name}{first}"] = torch.randn(RANK, into, generator=generator)
        found[f"{prefix}{name}{second}"] = torch.randn(out, RANK, generator=generator)
        found[f"{prefix}{name}{scale}"] = torch.tensor(0.5)
    return found


def expected() -> dict[str, torch.Tensor]:
    weights, trained = base_weights(), adapters()
    for name in ("up", "down"):
        weights[f"{name}.weight"] += 0.5 * trained[f"{name}.lora_B"] @ trained[f"{name}.lora_A"]
    return weights


def written(directory: Path) -> dict[str, torch.Tensor]:
    return {name: value for path in sorted(directory.glob("*.safetensors")) for name, value in load_file(path).items()}


PEFT = {"first": ".lora_A.default.weight", "second": ".lora_B.default.weight", "scale": ".base_layer.scaling"}


@pytest.mark.parametrize("names", [{}, {"prefix": "model."}, PEFT], ids=["ours", "of a task", "peft"])
def test_the_product_of_each_adapter_is_added_to_its_weight(names: dict[str, str], tmp_path: Path) -> None:
    save_file(base_weights(), tmp_path / "base.safetensors")
    save_file(adapters(**names), tmp_path / "adapters.safetensors")
    merge_adapters(tmp_path / "adapters.safetensors", tmp_path / "base.safetensors", tmp_path / "merged")
    found = written(tmp_path / "merged")
    assert found.keys() == expected().keys()
    for name, value in expected().items():
        assert torch.allclose(found[name], value, atol=1e-6), name
    assert torch.equal(found["words.weight"], base_weights()["words.weight"])


def test_the_base_and_the_output_may_be_in_several_files_and_in_another_dtype(tmp_path: Path) -> None:
    save_safetensors(base_weights(), tmp_path / "base", "4KB")
    assert len(list((tmp_path / "base").glob("*.safetensors"))) > 1
    paths = merge_adapters(adapters(), tmp_path / "base", tmp_path / "merged", "2KB", dtype="bfloat16")
    assert [os.path.basename(path) for path in paths] == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    opened = open_weights(tmp_path / "merged")
    for name, value in expected().items():
        assert opened[name].dtype == torch.bfloat16
        assert torch.allclose(opened[name].float(), value, atol=2e-2), name


@pytest.mark.parametrize("held", [True, False], ids=["in memory", "in a file"])
def test_tied_weights_are_written_once(held: bool, tmp_path: Path) -> None:
    weights = base_weights()
    weights["head.weight"] = weights["words.weight"]
    if not held:
        save_safetensors(weights, tmp_path / "base")
    merge_adapters(adapters(), weights if held else tmp_path / "base", tmp_path / "merged")
    with safe_open(tmp_path / "merged" / "model.safetensors", "pt") as file:
        assert file.metadata()["head.weight"] == "words.weight"
        assert "head.weight" not in file.keys()  # noqa: SIM118


@pytest.mark.parametrize("held", [True, False], ids=["in memory", "in a file"])
def test_a_weight_that_is_tied_to_one_with_an_adapter_stays_without_it(held: bool, tmp_path: Path) -> None:
    weights = base_weights()
    weights["zeroth.weight"] = weights["up.weight"]
    if not held:
        save_safetensors(weights, tmp_path / "base")
    merge_adapters(adapters(), weights if held else tmp_path / "base", tmp_path / "merged")
    found = written(tmp_path / "merged")
    assert torch.equal(found["zeroth.weight"], base_weights()["up.weight"])
    assert torch.allclose(found["up.weight"], expected()["up.weight"], atol=1e-6)


@pytest.mark.slow
def test_no_weight_is_whole_in_memory(tmp_path: Path) -> None:
    # A process of its own, since what others of this one hold would be counted. The limit is of memory that is taken,
    # not of the file, which is mapped.
    script = f"""
import resource, torch
from drivetrain import merge_adapters
from safetensors.torch import save_file

size = 4096
weights = {{f"{{n}}.weight": torch.ones(size, size) for n in range(2)}}  # 64 MiB each
save_file(weights, r"{tmp_path}/base.safetensors")
trained = {{"scaling": torch.tensor(0.5), "lora_A": torch.ones(2, size), "lora_B": torch.ones(size, 2)}}
small = {{"0.scaling": torch.tensor(1.0), "0.lora_A": torch.ones(2, 16), "0.lora_B": torch.ones(16, 2)}}
merge_adapters(small, {{"0.weight": torch.ones(16, 16)}}, r"{tmp_path}/small")  # what it imports and keeps
del weights
taken = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmData")) << 10
resource.setrlimit(resource.RLIMIT_DATA, (taken + (48 << 20), taken + (48 << 20)))
merge_adapters({{f"0.{{n}}": v for n, v in trained.items()}}, r"{tmp_path}/base.safetensors", r"{tmp_path}/merged")
"""
    # Blocks that are freed go back to the system at once.
    allocation = {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **allocation}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    merged = open_weights(tmp_path / "merged")
    assert [float(merged[f"{n}.weight"].mean()) for n in range(2)] == [2.0, 1.0]


def test_the_command_takes_a_dtype_and_refuses_a_module(tmp_path: Path) -> None:
    save_file(base_weights(), tmp_path / "base.safetensors")
    save_file(adapters(), tmp_path / "adapters.safetensors")
    arguments = [str(tmp_path / "adapters.safetensors"), str(tmp_path / "merged"), "--base"]
    arguments += [str(tmp_path / "base.safetensors"), "--dtype", "bfloat16"]
    ran = drivetrain("merge-weights", *arguments)
    assert ran.exit_code == 0, ran.output
    assert {value.dtype for value in written(tmp_path / "merged").values()} == {torch.bfloat16}
    with pytest.raises(ConfigurationError, match="Omit --module"):
        drivetrain("merge-weights", *arguments, "--module", "net")


def test_weights_of_another_shape_are_refused_and_nothing_is_written(tmp_path: Path) -> None:
    weights = base_weights() | {"down.weight": torch.ones(16, 41)}
    with pytest.raises(
        CheckpointError, match=r"Shape mismatch for 'down.weight': the adapter needs \(16, 40\), but .* has \(16, 41\)"
    ):
        merge_adapters(adapters(), weights, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
