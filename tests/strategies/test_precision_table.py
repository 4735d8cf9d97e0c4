"""The table in docs/strategies.md holds: what it says works agrees with plain torch, what it says is refused is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain import FSDP, Accelerator, ConfigurationError, DeepSpeed, Parallel
from tests.conformance import language_model
from tests.conformance.harness import Outcome
from tests.conformance.language_model import Run
from tests.conformance.test_parallel import layers_split
from tests.pool import run_in_processes

pytestmark = pytest.mark.sharded

PAGE = Path(__file__).parents[2] / "docs" / "strategies.md"
TOLERANCES = {"32": 5e-6, "64": 1e-10, "bf16": 3e-3, "fp16": 3e-3, "bf16-true": 3e-2, "fp16-true": 3e-2}

# What leaves casting to autocast, as in one process.
AUTOCAST = {"bf16": {"gather_dtype": torch.float32}, "fp16": {"gather_dtype": torch.float32}}
STRATEGIES: dict[str, Any] = {
    "single": lambda precision: "single",
    "ddp": lambda precision: "ddp",
    "fsdp": lambda precision: FSDP(**AUTOCAST.get(precision, {})),
    "tp": lambda precision: Parallel(tp=2, tp_plan=layers_split()),
    "cp": lambda precision: Parallel(cp=2, **AUTOCAST.get(precision, {})),
    "pp": lambda precision: Parallel(pp=2),
    "deepspeed": lambda precision: DeepSpeed(stage=2),
}


def table() -> dict[tuple[str, str], str]:
    """What the page says of each pair."""
    section = PAGE.read_text().split("## Which strategy goes with which precision")[1].split("\n## ")[0]
    lines = section.splitlines()
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    precisions = rows[0][1:]
    return {(row[0], name): cell for row in rows[2:] for name, cell in zip(precisions, row[1:], strict=True)}


def pairs(verdict: str, strategy: str) -> list[str]:
    return [name for (row, name), cell in table().items() if row == strategy and cell == verdict]


def plain_steps(parameters: Any) -> torch.optim.Optimizer:
    """Not AdamW, whose squares of gradients are nothing in float16: its steps then hang on the last bit."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@pytest.fixture(autouse=True)
def _plain_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language_model, "make_optimizer", plain_steps)


def train_each(strategy: str, precisions: list[str]) -> list[Outcome]:
    torch.set_num_threads(1)
    language_model.make_optimizer = plain_steps
    return [
        language_model.train_with_trainer(STRATEGIES[strategy](name), Run(name, 2, layers=2)) for name in precisions
    ]


def test_the_table_has_a_verdict_on_every_pair() -> None:
    found = table()
    assert {row for row, _ in found} == STRATEGIES.keys()
    assert {name for _, name in found} == TOLERANCES.keys()
    assert set(found.values()) <= {"yes", "refused", "GPU"}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_works_agrees_with_one_plain_process(strategy: str) -> None:
    precisions = pairs("yes", strategy)
    expected = [language_model.train_plain(Run(name, 2, layers=2)) for name in precisions]
    processes = 1 if strategy == "single" else 2
    for rank, outcomes in enumerate(run_in_processes(train_each, processes, args=(strategy, precisions), timeout=120)):
        for name, outcome, plain in zip(precisions, outcomes, expected, strict=True):
            try:
                language_model.check(outcome, plain, TOLERANCES[name], rank)
            except AssertionError as error:
                raise AssertionError(f"{strategy}, {name}: {error}") from error


def refusals(strategy: str, precisions: list[str]) -> list[str]:
    found = []
    for name in precisions:
        with pytest.raises(ConfigurationError) as raised:
            Accelerator(cpu=True, strategy=STRATEGIES[strategy](name), mixed_precision=name)
        found.append(str(raised.value))
    return found


@pytest.mark.parametrize("strategy", sorted({row for (row, _), cell in table().items() if cell != "yes"}))
def test_what_does_not_work_here_is_refused_by_name(strategy: str) -> None:
    precisions = pairs("refused", strategy) + pairs("GPU", strategy)
    for messages in run_in_processes(refusals, 2, args=(strategy, precisions), timeout=60):
        for name, message in zip(precisions, messages, strict=True):
            assert name in message
            assert strategy in message.lower()
