"""Read environment variables and hardware properties."""

from __future__ import annotations

import functools
import logging
import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from drivetrain.runtime.devices import detect_device_kind
from drivetrain.runtime.environment import ProcessEnvironment
from drivetrain.runtime.errors import ConfigurationError

Definition = TypeVar("Definition")

logger = logging.getLogger("accelerate.utils.environment")

_TRUE = ("y", "yes", "t", "true", "on", "1")
_FALSE = ("n", "no", "f", "false", "off", "0")


def str_to_bool(value: str, to_bool: bool = False) -> int | bool:
    """Convert a word such as `"yes"` or `"0"` to 1 or 0, or to a bool. Raise an error for other words."""
    word = value.lower()
    if word not in (*_TRUE, *_FALSE):
        raise ConfigurationError(f"{value!r} is neither of {', '.join(_TRUE)} nor of {', '.join(_FALSE)}.")
    return word in _TRUE if to_bool else int(word in _TRUE)


def get_int_from_env(env_keys: Sequence[str], default: int) -> int:
    """Return the first non-negative integer among these environment variables, or `default`."""
    for key in env_keys:
        value = int(os.environ.get(key, "-1"))
        if value >= 0:
            return value
    return default


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """Return an environment variable as a bool."""
    return bool(str_to_bool(os.environ.get(key, str(default))))


def parse_choice_from_env(key: str, default: str = "no") -> str:
    """Return an environment variable as a string."""
    return os.environ.get(key, str(default))


def are_libraries_initialized(*library_names: str) -> list[str]:
    """Return those of the given libraries that are imported in this process."""
    return [name for name in library_names if name in sys.modules]


def get_current_device_type() -> tuple[str, str]:
    """Return the distributed type, such as `"MULTI_GPU"`, and the device type, such as `"cuda"`."""
    kind = detect_device_kind().name
    word = {"cpu": "MULTI_CPU", "cuda": "MULTI_GPU"}.get(kind, f"MULTI_{kind.upper()}")
    return word, kind


def get_gpu_info() -> tuple[list[str], int]:
    """Return the names of the accelerator devices and their count."""
    kind = detect_device_kind()
    if kind.name == "cpu":
        return [], 0
    module, count = torch.get_device_module(kind.name), kind.count()
    return [str(module.get_device_name(index)) for index in range(count)], count


def check_cuda_p2p_ib_support() -> bool:
    """Return True always: NCCL detects peer-to-peer support itself."""
    return True


def check_cuda_fp8_capability() -> bool:
    """Return True if the GPU supports fp8 (compute capability 8.9 or higher)."""
    if detect_device_kind().name != "cuda":
        return False
    return bool(torch.get_device_module("cuda").get_device_capability() >= (8, 9))


@dataclass
class CPUInformation:
    """Rank and world size of this process in a CPU run.

    Attributes:
        rank: Global rank. world_size: Number of processes. local_rank: Rank on this machine. local_world_size: Number
            of processes on this machine.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


def get_cpu_distributed_information() -> CPUInformation:
    """Return this process's ranks and world sizes from the launcher's environment variables."""
    found = ProcessEnvironment.detect()
    return CPUInformation(found.rank, found.world_size, found.local_rank, found.local_world_size)


def override_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Do nothing: `drivetrain launch --enable_cpu_affinity` binds processes to cores."""


def set_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Do nothing: `drivetrain launch --enable_cpu_affinity` binds processes to cores."""


@contextmanager
def clear_environment() -> Iterator[None]:
    """Clear all environment variables in the `with` body, and restore them afterwards."""
    before = os.environ.copy()
    os.environ.clear()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def patch_environment(**kwargs: Any) -> Iterator[None]:
    """Set environment variables (names in upper case) in the `with` body, and restore them afterwards."""
    names = {name.upper(): str(value) for name, value in kwargs.items()}
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    try:
        yield
    finally:
        _put_back(before)


def _put_back(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def purge_accelerate_environment(func_or_cls: Definition) -> Definition:
    """Decorate a test or test class to restore all `ACCELERATE_*` variables afterwards.

    The tests of subclasses are decorated too.
    """
    if isinstance(func_or_cls, type):
        owner: Any = func_or_cls
        _purge_tests(owner)
        given = vars(owner).get("__init_subclass__")

        def purge_subclass(kind: type[Any], /, **kwargs: Any) -> None:
            if given is None:
                super(owner, kind).__init_subclass__(**kwargs)
            else:
                given.__get__(None, kind)(**kwargs)
            _purge_tests(kind)

        owner.__init_subclass__ = classmethod(purge_subclass)
        return func_or_cls

    @functools.wraps(func_or_cls)  # type: ignore[arg-type]
    def purged(*args: Any, **kwargs: Any) -> Any:
        before = {name: value for name, value in os.environ.items() if name.startswith("ACCELERATE_")}
        try:
            return func_or_cls(*args, **kwargs)  # type: ignore[operator]
        finally:
            new = [name for name in os.environ if name.startswith("ACCELERATE_") and name not in before]
            _put_back(before | dict.fromkeys(new))

    return purged  # type: ignore[return-value]


def _purge_tests(kind: type) -> None:
    for name, member in list(vars(kind).items()):
        if name.startswith("test") and callable(member):
            setattr(kind, name, purge_accelerate_environment(member))


def convert_dict_to_env_variables(current_env: Mapping[str, str]) -> list[str]:
    """Return the variables as lines `NAME=value`. Skips values that contain spaces, newlines or `;<>`."""
    broken = [name for name, value in current_env.items() if any(each in name + value for each in ";\n<> ")]
    if broken:
        logger.warning(f"Skipped the environment variables {broken}: a name or value has a space or one of ; < >.")
    return [f"{name}={value}\n" for name, value in current_env.items() if name not in broken]


def check_os_kernel() -> None:
    """Warn if the Linux kernel is older than 5.5, on which processes can hang."""
    if platform.system() != "Linux":
        return
    from packaging.version import parse

    release = platform.release().split("-")[0]
    if parse(release.rstrip("+")) < parse("5.5.0"):
        from drivetrain.runtime.logging import get_logger

        get_logger(__name__).warning(f"Linux {release} is older than 5.5.0, with which processes were seen to hang.")
