"""Models under several DeepSpeed configurations in one run: two trained; one trained and one sharded for inference."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

from drivetrain import DDP, Accelerator, ConfigurationError, DeepSpeedPlugin
from tests.shared_runs import SharedRuns
from tests.strategies.deepspeed_models import EXACT, NEEDS_DEEPSPEED, ROWS, Net, adamw, data, net

pytestmark = NEEDS_DEEPSPEED

runs = SharedRuns(__name__, timeout=240)

STEPS, NORM = 4, 0.1


@pytest.fixture
def result_of() -> Callable[[Callable[..., Any]], Any]:
    return lambda run: runs.of(run)[0]


def plugins() -> dict[str, DeepSpeedPlugin]:
    return {"student": DeepSpeedPlugin(zero_stage=2), "teacher": DeepSpeedPlugin(zero_stage=3)}


def other() -> Net:
    torch.manual_seed(8)
    return Net()


def batches(accelerator: Accelerator) -> Any:
    return accelerator.prepare(DataLoader(data(STEPS), batch_size=ROWS * 2 // accelerator.num_processes))


def distilled(accelerator: Accelerator, select: Callable[[str], None]) -> dict[str, Any]:
    """Train a student towards a teacher, which is only evaluated."""
    select("student")
    student, optimizer = accelerator.prepare(*with_optimizer(net()))
    select("teacher")
    teacher = accelerator.prepare(other().requires_grad_(False).eval())
    losses = []
    for x, _ in batches(accelerator):
        with torch.no_grad():
            aim = teacher(x)
        optimizer.zero_grad()
        loss = F.mse_loss(student(x), aim)
        accelerator.backward(loss)
        optimizer.step()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    parts = [hasattr(parameter, "ds_id") for parameter in (*student.parameters(), *teacher.parameters())]
    return {"losses": losses, "partitioned": parts}


def with_optimizer(model: Net) -> tuple[Net, Any]:
    return model, adamw(model)


def both_trained(accelerator: Accelerator, select: Callable[[str], None], norms: dict[str, float]) -> list[list[float]]:
    """Train two models in turn, each clipped to a norm of its own."""
    trained = {}
    for name, make in (("a", net), ("b", other)):
        select(name)
        trained[name] = accelerator.prepare(*with_optimizer(make()))
    losses = []
    for x, y in batches(accelerator):
        of_step = []
        for name, (model, optimizer) in trained.items():
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            if name in norms:
                accelerator.clip_grad_norm_(model.parameters(), norms[name])
            optimizer.step()
            of_step.append(float(accelerator.reduce(loss.detach(), "mean")))
        losses.append(of_step)
    return losses


def ignore(name: str) -> None:
    """DDP has no configurations."""


@runs
def distillation(directory: Path) -> dict[str, Any]:
    accelerator = Accelerator(cpu=True, deepspeed_plugins=plugins())
    state = accelerator.state
    found = distilled(accelerator, state.select_deepspeed_plugin)
    selected = state.deepspeed_plugin is state.get_deepspeed_plugin("teacher")
    expected = distilled(Accelerator(cpu=True, strategy=DDP()), ignore)
    return {**found, "selected": selected, "expected": expected["losses"]}


@runs
def two_trained(directory: Path) -> dict[str, Any]:
    given = {"a": DeepSpeedPlugin(zero_stage=3), "b": DeepSpeedPlugin(zero_stage=1, gradient_clipping=NORM)}
    accelerator = Accelerator(cpu=True, deepspeed_plugins=given)
    # Clipping to the norm of a configuration needs no call.
    losses = both_trained(accelerator, accelerator.state.select_deepspeed_plugin, {"a": 2 * NORM})
    first, second = accelerator.prepared.models
    stages = [accelerator.strategy.engine_of(model).zero_optimization_stage() for model in (first, second)]
    return {
        "losses": losses,
        "expected": both_trained(Accelerator(cpu=True, strategy=DDP()), ignore, {"a": 2 * NORM, "b": NORM}),
        "stages": stages,
        "norm": refused(lambda: accelerator.clip_grad_norm_(second.parameters(), 1.0)),
        "name": refused(lambda: accelerator.state.select_deepspeed_plugin("c")),
    }


def refused(act: Callable[[], Any]) -> str:
    try:
        act()
    except ConfigurationError as error:
        return str(error)
    return "nothing was refused"


def test_a_teacher_is_sharded_for_inference_beside_a_student_that_is_trained(result_of: Any) -> None:
    found = result_of(distillation)
    count = len(list(net().parameters()))
    assert found["partitioned"] == [False] * count + [True] * count
    assert found["selected"]
    assert found["losses"] == pytest.approx(found["expected"], abs=EXACT)


def test_two_models_are_trained_each_by_its_own_configuration(result_of: Any) -> None:
    found = result_of(two_trained)
    assert found["stages"] == [3, 1]
    assert f"gradient_clipping={NORM}, but the loop clips to 1.0" in found["norm"]
    assert "no DeepSpeed plugin named 'c'. Existing plugins: a, b" in found["name"]
    for one, other_one in zip(found["losses"], found["expected"], strict=True):
        assert one == pytest.approx(other_one, abs=EXACT)
