"""Accelerate's module paths and names, implemented with drivetrain. Scripts for Accelerate 1.15 run with it.

`import drivetrain.compat.accelerate as accelerate`, `drivetrain.compat.install("accelerate")` or
`drivetrain launch --as accelerate` replace the original by it. Names are resolved on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from drivetrain.compat.handed_on import import_module

__version__ = "1.15.0"

# public name -> the module that defines it
_HOME = {
    "Accelerator": "accelerator",
    "AutocastKwargs": "utils",
    "DDPCommunicationHookType": "utils",
    "DataLoaderConfiguration": "utils",
    "DeepSpeedPlugin": "utils",
    "DistributedDataParallelKwargs": "utils",
    "DistributedType": "utils",
    "FullyShardedDataParallelPlugin": "utils",
    "GradScalerKwargs": "utils",
    "InitProcessGroupKwargs": "utils",
    "ParallelismConfig": "parallelism_config",
    "PartialState": "state",
    "ProfileKwargs": "utils",
    "cpu_offload": "big_modeling",
    "cpu_offload_with_hook": "big_modeling",
    "debug_launcher": "launchers",
    "disk_offload": "big_modeling",
    "dispatch_model": "big_modeling",
    "find_executable_batch_size": "utils",
    "infer_auto_device_map": "utils",
    "init_empty_weights": "big_modeling",
    "init_on_device": "big_modeling",
    "is_rich_available": "utils",
    "load_checkpoint_and_dispatch": "big_modeling",
    "load_checkpoint_in_model": "utils",
    "notebook_launcher": "launchers",
    "prepare_pippy": "inference",
    "skip_first_batches": "data_loader",
    "synchronize_rng_states": "utils",
}
# Submodules that scripts use as attributes, such as `accelerate.utils.set_seed`, without importing them.
_SUBMODULES = (
    "accelerator",
    "big_modeling",
    "checkpointing",
    "commands",
    "data_loader",
    "hooks",
    "inference",
    "launchers",
    "local_sgd",
    "logging",
    "memory_utils",
    "optimizer",
    "parallelism_config",
    "scheduler",
    "state",
    "test_utils",
    "tracking",
    "utils",
)

__all__ = ["__version__", *sorted(_HOME)]


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return import_module(f"{__name__}.{name}")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, *_SUBMODULES})


if TYPE_CHECKING:
    from drivetrain.compat.accelerate.accelerator import Accelerator as Accelerator
    from drivetrain.compat.accelerate.data_loader import skip_first_batches as skip_first_batches
    from drivetrain.compat.accelerate.launchers import debug_launcher as debug_launcher
    from drivetrain.compat.accelerate.launchers import notebook_launcher as notebook_launcher
    from drivetrain.compat.accelerate.state import PartialState as PartialState
