"""Decorators that skip tests, base classes of tests, and checks across processes."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import tempfile
import unittest
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import torch

from drivetrain.compat.accelerate.state import AcceleratorState
from drivetrain.compat.accelerate.utils import imports
from drivetrain.compat.accelerate.utils.environment import str_to_bool
from drivetrain.compat.accelerate.utils.versions import is_torch_version
from drivetrain.runtime.collectives import gather
from drivetrain.runtime.devices import detect_device_kind
from drivetrain.runtime.state import forget_process

is_hpu_available, is_xpu_available = imports.is_hpu_available, imports.is_xpu_available  # tests import them from here

_kind = detect_device_kind()
torch_device = _kind.name
device_count = max(1, _kind.count()) if _kind.name != "cpu" else 1


def memory_allocated_func() -> int:
    """Return the bytes of tensor memory in use on the device, 0 on the CPU."""
    return torch.accelerator.memory_allocated() if _kind.name != "cpu" else 0


def get_backend() -> tuple[str, int, Callable[[], int]]:
    """Return the device type, the device count, and a function that returns the bytes in use."""
    return torch_device, device_count, memory_allocated_func


def get_launch_command(**kwargs: Any) -> list[str]:
    """Return the command list that launches a script, with keyword arguments as flags."""
    command = ["drivetrain", "launch", "--as", "accelerate"]
    for name, value in kwargs.items():
        if value is True:
            command.append(f"--{name}")
        elif value is not None and value is not False:
            command.append(f"--{name}={value}")
    return command


DEFAULT_LAUNCH_COMMAND = get_launch_command(num_processes=device_count, monitor_interval=0.1)

# decorator -> True if its tests run
_CONDITIONS: dict[str, Callable[[], bool]] = {
    "require_cpu": lambda: torch_device == "cpu",
    "require_non_cpu": lambda: torch_device != "cpu",
    "require_cuda": lambda: torch_device == "cuda",
    "require_cuda_or_hpu": lambda: torch_device in ("cuda", "hpu"),
    "require_cuda_or_xpu": lambda: torch_device in ("cuda", "xpu"),
    "require_non_xpu": lambda: torch_device != "xpu",
    "require_non_hpu": lambda: torch_device != "hpu",
    "require_non_torch_xla": lambda: not imports.is_torch_xla_available(),
    "require_fp16": imports.is_fp16_available,
    "require_fp8": lambda: imports.is_fp8_available() and torch_device == "cuda",
    "require_fsdp2": lambda: True,
    "require_tp": lambda: True,
    "require_pippy": lambda: True,
    "require_tpu": lambda: imports.is_torch_xla_available(check_is_tpu=True),
    "require_bnb": imports.is_bnb_available,
    "require_huggingface_suite": lambda: all(map(imports.package_available, ("transformers", "datasets"))),
    "require_single_device": lambda: device_count == 1 and torch_device != "cpu",
    "require_single_gpu": lambda: device_count == 1 and torch_device == "cuda",
    "require_single_xpu": lambda: device_count == 1 and torch_device == "xpu",
    "require_multi_device": lambda: device_count > 1,
    "require_multi_gpu": lambda: device_count > 1 and torch_device == "cuda",
    "require_multi_xpu": lambda: device_count > 1 and torch_device == "xpu",
    "require_multi_gpu_or_xpu": lambda: device_count > 1 and torch_device in ("cuda", "xpu"),
    "require_trackers": lambda: (
        any(map(imports.package_available, ("wandb", "tensorboard", "trackio", "swanlab")))
        and not imports.package_available("comet_ml")
    ),
    "slow": lambda: _flag("RUN_SLOW"),
    "skip": lambda: False,
}


def __getattr__(name: str) -> Any:
    """Create the decorator `require_X` of a device or package on first use."""
    if name in _CONDITIONS:
        return _decorator(name, _CONDITIONS[name])
    available = f"is_{name.removeprefix('require_')}_available"
    if name.startswith("require_") and available in dir(imports):
        return _decorator(name, getattr(imports, available))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.cache
def _decorator(name: str, condition: Callable[[], bool]) -> Callable[[Any], Any]:
    def decorate(test_case: Any) -> Any:
        return unittest.skipUnless(condition(), f"{name} does not hold here")(test_case)

    return decorate


def _flag(name: str) -> bool:
    return bool(str_to_bool(os.environ.get(name, "no")))


def require_torch_min_version(test_case: Any = None, version: str | None = None) -> Any:
    """Skip a test if torch is older than `version`."""
    if test_case is None:
        return functools.partial(require_torch_min_version, version=version)
    return unittest.skipUnless(is_torch_version(">=", version or "0"), f"needs torch {version}")(test_case)


def run_first(test_case: Any) -> Any:
    """Return the test unchanged: drivetrain does not reorder tests."""
    return test_case


class AccelerateTestCase(unittest.TestCase):
    """Test case that resets the Accelerator's state after each test."""

    def tearDown(self) -> None:
        """Reset the state that the test's Accelerator left."""
        super().tearDown()
        forget_process()


class TempDirTestCase(unittest.TestCase):
    """Test case whose tests share a temporary directory that is emptied before each test.

    Attributes:
        tmpdir: The directory.
        clear_on_setup: True to empty the directory before each test.
    """

    clear_on_setup = True
    tmpdir: ClassVar[Path]

    @classmethod
    def setUpClass(cls) -> None:
        """Create the temporary directory."""
        super().setUpClass()
        cls.tmpdir = Path(tempfile.mkdtemp())
        cls.addClassCleanup(shutil.rmtree, cls.tmpdir, ignore_errors=True)

    def setUp(self) -> None:
        """Empty the temporary directory."""
        super().setUp()
        for path in self.tmpdir.iterdir() if self.clear_on_setup else ():
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


class MockingTestCase(unittest.TestCase):
    """Test case that starts mocks in `setUp`."""

    def add_mocks(self, mocks: Any) -> None:
        """Start one or several mocks, which stop when the test ends."""
        self.mocks: Sequence[mock._patch[Any]] = mocks if isinstance(mocks, list | tuple) else [mocks]
        for each in self.mocks:
            each.start()
            self.addCleanup(each.stop)


class SubprocessCallException(Exception):
    """Raised by `run_command` if the command fails."""


def are_the_same_tensors(tensor: torch.Tensor) -> bool:
    """Return True if a tensor has equal values on all processes."""
    own = tensor[None].clone().to(AcceleratorState().device)
    return all(torch.equal(each, own[0]) for each in gather(own))


@contextmanager
def assert_exception(exception_class: type[Exception], msg: str | None = None) -> Iterator[None]:
    """Fail unless the `with` body raises `exception_class` with `msg` in its message."""
    raised: Exception | None = None
    try:
        yield
    except Exception as error:
        raised = error
    assert isinstance(raised, exception_class), f"Expected {exception_class.__name__}, got {raised!r}"
    assert msg is None or msg in str(raised), f"{msg!r} is not in {str(raised)!r}"


def capture_call_output(func: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Call a function and return what it printed."""
    with redirect_stdout(StringIO()) as output:
        func(*args, **kwargs)
    return output.getvalue()


def path_in_accelerate_package(*components: str) -> Path:
    """Return a path inside the package that scripts import as `accelerate`."""
    return Path(__file__).parents[1].joinpath(*components)


def pytest_xdist_worker_id() -> int:
    """Return the number of this pytest-xdist worker, 0 without xdist."""
    return int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))


def get_torch_dist_unique_port() -> int:
    """Return a port that no other pytest-xdist worker uses."""
    return 29500 + pytest_xdist_worker_id()


def execute_subprocess_async(cmd: Sequence[str], env: Any = None, timeout: float = 180, **_: Any) -> Any:
    """Run a command. Raise `RuntimeError` with the command's output if it fails."""
    result = subprocess.run(list(map(str, cmd)), env=env, timeout=timeout, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"{' '.join(map(str, cmd))} failed with {result.returncode}:\n{result.stderr}")
    return result


def run_command(command: Sequence[Any], return_stdout: bool = False, env: Any = None) -> str | None:
    """Run a command. Return its output if `return_stdout`. Raise `SubprocessCallException` if it fails."""
    words = list(map(str, command))
    result = subprocess.run(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if result.returncode:
        raise SubprocessCallException(f"{' '.join(words)} failed with {result.returncode}:\n{result.stdout}")
    return result.stdout if return_stdout else None
