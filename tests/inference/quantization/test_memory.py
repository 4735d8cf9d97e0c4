"""What quantising takes in memory: the quantised model and little more, however large the model is."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from drivetrain import BitsAndBytes, Quantizer, TorchAO, init_empty_weights, quantize_model
from drivetrain.inference.quantization.base import weight_parts

WIDTH = 1024
QUANTIZERS: dict[str, Quantizer] = {
    "nf4": BitsAndBytes(4),
    "nf4 in two steps": BitsAndBytes(4, double_quant=True),
    "fp4 in floats": BitsAndBytes(4, quant_type="fp4", quant_storage=torch.bfloat16),
    "int8": BitsAndBytes(8),
    "int8wo": TorchAO("int8wo"),
    "int8dq": TorchAO("int8dq"),
    "float8wo": TorchAO("float8wo"),
}


def make_model() -> nn.Module:
    sizes = [(WIDTH, 2 * WIDTH), (2 * WIDTH, WIDTH), (WIDTH, 2 * WIDTH), (2 * WIDTH, 8)]
    return nn.Sequential(*(nn.Linear(*each, bias=False) for each in sizes))


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def weights(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "model.safetensors"
    torch.manual_seed(0)
    save_file({name: value.to(request.param) for name, value in make_model().state_dict().items()}, path)
    return path


def at_most_and_after(path: Path, quantizer: Quantizer) -> tuple[int, int]:
    """Bytes of torch's tensors on the CPU while a model is quantised out of a file: the most, and what is left."""
    with init_empty_weights():
        model = make_model()
    quantize_model(nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 4)), quantizer)  # what is kept once
    gc.collect()  # what is freed of earlier models would count
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        quantize_model(model, quantizer, path)
    # events() leaves out what operators have allocated and freed
    records = [each for each in profiled.profiler.kineto_results.events() if each.name() == "[memory]"]
    held = most = 0
    for record in sorted(records, key=lambda each: each.start_ns()):
        held += record.nbytes()
        most = max(most, held)
    return most, held


@pytest.mark.parametrize("name", QUANTIZERS)
def test_the_peak_while_loading_is_the_quantised_model_and_the_largest_weight(name: str, weights: Path) -> None:
    largest = 2 * WIDTH * WIDTH * 4
    most, after = at_most_and_after(weights, QUANTIZERS[name])
    assert 0.35 * largest < after < largest  # three layers of its size in 4 or 8 bits
    assert most <= after + 1.1 * largest


def by_the_package(quantizer: Any, weight: Tensor) -> list[Tensor]:
    """The tensors that the package's own function makes of a whole weight."""
    if isinstance(quantizer, TorchAO):
        return whole_by_torchao(quantizer.scheme, weight)
    from bitsandbytes import functional

    if quantizer.bits == 8:
        return list(functional.int8_vectorwise_quant(weight.half())[:2])
    packed, state = functional.quantize_4bit(
        weight,
        compress_statistics=quantizer.double_quant,
        quant_type=quantizer.quant_type,
        quant_storage=quantizer.quant_storage,
    )
    nested = [state.offset, state.state2.absmax] if quantizer.double_quant else []
    return [packed, state.absmax, *nested]


def whole_by_torchao(scheme: str, weight: Tensor) -> list[Tensor]:
    import torchao.quantization as ao

    kinds = {
        "int8wo": ao.Int8WeightOnlyConfig,
        "int8dq": ao.Int8DynamicActivationInt8WeightConfig,
        "float8wo": ao.Float8WeightOnlyConfig,
    }
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight = nn.Parameter(weight)
    ao.quantize_(layer, kinds[scheme]())
    return list(weight_parts(layer).values())


@pytest.mark.parametrize("shape", [(700, 512), (9, 40), (4097, 192)], ids=str)
@pytest.mark.parametrize("name", QUANTIZERS)
def test_weights_are_stored_in_pieces_as_the_package_stores_them_whole(name: str, shape: tuple[int, int]) -> None:
    quantizer: Any = QUANTIZERS[name]
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    made: Any = quantizer.quantize(nn.Linear(shape[1], shape[0]), weight, torch.device("cpu"))
    found = list(quantizer.parts(made).values())
    if getattr(quantizer, "double_quant", False):
        found += [made.quant_state.offset, made.quant_state.state2.absmax]
    expected = by_the_package(quantizer, weight)
    assert len(found) == len(expected) >= 2
    for own, theirs in zip(found, expected, strict=True):
        assert own.shape == theirs.shape
        assert torch.equal(own.reshape(-1).view(torch.uint8), theirs.reshape(-1).view(torch.uint8))
