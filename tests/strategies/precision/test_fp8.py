"""FP8 over torchao: which layers it converts, what it leaves as it is, and what it refuses."""

from __future__ import annotations

import copy
import importlib.util
import logging
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain import FP8, Accelerator, ConfigurationError, DeviceKind, Trainer
from drivetrain.runtime.devices import CPU
from drivetrain.strategies.precision import resolve_precision
from drivetrain.strategies.precision.fp8 import TorchAO
from drivetrain.strategies.precision.fp8 import precision as fp8_precision
from drivetrain.strategies.precision.fp8 import torchao as fp8_torchao
from tests.strategies.precision.fp8_models import FLOAT8, MISFITS, Scaled, float8_layers, net


def prepare(model: nn.Module, precision: Any = "fp8") -> nn.Module:
    prepared: nn.Module = Accelerator(cpu=True, mixed_precision=precision).prepare(model)
    return prepared


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Any:
    """What is logged, from a state in which no message was given before."""
    for module in (fp8_precision, fp8_torchao):
        module.logger._seen.clear()
    caplog.set_level(logging.INFO)
    return lambda: [record.getMessage() for record in caplog.records]


def test_the_name():
    assert type(resolve_precision("fp8")) is FP8
    assert repr(FP8()) == "FP8(backend='torchao', recipe='tensorwise', base='bf16')"
    assert FP8(backend="ao", recipe="rowwise_with_gw_hp").backend.recipe == "rowwise_gw_hp"
    assert FP8(backend=TorchAO("rowwise")).backend.recipe == "rowwise"


# which layers


def test_layers_whose_sizes_fit_are_converted_but_for_the_first_and_the_last():
    assert float8_layers(prepare(net())) == FLOAT8


def test_the_first_and_the_last_are_converted_on_request():
    assert float8_layers(prepare(net(), FP8(keep_first_and_last=False))) == ["first", *FLOAT8, "last"]


def test_a_filter_chooses_among_them_by_the_names_of_the_users_model():
    seen = []

    def wanted(layer: nn.Module, name: str) -> bool:
        seen.append(name)
        return name.endswith("up")

    assert float8_layers(prepare(net(), FP8(filter=wanted))) == ["blocks.0.up", "blocks.1.up"]
    assert seen == [*FLOAT8, "odd", "back"]


def test_sizes_must_be_multiples_of_what_is_asked_for():
    assert float8_layers(prepare(net(), FP8(multiple_of=64))) == []
    assert float8_layers(prepare(net(), FP8(multiple_of=8))) == [*FLOAT8, "odd", "back"]


def test_layers_that_do_not_fit_are_listed_once(lines):
    for _ in range(2):
        prepare(net())
    expected = f"precision='fp8' leaves 2 layer(s) in bf16, because their sizes are not multiples of 16: {MISFITS}."
    assert lines().count(expected) == 1


def test_a_model_of_which_nothing_is_converted_is_named(lines):
    prepare(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)))
    assert any(
        "converts no layer of Sequential, so the model computes in bf16. Its 2 linear layer(s)" in line
        for line in lines()
    )


def test_layers_that_compute_in_their_own_way_are_left_alone():
    inside = [nn.Linear(16, 16), nn.Linear(16, 16), Scaled(16, 16), nn.MultiheadAttention(16, 2), nn.Linear(16, 16)]
    model = prepare(nn.ModuleList(inside))
    assert float8_layers(model) == ["1"]
    assert [type(module) for module in model] == [nn.Linear, type(model[1]), Scaled, nn.MultiheadAttention, nn.Linear]


def test_a_single_layer_stays_itself():
    layer = nn.Linear(16, 16)
    assert prepare(layer, FP8(keep_first_and_last=False)) is layer
    assert float8_layers(layer) == []


def test_preparing_again_changes_nothing(lines):
    accelerator = Accelerator(cpu=True, mixed_precision="fp8")
    model = net()
    accelerator.prepare(model)
    layers = [model.get_submodule(name) for name in FLOAT8]
    accelerator.free_memory()
    accelerator.prepare(model)
    assert [model.get_submodule(name) for name in FLOAT8] == layers
    assert not any("converts no layer" in line for line in lines())


# what stays as it is


def test_names_parameters_and_their_sharing_stay():
    model = net()
    model.blocks[1].up = model.blocks[0].up  # one module, twice
    model.blocks[1].down.weight = model.blocks[0].down.weight  # two modules, one parameter
    before = dict(model.named_parameters(remove_duplicate=False))
    state = list(model.state_dict())
    prepare(model)
    after = dict(model.named_parameters(remove_duplicate=False))
    assert list(after) == list(before)
    assert all(after[name] is parameter for name, parameter in before.items())
    assert list(model.state_dict()) == state
    assert model.blocks[1].up is model.blocks[0].up
    assert len(float8_layers(model)) == 3  # listed once where it is registered twice


def test_hooks_and_attributes_stay():
    model = net()
    calls = []
    handle = model.blocks[0].up.register_forward_hook(lambda *_: calls.append("up"))
    model.blocks[0].up.note = "kept"
    prepare(model)(torch.ones(2, 16))
    assert calls == ["up"]
    assert model.blocks[0].up.note == "kept"
    handle.remove()
    model(torch.ones(2, 16))
    assert calls == ["up"]


def test_copies_and_pickles_compute_the_same():
    accelerator = Accelerator(cpu=True, mixed_precision="fp8")
    model = accelerator.prepare(net())
    bare = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    x = torch.randn(4, 16)
    for twin in (copy.deepcopy(bare), pickle.loads(pickle.dumps(bare))):
        assert float8_layers(twin) == FLOAT8
        assert torch.equal(twin(x), bare(x))
        assert twin.blocks[0].up.weight.data_ptr() != bare.blocks[0].up.weight.data_ptr()


# how it computes


@pytest.mark.parametrize("recipe", TorchAO.recipes)
@pytest.mark.parametrize("base", ["bf16", "32"])
def test_outputs_and_gradients_are_rounded_and_close(recipe, base):
    plain, model = net(), prepare(net(), FP8(recipe=recipe, base=base))
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    expected, output = plain(x), model(x)
    assert output.dtype == torch.float32
    expected.square().mean().backward()
    output.square().mean().backward()
    assert not torch.equal(output, expected)
    torch.testing.assert_close(output, expected, atol=0.03, rtol=0)
    for (name, parameter), other in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert other.dtype == other.grad.dtype == torch.float32
        gap = (parameter.grad - other.grad).norm() / parameter.grad.norm()
        assert gap < 0.1, f"{name}: {gap:.3f}"


def test_evaluation_computes_in_8_bits_too():
    model = prepare(net(), FP8(recipe="rowwise"))
    x = torch.randn(8, 16)
    with torch.no_grad():
        expected = model(x)
    with torch.inference_mode():
        assert torch.equal(model(x), expected)
    assert torch.equal(model(x).detach(), expected)


def test_on_the_cpu_torchs_own_product_agrees_with_the_emulated_one():
    x = torch.randn(16, 16)
    emulated, native = (prepare(net(), FP8(emulate=emulate, base="32"))(x) for emulate in (True, False))
    torch.testing.assert_close(native, emulated, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("recipe", TorchAO.recipes)
def test_a_compiled_model_computes_the_same(recipe):
    x = torch.randn(8, 16)
    eager = prepare(net(), FP8(recipe=recipe))
    compiled = prepare(torch.compile(net(), backend="aot_eager"), FP8(recipe=recipe))
    one, other = eager(x), compiled(x)
    torch.testing.assert_close(other, one, atol=1e-5, rtol=1e-5)
    one.sum().backward()
    other.sum().backward()
    for parameter, twin in zip(eager.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(twin.grad, parameter.grad, atol=2e-2, rtol=2e-2)


def test_emulation_is_announced_once_with_its_cost(lines):
    for _ in range(2):
        prepare(net())
    found = [line for line in lines() if "emulated on cpu" in line]
    assert len(found) == 1
    assert "2 to 4 times as long" in found[0]
    assert "'bf16' to train faster" in found[0]


# what is refused

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"backend": "apex"}, "backend='apex' is not supported. Allowed: torchao, te, msamp"),
    ({"backend": "torchoa"}, "Did you mean 'torchao'?"),
    ({"recipe": "columnwise"}, "recipe='columnwise' is not supported. Allowed: tensorwise, rowwise, rowwise_gw_hp"),
    ({"base": "fp16"}, "base='fp16' is not supported. Allowed: bf16, 32"),
    ({"margin": 1}, "FP8(backend='torchao') does not take these options"),
    ({"multiple_of": 0}, "multiple_of=0 must be a positive number"),
    ({"float8_all_gather": True, "recipe": "rowwise"}, "Use recipe='tensorwise'"),
    ({"backend": TorchAO(), "recipe": "rowwise"}, "backend is a TorchAO object"),
    (
        {"backend": "te", "recipe": "tensorwise"},
        "recipe='tensorwise' is not supported. Allowed: delayed, current, mxfp8",
    ),
    ({"backend": "te", "recipe": "mxfp8", "margin": 2}, "margin can only be used with recipe='delayed'"),
    ({"backend": "te", "format": "E5M2"}, "format='E5M2' is not supported. Allowed: HYBRID, E4M3"),
    ({"backend": "te", "amax_compute_algo": "mean"}, "Allowed: max, most_recent"),
    ({"backend": "te", "amax_history_len": 0}, "amax_history_len=0 must be at least 1"),
    ({"backend": "msamp", "recipe": "O3"}, "recipe='O3' is not supported. Allowed: O2, O1"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_what_cannot_be_is_refused(options, message):
    with pytest.raises(ConfigurationError) as raised:
        FP8(**options)
    assert message in str(raised.value)


PACKAGES = [
    ("torchao", 'needs torchao. Install it with: pip install "drivetrain[fp8]"'),
    (
        "te",
        'pip install "transformer-engine[pytorch]". TransformerEngine supports NVIDIA GPUs with compute capability 8.9',
    ),
    ("msamp", 'pip install "git+https://github.com/Azure/MS-AMP". MS-AMP supports a single NVIDIA GPU'),
]


@pytest.mark.parametrize(("backend", "message"), PACKAGES)
def test_a_missing_package_is_named_with_its_install_line(monkeypatch, backend, message):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None)
    with pytest.raises(ConfigurationError) as raised:
        Trainer(accelerator="cpu", precision=FP8(backend=backend), logger=False)
    assert message in str(raised.value)
    if backend != "torchao":
        assert "FP8(backend='torchao') supports all devices except mps" in str(raised.value)


class Device(DeviceKind):
    """A device that computes in 8-bit floats, or does not."""

    def __init__(self, name: str, computes: bool = False) -> None:
        super().__init__(name, backend="gloo")
        self._computes = computes

    def supports_float8(self) -> bool:
        return self._computes

    def supports_bf16(self) -> bool:
        return True


def test_a_device_without_8_bit_floats_is_refused():
    with pytest.raises(ConfigurationError, match=r"not supported on mps.*Use 'bf16', or the CPU"):
        FP8().setup(Device("mps"))


def test_a_device_without_8_bit_arithmetic_emulates_unless_that_is_forbidden():
    for kind, emulates in ((Device("cuda"), True), (Device("cuda", computes=True), False), (CPU(), True)):
        precision = FP8()
        precision.setup(kind)
        assert precision.backend.config().emulate is emulates
    with pytest.raises(ConfigurationError, match=r"compute capability 8.9 or newer.*Remove emulate=False"):
        FP8(emulate=False).setup(Device("cuda"))


def test_a_device_reports_whether_it_computes_in_8_bits():
    assert not CPU().supports_float8()


@pytest.mark.gpu
def test_on_a_gpu_with_8_bit_arithmetic_nothing_is_emulated():
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a GPU of compute capability 8.9 or newer")
    accelerator = Accelerator(mixed_precision=FP8())
    model, plain = accelerator.prepare(net()), net().cuda()
    assert not model.blocks[0].up.config.emulate
    for rows in (32, 8):  # the products need multiples of 16: the last batch of an epoch seldom is one
        x = torch.randn(rows, 16, device="cuda")
        torch.testing.assert_close(model(x), plain(x), atol=0.05, rtol=0.05)
        model(x).sum().backward()
