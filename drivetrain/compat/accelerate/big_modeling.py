"""Models larger than a device, which are absent."""

from __future__ import annotations

from drivetrain.compat.accelerate.absent import BIG_MODELS, absent_names

__getattr__ = absent_names(
    __name__,
    (
        BIG_MODELS,
        [
            "attach_layerwise_casting_hooks",
            "cpu_offload",
            "cpu_offload_with_hook",
            "disk_offload",
            "dispatch_model",
            "init_empty_weights",
            "init_on_device",
            "load_checkpoint_and_dispatch",
        ],
    ),
)
