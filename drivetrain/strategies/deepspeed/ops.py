"""DeepSpeed's compiled operators: building them, and detecting operators that are built or left half built.

DeepSpeed compiles an operator at its first use, which takes minutes. It waits forever for the lock of a build that
was killed. Unneeded operators are therefore not requested, and a lock that no process holds is an error.

    python -m drivetrain.strategies.deepspeed.build_ops            # build the operators useful on this machine
    python -m drivetrain.strategies.deepspeed.build_ops --status   # only print the built operators
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from drivetrain.runtime.environment import ProcessEnvironment
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.logging import get_logger
from drivetrain.strategies.deepspeed.config import import_deepspeed
from drivetrain.strategies.deepspeed.layouts import Layout

_log = get_logger(__name__)

SHARED_MEMORY = "deepspeed_shm_comm"
BUILDERS = {
    SHARED_MEMORY: "ShareMemCommBuilder",
    "fused_adam": "FusedAdamBuilder",
    "cpu_adam": "CPUAdamBuilder",
    "async_io": "AsyncIOBuilder",
}
# Age in seconds from which a lock counts as stale if it cannot be determined whether a process holds it.
_LONGEST_BUILD = 3600.0


def build_root() -> Path:
    """Return the folder in which torch compiles C++ extensions."""
    extension = importlib.import_module("torch.utils.cpp_extension")
    given = os.environ.get("TORCH_EXTENSIONS_DIR")
    if given:
        return Path(given)
    # The same name as in `torch.utils.cpp_extension`, which has no public function for it.
    torch = importlib.import_module("torch")
    found = torch.version.cuda or torch.version.hip
    kind = "cpu" if found is None else ("cu" if torch.version.cuda else "rocm") + found.replace(".", "")
    abi = getattr(sys, "abiflags", "")
    folder = f"py{sys.version_info.major}{sys.version_info.minor}{abi}_{kind}"
    return Path(extension.get_default_build_root()) / folder


def is_built(name: str) -> bool:
    folder = build_root() / name
    return (folder / f"{name}.so").is_file() and not (folder / "lock").exists()


def check_locks(names: Sequence[str]) -> None:
    for name in names:
        lock = build_root() / name / "lock"
        if is_stale(lock):
            raise ConfigurationError(
                f"{lock} was left by an interrupted build of DeepSpeed's {name}, and DeepSpeed would wait for it "
                f"forever. Delete it (rm {lock}) and build the operator again: python -m "
                f"drivetrain.strategies.deepspeed.build_ops {name}",
            )


def is_stale(lock: Path) -> bool:
    try:
        age = time.time() - lock.stat().st_mtime
    except FileNotFoundError:
        return False
    held = _is_open(lock)
    if held is None:
        return age > _LONGEST_BUILD
    return not held and lock.exists()


def _is_open(path: Path) -> bool | None:
    # Whether a process on this machine has the file open, or None if unknown.
    processes = Path("/proc")
    if not (processes / "self" / "fd").is_dir():
        return None
    wanted = os.path.realpath(path)
    unseen = False
    for process in processes.iterdir():
        if not process.name.isdigit():
            continue
        try:
            if any(os.path.realpath(handle) == wanted for handle in (process / "fd").iterdir()):
                return True
        except PermissionError:
            unseen = unseen or process.name != "1"  # process 1 builds nothing
        except OSError:
            continue  # the process has ended
    return None if unseen else False


@contextmanager
def use_shared_memory(kind: str, wanted: bool | None) -> Iterator[None]:
    # Sets whether DeepSpeed's collectives on the CPU use shared memory, for which it compiles an operator if necessary.
    # With `wanted=None`, the operator is used only if it is already compiled.
    use = kind == "cpu" and (is_built(SHARED_MEMORY) if wanted is None else wanted)
    if use:
        check_locks([SHARED_MEMORY])
    package = importlib.import_module("deepspeed.ops")
    before = package.__dict__.get("__compatible_ops__")
    # Set directly, because reading the attribute would probe the compilers for all operators.
    package.__dict__["__compatible_ops__"] = {SHARED_MEMORY: use}
    try:
        yield
    finally:
        if before is None:
            del package.__dict__["__compatible_ops__"]
        else:
            package.__dict__["__compatible_ops__"] = before


def prefer_built_optimizer(section: dict[str, Any], kind: str, zero: dict[str, Any]) -> None:
    if str(section.get("type", "")).lower() not in ("adam", "adamw") or section["params"].get("torch_adam"):
        return
    name = "cpu_adam" if isinstance(zero.get("offload_optimizer"), dict) else "fused_adam"
    if kind == "cpu" and not is_built(name):
        section["params"]["torch_adam"] = True
        _log.warning_once(
            f"DeepSpeed's {name} is not compiled, so torch's {section['type']} is used, with the same results. To use "
            f"DeepSpeed's, run `python -m drivetrain.strategies.deepspeed.build_ops {name}` once, which takes minutes."
        )
    else:
        check_locks([name])


def require_async_io() -> None:
    """Raise an error if DeepSpeed's operator for NVMe cannot be compiled here."""
    from deepspeed.accelerator import get_accelerator

    builder = get_accelerator().create_op_builder(BUILDERS["async_io"])
    cause: Exception | None = None
    try:
        possible = builder is not None and builder.is_compatible(verbose=False)
    except Exception as error:  # the search for compilers and libraries may raise anything
        possible, cause = False, error
    if not possible:
        raise ConfigurationError(
            "Offloading to NVMe needs DeepSpeed's async_io operator, which cannot be compiled on this machine. "
            "Install libaio (apt install libaio-dev) and a compiler, or offload to the CPU: offload_optimizer='cpu', "
            "offload_param='cpu'.",
        ) from cause
    check_locks(["async_io"])


def build(name: str, kind: str) -> None:
    from deepspeed.accelerator import get_accelerator

    check_locks([name])
    builder = get_accelerator().create_op_builder(BUILDERS[name])
    if builder is None:
        raise ConfigurationError(f"DeepSpeed has no operator {name!r} for devices of the kind {kind!r}.")
    builder.load(verbose=False)


# Adagrad, which creates its state in the constructor rather than in its first step


class _Adagrad(Optimizer):
    """Class that hides an Adagrad optimizer from DeepSpeed, which would replace it."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise NotImplementedError


@contextmanager
def keep_adagrad(optimizer: Optimizer) -> Iterator[None]:
    # DeepSpeed 0.19 would replace an Adagrad optimizer by one that has default options and a single parameter group.
    # Learning rate schedules would then have no effect, and a second group would break the engine.
    own: Any = type(optimizer)
    if not issubclass(own, torch.optim.Adagrad):
        yield
        return
    # DeepSpeed recognizes Adagrad by its class.
    optimizer.__class__ = _Adagrad
    try:
        yield
    finally:
        optimizer.__class__ = own


def make_state(layout: Layout) -> None:
    # Adagrad creates no state when it steps.
    optimizer = layout.inner
    if not isinstance(optimizer, torch.optim.Adagrad):
        return
    holders = [holder for holder, _ in layout.holders()]
    missing = [holder for holder in holders if "sum" not in optimizer.state.get(holder, {})]
    if missing:
        made = torch.optim.Adagrad(missing, **optimizer.defaults).state
        # The old state belongs to the parameters, which the engine has replaced by its own tensors.
        optimizer.state.clear()
        optimizer.state.update(made)


# How DeepSpeed joins the process group that this process is in


class DeepSpeedGroup:
    """The process group of a run, set up for both `torch.distributed` and DeepSpeed.

    Without a process group, a group of this one process is created.

    Attributes:
        package: The deepspeed package.
    """

    # Counted per process, not per run, because DeepSpeed keeps its group in module variables.
    _joined: ClassVar[int] = 0
    _made_group: ClassVar[bool] = False

    def __init__(self, environment: ProcessEnvironment, kind: str, shared_memory: bool | None) -> None:
        self.package = import_deepspeed(kind)
        # DeepSpeed demands this variable even if the process group exists, and would search for MPI without it.
        os.environ.setdefault("LOCAL_RANK", str(environment.local_rank))
        if not dist.is_initialized():
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group("gloo", store=store, rank=0, world_size=1)
            DeepSpeedGroup._made_group = True
        if importlib.import_module("deepspeed.comm.comm").cdb is None:
            with use_shared_memory(kind, shared_memory):
                self.package.init_distributed(auto_mpi_discovery=False, verbose=False)
        DeepSpeedGroup._joined += 1

    @staticmethod
    def forget_secondary_group() -> None:
        # The secondary process group of an earlier DeepSpeed model would make the setup of a new one fail.
        importlib.import_module("deepspeed.utils.groups")._ZERO_PARAM_INTRA_PARALLEL_GROUP = None  # type: ignore[attr-defined]

    def leave(self) -> None:
        # The group is kept while another strategy uses it.
        DeepSpeedGroup._joined -= 1
        if DeepSpeedGroup._joined:
            return
        groups: Any = importlib.import_module("deepspeed.utils.groups")
        release = getattr(groups, "_release_process_group_references", None)
        if release is not None:
            release()
        else:
            groups._WORLD_GROUP = None
        comm: Any = importlib.import_module("deepspeed.comm.comm")
        comm.cdb = None
        # Otherwise all later engines of this process would reduce gradients as with torch_autocast.
        autocast: Any = importlib.import_module("deepspeed.runtime.torch_autocast")
        autocast.TORCH_AUTOCAST_INITIALIZED = False
        if DeepSpeedGroup._made_group and dist.is_initialized():
            dist.destroy_process_group()
        DeepSpeedGroup._made_group = False


def refuse_other_device(environment: ProcessEnvironment, device: torch.device) -> None:
    if device.index not in (None, environment.local_rank):
        raise ConfigurationError(
            f"DeepSpeed uses the device with the index of the process's local rank ({environment.local_rank}), not "
            f"{str(device)!r}. Select devices when you start the script: `drivetrain launch --gpu_ids "
            f"{device.index}`, or an environment variable such as CUDA_VISIBLE_DEVICES.",
        )
