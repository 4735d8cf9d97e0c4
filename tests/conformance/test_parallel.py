"""Splitting layers, sequences and models in several ways at once gives what one plain process gives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from drivetrain import Colwise, Parallel, PrepareModuleInput, Rowwise, SequenceParallel
from tests.conformance import language_model
from tests.conformance.harness import Outcome
from tests.conformance.language_model import Run
from tests.pool import run_in_processes

pytestmark = pytest.mark.sharded

TOLERANCES = {"32": 5e-6, "bf16": 3e-3, "bf16-true": 3e-2, "fp16": 3e-3}


def layers_split() -> dict[str, Any]:
    return {
        "tokens": Rowwise(input_layouts=Replicate()),
        **{f"layers.*.attention.{name}": Colwise() for name in ("wq", "wk", "wv")},
        "layers.*.attention.wo": Rowwise(),
        "layers.*.ffn.w1": Colwise(),
        "layers.*.ffn.w2": Rowwise(),
        "head": Colwise(output_layouts=Replicate()),
    }


def sequences_split_between() -> dict[str, Any]:
    whole = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    return {
        "tokens": Rowwise(input_layouts=Replicate(), output_layouts=Shard(1)),
        "positions": Rowwise(input_layouts=Replicate(), output_layouts=Shard(1)),
        "layers.*.attention_norm": SequenceParallel(),
        "layers.*.attention": whole,
        **{f"layers.*.attention.{name}": Colwise() for name in ("wq", "wk", "wv")},
        "layers.*.attention.wo": Rowwise(output_layouts=Shard(1)),
        "layers.*.ffn_norm": SequenceParallel(),
        "layers.*.ffn": whole,
        "layers.*.ffn.w1": Colwise(),
        "layers.*.ffn.w2": Rowwise(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": Colwise(input_layouts=Shard(1), output_layouts=Replicate()),
    }


def loss_split() -> dict[str, Any]:
    return {**layers_split(), "head": Colwise(use_local_output=False)}


# Parameters gathered in 32 bits: bf16 is then cast by autocast alone, as in one process.
EXACT: dict[str, Any] = {"gather_dtype": torch.float32}

STRATEGIES: dict[str, Any] = {
    "tp": lambda: Parallel(tp=2, tp_plan=layers_split()),
    "sp": lambda: Parallel(tp=2, tp_plan=sequences_split_between()),
    "loss": lambda: Parallel(tp=2, tp_plan=loss_split(), loss_parallel=True),
    "cp": lambda: Parallel(cp=2),
    "cp-in-order": lambda: Parallel(cp=2, cp_load_balance=False),
    "cp-recomputed": lambda: Parallel(cp=2, activation_checkpointing=True),
    "cp-exact": lambda: Parallel(cp=2, **EXACT),
    "alone": lambda: Parallel(tp_plan=layers_split()),
    "replicate": lambda: Parallel(dp_replicate=2),
    "tp x fsdp": lambda: Parallel(tp=2, dp_shard=2, tp_plan=layers_split(), **EXACT),
    "sp x fsdp": lambda: Parallel(tp=2, dp_shard=2, tp_plan=sequences_split_between(), **EXACT),
    "tp x replicate": lambda: Parallel(tp=2, dp_replicate=2, tp_plan=layers_split(), **EXACT),
    "gathered in bf16": lambda: Parallel(tp=2, dp_shard=2, tp_plan=sequences_split_between()),
    "cp x fsdp": lambda: Parallel(cp=2, dp_shard=2, **EXACT),
    "cp x replicate": lambda: Parallel(cp=2, dp_replicate=2, dp_shard=1, **EXACT),
    "tp x cp": lambda: Parallel(tp=2, cp=2, tp_plan=layers_split(), **EXACT),
    "sp x cp": lambda: Parallel(tp=2, cp=2, tp_plan=sequences_split_between(), **EXACT),
}

Case = tuple[str, str, Run]


def train_each(cases: list[Case]) -> list[Outcome]:
    """Train all cases in this process, one after another."""
    torch.set_num_threads(1)
    return [language_model.DRIVERS[driver](STRATEGIES[strategy](), run) for strategy, driver, run in cases]


def check_all(cases: list[Case], processes: int, timeout: float = 120) -> None:
    expected = {run: language_model.train_plain(run) for _, _, run in cases}
    for rank, outcomes in enumerate(run_in_processes(train_each, processes, args=(cases,), timeout=timeout)):
        for (strategy, driver, run), outcome in zip(cases, outcomes, strict=True):
            try:
                language_model.check(outcome, expected[run], TOLERANCES[run.precision], rank)
            except AssertionError as error:
                raise AssertionError(f"{strategy}, {driver}, {run}: {error}") from error


LAYERS = 2  # DTensors cost on the CPU, and two blocks show all that four do


def test_layers_split_over_two_processes():
    cases = [("tp", "trainer", 1), ("tp", "accelerator", 3), ("sp", "trainer", 3), ("loss", "accelerator", 1)]
    check_all([(strategy, driver, Run("32", accumulate, layers=LAYERS)) for strategy, driver, accumulate in cases], 2)


def test_sequences_split_over_two_processes():
    cases = [("cp", Run("32", 3)), ("cp", Run("32", 2, ragged=True)), ("cp-in-order", Run("32", 1))]
    check_all([(strategy, "trainer", replace(run, layers=LAYERS)) for strategy, run in cases], 2)


def test_sequences_split_under_recomputation():
    check_all([("cp-recomputed", "trainer", Run("32", layers=LAYERS))], 2)


def test_weighted_losses_under_split_layers():
    check_all([("sp", "accelerator", Run("32", 2, ragged=True, layers=LAYERS))], 2)


@pytest.mark.parametrize("precision", ["bf16", "fp16", pytest.param("bf16-true", marks=pytest.mark.slow)])
def test_other_precisions_on_two_processes(precision):
    check_all([(strategy, "trainer", Run(precision, layers=1)) for strategy in ("sp", "cp-exact")], 2)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["32", "bf16"])
@pytest.mark.parametrize("driver", ["trainer", "accelerator"])
def test_every_accumulation_on_two_processes(driver, precision):
    strategies = ["tp", "sp", "loss", "replicate", *(["cp-exact"] if driver == "trainer" else [])]
    check_all([(strategy, driver, Run(precision, accumulate)) for strategy in strategies for accumulate in (1, 3)], 2)


def test_one_process():
    check_all([("alone", driver, Run("32", layers=LAYERS)) for driver in ("trainer", "accelerator")], 1)


def test_two_kinds_at_once_on_four_processes():
    check_all(
        [(strategy, "trainer", Run("32", layers=LAYERS)) for strategy in ("tp x fsdp", "cp x fsdp", "tp x cp")], 4
    )


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["32", "bf16"])
def test_every_pair_of_kinds_on_four_processes(precision):
    pairs = [name for name in STRATEGIES if " x " in name]
    check_all([(pair, "trainer", Run(precision, accumulate)) for pair in pairs for accumulate in (1, 3)], 4, 300)


@pytest.mark.slow
def test_parameters_gathered_in_bf16_on_two_meshes():
    run = Run("bf16", 3)
    expected = language_model.train_plain(run)
    cases: list[Case] = [("gathered in bf16", "trainer", run)]
    for rank, (outcome,) in enumerate(run_in_processes(train_each, 4, args=(cases,), timeout=120)):
        language_model.check(outcome, expected, TOLERANCES["bf16"], rank)
