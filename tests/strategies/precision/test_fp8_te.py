"""FP8 over TransformerEngine, against a recorded contract of its API; on a GPU that has it, against itself."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from drivetrain import FP8, Accelerator, CheckpointError, ConfigurationError, DeviceKind
from drivetrain.runtime.devices import CPU
from tests.strategies.precision import te_contract
from tests.strategies.precision.fp8_models import FLOAT8, adamw, loader, net


class CUDAInName(CPU):
    """The host under the name that TransformerEngine runs on."""

    def __init__(self) -> None:
        super().__init__()
        self.name = "cuda"

    @property
    def autocast_type(self) -> str:
        return "cpu"

    def supports_bf16(self) -> bool:
        return True


@pytest.fixture(params=[True, False], ids=["2.8 and newer", "before 2.8"])
def te(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    for name, module in te_contract.packages(request.param).items():
        monkeypatch.setitem(sys.modules, name, module)
    te_contract.install(request.param)
    setup = FP8.setup
    monkeypatch.setattr(FP8, "setup", lambda self, kind: setup(self, CUDAInName()))
    return te_contract


def train(precision: FP8, steps: int, resume: Path | None = None, save: Path | None = None) -> Any:
    """Some steps, a checkpoint after the first half of them; the accelerator and the model."""
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    model = net()
    model, optimizer = accelerator.prepare(model, adamw(model.parameters()))
    if resume is not None:
        accelerator.load_state(str(resume))
    batches = list(loader())
    for index in range(0 if resume is None else steps // 2, steps):
        x, y = batches[index]
        optimizer.zero_grad()
        accelerator.backward(F.mse_loss(model(x), y))
        optimizer.step()
        if save is not None and index + 1 == steps // 2:
            accelerator.save_state(str(save))
    return accelerator, model


def test_linear_layers_and_normalisations_become_its_modules(te):
    accelerator = Accelerator(cpu=True, mixed_precision=FP8(backend="te"))
    plain, model = net(), net()
    before = dict(model.named_parameters())
    model = accelerator.prepare(model)
    kinds = {name: type(module) for name, module in model.named_modules()}
    assert [name for name, kind in kinds.items() if issubclass(kind, te.Linear)] == FLOAT8
    assert [name for name, kind in kinds.items() if issubclass(kind, te.LayerNorm)] == [
        "blocks.0.norm",
        "blocks.1.norm",
    ]
    assert all(before[name] is parameter for name, parameter in model.named_parameters())
    assert model.state_dict().keys() == plain.state_dict().keys()
    model.load_state_dict(plain.state_dict())
    x = torch.randn(4, 16)
    torch.testing.assert_close(model(x), plain(x), atol=2e-2, rtol=0)


def test_normalisations_stay_on_request(te):
    model = Accelerator(cpu=True, mixed_precision=FP8(backend="te", layer_norm=False)).prepare(net())
    assert type(model.blocks[0].norm) is nn.LayerNorm


RECIPES: list[tuple[dict[str, Any], Any]] = [
    ({}, te_contract.DelayedScaling()),
    (
        {"format": "E4M3", "margin": 2, "amax_history_len": 16, "amax_compute_algo": "most_recent"},
        te_contract.DelayedScaling(2, te_contract.Format.E4M3, 16, "most_recent"),
    ),
    ({"recipe": "current"}, te_contract.Float8CurrentScaling()),
    ({"recipe": "current", "format": "e4m3"}, te_contract.Float8CurrentScaling(te_contract.Format.E4M3)),
]


@pytest.mark.parametrize(("options", "recipe"), RECIPES)
def test_forwards_run_under_the_recipe_and_evaluation_in_high_precision(te, options, recipe):
    model = Accelerator(cpu=True, mixed_precision=FP8(backend="te", **options)).prepare(net())
    model(torch.ones(2, 16)).sum().backward()
    with torch.no_grad():
        model(torch.ones(2, 16))
    assert te.State.contexts == [(True, recipe), (False, recipe)]


def test_evaluation_in_8_bits_on_request(te):
    precision = FP8(backend="te", use_autocast_during_eval=True)
    model = Accelerator(cpu=True, mixed_precision=precision).prepare(net())
    with torch.no_grad():
        model(torch.ones(2, 16))
    assert [enabled for enabled, _ in te.State.contexts] == [True]


def test_the_history_of_delayed_scaling_resumes_to_the_bit(te, tmp_path):
    options: dict[str, Any] = {"backend": "te", "amax_history_len": 4}
    whole, expected = train(FP8(**options), 4, save=tmp_path / "midway")
    resumed, model = train(FP8(**options), 4, resume=tmp_path / "midway")
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one, other)
    found, wanted = resumed.precision.state_dict(), whole.precision.state_dict()
    assert list(wanted["scaling"]["0"]) == FLOAT8
    for name in FLOAT8:
        for key in ("scaling_fwd", "scaling_bwd"):
            for one, other in zip(
                found["scaling"]["0"][name][key].values(), wanted["scaling"]["0"][name][key].values(), strict=True
            ):
                assert torch.equal(one, other)
    assert wanted["scaling"]["0"][FLOAT8[0]]["scaling_fwd"]["amax_history"].count_nonzero() > 0


def test_without_its_history_a_resumed_run_differs(te, tmp_path, monkeypatch):
    monkeypatch.setattr(FP8, "load_state_dict", lambda self, state: None)
    options: dict[str, Any] = {"backend": "te", "amax_history_len": 4}
    _, expected = train(FP8(**options), 4, save=tmp_path / "midway")
    _, model = train(FP8(**options), 4, resume=tmp_path / "midway")
    assert not all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))


def test_a_history_of_another_length_is_refused(te, tmp_path):
    train(FP8(backend="te", amax_history_len=4), 2, save=tmp_path / "midway")
    with pytest.raises(
        CheckpointError, match=r"\(4, 3\) in the checkpoint, but \(8, 3\) in this run.*amax_history_len"
    ):
        train(FP8(backend="te", amax_history_len=8), 2, resume=tmp_path / "midway")


def test_checkpoints_go_to_other_precisions_and_back(te, tmp_path):
    train(FP8(backend="te"), 2, save=tmp_path / "te")
    for precision in ("bf16", FP8(backend="te", recipe="current")):
        accelerator = Accelerator(cpu=True, mixed_precision=precision)
        model = net()
        accelerator.prepare(model, adamw(model.parameters()))
        accelerator.load_state(str(tmp_path / "te"))
        accelerator.save_state(str(tmp_path / "other"))
        train(FP8(backend="te"), 2, resume=tmp_path / "other")


def test_a_recipe_that_the_device_cannot_run_is_refused_with_its_reason(te):
    with pytest.raises(
        ConfigurationError, match=r"recipe='mxfp8'\) is not supported on this machine: Device compute capability 10.0"
    ):
        Accelerator(cpu=True, mixed_precision=FP8(backend="te", recipe="mxfp8"))


def test_mxfp8_where_the_device_can(te, monkeypatch):
    for name, module in te_contract.packages(True, mxfp8=True).items():
        monkeypatch.setitem(sys.modules, name, module)
    model = Accelerator(cpu=True, mixed_precision=FP8(backend="te", recipe="mxfp8")).prepare(net())
    model(torch.ones(2, 16))
    assert te.State.contexts == [(True, te_contract.MXFP8BlockScaling(te_contract.Format.HYBRID))]


def test_other_devices_are_refused_by_name(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: object())
    with pytest.raises(ConfigurationError, match=r"not supported on xpu.*FP8.backend='torchao'. supports all devices"):
        FP8(backend="te").setup(DeviceKind("xpu", backend="xccl"))


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_on_a_gpu_it_trains_as_the_plain_model_does_and_resumes(tmp_path, recipe):
    pytest.importorskip("transformer_engine.pytorch", reason="needs transformer-engine")
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a GPU of compute capability 8.9 or newer")
    losses = {}
    for name, precision in (("fp8", FP8(backend="te", recipe=recipe)), ("bf16", "bf16")):
        accelerator = Accelerator(mixed_precision=precision)
        model = net()
        model, optimizer, batches = accelerator.prepare(model, adamw(model.parameters()), loader())
        losses[name] = []
        for x, y in batches:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            losses[name].append(loss.item())
        accelerator.save_state(str(tmp_path / name))
        accelerator.load_state(str(tmp_path / name))
    assert losses["fp8"] == pytest.approx(losses["bf16"], abs=2e-2)
