"""XLA rounds floats to bfloat16 where it is asked to, before its runtime starts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from drivetrain import XLA, Accelerator, ConfigurationError
from drivetrain.strategies.xla.strategy import DOWNCAST_VARIABLE, Rounding
from tests.pool import run_in_processes
from tests.strategies.xla.running import environment

BETWEEN = 1 + 2**-12  # no bfloat16


def rounded(options: dict[str, Any]) -> list[float]:
    """What 32 and 64 bits of a number become, and whether a layer computes in bfloat16."""
    accelerator = Accelerator(device="xla", strategy=XLA(**options), mixed_precision="bf16")
    model = accelerator.prepare(torch.nn.Linear(1, 1, bias=False))
    with torch.no_grad():
        model.weight.fill_(BETWEEN)
        product = model(torch.ones(1, 1, device=accelerator.device)).item()
    values = [torch.tensor([BETWEEN], dtype=dtype, device=accelerator.device) for dtype in (torch.float, torch.double)]
    return [*[value.add(0).cpu().item() for value in values], product]


@pytest.mark.xla
@pytest.mark.parametrize(
    ("options", "variables", "expected"),
    [
        ({}, {}, [BETWEEN, BETWEEN, 1.0]),
        ({"downcast_bf16": True}, {}, [1.0, BETWEEN, 1.0]),
        ({}, {DOWNCAST_VARIABLE: "1"}, [1.0, BETWEEN, 1.0]),
        ({"downcast_bf16": False}, {DOWNCAST_VARIABLE: "1"}, [BETWEEN, BETWEEN, 1.0]),
        ({"use_bf16": True}, {}, [1.0, 1.0, 1.0]),
    ],
)
def test_floats_are_rounded_as_asked(options: dict[str, Any], variables: dict[str, str], expected: list[float]) -> None:
    env = {**environment(), **variables}
    assert run_in_processes(rounded, 1, args=(options,), env=env, timeout=200) == [expected]


def test_two_ways_at_once_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="Use only one"):
        Rounding.choose(True, True)


def test_rounding_is_refused_beside_another_precision() -> None:
    with pytest.raises(ConfigurationError, match=r"downcast_bf16=True computes in bfloat16.*is '32'"):
        Rounding.choose(True, False).check("32")
