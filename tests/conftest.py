"""What every test may use."""

from __future__ import annotations

import functools
import gc
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from glob import glob
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests import pool

# Files of few tests that take long: they go first, so that no worker is left with one while the others have ended.
LONG = ("tests/launch/", "tests/strategies/test_teardown.py", "tests/benchmarks/", "tests/trainer/test_resume.py")
LONG += ("tests/examples/", "tests/conformance/test_fp8.py", "tests/trackers/")


# Why there is no device of the kind that `--device` names.
NO_DEVICE = pytest.StashKey[str]()

# The lanes that import only the files which have tests of theirs.
LANES = ("crash", "sharded", "xla")


@functools.cache
def has_tests_of(lane: str, path: Path) -> bool:
    """Whether a file of tests spells the lane's mark, or computes marks."""
    return bool(re.search(rf"mark\.{lane}\b|getattr\(pytest\.mark|pytestmark = [A-Z]", path.read_text()))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no file without tests of the lane that was asked for, as by `-m "crash and not slow"`."""
    lane = config.option.markexpr.split(" and not ")[0]
    if lane in LANES and collection_path.match("test_*.py"):
        return not has_tests_of(lane, collection_path) or None
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put long files first, and skip, by name of what is missing, tests for what this machine has not."""
    items.sort(key=lambda item: not item.nodeid.startswith(LONG))
    for item in items:
        for lane in LANES:
            if item.get_closest_marker(lane) and not has_tests_of(lane, item.path):
                raise pytest.UsageError(f"{item.nodeid} is of the lane {lane}, which its file does not show")
    for item in items if config.getoption("--device") != "cpu" else ():
        if only := item.get_closest_marker("cpu"):
            item.add_marker(pytest.mark.skip(reason=f"runs on the CPU alone: {only.args[0]}"))
    if NO_DEVICE in config.stash:
        for item in items:
            item.add_marker(pytest.mark.skip(reason=config.stash[NO_DEVICE]))
    for mark, missing in (("gpu", _missing_gpu), ("xla", _missing_xla), ("tpu", _missing_tpu)):
        marked = [item for item in items if item.get_closest_marker(mark)]
        reason = missing() if marked else None
        for item in marked if reason else ():
            item.add_marker(pytest.mark.skip(reason=reason))


def _missing_gpu() -> str | None:
    import torch

    return None if torch.cuda.is_available() else "needs a CUDA GPU, and this machine has none"


def _missing_xla() -> str | None:
    return None if find_spec("torch_xla") else "needs torch_xla, which `make test-xla` installs"


def _missing_tpu() -> str | None:
    return None if glob("/dev/accel*") or glob("/dev/vfio/[0-9]*") else "needs a TPU, and this machine has none"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=("cpu", "sim"), default="cpu", help="kind of device that tests train on")


def pytest_configure(config: pytest.Config) -> None:
    """Let tests interrupt what they start: jobs in a shell's background are deaf to SIGINT, and all that they start."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("--device") == "sim":
        from tests.simulated import building, devices

        try:
            os.environ[devices.LIBRARY] = str(building.library())
        except building.CannotBuild as error:
            config.stash[NO_DEVICE] = str(error)
            return
        os.environ[pool.DEVICE] = "sim"
        devices.start(4)  # as many as the largest world of a test, whose tensors come back here


def pytest_collection_finish() -> None:
    """Leave what has been imported and collected out of every garbage collection from here on.

    A worker has a core for itself: the threads of torch's operators would wait for those of the other worker.
    """
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    pool.stop()


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Let a test that reads stdout see what a program prints that has not configured logging."""
    root, names = logging.getLogger(), getattr(item, "fixturenames", ())
    before = list(root.handlers)
    if {"capsys", "capfd"} & set(names) and "caplog" not in names:
        root.handlers = []
    try:
        return (yield)
    finally:
        root.handlers = before


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
