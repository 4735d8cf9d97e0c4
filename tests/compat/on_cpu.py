"""Lets a script that is written for GPUs wrap its models in DDP on a CPU."""

from __future__ import annotations


def prepare() -> None:
    """Let torch's DDP ignore the devices that a script names."""
    import torch

    wrapped = torch.nn.parallel.DistributedDataParallel

    def without_devices(module, device_ids=None, output_device=None, **options):
        return wrapped(module, **options)

    torch.nn.parallel.DistributedDataParallel = without_devices
