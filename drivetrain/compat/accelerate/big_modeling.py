"""Models that are built without memory, and those larger than a device."""

from __future__ import annotations

from drivetrain.inference import attach_layerwise_casting_hooks as attach_layerwise_casting_hooks
from drivetrain.inference import cpu_offload as cpu_offload
from drivetrain.inference import cpu_offload_with_hook as cpu_offload_with_hook
from drivetrain.inference import disk_offload as disk_offload
from drivetrain.inference import dispatch_model as dispatch_model
from drivetrain.inference import init_empty_weights as init_empty_weights
from drivetrain.inference import init_on_device as init_on_device
from drivetrain.inference import load_checkpoint_and_dispatch as load_checkpoint_and_dispatch
