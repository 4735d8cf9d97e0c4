"""The package deepspeed: whether it is there, how it is imported, and how it joins the process group."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import warnings
from typing import Any

import torch.distributed as dist

from drivetrain.runtime.environment import ProcessEnvironment
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.strategies.deepspeed import ops


def require_deepspeed() -> None:
    """Raise where the package is not installed."""
    if importlib.util.find_spec("deepspeed") is None:
        raise ConfigurationError(
            "strategy='deepspeed' needs the package deepspeed, which is not installed. Install it: "
            "pip install 'drivetrain[deepspeed]' (torch first: another package may choose another build of it)."
        )


def import_deepspeed(kind: str) -> Any:
    """Import the package for a kind of device; it settles on one where it is first imported.

    Args:
        kind: the device's name, such as `"cuda"`.

    Returns:
        The module.

    Raises:
        ConfigurationError: it is not installed, or runs on another kind of device in this process already.
    """
    require_deepspeed()
    if "deepspeed" not in sys.modules:
        asked = os.environ.get("DS_ACCELERATOR")
        os.environ["DS_ACCELERATOR"] = (
            asked or kind
        )  # else it tries all kinds there are, and takes a GPU if it finds one
        try:
            importlib.import_module("deepspeed")
        finally:
            if asked is None:
                del os.environ["DS_ACCELERATOR"]
    # In every step, about what DeepSpeed calls and no user of it can change.
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    from deepspeed.accelerator import get_accelerator

    found = get_accelerator()._name
    if found != kind:
        raise ConfigurationError(
            f"This run is on {kind!r}, but deepspeed was imported for {found!r} in this process. Import it only after "
            f"the Trainer or Accelerator is made, or set DS_ACCELERATOR={kind}."
        )
    return importlib.import_module("deepspeed")


class Membership:
    """DeepSpeed's own idea of the process group, laid over the group that this process is in already.

    Args:
        environment: this process among its peers.
        kind: the kind of device.
        shared_memory: whether CPU tensors go through DeepSpeed's shared-memory operator; if None, where it is built.
    """

    def __init__(self, environment: ProcessEnvironment, kind: str, shared_memory: bool | None) -> None:
        self.package = import_deepspeed(kind)
        self._made_group = False
        # It asks for this even where it is told everything else, and would look for MPI.
        os.environ.setdefault("LOCAL_RANK", str(environment.local_rank))
        if not dist.is_initialized():
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group("gloo", store=store, rank=0, world_size=1)
            self._made_group = True
        if importlib.import_module("deepspeed.comm.comm").cdb is None:
            with ops.shared_memory(kind, shared_memory):
                self.package.init_distributed(auto_mpi_discovery=False, verbose=False)

    def leave(self) -> None:
        """Forget the process group, which is about to be destroyed."""
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
        if self._made_group and dist.is_initialized():
            dist.destroy_process_group()
            self._made_group = False
