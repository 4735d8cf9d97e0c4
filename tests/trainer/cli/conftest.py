"""Command lines are tested as where no other package has optimizers, which make short names ambiguous."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch.optim import Optimizer


class Elsewhere:
    """What optimizers of other packages derive from while a test runs."""


@pytest.fixture(autouse=True)
def _no_optimizers_of_other_packages() -> Iterator[None]:
    foreign = [kind for kind in Optimizer.__subclasses__() if kind.__module__.startswith("bitsandbytes.")]
    for kind in foreign:
        kind.__bases__ = (Elsewhere,)
    yield
    for kind in foreign:
        kind.__bases__ = (Optimizer,)
