"""What the tests of strategies share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(params=[0, 1], ids=["rank 0", "rank 1"])
def here(request: pytest.FixtureRequest) -> Callable[[Callable[..., Any]], Any]:
    """What one rank saw in a run of the module's `runs`; the test runs once for each rank."""
    return lambda run: request.module.runs.of(run)[request.param]
