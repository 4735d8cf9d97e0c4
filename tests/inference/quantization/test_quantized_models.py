"""Models whose linear layers are quantised as their weights are read, saved, and opened without the original."""

from __future__ import annotations

import json
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import drivetrain
from drivetrain import (
    BitsAndBytes,
    BnbQuantizationConfig,
    CheckpointError,
    ConfigurationError,
    Quantizer,
    TorchAO,
    get_quantizer,
    init_empty_weights,
    load_and_quantize_model,
    load_quantized,
    quantize_model,
    register_quantizer,
    save_quantized,
)
from drivetrain.inference.quantization.base import linear_like

NAMES = ["nf4", "fp4", "int8", "int8wo", "int8dq", "float8wo"]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


TOKENS = torch.arange(16).reshape(2, 8)
LAYERS = ("blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down")


def made() -> Model:
    torch.manual_seed(0)
    return Model().eval()


def empty() -> Model:
    with init_empty_weights():
        return Model().eval()


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "model.safetensors"
    save_file(made().state_dict(), path)
    return path


def by_hand(name: str, layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """What the package's own function, called by hand, makes of a layer."""
    weight, bias = layer.weight.detach(), layer.bias
    if name in ("nf4", "fp4"):
        from bitsandbytes import functional

        packed, state = functional.quantize_4bit(weight, quant_type=name, compress_statistics=False)
        return nn.functional.linear(x, functional.dequantize_4bit(packed, state), bias)
    if name == "int8":
        from bitsandbytes.nn import Linear8bitLt

        copy = Linear8bitLt(layer.in_features, layer.out_features, has_fp16_weights=False, threshold=6.0)
        copy.load_state_dict(layer.state_dict())
        return copy.eval().to("cpu")(x)  # in training mode it multiplies floats
    import torchao.quantization as ao

    kinds = {
        "int8wo": ao.Int8WeightOnlyConfig,
        "int8dq": ao.Int8DynamicActivationInt8WeightConfig,
        "float8wo": ao.Float8WeightOnlyConfig,
    }
    copy = nn.Linear(layer.in_features, layer.out_features, bias=bias is not None)
    copy.load_state_dict(layer.state_dict())
    ao.quantize_(copy, kinds[name]())
    return copy(x)


def error(found: torch.Tensor, right: torch.Tensor) -> float:
    return float(((found - right).norm() / right.norm()).detach())


@pytest.mark.parametrize("name", NAMES)
def test_the_error_is_that_of_the_backends_own_function(name: str) -> None:
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(1))
    layer = made().blocks[0].up
    right, expected = layer(x), error(by_hand(name, layer, x), layer(x))
    model = quantize_model(made(), name)
    found = error(model.blocks[0].up(x), right)
    assert expected > 1e-3
    assert found == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("name", NAMES)
def test_weights_out_of_a_file_and_out_of_a_model_are_quantised_alike(name: str, weights: Path) -> None:
    model = quantize_model(empty(), name, weights)
    assert model.quantization.layers == LAYERS
    assert all(model.quantization.quantizer.made(model.get_submodule(layer)) for layer in LAYERS)
    assert type(model.head) is nn.Linear
    assert torch.equal(model(TOKENS), quantize_model(made(), name)(TOKENS))


@pytest.mark.parametrize("name", NAMES)
def test_what_is_saved_opens_without_the_original_to_the_last_bit(name: str, weights: Path, tmp_path: Path) -> None:
    model = quantize_model(empty(), name, weights)
    if name in ("int8wo", "int8dq") and version("torchao") < "0.18":
        with pytest.raises(ConfigurationError, match=r"cannot save .* weights .* Install torchao>=0\.18"):
            save_quantized(model, tmp_path / "first")
        return
    save_quantized(model, tmp_path / "first")
    opened = load_quantized(empty(), tmp_path / "first")
    assert torch.equal(opened(TOKENS), model(TOKENS))
    save_quantized(opened, tmp_path / "again")
    first, again = ((tmp_path / folder / "model.safetensors").read_bytes() for folder in ("first", "again"))
    assert first == again
    assert len(first) < 0.5 * weights.stat().st_size


@pytest.mark.parametrize(
    "quantizer",
    [BitsAndBytes(4), BitsAndBytes(4, double_quant=True), BitsAndBytes(4, quant_storage=torch.float32)],
    ids=["nf4", "in two steps", "in floats"],
)
def test_forwards_change_nothing_of_what_is_saved(quantizer: Quantizer, weights: Path, tmp_path: Path) -> None:
    model = quantize_model(empty(), quantizer, weights)
    save_quantized(model, tmp_path / "first")
    outputs = []
    for folder in ("second", "third"):
        outputs.append(model(TOKENS))
        save_quantized(model, tmp_path / folder)
    assert torch.equal(*outputs)
    files = [(tmp_path / folder / "model.safetensors").read_bytes() for folder in ("first", "second", "third")]
    assert files[0] == files[1] == files[2]


@pytest.mark.parametrize("shape", [(40, 128), (128, 96), (33, 50)], ids=str)
def test_layers_of_any_size_compute_in_evaluation(shape: tuple[int, int]) -> None:
    model = nn.Sequential(nn.Linear(*shape), nn.ReLU(), nn.Linear(shape[1], 4)).eval()
    x = torch.randn(3, shape[0])
    expected = model[0](x)
    assert error(quantize_model(model, "nf4")[0](x), expected) < 0.2


def test_no_more_than_one_weight_is_in_memory_unquantised(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    quantised: list[int] = []
    quantize = BitsAndBytes.quantize

    def counted(self: Any, layer: Any, weight: torch.Tensor, device: Any) -> Any:
        quantised.append(weight.numel())
        read.append(layer)
        return quantize(self, layer, weight, device)

    monkeypatch.setattr(BitsAndBytes, "quantize", counted)
    model = quantize_model(empty(), "nf4", weights)
    assert quantised == [128 * 256] * 4
    floats = sum(p.numel() * p.element_size() for p in model.parameters() if p.is_floating_point())
    packed = sum(p.numel() for p in model.parameters() if p.dtype == torch.uint8)
    assert packed == 4 * 128 * 256 // 2
    assert floats == sum(
        p.numel() * 4 for n, p in made().named_parameters() if not n.endswith(("up.weight", "down.weight"))
    )


def test_accelerates_configuration_on_the_cpu(weights: Path) -> None:
    config = BnbQuantizationConfig(load_in_8bit=True, torch_dtype=torch.float32, keep_in_fp32_modules=["blocks.1.down"])
    model = load_and_quantize_model(empty(), config, weights, device_map={"": "cpu"})
    assert model.is_loaded_in_8bit
    assert not model.is_loaded_in_4bit
    assert type(model.blocks[1].down) is nn.Linear
    assert model.blocks[0].down.weight.dtype == torch.int8
    assert error(model(TOKENS), made()(TOKENS)) < 0.05


def test_the_rest_of_the_model_gets_its_dtype(weights: Path) -> None:
    config = BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_compute_dtype="bf16", keep_in_fp32_modules=["norm"])
    model = load_and_quantize_model(empty(), config, weights)
    assert model.head.weight.dtype == model.blocks[0].up.bias.dtype == torch.bfloat16
    assert model.blocks[0].norm.weight.dtype == torch.float32


def test_modules_that_are_named_are_left_out() -> None:
    model = quantize_model(made(), "int8wo", skip_modules=["blocks.0"])
    assert model.quantization.layers == ("blocks.1.up", "blocks.1.down", "head")


def test_tied_weights_and_the_output_head_stay_as_they_are() -> None:
    model = made()
    model.head.weight = model.embedding.weight
    model.blocks[0].down.weight = model.blocks[1].down.weight
    quantize_model(model, "nf4")
    assert model.quantization.layers == ("blocks.0.up", "blocks.1.up")
    assert model.head.weight is model.embedding.weight


def test_layers_on_disk_and_the_rest_in_memory(weights: Path) -> None:
    where = {"embedding": "cpu", "blocks": "cpu", "head": "disk"}
    model = load_and_quantize_model(empty(), "nf4", weights, device_map=where)
    assert torch.equal(model(TOKENS), quantize_model(made(), "nf4")(TOKENS))
    assert model.hf_device_map == where


# refusals


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"load_in_8bit": True, "load_in_4bit": True}, "must be True, but both are"),
        ({}, "must be True, but neither is"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf5"}, "quant_type is 'nf5', but must be 'nf4' or 'fp4'"),
        (
            {"load_in_4bit": True, "bnb_4bit_compute_dtype": "fp12"},
            "bnb_4bit_compute_dtype is 'fp12', but must be a torch dtype",
        ),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        BnbQuantizationConfig(**given)


def test_an_unknown_quantizer_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigurationError, match=r"Unknown quantizer 'int8w'.*Did you mean 'int8wo'"):
        get_quantizer("int8w")
    with pytest.raises(ConfigurationError, match=r"no longer supports 'nf4'. Use quantizer='nf4' or BitsAndBytes"):
        TorchAO("nf4")


def test_a_package_that_is_missing_is_named_with_its_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def without(name: str) -> Any:
        return None if name in ("bitsandbytes", "torchao") else find_spec(name)

    for module in ("bitsandbytes", "torchao"):
        monkeypatch.setattr(f"drivetrain.inference.quantization.{module}.find_spec", without)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "drivetrain\[quantization\]"'):
        quantize_model(made(), "nf4")
    with pytest.raises(ModuleNotFoundError, match=r'pip install "drivetrain\[fp8\]"'):
        quantize_model(made(), "int8wo")


def test_what_this_machine_cannot_do_is_refused_before_any_weight_is_read() -> None:
    with pytest.raises(ConfigurationError, match=r"does not support 'int4wo' on this machine.*'nf4'"):
        quantize_model(made(), "int4wo")


def test_a_model_without_values_needs_a_checkpoint() -> None:
    with pytest.raises(
        CheckpointError, match=r"embedding.weight is on the meta device and has no values. Pass weights=\.\.\."
    ):
        quantize_model(empty(), "nf4")


def test_a_model_without_layers_to_quantise_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="No layer of Model can be quantized"):
        quantize_model(made(), "nf4", skip_modules=["blocks", "head"])


def test_a_weight_of_another_shape_is_refused_by_name(weights: Path) -> None:
    with init_empty_weights():
        other = Model(width=64)
    with pytest.raises(CheckpointError, match=r"blocks.0.up.weight' has shape \(256, 128\).*\(128, 64\)"):
        quantize_model(other, "nf4", weights)


def test_a_saved_model_of_another_structure_is_refused(tmp_path: Path) -> None:
    save_quantized(quantize_model(made(), "nf4"), tmp_path)
    with pytest.raises(CheckpointError, match=r"has a quantized layer 'blocks.0.up', but Linear has no such layer"):
        load_quantized(nn.Linear(2, 2), tmp_path)


def test_a_description_names_only_quantizers_that_are_registered(tmp_path: Path) -> None:
    save_quantized(quantize_model(made(), "nf4"), tmp_path)
    described = json.loads((tmp_path / "quantization.json").read_text())
    (tmp_path / "quantization.json").write_text(json.dumps({**described, "quantizer": "os.system"}))
    with pytest.raises(ConfigurationError, match=r"no quantizer 'os.system'. Known: bitsandbytes, torchao"):
        load_quantized(empty(), tmp_path)


def test_an_unquantised_model_is_not_saved_as_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"Model is not quantized. Call quantize_model"):
        save_quantized(made(), tmp_path)


# one of the user's own


class Halved(nn.Linear):
    pass


class InHalf(Quantizer):
    """Weights in float16."""

    name = "in-half"

    def check(self) -> None:
        pass

    def quantize(self, layer: nn.Linear, weight: torch.Tensor, device: torch.device) -> nn.Module:
        return self.opened(layer, {"weight": weight.half()}, {}, device)

    def made(self, module: nn.Module) -> bool:
        return type(module) is Halved

    def saved(self, layer: Any) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        return {"weight": layer.weight.half()}, {}

    def opened(self, layer: nn.Linear, tensors: Any, texts: Any, device: torch.device) -> nn.Module:
        made = linear_like(layer, Halved)
        made.weight = nn.Parameter(tensors["weight"].float().to(device), requires_grad=False)
        return made

    def as_dict(self) -> dict[str, Any]:
        return {}


def test_a_quantizer_of_the_users_own_is_found_by_its_name(tmp_path: Path) -> None:
    register_quantizer(InHalf)
    model = quantize_model(made(), "in-half")
    assert 0 < error(model(TOKENS), made()(TOKENS)) < 1e-3
    save_quantized(model, tmp_path)
    assert torch.equal(load_quantized(empty(), tmp_path)(TOKENS), model(TOKENS))
    with pytest.raises(ConfigurationError, match="A quantizer named 'in-half' already exists"):
        register_quantizer(type("Other", (InHalf,), {}))


def test_the_names_are_those_of_drivetrain_too() -> None:
    assert drivetrain.load_and_quantize_model is load_and_quantize_model
    assert drivetrain.BnbQuantizationConfig is BnbQuantizationConfig
