"""FP8 over MS-AMP, against a recorded contract of its API (0.4.0): it needs an NVIDIA GPU, and an older torch."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain import FP8, Accelerator, ConfigurationError
from drivetrain.runtime.devices import CPU
from tests.pool import run_in_processes
from tests.strategies.precision.fp8_models import FLOAT8, adamw, net


class ScaledTensor(torch.Tensor):
    """As MS-AMP's `ScalingTensor`: a tensor with a `meta`, and `float()` for the plain one."""

    meta = types.SimpleNamespace(qtype="kfloat16")

    def float(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor).detach().float()


class FP8Linear(nn.Linear):
    """As MS-AMP's own: `scaling_metas`, and a weight in scaled float16."""

    scaling_metas: Any = None


class LBAdamW(torch.optim.AdamW):
    def __init__(self, params: Any, exp_avg_dtype: Any = None, exp_avg_sq_dtype: Any = None, **options: Any) -> None:
        self.asked = (exp_avg_dtype, exp_avg_sq_dtype)
        super().__init__(params, **options)


def initialize(model: nn.Module, optimizer: Any = None, opt_level: str = "O1", use_te: bool = False) -> Any:
    """The signature of `msamp.initialize`; layers with `use_fp32_linear` stay."""
    for module in model.modules():
        if type(module).__name__ in ("Linear", "Named") and not getattr(module, "use_fp32_linear", False):
            module.__class__ = FP8Linear
            module.scaling_metas = {"input": None}
    defaults = {key: optimizer.defaults[key] for key in ("lr", "betas", "eps", "weight_decay", "amsgrad")}
    return model, LBAdamW(optimizer.param_groups, torch.uint8 if opt_level == "O2" else torch.float32, **defaults)


class CUDAInName(CPU):
    """The host under the name that MS-AMP runs on."""

    def __init__(self) -> None:
        super().__init__()
        self.name = "cuda"

    @property
    def autocast_type(self) -> str:
        return "cpu"

    def supports_bf16(self) -> bool:
        return True


def install() -> None:
    package = types.ModuleType("msamp")
    package.initialize = initialize
    sys.modules["msamp"] = package
    setup = FP8.setup
    FP8.setup = lambda self, kind: setup(self, CUDAInName())


@pytest.fixture
def _msamp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "msamp", None)
    monkeypatch.setattr(FP8, "setup", FP8.setup)
    install()


@pytest.mark.usefixtures("_msamp")
@pytest.mark.parametrize(("recipe", "moment"), [("O1", torch.float32), ("O2", torch.uint8)])
def test_model_and_optimizer_are_converted_together(recipe, moment):
    accelerator = Accelerator(cpu=True, mixed_precision=FP8(backend="msamp", recipe=recipe))
    model, scheduled = net(), None
    optimizer = adamw(model.parameters())
    scheduled = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    model, prepared, scheduler = accelerator.prepare(model, optimizer, scheduled)
    assert [name for name, module in model.named_modules() if isinstance(module, FP8Linear)] == FLOAT8
    assert isinstance(prepared.optimizer, LBAdamW)
    assert prepared.optimizer.asked[0] is moment
    accelerator.backward(model(torch.ones(2, 16)).sum())
    prepared.step()
    scheduler.step()
    assert prepared.param_groups[0]["lr"] == pytest.approx(5e-3)  # schedulers change the groups that both share


@pytest.mark.usefixtures("_msamp")
def test_a_state_dict_holds_plain_weights():
    accelerator = Accelerator(cpu=True, mixed_precision=FP8(backend="msamp"))
    model = net()
    model, _ = accelerator.prepare(model, adamw(model.parameters()))
    weight = model.blocks[0].up.weight
    scaled = torch.zeros_like(weight).detach().as_subclass(ScaledTensor)
    model.blocks[0].up._parameters["weight"] = scaled
    assert type(model.state_dict(keep_vars=True)["blocks.0.up.weight"]) is torch.Tensor


@pytest.mark.usefixtures("_msamp")
def test_a_second_optimizer_is_refused():
    accelerator = Accelerator(cpu=True, mixed_precision=FP8(backend="msamp"))
    model = net()
    accelerator.prepare(model, adamw(model.parameters()))
    with pytest.raises(ConfigurationError, match=r"one model and one optimizer.*and a second optimizer"):
        accelerator.prepare_optimizer(adamw(model.parameters()))


def refusal() -> str:
    install()
    with pytest.raises(ConfigurationError) as raised:
        Accelerator(cpu=True, mixed_precision=FP8(backend="msamp"))
    return str(raised.value)


def test_several_processes_are_refused():
    for message in run_in_processes(refusal, 2, timeout=60):
        assert "FP8(backend='msamp') is not supported with 2 processes" in message
        assert "FP8(backend='torchao') supports all devices except mps" in message
