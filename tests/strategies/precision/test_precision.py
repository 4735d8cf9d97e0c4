"""Number formats by name: what is computed in them, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from drivetrain import Accelerator, AutocastKwargs, ConfigurationError, DeviceKind, Precision, register_precision
from drivetrain.runtime.devices import CPU
from drivetrain.strategies.precision import (
    BFloat16Mixed,
    BFloat16True,
    Double,
    Float16Mixed,
    Float16True,
    available_precisions,
    resolve_precision,
)
from drivetrain.strategies.precision import registry as precision_registry
from tests.pool import run_in_processes

NAMES: dict[type[Precision], list[Any]] = {
    Precision: ["32", 32, "32-true", "no", "fp32", None],
    Double: ["64", 64, "64-true", "fp64", "double"],
    BFloat16Mixed: ["bf16", "bf16-mixed", "BF16"],
    BFloat16True: ["bf16-true"],
    Float16Mixed: ["fp16", "16-mixed", "16", 16],
    Float16True: ["fp16-true", "16-true"],
}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in NAMES.items() for name in names])
def test_every_name_and_alias(kind, name):
    assert type(resolve_precision(name)) is kind


def test_the_names_are_listed():
    assert available_precisions() == ["32", "64", "bf16", "bf16-true", "fp16", "fp16-true", "fp8"]
    made = Float16Mixed()
    assert resolve_precision(made) is made
    assert repr(made) == "Float16Mixed()"


@pytest.mark.parametrize(
    ("name", "suggestion"), [("bf61", "'bf16'"), ("fp-16", "'fp16'"), ("16-mixd", "'16-mixed'"), ("int8", "")]
)
def test_an_unknown_name_is_refused_with_what_there_is(name, suggestion):
    with pytest.raises(ConfigurationError, match=f"Unknown precision '{name}'. Allowed: 32, 64, bf16.*{suggestion}"):
        resolve_precision(name)


HALF, BRAIN, SINGLE, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
FORMATS = [
    # precision, parameters, inside a linear layer, output, gradients, a tensor made in the forward
    ("no", SINGLE, SINGLE, SINGLE, SINGLE, SINGLE),
    ("64", DOUBLE, DOUBLE, DOUBLE, DOUBLE, DOUBLE),
    ("bf16", SINGLE, BRAIN, SINGLE, SINGLE, SINGLE),
    ("fp16", SINGLE, HALF, SINGLE, SINGLE, SINGLE),
    ("bf16-true", BRAIN, BRAIN, BRAIN, BRAIN, BRAIN),
    ("fp16-true", HALF, HALF, HALF, HALF, HALF),
]


class Probe(nn.Module):
    """Notes the dtypes that it meets."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("offset", torch.zeros(2))
        self.inside: list[torch.dtype] = []

    def forward(self, x: torch.Tensor, index: torch.Tensor, flags: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        hidden = self.linear(x)
        self.inside = [hidden.dtype, torch.zeros(1).dtype, index.dtype, flags[0].dtype]
        return {"logits": hidden + self.offset.to(hidden.dtype), "index": index}


def formats() -> dict[str, list[Any]]:
    results = {}
    for name, *_ in FORMATS:
        accelerator = Accelerator(cpu=True, mixed_precision=name)
        model = accelerator.prepare(Probe())
        probe = accelerator.unwrap_model(model)
        output = model(torch.ones(1, 2), index=torch.tensor([1]), flags=[torch.tensor([True])])
        accelerator.backward(output["logits"].float().sum())
        inside, made, index, flag = probe.inside
        results[name] = [
            probe.linear.weight.dtype,
            inside,
            output["logits"].dtype,
            probe.linear.weight.grad.dtype,
            made,
            # integers and booleans stay as they are, and the default dtype is torch's own again
            [index, flag, output["index"].dtype, probe.count.dtype, torch.get_default_dtype()],
            probe.offset.dtype,
        ]
    return results


@pytest.mark.parametrize("processes", [1, 2])
def test_formats_of_parameters_activations_outputs_and_gradients(processes):
    for results in run_in_processes(formats, processes):
        for name, parameters, inside, output, gradients, made in FORMATS:
            kept = [torch.int64, torch.bool, torch.int64, torch.int64, SINGLE]
            assert results[name] == [parameters, inside, output, gradients, made, kept, parameters], name


class Rotary(nn.Module):
    """Multiplies by a table of complex numbers, as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2, dtype=torch.cfloat))
        self.register_buffer("table", torch.tensor([1j, 1 + 1j]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(x * self.table * self.scale)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("64", torch.cdouble), ("64-true", torch.cdouble), ("bf16-true", torch.cfloat), ("32", torch.cfloat)],
)
def test_complex_parameters_buffers_and_inputs_stay_complex(name, dtype):
    model = Accelerator(cpu=True, mixed_precision=name).prepare(Rotary())
    bare = model
    assert (bare.table.dtype, bare.scale.dtype) == (dtype, dtype)
    output = model(torch.tensor([2.0 + 0j, 1j]))
    torch.testing.assert_close(output.double(), torch.tensor([[0.0, 2.0], [-1.0, 1.0]], dtype=DOUBLE))


def test_outputs_of_any_structure_come_back_in_32_bits():
    class Many(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return x.bfloat16(), {"half": x.half(), "double": x.double(), "name": "a"}, [x.long()]

    first, second, third = Accelerator(cpu=True, mixed_precision="bf16").prepare(Many())(torch.ones(2))
    assert first.dtype == second["half"].dtype == SINGLE
    assert second["double"].dtype == DOUBLE
    assert second["name"] == "a"
    assert third[0].dtype == torch.int64


def test_autocast_can_be_told_to_do_nothing():
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", kwargs_handlers=[AutocastKwargs(enabled=False)])
    seen = []
    layer = nn.Linear(2, 2)
    layer.register_forward_hook(lambda module, given, output: seen.append(output.dtype))
    accelerator.prepare(nn.Sequential(layer))(torch.ones(1, 2))
    assert seen == [SINGLE]
    assert accelerator.mixed_precision == "bf16"


@pytest.mark.parametrize(("name", "dtype"), [("64", DOUBLE), ("bf16-true", BRAIN), ("32", SINGLE), ("bf16", SINGLE)])
def test_a_model_is_built_in_its_dtype(name, dtype):
    with resolve_precision(name).init_context():
        assert nn.Linear(1, 1).weight.dtype == dtype
    assert nn.Linear(1, 1).weight.dtype == SINGLE


class WithoutBrain(CPU):
    def supports_bf16(self) -> bool:
        return False


@pytest.mark.parametrize("name", ["bf16", "bf16-true"])
def test_a_device_without_bfloat16_is_refused(name):
    with pytest.raises(ConfigurationError, match=rf"precision='{name}' needs bfloat16.*Use 'fp16' or '32'"):
        resolve_precision(name).setup(WithoutBrain())


def test_a_device_without_64_bits_is_refused():
    with pytest.raises(ConfigurationError, match="not supported on mps"):
        Double().setup(DeviceKind("mps", backend="gloo"))


class Rounded(Precision):
    """A third party's: parameters and inputs rounded to halves."""

    name = "halves"
    aliases = ("rounded",)

    def convert(self, model: nn.Module) -> nn.Module:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2).round_().div_(2)
        return model

    def convert_batch(self, batch: Any) -> Any:
        args, kwargs = batch
        return tuple((x * 2).round() / 2 for x in args), kwargs


def test_a_third_party_registers_its_own(monkeypatch):
    monkeypatch.setattr(precision_registry, "_PRECISIONS", dict(precision_registry._PRECISIONS))
    assert register_precision(Rounded) is Rounded
    assert "halves" in available_precisions()
    accelerator = Accelerator(cpu=True, mixed_precision="rounded")
    assert accelerator.mixed_precision == "halves"
    model = accelerator.prepare(nn.Linear(1, 1))
    assert (model.weight * 2 % 1).item() == 0
    assert torch.equal(model(torch.tensor([[1.1]])), model(torch.tensor([[1.0]])))


def test_a_registered_name_is_not_taken_over_by_accident():
    class Impostor(Precision):
        name = "bf16"

    with pytest.raises(ConfigurationError, match="already registered"):
        register_precision(Impostor)
