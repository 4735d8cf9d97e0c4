"""Adapters over frozen layers whose packed weights strategies may shard: the same numbers, less in each process."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from drivetrain import FSDP, Accelerator, BitsAndBytes, ConfigurationError, QLoRA
from drivetrain.inference.adapters import HASH
from tests.inference.test_adapters import difference, made, samples
from tests.pool import run_in_processes
from tests.shared_runs import SharedRuns

STEPS = 4
QUANTIZERS = {
    "nf4": "nf4",
    "nf4 in two steps": BitsAndBytes(4, double_quant=True),
    "fp4 in floats": BitsAndBytes(4, quant_type="fp4", quant_storage=torch.float32),
    "int8": "int8",
    "int8wo": "int8wo",
    "float8wo": "float8wo",
    "as they are": None,
}

runs = SharedRuns(__name__, world_size=2)


def made_with(**options: Any) -> nn.Module:
    model = made()
    torch.manual_seed(1)
    return QLoRA(rank=4, **options).apply(model)


def trained(
    strategy: Any,
    base: str,
    path: Path,
    first: int = 0,
    last: int = STEPS,
    start: Path | None = None,
    qlora: dict[str, Any] | None = None,
    **options: Any,
) -> nn.Module:
    """Steps of a run in a loop of one's own, with an evaluation before each, and the checkpoint of the last."""
    accelerator = Accelerator(cpu=True, strategy=strategy, **options)
    quantizer = BitsAndBytes(4, quant_storage=torch.float32)
    model = made_with(base=base, **(qlora or {"quantizer": quantizer}))
    optimizer = torch.optim.AdamW((each for each in model.parameters() if each.requires_grad), lr=1e-2)
    loader = DataLoader(samples(), 8 // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if start is not None:
        accelerator.load_state(str(start))
    for number, (x, y) in enumerate(loader):
        if not first <= number < last:
            continue
        model.eval()
        with torch.no_grad():
            model(x)
        model.train()
        optimizer.zero_grad()
        accelerator.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()
    accelerator.save_state(str(path))
    return accelerator.unwrap_model(model)


def adapted(base: str, quantizer: Any = "nf4") -> nn.Module:
    return made_with(base=base, quantizer=quantizer)


def in_one_process(base: str, path: str, first: int = 0, last: int = STEPS, start: str | None = None) -> None:
    trained("single", base, Path(path), first, last, None if start is None else Path(start))


def whole_and_half_alone(path: str) -> None:
    in_one_process("replicated", f"{path}/end")
    in_one_process("replicated", f"{path}/middle", 0, 2)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("alone")
    run_in_processes(whole_and_half_alone, 1, args=(str(path),), timeout=90)
    return path


@runs
def under_ddp(directory: Path) -> None:
    trained("ddp", "sharded", directory / "end")


@runs
def under_fsdp(directory: Path) -> dict[str, list[int]]:
    model = trained("fsdp", "sharded", directory / "end")
    found = {}
    for name in ("up", "down"):
        layer: Any = model.get_submodule(name)
        assert isinstance(layer.packed, DTensor)
        beside = [*layer.base.parameters(), layer.base.quant_state.absmax]
        held = sum(each.untyped_storage().nbytes() for each in beside if each is not layer.base.bias)
        found[name] = [layer.packed.numel(), layer.packed.to_local().numel(), held]
    return found


@runs
def first_half_over_a_sharded_base(directory: Path) -> None:
    trained("fsdp", "sharded", directory / "middle", 0, 2)


@runs
def second_half_over_a_whole_base(directory: Path) -> None:
    middle = directory.parent / first_half_over_a_sharded_base.__name__ / "middle"
    trained("fsdp", "replicated", directory / "end", 2, STEPS, middle)


@runs
def in_half_precision(directory: Path) -> None:
    for base in ("sharded", "replicated"):
        trained(FSDP(reshard_after_forward=True), base, directory / base, mixed_precision="bf16")


@pytest.mark.parametrize("run", [under_ddp, under_fsdp], ids=lambda run: run.__name__)
def test_two_processes_train_what_one_does(run: Any, alone: Path) -> None:
    runs.of(run)
    assert difference(alone / "end", runs.directory_of(run) / "end") <= 5e-6


def test_each_process_holds_its_share_of_the_packed_weights() -> None:
    for whole, own, beside in (sizes for found in runs.of(under_fsdp) for sizes in found.values()):
        assert 2 * own == whole
        assert beside <= 16


def test_a_run_goes_from_a_sharded_to_a_whole_base(alone: Path, tmp_path: Path) -> None:
    runs.of(second_half_over_a_whole_base)
    assert difference(alone / "end", runs.directory_of(second_half_over_a_whole_base) / "end") <= 5e-6
    runs.of(first_half_over_a_sharded_base)
    middle = runs.directory_of(first_half_over_a_sharded_base) / "middle"
    run_in_processes(in_one_process, 1, args=("replicated", str(tmp_path / "end"), 2, STEPS, str(middle)), timeout=90)
    assert difference(alone / "end", tmp_path / "end") <= 5e-6


def test_a_run_goes_from_a_whole_to_a_sharded_base_exactly(alone: Path, tmp_path: Path) -> None:
    given = ("sharded", str(tmp_path / "end"), 2, STEPS, str(alone / "middle"))
    run_in_processes(in_one_process, 1, args=given, timeout=90)
    assert difference(alone / "end", tmp_path / "end") == 0


def test_packed_bits_are_not_converted_by_a_precision() -> None:
    runs.of(in_half_precision)
    directory = runs.directory_of(in_half_precision)
    assert difference(directory / "sharded", directory / "replicated") == 0


def outputs_and_gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    output = model(x)
    output.square().sum().backward()
    return [output.detach(), *(each.grad.clone() for each in model.parameters() if each.grad is not None)]


@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_every_quantizer_computes_alike_over_both(quantizer: str) -> None:
    x = samples()[:][0]
    found = []
    for base in ("replicated", "sharded"):
        model = adapted(base, copy.deepcopy(QUANTIZERS[quantizer]))
        nn.init.normal_(model.up.lora_B, generator=torch.Generator().manual_seed(4))
        found.append(outputs_and_gradients(model, x))
    assert len(found[0]) >= 5
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_a_checkpoint_has_the_same_names_and_digest_over_both() -> None:
    sharded, whole = adapted("sharded").state_dict(), adapted("replicated").state_dict()
    assert list(sharded) == list(whole)
    assert torch.equal(sharded[HASH], whole[HASH])


def test_copies_and_recomputation_compute_the_same() -> None:
    x = samples()[:][0]
    model = adapted("sharded")
    expected = outputs_and_gradients(model, x)
    assert all(map(torch.equal, outputs_and_gradients(copy.deepcopy(model), x), expected))
    again = model.up.forward
    model.up.forward = lambda each: checkpoint(again, each, use_reentrant=False)
    assert all(map(torch.equal, outputs_and_gradients(model, x), expected))


@pytest.mark.parametrize("base", ["replicated", "sharded"])
def test_an_evaluation_changes_nothing_of_the_training_after_it(base: str) -> None:
    x = samples()[:][0]
    model = adapted(base).eval()
    with torch.no_grad():
        evaluated = model(x)
    after = outputs_and_gradients(model.train(), x)
    expected = outputs_and_gradients(adapted(base), x)
    assert all(map(torch.equal, after, expected))
    assert torch.equal(evaluated, expected[0])


def test_a_base_that_is_neither_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"base cannot be 'shard'. Use 'replicated' or 'sharded'.*'sharded'"):
        QLoRA(base="shard")
