"""XLA devices, one and four as one, give what one plain process gives, and exchange checkpoints with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain import XLA, XLAFSDP, Colwise, Rowwise, Strategy
from tests.conformance import language_model, test_two_drivers
from tests.conformance.harness import Outcome
from tests.conformance.language_model import LOCAL_ROWS, Run
from tests.pool import run_in_processes
from tests.strategies.xla.running import environment

pytestmark = [pytest.mark.xla, pytest.mark.timeout(1800)]

FP32, BF16, BF16_TRUE = 5e-6, 3e-3, 3e-2
# XLA computes erf and exp by approximations of its own, which differ from torch's beyond the tenth digit.
FP64 = 1e-9

PLAN = {f"layers.*.attention.{name}": Colwise() for name in ("wq", "wk", "wv")} | {
    "layers.*.attention.wo": Rowwise(),
    "layers.*.ffn.w1": Colwise(),
    "layers.*.ffn.w2": Rowwise(),
}

STRATEGIES: dict[str, tuple[int, Callable[[], Strategy]]] = {
    "one device": (1, XLA),
    "data parallel": (4, XLA),
    "sharded": (4, XLAFSDP),
    "tensor parallel": (4, lambda: XLA(tp=2, tp_plan=PLAN)),
    "tensor parallel and sharded": (4, lambda: XLAFSDP(tp=2, tp_plan=PLAN)),
}

CASES = [
    # strategy, driver, what is trained, tolerance
    ("one device", "trainer", Run(accumulate=3, layers=2, device="xla"), FP32),
    ("one device", "accelerator", Run(layers=2, device="xla"), FP32),
    ("one device", "trainer", Run(accumulate=2, layers=2, ragged=True, device="xla"), FP32),
    ("one device", "trainer", Run("bf16", layers=2, device="xla"), BF16),
    ("one device", "trainer", Run("64", layers=2, device="xla"), FP64),
    ("one device", "trainer", Run("bf16-true", layers=2, device="xla"), BF16_TRUE),
    ("data parallel", "trainer", Run(layers=2, device="xla"), FP32),
    ("sharded", "trainer", Run(accumulate=3, layers=2, device="xla"), FP32),
    ("sharded", "accelerator", Run(layers=2, device="xla"), FP32),
    ("sharded", "accelerator", Run("bf16", layers=2, device="xla"), BF16),
    ("tensor parallel", "trainer", Run(layers=2, device="xla"), FP32),
    ("tensor parallel and sharded", "trainer", Run(layers=2, device="xla"), FP32),
]
NAMES = [
    f"{name}, {driver}, {run.precision}, {run.accumulate}{', ragged' * run.ragged}" for name, driver, run, _ in CASES
]


def run_all(devices: int) -> dict[str, Outcome]:
    """Every case for so many devices, in one process: a runtime starts once."""
    outcomes = {}
    for name, (strategy, driver, run, _) in zip(NAMES, CASES, strict=True):
        if STRATEGIES[strategy][0] == devices:
            outcomes[name] = language_model.DRIVERS[driver](STRATEGIES[strategy][1](), run)
    return outcomes


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    found: dict[str, Outcome] = {}
    for devices in (1, 4):
        found |= run_in_processes(run_all, 1, args=(devices,), env=environment(devices), timeout=900)[0]
    return found


@pytest.mark.parametrize("name", NAMES)
def test_same_as_one_plain_process(name: str, outcomes: dict[str, Outcome]) -> None:
    _, _, run, tolerance = CASES[NAMES.index(name)]
    language_model.check(outcomes[name], language_model.train_plain(run), tolerance)


RUN = Run(layers=2, samples=2 * LOCAL_ROWS * 6, device="xla")
ON_CPU = Run(layers=2, samples=2 * LOCAL_ROWS * 6)


def fit(strategy: str, run: Run, steps: int, resume: str | None = None, save: str | None = None) -> Any:
    """Train up to so many steps of the Trainer."""
    register()
    return test_two_drivers.fit(strategy, run, steps, resume, save)


def raw_loop(strategy: str, run: Run, load: str, save: str) -> None:
    """Two steps of a raw loop."""
    register()
    test_two_drivers.raw_loop(strategy, run, load, save)


def register() -> None:
    """Let the runs of two drivers know these strategies too."""
    test_two_drivers.STRATEGIES.update(STRATEGIES)


def same(parts: dict[str, torch.Tensor], whole: dict[str, torch.Tensor]) -> None:
    assert parts.keys() == whole.keys()
    for name, value in whole.items():
        torch.testing.assert_close(parts[name], value, atol=FP32, rtol=FP32, msg=lambda m, n=name: f"{n}: {m}")


@pytest.fixture(scope="module")
def whole() -> dict[str, torch.Tensor]:
    """Six steps on the CPU."""
    return run_in_processes(fit, 1, args=("single", ON_CPU, 6), timeout=120)[0]


@pytest.mark.parametrize("strategy", ["one device", "sharded"])
def test_a_run_of_one_process_continues_on_xla_and_comes_back(strategy: str, whole: Any, tmp_path: Path) -> None:
    env = environment(STRATEGIES[strategy][0])
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    run_in_processes(fit, 1, args=("single", ON_CPU, 2), kwargs={"save": first}, timeout=120)
    run_in_processes(fit, 1, args=(strategy, RUN, 4, first, second), env=env, timeout=600)
    same(run_in_processes(fit, 1, args=("single", ON_CPU, 6, second), timeout=120)[0], whole)


def through_a_raw_loop(strategy: str, root: str) -> dict[str, torch.Tensor]:
    fit(strategy, RUN, 2, save=f"{root}/fit")
    raw_loop(strategy, RUN, f"{root}/fit", f"{root}/raw")
    return fit(strategy, RUN, 2 + 2, resume=f"{root}/raw")


@pytest.mark.parametrize("strategy", ["one device", "sharded"])
def test_fit_a_raw_loop_and_fit_are_one_run(strategy: str, whole: Any, tmp_path: Path) -> None:
    env = environment(STRATEGIES[strategy][0])
    same(run_in_processes(through_a_raw_loop, 1, args=(strategy, str(tmp_path)), env=env, timeout=900)[0], whole)
