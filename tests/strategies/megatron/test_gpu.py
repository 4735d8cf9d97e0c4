"""What the CPU cannot show: streams, experts' all-to-all, shared sequences, fused layers. Each needs GPUs."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch

from tests.pool import run_in_processes
from tests.strategies.megatron.models import GPT, LENGTH, VOCABULARY, Texts, fit

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.megatron,
    pytest.mark.skipif(
        find_spec("megatron") is None, reason="megatron-core is missing: pip install 'drivetrain[megatron]'"
    ),
]
NEEDS_TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
NEEDS_ENGINE = pytest.mark.skipif(
    find_spec("transformer_engine") is None,
    reason="transformer_engine is missing: pip install transformer-engine[pytorch]",
)
ON_GPU = {"DRIVETRAIN_USE_CPU": None}
EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_token_dispatcher_type": "alltoall",
    "add_bias_linear": False,
}


class Fused(GPT):
    """The same of TransformerEngine's layers."""

    def model_provider(
        self, pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None, config: Any = None
    ) -> Any:
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

        stage = {"pre_process": pre_process, "post_process": post_process, "vp_stage": vp_stage}
        spec = get_gpt_layer_with_transformer_engine_spec(num_experts=config.num_moe_experts)
        return GPTModel(config, spec, vocab_size=VOCABULARY, max_sequence_length=LENGTH, **stage)


def losses(kind: type[GPT], sizes: dict[str, Any], config: dict[str, Any], initial: Any = None, **options: Any) -> Any:
    from drivetrain import Megatron

    outcome = fit(
        Megatron(**sizes), kind(**config), Texts(), initial, accelerator="cuda", evaluate=False, seed=1, **options
    )
    return outcome.losses, outcome.parameters


def on_gpus(world: int, *args: Any, **kwargs: Any) -> Any:
    return run_in_processes(losses, world, args=args, kwargs=kwargs, timeout=200, env=ON_GPU)[0]


@pytest.mark.parametrize("precision", ["32", "bf16", "fp16"])
def test_one_gpu_trains_with_overlapped_reduction(precision: str) -> None:
    sizes = {"ddp": {"overlap_grad_reduce": True}}
    if precision == "fp16":  # Megatron's own begins at 2**32, and skips steps until it is low enough
        sizes["optimizer"] = {"initial_loss_scale": 2.0**10}
    found, _ = on_gpus(1, GPT, sizes, {}, precision=precision)
    expected, _ = on_gpus(1, GPT, {}, {})
    assert found == pytest.approx(expected, abs=1e-5 if precision == "32" else 1e-2)


@NEEDS_ENGINE
@pytest.mark.parametrize("config", [{}, EXPERTS], ids=["dense", "experts"])
def test_fused_layers_train(config: dict[str, Any]) -> None:
    found, _ = on_gpus(1, Fused, {}, config, precision="bf16")
    assert all(0 < loss < 10 for loss in found)


@NEEDS_TWO
@NEEDS_ENGINE
@pytest.mark.parametrize(
    ("sizes", "config"),
    [
        ({"expert_parallel": 2}, EXPERTS),
        ({"context_parallel": 2}, {}),
        ({"tensor_parallel": 2, "sequence_parallel": True}, {}),
    ],
    ids=["experts", "context", "sequence"],
)
def test_two_gpus_give_what_one_gives(sizes: dict[str, Any], config: dict[str, Any]) -> None:
    _, trained = on_gpus(1, Fused, {}, config, precision="bf16")
    one, _ = on_gpus(1, Fused, {}, config, trained, precision="bf16")
    two, _ = on_gpus(2, Fused, sizes, config, trained, precision="bf16")
    assert two == pytest.approx(one, abs=2e-2)
