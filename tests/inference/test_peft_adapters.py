"""peft's LoRA layers over our frozen ones: the same numbers under every strategy, the same rules for checkpoints."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from drivetrain import CheckpointError, ConfigurationError, QLoRA, merge_adapters
from drivetrain.checkpoint import open_weights
from drivetrain.inference.adapters import HASH
from drivetrain.inference.merging import adapters_in
from tests.inference.test_adapters import difference, made, samples
from tests.inference.test_sharded_base import STEPS, made_with, trained
from tests.pool import run_in_processes
from tests.shared_runs import SharedRuns

pytestmark = pytest.mark.compat
peft = pytest.importorskip("peft", reason="peft is missing: pip install peft")
pytest.importorskip("bitsandbytes", reason="bitsandbytes is missing: pip install bitsandbytes")

OVER_NF4: dict[str, Any] = {"quantizer": "nf4", "backend": "peft"}

runs = SharedRuns(__name__, world_size=2)


def in_one_process(base: str, path: str, first: int = 0, last: int = STEPS, start: str | None = None) -> None:
    trained("single", base, Path(path), first, last, None if start is None else Path(start), OVER_NF4)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("alone") / "end"
    run_in_processes(in_one_process, 1, args=("replicated", str(path)), timeout=120)
    return path


@runs
def under_ddp(directory: Path) -> None:
    trained("ddp", "replicated", directory / "end", qlora=OVER_NF4)


@runs
def under_fsdp(directory: Path) -> None:
    trained("fsdp", "replicated", directory / "end", qlora=OVER_NF4)


@runs
def under_fsdp_with_a_sharded_base(directory: Path) -> None:
    trained("fsdp", "sharded", directory / "end", qlora=OVER_NF4)


@runs
def half_of_a_run(directory: Path) -> None:
    trained("fsdp", "sharded", directory / "middle", 0, 2, qlora=OVER_NF4)


@pytest.mark.parametrize(
    "run", [under_ddp, under_fsdp, under_fsdp_with_a_sharded_base], ids=lambda run: str(run.__name__)
)
def test_two_processes_train_what_one_does(run: Any, alone: Path) -> None:
    runs.of(run)
    assert difference(alone, runs.directory_of(run) / "end") <= 5e-6


def test_a_run_resumes_under_another_strategy(alone: Path, tmp_path: Path) -> None:
    runs.of(half_of_a_run)
    middle = str(runs.directory_of(half_of_a_run) / "middle")
    given = ("replicated", str(tmp_path / "end"), 2, STEPS, middle)
    run_in_processes(in_one_process, 1, args=given, timeout=120)
    assert difference(alone, tmp_path / "end") <= 5e-6


def test_the_checkpoint_holds_the_adapters_and_the_digest_alone(alone: Path) -> None:
    trained_ones = open_weights(alone)
    names = {name for adapter in adapters_in(trained_ones).values() for name in adapter}
    assert set(trained_ones) == {*names, HASH}
    assert len(names) == 6
    assert float(trained_ones["up.lora_B.default.weight"].abs().max()) > 1e-3


def test_peft_trains_what_our_own_layers_do() -> None:
    ours, theirs = made_with(quantizer="nf4"), made_with(**OVER_NF4)
    for name in ("up", "down"):
        layer, adapter = ours.get_submodule(name), theirs.get_submodule(name)
        nn.init.normal_(layer.lora_B, generator=torch.Generator().manual_seed(3))
        adapter.lora_A["default"].weight.data = layer.lora_A.data.clone()
        adapter.lora_B["default"].weight.data = layer.lora_B.data.clone()
    x = samples()[:][0]
    outputs = [model(x) for model in (ours, theirs)]
    assert torch.allclose(*outputs, rtol=0, atol=1e-5)
    for output in outputs:
        output.square().sum().backward()
    expected, found = ours.up.lora_B.grad, theirs.up.lora_B["default"].weight.grad
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_adapters_over_other_weights_are_refused(alone: Path) -> None:
    state = dict(open_weights(alone).items())
    made_with(**OVER_NF4).load_state_dict(state)
    with pytest.raises(CheckpointError, match="trained on other weights"):
        QLoRA(rank=4, **OVER_NF4).apply(made(3)).load_state_dict(state)


@pytest.mark.parametrize("base", ["replicated", "sharded"])
def test_a_model_of_linear_layers_alone_is_trained(base: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    x, y = torch.randn(32, 8), torch.arange(32) % 2
    QLoRA(rank=4, quantizer=None, backend="peft", base=base).apply(model)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    layers = [f"{layer}.{part}.default.weight" for layer in (0, 2) for part in ("lora_A", "lora_B")]
    assert sorted(trained) == sorted(layers)
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0]


def test_peft_reads_its_adapters_out_of_the_model() -> None:
    found = peft.get_peft_model_state_dict(made_with(targets=["down"], **OVER_NF4))
    assert set(found) == {"down.lora_A.weight", "down.lora_B.weight"}


@pytest.mark.parametrize("options", [{}, {"use_rslora": True}], ids=["plain", "stabilised"])
def test_merged_weights_compute_what_the_adapted_model_does(options: dict[str, Any], tmp_path: Path) -> None:
    model = made_with(quantizer=None, backend="peft", base="sharded", peft_options=options)
    for name in ("up", "down"):
        nn.init.normal_(model.get_submodule(name).lora_B["default"].weight, std=0.1)
    save_file(made().state_dict(), tmp_path / "base.safetensors")
    save_file(model.state_dict(), tmp_path / "adapters.safetensors")
    merge_adapters(tmp_path / "adapters.safetensors", tmp_path / "base.safetensors", tmp_path / "merged")
    merged = made(5)
    merged.load_state_dict(load_file(tmp_path / "merged" / "model.safetensors"))
    x = samples()[:][0]
    assert torch.allclose(merged(x), model(x), atol=1e-5)
    assert not torch.allclose(made()(x), model(x), atol=1e-2)


def test_a_copy_computes_the_same() -> None:
    x = samples()[:][0]
    model = made_with(base="sharded", **OVER_NF4)
    assert torch.equal(copy.deepcopy(model)(x), model(x))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"r": 3}, r"cannot set 'r'. Use QLoRA's own arguments instead"),
        ({"use_dora": True}, r"does not support use_dora, which needs the unquantized weights"),
        ({"init_lora_weights": "pissa"}, r"does not support init_lora_weights='pissa'"),
        ({"use_rslorra": True}, r"no option 'use_rslorra'.*'use_rslora'"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        QLoRA(backend="peft", peft_options=options).apply(made())
