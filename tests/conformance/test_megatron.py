"""Megatron gives what one plain process gives, however its layers, stages, sequences and optimizer are spread.

All on the CPU, under the shim of `tests/strategies/megatron/cpu_shim.py`: megatron-core itself names CUDA throughout.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.pool import run_in_processes
from tests.strategies.megatron import cpu_shim, models
from tests.strategies.megatron.models import ACCUMULATE, GPT, MAX_NORM, ROWS, STEPS, Outcome, Texts

pytestmark = pytest.mark.megatron

FP32, BF16 = 5e-6, 3e-3
# Two global batches and a bit: the last window is short and its batch too; or its micro-batches differ in shape.
SHORT, UNEVEN = 2 * ROWS * ACCUMULATE + 3, 2 * ROWS * ACCUMULATE + ROWS + 3


class Case(NamedTuple):
    """One run.

    Attributes:
        world: number of processes.
        sizes: arguments of `Megatron`.
        data: which data, and with which model: a key of `REFERENCES`.
        precision: number formats.
    """

    world: int
    sizes: dict[str, Any]
    data: str = "plain"
    precision: str = "32"


REFERENCES: dict[str, dict[str, Any]] = {
    "plain": {},
    "tokens": {"ragged": True, "config": {"calculate_per_token_loss": True}},
    "short": {"samples": SHORT},
    "uneven": {"samples": UNEVEN},
    "tied": {"config": {"gated_linear_unit": True, "num_query_groups": 2, "add_bias_linear": False}, "tied": True},
}
TP, PP, SP = {"tensor_parallel": 2}, {"pipeline_parallel": 2}, {"sequence_parallel": True}
SCALED = {"optimizer": {"initial_loss_scale": 1024.0}}  # that does not overflow
INTERLEAVED = {**PP, "virtual_pipeline": 2}
CASES = {
    "one process": Case(1, {}),
    "one process, tokens": Case(1, {}, "tokens"),
    "data, distributed optimizer": Case(2, {}),
    "data, whole optimizer": Case(2, {"distributed_optimizer": False}),
    "data, overlapped": Case(2, {"ddp": {"overlap_grad_reduce": True}}),
    "data, tokens": Case(2, {}, "tokens"),
    "data, short": Case(2, {}, "short"),
    "data, bf16": Case(2, {}, precision="bf16"),
    "data, whole optimizer, bf16": Case(2, {"distributed_optimizer": False}, precision="bf16"),
    "tensor": Case(2, TP),
    "tensor, tied": Case(2, TP, "tied"),
    "tensor, bf16": Case(2, TP, precision="bf16"),
    "tensor, fp16": Case(2, {**TP, **SCALED}, precision="fp16"),
    "pipeline, fp16": Case(2, {**PP, **SCALED}, precision="fp16"),
    "tensor, sequence": Case(2, {**TP, **SP}),
    "tensor, recompute": Case(2, {**TP, "recompute": "full"}),
    "tensor, recompute attention": Case(2, {**TP, "recompute": "selective"}),
    "pipeline": Case(2, PP),
    "pipeline, tokens": Case(2, PP, "tokens"),
    "pipeline, short": Case(2, PP, "short"),
    "pipeline, uneven": Case(2, PP, "uneven"),
    "pipeline, tied": Case(2, PP, "tied"),
    "pipeline, bf16": Case(2, PP, precision="bf16"),
    "interleaved": Case(2, INTERLEAVED),
    "interleaved, short": Case(2, INTERLEAVED, "short"),
    "tensor x pipeline": Case(4, {**TP, **PP}),
    "tensor x pipeline, tied": Case(4, {**TP, **PP}, "tied"),
    "tensor x data": Case(4, TP),
    "tensor x data, tokens": Case(4, TP, "tokens"),
    "pipeline x data": Case(4, PP),
    "everything": Case(4, {**TP, **INTERLEAVED, **SP, "recompute": "full"}),
}


def make_task(data: str) -> GPT:
    chosen = REFERENCES[data]
    return GPT(tied=chosen.get("tied", False), **chosen.get("config", {}))


def make_data(data: str) -> Texts:
    chosen = REFERENCES[data]
    return Texts(chosen.get("samples", ROWS * ACCUMULATE * STEPS), chosen.get("ragged", False))


def train_plain(data: str, make_optimizer: Any = models.adamw) -> tuple[Outcome, dict[str, torch.Tensor]]:
    """One process, megatron-core's layers in a plain loop of torch; also the weights that it began with."""
    models.start_megatron()
    task = make_task(data)
    model = task.model_provider(config=task.transformer_config())
    initial = {f"model.{name}": value.detach().clone() for name, value in weights_of(model).items()}
    optimizer = make_optimizer(model.parameters())
    by_token = task.config.get("calculate_per_token_loss", False)
    outcome = Outcome()

    def losses_of(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        positions = torch.arange(models.LENGTH).expand_as(batch["tokens"])
        return model(batch["tokens"], positions, None, labels=batch["labels"]) * batch["loss_mask"]

    micro_batches = list(DataLoader(make_data(data), batch_size=ROWS))
    while micro_batches:
        window, micro_batches = micro_batches[:ACCUMULATE], micro_batches[ACCUMULATE:]
        tokens = sum(batch["loss_mask"].sum() for batch in window)
        for batch in window:
            total, own = losses_of(batch).sum(), batch["loss_mask"].sum()
            outcome.losses.append((total / own).item())
            (total / tokens if by_token else total / own / len(window)).backward()
        outcome.norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    outcome.parameters = {f"model.{name}": value.detach() for name, value in weights_of(model).items()}
    batch = next(iter(DataLoader(models.evaluation_texts(), batch_size=9)))
    model.eval()
    with torch.no_grad():
        outcome.evaluation_loss = losses_of(batch).mean().item()
        logits = model(batch["tokens"], torch.arange(models.LENGTH).expand_as(batch["tokens"]), None)
        outcome.predictions = logits.argmax(-1)
        likeliest, next_likely = logits.topk(2, -1).values.unbind(-1)
        assert (likeliest - next_likely).min() > 20 * FP32, "rounding would choose between tokens"
    return outcome, initial


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}


def train_all_plain() -> dict[str, tuple[Outcome, dict[str, torch.Tensor]]]:
    cpu_shim.install()
    return {data: train_plain(data) for data in REFERENCES}


def train_each(names: list[str], initial: dict[str, dict[str, torch.Tensor]]) -> dict[str, Outcome]:
    """Train all cases in this process, one after another."""
    from drivetrain import Megatron

    cpu_shim.install()
    outcomes = {}
    for name in names:
        _, sizes, data, precision = CASES[name]
        outcomes[name] = models.fit(
            Megatron(**sizes), make_task(data), make_data(data), initial[data], precision=precision
        )
        outcomes[name].trainer = None
    return outcomes


@pytest.fixture(scope="module")
def plain() -> dict[str, tuple[Outcome, dict[str, torch.Tensor]]]:
    return run_in_processes(train_all_plain, 1, timeout=120)[0]


@pytest.fixture(scope="module")
def trained(plain):
    """What rank 0 has trained, by the case's name, for the cases of one number of processes at a time."""
    known: dict[int, list[dict[str, Outcome]]] = {}

    def of(name: str) -> list[Outcome]:
        world = CASES[name].world
        if world not in known:
            names = [each for each, case in CASES.items() if case.world == world]
            initial = {data: weights for data, (_, weights) in plain.items()}
            known[world] = run_in_processes(train_each, world, args=(names, initial), timeout=280)
        return [outcomes[name] for outcomes in known[world]]

    return of


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", CASES)
def test_same_as_one_plain_process(name: str, plain, trained) -> None:
    case, (expected, _) = CASES[name], plain[CASES[name].data]
    for rank, outcome in enumerate(trained(name)):
        check(outcome, expected, FP32 if case.precision == "32" else BF16, rank)


def check(outcome: Outcome, expected: Outcome, tolerance: float, rank: int) -> None:
    """Raise where a run differs from plain torch; the parameters are whole on rank 0 only."""
    assert outcome.losses == pytest.approx(expected.losses, abs=tolerance), rank
    assert outcome.norms == pytest.approx(expected.norms, abs=tolerance * max(1.0, *expected.norms)), rank
    assert outcome.evaluation_loss == pytest.approx(expected.evaluation_loss, abs=tolerance), rank
    same = (outcome.predictions == expected.predictions).float().mean()
    assert same == 1.0 if tolerance <= FP32 else same > 0.9, rank
    if rank > 0:
        return
    assert outcome.parameters.keys() == expected.parameters.keys()
    for key, value in expected.parameters.items():
        # Low weights are rounded, by half a unit of their last place.
        rounding = 0.0 if tolerance <= FP32 else value.abs() * 2**-8
        assert ((outcome.parameters[key].float() - value).abs() <= tolerance + rounding).all(), key
