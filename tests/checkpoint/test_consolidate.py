"""Plain safetensors out of checkpoints and models."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from drivetrain import Accelerator, CheckpointError, ConfigurationError, PartialState, consolidate
from drivetrain.checkpoint import save_run_state, save_safetensors
from drivetrain.checkpoint.export import shard_limit
from tests.checkpoint.states import alone, assert_same, run_state, write
from tests.commands import drivetrain
from tests.pool import ROOT, device, run_in_processes

TRANSFORMERS = ROOT / ".venv-bench" / "bin" / "python"


def model_state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    state = {f"layers.{index}.weight": torch.randn(10, 25, generator=generator) for index in range(6)}
    state |= {"flag": torch.tensor(True), "ids": torch.arange(7), "scalar": torch.tensor(0.5)}
    return {**state, "head.weight": state["layers.0.weight"]}


def save(directory: Path) -> None:
    save_run_state(directory, {"state_dict": model_state(), "optimizer_states": [{"big": torch.ones(9)}]}, {}, alone())


def read(directory: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        found.update(safetensors.torch.load_file(path))
    return found


def without_ties() -> dict[str, Any]:
    return {name: value for name, value in model_state().items() if name != "head.weight"}


def test_a_small_model_becomes_one_file_in_which_tied_weights_are_once(tmp_path: Path) -> None:
    save(tmp_path / "one")
    files = consolidate(tmp_path / "one", tmp_path / "out")
    assert files == [str(tmp_path / "out" / "model.safetensors")]
    assert os.listdir(tmp_path / "out") == ["model.safetensors"]
    found = read(tmp_path / "out")
    assert_same({name: found[name] for name in without_ties()}, without_ties())
    assert "head.weight" not in found
    with safetensors.safe_open(files[0], "pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "layers.0.weight"}


def test_a_larger_one_becomes_several_with_an_index(tmp_path: Path) -> None:
    save(tmp_path / "one")
    files = consolidate(tmp_path / "one", tmp_path / "out", max_shard_size="2100B")
    names = [os.path.basename(path) for path in files]
    assert names == [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert sorted(set(index["weight_map"].values())) == names
    for name, value in without_ties().items():
        assert_same(safetensors.torch.load_file(tmp_path / "out" / index["weight_map"][name])[name], value)
    assert index["metadata"]["total_size"] == sum(t.numel() * t.itemsize for t in without_ties().values())
    assert all(os.path.getsize(path) < 2100 + 1000 for path in files)


def test_safetensors_loads_it_into_a_model_with_tied_weights(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    save_run_state(tmp_path / "one", {"state_dict": model.state_dict()}, {}, alone())
    [path] = consolidate(tmp_path / "one", tmp_path / "out")
    other = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    other[1].weight = other[0].weight
    safetensors.torch.load_model(other, path)
    assert torch.equal(other[1].weight, model[1].weight)


@pytest.mark.parametrize("dtype", ["bfloat16", torch.float16, "float64", None])
def test_floating_point_weights_are_converted_and_others_are_not(dtype: Any, tmp_path: Path) -> None:
    save(tmp_path / "one")
    consolidate(tmp_path / "one", tmp_path / "out", dtype=dtype)
    target = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype or "float32")
    found = read(tmp_path / "out")
    for name, value in without_ties().items():
        assert_same(found[name], value.to(target) if value.is_floating_point() else value)


def save_sharded(directory: str) -> None:
    state = PartialState()
    mesh = init_device_mesh("cpu", (state.num_processes,))
    sharded = {
        name: distribute_tensor(value, mesh, [Shard(1 if "1." in name else 0)]) if value.dim() == 2 else value
        for name, value in without_ties().items()
    }
    save_run_state(directory, {"state_dict": sharded}, {}, state)


def test_shards_of_several_processes_become_whole_tensors(tmp_path: Path) -> None:
    run_in_processes(save_sharded, 3, args=(str(tmp_path / "one"),))
    consolidate(tmp_path / "one", tmp_path / "out", dtype="bf16")
    found = read(tmp_path / "out")
    for name, value in without_ties().items():
        assert_same(found[name], value.bfloat16() if value.is_floating_point() else value)


def test_it_holds_no_whole_model(tmp_path: Path) -> None:
    size = 96 << 20
    save_run_state(tmp_path / "one", {"state_dict": {"big": torch.zeros(size // 4)}}, {}, alone())
    peaks = run_in_processes(peak_of_export, 1, args=(str(tmp_path / "one"), str(tmp_path / "out")))
    assert peaks[0] < 64 << 20


def peak_of_export(checkpoint: str, output: str) -> int:
    """How much the process grew at most, in bytes of its own memory."""
    import threading

    from drivetrain.checkpoint import consolidate as export

    def anonymous() -> int:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))

    before, peaks, over = anonymous(), [0], threading.Event()

    def watch() -> None:
        while not over.wait(0.002):
            peaks.append(anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    export(checkpoint, output, dtype="bfloat16")
    over.set()
    watcher.join()
    return max(peaks) - before


def test_an_output_that_holds_something_is_not_written_into_unless_asked(tmp_path: Path) -> None:
    save(tmp_path / "one")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="not empty"):
        consolidate(tmp_path / "one", tmp_path / "out")
    consolidate(tmp_path / "one", tmp_path / "out", max_shard_size=2100, overwrite=True)
    assert len(os.listdir(tmp_path / "out")) > 3
    consolidate(tmp_path / "one", tmp_path / "out", overwrite=True)
    assert sorted(os.listdir(tmp_path / "out")) == ["config.json", "model.safetensors"]


def test_a_damaged_checkpoint_is_not_exported(tmp_path: Path) -> None:
    save(tmp_path / "one")
    path = tmp_path / "one" / "tensors" / "rank_0_0.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"rank_0_0\.safetensors is damaged"):
        consolidate(tmp_path / "one", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_one_of_several_models_is_chosen(tmp_path: Path) -> None:
    models = [{"weight": torch.zeros(1)}, {"weight": torch.ones(1)}]
    save_run_state(tmp_path / "one", {"models": models}, {}, alone())
    with pytest.raises(CheckpointError, match="contains 2 models"):
        consolidate(tmp_path / "one", tmp_path / "out")
    consolidate(tmp_path / "one", tmp_path / "out", model=1)
    assert read(tmp_path / "out")["weight"].item() == 1
    save_run_state(tmp_path / "none", {"epoch": 1}, {}, alone())
    with pytest.raises(CheckpointError, match="contains no model"):
        consolidate(tmp_path / "none", tmp_path / "other")


def test_one_module_is_written_by_its_own_names(tmp_path: Path) -> None:
    save(tmp_path / "one")
    consolidate(tmp_path / "one", tmp_path / "out", module="layers")
    own = {name.removeprefix("layers."): value for name, value in model_state().items() if name.startswith("layers.")}
    assert_same(read(tmp_path / "out"), own)
    arguments = ["merge-weights", str(tmp_path / "one"), str(tmp_path / "inner"), "--module", "layers.3"]
    assert drivetrain(*arguments).exit_code == 0
    assert_same(read(tmp_path / "inner"), {"weight": model_state()["layers.3.weight"]})
    with pytest.raises(CheckpointError, match=r"no weights of a module 'layer'.* head, layers.* Did you mean 'layers'"):
        consolidate(tmp_path / "one", tmp_path / "other", module="layer")


IN_TRANSFORMERS = """
import sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from drivetrain import Accelerator, Task, Trainer, consolidate

root = sys.argv[1]
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
config = LlamaConfig(vocab_size=64, num_key_value_heads=2, **sizes)


class Language(Task):
    def __init__(self):
        super().__init__()
        self.net = LlamaForCausalLM(config)

    def training_step(self, batch, batch_idx):
        return self.net(batch, labels=batch).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


def check(model, directory):
    config.save_pretrained(directory)
    loaded, told = LlamaForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not any(told.values()), told
    tokens = torch.arange(12)[None]
    assert torch.equal(loaded(tokens).logits, model.eval()(tokens).logits)


accelerator = Accelerator(cpu=True)
model = accelerator.prepare(LlamaForCausalLM(config))
accelerator.save_state(f"{root}/engine")
assert len(consolidate(f"{root}/engine", f"{root}/several", max_shard_size="20KB")) > 1
check(model, f"{root}/several")

task = Language()
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
trainer = Trainer(accelerator="cpu", max_steps=1, **quiet)
trainer.fit(task, torch.utils.data.DataLoader(torch.randint(64, (4, 12)), batch_size=4))
trainer.save_checkpoint(f"{root}/trained")
consolidate(f"{root}/trained", f"{root}/one", module="net")
check(task.net, f"{root}/one")
"""


@pytest.mark.skipif(not TRANSFORMERS.exists(), reason="transformers is not installed in .venv-bench (make bench)")
def test_transformers_opens_what_an_accelerator_and_a_trainer_saved(tmp_path: Path) -> None:
    done = subprocess.run(
        [str(TRANSFORMERS), "-c", IN_TRANSFORMERS, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("text", "size"),
    [("5GB", 5 * 10**9), ("1.5 MiB", 3 << 19), (7, 7), ("10kb", 10**4), ("9", 9), ("24G", 24 * 10**9)],
    ids=str,
)
def test_sizes_are_read(text: str | int, size: int) -> None:
    assert shard_limit(text) == size


@pytest.mark.parametrize("text", ["", "GB", "5 parsecs", "-1", 0, True, "0GB"])
def test_what_is_no_size_is_refused(text: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"is not a size|must be positive"):
        shard_limit(text)


def test_the_command_writes_the_files_and_says_which(tmp_path: Path) -> None:
    save(tmp_path / "one")
    arguments = ["merge-weights", str(tmp_path / "one"), str(tmp_path / "out"), "--max-shard-size", "3KB"]
    done = drivetrain(*arguments, "--dtype", "bfloat16")
    assert done.exit_code == 0
    printed = [line for line in done.stdout.splitlines() if line.endswith(".safetensors")]
    assert printed == [str(path) for path in sorted((tmp_path / "out").glob("*.safetensors"))]
    assert len(printed) > 1
    assert read(tmp_path / "out")["layers.1.weight"].dtype == torch.bfloat16
    with pytest.raises(CheckpointError, match="not empty"):
        drivetrain(*arguments)
    with pytest.raises(CheckpointError, match="Did you mean 'bfloat16'"):
        drivetrain(*arguments, "--overwrite", "--dtype", "bfloat61")


def test_a_state_dict_is_written_in_the_same_files(tmp_path: Path) -> None:
    save_safetensors(model_state(), tmp_path / "out", max_shard_size="2100B")
    found = read(tmp_path / "out")
    assert_same({name: found[name] for name in without_ties()}, without_ties())


def test_the_accelerator_writes_a_models_weights(tmp_path: Path) -> None:
    accelerator = Accelerator(device=device())
    model = accelerator.prepare(nn.Linear(3, 2))
    accelerator.save_model(model, tmp_path / "out")
    assert_same(read(tmp_path / "out"), {"weight": model.weight.detach(), "bias": model.bias.detach()})


def test_a_run_state_is_a_models(tmp_path: Path) -> None:
    write(tmp_path / "one", 5)
    consolidate(tmp_path / "one", tmp_path / "out")
    assert_same(read(tmp_path / "out")["layer.weight"], run_state(5)["state_dict"]["layer.weight"])
