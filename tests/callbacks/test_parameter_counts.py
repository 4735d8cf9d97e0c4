"""Parameters of a model and what they take, also where they are frozen and stored in fewer bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from drivetrain import Accelerator, BitsAndBytes, QLoRA, Quantizer, quantize_model
from drivetrain.callbacks.model_summary import ParameterCount, count_parameters, summarize
from tests.pool import device, run_in_processes

# Bytes of an element of a weight of 256 columns, with its scales.
STORED: dict[str, tuple[Quantizer | str, float]] = {
    "nf4": ("nf4", 0.5 + 4 / 64),
    "nf4 in two steps": (BitsAndBytes(4, double_quant=True), 0.5 + 1 / 64 + 4 / (64 * 256)),
    "nf4 in floats": (BitsAndBytes(4, quant_storage=torch.float32), 0.5 + 4 / 64),
    "int8": ("int8", 1 + 4 / 256),
    "float8wo": ("float8wo", 1 + 4 / 256),
}
WIDTH = 256
WEIGHTS, OTHERS = 2 * WIDTH * WIDTH, 2 * WIDTH + 2 * WIDTH + 2
RANK = 4
ADAPTERS = 2 * 2 * RANK * WIDTH


def made() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2))


@pytest.mark.parametrize("name", STORED)
def test_quantised_weights_count_as_before_and_take_what_is_stored(name: str) -> None:
    quantizer, each = STORED[name]
    model = quantize_model(made(), quantizer)
    for _ in range(2):
        counted = count_parameters(model)
        assert (counted.elements, counted.trained) == (WEIGHTS + OTHERS, OTHERS)
        assert counted.nbytes == pytest.approx(WEIGHTS * each + 4 * OTHERS, rel=1e-3)
        model(torch.ones(1, WIDTH))


@pytest.mark.parametrize("base", ["replicated", "sharded"])
@pytest.mark.parametrize("name", STORED)
def test_layers_below_adapters_count_with_them(name: str, base: str) -> None:
    quantizer, each = STORED[name]
    counted = count_parameters(QLoRA(rank=RANK, quantizer=quantizer, base=base).apply(made()))
    assert (counted.elements, counted.trained) == (WEIGHTS + OTHERS + ADAPTERS, ADAPTERS)
    assert counted.nbytes == pytest.approx(WEIGHTS * each + 4 * (OTHERS + ADAPTERS), rel=1e-3)


def test_the_summary_shows_them() -> None:
    *_, last = summarize(QLoRA(rank=RANK).apply(made())).splitlines()
    assert last == f"{WEIGHTS + OTHERS + ADAPTERS:,} parameters (0.094 MB), {ADAPTERS:,} of them trainable"


def counted_on_two_processes() -> list[ParameterCount]:
    found = []
    for strategy, base in (("ddp", "replicated"), ("fsdp", "replicated"), ("fsdp", "sharded")):
        accelerator: Any = Accelerator(device=device(), strategy=strategy)
        model = accelerator.prepare(QLoRA(rank=RANK, base=base).apply(made()))
        found.append(count_parameters(model, accelerator.strategy.state))
    return found


@pytest.mark.sharded
def test_all_of_them_count_where_they_are_sharded() -> None:
    expected = count_parameters(QLoRA(rank=RANK).apply(made()))
    for counts in run_in_processes(counted_on_two_processes, 2):
        assert counts == [expected] * 3
