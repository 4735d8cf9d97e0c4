"""How DeepSpeed joins the process group that this process is in."""

from __future__ import annotations

import importlib
import os
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from drivetrain.runtime.environment import ProcessEnvironment
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.strategies.deepspeed import ops
from drivetrain.strategies.deepspeed.package import import_deepspeed


class Membership:
    """DeepSpeed's own idea of the process group, laid over the group that this process is in already.

    Args:
        environment: This process among its peers.
        kind: The kind of device.
        shared_memory: Whether CPU tensors go through DeepSpeed's shared-memory operator; if None, where it is built.
    """

    # Of the process, not of a run: DeepSpeed keeps its group in variables of its modules.
    _joined: ClassVar[int] = 0
    _made_group: ClassVar[bool] = False

    def __init__(self, environment: ProcessEnvironment, kind: str, shared_memory: bool | None) -> None:
        self.package = import_deepspeed(kind)
        # It asks for this even where it is given everything else, and would search for MPI.
        os.environ.setdefault("LOCAL_RANK", str(environment.local_rank))
        if not dist.is_initialized():
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group("gloo", store=store, rank=0, world_size=1)
            Membership._made_group = True
        if importlib.import_module("deepspeed.comm.comm").cdb is None:
            with ops.use_shared_memory(kind, shared_memory):
                self.package.init_distributed(auto_mpi_discovery=False, verbose=False)
        Membership._joined += 1

    @staticmethod
    def forget_secondary_group() -> None:
        """Let the next model make its own group for `zero_hpz_partition_size`: DeepSpeed asserts that there is none."""
        importlib.import_module("deepspeed.utils.groups")._ZERO_PARAM_INTRA_PARALLEL_GROUP = None  # type: ignore[attr-defined]

    def leave(self) -> None:
        """Forget the process group, which is about to be destroyed, unless engines of another run are still in it."""
        Membership._joined -= 1
        if Membership._joined:
            return
        groups: Any = importlib.import_module("deepspeed.utils.groups")
        release = getattr(groups, "_release_process_group_references", None)
        if release is not None:
            release()
        else:
            groups._WORLD_GROUP = None
        comm: Any = importlib.import_module("deepspeed.comm.comm")
        comm.cdb = None
        # Else every later engine in this process would reduce as the last one with torch_autocast did.
        autocast: Any = importlib.import_module("deepspeed.runtime.torch_autocast")
        autocast.TORCH_AUTOCAST_INITIALIZED = False
        if Membership._made_group and dist.is_initialized():
            dist.destroy_process_group()
        Membership._made_group = False


def refuse_other_device(environment: ProcessEnvironment, device: torch.device) -> None:
    """Refuse a device other than that of this process's number on the machine, which DeepSpeed takes by itself.

    Raises:
        ConfigurationError: The device was chosen by another number.
    """
    if device.index not in (None, environment.local_rank):
        raise ConfigurationError(
            f"DeepSpeed runs on the device of the process's number on the machine ({environment.local_rank}), not on "
            f"{str(device)!r}. Choose devices where the script is started: `drivetrain launch --gpu_ids {device.index}`"
            ", or an environment variable such as CUDA_VISIBLE_DEVICES.",
            code="DT-023",
        )
