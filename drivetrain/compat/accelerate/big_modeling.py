"""Models that are built without memory; those larger than a device are absent."""

from __future__ import annotations

from drivetrain.compat.accelerate.absent import BIG_MODELS, absent_names
from drivetrain.inference import attach_layerwise_casting_hooks as attach_layerwise_casting_hooks
from drivetrain.inference import cpu_offload_with_hook as cpu_offload_with_hook
from drivetrain.inference import init_empty_weights as init_empty_weights
from drivetrain.inference import init_on_device as init_on_device

__getattr__ = absent_names(
    __name__,
    (
        BIG_MODELS,
        [
            "cpu_offload",
            "disk_offload",
            "dispatch_model",
            "load_checkpoint_and_dispatch",
        ],
    ),
)
