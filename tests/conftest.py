"""What every test may use."""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests import pool


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, by name of what is missing, the tests for hardware that this machine has not."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked:
        import torch

        if not torch.cuda.is_available():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU, and this machine has none"))


def pytest_configure() -> None:
    """Let tests interrupt what they start: jobs in a shell's background are deaf to SIGINT, and all that they start."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Leave what has been imported and collected out of every garbage collection from here on."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    pool.stop()


@pytest.fixture
def processes() -> Callable[..., list[Any]]:
    """`run_in_processes` of tests/pool.py."""
    return pool.run_in_processes


@pytest.fixture(autouse=True)
def _fresh_partial_state() -> Iterator[None]:
    """A test that makes a PartialState in the test process leaves none to the next test."""
    yield
    module = sys.modules.get("drivetrain.runtime.state")
    if module is not None:
        module.PartialState._reset_state()
