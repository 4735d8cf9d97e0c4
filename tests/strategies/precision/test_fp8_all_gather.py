"""Under FSDP, float8 layers gather their weights in float8."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from drivetrain import FP8, FSDP, Accelerator
from tests.pool import run_in_processes
from tests.strategies.precision.fp8_models import FLOAT8, adamw, loader, net

pytestmark = pytest.mark.sharded


STRATEGIES: dict[str, dict[str, Any]] = {
    "fsdp": {},
    "offloaded": {"cpu_offload": True},
    "sharded over fewer between forward and backward": {"reshard_after_forward": 2},
}


def prepare(strategy: str = "fsdp", **options: Any) -> Any:
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True, strategy=FSDP(**STRATEGIES[strategy]), mixed_precision=FP8(**options))
    model = net()
    return accelerator, *accelerator.prepare(model, adamw(model.parameters()))


def sent(model: Any) -> dict[str, str]:
    """The dtype that each parameter is gathered in at present."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {}
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            for group in unit._get_fsdp_state()._fsdp_param_groups:
                for one in group.fsdp_params:
                    (given,) = one.all_gather_inputs
                    found[names[id(one.sharded_param)]] = str(given.dtype).removeprefix("torch.")
    return found


def step(accelerator: Any, model: Any, optimizer: Any) -> None:
    x, y = next(iter(loader(8)))
    optimizer.zero_grad()
    accelerator.backward(F.mse_loss(model(x), y))
    optimizer.step()


def dtypes(strategy: str, float8_all_gather: bool) -> dict[str, str]:
    accelerator, model, optimizer = prepare(strategy, float8_all_gather=float8_all_gather)
    step(accelerator, model, optimizer)
    return sent(model)


IN_FLOAT8 = {f"{name}.weight" for name in FLOAT8}


def test_weights_of_float8_layers_alone_are_sent_in_float8():
    for found in run_in_processes(dtypes, 2, args=("fsdp", True), timeout=60):
        assert {name for name, dtype in found.items() if dtype == "float8_e4m3fn"} == IN_FLOAT8
        assert set(found.values()) == {"float8_e4m3fn", "bfloat16"}


@pytest.mark.parametrize(
    ("strategy", "asked", "processes"),
    [
        ("fsdp", False, 2),
        ("offloaded", True, 2),
        ("fsdp", True, 3),
        ("sharded over fewer between forward and backward", True, 4),
    ],
    ids=["not asked for", "offloaded", "unevenly sharded", "sharded over fewer"],
)
def test_elsewhere_all_are_sent_in_bfloat16(strategy, asked, processes):
    for found in run_in_processes(dtypes, processes, args=(strategy, asked), timeout=60):
        assert set(found.values()) == {"bfloat16"}


def scales() -> dict[str, Any]:
    """The scales in use after a step, after a change to the weights, and after the next step."""
    accelerator, model, optimizer = prepare(float8_all_gather=True)
    weight = model.blocks[0].up.weight
    gather = accelerator.precision.backend._all_gather
    (known,) = [one for layer, one in gather._weights.items() if layer is model.blocks[0].up]

    def expected() -> float:
        return 448.0 / weight.full_tensor().abs().max().item()

    step(accelerator, model, optimizer)
    found = {"stepped": (known._cast._precomputed_scale.item(), expected())}
    with torch.no_grad():
        weight.mul_(4.0)
    (_,), (scale,) = weight._local_tensor.fsdp_pre_all_gather(weight.device_mesh)
    found["changed"] = (scale.item(), expected())
    step(accelerator, model, optimizer)
    found["stepped again"] = (known._cast._precomputed_scale.item(), expected())
    return found


def test_scales_are_computed_after_each_step_and_follow_other_changes():
    for found in run_in_processes(scales, 2, timeout=60):
        for when, (scale, expected) in found.items():
            assert scale == pytest.approx(expected, rel=1e-6), when


def plainness() -> None:
    accelerator, model, optimizer = prepare(float8_all_gather=True, base="32")
    step(accelerator, model, optimizer)
    for tensor in (*model.parameters(), *(v for s in optimizer.state.values() for v in s.values() if v.dim())):
        assert type(tensor.data) is DTensor
        assert type(tensor.to_local()) in (torch.Tensor, torch.nn.Parameter)
    accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    twin = copy.deepcopy(model)
    x, _ = next(iter(loader(8)))
    with torch.no_grad():
        torch.testing.assert_close(twin(x), model(x), atol=0.05, rtol=0)


def test_parameters_and_the_optimizers_state_stay_plain_shards():
    run_in_processes(plainness, 2, timeout=60)
