"""Adapters over a quantised model: the same numbers under every strategy, small checkpoints, and weights merged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import (
    Accelerator,
    CheckpointError,
    ConfigurationError,
    LoRALinear,
    QLoRA,
    Task,
    Trainer,
    merge_adapters,
)
from drivetrain.checkpoint import open_weights
from drivetrain.inference.merging import adapters_in
from tests.commands import drivetrain
from tests.pool import run_in_processes

WIDTH, STEPS = 128, 4


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.down(torch.relu(self.up(self.norm(x)))))


def made(seed: int = 0) -> Network:
    torch.manual_seed(seed)
    return Network()


def adapted(quantizer: str | None = "nf4", seed: int = 0, **options: Any) -> nn.Module:
    model = made(seed)
    torch.manual_seed(1)
    return QLoRA(rank=4, quantizer=quantizer, **options).apply(model)


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(8 * STEPS, WIDTH, generator=generator)
    return TensorDataset(x, torch.randint(4, (8 * STEPS,), generator=generator))


class Tuned(Task):
    def __init__(self, base: str) -> None:
        super().__init__()
        self.model = adapted(base=base)
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.model(x), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW((each for each in self.model.parameters() if each.requires_grad), lr=1e-2)


def trained(
    strategy: str, path: str, resume: str | None, max_steps: int, batch: int = 8, base: str = "replicated"
) -> None:
    """A run of the Trainer from a start or a checkpoint to a number of steps, and its checkpoint."""
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(accelerator="cpu", strategy=strategy, max_steps=max_steps, **options)
    trainer.fit(Tuned(base), DataLoader(samples(), batch), resume=resume)
    trainer.save_checkpoint(path)


def by_hand(strategy: str, path: str, batch: int = 8) -> None:
    """The same in a loop of one's own."""
    accelerator = Accelerator(cpu=True, strategy=strategy)
    model = adapted()
    optimizer = torch.optim.AdamW((each for each in model.parameters() if each.requires_grad), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(samples(), batch))
    for x, y in loader:
        optimizer.zero_grad()
        accelerator.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()
    accelerator.save_state(path)


def difference(one: Path, other: Path) -> float:
    """The largest between the adapters of two checkpoints."""
    first, second = open_weights(one), open_weights(other)
    names = [name for trio in adapters_in(first).values() for name in trio]
    assert len(names) == 6
    same = {name.removeprefix("model."): name for name in second}
    return max(float((first[name] - second[same[name.removeprefix("model.")]]).abs().max()) for name in names)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("alone") / "end"
    run_in_processes(trained, 1, args=("single", str(path), None, STEPS), timeout=90)
    return path


def test_training_changes_the_adapters_alone(alone: Path) -> None:
    start = adapted()
    trained = open_weights(alone)
    assert float(trained["model.up.lora_B"].abs().max()) > 1e-3
    assert start.up.lora_B.abs().max() == 0
    held = {name for name in trained if name.startswith("model.")}
    layers = {f"model.{layer}.{part}" for layer in ("up", "down") for part in ("lora_A", "lora_B", "scaling")}
    assert held == {*layers, "model.base_sha256"}


@pytest.mark.parametrize(("strategy", "base"), [("ddp", "replicated"), ("fsdp", "replicated"), ("fsdp", "sharded")])
def test_two_processes_train_what_one_does(strategy: str, base: str, alone: Path, tmp_path: Path) -> None:
    run_in_processes(trained, 2, args=(strategy, str(tmp_path / "end"), None, STEPS, 4, base), timeout=120)
    assert difference(alone, tmp_path / "end") <= 5e-6


@pytest.mark.parametrize(("strategy", "processes"), [("single", 1), ("fsdp", 2)])
def test_a_loop_of_ones_own_trains_what_the_trainer_does(
    strategy: str, processes: int, alone: Path, tmp_path: Path
) -> None:
    run_in_processes(by_hand, processes, args=(strategy, str(tmp_path / "end"), 8 // processes), timeout=120)
    assert difference(alone, tmp_path / "end") <= 5e-6


def test_a_run_resumes_under_another_strategy_exactly(alone: Path, tmp_path: Path) -> None:
    middle, end = str(tmp_path / "middle"), str(tmp_path / "end")
    run_in_processes(trained, 2, args=("fsdp", middle, None, STEPS // 2, 4), timeout=120)
    run_in_processes(trained, 1, args=("single", end, middle, STEPS), timeout=90)
    assert difference(alone, tmp_path / "end") <= 5e-6


def test_adapters_over_other_weights_are_refused(alone: Path) -> None:
    state = {name.removeprefix("model."): value for name, value in open_weights(alone).items()}
    adapted().load_state_dict(state)
    with pytest.raises(CheckpointError, match=r"trained on other weights \(SHA-256 \w{12}…\) than Network has"):
        adapted(seed=3).load_state_dict(state)
    with pytest.raises(CheckpointError, match="trained on other weights"):
        adapted("int8wo").load_state_dict(state)


def test_merged_weights_compute_what_the_adapted_model_does(tmp_path: Path) -> None:
    model = adapted(None)
    for layer in (model.up, model.down):
        nn.init.normal_(layer.lora_B, std=0.1)
    save_file(made().state_dict(), tmp_path / "base.safetensors")
    save_file(model.state_dict(), tmp_path / "adapters.safetensors")
    merge_adapters(tmp_path / "adapters.safetensors", tmp_path / "base.safetensors", tmp_path / "merged")
    merged = made(5)
    merged.load_state_dict(load_file(tmp_path / "merged" / "model.safetensors"))
    x = samples()[:][0]
    assert torch.allclose(merged(x), model(x), atol=1e-5)
    assert not torch.allclose(made()(x), model(x), atol=1e-2)


def test_a_parameter_that_is_unfrozen_beside_the_adapters_is_saved_loaded_and_merged(tmp_path: Path) -> None:
    model = adapted(None)
    model.norm.requires_grad_(True)
    nn.init.normal_(model.up.lora_B, std=0.1)
    nn.init.normal_(model.norm.weight)
    state = model.state_dict()
    assert {"norm.weight", "norm.bias"} < state.keys()
    assert "head.weight" not in state
    again = adapted(None)
    again.load_state_dict(state)
    assert torch.equal(again.norm.weight, model.norm.weight)

    save_file(made().state_dict(), tmp_path / "base.safetensors")
    save_file(state, tmp_path / "adapters.safetensors")
    merge_adapters(tmp_path / "adapters.safetensors", tmp_path / "base.safetensors", tmp_path / "merged")
    merged = made(5)
    merged.load_state_dict(load_file(tmp_path / "merged" / "model.safetensors"))
    x = samples()[:][0]
    assert torch.allclose(merged(x), model(x), atol=1e-5)

    save_file({**state, "norm.weight": torch.zeros(3)}, tmp_path / "adapters.safetensors")
    with pytest.raises(CheckpointError, match=r"norm\.weight.*: \(3,\) trained, \(128,\)"):
        merge_adapters(tmp_path / "adapters.safetensors", tmp_path / "base.safetensors", tmp_path / "merged")


def test_the_command_merges_them(alone: Path, tmp_path: Path) -> None:
    save_file(made().state_dict(), tmp_path / "base.safetensors")
    arguments = [str(alone), str(tmp_path / "merged"), "--base", str(tmp_path / "base.safetensors")]
    ran = drivetrain("merge-weights", *arguments)
    assert ran.exit_code == 0, ran.output
    merged, base = load_file(tmp_path / "merged" / "model.safetensors"), made().state_dict()
    assert merged.keys() == base.keys()
    changed = {name for name in base if not torch.equal(merged[name], base[name])}
    assert changed == {"up.weight", "down.weight"}


def test_adapters_for_the_layers_that_are_named() -> None:
    model = adapted(targets=["down", "head"])
    ranks = {name: module.rank for name, module in model.named_modules() if isinstance(module, LoRALinear)}
    assert ranks == {"up": 0, "down": 4, "head": 4}
    assert type(model.head.base) is nn.Linear


def test_the_frozen_layers_follow_the_model_to_its_dtype_and_device_without_losing_what_is_packed() -> None:
    model = adapted()
    before = model.up.base.weight.data.clone()
    model.to(torch.bfloat16)
    assert model.up.lora_A.dtype == torch.bfloat16
    assert torch.equal(model.up.base.weight.data, before)
    assert model(samples()[:2][0].bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rank": 0}, r"rank is 0, but must be at least 1"),
        ({"dropout": 1.0}, r"must be at least 0 and less than 1"),
        ({"quantizer": "nf5"}, r"Unknown quantizer 'nf5'.*'nf4'"),
        ({"backend": "pefft"}, r"backend cannot be 'pefft'. Use 'drivetrain' or 'peft'.*'peft'"),
        ({"peft_options": {"use_rslora": True}}, r"needs backend='peft'. Set it, or remove peft_options"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        QLoRA(**options)


def test_peft_that_is_not_installed_is_refused_before_anything_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drivetrain.inference.adapters.find_spec", lambda name: None)
    model = made()
    with pytest.raises(ConfigurationError, match=r"needs peft, which is not installed: pip install peft"):
        QLoRA(backend="peft").apply(model)
    assert type(model.up) is nn.Linear


def test_a_target_that_is_not_there_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigurationError, match=r"Network has no linear layer of this name.*'down'"):
        QLoRA(targets=["dwn"]).apply(made())


@pytest.mark.parametrize("model", [nn.Linear(4, 4), nn.Sequential(nn.LayerNorm(4))], ids=["a layer", "a norm"])
def test_a_model_without_layers_for_adapters_is_refused(model: nn.Module) -> None:
    with pytest.raises(ConfigurationError, match=rf"no linear layer inside {type(model).__name__}"):
        QLoRA(quantizer=None).apply(model)


def test_weights_of_another_model_are_not_merged_into(tmp_path: Path) -> None:
    save_file(adapted().state_dict(), tmp_path / "adapters.safetensors")
    save_file({"other.weight": torch.ones(2)}, tmp_path / "base.safetensors")
    with pytest.raises(CheckpointError, match=r"has an adapter for \w+, but .* has no weight \w+\.weight"):
        merge_adapters(tmp_path / "adapters.safetensors", tmp_path / "base.safetensors", tmp_path / "merged")
    with pytest.raises(CheckpointError, match="has no adapters"):
        merge_adapters(tmp_path / "base.safetensors", tmp_path / "base.safetensors", tmp_path / "merged")
